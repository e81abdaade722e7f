"""A close look at one step: did updates leave a trace, and do the codes hold what they should?

Of each parameter a few groups are looked at, on the device, right before and after the kernel has updated their page, while the page is
where kernels work. Nothing is written but a small table of sums, which travels to the host behind the step; nobody waits for it. What the
states and the update would be without rounding is computed by the rule's own eager function from the decoded states and the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..codecs import weight_split
from ..codecs.base import ALIGN
from ..errors import ConfigurationError
from ..kernels.rule import Format, Segments
from ..paging.streams import Backend
from .layout import Layout
from .work import NUMEL, START, PageWork, StepPlan

OFF_BY = 0.1
"""An element at the end of its group's range counts as saturated where the magnitude it should have is off by more than this share."""

NEGLIGIBLE = 2.0**-12
"""A momentum of at most this share of its group's largest moves the loss by next to nothing, and is often noise. A step that it does not
make for being rounded away is no error; one that is longer than it should be is."""

_SUMS = 7
"""Updates, those swallowed, codes, those saturated, squares of the rounding error and of the step, elements."""


@dataclass(frozen=True)
class Finding:
    """What was found in one parameter.

    Attributes:
        param: which; the optimizer's own tensor.
        master_bits: of the weights: 24 or 32, 0 for weights without a correction.
        codec: of the states.
        looked_at: elements.
        swallowed: share of the updates, of those that were not 0, that left weight and correction as they were.
        saturated: share of the states at an end of their group's range and off by more than `OFF_BY`. 0 where states are stored in fp32.
        codec_error: what rounding changed in the next step, relative to it: the norm of the difference between the steps from the stored
            states and from those before rounding. 0 where that step is 0. See `NEGLIGIBLE`.
    """

    param: Tensor
    master_bits: int
    codec: str
    looked_at: int
    swallowed: float
    saturated: float
    codec_error: float


