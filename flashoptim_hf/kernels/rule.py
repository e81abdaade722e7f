"""What an update rule is, and what a kernel is given: the interface between `optim/`, which knows algorithms, and `kernels/`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..codecs.base import ALIGN, State


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
        needs_states: group options -> whether groups with these options keep states at all. Where not, both functions get and return an
            empty tuple of states. None (default): always.
        settle: for codecs that feed errors back: (new states, what rounding takes from the first of them, new weight, hyper, step) -> the
            weight from which the rounded state leads where the exact one would have led. None (default): errors stay.
        device_settle: the same for Triton. Set both or none.
        device_betas: of a rule of two averages, m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g^2: hyper -> (beta1, 1 - beta1,
            beta2, 1 - beta2). None (default): the rule is none, or is not served so.
        device_sums: `device` for such states in units of what a gradient adds, M = m / (1 - beta1) and V = v / (1 - beta2) - 2^-126, which
            cost one multiply-add each: from (beta1 M / scale, beta2 (V + 2^-126) - 2^-126, scale) it returns (M, V). Below 0 there is no v.
            Set both or none.
    """

    name: str
    states: tuple[State, ...]
    hyper: tuple[str, ...]
    scalars: Callable[[dict[str, Any], int], tuple[float, ...]]
    eager: Callable[[Sequence[Tensor], Tensor, Tensor, Sequence[Any]], tuple[tuple[Tensor, ...], Tensor]]
    device: Any
    needs_states: Callable[[dict[str, Any]], bool] | None = None
    settle: Callable[[Sequence[Tensor], Tensor, Tensor, Sequence[Any], int], Tensor] | None = None
    device_settle: Any = None
    device_betas: Any = None
    device_sums: Any = None

    def keeps_states(self, group: dict[str, Any]) -> bool:
        """Whether a group with these options keeps states."""
        return self.needs_states is None or self.needs_states(group)

    def serving(self, group: dict[str, Any]) -> UpdateRule:
        """This rule with the states that a group with these options keeps: all, or none."""
        return self if self.keeps_states(group) else replace(self, states=())


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
        table: the parameter's table, flat, where the codec has one; read, not changed.
    """

    param: Tensor
    grad: Tensor
    start: int
    index: int
    step: int
    hyper: tuple[Any, ...]
    table: Tensor | None = None


LIMIT = 2.0**62
"""Gradients of this magnitude and above count as infinite: their square, and with it the second moment, would leave what fp32 holds."""

DTYPE_CODE = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""How dtypes are written in `Segments.rows`."""
_DTYPES = {code: dtype for dtype, code in DTYPE_CODE.items()}


class Segments:
    """Many segments as columns, so that a step over hundreds of tensors costs a few array operations instead of hundreds of objects.

    Attributes:
        params, grads: contiguous tensors of any shape that hold the segments. They also keep what the addresses point to alive.
        rows: int64 (segments, 8): addresses of param and grad, start, numel, index, step, and the codes of both dtypes.
        hyper: fp32 (segments, len(rule.hyper)); column 0, the learning rate, is not valid where `lr` is set.
        cuts: for each segment, where it begins and ends in its flattened tensors; None where it is all of them.
        lr: for each segment, the learning rate as a 0-dim tensor on the page's device; None where all are numbers in `hyper`.
        tables: for each segment, its parameter's table, where the codec has one; else None.
        uniform: it is known that there are segments, none is empty, and parameters have one dtype, and gradients have one. False: unknown.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        rows: np.ndarray,
        hyper: np.ndarray,
        lr: Sequence[Tensor] | None,
        cuts: Sequence[tuple[int, int]] | None = None,
        uniform: bool = False,
        tables: Sequence[Tensor] | None = None,
    ) -> None:
        self.params = params
        self.grads = grads
        self.rows = rows
        self.hyper = hyper
        self.lr = lr
        self.cuts = cuts
        self.uniform = uniform
        self.tables = tables

    @classmethod
    def of(cls, segments: Sequence[Segment] | Segments) -> Segments:
        """Columns of a list of segments; columns as they are."""
        if isinstance(segments, Segments):
            return segments
        assert all(s.start % ALIGN == 0 for s in segments)
        rows = np.array(
            [
                (
                    *(s.param.data_ptr(), s.grad.data_ptr(), s.start, s.param.numel(), s.index, s.step),
                    *(DTYPE_CODE[s.param.dtype], DTYPE_CODE[s.grad.dtype]),
                )
                for s in segments
            ],
            dtype=np.int64,
        ).reshape(-1, 8)
        device_lr = any(isinstance(s.hyper[0], Tensor) for s in segments)
        lr = [torch.as_tensor(s.hyper[0], device=s.param.device).float().reshape(()) for s in segments] if device_lr else None
        hyper = [(0.0 if device_lr else s.hyper[0], *s.hyper[1:]) for s in segments]
        tables = [s.table for s in segments if s.table is not None]
        assert len(tables) in (0, len(segments))
        params, grads = [s.param for s in segments], [s.grad for s in segments]
        return cls(params, grads, rows, np.array(hyper, dtype=np.float32), lr, tables=tables or None)

    @property
    def grad_dtype(self) -> torch.dtype:
        """Of the first gradient, which need not be asked for."""
        return _DTYPES[int(self.rows[0, 7])]

    def some(self, chosen: np.ndarray) -> Segments:
        """The segments of these numbers, in this order."""
        picked = chosen.tolist()
        return Segments(
            [self.params[i] for i in picked],
            [self.grads[i] for i in picked],
            self.rows[chosen],
            self.hyper[chosen],
            None if self.lr is None else [self.lr[i] for i in picked],
            None if self.cuts is None else [self.cuts[i] for i in picked],
            tables=None if self.tables is None else [self.tables[i] for i in picked],
        )

    def __len__(self) -> int:
        return len(self.params)

    def __iter__(self) -> Iterator[Segment]:
        for i, (param, grad) in enumerate(zip(self.params, self.grads, strict=True)):
            param, grad = param.view(-1), grad.view(-1)
            if self.cuts is not None:
                begin, end = self.cuts[i]
                param, grad = param[begin:end], grad[begin:end]
            _, _, start, _, index, step, _, _ = (int(number) for number in self.rows[i])
            hyper = tuple(float(number) for number in self.hyper[i])
            rates = hyper if self.lr is None else (self.lr[i], *hyper[1:])
            yield Segment(param, grad, start, index, step, rates, None if self.tables is None else self.tables[i])


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
