"""Codecs that learn: which states they see after a step, and when what they learned becomes valid."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from ..codecs import learned
from ..codecs.base import get_codec
from ..errors import ConfigurationError, UnsupportedError
from ..kernels.eager import CHUNK
from ..kernels.rule import UpdateRule
from ..paging.streams import Backend
from . import sharded
from .health import send
from .layout import Layout
from .work import INDEX, NUMEL, START, PageWork, StepPlan

AT_ONCE = 1 << 12
"""Groups that are looked at together: what that takes for a moment, some 50 bytes for each of their elements, is below 7 MiB."""


def check(param: Tensor, group: Mapping[str, Any], rule: UpdateRule, gradient_release: bool) -> None:
    """Refuse a parameter whose states a codec with tables cannot learn from.

    Raises:
        UnsupportedError: such a codec, and gradient release or one of FSDP2's shards.
    """
    if not (gradient_release or sharded.is_sharded(param)):
        return
    name = group["codec"]
    if not get_codec(name, rule.states, group["dither"]).tables:
        return
    if gradient_release:
        raise UnsupportedError(
            f"codec={name!r} learns from whole parameters after each step, and gradient_release=True updates them page by page during "
            "backward: use codec='joint', which it is made of, or leave gradient_release out."
        )
    raise UnsupportedError(
        f"codec={name!r} keeps one curve for each whole parameter, and a parameter of shape {tuple(param.shape)} is sharded over "
        "several processes (FSDP2): use codec='joint', which it is made of, or DDP."
    )


def check_interval(interval: Any) -> None:
    """Check the group option `learn_interval`.

    Raises:
        ConfigurationError: it is no whole number of at least 1.
    """
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ConfigurationError(f"learn_interval={interval!r} must be a whole number of steps, at least 1; {learned.INTERVAL} is usual.")


class _Look(NamedTuple):
    """What is looked at on one device: the parameters' numbers in the plan, their tables as one tensor, and what was counted."""

    numbers: np.ndarray
    tables: Tensor
    seen: Tensor


