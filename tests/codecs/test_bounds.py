"""The bounds of `docs/numerics.md`: hypothesis looks for a group that breaks one; `bounds.py` looks at a million for each codec."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashoptim_hf.codecs import weight_split
from flashoptim_hf.codecs.base import get_codec, known_codecs
from flashoptim_hf.codecs.joint import lattice
from tests.codecs import bounds

proof = settings(deadline=None, max_examples=10, derandomize=True, database=None)
PER_EXAMPLE = 64


def test_every_codec_has_its_bounds() -> None:
    assert {codec for codec, *_ in bounds.CASES.values()} == set(known_codecs())
    for name, (codec, states, dither, _) in bounds.CASES.items():
        made = get_codec(codec, bounds.MOMENTS[:states], dither)
        assert f"{made.name}{'' if dither else ', nearest'}" in name


@pytest.mark.parametrize("name", [*bounds.CASES, "weights"])
@proof
@given(seed=st.integers(0, 2**62))
def test_no_group_breaks_a_bound(name: str, seed: int) -> None:
    for what, ratio in bounds.search(name, PER_EXAMPLE, seed).items():
        assert ratio <= 1, what


@pytest.mark.parametrize("name", [*(name for name in bounds.CASES if name != "none"), "weights"])
def test_no_bound_is_far_from_what_happens(name: str) -> None:
    """The control: a bound that were a third smaller would be broken."""
    worst = bounds.search(name, 4096)
    for what, ratio in worst.items():
        # 16-bit corrections are mostly finer than fp32
        assert ratio > 0.67 or "32 bits" in what, what


@pytest.mark.parametrize("name", ["log", "joint", "softsign", "square, nearest"])
def test_a_code_that_is_off_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that gives elements their neighbours' values breaks a bound."""
    codec, states, dither, _ = bounds.CASES[name]
    kind = type(get_codec(codec, bounds.MOMENTS[:states], dither))
    decode = kind.decode

    def wrong(self, planes, numel):
        values = decode(self, planes, numel)
        return tuple(value.roll(1) for value in values)

    monkeypatch.setattr(kind, "decode", wrong)
    assert max(bounds.search(name, 64).values()) > 1


def test_the_search_is_a_command() -> None:
    command = [sys.executable, "-m", "tests.codecs.bounds", "--examples", "64", "--cases", "square; none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "square: 64 groups" in done.stdout
    assert "no bound is broken" in done.stdout


# What repeated encodes do to a moving average.


def drift(name: str, dither: bool, beta2: float, steps: int, noise: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
    """v̂ after so many steps, what it should be, and q of the lattice, the relative distance of two values of v.

    With noise, stationary normal gradients of one size; without, constant ones in every second element, beginning after 20 steps, beside
    others that stand still from the beginning.
    """
    codec = get_codec(name, bounds.MOMENTS, dither)
    numel = 1024
    generator = torch.Generator().manual_seed(0)
    planes = [torch.zeros(plane.entries(numel), dtype=plane.dtype) for plane in codec.planes]
    scale = torch.exp2(-6 * torch.rand(numel, generator=generator))
    v = torch.zeros(numel, dtype=torch.float64)
    for step in range(1, steps + 1):
        grad = scale * torch.randn(numel, generator=generator) if noise else scale.clone()
        if not noise:
            # the group's largest has its final v from the start, so that the lattice stands still
            grad[::32] = 2.0 / math.sqrt(1 - beta2) if step == 1 else 2.0
            grad[1::2] *= step > 20
        v = beta2 * v + (1 - beta2) * grad.double() ** 2
        v_hat = codec.decode(planes, numel)[1]
        codec.encode((torch.zeros(numel), beta2 * v_hat + (1 - beta2) * grad**2), planes, step=step)
    width = planes[3].float() if name == "log" else lattice(planes[3].float())[2]
    q = 4 ** float(width.max()) - 1
    late = torch.arange(numel) % 2 == 1
    v_hat = codec.decode(planes, numel)[1].double()
    return (v_hat, v, q) if noise else (v_hat[late], v[late], q)


@pytest.mark.parametrize("name", ["log", "joint"])
def test_with_dither_the_average_has_no_bias_and_the_variance_of_its_sum(name: str) -> None:
    """The root mean square stays below sqrt(q E|g^2 / v - 1| / 2) = sqrt(0.484 q), which is not far off."""
    v_hat, v, q = drift(name, True, 0.999, 2500, noise=True)
    off = v_hat / v - 1
    rms = off.square().mean().sqrt().item()
    assert abs(off.mean().item()) < 4 * rms / math.sqrt(len(off))
    assert 0.4 * math.sqrt(0.484 * q) < rms < math.sqrt(0.484 * q)


@pytest.mark.parametrize("name", ["log", "joint"])
def test_rounding_to_nearest_swallows_what_is_inside_its_band_and_no_more(name: str) -> None:
    """v̂ stops where (1 - beta2) (g^2 / v̂ - 1) is below q / 2, so never below g^2 / (1 + q / (2 (1 - beta2))). With dither it goes on."""
    beta2 = 0.999
    v_hat, v, q = drift(name, False, beta2, 1200, noise=False)
    band = 1 + q / (2 * (1 - beta2)) * (1 + q)
    final = v / (1 - beta2 ** (1200 - 20))
    assert (v_hat >= final / band).all()
    assert v_hat.median() < 0.8 * v.median(), "the band is there"
    v_hat, v, _ = drift(name, True, beta2, 1200, noise=False)
    assert ((v_hat / v).mean() - 1).abs() < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [24, 32])
def test_an_update_below_half_a_correction_is_swallowed_and_one_above_is_not(dtype: torch.dtype, bits: int) -> None:
    """Half a correction is ulp / 508, or 2^-16 / (1 + 2^-15) ulp; fp32 holds updates of 2^-24 only, so 16 bits of bf16 come close to it."""
    p = torch.linspace(1.01, 1.99, 500).to(dtype)
    c = torch.randint(-100, 100, (500,), generator=torch.Generator().manual_seed(0)).to(weight_split.CORRECTION_DTYPE[bits])
    w = weight_split.join(p, c)
    ulp = 2.0 ** (-7 if dtype == torch.bfloat16 else -10)
    half = ulp / (4 * (127 if bits == 24 else 32767))
    if half < 2.0**-23:
        pytest.skip("fp32 itself is coarser")
    for factor, moves in ((0.9, False), (1.1, True)):
        for sign in (-1, 1):
            after = weight_split.join(*weight_split.split((w.double() + sign * factor * half).float(), dtype, bits))
            assert (after != w).all() == moves
            assert (after == w).all() != moves
