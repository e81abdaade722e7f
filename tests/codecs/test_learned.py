"""`learned`: what is learned and when, that a curve changes codes and not what they mean, and that it pays."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashoptim_hf.bench import subjects
from flashoptim_hf.bench.metrics import update_error
from flashoptim_hf.bench.streams import Problem, drifting
from flashoptim_hf.codecs.base import State, get_codec
from flashoptim_hf.codecs.joint import lattice
from flashoptim_hf.codecs.learned import (
    BINS,
    EVEN,
    INTERVAL,
    KNOTS,
    LARGEST,
    SAMPLE,
    codes_below,
    curves,
    due,
    fitted,
    places,
    straight,
    stride,
)

MOMENTS = (State("exp_avg", signed=True), State("exp_avg_sq", signed=False))
NEAREST, DITHERED = get_codec("learned", MOMENTS, dither=False), get_codec("learned", MOMENTS, dither=True)
JOINT = get_codec("joint", MOMENTS)
CPU = torch.device("cpu")


def blank(numel: int) -> list[Tensor]:
    return [torch.zeros(part.entries(numel), dtype=part.dtype) for part in DITHERED.parts]


def moments(numel: int, seed: int = 0, sigma: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    r = 1e-3 * torch.exp(sigma * torch.randn(numel, generator=generator))
    return r * torch.randn(numel, generator=generator), r * r


def peaked(where: int = 40) -> Tensor:
    """Counts with nearly everything in one place."""
    seen = torch.ones(1, BINS, dtype=torch.int64)
    seen[0, where] = 10**9
    return seen


def learned(m: Tensor, v: Tensor) -> list[Tensor]:
    """The parts of a parameter that has learned from its first step, and been encoded by what it learned in the second."""
    parts = blank(len(m))
    for step in (1, 2):
        DITHERED.encode((m, v), parts, step=step)
        DITHERED.advance(parts, step)
    return parts


def words(parts: list[Tensor]) -> Tensor:
    return parts[1].int() * 256 + parts[0].int()


def test_a_straight_curve_is_joint() -> None:
    m, v = moments(4096)
    mine, theirs = blank(4096), [torch.zeros(plane.entries(4096), dtype=plane.dtype) for plane in JOINT.planes]
    for step in range(1, 4):
        lost, theirs_lost = DITHERED.encode((m, v), mine, step=step), JOINT.encode((m, v), theirs, step=step)
    assert torch.equal(curves(mine[5], 1, 0, CPU)[0], straight().float())
    assert (words(mine) != words(theirs)).float().mean() < 1e-3
    assert torch.allclose(lost, theirs_lost, atol=1e-4, rtol=0)
    for a, b in zip(mine[2:5], theirs[2:], strict=True):
        assert torch.equal(a, b)


def test_when_it_looks() -> None:
    looks = [step for step in range(520) if due(step)]
    assert looks == [1, 2, 4, 8, 16, 32, 64, 100, 128, 200, 256, 300, 400, 500, 512]
    assert INTERVAL == 100


def test_which_groups_it_looks_at() -> None:
    assert [stride(numel) for numel in (0, 1, 32 * SAMPLE, 64 * SAMPLE - 1, 64 * SAMPLE, 10**9)] == [1, 1, 1, 1, 2, 10**9 // 32 // SAMPLE]
    many = len(range(0, 10**7 // 32, stride(10**7)))
    assert SAMPLE <= many < 2 * SAMPLE


def density(curve: Tensor) -> Tensor:
    """Share of the codes in each of the counted places."""
    knots = curve[0].double()
    at = torch.arange(BINS + 1).double() / BINS
    part = torch.searchsorted(knots[1:-1].contiguous(), at, right=True)
    return ((part + (at - knots[part]) / (knots[part + 1] - knots[part])) / KNOTS).diff()


def test_the_curve_is_the_one_that_loses_least() -> None:
    """A quarter of the codes evenly, the rest by the cube root of what is lost: no other curve of that kind has less distortion."""
    places_of = (torch.arange(BINS) + 0.5) / BINS
    seen = (1e6 * torch.exp(-(((places_of - 0.6) / 0.2) ** 2))).long()[None] + 10
    curve = fitted(seen)
    rest = (density(curve) - EVEN / BINS).clamp_min(1e-9)
    wanted = seen[0].double() ** (1 / 3)
    wanted = (1 - EVEN) * wanted / wanted.sum()
    middle = slice(6, -6)  # what is counted is smoothed over five places
    assert (rest[middle] - wanted[middle]).abs().max() < 0.1 * wanted.max()

    def distortion(codes: Tensor) -> float:
        return float((seen[0].double() / codes**2).sum())

    best = EVEN / BINS + wanted
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        other = wanted * torch.exp(0.3 * torch.randn(BINS, generator=generator).double())
        assert distortion(EVEN / BINS + (1 - EVEN) * other / other.sum()) > distortion(best) * 0.995
    assert distortion(density(curve)) < 1.03 * distortion(best)
    assert distortion(density(curve)) < 0.8 * distortion(torch.full((BINS,), 1 / BINS).double())


@pytest.mark.parametrize("seen", [peaked(0), peaked(40), peaked(63), peaked() * 2**22, torch.eye(BINS, dtype=torch.int64)])
def test_no_code_is_wider_than_four_steps_whatever_was_seen(seen: Tensor) -> None:
    for curve in fitted(seen).double():
        assert curve[0] == 0
        assert curve[-1] == 1
        assert (curve.diff() > 0).all()
        assert curve.diff().max() * KNOTS <= 1 / EVEN + 0.05


def test_counts_do_not_depend_on_the_order_or_the_cut() -> None:
    m, v = moments(64 * 200)
    parts = learned(m, v)
    tables, groups = parts[5].view(1, -1), torch.arange(400)
    whole, pieces = torch.zeros(1, BINS, dtype=torch.int64), torch.zeros(1, BINS, dtype=torch.int64)
    DITHERED.observe(parts, groups, torch.zeros_like(groups), tables, whole)
    for piece in (groups[300:].flip(0), groups[:7], groups[7:300]):
        DITHERED.observe(parts, piece, torch.zeros_like(piece), tables, pieces)
    assert torch.equal(whole, pieces)
    assert whole.sum() > 0
    # and nothing overflows: u^2 counts up to a limit
    parts[4].fill_(3e38)
    DITHERED.observe(parts, groups, torch.zeros_like(groups), tables, whole)
    assert 0 < whole.max() <= 400 * 32 * LARGEST * 2**20 * 2


def test_each_parameter_has_its_own_row() -> None:
    small, large = learned(*moments(32 * 64, 1)), learned(*moments(32 * 64, 2, sigma=3.0))
    planes = [torch.cat(pair) for pair in zip(small[:5], large[:5], strict=True)]
    tables, seen = torch.stack([small[5], large[5]]), torch.zeros(2, BINS, dtype=torch.int64)
    owners = torch.arange(2).repeat_interleave(64)
    DITHERED.observe(planes, torch.arange(128), owners, tables, seen)
    for row, parts in enumerate((small, large)):
        alone = torch.zeros(1, BINS, dtype=torch.int64)
        DITHERED.observe(parts[:5], torch.arange(64), torch.zeros(64, dtype=torch.int64), parts[5].view(1, -1), alone)
        assert torch.equal(seen[row], alone[0])
    assert not torch.equal(seen[0], seen[1])


def test_a_new_curve_changes_no_value_until_the_next_encode() -> None:
    m, v = moments(4096)
    parts = blank(4096)
    DITHERED.encode((m, v), parts, step=1)
    before = DITHERED.decode(parts, 4096)
    DITHERED.advance(parts, 1)
    now, following = parts[5].view(2, -1)
    assert torch.equal(now, straight())
    assert not torch.equal(following, straight())
    for a, b in zip(before, DITHERED.decode(parts, 4096), strict=True):
        assert torch.equal(a, b)
    stored = parts[5].clone()
    DITHERED.encode(before, parts, step=2)
    assert torch.equal(parts[5], stored), "an encode may be one of many parts of a parameter: it leaves the table alone"
    DITHERED.advance(parts, 3)  # no look after step 3
    assert torch.equal(parts[5].view(2, -1), following.expand(2, -1))
    gap = lattice(parts[3].float())[2].repeat_interleave(32) / EVEN
    assert ((DITHERED.decode(parts, 4096)[1].log2() - before[1].log2()).abs() / 2 <= gap).all()


def test_what_was_not_seen_is_not_learned() -> None:
    parts = blank(256)
    DITHERED.encode((torch.zeros(256), torch.zeros(256)), parts, step=1)
    DITHERED.advance(parts, 1)
    assert torch.equal(parts[5].view(2, -1), straight().expand(2, -1))


def test_zeros_are_not_counted() -> None:
    """Code 0 would be a u of -umax at the lower end."""
    parts, seen = blank(64), torch.zeros(1, BINS, dtype=torch.int64)
    parts[3].fill_(60)
    parts[4].fill_(5.0)
    DITHERED.observe(parts, torch.arange(2), torch.zeros(2, dtype=torch.int64), parts[5].view(1, -1), seen)
    assert not seen.any()


def test_encoding_what_was_decoded_finds_the_same_codes() -> None:
    """Rounding to nearest, on a bent curve."""
    for seed in range(5):
        parts = learned(*moments(2048, seed))
        again = [part.clone() for part in parts]
        m, v = DITHERED.decode(parts, 2048)
        NEAREST.encode((m, v), again, step=3)
        n = lattice(again[3].float())[0].int().repeat_interleave(32)
        same = (again[2] == parts[2]).repeat_interleave(32) & (again[3] == parts[3]).repeat_interleave(32)
        assert same.float().mean() > 0.7
        assert torch.equal((words(again) // (2 * n + 1))[same], (words(parts) // (2 * n + 1))[same])


def test_places_and_codes_are_each_other_s_inverse() -> None:
    curve = fitted(peaked()).float()
    for entry in (43.0, 60.0, 96.0, 130.0, 255.0):
        levels = lattice(torch.tensor([[entry]]))[1]
        code = torch.arange(1.0, float(levels)).view(1, -1)
        at = places(code, levels, curve)
        assert at[0, 0] == 1
        assert (at.diff() > 0).all()
        assert places(levels, levels, curve).item() == pytest.approx(levels.item(), abs=1e-3)
        between = at + 0.5 * (places(code + 1, levels, curve) - at)
        assert torch.equal(codes_below(between, levels, curve), code)


def test_several_curves_at_once_decode_as_each_alone() -> None:
    """A table for each group, as the close look at several parameters has them."""
    first, second = learned(*moments(1024, 1)), learned(*moments(1024, 2, sigma=3.0))
    together = [torch.cat(pair) for pair in zip(first[:5], second[:5], strict=True)]
    together.append(torch.stack([first[5]] * 32 + [second[5]] * 32))
    for got, a, b in zip(DITHERED.decode(together, 2048), DITHERED.decode(first, 1024), DITHERED.decode(second, 1024), strict=True):
        assert torch.equal(got, torch.cat([a, b]))


def test_it_pays() -> None:
    """Less error of the total update than `joint`, which has less than half of `log`'s."""
    problem = Problem("stream", drifting(0.5, 1.0, 0, 300, 1024))
    algorithm = subjects.ALGORITHMS["adamw"]
    exact = algorithm.exact(problem)
    errors = [update_error(subjects.through_codec(problem, codec, algorithm), exact, problem.lr) for codec in (DITHERED, JOINT)]
    assert errors[0] < 0.97 * errors[1]


