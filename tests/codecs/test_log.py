"""`log`: what one encode may lose, that nothing is lost twice, and that the format is what it was. Rounding errors are judged in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashoptim_hf.codecs.base import State, get_codec
from flashoptim_hf.codecs.log import HI_GRID, MAX_HI, MAX_OCTAVES, MIN_STEP, MIN_UMAX, STEP_GRID
from flashoptim_hf.errors import ConfigurationError

MOMENTS = (State("exp_avg", signed=True), State("exp_avg_sq", signed=False))
NEAREST, DITHERED = get_codec("log", MOMENTS, dither=False), get_codec("log", MOMENTS, dither=True)
both = pytest.mark.parametrize("codec", [NEAREST, DITHERED], ids=["nearest", "dithered"])
proof = settings(deadline=None, max_examples=150, derandomize=True, database=None)

# log2 r in fp32 is wrong by up to 2^-18, hi by up to half its grid
LOG_TOLERANCE = HI_GRID


def blank(numel: int) -> list[Tensor]:
    return [torch.zeros(plane.entries(numel), dtype=plane.dtype) for plane in NEAREST.planes]


def encode(codec, m: Tensor, v: Tensor, step: int = 1) -> list[Tensor]:
    planes = blank(m.numel())
    codec.encode((m, v), planes, step=step)
    return planes


def per_element(constant: Tensor, numel: int) -> Tensor:
    """A group constant, repeated for each element, in fp64."""
    return constant.double().repeat_interleave(64)[:numel]


def check_bounds(codec, m: Tensor, v: Tensor, step: int = 1) -> None:
    """Everything that one encode promises about finite values."""
    planes = encode(codec, m, v, step)
    share = 1.0 if codec.dither else 0.5
    hi, width, umax = (per_element(plane, m.numel()) for plane in planes[2:])
    m_hat, v_hat = (value.double() for value in codec.decode(planes, m.numel()))
    m, v = m.double(), v.double()
    assert m_hat.isfinite().all()
    assert v_hat.isfinite().all()
    assert torch.equal(v_hat == 0, v == 0), "v̂ is 0 where v is, and nowhere else"
    assert not m_hat[v == 0].any()
    assert not m_hat[m == 0].any()

    on = v > 0
    log_r, log_r_hat = v[on].log2() / 2, v_hat[on].log2() / 2
    hi, width, umax, r_hat = hi[on], width[on], umax[on], v_hat[on].sqrt()
    low = log_r < hi - MAX_OCTAVES
    error = (log_r_hat - log_r).abs()
    assert (error <= share * width + LOG_TOLERANCE)[~low].all()
    assert ((log_r_hat - (hi - MAX_OCTAVES)).abs() <= width + LOG_TOLERANCE)[low].all(), "raised to the limit, not beyond"
    assert (log_r_hat <= hi + LOG_TOLERANCE).all(), "the maximum is not exceeded"
    error = (m_hat[on] - m[on]).abs()
    assert (error <= share * r_hat * umax / 127 * (1 + 1e-5) + 1e-44).all()
    assert (m_hat[on].abs() <= r_hat * umax * (1 + 1e-6) + 1e-44).all()


@st.composite
def group_values(draw: st.DrawFn, centres: tuple[float, float] = (-61.0, 61.0)) -> tuple[Tensor, Tensor]:
    """m and v of 1 to 130 elements: scales over up to 60 octaves, zeros, repeated values, |m| up to 8 sqrt(v)."""
    centre = draw(st.floats(*centres))
    spread = draw(st.sampled_from([0.0, 1e-3, 0.5, 3.0, 12.0, 30.0]))
    element = st.tuples(st.one_of(st.floats(-1, 1), st.just(0.0), st.none()), st.one_of(st.floats(-8, 8), st.just(0.0)))
    elements = draw(st.lists(element, min_size=1, max_size=130))
    exponent = torch.tensor([math.nan if e is None else e for e, _ in elements], dtype=torch.float64) * spread + centre
    r = torch.where(exponent.isnan(), 0, torch.exp2(exponent.clamp(-63, 63)))
    u = torch.tensor([u for _, u in elements], dtype=torch.float64)
    return (u * r).float(), (r * r).float()


@both
@proof
@given(values=group_values(), step=st.integers(0, 2**31 - 1))
def test_bounds(codec, values: tuple[Tensor, Tensor], step: int) -> None:
    check_bounds(codec, *values, step)


@both
@pytest.mark.parametrize("octaves", [0, 1e-4, 0.9, 1.1, 10, 23.9, 24, 24.1, 30, 60, 120])
def test_bounds_over_ranges(codec, octaves: float) -> None:
    generator = torch.Generator().manual_seed(int(octaves * 10))
    r = torch.exp2((torch.rand(64 * 50, generator=generator, dtype=torch.float64) - 0.5) * octaves)
    m = r * torch.randn(len(r), generator=generator)
    check_bounds(codec, m.float(), (r * r).float())


EXTREMES = (0.0, 1e-45, 1e-38, 1.2e-38, 1e-30, 1.0, 1e19, 1e30, 1e38, 3.3e38)


@both
@pytest.mark.parametrize("m", [*EXTREMES, -1e38])
@pytest.mark.parametrize("v", EXTREMES)
def test_fp32_extremes(codec, m: float, v: float) -> None:
    """Any two finite fp32 numbers give finite states, alone and beside ordinary ones, and never an m without a v."""
    for companions in (0, 63):
        ms = torch.cat((torch.tensor([m]), torch.full((companions,), 0.3)))
        vs = torch.cat((torch.tensor([v]), torch.full((companions,), 1.0)))
        planes = encode(codec, ms, vs)
        m_hat, v_hat = codec.decode(planes, len(ms))
        assert m_hat.isfinite().all()
        assert v_hat.isfinite().all()
        assert (v_hat[0] == 0) == (v == 0)
        assert (m_hat[0] == 0) or (v_hat[0] > 0)
        if 1e-38 <= v <= 1e38 and abs(m) <= 1e38 and MIN_UMAX < abs(m) / math.sqrt(v) < 3e38:
            check_bounds(codec, ms, vs)


@both
def test_infinite_v_is_stored_as_the_largest_number(codec) -> None:
    v = torch.ones(64)
    v[3] = math.inf
    planes = encode(codec, torch.ones(64), v)
    m_hat, v_hat = codec.decode(planes, 64)
    assert planes[2].item() == MAX_HI
    assert 3.3e38 < v_hat[3] < math.inf
    assert m_hat.isfinite().all()


def test_a_ratio_beyond_its_range_saturates() -> None:
    m_hat, _ = NEAREST.decode(encode(NEAREST, torch.tensor([1e38, -1e38]), torch.tensor([1e-38, 1e-38])), 2)
    assert m_hat[0] == -m_hat[1] > 3e19
    m_hat, _ = NEAREST.decode(encode(NEAREST, torch.tensor([1e-38, -1e-38]), torch.tensor([1.0, 1.0])), 2)
    assert not m_hat.any()


@both
@pytest.mark.parametrize("numel", range(1, 66))
def test_group_sizes(codec, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    r = torch.exp2(torch.randn(numel, generator=generator, dtype=torch.float64) * 3)
    r[::7] = 0
    check_bounds(codec, (r * torch.randn(numel, generator=generator)).float(), (r * r).float())


@both
@pytest.mark.parametrize("r", [2.0**-60, 1e-8, 0.3, 1.0, 7.7, 2.0**60])
def test_constant_groups(codec, r: float) -> None:
    """All elements alike: the smallest step, and no more than its bound, whatever the value."""
    m, v = torch.full((64,), 0.5 * r), torch.full((64,), r * r)
    planes = encode(codec, m, v)
    assert planes[3].item() == MIN_STEP
    m_hat, v_hat = codec.decode(planes, 64)
    torch.testing.assert_close(v_hat, v, rtol=MIN_STEP * 2 * math.log(2) * 1.01, atol=0)
    torch.testing.assert_close(m_hat, m, rtol=1.01 / 127, atol=0)
    if not codec.dither:
        torch.testing.assert_close(v_hat, v, rtol=2 * LOG_TOLERANCE, atol=0)
        torch.testing.assert_close(m_hat, m, rtol=2.0**-8 + 1e-5, atol=0)


def test_all_zero_groups_beside_others() -> None:
    m, v = torch.zeros(192), torch.zeros(192)
    m[64:128], v[64:128] = 0.1, 1.0
    m_hat, v_hat = NEAREST.decode(encode(NEAREST, m, v), 192)
    assert torch.equal(m_hat != 0, m != 0)
    assert torch.equal(v_hat != 0, v != 0)


@proof
@given(values=group_values())
def test_nearest_is_monotone(values: tuple[Tensor, Tensor]) -> None:
    m, v = (x[:64] for x in values)
    order = v.argsort()
    _, v_hat = NEAREST.decode(encode(NEAREST, m, v), m.numel())
    assert (v_hat[order].diff() >= 0).all()
    # and m, among elements of the same v
    flat = torch.full_like(v, 4.0)
    m_hat, _ = NEAREST.decode(encode(NEAREST, m, flat), m.numel())
    assert (m_hat[m.argsort()].diff() >= 0).all()


def test_m_is_symmetric() -> None:
    generator = torch.Generator().manual_seed(5)
    m, v = torch.randn(640, generator=generator), torch.rand(640, generator=generator) + 1e-3
    plus, _ = NEAREST.decode(encode(NEAREST, m, v), 640)
    minus, _ = NEAREST.decode(encode(NEAREST, -m, v), 640)
    assert torch.equal(plus, -minus)


@proof
@given(values=group_values(centres=(-45.0, 45.0)))
def test_what_was_decoded_encodes_to_the_same_bits(values: tuple[Tensor, Tensor]) -> None:
    """Codes and constants: a round trip through fp32 (a checkpoint, a change of device) changes nothing, however often."""
    planes = encode(NEAREST, *values)
    again = encode(NEAREST, *NEAREST.decode(planes, values[0].numel()), step=2)
    assert all(torch.equal(a, b) for a, b in zip(planes, again, strict=True))


def every_code(hi: float, step: float, umax: float) -> list[Tensor]:
    """Planes in which each code of either kind occurs, and each group uses its constants to the end."""
    planes = blank(64 * 5)
    code, mcode = planes[1].view(5, 64), planes[0].view(5, 64)
    for g in range(5):
        code[g, :2] = torch.tensor([255, 1])
        code[g, 2:54] = torch.arange(1 + 51 * g, 53 + 51 * g).clamp_max(255)
        code[g, 54:63] = 200
        mcode[g, 0] = 127
        mcode[g, 1:53] = torch.arange(-127 + 51 * g, -75 + 51 * g).clamp_max(127)
    assert set(code.flatten().tolist()) == set(range(256))
    assert set(mcode.flatten().tolist()) == set(range(-127, 128))
    planes[2].fill_(hi)
    planes[3].fill_(step)
    planes[4].fill_(umax)
    return planes


def test_every_code_survives_a_round_trip() -> None:
    generator = torch.Generator().manual_seed(2)
    widest = math.ceil(MAX_OCTAVES / 254 / STEP_GRID - 0.25) * STEP_GRID
    for trial in range(300):
        hi = round((torch.rand((), generator=generator).item() * 90 - 45) / HI_GRID) * HI_GRID
        step = MIN_STEP + torch.rand((), generator=generator).item() * (widest - MIN_STEP)
        step = (MIN_STEP, widest)[trial] if trial < 2 else round(step / STEP_GRID) * STEP_GRID
        umax = torch.exp2(torch.rand((), generator=generator) * 20 - 15).item()
        planes = every_code(hi, step, umax)
        again = encode(NEAREST, *NEAREST.decode(planes, 320))
        assert all(torch.equal(a, b) for a, b in zip(planes, again, strict=True)), (hi, step, umax)
        # with dither a number on the lattice stays there but for the rounding of exp2 and log2, a thousandth of a step
        again = encode(DITHERED, *DITHERED.decode(planes, 320), step=trial)
        assert all(torch.equal(a, b) for a, b in zip(planes[2:], again[2:], strict=True)), (hi, step, umax)
        for a, b in zip(planes[:2], again[:2], strict=True):
            moved = (a.short() - b.short()).abs()
            assert moved.max() <= 1
            assert moved.sum() <= 4


GOLDEN_M = [0.0, 1e-3, -1e-3, 5e-4, -2e-7, 3e-2, 0.0, -1e-9, 0.25]
GOLDEN_V = [0.0, 1e-6, 4e-6, 1e-4, 1e-12, 9e-2, 2e-3, 0.0, 1.0]


@pytest.mark.parametrize(
    ("codec", "mcodes", "codes", "umax"),
    [
        (NEAREST, [0, 127, -63, 6, -25, 13, 0, 0, 32], [0, 128, 141, 170, 1, 233, 198, 0, 255], 1.0),
        (DITHERED, [0, 127, -63, 7, -26, 14, 0, 0, 32], [0, 128, 141, 170, 1, 232, 198, 0, 255], 1.0),
    ],
    ids=["nearest", "dithered"],
)
def test_golden(codec, mcodes: list[int], codes: list[int], umax: float) -> None:
    """The format, pinned: a checkpoint of today must mean the same tomorrow."""
    planes = encode(codec, torch.tensor(GOLDEN_M), torch.tensor(GOLDEN_V), step=3)
    assert planes[0].tolist() == mcodes
    assert planes[1].tolist() == codes
    assert planes[2].tolist() == [0.0]
    assert planes[3].tolist() == [round(math.log2(1e6) / 254 / STEP_GRID + 0.25) * STEP_GRID]
    assert planes[4].tolist() == [umax]


def test_golden_decode() -> None:
    planes = [
        torch.tensor([127, -127, 1, 5], dtype=torch.int8),
        torch.tensor([255, 1, 128, 0], dtype=torch.uint8),
        torch.tensor([-3.0]),
        torch.tensor([0.0625]),
        torch.tensor([2.5], dtype=torch.bfloat16),
    ]
    m, v = NEAREST.decode(planes, 4)
    r = [2.0**-3, 2.0 ** (-3 - 254 / 16), 2.0 ** (-3 - 127 / 16), 0.0]
    torch.testing.assert_close(m, torch.tensor([2.5 * r[0], -2.5 * r[1], 2.5 / 127 * r[2], 0.0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(v, torch.tensor([x * x for x in r]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("signs", [[True], [False], [False, True], [True, True], [True, False, False]])
def test_other_states_are_refused(signs: list[bool]) -> None:
    with pytest.raises(ConfigurationError, match="codec='log' stores a first and a second moment together"):
        get_codec("log", [State(f"s{i}", signed) for i, signed in enumerate(signs)])


def test_planes() -> None:
    assert [(p.name, p.dtype, p.group) for p in DITHERED.planes] == [
        ("exp_avg", torch.int8, 1),
        ("exp_avg_sq", torch.uint8, 1),
        ("exp_avg_sq_max", torch.float32, 64),
        ("exp_avg_sq_step", torch.float32, 64),
        ("exp_avg_max", torch.bfloat16, 64),
    ]
    assert DITHERED.nbytes(64) / 64 == 2.15625
