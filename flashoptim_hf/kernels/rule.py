"""What an update rule is, and what a kernel is given: the interface between `optim/`, which knows algorithms, and `kernels/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..codecs.base import State


@dataclass(frozen=True)
class UpdateRule:
    """One algorithm, written twice: in plain torch and as a Triton function. Neither knows how states or weights are stored.

    Attributes:
        name: the algorithm, lower case.
        states: its states, in the order in which both functions take and return them.
        hyper: names of the per-parameter scalars, in order; `hyper[0]` is always "lr".
        scalars: (group options without lr, step count after this step) -> the scalars after lr, computed in fp64 on the host.
        eager: (states, weight, grad, hyper) -> (new states, new weight). All fp32 of shape (n,); `hyper` a tuple of floats or of fp32
            0-dim tensors. Must not change its inputs.
        device: the same for Triton: `device(states, weight, grad, hyper)` with tuples of fp32 tiles and scalars.
    """

    name: str
    states: tuple[State, ...]
    hyper: tuple[str, ...]
    scalars: Callable[[dict[str, Any], int], tuple[float, ...]]
    eager: Callable[[Sequence[Tensor], Tensor, Tensor, Sequence[Any]], tuple[tuple[Tensor, ...], Tensor]]
    device: Any


@dataclass
class Segment:
    """One parameter's part of one page.

    Attributes:
        param: the weights, flat and contiguous, shape (numel,), bf16, fp16 or fp32, updated in place.
        grad: their gradient, flat and contiguous, shape (numel,), bf16, fp16 or fp32, only read.
        start: first element in the page's planes, a multiple of `codecs.base.ALIGN`.
        index: position of the first element in the flattened parameter, a multiple of ALIGN.
        step: the parameter's step count, this step included (1 at the first).
        hyper: one number per name in `rule.hyper`; `hyper[0]`, the learning rate, may be a 0-dim tensor on the page's device.
    """

    param: Tensor
    grad: Tensor
    start: int
    index: int
    step: int
    hyper: tuple[Any, ...]


@dataclass(frozen=True)
class Format:
    """How one pool of parameters is stored: everything that a kernel is compiled for, except the dtype of the gradients.

    Attributes:
        rule, codec: the algorithm and its states' codec (built for `rule.states`).
        master_bits: 24 or 32 for bf16 and fp16 weights with an 8- or 16-bit correction, 0 for weights without one.
    """

    rule: UpdateRule
    codec: Any
    master_bits: int
