"""Who takes part in the fidelity bench: this package's codecs, and AdamW in float64 as the truth. The peers are in `peers.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..codecs.base import Codec, get_codec
from ..optim.adamw import RULE
from .streams import Problem


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


def codec_subject(name: str, *, dither: bool = True) -> Subject:
    """AdamW with its states in the codec `name`, as the eager kernel does it; weights are kept in float64, outside the codec.

    Raises:
        ConfigurationError: no such codec, or one that does not hold AdamW's states.
    """
    codec = get_codec(name, RULE.states, dither)

    def solve(problems: Sequence[Problem]) -> Iterator[Outcome]:
        for problem in problems:
            yield Outcome(_through_codec(problem, codec), codec.nbytes(problem.grads.shape[1]) / problem.grads.shape[1])

    return Subject(name, solve)


def _through_codec(problem: Problem, codec: Codec) -> Tensor:
    """The weights after each step, fp64 [steps, elements]; only the states pass through the codec."""
    steps, numel = problem.grads.shape
    options = {"betas": problem.betas, "eps": problem.eps, "weight_decay": 0.0}
    planes = [torch.zeros(plane.entries(numel), dtype=plane.dtype) for plane in codec.planes]
    weights = torch.empty(steps, numel, dtype=torch.float64)
    weight = torch.zeros(numel, dtype=torch.float64)
    for t, grad in enumerate(problem.grads, start=1):
        hyper = (problem.lr, *RULE.scalars(options, t))
        states, weight = RULE.eager(codec.decode(planes, numel), weight, grad, hyper)
        codec.encode(states, planes, index=0, step=t)
        weights[t - 1] = weight
    return weights
