"""How far a trajectory of weights is from the exact one. A metric is one entry of `METRICS`.

Trajectories are fp64 tensors [steps, elements]: the weights after each step, from weights of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor


def update_error(weights: Tensor, exact: Tensor, lr: float) -> float:  # noqa: ARG001
    """Relative error of the total update, |w - exact| / |exact| in the 2-norm after the last step; 0 where neither moves."""
    moved, off = exact[-1].norm().item(), (weights[-1] - exact[-1]).norm().item()
    return off / moved if moved > 0 else (math.inf if off > 0 else off)


def worst_step(weights: Tensor, exact: Tensor, lr: float) -> float:  # noqa: ARG001
    """The largest move of any weight in any step, in units of lr. Exact AdamW seldom moves by more than a few."""
    first, later = weights[0].abs().max(), weights.diff(dim=0).abs()
    return (max(first.item(), later.max().item()) if len(later) else first.item()) / lr if not weights.isnan().any() else math.nan


METRICS: Mapping[str, tuple[Callable[[Tensor, Tensor, float], float], str]] = {
    "update_error": (update_error, "1"),
    "worst_step": (worst_step, "lr"),
}
"""Metric to its function (weights, exact weights, lr) and its unit."""
