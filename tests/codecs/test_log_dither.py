"""`log`'s dither: right on average over steps and over elements, which rounding to nearest is not, and the same bits for the same call."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashoptim_hf.codecs.base import State, get_codec
from flashoptim_hf.codecs.log import CODE_DITHER, MAX_OCTAVES, MCODE_DITHER, MIN_STEP, LogCodec

MOMENTS = (State("exp_avg", signed=True), State("exp_avg_sq", signed=False))
NEAREST, DITHERED = get_codec("log", MOMENTS, dither=False), get_codec("log", MOMENTS, dither=True)
STEPS = 2048


def blank(numel: int) -> list[Tensor]:
    return [torch.zeros(plane.entries(numel), dtype=plane.dtype) for plane in NEAREST.planes]


def group_values(octaves: float, seed: int = 1) -> tuple[Tensor, Tensor]:
    """One group over exactly that many octaves of sqrt(v)."""
    generator = torch.Generator().manual_seed(seed)
    r = torch.exp2(-torch.rand(64, generator=generator) * octaves)
    r[0], r[1] = 1.0, 2.0**-octaves
    return r * torch.randn(64, generator=generator), r * r


def bias_over_steps(codec, m: Tensor, v: Tensor, index: int = 0) -> tuple[Tensor, Tensor]:
    """Mean of what decodes minus what was encoded, over `STEPS` steps: of m in units of its lattice (r umax / 127), of v relative to v."""
    planes = blank(64)
    total_m, total_v = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    for step in range(1, STEPS + 1):
        codec.encode((m, v), planes, index=index, step=step)
        m_hat, v_hat = codec.decode(planes, 64)
        total_m += m_hat
        total_v += v_hat
    unit = v.double().sqrt() * planes[4].double() / 127
    return (total_m / STEPS - m.double()) / unit, total_v / STEPS / v.double() - 1


@pytest.mark.parametrize(("octaves", "index"), [(0.5, 0), (4.0, 64 * 12345), (20.0, 2**33), (24.0, 64)])
def test_unbiased_over_steps(octaves: float, index: int) -> None:
    """Over 2048 steps the mean is right to a 200th of m's lattice, and to a 200th of v's lattice step.

    A Weyl sequence misses the mean by about log(T) / T = 1 / 270 of a lattice step, at worst; the quadratic in place of the exact
    threshold adds 2e-4 of one.
    """
    m, v = group_values(octaves)
    bias_m, bias_v = bias_over_steps(DITHERED, m, v, index)
    lattice = 2 * math.log(2) * max(octaves / 254, MIN_STEP)  # of v, relative
    assert bias_m.abs().max() < 1 / 200
    assert bias_v.abs().max() < lattice / 200
    assert bias_v.mean().abs() < lattice / 1000


def test_nearest_is_biased() -> None:
    """The control: the same measure finds the bias that rounding to nearest has, a hundred times the tolerance above."""
    m, v = group_values(20.0)
    bias_m, bias_v = bias_over_steps(NEAREST, m, v)
    assert bias_m.abs().max() > 0.4
    assert bias_v.abs().max() > 0.4 * 2 * math.log(2) * 20 / 254


@pytest.mark.parametrize("step", [1, 2, 999])
def test_unbiased_over_elements(step: int) -> None:
    """At one step, over 64 thousand elements of the same values in different groups."""
    m, v = group_values(20.0)
    planes = blank(64 * 1000)
    DITHERED.encode((m.repeat(1000), v.repeat(1000)), planes, step=step)
    m_hat, v_hat = (value.double().view(1000, 64).mean(0) for value in DITHERED.decode(planes, 64000))
    unit = v.double().sqrt() * planes[4][0].double() / 127
    assert ((m_hat - m) / unit).abs().max() < 0.02
    assert (v_hat / v - 1).abs().max() < 0.02 * 2 * math.log(2) * 20 / 254


def decay(codec: LogCodec, steps: int) -> Tensor:
    """v of a group after `steps` steps of v <- 0.999 v, relative to exact arithmetic, while elements 0 and 1 hold the lattice in place."""
    _, v = group_values(20.0)
    planes = blank(64)
    codec.encode((torch.zeros(64), v), planes)
    start = codec.decode(planes, 64)[1]
    for step in range(1, steps + 1):
        now = codec.decode(planes, 64)[1] * 0.999
        now[:2] = v[:2]
        codec.encode((torch.zeros(64), now), planes, step=step)
    inside = v > v.min() * 0.999**-steps * 4  # the others reach the lowest code
    inside[:2] = False
    return (codec.decode(planes, 64)[1] / start / 0.999**steps)[inside]


def test_dither_lets_the_second_moment_decay_and_nearest_swallows_it() -> None:
    """One step of beta2 = 0.999 is a hundredth of a lattice step: rounded to nearest it never happens."""
    assert (decay(NEAREST, 500) > 1.6).all()
    dithered = decay(DITHERED, 500)
    assert 0.97 < dithered.mean() < 1.03
    assert dithered.min() > 0.75
    assert dithered.max() < 1.3


def test_the_threshold_is_unbiased_in_v() -> None:
    """The quadratic is within 2e-4 of the exact probability at the widest step."""
    x = torch.linspace(0, 1, 1001, dtype=torch.float64)
    for step in (MIN_STEP, MAX_OCTAVES / 254):
        exact = (2 ** (2 * step * x) - 1) / (2 ** (2 * step) - 1)
        quadratic = x - math.log(2) * step * x * (1 - x)
        assert (exact - quadratic).abs().max() < 2e-4


def oracle(x: float, index: int, step: int, multipliers: tuple[int, int]) -> float:
    """The dither of one element, in Python's integers."""
    a, b = multipliers
    return x + ((index * a + step * b) % 2**32 >> 8) / 2**24


