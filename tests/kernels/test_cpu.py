"""The compiled CPU path against the eager one, for each instruction set that this processor has."""

from __future__ import annotations

import ctypes
import warnings

import numpy as np
import pytest
import torch

from flashoptim_hf.codecs import weight_split
from flashoptim_hf.codecs.base import get_codec
from flashoptim_hf.errors import UnsupportedError
from flashoptim_hf.kernels import cpu, eager, select
from flashoptim_hf.kernels.rule import Format, Segment
from flashoptim_hf.optim.adamw import RULE

LIBRARY = cpu.library()
ISAS = range(LIBRARY.flashoptim_isa() + 1) if LIBRARY else []
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the compiled library was not built: no C compiler")

SIZES = [1, 31, 63, 64, 65, 1000, 4096 + 1]


class Page:
    """A page of segments of the given sizes with room between them, and the buffers that one step changes."""

    def __init__(self, fmt: Format, dtype: torch.dtype, grad_dtype: torch.dtype, scale: float = 1e-2) -> None:
        generator = torch.Generator().manual_seed(0)
        self.fmt = fmt
        starts, total = [], 0
        for size in SIZES:
            starts.append(total)
            total += -(-size // 64) * 64 + 64  # 64 elements that belong to nobody
        self.planes = [torch.zeros(plane.entries(total), dtype=plane.dtype) for plane in fmt.codec.planes]
        if fmt.master_bits:
            self.planes.append(torch.zeros(total, dtype=weight_split.CORRECTION_DTYPE[fmt.master_bits]))
        self.params = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
        self.grad_dtype, self.scale = grad_dtype, scale
        self.starts, self.step = starts, 0

    def segments(self) -> list[Segment]:
        self.step += 1
        generator = torch.Generator().manual_seed(self.step)
        hyper = (1e-3, *RULE.scalars({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, self.step))
        made = []
        for param, start in zip(self.params, self.starts, strict=True):
            spread = torch.exp2(torch.linspace(-6, 3, param.numel()))
            grad = (torch.randn(param.numel(), generator=generator) * spread * self.scale).to(self.grad_dtype)
            made.append(Segment(param, grad, start=start, index=128, step=self.step, hyper=hyper))
        return made

    def copy_from(self, other: Page) -> None:
        for mine, theirs in zip(self.planes + self.params, other.planes + other.params, strict=True):
            mine.copy_(theirs)


def fmt(bits: int = 0, dither: bool = True) -> Format:
    return Format(RULE, get_codec("log", RULE.states, dither), bits)


CASES = [
    (torch.float32, 0),
    *((torch.bfloat16, bits) for bits in (0, 24, 32)),
    *((torch.float16, bits) for bits in (0, 24, 32)),
]


VARIANTS = [(torch.float32, True), (torch.bfloat16, True), (torch.float16, True), (torch.bfloat16, False)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("grad_dtype", "dither"), VARIANTS)
@pytest.mark.parametrize(("dtype", "bits"), CASES)
def test_equals_eager(isa, dither, grad_dtype, dtype, bits):
    """From the same state, each step gives the same weights to fp32 rounding and the same codes but for rare neighbours."""
    ours, theirs = (Page(fmt(bits, dither), dtype, grad_dtype) for _ in range(2))
    differing = total = 0
    for _ in range(2):
        ours.copy_from(theirs)
        cpu.update_page(ours.planes, ours.segments(), ours.fmt, isa=isa)
        eager.update_page(theirs.planes, theirs.segments(), theirs.fmt)
        # where a group's constant fell on the other side of a rounding boundary, its codes count in another unit
        same = torch.stack([a == b for a, b in zip(ours.planes[2:5], theirs.planes[2:5], strict=True)]).all(0).repeat_interleave(64)
        assert same.float().mean() > 0.95
        for mine, reference in zip(ours.planes[:2], theirs.planes[:2], strict=True):
            difference = (mine.int() - reference.int()).abs()
            assert difference[same].max() <= 1
            assert difference.max() <= 2
            differing += int(difference.sum())
            total += difference.numel()
        torch.testing.assert_close(ours.planes[2], theirs.planes[2], rtol=0, atol=2.0**-16)
        torch.testing.assert_close(ours.planes[3], theirs.planes[3], rtol=0, atol=2.0**-22)
        torch.testing.assert_close(ours.planes[4], theirs.planes[4], rtol=2.0**-7, atol=0)
        for p, q, start in zip(ours.params, theirs.params, ours.starts, strict=True):
            if bits:
                cut = slice(start, start + p.numel())
                p, q = weight_split.join(p, ours.planes[5][cut]), weight_split.join(q, theirs.planes[5][cut])
                # one unit of the correction, where the new master lies between two
                ulp = torch.finfo(dtype).eps * q.abs() / (254 if bits == 24 else 65534) + 2.0**-24 / 127
                assert ((p - q).abs() <= ulp * 1.01 + 4e-7 * q.abs() + 2e-9).all()
            else:
                torch.testing.assert_close(p, q, rtol=4e-7 if dtype == torch.float32 else torch.finfo(dtype).eps, atol=2e-9)
    assert differing / total < 2e-3


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [24, 32])
def test_every_weight_survives_a_zero_step(isa, dtype, bits):
    """All 2^16 weights, finite or not, with every correction (int8) or a spread of them (int16): nothing moves at lr 0."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    normal = every.float().abs() > 1e-30 if dtype == torch.bfloat16 else every == every  # below, bf16 carries no correction here
    limit = 127 if bits == 24 else 32767
    form = fmt(bits)
    for value in {-limit, limit, 1, 0, -1, limit // 2, -limit // 3, limit - 1, 64, -63}:
        p = every.clone()
        planes = [torch.zeros(plane.entries(p.numel()), dtype=plane.dtype) for plane in form.codec.planes]
        c = torch.full((p.numel(),), value, dtype=weight_split.CORRECTION_DTYPE[bits])
        expected_p, expected_c = weight_split.split(weight_split.join(p, c), dtype, bits)
        hyper = (0.0, *RULE.scalars({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}, 1))
        segment = Segment(p, torch.zeros(p.numel(), dtype=dtype), start=0, index=0, step=1, hyper=hyper)
        cpu.update_page([*planes, c], [segment], form, isa=isa)
        same = torch.isfinite(every)
        assert torch.equal(p[same], every[same])
        assert torch.equal(torch.isnan(p), torch.isnan(every))
        assert torch.equal(p[same], expected_p[same])
        assert torch.equal(c[same & normal], expected_c[same & normal])


def assert_only_segments_change(fmt: Format, isa: int, kind: type[Page] = Page) -> None:
    """A step of a page changes every segment in every plane, and nothing between two segments."""
    page = kind(fmt, torch.bfloat16, torch.bfloat16)
    for plane in page.planes:
        plane.view(torch.uint8).fill_(7)
    before = [plane.clone() for plane in page.planes]
    cpu.update_page(page.planes, page.segments(), page.fmt, isa=isa)
    for plane, old in zip(page.planes, before, strict=True):
        width = page.planes[0].numel() // plane.numel()
        for start, size in zip(page.starts, SIZES, strict=True):
            end = -(-(start + size) // width)
            assert not torch.equal(plane[start // width : end], old[start // width : end])
            gap = slice(end, (start + -(-size // 64) * 64 + 64) // width)
            assert torch.equal(plane[gap], old[gap])


@pytest.mark.parametrize("isa", ISAS)
def test_only_the_segments_are_touched(isa):
    assert_only_segments_change(fmt(24), isa)


def assert_threads_change_no_bits(fmt: Format, isa: int, kind: type[Page] = Page) -> None:
    """Three steps of a page, with one, two and five threads."""
    results = []
    for threads in (1, 2, 5):
        page = kind(fmt, torch.bfloat16, torch.float32)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for _ in range(3):
                cpu.update_page(page.planes, page.segments(), page.fmt, isa=isa)
        finally:
            torch.set_num_threads(before)
        results.append(page)
    for other in results[1:]:
        for a, b in zip(results[0].planes + results[0].params, other.planes + other.params, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("isa", ISAS)
def test_threads_do_not_change_bits(isa):
    assert_threads_change_no_bits(fmt(24), isa)


def test_scale_and_skip():
    a, b = (Page(fmt(), torch.float32, torch.float32) for _ in range(2))
    cpu.update_page(a.planes, a.segments(), a.fmt, inv_scale=torch.tensor(0.25))
    eager.update_page(b.planes, b.segments(), b.fmt, inv_scale=torch.tensor(0.25))
    for p, q in zip(a.params, b.params, strict=True):
        torch.testing.assert_close(p, q, rtol=4e-7, atol=2e-9)
    before = [x.clone() for x in a.planes + a.params]
    cpu.update_page(a.planes, a.segments(), a.fmt, skip=torch.tensor(1.0))
    assert all(torch.equal(x, y) for x, y in zip(a.planes + a.params, before, strict=True))
    cpu.update_page(a.planes, [], a.fmt)


def call(name: str, x: np.ndarray, isa: int) -> np.ndarray:
    y = np.empty_like(x)
    getattr(LIBRARY, name)(x.ctypes.data, y.ctypes.data, x.size, isa)
    return y


@pytest.mark.parametrize("isa", ISAS)
def test_log2_error_bound(isa):
    """|error| <= 2e-7 beside the rounding of the result: all mantissas of one exponent, and every exponent, subnormal ones too."""
    mantissas = (np.arange(2**23, dtype=np.uint32) + np.uint32(127 << 23)).view(np.float32)
    assert np.abs(call("flashoptim_log2", mantissas, isa) - np.log2(mantissas.astype(np.float64))).max() < 2e-7 + 2**-25
    wide = np.exp2(np.random.default_rng(0).uniform(-149, 127.9, 1 << 16)).astype(np.float32)
    exact = np.log2(wide.astype(np.float64))
    assert (np.abs(call("flashoptim_log2", wide, isa) - exact) <= 2e-7 + np.spacing(np.abs(exact).astype(np.float32))).all()


@pytest.mark.parametrize("isa", ISAS)
def test_exp2_error_bound(isa):
    x = np.random.default_rng(0).uniform(-126, 127.4, 1 << 20).astype(np.float32)
    y = call("flashoptim_exp2", x, isa)
    assert np.abs(y / np.exp2(x.astype(np.float64)) - 1).max() <= 4e-7
    edges = np.array([0, 1, -1, 10, -126, -127, -200, -1000] * 2, dtype=np.float32)
    assert call("flashoptim_exp2", edges, isa)[:8] == pytest.approx([1, 2, 0.5, 1024, 2.0**-126, 0, 0, 0], rel=4e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.999), 1e-8), ((0.9, 0.999), 0.0), ((0.0, 0.5), 1e-8)])
@pytest.mark.parametrize("kind", ["zeros", "sparse", "wide", "tiny", "huge"])
def test_unusual_gradients_equal_eager(kind, betas, eps, isa):
    """Groups with zeros, with more octaves than a group can hold, with very small and with very large second moments."""
    n = 16 * 64 + 17
    form = fmt()
    ours, theirs = ([torch.zeros(plane.entries(n), dtype=plane.dtype) for plane in form.codec.planes] for _ in range(2))
    p, q = torch.linspace(-2, 2, n), torch.linspace(-2, 2, n)
    generator = torch.Generator().manual_seed(1)
    for step in (1, 2, 3):
        noise = torch.randn(n, generator=generator)
        grad = {
            "zeros": torch.zeros(n),
            "sparse": noise * (torch.rand(n, generator=generator) < 0.1),
            "wide": noise * torch.exp2(torch.linspace(-45, 20, n)[torch.randperm(n, generator=generator)]),
            "tiny": noise * 1e-17,
            "huge": noise.sign() * 2.0**61,
        }[kind]
        hyper = (1e-3, *RULE.scalars({"betas": betas, "eps": eps, "weight_decay": 0.1}, step))
        for mine, reference in zip(ours, theirs, strict=True):
            mine.copy_(reference)
        p.copy_(q)
        cpu.update_page(ours, [Segment(p, grad, start=0, index=0, step=step, hyper=hyper)], form, isa=isa)
        eager.update_page(theirs, [Segment(q, grad, start=0, index=0, step=step, hyper=hyper)], form)
        assert all(bool(torch.isfinite(plane.float()).all()) for plane in ours)
        torch.testing.assert_close(ours[2], theirs[2], rtol=0, atol=2.0**-16)
        torch.testing.assert_close(ours[3], theirs[3], rtol=0, atol=2.0**-22)
        torch.testing.assert_close(ours[4], theirs[4], rtol=2.0**-7, atol=0)
        assert torch.equal(ours[1] == 0, theirs[1] == 0)
        off_m, off_v = ((mine.int() - reference.int()).abs() for mine, reference in zip(ours[:2], theirs[:2], strict=True))
        assert off_v.max() <= 1
        assert off_v.float().mean() < 1e-2
        # a code of v to the other side moves what m is divided by, by up to 7 %, and then maybe the constant of its group
        assert off_m.max() <= 9
        assert off_m[off_v == 0].max() <= 2
        groups = torch.arange(n) // 64
        alike = ~torch.isin(groups, groups[off_v > 0])
        assert off_m[alike].float().mean() < 2e-2
        # a move of lr per step at most, so that this is the fp32 rounding of the update as a whole
        torch.testing.assert_close(p, q, rtol=4e-7, atol=2e-8)


EVERY_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def corrections(bits: int) -> list[int]:
    """Every correction of 8 bits; of 16 bits those around 0, the limits, and where rounding changes, and some between."""
    if bits == 24:
        return list(range(-128, 128))
    edges = [0, 64, 8191, 8192, 16383, 16384, 16385, 32766, 32767]
    return sorted(
        {sign * (edge + near) for edge in edges for near in (-1, 0, 1) for sign in (1, -1) if edge + near <= 32767} | {-32768, 12345}
    )


def joined(p: torch.Tensor, c: torch.Tensor, bits: int, isa: int) -> torch.Tensor:
    w = torch.empty(p.shape)
    LIBRARY.flashoptim_join(p.data_ptr(), c.data_ptr(), w.data_ptr(), p.numel(), bits, isa)
    return w


def split(w: torch.Tensor, bits: int, isa: int) -> tuple[torch.Tensor, torch.Tensor]:
    p, c = torch.empty(w.shape, dtype=torch.bfloat16), torch.empty(w.shape, dtype=weight_split.CORRECTION_DTYPE[bits])
    LIBRARY.flashoptim_split(w.data_ptr(), p.data_ptr(), c.data_ptr(), w.numel(), bits, isa)
    return p, c


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [24, 32])
def test_every_weight_with_every_correction_joins_as_eager_and_splits_into_the_same(bits, isa):
    # below 2^-118 weights may carry no correction here, and the eager product with a 16-bit correction underflows from 2^-109 on
    p, carries = EVERY_BF16, EVERY_BF16.float().abs() >= 2.0**-100
    finite, dtype = torch.isfinite(p), weight_split.CORRECTION_DTYPE[bits]
    for value in corrections(bits):
        c = torch.full(p.shape, value, dtype=dtype)
        w, expected = joined(p, c, bits, isa), weight_split.join(p, c.clamp_min(-torch.iinfo(dtype).max))
        assert torch.equal(w[finite & carries].view(torch.int32), expected[finite & carries].view(torch.int32))
        assert torch.equal(w[~finite].isnan(), p[~finite].isnan())
        assert torch.equal(w[torch.isinf(p)], p[torch.isinf(p)].float())
        again, corrected = split(w, bits, isa)
        assert torch.equal(again[finite].view(torch.int16), p[finite].view(torch.int16))
        assert torch.equal(again.isnan(), p.isnan())
        # what was joined comes back, or what the limits made of it
        twice = joined(again, corrected, bits, isa)
        assert torch.equal(twice[finite].view(torch.int32), w[finite].view(torch.int32))
        assert torch.equal(corrected[finite & carries], weight_split.split(w, torch.bfloat16, bits)[1][finite & carries])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [24, 32])
def test_every_distance_from_a_weight_splits_as_eager(bits, isa):
    """All 2^16 masters around even, odd and power-of-two weights of both signs, and a spread of exponents."""
    low = torch.arange(2**16, dtype=torch.int32) - 2**15
    for pattern in (0x3F80, 0x3F81, 0x3FFF, 0x4000, 0x40AB, 0x0C00, 0x0C01, 0x7E80, 0x7F00):
        for sign in (0, -(2**31)):
            w = (low + (pattern << 16) + sign).view(torch.float32)
            p, c = split(w, bits, isa)
            expected_p, expected_c = weight_split.split(w, torch.bfloat16, bits)
            assert torch.equal(p.view(torch.int16), expected_p.view(torch.int16))
            # below a power of two half a step is lost before the product, so that a correction next to a boundary may be the neighbour
            off = (c.int() - expected_c.int()).abs()
            assert off.max() <= 1
            assert (off > 0).sum() <= (130 if pattern & 0x7F == 0 and bits == 24 else 1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7FFF8001, 0x7F800001, -1, -(2**23) + 1])
def test_no_nan_becomes_a_number(pattern, isa):
    """Also where rounding the payload would carry into the sign."""
    for dtype, bits in ((torch.bfloat16, 24), (torch.bfloat16, 0), (torch.float32, 0)):
        p = torch.ones(256, dtype=dtype)
        grad = torch.full((256,), pattern, dtype=torch.int32).view(torch.float32)
        form = fmt(bits)
        planes = [torch.zeros(plane.entries(256), dtype=plane.dtype) for plane in form.codec.planes] + [torch.zeros(256, dtype=torch.int8)]
        hyper = (1e-3, *RULE.scalars({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}, 1))
        cpu.update_page(planes if bits else planes[:-1], [Segment(p, grad, start=0, index=0, step=1, hyper=hyper)], form, isa=isa)
        assert p.isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_too_large_sees_every_bad_element_and_no_other(dtype, isa):
    nan, inf = float("nan"), float("inf")
    largest = 65504.0 if dtype == torch.float16 else 2.0**62 * (1 - torch.finfo(dtype).eps / 2)
    good = [torch.full((n,), sign * largest, dtype=dtype) for n, sign in ((1, 1), (1000, -1), (131072 + 7, 1), (0, 1))]
    assert not cpu.too_large(good, isa=isa)
    assert not cpu.too_large([torch.zeros(0, dtype=dtype)], isa=isa)
    bad = [nan, -nan, inf, -inf] + ([] if dtype == torch.float16 else [2.0**62, -(2.0**62), 1e30])
    for which, place in ((0, 0), (1, 0), (1, 517), (1, 999), (2, 131071), (2, 131072), (2, 131078)):
        for value in bad:
            old = good[which][place].clone()
            good[which][place] = value
            assert cpu.too_large(good, isa=isa)
            good[which][place] = old
    assert not cpu.too_large(good, isa=isa)


def test_can_look_at():
    assert cpu.can_look_at(torch.ones(3))
    assert not cpu.can_look_at(torch.ones(3, dtype=torch.float64))
    assert not cpu.can_look_at(torch.ones(4, 4)[:, 1])
    assert not cpu.can_look_at(torch.ones(3, device="meta"))


def test_asked_for_by_name():
    """By name it serves what it has and refuses the rest; "auto" takes the eager path for the rest."""
    none = Format(RULE, get_codec("none", RULE.states), 0)
    with pytest.raises(UnsupportedError, match="codec='none'"):
        cpu.update_page([], [], none)
    with pytest.raises(UnsupportedError, match="on the CPU"):
        select.kernel_for(torch.device("cuda", 0), "cpu")
    w = torch.ones(10)
    planes = [torch.zeros(10), torch.zeros(10)]
    hyper = (1e-3, *RULE.scalars({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}, 1))
    cpu.say_eager.cache_clear()
    with pytest.warns(UserWarning, match="adamw with codec='none' runs in plain torch.*adamw with codec='log' or 'joint'"):
        select.kernel_for(w.device)(planes, [Segment(w, torch.ones(10), 0, 0, 1, hyper)], none)
    assert w[0] == pytest.approx(0.999)
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        select.kernel_for(w.device)(planes, [Segment(w, torch.ones(10), 0, 0, 2, hyper)], none)


def test_without_the_library_the_eager_path_serves_with_one_warning(monkeypatch):
    monkeypatch.setattr(cpu, "library", lambda *_: None)
    select._automatic.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no C compiler"):
            assert select.kernel_for(torch.device("cpu")) is eager.update_page
        assert select.kernel_for(torch.device("cpu")) is eager.update_page
        with pytest.raises(UnsupportedError, match="not built"):
            cpu.update_page([], [], fmt())
    finally:
        select._automatic.cache_clear()


def test_the_table_has_the_layout_of_the_c_struct():
    assert ctypes.sizeof(ctypes.c_int64) * 8 == 64  # eight int64 fields, as `segment` in page.h
    assert len(RULE.hyper) == 8
