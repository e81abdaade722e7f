"""`square`: what one encode may lose, that nothing is lost twice, that dither is right on average, and that the format is what it was."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashoptim_hf.codecs.base import State, get_codec
from flashoptim_hf.codecs.square import DITHER_BELOW, MIN_UMAX
from flashoptim_hf.errors import ConfigurationError

MOMENTUM = (State("exp_avg", signed=True),)
NEAREST, DITHERED = get_codec("square", MOMENTUM, dither=False), get_codec("square", MOMENTUM, dither=True)
both = pytest.mark.parametrize("codec", [NEAREST, DITHERED], ids=["nearest", "dithered"])
proof = settings(deadline=None, max_examples=70, derandomize=True, database=None)
LARGEST = torch.finfo(torch.bfloat16).max


def encode(codec, x: Tensor, step: int = 1, index: int = 0) -> list[Tensor]:
    planes = [torch.zeros(plane.entries(x.numel()), dtype=plane.dtype) for plane in codec.planes]
    codec.encode((x,), planes, step=step, index=index)
    return planes


def decode(planes: list[Tensor]) -> Tensor:
    (x,) = NEAREST.decode(planes, planes[0].numel())
    return x


def check_bounds(codec, x: Tensor, step: int = 1) -> None:
    """Everything that one encode promises about finite values."""
    planes = encode(codec, x, step)
    x_hat = decode(planes).double()
    scale = planes[1].double().repeat_interleave(32)[: len(x)]
    x = x.double()
    assert x_hat.isfinite().all()
    assert not x_hat[x == 0].any()
    assert (x_hat * x >= 0).all(), "a sign never turns"
    z = 127**2 * x.abs() / scale
    share = torch.full_like(z, 0.5)
    if codec.dither:
        share[z < DITHER_BELOW**2] = 1
    # the number itself counts in fp32, as z does
    assert ((x_hat - x).abs() <= share * (2 * z.sqrt() + 1) * scale / 127**2 + 1e-6 * x.abs() + 1e-44).all()
    assert (x_hat.abs() <= scale * (1 + 1e-6)).all()
    size = torch.nn.functional.pad(x.abs(), (0, -len(x) % 32)).view(-1, 32).amax(1).clamp(MIN_UMAX, LARGEST)
    assert ((planes[1].double() / size - 1).abs() <= 2.0**-8).all(), "the scale is the largest number, rounded"


@st.composite
def group_values(draw: st.DrawFn) -> Tensor:
    """1 to 130 numbers: scales over up to 60 octaves, zeros and repeated values."""
    centre = draw(st.floats(-80.0, 120.0))
    spread = draw(st.sampled_from([0.0, 1e-3, 0.5, 3.0, 12.0, 30.0]))
    exponents = draw(st.lists(st.one_of(st.floats(-1, 0), st.just(0.0), st.none()), min_size=1, max_size=130))
    signs = torch.tensor(draw(st.lists(st.sampled_from([-1.0, 1.0]), min_size=len(exponents), max_size=len(exponents))))
    exponent = torch.tensor([math.nan if e is None else e for e in exponents], dtype=torch.float64) * spread + centre
    return (torch.where(exponent.isnan(), 0, torch.exp2(exponent)) * signs).float()


@both
@proof
@given(x=group_values(), step=st.integers(0, 2**31 - 1))
def test_bounds(codec, x: Tensor, step: int) -> None:
    check_bounds(codec, x, step)


@both
@pytest.mark.parametrize("numel", range(1, 66))
def test_group_sizes(codec, numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    x[::7] = 0
    check_bounds(codec, x, step=numel)


@both
@pytest.mark.parametrize("x", [0.0, -0.0, 1e-45, 1e-38, -1e-30, 1e-20, 1.0, -1e19, 1e30, 3.3e38, -3.4e38])
def test_fp32_extremes(codec, x: float) -> None:
    """Any finite number gives a finite state, alone and beside ordinary ones."""
    for companions in (0, 31):
        values = torch.cat((torch.tensor([x]), torch.full((companions,), 0.3)))
        for step in range(4):
            check_bounds(codec, values, step)


@both
def test_infinity_is_stored_as_the_largest_number(codec) -> None:
    x = torch.ones(32)
    x[3], x[5] = math.inf, -math.inf
    planes = encode(codec, x)
    assert planes[0][3] == -planes[0][5] == 127
    assert 3.3e38 < decode(planes)[3] < math.inf


def test_all_zero_groups_beside_others() -> None:
    x = torch.zeros(96)
    x[32:64] = 0.1
    assert torch.equal(decode(encode(NEAREST, x)) != 0, x != 0)


@proof
@given(x=group_values())
def test_nearest_is_monotone_and_symmetric(x: Tensor) -> None:
    x = x[:32]
    x_hat = decode(encode(NEAREST, x))
    assert (x_hat[x.argsort()].diff() >= 0).all()
    for codec in (NEAREST, DITHERED):
        assert torch.equal(decode(encode(codec, x, step=5)), -decode(encode(codec, -x, step=5)))


def test_nearest_is_the_nearest() -> None:
    """In value, not in the square root: the control is a rounded square root, which is farther from many numbers."""
    x = torch.rand(3200, generator=torch.Generator().manual_seed(0)) ** 2
    x[::32] = 1.0
    lattice = (torch.arange(128, dtype=torch.float64) / 127) ** 2
    best = (x.double()[:, None] - lattice).abs().amin(1)
    error = (decode(encode(NEAREST, x)).double() - x).abs()
    assert (error <= best + 1e-7).all()
    rounded = (torch.round(127 * x.double().sqrt()) / 127) ** 2
    assert ((rounded - x).abs() > best + 1e-7).sum() > 10


@proof
@given(x=group_values())
def test_what_was_decoded_encodes_to_the_same_bits(x: Tensor) -> None:
    """A round trip through fp32 (a checkpoint, a change of device) changes nothing, however often."""
    planes = encode(NEAREST, x)
    assert all(torch.equal(a, b) for a, b in zip(planes, encode(NEAREST, decode(planes)), strict=True))


@pytest.mark.parametrize("scale", [2.0**-100, 1e-20, 0.337, 1.0, 77.0, 1e30, LARGEST])
def test_every_code_survives_a_round_trip(scale: float) -> None:
    codes = torch.arange(-127, 128, dtype=torch.int8)
    codes = torch.cat((codes, codes[:1])).view(8, 32).clone()
    codes[:, 0] = 127  # every group uses its scale to the end
    planes = [codes.flatten(), torch.full((8,), scale, dtype=torch.bfloat16)]
    again = encode(NEAREST, decode(planes))
    assert all(torch.equal(a, b) for a, b in zip(planes, again, strict=True))
    for step in range(50):
        again = encode(DITHERED, decode(planes), step=step)
        assert torch.equal(planes[1], again[1])
        # a dither within fp32's rounding of the edge may move a number on the lattice
        moved = (planes[0].short() - again[0].short()).abs()
        assert moved.max() <= 1
        assert moved.sum() <= 1


STEPS = 1024


def bias_over_steps(codec, x: Tensor, index: int = 0) -> Tensor:
    """Mean of what decodes minus what was encoded over `STEPS` steps, in units of the distance of the neighbouring lattice points."""
    total = torch.zeros(len(x), dtype=torch.float64)
    for step in range(STEPS):
        total += decode(encode(codec, x, step, index))
    cell = (2 * (x.double().abs() * 127**2).sqrt().floor() + 1) / 127**2
    return (total / STEPS - x.double()) / cell


@pytest.mark.parametrize("index", [0, 64 * 12345, 2**33])
def test_unbiased_over_steps_below_code_64(index: int) -> None:
    x = torch.rand(32, generator=torch.Generator().manual_seed(1)) ** 2 * 0.25
    x[1::2] *= -1
    x[0] = 1.0  # the scale
    assert bias_over_steps(DITHERED, x, index).abs().max() < 1 / 50
    assert bias_over_steps(NEAREST, x, index).abs().max() > 0.4  # the control


def test_above_code_64_rounding_is_to_nearest() -> None:
    x = 0.26 + 0.74 * torch.rand(32, generator=torch.Generator().manual_seed(1))
    x[0] = 1.0
    for step in range(8):
        assert torch.equal(encode(DITHERED, x, step)[0], encode(NEAREST, x, step)[0])


@pytest.mark.parametrize("step", [0, 1, 999])
def test_unbiased_over_elements(step: int) -> None:
    x = torch.rand(32, generator=torch.Generator().manual_seed(2)) * 0.25
    x[0] = 1.0
    mean = decode(encode(DITHERED, x.repeat(2000), step)).double().view(2000, 32).mean(0)
    cell = (2 * (x.double() * 127**2).sqrt().floor() + 1) / 127**2
    assert ((mean - x) / cell).abs().max() < 0.02


def test_the_dither_of_a_pair_of_steps_cancels() -> None:
    """At an odd step the roundings are those of the step before with the dither's sign turned: their mean is closer than a single one."""
    x = torch.rand(3200, generator=torch.Generator().manual_seed(3)) * 0.24
    x[::32] = 1.0
    errors = [decode(encode(DITHERED, x, step)).double() - x for step in (4, 5, 6)]
    assert ((errors[0] + errors[1]) / 2).norm() < 0.5 * errors[0].norm()
    assert ((errors[1] + errors[2]) / 2).norm() > 0.6 * errors[0].norm()  # the control: two steps of different pairs