@pytest.mark.parametrize("index", [0, 640, 2**31 - 64, 2**31, 2**32, 2**40])
@pytest.mark.parametrize("step", [0, 1, 12345, 2**31 - 1])
def test_the_dither_is_a_function_of_position_and_step(index: int, step: int) -> None:
    """Element for element against Python's integers, at positions and steps that overflow 32 bits in between."""
    m, v = torch.linspace(-1, 1, 64), torch.ones(64)
    m[0] = -1.0
    planes = blank(64)
    DITHERED.encode((m, v), planes, index=index, step=step)
    expected = [math.floor(oracle(x, index + i, step, MCODE_DITHER)) for i, x in enumerate((m * 127).tolist())]
    assert planes[0].tolist() == expected
    # v's lattice step is 2^-8 octaves here, and element 0 fixes hi
    v = torch.exp2(-torch.arange(64) * 0.0137)
    DITHERED.encode((torch.zeros(64), v), planes, index=index, step=step)
    width = MIN_STEP
    for i, code in enumerate(planes[1].tolist()):
        c = 255 - 0.0137 * i / 2 / width
        x = c - math.floor(c)
        probability = (2 ** (2 * width * x) - 1) / (2 ** (2 * width) - 1)
        d = oracle(0.0, index + i, step, CODE_DITHER)
        if abs(d - probability) > 2e-3:  # hi lies on its grid, which moves c by up to a 500th
            assert code == math.floor(c) + (d < probability)


def test_step_and_position_both_matter() -> None:
    m, v = group_values(20.0)
    seen = []
    for index, step in ((0, 1), (0, 2), (64, 1)):
        planes = blank(64)
        DITHERED.encode((m, v), planes, index=index, step=step)
        seen.append(planes)
    for other in seen[1:]:
        assert not torch.equal(seen[0][0], other[0])
        assert not torch.equal(seen[0][1], other[1])


def test_the_two_planes_are_dithered_apart() -> None:
    """Over steps the two fractions of one element are uncorrelated: otherwise m / sqrt(v) would be biased though m and v are not."""
    t = range(1, STEPS + 1)
    a = torch.tensor([oracle(0.0, 17, step, CODE_DITHER) for step in t])
    b = torch.tensor([oracle(0.0, 17, step, MCODE_DITHER) for step in t])
    assert torch.corrcoef(torch.stack((a, b)))[0, 1].abs() < 0.02


def test_without_dither_step_and_position_do_not_matter() -> None:
    m, v = group_values(20.0)
    first, second = blank(64), blank(64)
    NEAREST.encode((m, v), first, index=0, step=1)
    NEAREST.encode((m, v), second, index=640, step=77)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