class _Parts:
    """The parts of a page that an update changes as a whole, where their parameters have two curves, and something of each to know it by.

    Args:
        work: the page.
        two: the parameters with two curves, by their numbers in the plan.
        planes: of the page, as they are before its update; None: it is not going to be updated.
    """

    def __init__(self, work: PageWork, two: np.ndarray, planes: Sequence[Tensor] | None, backend: Backend) -> None:
        self.codec, group = work.pool.fmt.codec, work.pool.fmt.codec.group
        mine = np.flatnonzero(np.isin(work.list, two)).tolist()
        self.cuts = [
            (i, int(work.rows[i, START]) + begin, min(CHUNK, int(work.rows[i, NUMEL]) - begin), int(work.rows[i, INDEX]) + begin)
            for i in mine
            for begin in range(0, int(work.rows[i, NUMEL]), CHUNK)
        ]
        self._before: list[Tensor] | None = None
        if planes is not None:
            # not any group: of a sparse tensor many are 0 and stay so
            largest = planes[len(self.codec.planes) - 1]
            within = [largest[start // group : -(-(start + numel) // group)].argmax() for _, start, numel, _ in self.cuts]
            self._at = torch.stack(within) + send([start // group for _, start, _, _ in self.cuts], backend)
            self._before = self._stored(planes)

    def _stored(self, planes: Sequence[Tensor]) -> list[Tensor]:
        """All that is stored of the group of each part whose first moment is the largest beside the second."""
        stored = zip(planes, self.codec.planes, strict=False)
        return [(plane.view(-1, self.codec.group) if spec.group == 1 else plane)[self._at] for plane, spec in stored]

    def updated(self, planes: Sequence[Tensor]) -> list[bool]:
        """Of each part, whether it was updated: the first moment shrinks at every step, and what is 0 has no curve."""
        if self._before is None:
            return [False] * len(self.cuts)
        pairs = zip(self._before, self._stored(planes), strict=True)
        return torch.stack([(old != new).reshape(len(self.cuts), -1).any(1) for old, new in pairs]).any(0).tolist()

    def encode_anew(self, work: PageWork, planes: Sequence[Tensor], steps: np.ndarray) -> None:
        """Store by the curve of the next encode what is stored by the other, as an update would have."""
        assert work.tables is not None
        for (i, start, numel, index), done in zip(self.cuts, self.updated(planes), strict=True):
            if not done:
                stored = zip(planes, self.codec.planes, strict=False)
                views = [plane[start // spec.group : -(-(start + numel) // spec.group)] for plane, spec in stored]
                views.append(work.tables[i])
                self.codec.encode(self.codec.decode(views, numel), views, index=index, step=int(steps[work.list[i]]))


class Learning:
    """What an optimizer's codecs learn in one step; nothing, and no cost, where none of them has tables.

    As a context it surrounds the step that was begun. Where that fails half-way, a parameter of two curves would be stored by the one
    where it was updated and by the other elsewhere: the rest is then encoded anew, without an update, so that one curve serves all of it.
    """

    def __init__(self) -> None:
        self._plan: Callable[[], StepPlan | None] = lambda: None
        self._devices: dict[torch.device, np.ndarray] = {}
        self._looks: dict[torch.device, _Look] = {}
        self._strides = self._mixed = self._rows = np.zeros(0, dtype=np.int64)
        self._due = np.zeros(0, dtype=bool)
        self._two: dict[torch.device, np.ndarray] = {}
        self._parts: dict[PageWork, _Parts] = {}
        self._step: tuple[StepPlan, Layout, Mapping[torch.device, Tensor]] | None = None

    def begin(
        self, plan: StepPlan, param_groups: Sequence[Mapping[str, Any]], layout: Layout, skip: Mapping[torch.device, Tensor]
    ) -> Learning:
        """The next step is going to be `plan`'s, whose counts are known.

        Args:
            skip: by device, 0-dim, where the device decides whether the step happens: not 0, and nothing has changed.

        Returns:
            this, to surround the step with.
        """
        if self._plan() is not plan:
            self._learn_plan(plan)
        self._looks, self._two, self._parts, self._step = {}, {}, {}, None
        if not self._devices:
            return self
        self._step = plan, layout, skip
        intervals = np.array([group.get("learn_interval", learned.INTERVAL) for group in param_groups], dtype=np.int64)
        self._due = learned.due(plan.steps, intervals[plan.group_of])
        for device, numbers in self._devices.items():
            # the two curves of all others are the same
            self._two[device] = numbers[self._mixed[numbers] >= plan.steps[numbers] - 1]
            chosen = numbers[self._due[numbers]]
            if chosen.size:
                self._rows[chosen] = np.arange(len(chosen))
                seen = torch.zeros(len(chosen), learned.BINS, dtype=torch.int64, device=device)
                self._looks[device] = _Look(chosen, torch.stack(_tables(plan, chosen)), seen)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        if self._step is None:
            return
        try:
            plan, layout, skip = self._step
            if kind is None:
                self._end(plan, skip)
            elif self._parts:
                self._mend(plan, layout, skip)
        finally:
            self._looks, self._two, self._parts, self._step = {}, {}, {}, None

    def _learn_plan(self, plan: StepPlan) -> None:
        """Find the parameters with tables, by device."""
        self._plan, self._devices = ref(plan), {}
        if not any(work.tables for works in plan.pages.values() for work in works):
            return
        found: dict[torch.device, list[int]] = {}
        for number, record in enumerate(plan.records):
            if record.block.table is not None:
                found.setdefault(record.pool.key.device, []).append(number)
        self._devices = {device: np.array(numbers, dtype=np.int64) for device, numbers in found.items()}
        self._strides = np.array([learned.stride(record.block.numel) for record in plan.records], dtype=np.int64)
        self._mixed = np.array([record.mixed for record in plan.records], dtype=np.int64)
        self._rows = np.zeros(len(plan.records), dtype=np.int64)

    def around(self, launch: Callable[[], None], work: PageWork, planes: Sequence[Tensor], backend: Backend) -> Callable[[], None]:
        """What launches the kernel on a page, with a look at what it wrote where this step is looked at."""
        device = work.pool.key.device
        look, two = self._looks.get(device), self._two.get(device)
        if not work.tables or (look is None and (two is None or not two.size)):
            return launch
        chosen = None if look is None else self._groups(work)
        sent, codec = None if chosen is None or not chosen.size else send(chosen, backend), work.pool.fmt.codec

        def looking() -> None:
            if two is not None and np.isin(work.list, two).any():
                self._parts[work] = _Parts(work, two, planes, backend)
            launch()
            if look is None or sent is None:
                return
            for begin in range(0, sent.shape[1], AT_ONCE):
                at, owners = sent[:, begin : begin + AT_ONCE]
                codec.observe(planes, at, owners, look.tables, look.seen)

        return looking

    def _end(self, plan: StepPlan, skip: Mapping[torch.device, Tensor]) -> None:
        """The step is over. What it encoded is decoded by the curves of the encode from here on; what was seen makes those of the next."""
        for device, two in self._two.items():
            if device in self._looks:
                looked_at, before, seen = self._looks[device]
                _write(plan, looked_at, before, _codec(plan, looked_at).learn(before, seen), skip.get(device))
                for i in looked_at.tolist():
                    self._mixed[i] = plan.records[i].mixed = int(plan.steps[i])
            waiting = two[~self._due[two]]
            if waiting.size:
                before = torch.stack(_tables(plan, waiting))
                _write(plan, waiting, before, _codec(plan, waiting).settled(before), skip.get(device))

    def _mend(self, plan: StepPlan, layout: Layout, skip: Mapping[torch.device, Tensor]) -> None:
        """The step failed half-way: see to it that each parameter is stored by one curve. The failure itself goes on."""
        try:
            for device, two in self._two.items():
                flag = skip.get(device)
                works = {work.page: work for work in plan.pages[device] if np.isin(work.list, two).any()}
                if flag is not None and bool(flag):
                    continue  # nothing was going to change
                engine = layout.engine(device)
                found: list[bool] = []

                def look(page: Any, planes: Sequence[Tensor], works: Any = works, found: Any = found) -> Any:
                    return lambda: found.append(any(self._parts[works[page]].updated(planes)))

                def prepare(page: Any, planes: Sequence[Tensor], works: Any = works, two: Any = two, engine: Any = engine) -> Any:
                    work = works[page]
                    parts = self._parts.get(work) or _Parts(work, two, None, engine.backend)
                    return partial(parts.encode_anew, work, planes, plan.steps)

                engine.run([page for page, work in works.items() if work in self._parts], look)
                if any(found):
                    engine.run(list(works), prepare)
                    before = torch.stack(_tables(plan, two))
                    _write(plan, two, before, _codec(plan, two).settled(before), None)
        except Exception as error:
            warnings.warn(
                f"a step failed half-way, and the states of {_codec(plan, two).name!r} could not be put in order after it ({error}): load "
                "the last checkpoint before you go on.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _groups(self, work: PageWork) -> np.ndarray:
        """The groups of a page that are looked at, by their numbers in the page, and the row of each one's parameter: int64 (2, groups).

        Which these are is a matter of where they lie in their parameter, not of how it is cut into pages.
        """
        owners, group = np.array(work.list, dtype=np.int64), work.pool.fmt.codec.group
        mine = np.flatnonzero(self._due[owners])
        rows, owners = work.rows[mine], owners[mine]
        first, stride = rows[:, INDEX] // group, self._strides[owners]
        # of the groups 0, stride, 2 stride, ... of a parameter, those in this page
        stop = first + -(-rows[:, NUMEL] // group)
        begin = -(-first // stride)
        counts = -(-stop // stride) - begin
        segment = np.repeat(np.arange(len(mine)), counts)
        within = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = (begin[segment] + within) * stride[segment] - first[segment] + rows[segment, START] // group
        return np.stack([at, self._rows[owners[segment]]])


def _write(plan: StepPlan, numbers: np.ndarray, before: Tensor, after: Tensor, skip: Tensor | None) -> None:
    """Give parameters their new tables, unless the step did not happen."""
    if skip is not None:
        after = torch.where(skip.reshape(()) != 0, before, after)
    torch._foreach_copy_(_tables(plan, numbers), list(after.unbind()))


def _codec(plan: StepPlan, numbers: np.ndarray) -> Any:
    return plan.records[int(numbers[0])].pool.fmt.codec


def _tables(plan: StepPlan, numbers: np.ndarray) -> list[Tensor]:
    return [record.block.table for record in (plan.records[i] for i in numbers.tolist()) if record.block.table is not None]
