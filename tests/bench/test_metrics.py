"""The metrics on numbers that can be done by hand."""

from __future__ import annotations

import math

import torch

from flashoptim_hf.bench.metrics import update_error, worst_step


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_update_error_compares_the_last_step_only():
    exact = rows([9.0, 9.0], [3.0, 4.0])
    assert update_error(rows([-1.0, 7.0], [3.0, 4.0]), exact, 1e-3) == 0
    assert update_error(rows([9.0, 9.0], [3.0, 4.5]), exact, 1e-3) == 0.1


def test_update_error_where_nothing_should_move():
    still = rows([0.0, 0.0])
    assert update_error(still, still, 1e-3) == 0
    assert update_error(rows([0.0, 1e-9]), still, 1e-3) == math.inf
    assert math.isnan(update_error(rows([math.nan, 0.0]), still, 1e-3))


def test_worst_step_is_in_units_of_lr_and_counts_the_first():
    exact = rows([0.0, 0.0])
    assert worst_step(rows([0.5, 0.0]), exact, 0.25) == 2
    assert worst_step(rows([0.5, 0.0], [0.25, 0.125]), exact, 0.25) == 2
    assert worst_step(rows([0.5, 0.0], [-0.5, 0.125]), exact, 0.25) == 4
    assert math.isnan(worst_step(rows([0.5, 0.0], [math.nan, 0.0]), exact, 0.25))
