"""The laboratory's streams: each one has a single thing in it that breaks 8-bit states somewhere. All are made, none is drawn from a run.

A stream is a function of (steps, elements, generator) that returns fp32 gradients [steps, elements]; its docstring's first line is what the
table's legend says of it. A new stream is one more function in `STREAMS`. Groups of a codec are 32 or 64 neighbours, so that where
elements differ, neighbours do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .streams import Problem

Stream = Callable[[int, int, torch.Generator], Tensor]


def normal(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """Standard normal noise."""
    return torch.randn(steps, elements, generator=generator)


def scales(sigma: float, elements: int, generator: torch.Generator) -> Tensor:
    """A lognormal scale for each element."""
    return torch.exp(sigma * torch.randn(elements, generator=generator))


def heavy_tails(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """Student's t with 1.5 degrees of freedom (no variance), element scales lognormal with sigma 1."""
    # t is a normal number over the root of a chi-square one, which with 1.5 degrees of freedom is twice a gamma number of shape 0.75
    exponential = -torch.log(torch.rand(steps, elements, generator=generator).clamp_min(1e-12))
    power = torch.rand(steps, elements, generator=generator).clamp_min(1e-12) ** (1 / 0.75)
    chi = 2 * exponential * power  # not gamma exactly, with the same power of its density at 0, which is what makes the tails
    return 1e-3 * scales(1.0, elements, generator) * normal(steps, elements, generator) / (chi / 1.5).sqrt().clamp_min(1e-6)


def sparse_rows(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """An embedding: rows of 48 elements, of which row k has a gradient with probability 1 / (k + 1), all others exactly 0."""
    rows = torch.arange(elements) // 48
    chance = 1 / (rows + 1.0)
    used = torch.rand(steps, int(rows[-1]) + 1, generator=generator)[:, rows] < chance
    return 1e-3 * scales(1.0, elements, generator) * normal(steps, elements, generator) * used


def odd_zeros(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """Element scales lognormal with sigma 2; gradients at even steps, exact zeros at odd ones."""
    grads = 1e-3 * scales(2.0, elements, generator) * normal(steps, elements, generator)
    grads[1::2] = 0
    return grads


def residue(steps: int, elements: int, generator: torch.Generator) -> Tensor:  # noqa: ARG001
    """In every 32 elements one alternates between +1 and -1 and the others stand at 1e-3; all stop after half of the steps."""
    grads = torch.full((steps, elements), 1e-3)
    grads[::2, ::32], grads[1::2, ::32] = 1.0, -1.0
    grads[steps // 2 :] = 0
    return grads


def drifting_scale(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """The scale of each element swings over six decades, once in 400 steps, neighbours at different phases."""
    phase = 2 * math.pi * torch.rand(elements, generator=generator)
    swing = 3 * torch.sin(2 * math.pi * torch.arange(steps)[:, None] / 400 + phase)
    return 1e-3 * 10**swing * normal(steps, elements, generator)


def growing(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """Gradients of one sign that grow by 1 % a step, each element at its own lognormal scale of sigma 2."""
    noise = 1 + 0.1 * normal(steps, elements, generator)
    return 1e-6 * scales(2.0, elements, generator) * noise * 1.01 ** torch.arange(steps)[:, None]


def spikes(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """Noise in which one entry in 500 is 1000 times as large, and every 97th step is 100 times as large as a whole."""
    grads = 1e-3 * scales(0.5, elements, generator) * normal(steps, elements, generator)
    grads *= torch.where(torch.rand(steps, elements, generator=generator) < 0.002, 1000.0, 1.0)
    grads[96::97] *= 100
    return grads


def bursts(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """Noise of 1e-6 in which each element has a burst of 40 gradients of one sign and about 1, once in 150 steps."""
    grads = 1e-6 * scales(1.0, elements, generator) * normal(steps, elements, generator)
    begins = torch.rand(steps, elements, generator=generator) < 1 / 150
    inside = begins.float().cumsum(0) > torch.nn.functional.pad(begins, (0, 0, 40, 0))[:steps].float().cumsum(0)
    sign = torch.where(torch.rand(elements, generator=generator) < 0.5, -1.0, 1.0)
    return torch.where(inside, 1e6 * sign * grads.abs(), grads)


def onset(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """Nothing for a quarter of the steps, then noise with a mean; one in 16 elements jumps to 1000 times as much at half time."""
    grads = 1e-3 * (normal(steps, elements, generator) + 1)
    grads[: steps // 4] = 0
    grads[steps // 2 :, ::16] *= 1000
    return grads


def tiny(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """Noise of 1e-20 with eps 1e-8: v is below what fp32 holds, and nothing should move."""
    return 1e-20 * scales(1.0, elements, generator) * normal(steps, elements, generator)


def small(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """Noise of 1e-14 with eps 0: near the lower end of what fp32 holds of v."""
    return 1e-14 * scales(1.0, elements, generator) * normal(steps, elements, generator)


def huge(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """Noise of 1e10."""
    return 1e10 * scales(1.0, elements, generator) * normal(steps, elements, generator)


def immense(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """Noise of 1e17, the largest that stays below 2^62, from where on a gradient counts as infinite."""
    return (1e17 * normal(steps, elements, generator)).clamp(-4e18, 4e18)


def constant(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """The same gradient at every step, each element at its own lognormal scale of sigma 2 and with its own sign."""
    sign = torch.where(torch.rand(elements, generator=generator) < 0.5, -1.0, 1.0)
    return (1e-3 * sign * scales(2.0, elements, generator)).expand(steps, -1).clone()


def late(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """As `constant`, but every second element begins after a quarter of the steps: its v grows while its group stands still."""
    grads = constant(steps, elements, generator)
    grads[: steps // 4, 1::2] = 0
    return grads


def alternating(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """The same magnitude at every step with the sign turned each time, each element at its own lognormal scale of sigma 1."""
    sign = torch.where(torch.arange(steps) % 2 == 0, 1.0, -1.0)[:, None]
    return 1e-3 * sign * scales(1.0, elements, generator)


def wide(steps: int, elements: int, generator: torch.Generator) -> Tensor:
    """Noise whose element scales spread evenly over nine decades, 30 octaves, within every group."""
    exponent = torch.rand(elements, generator=generator) * 9 - 9
    return 10**exponent * normal(steps, elements, generator)


def zeros(steps: int, elements: int, generator: torch.Generator) -> Tensor:  # noqa: ARG001
    """No gradient at any step."""
    return torch.zeros(steps, elements)


STREAMS: Mapping[str, Stream] = {
    function.__name__: function
    for function in (
        *(heavy_tails, sparse_rows, odd_zeros, residue, drifting_scale, growing, spikes, bursts, onset),
        *(tiny, small, huge, immense, constant, late, alternating, wide, zeros),
    )
}
"""Name to stream."""

ZERO_EPS = ("small", "zeros")
"""Streams that are run with eps = 0."""


def groups(seeds: Sequence[int], *, steps: int = 400, elements: int = 384) -> dict[str, list[Problem]]:
    """Every stream by its case "lab/NAME", with every seed; that of one is "lab/NAME/seed=N". Defaults: 400 steps of 384 elements."""
    return {
        f"lab/{name}": [
            Problem(
                f"lab/{name}/seed={seed}",
                stream(steps, elements, torch.Generator().manual_seed(seed)),
                eps=0.0 if name in ZERO_EPS else 1e-8,
            )
            for seed in seeds
        ]
        for name, stream in STREAMS.items()
    }