class Health:
    """Looks at a step when it was asked to, and keeps what it found until it is asked for."""

    def __init__(self) -> None:
        self._groups = 0
        self._looks = 0
        self._plan: StepPlan | None = None
        self._tables: dict[torch.device, Tensor] = {}
        self._read: Callable[[], list[Finding]] | None = None
        self._behind = 0

    def ask(self, groups: int) -> None:
        """Look at `groups` groups of 64 elements of every parameter in the next step; 0: do not.

        Raises:
            ConfigurationError: a number below 0.
        """
        if groups < 0:
            raise ConfigurationError(f"examine: groups={groups} must be at least 0.")
        self._groups = groups

    def begin(self, plan: StepPlan, layout: Layout) -> None:
        """A step begins. Call before its first page."""
        self._behind += 1
        if not self._groups:
            return
        self._plan = plan
        self._tables = {device: torch.zeros(len(plan.params), _SUMS, device=layout.engine(device).backend.device) for device in plan.pages}

    def around(
        self,
        launch: Callable[[], None],
        work: PageWork,
        planes: Sequence[Tensor],
        segments: Segments,
        backend: Backend,
        *,
        inv_scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> Callable[[], None]:
        """What launches the kernel on a page, with a look before and one after where this step is looked at.

        Args:
            launch: starts the kernel.
            work: the page.
            planes, segments, inv_scale, skip: what the kernel gets.
            backend: of the page's device.
        """
        table = self._tables.get(backend.device)
        if table is None or not work.list:
            return launch
        sample = _Sample(work, segments, self._groups * ALIGN, self._looks, backend)

        def looking() -> None:
            before = sample.take(planes)
            exact = sample.exact(before, inv_scale)
            launch()
            sums = sample.compare(before, exact, sample.take(planes, stepped=True))
            if skip is not None:
                sums = torch.where(skip.reshape(()) != 0, 0, sums)
            table.index_add_(0, sample.owners, sums)

        return looking

    def end(self, layout: Layout) -> None:
        """The step is over; its results follow."""
        plan, tables = self._plan, self._tables
        if plan is None:
            return
        self._plan, self._tables, self._groups = None, {}, 0
        self._looks += 1
        self._behind = 0
        readers = [layout.engine(device).backend.read_later(table) for device, table in tables.items()]
        kinds = [(record.pool.key.master_bits, record.pool.key.codec) for record in plan.records]
        params = plan.params
        # without a table where this process has nothing of any parameter
        self._read = lambda: _findings(params, kinds, sum((read() for read in readers), torch.zeros(len(params), _SUMS, device="cpu")))

    def found(self, wait: bool) -> list[Finding] | None:
        """The findings of the last step that was looked at, once; None where there are none.

        Args:
            wait: for that step, if need be. False: None until another step has begun.
        """
        if not (wait or self._behind):
            return None
        read, self._read = self._read, None
        return None if read is None else read()


def _findings(params: list[Tensor], kinds: list[tuple[int, str]], sums: Tensor) -> list[Finding]:
    found = []
    for param, (bits, codec), row in zip(params, kinds, sums.tolist(), strict=True):
        due, swallowed, coded, saturated, error, size, looked_at = row
        if looked_at:
            share = swallowed / due if due else 0.0
            rounding = (error / size) ** 0.5 if size else 0.0
            found.append(Finding(param, bits, codec, int(looked_at), share, saturated / coded if coded else 0.0, rounding))
    return found


class _Sample:
    """One run of elements of every segment of a page, as a table of segments and elements: another part of each at every look.

    Runs begin where groups do and are filled up, where a segment is shorter, with elements that count as missing.
    """

    def __init__(self, work: PageWork, segments: Segments, span: int, look: int, backend: Backend) -> None:
        self._fmt: Format = work.pool.fmt
        self._segments = segments
        numels = work.rows[:, NUMEL].tolist()
        span = min(span, -(-max(numels) // ALIGN) * ALIGN)
        self._runs = []
        for numel in numels:
            at = (look * span) % max(numel - span + ALIGN, 1) // ALIGN * ALIGN
            self._runs.append((at, min(span, numel - at)))
        starts = [start + at for start, (at, _) in zip(work.rows[:, START].tolist(), self._runs, strict=True)]
        sent = send([starts, [count for _, count in self._runs], work.list], backend)
        device = backend.device
        self._hyper = send(segments.hyper.T.tolist(), backend, torch.float32)[:, :, None]
        self._first, counts, self.owners = sent[0], sent[1], sent[2]
        self._span = span
        self._there = torch.arange(span, device=device) < counts[:, None]

    def take(self, planes: Sequence[Tensor], stepped: bool = False) -> tuple[list[Tensor], Tensor]:
        """(states, master weights), fp32 [segments, elements]: copies. `stepped`: the step has been made, and nothing else since."""
        codec = self._fmt.codec
        specs = codec.planes
        cut = [self._cut(plane, spec.group) for plane, spec in zip(planes, specs, strict=False)]
        shape = self._there.shape
        if self._segments.tables is not None:
            tables = torch.stack(list(self._segments.tables))
            cut.append((codec.settled(tables) if stepped else tables).repeat_interleave(self._span // codec.group, 0))
        states = [state.view(shape).where(self._there, 0) for state in codec.decode(cut, self._there.numel())]
        weight = self._gather(self._segments.params)
        if self._fmt.master_bits:
            weight = weight_split.join(weight.view(-1), self._cut(planes[-1], 1)).view(shape)
        return states, weight.float()

    def exact(self, before: tuple[list[Tensor], Tensor], inv_scale: Tensor | None) -> tuple[Sequence[Tensor], Tensor]:
        """(states after the step, the step of a weight), without rounding."""
        states, weight = before
        grad = self._gather(self._segments.grads).float()
        if inv_scale is not None:
            grad = grad * inv_scale
        after, _ = self._fmt.rule.eager(states, weight, grad, self._scalars)
        return after, self._fmt.rule.eager(states, torch.zeros_like(weight), grad, self._scalars)[1]

    def compare(self, before: Any, exact: tuple[Sequence[Tensor], Tensor], after: tuple[list[Tensor], Tensor]) -> Tensor:
        """The sums of every segment, fp32 [segments, _SUMS]."""
        due = (exact[1] != 0) & self._there
        swallowed = due & (after[1] == before[1])
        none = torch.zeros_like(due)
        saturated = none.float()
        coded = 0
        if self._fmt.codec.name != "none":
            coded = len(after[0])
            for state, stored, wanted in zip(self._fmt.codec.states, after[0], exact[0], strict=True):
                saturated = saturated + self._at_an_end(stored, wanted, state.signed).float()
        error, size = self._rounding(after[0], exact[0])
        columns = [due, swallowed, self._there * coded, saturated, error.square(), size.square(), self._there]
        return torch.stack([column.float().sum(1) for column in columns], 1)

    def _rounding(self, stored: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(error, size) of each element's next step: from the stored states, and from those before rounding."""
        has, should = (self._next(states) for states in (stored, wanted))
        error = has - should
        if wanted:
            first = wanted[0].abs().where(self._there, 0).view(len(error), -1, self._fmt.codec.group)
            negligible = (first <= NEGLIGIBLE * first.amax(2, keepdim=True)).view(error.shape)
            error = torch.where(negligible, (has.abs() - should.abs()).clamp_min(0), error)
            should = should.where(~negligible, 0)
        return error.where(self._there, 0), should.where(self._there, 0)

    def _at_an_end(self, stored: Tensor, wanted: Tensor, signed: bool) -> Tensor:
        """Which elements are at the largest or (of a second moment) at the smallest magnitude of their group, and should not be."""
        group = self._fmt.codec.group
        # a second moment is judged by its root, which is what the update is divided by
        has, should = ((x if signed else x.sqrt()).abs().view(len(x), -1, group) for x in (stored, wanted))
        there = self._there.view(has.shape)
        wrong = (has - should).abs() > OFF_BY * should
        end = (has >= has.amax(2, keepdim=True)) & (has < should)
        if not signed:
            smallest = has.where((has > 0) & there, float("inf")).amin(2, keepdim=True)
            end = end | ((has <= smallest) & (should > 0))
        return (wrong & end & there).view(stored.shape)

    def _next(self, states: Sequence[Tensor]) -> Tensor:
        """The step that a gradient of 0 would make from these states, of a weight of 0."""
        zero = torch.zeros(self._there.shape, device=self._there.device)
        return self._fmt.rule.eager(states, zero, zero, self._scalars)[1] if states else zero

    @property
    def _scalars(self) -> tuple[Tensor, ...]:
        rates = self._segments.lr
        first = self._hyper[0] if rates is None else torch.stack([rate.reshape(()).float() for rate in rates])[:, None]
        return (first, *self._hyper[1:])

    def _cut(self, plane: Tensor, group: int) -> Tensor:
        """The runs' entries of a plane, one after the other; missing ones are any."""
        places = self._first[:, None] // group + torch.arange(self._span // group, device=self._first.device)
        return plane[places.clamp_max(len(plane) - 1).view(-1)]

    def _gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """The runs' elements of the parameters or of the gradients; missing ones are 0."""
        cuts = self._segments.cuts or [(0, 0)] * len(tensors)
        pad = torch.zeros(self._span, dtype=tensors[0].dtype, device=tensors[0].device)
        parts: list[Tensor] = []
        for tensor, (begin, _), (at, count) in zip(tensors, cuts, self._runs, strict=True):
            parts.append(tensor.view(-1)[begin + at : begin + at + count])
            if count < self._span:
                parts.append(pad[: self._span - count])
        return torch.cat(parts).view(self._there.shape)


def send(rows: Sequence[Sequence[float]] | Sequence[int] | np.ndarray, backend: Backend, dtype: torch.dtype = torch.int64) -> Tensor:
    """A small table on the backend's device, without waiting."""
    table = torch.tensor(rows, dtype=dtype, device="cpu")
    if backend.device.type == "cpu":
        return table
    host = backend.host_empty(table.nbytes).view(dtype).view(table.shape)
    host.copy_(table)
    return host.to(backend.device, non_blocking=True)
