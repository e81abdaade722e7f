"""Who takes part in the fidelity bench: this package's codecs, and each algorithm in float64 as the truth. The peers are in `peers.py`.

A new algorithm is one entry of `ALGORITHMS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..codecs.base import Codec, get_codec
from ..errors import ConfigurationError
from ..kernels.rule import UpdateRule
from ..optim import adamw, lion, sgd
from .metrics import steps
from .streams import Problem

LION_BETAS = (0.9, 0.99)
MOMENTUM = 0.9


@dataclass(frozen=True)
class Outcome:
    """What one subject made of one problem.

    Attributes:
        weights: fp64 [steps, elements], the weights after each step.
        bytes_per_param: bytes of its states per element, without tables that all parameters share.
    """

    weights: Tensor
    bytes_per_param: float


@dataclass(frozen=True)
class Subject:
    """A name for the report, and a function that solves problems in their order."""

    name: str
    solve: Callable[[Sequence[Problem]], Iterable[Outcome]]


def exact(problem: Problem) -> Tensor:
    """AdamW in float64, from its definition (arXiv 1412.6980, algorithm 1): fp64 [steps, elements].

    Where the denominator is 0 (eps = 0 and no gradient so far) the weight does not move.
    """
    beta1, beta2 = problem.betas
    grads = problem.grads.double()
    m, v, w = (torch.zeros_like(grads[0]) for _ in range(3))
    weights = torch.empty_like(grads)
    for t, grad in enumerate(grads, start=1):
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad**2
        denominator = (v / (1 - beta2**t)).sqrt() + problem.eps
        w = w - problem.lr * torch.where(denominator > 0, m / (1 - beta1**t) / denominator, 0)
        weights[t - 1] = w
    return weights


def exact_lion(problem: Problem) -> Tensor:
    """Lion with `LION_BETAS` in float64, from its definition (arXiv 2302.06675, program 1): fp64 [steps, elements]."""
    beta1, beta2 = LION_BETAS
    grads = problem.grads.double()
    m, w = torch.zeros_like(grads[0]), torch.zeros_like(grads[0])
    weights = torch.empty_like(grads)
    for t, grad in enumerate(grads):
        w = w - problem.lr * torch.sign(beta1 * m + (1 - beta1) * grad)
        m = beta2 * m + (1 - beta2) * grad
        weights[t] = w
    return weights


def exact_sgd(problem: Problem) -> Tensor:
    """SGD with `MOMENTUM` in float64, as in `torch.optim.SGD`: fp64 [steps, elements]."""
    grads = problem.grads.double()
    buffer, w = torch.zeros_like(grads[0]), torch.zeros_like(grads[0])
    weights = torch.empty_like(grads)
    for t, grad in enumerate(grads):
        buffer = MOMENTUM * buffer + grad
        w = w - problem.lr * buffer
        weights[t] = w
    return weights


@dataclass(frozen=True)
class Algorithm:
    """What is done with the gradients of a problem: its rule, the group options that it is run with, the truth, and the unit of a step.

    A unit is lr, or for each step a number, shape (steps, 1).
    """

    rule: UpdateRule
    options: Callable[[Problem], dict[str, Any]]
    exact: Callable[[Problem], Tensor]
    unit: Callable[[Problem, Tensor], float | Tensor] = lambda problem, _: problem.lr


def largest_move(problem: Problem, truth: Tensor) -> Tensor:  # noqa: ARG001
    """The largest exact move of each step: SGD's own moves are as large as its gradients are, and lr says nothing of them."""
    return steps(truth).amax(1, keepdim=True)


ALGORITHMS: Mapping[str, Algorithm] = {
    "adamw": Algorithm(adamw.RULE, lambda problem: {"betas": problem.betas, "eps": problem.eps, "weight_decay": 0.0}, exact),
    "lion": Algorithm(lion.RULE, lambda _: {"betas": LION_BETAS, "weight_decay": 0.0}, exact_lion),
    "sgd": Algorithm(
        sgd.RULE,
        lambda _: {"momentum": MOMENTUM, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "decoupled_weight_decay": False},
        exact_sgd,
        largest_move,
    ),
}
"""Name to algorithm."""


def algorithm(name: str) -> Algorithm:
    """The algorithm `name`.

    Raises:
        ConfigurationError: no such algorithm; the message lists those that exist.
    """
    if name not in ALGORITHMS:
        raise ConfigurationError(f"--algorithm {name!r} is not known; choose one of {', '.join(ALGORITHMS)}.")
    return ALGORITHMS[name]


def codec_subject(name: str, *, dither: bool = True, algorithm: Algorithm = ALGORITHMS["adamw"]) -> Subject:
    """An algorithm with its states in the codec `name`, as the eager kernel does it; weights are kept in float64, outside the codec.

    Raises:
        ConfigurationError: no such codec, or one that does not hold the algorithm's states.
    """
    codec = get_codec(name, algorithm.rule.states, dither)

    def solve(problems: Sequence[Problem]) -> Iterator[Outcome]:
        for problem in problems:
            yield Outcome(through_codec(problem, codec, algorithm), codec.nbytes(problem.grads.shape[1]) / problem.grads.shape[1])

    return Subject(name, solve)


def through_codec(problem: Problem, codec: Codec, algorithm: Algorithm) -> Tensor:
    """The weights after each step, fp64 [steps, elements]; only the states pass through the codec."""
    count, numel = problem.grads.shape
    rule, options = algorithm.rule, algorithm.options(problem)
    planes = [torch.zeros(plane.entries(numel), dtype=plane.dtype) for plane in codec.parts]
    weights = torch.empty(count, numel, dtype=torch.float64)
    weight = torch.zeros(numel, dtype=torch.float64)
    for t, grad in enumerate(problem.grads, start=1):
        hyper = (problem.lr, *rule.scalars(options, t))
        states, weight = rule.eager(codec.decode(planes, numel), weight, grad, hyper)
        # fp32: coupled decay mixes the float64 weights in
        states = tuple(state.float() for state in states)
        lost = codec.encode(states, planes, index=0, step=t)
        codec.advance(planes, t)
        if lost is not None and rule.settle is not None:
            weight = rule.settle(states, lost, weight, hyper, t)
        weights[t - 1] = weight
    return weights
