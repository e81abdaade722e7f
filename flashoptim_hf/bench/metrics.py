"""How far a trajectory of weights is from the exact one. A metric is one entry of `METRICS`.

Trajectories are fp64 tensors [steps, elements]: the weights after each step, from weights of zero. `unit` is what a step is measured in:
the learning rate, or one number for each step, shape (steps, 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Unit = float | Tensor


def update_error(weights: Tensor, exact: Tensor, unit: Unit) -> float:  # noqa: ARG001
    """Relative error of the total update, |w - exact| / |exact| in the 2-norm after the last step; 0 where neither moves."""
    moved, off = exact[-1].norm().item(), (weights[-1] - exact[-1]).norm().item()
    return off / moved if moved > 0 else (math.inf if off > 0 else off)


def cosine(weights: Tensor, exact: Tensor, unit: Unit) -> float:  # noqa: ARG001
    """Cosine of the angle between the total update and the exact one; 1 where neither moves."""
    lengths = weights[-1].norm().item(), exact[-1].norm().item()
    if lengths == (0.0, 0.0):
        return 1.0
    # scaled first: the products of updates of 1e-150 would be subnormal
    a, b = (w[-1] / length if length else w[-1] for w, length in zip((weights, exact), lengths, strict=True))
    return (a @ b).item()


def steps(weights: Tensor) -> Tensor:
    """How far each weight moves in each step; fp64 [steps, elements]."""
    return torch.cat((weights[:1], weights.diff(dim=0))).abs()


def in_units(moves: Tensor, unit: Unit) -> Tensor:
    """`moves` in units; 0 where nothing moves and the unit is 0."""
    return torch.where(moves == 0, moves, moves / unit)


def worst_step(weights: Tensor, exact: Tensor, unit: Unit) -> float:  # noqa: ARG001
    """The largest move of any weight in any step. Exact AdamW seldom moves by more than a few units."""
    return in_units(steps(weights), unit).max().item()


def worst_step_exact(weights: Tensor, exact: Tensor, unit: Unit) -> float:
    """The exact move of the weight and step that `worst_step` is of."""
    place = in_units(steps(weights), unit).argmax()
    return in_units(steps(exact), unit).flatten()[place].item()


def step_beyond(weights: Tensor, exact: Tensor, unit: Unit) -> float:
    """How far any move of any weight goes beyond twice the exact one of the same step; below 0 where none does."""
    return in_units(steps(weights) - 2 * steps(exact), unit).max().item()


METRICS: Mapping[str, tuple[Callable[[Tensor, Tensor, Unit], float], str]] = {
    "update_error": (update_error, "1"),
    "cosine": (cosine, "1"),
    "worst_step": (worst_step, "lr"),
    "worst_step_exact": (worst_step_exact, "lr"),
    "step_beyond": (step_beyond, "lr"),
}
"""Metric to its function (weights, exact weights, unit of a step) and its unit."""