@pytest.mark.parametrize("decay", [0.9, 0.97])
def test_a_momentum_without_gradients_decays(decay: float) -> None:
    """Beside one that holds the scale in place: with dither to nearly nothing and at the right pace, without it stops at a code."""
    sums = []
    for codec in (DITHERED, NEAREST):
        x, total = torch.linspace(0.05, 0.9, 3200), torch.zeros(3200, dtype=torch.float64)
        first = x.clone()
        for step in range(400):
            x[::32] = 1.0
            x = decode(encode(codec, x, step))
            total += x
            x = x * decay
        keep = torch.arange(3200) % 32 > 0
        sums.append((total[keep] * (1 - decay) / first[keep]).mean().item())
    assert sums[0] == pytest.approx(1, abs=0.06)
    assert sums[1] > 1.5


def test_the_same_call_gives_the_same_bits_wherever_the_elements_lie() -> None:
    x = torch.randn(640, generator=torch.Generator().manual_seed(4))
    whole, part = encode(DITHERED, x, step=7, index=64), encode(DITHERED, x[128:], step=7, index=192)
    assert torch.equal(whole[0][128:], part[0])
    assert not torch.equal(whole[0], encode(DITHERED, x, step=8, index=64)[0])
    assert not torch.equal(whole[0], encode(DITHERED, x, step=7, index=128)[0])


