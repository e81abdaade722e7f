"""The fused kernel with `joint` in Triton's interpreter, against the eager path: states, and weights that errors are fed back to.

`test_joint.py` runs this file in a process of its own, since Triton must see TRITON_INTERPRET=1 before it is imported.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashoptim_hf import _triton
from flashoptim_hf._triton import jit, tl
from flashoptim_hf.codecs import device
from flashoptim_hf.codecs.joint import FINE_ENTRIES, MOST, _lattice, lattice
from flashoptim_hf.optim.adamw import RULE, settle, settle_device
from tests.kernels.fused_interpreted import BF16, FP16, FP32, SIZES, Page, assert_same_weights, assert_untouched, both, page


@jit
def _lattices(entry_ptr, n_ptr, levels_ptr, step_ptr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    n, levels, step = _lattice(device.load(entry_ptr, 0, ROWS * 32, ROWS, 32))
    device.store(n_ptr, n, 0, ROWS * 32, ROWS, 32)
    device.store(levels_ptr, levels, 0, ROWS * 32, ROWS, 32)
    device.store(step_ptr, step, 0, ROWS * 32, ROWS, 32)


@jit
def _settle(m_ptr, v_ptr, lost_ptr, w_ptr, hyper_ptr, step_ptr, FUNCTION: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    hyper = ()
    for i in tl.static_range(0, 8):
        hyper = hyper + (tl.load(hyper_ptr + i),)  # type: ignore[assignment] # noqa: RUF005
    states = (device.load(m_ptr, 0, ROWS * 64, ROWS, 64), device.load(v_ptr, 0, ROWS * 64, ROWS, 64))
    lost = device.load(lost_ptr, 0, ROWS * 64, ROWS, 64)
    weight = FUNCTION(states, lost, device.load(w_ptr, 0, ROWS * 64, ROWS, 64), hyper, tl.load(step_ptr))
    device.store(w_ptr, weight, 0, ROWS * 64, ROWS, 64)


def words(p: Page) -> Tensor:
    return p.planes[1].int() * 256 + p.planes[0].int()


def assert_same_codes(fast: Page, slow: Page) -> None:
    """Constants of all groups but a few are equal, and there the codes are to one step, nearly all of them to none."""
    same = torch.ones(len(fast.planes[2]), dtype=torch.bool)
    for a, b in zip(fast.planes[2:5], slow.planes[2:5], strict=True):
        same &= a.view(torch.uint8).view(len(a), -1).eq(b.view(torch.uint8).view(len(b), -1)).all(1)
    assert same.float().mean() > 0.97
    n = lattice(fast.planes[3].float())[0].int().repeat_interleave(32)
    chosen = same.repeat_interleave(32)
    a, b, span = words(fast)[chosen], words(slow)[chosen], (2 * n + 1)[chosen]
    assert ((a == 0) == (b == 0)).all()
    code = a // span - b // span
    assert code.abs().max() <= 1
    assert (code != 0).float().mean() < 2e-3
    ucode = (a % span - b % span)[code == 0]
    assert ucode.abs().max() <= 1
    assert (ucode != 0).float().mean() < 5e-3


def assert_same_states(fast: Page, slow: Page) -> None:
    """The codes are, and where one differs, or a constant does, each is within its bound of the same moments."""
    assert_same_codes(fast, slow)
    total = len(words(fast))
    m, v = fast.fmt.codec.decode(fast.planes[:5], total)
    m_, v_ = slow.fmt.codec.decode(slow.planes[:5], total)
    known = (v > 0) & (v_ > 0)
    assert torch.equal(v > 0, v_ > 0)
    assert ((v[known].log2() - v_[known].log2()).abs() <= 2 * 0.12).all()
    umax = torch.maximum(fast.planes[4].float(), slow.planes[4].float()).repeat_interleave(32)
    assert ((m - m_).abs() <= 1.03 * umax / 43 * torch.maximum(v, v_).sqrt() + 1e-30).all()


def test_this_process_interprets() -> None:
    assert _triton.INTERPRET


def test_lattices_are_the_same_numbers() -> None:
    entries = torch.arange(256.0).repeat_interleave(32)
    made = [torch.empty(256 * 32) for _ in range(3)]
    _lattices[(1,)](entries, *made, ROWS=256)
    known = (entries <= MOST) | (entries >= FINE_ENTRIES)
    for mine, expected in zip(made, lattice(entries), strict=True):
        assert torch.equal(mine[known], expected[known])


@pytest.mark.parametrize("step", [1, 2, 30, 1000, 10**9])
@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9, 0.99])
def test_settle_equals_eager(step: int, beta1: float) -> None:
    generator = torch.Generator().manual_seed(step)
    v = torch.exp(4 * torch.randn(1024, generator=generator) - 20)
    m = v.sqrt() * torch.randn(1024, generator=generator)
    lost, weight = 0.02 * v.sqrt() * torch.randn(1024, generator=generator), torch.randn(1024, generator=generator)
    hyper = (1e-3, *RULE.scalars({"betas": (beta1, 0.999), "eps": 1e-8, "weight_decay": 0.01}, step))
    expected = settle((m, v), lost, weight, hyper, step)
    moved = weight.clone()
    _settle[(1,)](m, v, lost, moved, torch.tensor(hyper), torch.tensor(step), FUNCTION=settle_device, ROWS=16)
    assert torch.equal(expected, weight) == (beta1 == 0)
    torch.testing.assert_close(moved - weight, expected - weight, rtol=1e-3, atol=2.5e-7)


@pytest.mark.parametrize(("dtype", "bits", "grad"), [(BF16, 24, BF16), (BF16, 0, FP32), (FP16, 32, FP16), (FP32, 0, FP32)])
@pytest.mark.parametrize("dither", [True, False], ids=["dither", "nearest"])
def test_joint_equals_eager(dtype: torch.dtype, bits: int, grad: torch.dtype, dither: bool) -> None:
    start = page(dtype=dtype, bits=bits, grad=grad, dither=dither, codec="joint")
    fast, slow = both(start)
    assert_same_states(fast, slow)
    assert_untouched(start, fast)
    # an error that lies on the other side of a tie sends the weight to the other side of where m leads; all but a few go alike
    pairs = zip(fast.params, slow.params, start.params, strict=True)
    apart = torch.cat([(a.float() - b.float()).abs() / (b.float() - c.float()).abs().clamp_min(1e-6) for a, b, c in pairs])
    assert (apart > 0.05).float().mean() < 0.01


@pytest.mark.parametrize("dither", [True, False], ids=["dither", "nearest"])
def test_groups_with_large_momenta_equal_eager(dither: bool) -> None:
    """Half of the groups, at late steps: they change to the finer codes of u, and back when u is small again."""
    start = page(dtype=FP32, bits=0, dither=dither, codec="joint")
    for segment in start.segments:
        segment.step += 5000
    start.planes[4][::2], start.planes[4][1::2] = 8.0, 0.1
    fast, slow = both(start)
    assert (slow.planes[3][::2] >= FINE_ENTRIES).float().mean() > 0.3
    assert not (slow.planes[3][1::2] >= FINE_ENTRIES).any()
    assert_same_states(fast, slow)
    again, _ = both(fast)
    _, slow = both(fast)
    assert_same_states(again, slow)


def test_weights_are_the_eager_ones_where_nothing_is_fed_back() -> None:
    """The control: without `settle` on both sides, weights are right to 1e-5; with it on one, they are not."""
    start = page(SIZES, dtype=FP32, bits=0, codec="joint")
    _, settled = both(start)
    start.fmt = replace(start.fmt, rule=replace(RULE, settle=None, device_settle=None))
    fast, slow = both(start)
    assert_same_weights(fast, slow, start)
    with pytest.raises(AssertionError):
        assert_same_weights(fast, settled, start)


def test_extremes_stay_finite() -> None:
    """Groups from subnormal to 1e38, of one magnitude, over 60 octaves, and empty; the step after also decodes what was written."""
    start = page((32 * 8,), dtype=FP32, bits=0, warm=0, codec="joint")
    for scale in (1e-30, 1e-12, 1.0, 1e9, 1e18):
        (s,) = start.segments
        grad = torch.randn(256, generator=torch.Generator().manual_seed(1)) * scale
        grad[32:64] = scale
        grad[64:96] *= torch.exp2(torch.linspace(-60, 0, 32))
        grad[96:128] = 0
        s.grad = grad
        fast, slow = both(start)
        for made in (fast, slow):
            assert all(x.isfinite().all() for x in made.fmt.codec.decode(made.planes, len(made.planes[0])))
            assert all(p.isfinite().all() for p in made.params)
        m, v = fast.fmt.codec.decode(fast.planes, len(fast.planes[0]))
        assert not m[s.start + 96 : s.start + 128].any()
        assert not v[s.start + 96 : s.start + 128].any()
        truth = grad.double() ** 2 * 1e-3
        near = (truth > truth[64:96].max() * 2.0**-46) & (truth > 1e-37)  # below, v is subnormal
        got = v[s.start : s.start + 256].double()
        assert near.sum() > 150 or scale < 1e-15
        assert ((got[near] / truth[near]).log2().abs() <= 2 * 0.034).all()
