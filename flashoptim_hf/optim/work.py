"""What one step does, prepared once: which pages, which segments, which rows of the kernels' tables.

Between two steps of a training run little changes: the addresses of gradients, the step counts, the learning rate. The rest (which
parameter lies where) is worked out when the set of parameters with gradients changes, and kept. A step over hundreds of small tensors then
costs a few array operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..kernels.rule import DTYPE_CODE, Segments
from ..paging.store import Page
from .layout import STEP as STEP_KEY
from .layout import Layout, Pool, Record, local

PARAM, GRAD, START, NUMEL, INDEX, STEP, PARAM_TYPE, GRAD_TYPE = range(8)
"""Columns of `Segments.rows`."""


class Gradients:
    """The parameters that have a gradient now, their local gradients, and the number of each one's group."""

    def __init__(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.groups: list[int] = []
        for number, group in enumerate(param_groups):
            for param in group["params"]:
                grad = param.grad
                if grad is not None:
                    self.params.append(param)
                    self.grads.append(local(grad))
                    self.groups.append(number)
        for grad in self.grads:
            if grad.layout is not torch.strided:
                raise UnsupportedError(
                    f"a gradient of shape {tuple(grad.shape)} has layout {grad.layout}; sparse gradients are not supported. "
                    "Use nn.Embedding(..., sparse=False)."
                )


class PageWork:
    """The part of a step that falls on one page.

    Attributes:
        pool, page: which.
        owners: for each segment, its parameter's number in the plan.
        cuts: for each segment, where it begins and ends in its parameter; None where every segment is a whole parameter.
        rows: the kernels' table with all that does not change.
    """

    def __init__(self, pool: Pool, page: Page, numbers: dict[Tensor, int]) -> None:
        self.pool, self.page = pool, page
        pieces = [piece for piece in page.pieces if piece.numel and piece.block.owner in numbers]
        self.owners = np.array([numbers[piece.block.owner] for piece in pieces], dtype=np.int64)
        self.rows = np.zeros((len(pieces), 8), dtype=np.int64)
        for row, piece in zip(self.rows, pieces, strict=True):
            row[START], row[NUMEL], row[INDEX] = piece.start, piece.numel, piece.index
        whole = all(piece.numel == piece.block.numel for piece in pieces)
        self.cuts = None if whole else [(piece.index, piece.index + piece.numel) for piece in pieces]
        self.list = self.owners.tolist()

    def segments(self, flat: _Flat, steps: np.ndarray, hyper: np.ndarray, lr: list[Tensor] | None) -> Segments:
        """The table of this step. `steps` and `hyper` have a row for each parameter of the plan."""
        rows, owners = self.rows.copy(), self.owners
        rows[:, PARAM] = flat.addresses[owners] + rows[:, INDEX] * flat.itemsizes[owners]
        rows[:, GRAD] = flat.grad_addresses[owners] + rows[:, INDEX] * flat.grad_itemsizes[owners]
        rows[:, STEP] = steps[owners]
        rows[:, PARAM_TYPE] = flat.types[owners]
        rows[:, GRAD_TYPE] = flat.grad_types[owners]
        params = [flat.params[i] for i in self.list]
        grads = [flat.grads[i] for i in self.list]
        return Segments(params, grads, rows, hyper[owners], None if lr is None else [lr[i] for i in self.list], self.cuts)


class _Flat:
    """All parameters and gradients of a step as contiguous tensors, and their addresses as arrays.

    A parameter of another layout is copied, updated and written back.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.sources = [param.detach() for param in params]
        self.strided = [i for i, param in enumerate(self.sources) if not param.is_contiguous()]
        self.params = [param.contiguous() for param in self.sources]
        self.source_addresses = _addresses(self.sources)
        self.addresses = _addresses(self.params)
        self.itemsizes = np.array([param.itemsize for param in params], dtype=np.int64)
        self.types = np.array([DTYPE_CODE[param.dtype] for param in params], dtype=np.int64)
        self.shapes = [param.shape for param in params]
        self.grads: list[Tensor] = []

    def holds(self, params: Sequence[Tensor]) -> bool:
        """Whether the parameters still lie where they did; one that was converted, moved or resized does not."""
        return (
            bool(np.array_equal(_addresses(params), self.source_addresses))
            and all(param.shape == shape for param, shape in zip(params, self.shapes, strict=True))
            and [i for i, param in enumerate(params) if not param.is_contiguous()] == self.strided
        )

    def take(self, grads: Sequence[Tensor]) -> None:
        """Read the weights of strided parameters and the addresses of this step's gradients."""
        for i in self.strided:
            self.params[i] = self.sources[i].contiguous()
            self.addresses[i] = self.params[i].data_ptr()
        codes = [DTYPE_CODE.get(grad.dtype, -1) for grad in grads]
        if -1 in codes:
            grads = [grad if code >= 0 else grad.float() for grad, code in zip(grads, codes, strict=True)]
            codes = [DTYPE_CODE[grad.dtype] for grad in grads]
        self.grads = [grad if grad.is_contiguous() else grad.contiguous() for grad in grads]
        self.grad_addresses = _addresses(self.grads)
        self.grad_types = np.array(codes, dtype=np.int64)
        self.grad_itemsizes = np.where(self.grad_types == DTYPE_CODE[torch.float32], 4, 2)

    def expect(self) -> None:
        """Make room for gradients that come one by one."""
        count = len(self.params)
        self.grads = [torch.empty(0, device="cpu")] * count
        self.grad_addresses, self.grad_types = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        self.grad_itemsizes = np.ones(count, dtype=np.int64)

    def take_one(self, i: int, grad: Tensor) -> None:
        """`take` for one parameter."""
        if i in self.strided:
            self.params[i] = self.sources[i].contiguous()
            self.addresses[i] = self.params[i].data_ptr()
        grad = grad.detach() if grad.dtype in DTYPE_CODE else grad.detach().float()
        grad = self.grads[i] = grad if grad.is_contiguous() else grad.contiguous()
        self.grad_addresses[i], self.grad_types[i], self.grad_itemsizes[i] = grad.data_ptr(), DTYPE_CODE[grad.dtype], grad.itemsize

    def let_go(self, i: int) -> None:
        """Forget one parameter's gradient."""
        self.grads[i] = torch.empty(0, device="cpu")

    def write_back(self) -> None:
        """Copy the new weights of strided parameters to where they belong, and let this step's gradients go."""
        for i in self.strided:
            self.write_back_one(i)
        self.grads = []

    def write_back_one(self, i: int) -> None:
        """Copy the new weights of one strided parameter to where they belong."""
        self.sources[i].copy_(self.params[i])


def _addresses(tensors: Sequence[Tensor]) -> np.ndarray:
    return np.fromiter((tensor.data_ptr() for tensor in tensors), dtype=np.int64, count=len(tensors))


class StepPlan:
    """The steps of one set of parameters.

    Attributes:
        params, records: each parameter once, and its record. Its place here is its number.
        pages: what there is to do, device by device.
        flat: parameters and gradients as the kernels' tables need them.
        steps, hyper, lr: of the step that was begun, a row for each parameter.

    Args:
        gradients: the parameters; one that is listed twice is stepped once.
        param_groups: the optimizer's groups.
        layout: where every parameter has its record already.
        state: the optimizer's `state`; the plan holds as long as nobody takes entries out.
    """

    def __init__(self, gradients: Gradients, param_groups: Sequence[dict[str, Any]], layout: Layout, state: dict[Any, Any]) -> None:
        self._listed, self._groups = list(gradients.params), list(gradients.groups)
        self._rule = layout.rule
        self._options = self._storage_options(param_groups)
        self._state = state
        numbers: dict[Tensor, int] = {}
        self._positions = [i for i, param in enumerate(self._listed) if numbers.setdefault(param, len(numbers)) == len(numbers) - 1]
        self.params = [self._listed[i] for i in self._positions]
        self.records: list[Record] = [layout.records[param] for param in self.params]
        self._shown = list(zip(self.params, self.records, strict=True))
        self._sharded = any(local(param) is not param for param in self.params)
        self.flat = _Flat([local(param) for param in self.params])
        group_of = np.array([self._groups[i] for i in self._positions], dtype=np.int64)
        self._members = [(number, np.flatnonzero(group_of == number)) for number in sorted(set(group_of.tolist()))]
        self._counters: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for counter in {id(record.counter): record.counter for record in self.records}.values():
            mine = [i for i, record in enumerate(self.records) if record.counter is counter]
            places = np.array([self.records[i].place for i in mine], dtype=np.int64)
            self._counters.append((counter, places, np.array(mine, dtype=np.int64)))
        self.pages: dict[torch.device, list[PageWork]] = {}
        for pool in layout.pools.values():
            for page in pool.store.pages:
                if any(piece.block.owner in numbers for piece in page.pieces):
                    self.pages.setdefault(pool.key.device, []).append(PageWork(pool, page, numbers))

    def serves(self, gradients: Gradients, param_groups: Sequence[dict[str, Any]], state: dict[Any, Any]) -> bool:
        """Whether this plan is that of the parameters that have gradients now."""
        return (
            len(gradients.params) == len(self._listed)
            and all(map(is_, gradients.params, self._listed))
            and gradients.groups == self._groups
            and state is self._state
            and all(state.get(param) is record.views and STEP_KEY in record.views for param, record in self._shown)
            and self._storage_options(param_groups) == self._options
            and self.flat.holds([local(param) for param in self.params] if self._sharded else self.params)
        )

    def begin(self, gradients: Gradients, param_groups: Sequence[dict[str, Any]], rule: Any) -> None:
        """Read this step's gradients, step counts and scalars."""
        grads = gradients.grads
        self.flat.take(grads if len(self._positions) == len(grads) else [grads[i] for i in self._positions])
        self.number(param_groups, rule)

    def number(self, param_groups: Sequence[dict[str, Any]], rule: Any) -> None:
        """Read this step's counts and scalars."""
        steps = np.empty(len(self.params), dtype=np.int64)
        for counter, places, mine in self._counters:
            steps[mine] = counter[places] + 1
        hyper = np.zeros((len(self.params), len(rule.hyper)), dtype=np.float32)
        lr: list[Any] = [None] * len(self.params)
        for number, members in self._members:
            group = param_groups[number]
            rate = group["lr"]
            for step in set(steps[members].tolist()):
                rows = members[steps[members] == step]
                # a learning rate on the device stays there: reading it would wait for the device
                on_device = isinstance(rate, Tensor) and rate.device.type != "cpu"
                hyper[rows] = (0.0 if on_device else float(rate), *rule.scalars(group, step))
                for i in rows if isinstance(rate, Tensor) and on_device else ():
                    lr[i] = rate.detach().float().reshape(())
        self.steps, self.hyper = steps, hyper
        self.lr = self._device_rates(lr)

    def _device_rates(self, lr: list[Any]) -> list[Tensor] | None:
        if all(rate is None for rate in lr):
            return None
        return [
            torch.tensor(float(self.hyper[i, 0]), device=local(self.params[i]).device) if rate is None else rate
            for i, rate in enumerate(lr)
        ]

    def segments(self, work: PageWork) -> Segments:
        """The kernels' table for one page."""
        return work.segments(self.flat, self.steps, self.hyper, self.lr)

    def part(self, work: PageWork, numbers: Sequence[int]) -> PageWork:
        """The part of a page's work that falls on some of its parameters."""
        return PageWork(work.pool, work.page, {self.params[i]: i for i in numbers})

    def finish(self) -> None:
        """Count the step, and write strided parameters back."""
        self.flat.write_back()
        self.count(1)

    def count(self, by: int) -> None:
        """Add to the step count of every parameter."""
        for counter, places, _ in self._counters:
            counter[places] += by

    def _storage_options(self, param_groups: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
        """What each group's options say about storage."""
        return [(group["codec"], group["master_bits"], group["dither"], self._rule.keeps_states(group)) for group in param_groups]