def test_no_bias_over_many_steps_on_a_bent_curve() -> None:
    """Codes of different widths side by side: the probabilities of rounding are those that keep v right on average."""
    numel, beta2 = 4096, 0.999
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp(torch.randn(numel, generator=generator))
    parts, v = blank(numel), torch.zeros(numel, dtype=torch.float64)
    for step in range(1, 1201):
        grad = scale * torch.randn(numel, generator=generator)
        v = beta2 * v + (1 - beta2) * grad.double() ** 2
        m, v_hat = DITHERED.decode(parts, numel)
        DITHERED.encode((m, beta2 * v_hat + (1 - beta2) * grad**2), parts, step=step)
        DITHERED.advance(parts, step)
        if step == 1:
            parts[5][KNOTS + 1 :] = fitted(peaked(20))[0]  # a curve with a kink, kept below
        elif due(step):
            parts[5][KNOTS + 1 :] = parts[5][: KNOTS + 1]
    off = DITHERED.decode(parts, numel)[1].double() / v - 1
    rms = off.square().mean().sqrt().item()
    assert abs(off.mean().item()) < 4 * rms / math.sqrt(numel)
    assert rms < 0.15


def test_errors_that_are_expected_are_those_of_an_encode() -> None:
    m, v = moments(32 * 400)
    parts = learned(m, v)
    of_m, of_r = DITHERED.expected_errors(parts, len(m))
    wanted = [0.0, 0.0]
    for step in range(3, 23):
        again = [part.clone() for part in parts]
        DITHERED.encode((m, v), again, step=step)
        m_hat, v_hat = DITHERED.decode(again, len(m))
        wanted[0] += float((m_hat - m).square().sum()) / 20
        wanted[1] += float((v_hat.sqrt() - v.sqrt()).square().sum()) / 20
    for mine, theirs in zip((of_m, of_r), wanted, strict=True):
        assert float(mine.square().sum()) == pytest.approx(theirs, rel=0.25)


