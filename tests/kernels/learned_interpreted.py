"""The fused kernel with `learned` in Triton's interpreter, against the eager path: tables, places, states, weights, and what is learned.

`test_learned.py` runs this file in a process of its own, since Triton must see TRITON_INTERPRET=1 before it is imported.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashoptim_hf import _triton
from flashoptim_hf._triton import jit, tl
from flashoptim_hf.codecs import device
from flashoptim_hf.codecs.base import get_codec
from flashoptim_hf.codecs.joint import FINE_ENTRIES, lattice
from flashoptim_hf.codecs.learned import (
    BINS,
    KNOTS,
    _at,
    _place,
    curves,
    fitted,
    learned_tables,
    places,
    straight,
)
from flashoptim_hf.kernels import eager
from flashoptim_hf.kernels.rule import Format, Segment
from flashoptim_hf.optim.adamw import RULE
from tests.kernels.fused_interpreted import BF16, FP16, FP32, Page, assert_split_is_whole, assert_untouched, both, hyper, page
from tests.kernels.joint_interpreted import assert_same_codes, words

SIZES = (1, 33, 511, 512, 2048, 3 * 512 + 17)


@jit
def _look_up(curves_ptr, x_ptr, place_ptr, at_ptr, tables_ptr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Places of x in both curves, KNOTS times the second one's inverse at x, and the six tables."""
    tables = learned_tables(curves_ptr)
    x = device.load(x_ptr, 0, ROWS * 32, ROWS, 32)
    device.store(place_ptr, _place(x, tables[0]), 0, ROWS * 32, ROWS, 32)
    device.store(place_ptr + ROWS * 32, _place(x, tables[1]), 0, ROWS * 32, ROWS, 32)
    device.store(at_ptr, _at(x, tables[2]), 0, ROWS * 32, ROWS, 32)
    for i in tl.static_range(3):
        for j in tl.static_range(2):
            tl.store(tables_ptr + (2 * i + j) * 32 + tl.arange(0, 32), tables[i][j])


