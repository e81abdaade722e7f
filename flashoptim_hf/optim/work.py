"""What one step does, prepared once: which pages, which segments, which rows of the kernels' tables.

Between two steps of a training run little changes: the addresses of gradients, the step counts, the learning rate. The rest (which
parameter lies where) is worked out when the set of parameters with gradients changes, and kept. A step over hundreds of small tensors then
costs a few array operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..codecs.base import ALIGN
from ..errors import UnsupportedError
from ..kernels.rule import DTYPE_CODE, Segments
from ..kernels.tensors import reader
from ..paging.store import Page
from .gradients import Gradients, Likeness, Spans, addresses_of, check_memory, same_run, with_memory
from .layout import Layout, Pool, Record, local

PARAM, GRAD, START, NUMEL, INDEX, STEP, PARAM_TYPE, GRAD_TYPE = range(8)
"""Columns of `Segments.rows`."""
ITEMSIZE = np.array([dtype.itemsize for dtype in sorted(DTYPE_CODE, key=DTYPE_CODE.__getitem__)], dtype=np.int64)
"""Bytes of an element, by `DTYPE_CODE`."""


class PageWork:
    """The part of a step that falls on one page.

    Attributes:
        pool, page: which.
        owners: for each segment, its parameter's number in the plan; a slice where they follow each other.
        cuts: for each segment, where it begins and ends in its parameter; None where every segment is a whole parameter.
        rows: the kernels' table with all that does not change.
        list: `owners`, as a list.
        tables: for each segment, its parameter's table, where the codec has one; else None.
    """

    def __init__(self, pool: Pool, page: Page, numbers: dict[Tensor, int]) -> None:
        self.pool, self.page = pool, page
        pieces = [piece for piece in page.pieces if piece.numel and piece.block.owner in numbers]
        self.list = [numbers[piece.block.owner] for piece in pieces]
        self.owners = _run(np.array(self.list, dtype=np.int64))
        self.rows = np.zeros((len(pieces), 8), dtype=np.int64)
        self.rows[:, PARAM_TYPE] = DTYPE_CODE[pool.key.dtype]
        for row, piece in zip(self.rows, pieces, strict=True):
            row[START], row[NUMEL], row[INDEX] = piece.start, piece.numel, piece.index
        assert not (self.rows[:, START] % ALIGN).any()
        tables = [piece.block.table for piece in pieces if piece.block.table is not None]
        self.tables = tables if pool.fmt.codec.tables else None
        whole = all(piece.numel == piece.block.numel for piece in pieces)
        self.cuts = None if whole else [(piece.index, piece.index + piece.numel) for piece in pieces]

    def segments(self, flat: _Flat, steps: np.ndarray, hyper: np.ndarray, lr: list[Tensor] | None) -> Segments:
        """The table of this step. `steps` and `hyper` have a row for each parameter of the plan."""
        rows, owners = self.rows.copy(), self.owners
        types = flat.grad_types if isinstance(flat.grad_types, int) else flat.grad_types[owners]
        rows[:, PARAM], rows[:, GRAD], rows[:, STEP] = flat.addresses[owners], flat.grad_addresses[owners], steps[owners]
        if self.cuts is not None:
            rows[:, PARAM] += rows[:, INDEX] * flat.itemsizes[owners]
            rows[:, GRAD] += rows[:, INDEX] * ITEMSIZE[types]
        rows[:, GRAD_TYPE] = types
        rates = None if lr is None else self._pick(lr)
        # the parameters of a page have one dtype, and pieces are never empty
        uniform = bool(self.list) and isinstance(types, int)
        return Segments(
            self._pick(flat.params, flat.keeps),
            self._pick(flat.grads, flat.keeps),
            rows,
            hyper[owners],
            rates,
            self.cuts,
            uniform,
            self.tables,
        )

    def _pick(self, tensors: Sequence[Tensor], keeps: bool = False) -> Sequence[Tensor]:
        """Those of the segments. `keeps`: nobody changes the list, so that it may be handed out where it is all of them."""
        if keeps and isinstance(self.owners, slice) and self.owners.stop - self.owners.start == len(tensors):
            return tensors
        return tensors[self.owners] if isinstance(self.owners, slice) else [tensors[i] for i in self.list]


def _run(numbers: np.ndarray) -> slice | np.ndarray:
    """Numbers that follow each other as a slice, which costs nothing to take; others as they are."""
    if len(numbers) and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


class _Flat:
    """All parameters and gradients of a step as contiguous tensors, and their addresses as arrays.

    A parameter of another layout is copied, updated and written back.

    Raises:
        UnsupportedError: a parameter without memory.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.sources = [param.detach() for param in params]
        for param in self.sources:
            check_memory(param, "a parameter")
        self.strided = [i for i, param in enumerate(self.sources) if not param.is_contiguous()]
        self.params = [param.contiguous() for param in self.sources]
        # whether lists of this step's tensors stay what they are: not where gradients come one by one, or weights are copied for each step
        self.keeps = not self.strided
        self._found, self._like = addresses_of(params).tobytes(), Likeness(params)
        self.addresses = addresses_of(self.params)
        self.itemsizes = np.array([param.itemsize for param in params], dtype=np.int64)
        self.grads: Sequence[Tensor] = []
        self._one_by_one: list[Tensor] = []
        self.grad_types: int | np.ndarray = 0

    def holds(self, params: list[Tensor]) -> bool:
        """Whether the parameters still lie where they did; one that was converted, moved or resized does not."""
        found = self._like.addresses(params)
        if found is None and self._like.holds(params):
            found = addresses_of(params)
        return found is not None and found.tobytes() == self._found

    def take(self, spans: Spans, positions: list[int] | None) -> None:
        """Read the weights of strided parameters and the addresses of this step's gradients: those in `positions`, or all."""
        for i in self.strided:
            self.params[i] = self.sources[i].contiguous()
            self.addresses[i] = self.params[i].data_ptr()
        codes = spans.codes
        if positions is None:
            self.grads, self.grad_addresses, self.grad_types = spans.grads, spans.addresses, codes
        else:
            self.grads = [spans.grads[i] for i in positions]
            self.grad_addresses, self.grad_types = spans.addresses[positions], codes if isinstance(codes, int) else codes[positions]

    def expect(self) -> None:
        """Make room for gradients that come one by one."""
        count = len(self.params)
        self.keeps = False
        self.grads = self._one_by_one = [torch.empty(0, device="cpu")] * count
        self.grad_addresses, self.grad_types = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)

    def take_one(self, i: int, grad: Tensor) -> None:
        """`take` for one parameter.

        Raises:
            UnsupportedError: as `StepPlan.begin`.
        """
        if grad.numel() != self.params[i].numel():
            raise _misfit(grad, self.params[i])
        if i in self.strided:
            self.params[i] = self.sources[i].contiguous()
            self.addresses[i] = self.params[i].data_ptr()
        grad = with_memory(grad.detach())
        grad = grad.resolve_neg() if grad.dtype in DTYPE_CODE else grad.float()
        grad = self._one_by_one[i] = grad if grad.is_contiguous() else grad.contiguous()
        assert not isinstance(self.grad_types, int), "`expect` comes first"
        self.grad_addresses[i], self.grad_types[i] = grad.data_ptr(), DTYPE_CODE[grad.dtype]

    def let_go(self, i: int) -> None:
        """Forget one parameter's gradient."""
        self._one_by_one[i] = torch.empty(0, device="cpu")

    def write_back(self) -> None:
        """Copy the new weights of strided parameters to where they belong, and let this step's gradients go."""
        for i in self.strided:
            self.write_back_one(i)
        self.grads = self._one_by_one = []

    def write_back_one(self, i: int) -> None:
        """Copy the new weights of one strided parameter to where they belong."""
        self.sources[i].copy_(self.params[i])


