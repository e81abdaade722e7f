"""`joint` over many steps: right on average, decaying as it should, with errors of m made up for, and the same bits for the same call."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flashoptim_hf.codecs.base import State, get_codec
from flashoptim_hf.codecs.joint import lattice

MOMENTS = (State("exp_avg", signed=True), State("exp_avg_sq", signed=False))
NEAREST, DITHERED = get_codec("joint", MOMENTS, dither=False), get_codec("joint", MOMENTS, dither=True)
STEPS = 2048


def blank(numel: int) -> list[Tensor]:
    return [torch.zeros(plane.entries(numel), dtype=plane.dtype) for plane in NEAREST.planes]


def group_values(octaves: float, seed: int = 1) -> tuple[Tensor, Tensor]:
    """One group over exactly that many octaves of sqrt(v)."""
    generator = torch.Generator().manual_seed(seed)
    r = torch.exp2(-torch.rand(32, generator=generator) * octaves)
    r[0], r[1] = 1.0, 2.0**-octaves
    return r * torch.randn(32, generator=generator), r * r


def bias_of_v(codec, octaves: float, index: int = 0) -> Tensor:
    """Mean of v̂ / v - 1 over `STEPS` encodes of the same values, in steps of the lattice."""
    m, v = group_values(octaves)
    planes, total = blank(32), torch.zeros(32, dtype=torch.float64)
    for step in range(1, STEPS + 1):
        codec.encode((m, v), planes, index=index, step=step)
        total += codec.decode(planes, 32)[1]
    width = 2 * math.log(2) * lattice(planes[3].float())[2].double()
    return (total / STEPS / v.double() - 1) / width


@pytest.mark.parametrize(("octaves", "index"), [(0.5, 0), (4.0, 32 * 12346), (20.0, 2**33), (24.0, 64)])
def test_v_is_unbiased_over_steps(octaves: float, index: int) -> None:
    """To a 150th of a lattice step; a Weyl sequence misses the mean by about log(T) / T, and fp32 holds log2 r to a 250th of one."""
    bias = bias_of_v(DITHERED, octaves, index)
    assert bias.abs().max() < 1 / 150
    assert bias.mean().abs() < 1 / 500


def test_nearest_is_biased() -> None:
    """The control: the same measure finds the bias that rounding to nearest has."""
    assert bias_of_v(NEAREST, 20.0).abs().max() > 0.4


def test_dither_lets_the_second_moment_decay_and_nearest_swallows_it() -> None:
    """v <- 0.999 v for 500 steps, while elements 0 and 1 hold the lattice in place."""
    _, v = group_values(20.0)
    inside = v > v.min() * 0.999**-500 * 4
    inside[:2] = False
    share = {}
    for codec in (NEAREST, DITHERED):
        planes = blank(32)
        codec.encode((torch.zeros(32), v), planes)
        start = codec.decode(planes, 32)[1]
        for step in range(1, 501):
            now = codec.decode(planes, 32)[1] * 0.999
            now[:2] = v[:2]
            codec.encode((torch.zeros(32), now), planes, step=step)
        share[codec] = (codec.decode(planes, 32)[1] / start / 0.999**500)[inside]
    assert (share[NEAREST] > 1.6).all()
    assert 0.97 < share[DITHERED].mean() < 1.03
    assert share[DITHERED].min() > 0.8
    assert share[DITHERED].max() < 1.25


@pytest.mark.parametrize("beta2", [0.999, 0.9999])
def test_v_follows_stationary_gradients_without_drift(beta2: float) -> None:
    """3000 steps of normal gradients: v̂ is right to 1 % on average over 2048 elements of scales over six octaves, late as well as early."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp2(torch.randn(2048, generator=generator))
    planes, v = blank(2048), torch.zeros(2048, dtype=torch.float64)
    ratios = []
    for step in range(1, 3001):
        square = (scale * torch.randn(2048, generator=generator)) ** 2
        v = beta2 * v + (1 - beta2) * square.double()
        coded = DITHERED.decode(planes, 2048)[1] * beta2 + square * (1 - beta2)
        DITHERED.encode((torch.zeros(2048), coded), planes, step=step)
        if step % 500 == 0:
            ratios.append((DITHERED.decode(planes, 2048)[1].double() / v).mean().item() - 1)
    assert max(map(abs, ratios)) < 0.01, ratios


def test_what_is_lost_and_what_is_kept_make_the_whole() -> None:
    """Momentum without gradients: what decodes, and what all errors had said of it, sum up to what exact arithmetic moves a weight by.

    An element that keeps umax where it is holds small momenta up at a code that 0.9 of it rounds to; the sum over all steps is still right.
    """
    _, v = group_values(3.0)
    u = torch.linspace(-1, 1, 32)
    planes = blank(32)
    NEAREST.encode((u * v.sqrt(), v), planes)
    m, v_hat = NEAREST.decode(planes, 32)
    truth = m.double() / v_hat.double().sqrt() * 10  # the sum of 0.9^k
    spent, unspent, stuck = torch.zeros(32, dtype=torch.float64), torch.zeros(32, dtype=torch.float64), False
    for step in range(200):
        m, v_hat = NEAREST.decode(planes, 32)
        share = 1 / v_hat.double().sqrt()
        spent += m * share
        new = m * 0.9
        new[31] = m[31]  # the largest, with gradients of its own
        lost = NEAREST.encode((new, v_hat), planes, step=step)
        unspent += lost * share * 10
    left = NEAREST.decode(planes, 32)[0]
    stuck = (left[:31] != 0).any()
    assert stuck, "the case that matters does occur"
    total = spent + unspent + left.double() * share * 10
    assert ((total - truth).abs() <= 1e-3 * truth.abs() + 1e-3)[:31].all()
    assert ((spent - truth).abs() > 1)[:31].any(), "without what the errors say, it would be wrong"


def test_step_and_position_both_matter_with_dither_only() -> None:
    m, v = group_values(20.0)
    seen: dict[object, list[Tensor]] = {NEAREST: [], DITHERED: []}
    for codec, found in seen.items():
        for index, step in ((0, 1), (0, 2), (64, 1)):
            planes = blank(32)
            codec.encode((m, v), planes, index=index, step=step)
            found.append(planes[1].int() * 256 + planes[0])
    for other in (1, 2):
        assert torch.equal(seen[NEAREST][0], seen[NEAREST][other])
        assert not torch.equal(seen[DITHERED][0], seen[DITHERED][other])
