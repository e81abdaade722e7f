"""The metrics on numbers that can be done by hand."""

from __future__ import annotations

import math

import pytest
import torch

from flashoptim_hf.bench.metrics import cosine, step_beyond, update_error, worst_step, worst_step_exact


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


def test_the_exact_step_is_that_of_the_same_weight_and_step():
    weights, exact = rows([1.0, 0.0], [1.5, 3.0]), rows([0.5, 0.0], [1.5, 0.75])
    assert worst_step(weights, exact, 0.25) == 12
    assert worst_step_exact(weights, exact, 0.25) == 3


def test_a_step_is_beyond_by_what_it_is_longer_than_twice_the_exact_one():
    exact = rows([1.0, 0.0], [2.0, 0.0])
    assert step_beyond(rows([2.0, 0.0], [3.0, 0.0]), exact, 0.5) == 0
    assert step_beyond(rows([-2.5, 0.0], [-2.5, 0.25]), exact, 0.5) == 1
    assert math.isnan(step_beyond(rows([2.0, 0.0], [math.nan, 0.0]), exact, 0.5))
    assert step_beyond(exact, exact, 1.0) == 0
    # one unit for each step; nothing moves where nothing should
    assert step_beyond(rows([3.0, 0.0], [4.0, 0.0]), exact, torch.tensor([[2.0], [0.5]])) == 0.5
    still = rows([0.0, 0.0])
    assert step_beyond(still, still, torch.zeros(1, 1)) == 0
    assert step_beyond(rows([0.0, 1.0]), still, torch.zeros(1, 1)) == math.inf


def test_cosine_of_small_and_missing_updates():
    assert cosine(rows([3e-150, 0.0]), rows([1e-150, 1e-150]), 1.0) == pytest.approx(math.sqrt(0.5))
    assert cosine(rows([0.0, -2.0]), rows([0.0, 1.0]), 1.0) == -1
    assert cosine(rows([0.0]), rows([0.0]), 1.0) == 1
    assert cosine(rows([1.0]), rows([0.0]), 1.0) == 0