def same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether these are the same tensors in the same order."""
    return len(some) == len(others) and same_run(some, others, 0)


def _misfit(grad: Tensor, param: Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"a gradient has shape {tuple(grad.shape)}, and its parameter has {tuple(param.shape)} now: the parameter was replaced after its "
        "forward or backward pass. Call zero_grad() then, and run both again."
    )


class _Entries:
    """What stands in the optimizer's `state`, and whether it is still that: an entry that was taken out or emptied by hand is a wish.

    Entries of other keys than parameters are the user's, and may be anything.
    """

    def __init__(self, state: dict[Any, Any]) -> None:
        self._keys, self._values = list(state), list(state.values())
        self._sizes = np.fromiter(map(_size, self._values), dtype=np.int64, count=len(self._values))
        self._by = reader() if all(isinstance(part, dict) for part in (state, *self._values)) else None

    def stand(self, state: dict[Any, Any]) -> bool:
        """Whether nobody has changed an entry. By identity: tensors are not compared."""
        if self._by is not None:
            return self._by.same_entries(state, self._keys, self._values, self._sizes)
        return (
            len(state) == len(self._keys)
            and all(map(is_, state, self._keys))
            and all(map(is_, state.values(), self._values))
            and list(map(_size, self._values)) == self._sizes.tolist()
        )


def _size(entry: Any) -> int:
    return len(entry) if isinstance(entry, Mapping) else 0


class StepPlan:
    """The steps of one set of parameters.

    Attributes:
        params, records: each parameter once, and its record. Its place here is its number.
        pages: what there is to do, device by device.
        group_of: the number of each one's group.
        known: what the gradients are of which the plan was made.
        flat: parameters and gradients as the kernels' tables need them.
        steps, hyper, lr: of the step that was begun, a row for each parameter.

    Args:
        gradients: the parameters; one that is listed twice is stepped once.
        param_groups: the optimizer's groups.
        layout: where every parameter has its record already.
        state: the optimizer's `state`; the plan holds as long as nobody takes entries out.
    """

    def __init__(self, gradients: Gradients, param_groups: Sequence[dict[str, Any]], layout: Layout, state: dict[Any, Any]) -> None:
        self._listed, self._groups = gradients.params, gradients.groups
        self._rule = layout.rule
        self._options = self._storage_options(param_groups)
        self._state, self._entries = state, _Entries(state)
        numbers: dict[Tensor, int] = {}
        first = [i for i, param in enumerate(self._listed) if numbers.setdefault(param, len(numbers)) == len(numbers) - 1]
        self._positions = None if len(first) == len(self._listed) else first
        self.params = [self._listed[i] for i in first]
        self.records: list[Record] = [layout.records[param] for param in self.params]
        self._numels = np.array([local(param).numel() for param in self._listed], dtype=np.int64)
        self._fitting: np.ndarray | None = None
        self._sharded = any(local(param) is not param for param in self.params)
        self.flat = _Flat([local(param) for param in self.params])
        self.known = gradients.learn()
        group_of = np.array([self._groups[i] for i in first], dtype=np.int64)
        self.group_of = group_of
        self._members = [(number, _run(np.flatnonzero(group_of == number))) for number in sorted(set(group_of.tolist()))]
        self._counters: list[tuple[np.ndarray, slice | np.ndarray, slice | np.ndarray]] = []
        for counter in {id(record.counter): record.counter for record in self.records}.values():
            mine = [i for i, record in enumerate(self.records) if record.counter is counter]
            places = np.array([self.records[i].place for i in mine], dtype=np.int64)
            self._counters.append((counter, _run(places), _run(np.array(mine, dtype=np.int64))))
        self.pages: dict[torch.device, list[PageWork]] = {}
        for pool in layout.pools.values():
            for page in pool.store.pages:
                if any(piece.block.owner in numbers for piece in page.pieces):
                    self.pages.setdefault(pool.key.device, []).append(PageWork(pool, page, numbers))

    def serves(self, gradients: Gradients, param_groups: Sequence[dict[str, Any]], state: dict[Any, Any]) -> bool:
        """Whether this plan is that of the parameters that have gradients now."""
        return (
            (gradients.params is self._listed or same(gradients.params, self._listed))
            and (gradients.groups is self._groups or gradients.groups == self._groups)
            # where gradients have become something else, there is something to learn
            and (gradients.known is not None or self.known is None)
            and state is self._state
            and self._entries.stand(state)
            and self._storage_options(param_groups) == self._options
            and self.flat.holds([local(param) for param in self.params] if self._sharded else self.params)
        )

    def begin(self, gradients: Gradients, param_groups: Sequence[dict[str, Any]], rule: Any) -> None:
        """Read this step's gradients, step counts and scalars.

        Raises:
            UnsupportedError: a gradient has another number of elements than its parameter, which kernels would not notice.
        """
        # those of gradients that are known were compared when the plan's first step began
        if gradients.numels is not self._fitting and not np.array_equal(gradients.numels, self._numels):
            at = int(np.flatnonzero(gradients.numels != self._numels)[0])
            raise _misfit(gradients.grads[at], local(self._listed[at]))
        self._fitting = gradients.numels
        self.flat.take(gradients, self._positions)
        self.number(param_groups, rule)

    def number(self, param_groups: Sequence[dict[str, Any]], rule: Any) -> None:
        """Read this step's counts and scalars."""
        steps = np.empty(len(self.params), dtype=np.int64)
        for counter, places, mine in self._counters:
            steps[mine] = counter[places]
        raw = steps.tobytes()
        even = raw[8:] == raw[:-8]  # the usual case: one step count for all
        if even:
            steps.fill(int(steps[0]) + 1)
        else:
            steps += 1
        hyper = np.empty((len(self.params), len(rule.hyper)), dtype=np.float32)
        lr: list[Any] | None = None
        for number, members in self._members:
            group = param_groups[number]
            rate = group["lr"]
            # a learning rate on the device stays there: reading it would wait for the device
            on_device = isinstance(rate, Tensor) and rate.device.type != "cpu"
            first = 0.0 if on_device else float(rate)
            mine = steps[members]
            step = int(mine[0])
            hyper[members] = (first, *rule.scalars(group, step))
            if not even and (others := mine != step).any():
                among = np.arange(len(steps))[members]
                for step in set(mine[others].tolist()):
                    hyper[among[mine == step]] = (first, *rule.scalars(group, step))
            if on_device:
                lr = [None] * len(self.params) if lr is None else lr
                for i in np.arange(len(steps))[members].tolist():
                    lr[i] = rate.detach().float().reshape(())
        self.steps, self.hyper = steps, hyper
        self.lr = None if lr is None else self._device_rates(lr)

    def _device_rates(self, lr: list[Any]) -> list[Tensor]:
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
