"""`joint`: what one encode may lose and what it says of it, how states are dealt out, and that the format is what it was."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashoptim_hf.codecs.base import State, get_codec
from flashoptim_hf.codecs.joint import ANCHOR, FEWEST, FINE, FINE_ENTRIES, FINE_OCTAVES, FINE_ZERO, KEEP, MOST, allot, lattice
from flashoptim_hf.codecs.log import MAX_OCTAVES, MIN_UMAX
from flashoptim_hf.errors import ConfigurationError

MOMENTS = (State("exp_avg", signed=True), State("exp_avg_sq", signed=False))
NEAREST, DITHERED = get_codec("joint", MOMENTS, dither=False), get_codec("joint", MOMENTS, dither=True)
both = pytest.mark.parametrize("codec", [NEAREST, DITHERED], ids=["nearest", "dithered"])
proof = settings(deadline=None, max_examples=150, derandomize=True, database=None)

# log2 r in fp32 is wrong by up to 2^-18, and so is the product of a step and a whole number
LOG_TOLERANCE = 2.0**-16


def blank(numel: int) -> list[Tensor]:
    return [torch.zeros(plane.entries(numel), dtype=plane.dtype) for plane in NEAREST.planes]


def encode(codec, m: Tensor, v: Tensor, step: int = 1) -> list[Tensor]:
    planes = blank(m.numel())
    codec.encode((m, v), planes, step=step)
    return planes


def oracle(planes: list[Tensor], i: int) -> tuple[float, float]:
    """What element i decodes to, in Python's numbers."""
    top, entry, umax = (float(plane[i // 32]) for plane in planes[2:])
    n = 140 if entry >= 128 else entry
    word, span = int(planes[1][i]) * 256 + int(planes[0][i]), 2 * int(n) + 1
    code, ucode = word // span, word % span - int(n)
    if code == 0:
        return 0.0, 0.0
    levels = 65536 // span - 1
    octaves = (entry - 120) * 0.18162 if entry >= 128 else 5 * (64 / n) ** 4
    step = round(octaves / (levels - 17) * 2**18) / 2**18
    r = 2.0 ** ((16 * int(top) - levels + code) * step)
    return ucode * umax / n * r, r * r


def check_bounds(codec, m: Tensor, v: Tensor, step: int = 1, fine: bool = False) -> None:
    """Everything that one encode promises about finite values; `fine`: into groups whose u was large before."""
    planes = blank(m.numel())
    if fine:
        planes[4].fill_(100.0)
        step = max(step, 100)
    lost = codec.encode((m, v), planes, step=step)
    entry, umax = (plane.double().repeat_interleave(32)[: m.numel()] for plane in planes[3:])
    assert ((entry >= FINE_ENTRIES) == fine).all()
    n, _, width = (x.double() for x in lattice(entry.float()))
    m_hat, v_hat = codec.decode(planes, m.numel())
    for i in range(0, m.numel(), 17):
        assert (m_hat[i].item(), v_hat[i].item()) == pytest.approx(oracle(planes, i), rel=3e-5, abs=1e-44)
    assert ((lost.double() - (m.double() - m_hat)).abs() <= 1e-6 * m.abs() + 1e-6 * m_hat.abs() + 1e-44).all()
    m, v, m_hat, v_hat = m.double(), v.double(), m_hat.double(), v_hat.double()
    assert m_hat.isfinite().all()
    assert v_hat.isfinite().all()
    assert torch.equal(v_hat == 0, v == 0), "v̂ is 0 where v is, and nowhere else"
    assert not m_hat[v == 0].any()
    assert not m_hat[m == 0].any()

    groups = torch.nn.functional.pad(v, (0, -len(v) % 32)).view(-1, 32)
    hi = (groups.amax(1).log2() / 2).repeat_interleave(32)[: len(v)]
    on = v > 0
    log_r, r_hat = v[on].log2() / 2, v_hat[on].sqrt()
    error = (r_hat.log2() - log_r).abs()
    low = log_r < hi[on] - MAX_OCTAVES
    share = 1.0 if codec.dither else 0.5
    assert (error <= share * width[on] + LOG_TOLERANCE)[~low].all()
    assert (r_hat.log2() <= (hi - MAX_OCTAVES)[on] + width[on] + LOG_TOLERANCE)[low].all(), "raised to the limit, not beyond"
    # umax is rounded to nearest, by up to 2^-8, which with n = 140 is more than half a code
    bound = r_hat * umax[on] * (1 / (2 * n[on])).clamp_min(2.0**-8) * (1 + 2.0**-7)
    assert ((m_hat - m)[on].abs() <= bound * (1 + 1e-5) + 1e-44).all()


@st.composite
def group_values(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """m and v of 1 to 130 elements: scales over up to 60 octaves, zeros, repeated values, |m| up to 8 sqrt(v)."""
    centre = draw(st.floats(-61.0, 61.0))
    spread = draw(st.sampled_from([0.0, 1e-3, 0.5, 3.0, 12.0, 30.0]))
    element = st.tuples(st.one_of(st.floats(-1, 1), st.just(0.0), st.none()), st.one_of(st.floats(-8, 8), st.just(0.0)))
    elements = draw(st.lists(element, min_size=1, max_size=130))
    exponent = torch.tensor([math.nan if e is None else e for e, _ in elements], dtype=torch.float64) * spread + centre
    r = torch.where(exponent.isnan(), 0, torch.exp2(exponent.clamp(-63, 63)))
    u = torch.tensor([u for _, u in elements], dtype=torch.float64)
    return (u * r).float(), (r * r).float()


@both
@proof
@given(values=group_values(), step=st.integers(0, 2**31 - 1), fine=st.booleans())
def test_bounds(codec, values: tuple[Tensor, Tensor], step: int, fine: bool) -> None:
    check_bounds(codec, *values, step, fine)


@both
@pytest.mark.parametrize("octaves", [0, 1e-4, 0.9, 1.1, 10, 23.9, 24, 24.1, 30, 60, 120])
def test_bounds_over_ranges(codec, octaves: float) -> None:
    generator = torch.Generator().manual_seed(int(octaves * 10))
    r = torch.exp2((torch.rand(32 * 50, generator=generator, dtype=torch.float64) - 0.5) * octaves)
    m = r * torch.randn(len(r), generator=generator)
    check_bounds(codec, m.float(), (r * r).float())
    check_bounds(codec, m.float(), (r * r).float(), fine=True)


EXTREMES = (0.0, 1e-45, 1e-38, 1.2e-38, 1e-30, 1.0, 1e19, 1e30, 1e38, 3.3e38)


@both
@pytest.mark.parametrize("m", [*EXTREMES, -1e38])
@pytest.mark.parametrize("v", EXTREMES)
def test_fp32_extremes(codec, m: float, v: float) -> None:
    """Any two finite fp32 numbers give finite states, alone and beside ordinary ones, and never an m without a v."""
    for companions in (0, 31):
        ms = torch.cat((torch.tensor([m]), torch.full((companions,), 0.3)))
        vs = torch.cat((torch.tensor([v]), torch.full((companions,), 1.0)))
        m_hat, v_hat = codec.decode(encode(codec, ms, vs), len(ms))
        assert m_hat.isfinite().all()
        assert v_hat.isfinite().all()
        assert (v_hat[0] == 0) == (v == 0)
        assert (m_hat[0] == 0) or (v_hat[0] > 0)
        if 1e-38 <= v <= 1e38 and abs(m) <= 1e38 and MIN_UMAX < abs(m) / math.sqrt(v) < 3e38:
            check_bounds(codec, ms, vs)


@both
def test_infinite_v_is_stored_as_the_largest_number(codec) -> None:
    v = torch.ones(32)
    v[3] = math.inf
    m_hat, v_hat = codec.decode(encode(codec, torch.ones(32), v), 32)
    assert 3e38 < v_hat[3] < math.inf
    assert m_hat.isfinite().all()


@both
@pytest.mark.parametrize("numel", range(1, 66))
def test_group_sizes(codec, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    r = torch.exp2(torch.randn(numel, generator=generator, dtype=torch.float64) * 3)
    r[::7] = 0
    check_bounds(codec, (r * torch.randn(numel, generator=generator)).float(), (r * r).float(), step=numel)


NOTHING = torch.zeros(1)  # umax of a group that was never written


def test_every_word_has_a_place_and_every_range_fits() -> None:
    entries = torch.cat((torch.arange(float(FEWEST), MOST + 1), torch.arange(float(FINE_ENTRIES), 256)))
    n, levels, step = lattice(entries)
    assert torch.equal(n, torch.where(entries < FINE_ENTRIES, entries, float(FINE)))
    assert ((levels + 1) * (2 * n + 1) <= 65536).all()
    assert ((levels + 2) * (2 * n + 1) > 65536).all()
    # the numbers that the grid takes are far from a tie, so that no path's rounding matters
    octaves = torch.where(entries < FINE_ENTRIES, 5 * (64 / n.double()) ** 4, (entries.double() - FINE_ZERO) * FINE_OCTAVES)
    exact = octaves / (levels.double() - ANCHOR - 1) * 2**18
    assert ((exact - exact.floor() - 0.5).abs() > 4 * 2.0**-22 * exact).all()
    assert ((step.double() * 2**18 - exact).abs() <= 0.5).all()
    assert 80 / step.min() / ANCHOR < 2048, "`top` is a whole number that fp16 holds"
    spans = torch.cat((torch.tensor([0.0, 1e-6]), torch.linspace(0.5, MAX_OCTAVES, 2000)))
    dealt = allot(spans, torch.zeros_like(spans), NOTHING, 1)
    _, levels, step = lattice(dealt)
    assert (spans <= (levels - ANCHOR - 1) * step + levels * 2.0**-19).all()
    assert dealt.min() == FEWEST
    assert dealt.max() == MOST
    assert (dealt.diff() <= 0).all()
    _, levels, step = lattice(dealt + 1)
    assert (((levels - ANCHOR - 1) * step)[dealt < MOST] < spans[dealt < MOST] + 2e-3).all(), "no state more for u would fit"
    dealt = allot(spans, torch.zeros_like(spans), torch.tensor([10.0]), 1000)
    _, levels, step = lattice(dealt)
    assert (dealt >= FINE_ENTRIES).all()
    assert (spans <= (levels - ANCHOR - 1) * step + levels * 2.0**-19).all()


def test_the_allotment_stays_while_it_fits() -> None:
    """It jumps neither with noise in the range nor back and forth, and what is no allotment is not kept."""
    octaves = torch.tensor([5.0])
    n = allot(octaves, torch.tensor([0.0]), NOTHING, 1)
    for factor, stays in ((1.0, True), (0.95, True), (0.85, False), (1.05, False)):
        assert (allot(octaves * factor, n, NOTHING, 1) == n).item() == stays, factor
    for junk in (1.0, FEWEST - 1.0, 97.0, 127.0, 200.0, 255.0):
        assert torch.equal(allot(octaves, torch.tensor([junk]), NOTHING, 1), n)
    assert 0.97 < KEEP < 0.98


def test_large_momenta_get_more_codes() -> None:
    """Where a code would be worth more than 0.03, at late steps; earlier u is larger for the same step. Half of it lets them stay."""
    octaves, none, late = torch.tensor([10.0]), torch.tensor([0.0]), 10**8
    n = allot(octaves, none, NOTHING, late)
    edge = 0.03 * n
    fine = allot(octaves, none, edge * 1.001, late)
    assert fine.item() >= FINE_ENTRIES
    assert torch.equal(allot(octaves, none, edge * 0.999, late), n)
    assert torch.equal(allot(octaves, fine, edge * 0.501, late), fine)
    assert torch.equal(allot(octaves, fine, edge * 0.499, late), n)
    assert torch.equal(allot(octaves, none, edge * 10, 10), n)
    assert allot(octaves, none, edge * 10, 11).item() >= FINE_ENTRIES
    # and the range has an allowance of its own
    for factor, stays in ((1.0, True), (0.95, True), (0.85, False), (1.05, False)):
        assert (allot(octaves * factor, fine, edge, late) == fine).item() == stays, factor


def test_the_lattice_does_not_move_with_the_maximum() -> None:
    """Another maximum changes `top`, and not one r̂ of the others: their codes move along."""
    generator = torch.Generator().manual_seed(3)
    v = torch.exp2(-8 * torch.rand(32, generator=generator))
    v[0], v[1] = 1.5, 2.0**-8
    planes = encode(NEAREST, torch.zeros(32), v)
    before = NEAREST.decode(planes, 32)[1]
    tops = []
    for largest in (1.45, 1.3, 1.2):
        v[0] = largest
        NEAREST.encode((torch.zeros(32), v), planes, step=2)
        assert torch.equal(NEAREST.decode(planes, 32)[1][1:], before[1:])
        tops.append(planes[2].item())
    assert len(set(tops)) > 1


@proof
@given(values=group_values())
def test_encoding_what_was_decoded_moves_nothing_by_more_than_rounding(values: tuple[Tensor, Tensor]) -> None:
    """Into the planes that it came from, rounding to nearest: codes of r stay, and so do all constants of r."""
    planes = encode(NEAREST, *values)
    m, v = NEAREST.decode(planes, values[0].numel())
    if ((v > 0) & (v < 1e-36)).any():
        return  # the root of a subnormal v is not exact
    again = [plane.clone() for plane in planes]
    NEAREST.encode((m, v), again, step=2)
    assert torch.equal(again[3], planes[3]) or (again[3] >= planes[3]).all()
    m_, v_ = NEAREST.decode(again, len(m))
    same = (again[3] == planes[3]).repeat_interleave(32)[: len(m)]
    assert torch.allclose(v_[same], v[same], rtol=1e-5, atol=0)
    umax = torch.maximum(again[4].float(), planes[4].float()).repeat_interleave(32)[: len(m)]
    assert ((m_ - m).abs() <= 1.01 * umax / 43 * v.sqrt() + 1e-44).all()


GOLDEN_M = [0.0, 1e-3, -1e-3, 5e-4, -2e-7, 3e-2, 0.0, -1e-9, 0.25]
GOLDEN_V = [0.0, 1e-6, 4e-6, 1e-4, 1e-12, 9e-2, 2e-3, 0.0, 1.0]


@pytest.mark.parametrize(("codec", "third"), [(NEAREST, 37423), (DITHERED, 37515)], ids=["nearest", "dithered"])
def test_golden(codec, third: int) -> None:
    """The format, pinned: a checkpoint of today must mean the same tomorrow. The third element's code of r is dithered up."""
    planes = encode(codec, torch.tensor(GOLDEN_M), torch.tensor(GOLDEN_V), step=3)
    words = (planes[1].int() * 256 + planes[0].int()).tolist()
    assert words == [0, 34397, third, 44728, 3221, 60019, 51460, 0, 65485]
    assert [plane.tolist() for plane in planes[2:]] == [[0.0], [45], [1.0]]


@both
def test_the_expected_error_is_that_of_an_encode(codec) -> None:
    generator = torch.Generator().manual_seed(0)
    r = torch.exp(torch.randn(6400, generator=generator)) * 1e-3
    m, v = r * torch.randn(6400, generator=generator), r * r
    planes = encode(codec, m, v, step=3)
    m_hat, v_hat = codec.decode(planes, 6400)
    expected_m, expected_r = codec.expected_errors(planes, 6400)
    assert float(expected_m.norm()) == pytest.approx(float((m_hat - m).norm()), rel=0.1)
    assert float(expected_r.norm()) == pytest.approx(float((v_hat.sqrt() - r).norm()), rel=0.1)


@pytest.mark.parametrize("signs", [[True], [False], [False, True], [True, True], [True, False, False]])
def test_other_states_are_refused(signs: list[bool]) -> None:
    with pytest.raises(ConfigurationError, match="codec='joint' stores a first and a second moment together"):
        get_codec("joint", [State(f"s{i}", signed) for i, signed in enumerate(signs)])


def test_planes() -> None:
    assert [(p.name, p.dtype, p.group) for p in DITHERED.planes] == [
        ("exp_avg", torch.uint8, 1),
        ("exp_avg_sq", torch.uint8, 1),
        ("exp_avg_sq_top", torch.float16, 32),
        ("exp_avg_sq_levels", torch.uint8, 32),
        ("exp_avg_max", torch.bfloat16, 32),
    ]
    assert DITHERED.nbytes(64) / 64 == 2.15625
