"""The truth against torch's AdamW, and the codecs' path against the package's own optimizer."""

from __future__ import annotations

import pytest
import torch

import flashoptim_hf.optim.adamw as adamw
from flashoptim_hf import FlashLion, FlashSGD
from flashoptim_hf.bench.metrics import update_error
from flashoptim_hf.bench.streams import Problem, drifting
from flashoptim_hf.bench.subjects import ALGORITHMS, LION_BETAS, MOMENTUM, algorithm, codec_subject, exact
from flashoptim_hf.errors import ConfigurationError


@pytest.fixture
def problem() -> Problem:
    # 150 elements: two whole groups of 64 and a short one
    return Problem("w", drifting(1.0, 1.0, seed=5, steps=60, elements=150), lr=2e-3, betas=(0.8, 0.99))


def step_through(optimizer: torch.optim.Optimizer, param: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
    for grad in grads:
        param.grad = grad.to(param.dtype)
        optimizer.step()
    return param.detach().double()


def test_exact_is_torch_adamw_in_float64(problem):
    param = torch.nn.Parameter(torch.zeros(150, dtype=torch.float64))
    optimizer = torch.optim.AdamW([param], lr=problem.lr, betas=problem.betas, eps=problem.eps, weight_decay=0.0)
    assert torch.allclose(exact(problem)[-1], step_through(optimizer, param, problem.grads), rtol=1e-12, atol=0)


def test_exact_does_not_move_without_a_gradient_when_eps_is_zero():
    weights = exact(Problem("w", torch.tensor([[0.0, 1.0], [1.0, 1.0]]), eps=0.0))
    assert weights[0].tolist() == pytest.approx([0, -1e-3])
    assert torch.isfinite(weights).all()
    assert weights[1, 0] < 0


def test_none_differs_from_exact_by_fp32_rounding_only(problem):
    (outcome,) = codec_subject("none").solve([problem])
    assert outcome.bytes_per_param == 8
    assert 0 < update_error(outcome.weights, exact(problem), problem.lr) < 1e-6


@pytest.mark.parametrize("codec", ["log", "joint"])
def test_a_codec_moves_as_the_optimizer_does(problem, codec):
    (outcome,) = codec_subject(codec).solve([problem])
    param = torch.nn.Parameter(torch.zeros(150))
    optimizer = adamw.FlashAdamW(
        [param], lr=problem.lr, betas=problem.betas, eps=problem.eps, weight_decay=0.0, codec=codec, kernel="eager", master_bits=None
    )
    moved = step_through(optimizer, param, problem.grads)
    # fp32 weights against float64 ones, and errors that float32 puts on the other side of a tie and feeds back; a different dither or
    # group would show at the codec's own error, which is 0.01
    assert update_error(outcome.weights, moved[None], problem.lr) < (1e-5 if codec == "log" else 1e-3)
    assert update_error(outcome.weights, exact(problem), problem.lr) > 1e-3


def test_dither_can_be_switched_off(problem):
    (with_dither,), (without) = codec_subject("log").solve([problem]), next(iter(codec_subject("log", dither=False).solve([problem])))
    assert not torch.equal(with_dither.weights, without.weights)


def test_short_groups_are_counted_in_full(problem):
    (outcome,) = codec_subject("log").solve([problem])
    assert outcome.bytes_per_param == (2 * 150 + 3 * (4 + 4 + 2)) / 150


def test_exact_sgd_is_torchs_in_float64(problem):
    param = torch.nn.Parameter(torch.zeros(150, dtype=torch.float64))
    optimizer = torch.optim.SGD([param], lr=problem.lr, momentum=MOMENTUM)
    assert torch.allclose(ALGORITHMS["sgd"].exact(problem)[-1], step_through(optimizer, param, problem.grads), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "make"),
    [("lion", lambda p, **o: FlashLion(p, betas=LION_BETAS, **o)), ("sgd", lambda p, **o: FlashSGD(p, momentum=MOMENTUM, **o))],
)
def test_the_momentum_moves_as_the_optimizer_does(problem, name, make):
    chosen = ALGORITHMS[name]
    exact_weights = chosen.exact(problem)
    (none,) = codec_subject("none", algorithm=chosen).solve([problem])
    assert update_error(none.weights, exact_weights, problem.lr) < 1e-6
    (outcome,) = codec_subject("square", algorithm=chosen).solve([problem])
    param = torch.nn.Parameter(torch.zeros(150))
    moved = step_through(make([param], lr=problem.lr, codec="square", kernel="eager", master_bits=None), param, problem.grads)
    assert update_error(outcome.weights, moved[None], problem.lr) < 1e-5
    assert update_error(outcome.weights, exact_weights, problem.lr) > 1e-3


def test_unknown_algorithm_is_named():
    with pytest.raises(ConfigurationError, match=r"'adam'.*adamw, lion, sgd"):
        algorithm("adam")


def test_unknown_codec_is_named():
    with pytest.raises(ConfigurationError, match=r"'loog'.*log"):
        codec_subject("loog")
