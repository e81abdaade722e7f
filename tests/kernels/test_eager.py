"""The eager path: one step of AdamW over a page, for every codec, against AdamW in fp64.

What is said here of one page holds for every optimizer and placement that uses it.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashoptim_hf.codecs.base import ALIGN
from flashoptim_hf.codecs.weight_split import CORRECTION_DTYPE, split
from flashoptim_hf.kernels import eager
from flashoptim_hf.kernels.rule import Segment
from flashoptim_hf.optim.adamw import RULE

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CODECS = ["none", "softsign", "log", "joint"]
OPTIONS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- exactness of the uncompressed path


@pytest.mark.parametrize(("dtype", "master_bits"), [*((dtype, bits) for dtype in (BF16, FP16) for bits in (0, 24, 32)), (FP32, 0)])
def test_uncompressed_state_is_fp32(Page: type, Reference: type, dtype: torch.dtype, master_bits: int) -> None:
    """State of a bf16 parameter equals fp64's to fp32 rounding, and does not pass through bf16 on the way: its low bits are in use."""
    start = random(1000).to(dtype)
    page, reference = Page([start], "none", master_bits), Reference(start)
    for t in range(50):
        grad = random(1000, seed=t + 1).to(dtype)
        page.step([grad])
        reference.step(grad)
    m, v = page.state()
    torch.testing.assert_close(m.double(), reference.m, rtol=1e-6, atol=3e-7)
    torch.testing.assert_close(v.double(), reference.v, rtol=1e-5, atol=0)
    for state in (m, v):
        assert (state.view(torch.int32) & 0xFFFF != 0).float().mean() > 0.99
    if dtype == FP32:
        torch.testing.assert_close(page.params[0].double(), reference.w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("grad_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_dtype_pairs(Page: type, dtype: torch.dtype, grad_dtype: torch.dtype, codec: str) -> None:
    """Each pair gives the bits of the same numbers in fp32: states exactly, weights to their own rounding."""
    start, grads = random(300).to(dtype), [(random(300, seed=t + 1) * 1e-2).to(grad_dtype) for t in range(5)]
    plain, page = Page([start.float()], codec), Page([start], codec)
    for bits in () if dtype == FP32 else (24, 32):
        split_page = Page([start], codec, bits)
        for g in grads:
            split_page.step([g])
        page_bound = {24: 1 / 254, 32: 2.0**-15}[bits] * torch.finfo(dtype).eps * 1.01
        fp32 = Page([start.float()], codec)
        for g in grads:
            fp32.step([g.float()])
        assert all(torch.equal(a, b) for a, b in zip(split_page.planes[:-1], fp32.planes, strict=True))
        torch.testing.assert_close(split_page.master(), fp32.params[0], rtol=page_bound * len(grads), atol=1e-8)
        assert torch.equal(split_page.params[0], split_page.master().to(dtype))
    for g in grads:
        plain.step([g.float()])
        page.step([g])
        assert all(torch.equal(a, b) for a, b in zip(plain.planes, page.planes, strict=True))
        if dtype == FP32:
            assert torch.equal(plain.params[0], page.params[0])
    assert page.params[0].dtype == dtype


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_without_correction_the_weight_is_the_rounded_result(Page: type, dtype: torch.dtype) -> None:
    start, grad = random(300).to(dtype), random(300, seed=1)
    page, fp32 = Page([start], "none"), Page([start.float()], "none")
    page.step([grad])
    fp32.step([grad])
    assert torch.equal(page.params[0], fp32.params[0].to(dtype))


def test_hyper_parameters_match_fp64(Page: type, Reference: type) -> None:
    """Weight decay, betas, eps and a learning rate that changes, all away from their defaults."""
    options = {"betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.2}
    start = random(200)
    page, reference = Page([start], "none"), Reference(start)
    for t in range(20):
        lr, grad = 1e-2 / (t + 1), random(200, seed=t + 1) * 1e-2
        page.step([grad], lr if t % 2 else torch.tensor(lr), options)
        reference.step(grad, lr, **options)
    torch.testing.assert_close(page.params[0].double(), reference.w, rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------- cutting and neighbours


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000])
def test_chunks_do_not_show(Page: type, monkeypatch: pytest.MonkeyPatch, codec: str, numel: int) -> None:
    """Sizes around the borders of chunks of 128 elements, against one chunk: the same bits."""
    assert eager.CHUNK % ALIGN == 0
    start = random(numel).to(BF16)
    whole, cut = Page([start], codec, 24), Page([start], codec, 24)
    for t in range(3):
        grad = random(numel, seed=t + 1) * 1e-2
        whole.step([grad])
        with monkeypatch.context() as patch:
            patch.setattr(eager, "CHUNK", 128)
            cut.step([grad])
    assert all(torch.equal(a, b) for a, b in zip(whole.bits(), cut.bits(), strict=True))


@pytest.mark.parametrize("codec", CODECS)
def test_segments_do_not_touch_each_other(Page: type, codec: str) -> None:
    """Parameters of mixed sizes in one page step as each would alone, and what lies between them keeps every bit."""
    sizes = [1, 64, 100, 130, 5]
    params = [random(n, seed=n).to(BF16) for n in sizes]
    page = Page(params, codec, 24)
    for plane in page.planes:
        plane.fill_(77)
    for i, n in enumerate(sizes):
        for plane, spec in zip(page.planes, [*page.fmt.codec.planes, None], strict=True):
            group = spec.group if spec else 1
            plane[page.starts[i] // group : -(-(page.starts[i] + n) // group)] = 0
    alone = [Page([p], codec, 24) for p in params]
    for t in range(3):
        grads = [random(n, seed=100 * t + n) for n in sizes]
        page.step(grads)
        for single, grad in zip(alone, grads, strict=True):
            single.step([grad])
    used = [torch.zeros(len(plane), dtype=torch.bool) for plane in page.planes]
    for i, n in enumerate(sizes):
        assert torch.equal(page.params[i], alone[i].params[0])
        assert all(torch.equal(a, b) for a, b in zip(page.state(i), alone[i].state(), strict=True))
        assert torch.equal(page.master(i), alone[i].master())
        for mask, spec in zip(used, [*page.fmt.codec.planes, None], strict=True):
            group = spec.group if spec else 1
            mask[page.starts[i] // group : -(-(page.starts[i] + n) // group)] = True
    for plane, mask in zip(page.planes, used, strict=True):
        assert (plane[~mask] == 77).all()


@pytest.mark.parametrize("codec", CODECS)
def test_a_parameter_over_several_pages_steps_as_in_one(Page: type, codec: str) -> None:
    """The second page's segment begins at index 128 of the parameter, and at another place of its page."""
    start, whole = random(300).to(BF16), Page([random(300).to(BF16)], codec, 24)
    first, second = Page([start[:128]], codec, 24), Page([random(70), start[128:]], codec, 24)
    for t in range(3):
        grad = random(300, seed=t + 1)
        whole.step([grad])
        first.step([grad[:128]])
        second.time += 1
        hyper = (1e-3, *RULE.scalars(OPTIONS, second.time))
        segment = Segment(second.params[1], grad[128:], second.starts[1], index=128, step=second.time, hyper=hyper)
        eager.update_page(second.planes, [segment], second.fmt)
    assert torch.equal(torch.cat((first.params[0], second.params[1])), whole.params[0])
    for a, b, c in zip(first.state(), second.state(1), whole.state(), strict=True):
        assert torch.equal(torch.cat((a, b)), c)


def test_the_gradient_is_only_read(Page: type) -> None:
    grad = random(200)
    kept = grad.clone()
    Page([random(200)]).step([grad], inv_scale=torch.tensor(0.5))
    assert torch.equal(grad, kept)


# ---------------------------------------------------------------- scaling and skipping


@pytest.mark.parametrize("grad_dtype", [BF16, FP16, FP32])
def test_inv_scale_multiplies_the_gradient_in_fp32(Page: type, grad_dtype: torch.dtype) -> None:
    """1/3 is exact in no dtype: multiplying in bf16 would show."""
    grad, inverse = random(300).to(grad_dtype), torch.tensor(1 / 3)
    scaled, plain = Page([random(300)]), Page([random(300)])
    scaled.step([grad], inv_scale=inverse)
    plain.step([grad.float() * inverse])
    assert all(torch.equal(a, b) for a, b in zip(scaled.bits(), plain.bits(), strict=True))


def test_scaled_fp16_gradients_do_not_underflow(Page: type) -> None:
    """A gradient of 1e-6 times 2^16 is a normal fp16 number; unscaled in fp16 it would lose its low bits."""
    grad = random(300) * 1e-7
    page, reference = Page([torch.zeros(300)], "none"), Page([torch.zeros(300)], "none")
    page.step([(grad * 2.0**16).half()], inv_scale=torch.tensor(2.0**-16))
    reference.step([grad])
    torch.testing.assert_close(page.state()[0], reference.state()[0], rtol=2.0**-10, atol=0)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("skip", [torch.tensor(1.0), torch.tensor(True), torch.tensor(2.0)])
def test_skip_leaves_every_bit(Page: type, codec: str, skip: Tensor) -> None:
    page = Page([random(300).to(BF16)], codec, 24)
    page.step([random(300, seed=1)])
    kept = page.bits()
    page.step([torch.full((300,), math.nan)], skip=skip)
    assert all(torch.equal(a, b) for a, b in zip(page.bits(), kept, strict=True))


def test_skip_of_zero_steps(Page: type) -> None:
    page, plain = Page([random(300)]), Page([random(300)])
    page.step([random(300, seed=1)], skip=torch.tensor(0.0))
    plain.step([random(300, seed=1)])
    assert all(torch.equal(a, b) for a, b in zip(page.bits(), plain.bits(), strict=True))


# ---------------------------------------------------------------- master weights


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("bits", [24, 32])
def test_a_step_of_size_zero_keeps_every_weight(Page: type, dtype: torch.dtype, bits: int) -> None:
    """All finite weights beside all sorts of corrections: the weight a user wrote in stays, and so does the master weight."""
    weights = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    weights = weights[weights.isfinite() & (weights != 0)]
    page = Page([weights], "none", bits)
    info = torch.iinfo(CORRECTION_DTYPE[bits])
    generator = torch.Generator().manual_seed(0)
    page.planes[-1].random_(info.min, info.max + 1, generator=generator)
    master = page.master()
    page.step([torch.randn(len(weights), generator=generator)], lr=0.0)
    assert torch.equal(page.params[0].view(torch.int16), weights.view(torch.int16))
    assert torch.equal(page.master(), master)


@pytest.mark.parametrize(("bits", "lr"), [(24, 1e-4), (32, 1e-5)])
def test_low_bits_of_the_weight_carry_on(Page: type, Reference: type, bits: int, lr: float) -> None:
    """Steps that bf16 weights of 1 would swallow: the master weight moves, and a resumed run has the same bits."""
    start = torch.full((100,), 1.0, dtype=BF16)
    grads = [random(100, seed=t).abs() for t in range(20)]
    bare, page, reference = Page([start], "log"), Page([start], "log", bits), Reference(start)
    resumed = Page([start], "log", bits)
    for t, grad in enumerate(grads):
        for each in (bare, page):
            each.step([grad], lr=lr)
        reference.step(grad, lr=lr)
        if t > 9:
            resumed.step([grad], lr=lr)
        if t == 9:
            resumed.params = [p.clone() for p in page.params]
            resumed.planes = [p.clone() for p in page.planes]
            resumed.time = page.time
    assert torch.equal(bare.params[0], start)
    assert reference.error(page.master()) < 0.15
    assert all(torch.equal(a, b) for a, b in zip(page.bits(), resumed.bits(), strict=True))
    # the control: without the corrections the weight is another
    page.planes[-1].zero_()
    assert reference.error(page.master()) > 0.5


def test_a_24_bit_master_swallows_what_is_below_its_half_unit(Page: type) -> None:
    """The documented limit: at weights from 1 to 2 the unit is 2^-7 / 254 = 3.1e-5, so steps of 1e-5 need 32 bits."""
    start = torch.full((10,), 1.5, dtype=BF16)
    pages = {bits: Page([start], "none", bits) for bits in (24, 32)}
    for page in pages.values():
        for _ in range(50):
            page.step([torch.ones(10)], lr=1e-5)
    assert torch.equal(pages[24].master(), start.float())
    torch.testing.assert_close(pages[32].master(), torch.full((10,), 1.5 - 50e-5), rtol=0, atol=1e-5)


def test_split_and_join_are_what_the_kernel_uses(Page: type) -> None:
    """One step by hand."""
    start, grad = random(100).to(BF16), random(100, seed=1)
    page = Page([start], "none", 24)
    page.step([grad])
    hyper = (1e-3, *RULE.scalars(OPTIONS, 1))
    _, weight = RULE.eager((torch.zeros(100), torch.zeros(100)), start.float(), grad, hyper)
    p, c = split(weight, BF16, 24)
    assert torch.equal(page.params[0], p)
    assert torch.equal(page.planes[-1][page.starts[0] : page.starts[0] + 100], c)