GOLDEN_WORDS = [0, 10100, 11580, 57923, 946, 64023, 61743, 0, 65485]
GOLDEN_CURVE = [
    0.0,
    0.234619140625,
    0.46923828125,
    0.59716796875,
    0.60498046875,
    0.61181640625,
    0.6181640625,
    0.62451171875,
    0.6298828125,
    0.63525390625,
    0.640625,
    0.646484375,
    0.65283203125,
    0.65966796875,
    0.66748046875,
    0.765625,
    1.0,
]


def test_golden() -> None:
    """The format, pinned: two curves of 17 knots in fp16, behind the planes of `joint`."""
    assert [(part.name, part.dtype, part.group, part.count) for part in DITHERED.parts] == [
        *((plane.name, plane.dtype, plane.group, 0) for plane in JOINT.planes),
        ("exp_avg_sq_curve", torch.float16, 0, 34),
    ]
    parts = blank(9)
    parts[5][:] = fitted(peaked())[0].repeat(2)
    m = torch.tensor([0.0, 1e-3, -1e-3, 5e-4, -2e-7, 3e-2, 0.0, -1e-9, 0.25])
    v = torch.tensor([0.0, 1e-6, 4e-6, 1e-4, 1e-12, 9e-2, 2e-3, 0.0, 1.0])
    NEAREST.encode((m, v), parts, step=3)
    assert words(parts).tolist() == GOLDEN_WORDS
    assert parts[5][:17].tolist() == GOLDEN_CURVE