GOLDEN = [0.0, 1.0, -0.5, 0.1, -0.01, 1e-3, -1e-4, 3e-5, 0.3]


@pytest.mark.parametrize(
    ("codec", "step", "codes"),
    [
        (NEAREST, 3, [0, 127, -90, 40, -13, 4, -1, 0, 70]),
        (DITHERED, 3, [0, 127, -90, 40, -13, 4, -1, 0, 70]),
        (DITHERED, 4, [0, 127, -90, 40, -13, 4, -2, 1, 70]),
    ],
    ids=["nearest", "odd", "even"],
)
def test_golden(codec, step: int, codes: list[int]) -> None:
    """The format, pinned: a checkpoint of today must mean the same tomorrow."""
    planes = encode(codec, torch.tensor(GOLDEN), step)
    assert planes[0].tolist() == codes
    assert planes[1].tolist() == [1.0]


def test_golden_decode() -> None:
    planes = [torch.tensor([127, -127, 1, -64, 0], dtype=torch.int8), torch.tensor([2.5], dtype=torch.bfloat16)]
    expected = torch.tensor([2.5, -2.5, 2.5 / 127**2, -2.5 * 64**2 / 127**2, 0])
    torch.testing.assert_close(decode(planes), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("signs", [[False], [True, False], [True, True], [True, False, False]])
def test_other_states_are_refused(signs: list[bool]) -> None:
    with pytest.raises(ConfigurationError, match=r"codec='square' stores one momentum.*codec='log'"):
        get_codec("square", [State(f"s{i}", signed) for i, signed in enumerate(signs)])


def test_planes() -> None:
    assert [(p.name, p.dtype, p.group) for p in DITHERED.planes] == [("exp_avg", torch.int8, 1), ("exp_avg_max", torch.bfloat16, 32)]
    assert DITHERED.nbytes(64) / 64 == 1.0625