def look_up(table: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    place, at, tables = torch.empty(2, len(x)), torch.empty(len(x)), torch.empty(6, 32)
    _look_up[(1,)](table, x, place, at, tables, ROWS=len(x) // 32)
    return place, at, tables


def peaked(where: int) -> Tensor:
    """The curve of a parameter with nearly all that counts in one place: the steepest and the flattest parts that there are."""
    seen = torch.ones(1, BINS, dtype=torch.int64)
    seen[0, where] = 10**12
    return fitted(seen)[0]


BENT = {
    "straight": torch.cat([straight(), peaked(40)]),
    "middle": torch.cat([peaked(31), peaked(20)]),
    "ends": torch.cat([peaked(0), peaked(BINS - 1)]),
    "other ends": torch.cat([peaked(BINS - 1), peaked(0)]),
}


def taught(sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = FP32, bits: int = 0, steps: int = 4, **options: Any) -> Page:
    """A page after so many eager steps, each followed by learning; the last curve is that of the next encode alone."""
    made = page(sizes, dtype=dtype, bits=bits, codec="joint", warm=0, **options)
    made.fmt = Format(RULE, get_codec("learned", RULE.states, made.fmt.codec.dither), bits)
    generator = torch.Generator().manual_seed(7)
    scales = [s.grad.float() for s in made.segments]
    for s in made.segments:
        (s.table,) = made.fmt.codec.fresh_tables()
    for step in range(1, steps + 1):
        eager.update_page(made.planes, made.segments, made.fmt)
        for s, scale in zip(made.segments, scales, strict=True):
            made.fmt.codec.advance(parts(made, s), s.step)
            s.grad = (scale * torch.randn(len(scale), generator=generator)).to(s.grad.dtype)
            s.step, s.hyper = step + 1, hyper(step + 1)
    return made


def parts(p: Page, s: Segment, table: Tensor | None = None) -> list[Tensor]:
    """A segment's part of the page, as the codec takes it."""
    groups = [plane.group for plane in p.fmt.codec.planes]
    cut = [plane[s.start // g : -(-(s.start + s.param.numel()) // g)] for plane, g in zip(p.planes, groups, strict=False)]
    return [*cut, s.table if table is None else table]


def states(p: Page, s: Segment) -> tuple[Tensor, ...]:
    """What a segment decodes to after a step."""
    codec = p.fmt.codec
    return codec.decode(parts(p, s, codec.settled(s.table.view(1, -1)).view(-1)), s.param.numel())


def assert_same_states(fast: Page, slow: Page) -> None:
    """The codes are, and where one differs, or a constant does, each is within its bound of the same moments: at most 4 steps apart."""
    assert_same_codes(fast, slow)
    for s, s_ in zip(fast.segments, slow.segments, strict=True):
        (m, v), (m_, v_) = states(fast, s), states(slow, s_)
        known = v > 0
        assert torch.equal(known, v_ > 0)
        assert ((v[known].log2() - v_[known].log2()).abs() <= 2 * 4 * 0.12).all()
        groups = slice(s.start // 32, -(-(s.start + len(m)) // 32))
        umax = torch.maximum(fast.planes[4][groups].float(), slow.planes[4][groups].float()).repeat_interleave(32)[: len(m)]
        assert ((m - m_).abs() <= 1.03 * umax / 43 * torch.maximum(v, v_).sqrt() + 1e-30).all()


def assert_same_weights(fast: Page, slow: Page, start: Page) -> None:
    """An error that lies on the other side of a tie sends the weight to the other side of where m leads; all but a few go alike."""
    pairs = zip(fast.params, slow.params, start.params, strict=True)
    apart = torch.cat([(a.float() - b.float()).abs() / (b.float() - c.float()).abs().clamp_min(1e-6) for a, b, c in pairs])
    assert (apart > 0.05).float().mean() < 0.01


def test_this_process_interprets() -> None:
    assert _triton.INTERPRET


@pytest.mark.parametrize("name", BENT)
def test_what_is_looked_up_is_the_curve_and_its_inverse(name: str) -> None:
    """Everywhere from the first code to one behind the last. A place is right to a 2,000th of a step, or to less of a wide part."""
    at = torch.cat([torch.arange(0, 16.0), torch.linspace(0, 16 + 16 / 231, 2032)])
    for which, curve in enumerate(BENT[name].view(2, -1).double()):
        knot = at.double().floor().clamp_max(KNOTS - 1)
        left, right = (curve[(knot + side).long()] for side in (0, 1))
        expected = left + (at.double() - knot) * (right - left)
        found, _, _ = look_up(BENT[name], at)
        assert ((found[which] - expected).abs() <= 2.0**-22 + 2.0**-20 * (right - left)).all()
        assert torch.equal(found[which][:KNOTS].double(), curve[:KNOTS]) or (found[which][:KNOTS] - curve[:KNOTS]).abs().max() < 2.0**-22
    # what the inverse finds lies where it was looked for, knots and both ends included
    y = torch.cat(
        [curve.float(), curve[1:-1].float().nextafter(torch.tensor(0.0)), torch.rand(2016, generator=torch.Generator().manual_seed(0))]
    )
    _, found, _ = look_up(BENT[name], y)
    assert found[0] == 0
    assert (found >= 0).all()
    again, _, _ = look_up(BENT[name], found)
    assert (again[1] - y).abs().max() < 2.0**-21


def test_tables_of_zeros_are_those_of_a_straight_curve() -> None:
    x = torch.linspace(0, 1, 64)
    for a, b in zip(look_up(torch.zeros(2 * (KNOTS + 1), dtype=FP16), x), look_up(straight().repeat(2), x), strict=True):
        assert torch.equal(a, b)
    place, at, _ = look_up(straight().repeat(2), x)
    assert torch.equal(place, (x / KNOTS).expand(2, -1))
    assert torch.equal(at, x * KNOTS)


def test_the_search_tree_halves_what_is_left() -> None:
    """Entry 1 is the middle, 2 and 3 are the middles of its halves, and so on; 16 + k belongs to part k."""
    curve = BENT["middle"][KNOTS + 1 :].float()
    _, _, tables = look_up(BENT["middle"], torch.zeros(32))
    order = [8, 4, 12, 2, 6, 10, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert torch.equal(tables[4][1:16], curve[order])
    slope = 1 / (curve[1:] - curve[:-1])
    torch.testing.assert_close(tables[5][16:], slope, rtol=1e-6, atol=0)
    torch.testing.assert_close(tables[4][16:], torch.arange(16.0) - curve[:-1] * slope, rtol=1e-6, atol=1e-5)
    # part k of the others stands where `floor_magic` has k - 1; the last goes on, and what is before the first belongs to code 0
    for lines, which in ((tables[:2], 0), (tables[2:4], 1)):
        knots = BENT["middle"].view(2, -1)[which].float()
        at = torch.arange(-1, 15) & 31
        torch.testing.assert_close(lines[0][at] + torch.arange(16) * lines[1][at], knots[:-1], rtol=0, atol=2.0**-22)
        assert torch.equal(lines[1][15], lines[1][14])
        assert lines[0][30] == (-torch.inf if which == 0 else lines[0][14])


@pytest.mark.parametrize(("dtype", "bits", "grad"), [(BF16, 24, BF16), (BF16, 0, FP32), (FP16, 32, FP16), (FP32, 0, FP32)])
@pytest.mark.parametrize("dither", [True, False], ids=["dither", "nearest"])
def test_learned_equals_eager(dtype: torch.dtype, bits: int, grad: torch.dtype, dither: bool) -> None:
    """Parameters with curves of their own in one page, whose codes are decoded by one curve and encoded by another."""
    start = taught(dtype=dtype, bits=bits, grad=grad, dither=dither)
    tables = torch.stack([s.table for s in start.segments]).view(-1, 2, KNOTS + 1)
    assert (tables[:, 0] != tables[:, 1]).any(1)[1:].all(), "in some parameter, the next curve is the last one"
    assert len(tables.view(len(tables), -1).unique(dim=0)) == len(tables)
    before = tables.clone()
    fast, slow = both(start)
    assert_same_states(fast, slow)
    assert_untouched(start, fast)
    assert_same_weights(fast, slow, start)
    assert torch.equal(torch.stack([s.table for s in start.segments]).view_as(before), before)


@pytest.mark.parametrize("name", BENT)
@pytest.mark.parametrize("dither", [True, False], ids=["dither", "nearest"])
def test_the_most_bent_curves_equal_eager(name: str, dither: bool) -> None:
    start = taught((2048,), dither=dither, steps=2)
    start.segments[0].table = BENT[name]
    fast, slow = both(start)
    assert_same_states(fast, slow)
    assert_same_weights(fast, slow, start)


def test_a_wrong_curve_is_told() -> None:
    """The control: with the codes' curve for the next encode, or the other way round, states differ."""
    start = taught((2048,))
    _, slow = both(start)
    for curve in (start.segments[0].table.view(2, -1)[:1], start.segments[0].table.view(2, -1)[1:]):
        other = start.clone()
        other.segments[0].table = curve.repeat(2, 1).view(-1)
        fast, _ = both(other)
        with pytest.raises(AssertionError):
            assert_same_states(fast, slow)


def test_groups_with_large_momenta_equal_eager() -> None:
    """Half of the groups, at late steps: they have the fewest codes of r."""
    start = taught((2048,))
    start.segments[0].step += 5000
    start.planes[4][::2], start.planes[4][1::2] = 8.0, 0.1
    fast, slow = both(start)
    assert (slow.planes[3][::2] >= FINE_ENTRIES).float().mean() > 0.3
    assert_same_states(fast, slow)


@pytest.mark.parametrize("cut", [64, 512, 512 + 64])
def test_a_parameter_split_over_pages_is_the_whole_bit_for_bit(cut: int) -> None:
    assert_split_is_whole(taught((1024 + 17,)), cut)


def test_what_is_learned_is_the_same_after_both() -> None:
    """Counts are those of the eager path but for the few elements whose codes differ; curves to two units of fp16."""
    start = taught((2048, 1024 + 33))
    fast, slow = both(start)
    found = []
    for made in (fast, slow):
        codec, tables = made.fmt.codec, torch.stack([s.table for s in made.segments])
        seen = torch.zeros(2, BINS, dtype=torch.int64)
        for row, s in enumerate(made.segments):
            at = torch.arange(s.start // 32, -(-(s.start + s.param.numel()) // 32))
            codec.observe(made.planes[:5], at, torch.full_like(at, row), tables, seen)
        found.append((seen, codec.learn(tables, seen)))
    (seen, learned), (seen_, learned_) = found
    assert seen_.sum() > 0
    assert (seen - seen_).abs().sum() <= 0.01 * seen_.sum()
    assert (learned.float() - learned_.float()).abs().max() <= 2.0**-10
    assert torch.equal(learned[:, : KNOTS + 1], learned_[:, : KNOTS + 1])


def test_extremes_stay_finite() -> None:
    """Groups from subnormal to 1e38, of one magnitude, over 60 octaves, and empty; the step after also decodes what was written."""
    start = taught((32 * 8,), steps=0)
    for scale, name in zip((1e-30, 1e-12, 1.0, 1e9, 1e18), [*BENT, "middle"], strict=True):
        (s,) = start.segments
        s.table = BENT[name]
        grad = torch.randn(256, generator=torch.Generator().manual_seed(1)) * scale
        grad[32:64] = scale
        grad[64:96] *= torch.exp2(torch.linspace(-60, 0, 32))
        grad[96:128] = 0
        s.grad = grad
        fast, slow = both(start)
        for made in (fast, slow):
            assert all(x.isfinite().all() for x in states(made, made.segments[0]))
            assert all(p.isfinite().all() for p in made.params)
        m, v = states(fast, s)
        assert not m[96:128].any()
        assert not v[96:128].any()
        truth = grad.double() ** 2 * 1e-3
        near = (truth > truth[64:96].max() * 2.0**-46) & (truth > 1e-37)  # below, v is subnormal
        assert near.sum() > 150 or scale < 1e-15
        entry = fast.planes[3][s.start // 32 :][:8].float()[:, None]
        n, levels, step = lattice(entry)
        code = (words(fast)[s.start : s.start + 256].view(8, 32) // (2 * n + 1)).clamp_min(1)
        curve = curves(s.table, 8, 1, entry.device)
        gaps = [places(code + up, levels, curve) - places(code - 1 + up, levels, curve) for up in (0, 1)]
        bound = 2 * step * torch.maximum(*gaps) * 1.01 + 1e-5
        assert ((v.double()[near] / truth[near]).log2().abs() <= bound.expand(8, 32).reshape(-1)[near]).all()


@pytest.mark.parametrize("name", BENT)
def test_the_largest_second_moments_stay_finite_and_equal_eager(name: str) -> None:
    """Just below v = 2^128: the next code up would decode to infinity where a group's last place is not its last code's."""
    start = taught((2048,), steps=0)
    (s,) = start.segments
    s.table, generator = BENT[name], torch.Generator().manual_seed(0)
    below = torch.rand(2048, generator=generator) * torch.where(torch.rand(2048, generator=generator) < 0.5, 0.1, 20.0)
    s.grad = torch.exp2(63.99 - below) * torch.randn(2048, generator=generator).sign()
    s.hyper = (1e-3, *RULE.scalars({"betas": (0.0, 0.0), "eps": 1e-8, "weight_decay": 0.0}, 1))
    fast, slow = both(start)
    assert (slow.planes[2].float() * 16 * lattice(slow.planes[3].float())[2] > 64).any(), "no lattice reaches beyond"
    assert all(x.isfinite().all() for x in states(fast, s))
    assert_same_states(fast, slow)
