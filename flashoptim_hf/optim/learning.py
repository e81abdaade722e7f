"""Codecs that learn: which states they see after a step, and when what they learned becomes valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from ..codecs import learned
from ..codecs.base import get_codec
from ..errors import ConfigurationError, UnsupportedError
from ..kernels.rule import UpdateRule
from ..paging.streams import Backend
from . import sharded
from .health import send
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


class Learning:
    """What an optimizer's codecs learn in one step; nothing, and no cost, where none of them has tables."""

    def __init__(self) -> None:
        self._plan: Callable[[], StepPlan | None] = lambda: None
        self._devices: dict[torch.device, np.ndarray] = {}
        self._looks: dict[torch.device, _Look] = {}
        self._strides = self._mixed = self._rows = np.zeros(0, dtype=np.int64)
        self._due = np.zeros(0, dtype=bool)

    def begin(self, plan: StepPlan, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """The next step is going to be `plan`'s, whose counts are known."""
        if self._plan() is not plan:
            self._learn_plan(plan)
        self._looks = {}
        if not self._devices:
            return
        intervals = np.array([group.get("learn_interval", learned.INTERVAL) for group in param_groups], dtype=np.int64)
        self._due = learned.due(plan.steps, intervals[plan.group_of])
        for device, numbers in self._devices.items():
            chosen = numbers[self._due[numbers]]
            if chosen.size:
                self._rows[chosen] = np.arange(len(chosen))
                seen = torch.zeros(len(chosen), learned.BINS, dtype=torch.int64, device=device)
                self._looks[device] = _Look(chosen, torch.stack(_tables(plan, chosen)), seen)

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
        look = self._looks.get(work.pool.key.device)
        if look is None or not work.tables:
            return launch
        chosen = self._groups(work)
        if not chosen.size:
            return launch
        sent, codec = send(chosen, backend), work.pool.fmt.codec

        def looking() -> None:
            launch()
            for begin in range(0, sent.shape[1], AT_ONCE):
                at, owners = sent[:, begin : begin + AT_ONCE]
                codec.observe(planes, at, owners, look.tables, look.seen)

        return looking

    def end(self, plan: StepPlan, skip: Mapping[torch.device, Tensor]) -> None:
        """The step is over. What it encoded is decoded by the curves of the encode from here on, and what was seen makes those of the next.

        Args:
            skip: by device, 0-dim, where the device decides whether the step happens: not 0, and nothing has changed.
        """
        for device, numbers in self._devices.items():
            if device in self._looks:
                _, before, seen = self._looks[device]
                looked_at = self._looks[device].numbers
                _write(plan, looked_at, before, _codec(plan, looked_at).learn(before, seen), skip.get(device))
                for i in looked_at.tolist():
                    self._mixed[i] = plan.records[i].mixed = int(plan.steps[i])
            # the two curves of all others are the same
            waiting = numbers[~self._due[numbers] & (self._mixed[numbers] >= plan.steps[numbers] - 1)]
            if waiting.size:
                before = torch.stack(_tables(plan, waiting))
                _write(plan, waiting, before, _codec(plan, waiting).settled(before), skip.get(device))
        self._looks = {}

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
