"""Codecs that learn: which states they see after a step, and when what they learned becomes valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..codecs import learned
from ..codecs.base import get_codec
from ..errors import UnsupportedError
from ..kernels.rule import UpdateRule
from ..paging.streams import Backend
from . import sharded
from .health import send
from .work import INDEX, NUMEL, START, PageWork, StepPlan


def check(param: Tensor, group: Mapping[str, Any], rule: UpdateRule, gradient_release: bool) -> None:
    """Refuse a parameter whose states a codec with tables cannot learn from.

    Raises:
        UnsupportedError: such a codec, and gradient release or one of FSDP2's shards.
    """
    name = group["codec"]
    if not get_codec(name, rule.states, group["dither"]).tables:
        return
    if gradient_release:
        raise UnsupportedError(
            f"codec={name!r} learns from whole parameters after each step, and gradient_release=True updates them page by page during "
            "backward: use codec='joint', which it is made of, or leave gradient_release out."
        )
    if sharded.is_sharded(param):
        raise UnsupportedError(
            f"codec={name!r} keeps one curve for each whole parameter, and a parameter of shape {tuple(param.shape)} is sharded over "
            "several processes (FSDP2): use codec='joint', which it is made of, or DDP."
        )


class Learning:
    """What an optimizer's codecs learn in one step; nothing, and no cost, where none of them has tables."""

    def __init__(self) -> None:
        self._rows = np.zeros(0, dtype=np.int64)
        self._sizes = self._rows
        self._seen: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def begin(self, plan: StepPlan) -> None:
        """The next step is going to be `plan`'s, whose counts are known."""
        self._seen = {}
        chosen = {device: _due(plan.steps, numbers) for device, numbers in _by_device(plan).items()}
        chosen = {device: numbers for device, numbers in chosen.items() if numbers.size}
        if not chosen:
            return
        # each parameter's row among the tables of its device, or -1
        self._rows = np.full(len(plan.params), -1, dtype=np.int64)
        self._sizes = np.array([record.block.numel for record in plan.records], dtype=np.int64)
        for device, numbers in chosen.items():
            self._rows[numbers] = np.arange(len(numbers))
            seen = torch.zeros(len(numbers), learned.BINS, dtype=torch.int64, device=device)
            self._seen[device] = torch.stack(_tables(plan, numbers)), seen

    def around(self, launch: Callable[[], None], work: PageWork, planes: Sequence[Tensor], backend: Backend) -> Callable[[], None]:
        """What launches the kernel on a page, with a look at what it wrote where this step is looked at."""
        where = work.pool.key.device
        if where not in self._seen or not work.tables:
            return launch
        at, rows = self._groups(work)
        if not len(at):
            return launch
        sent, codec = send([at, rows], backend), work.pool.fmt.codec

        def looking() -> None:
            launch()
            codec.observe(planes, sent[0], sent[1], *self._seen[where])

        return looking

    def end(self, plan: StepPlan, skip: Mapping[torch.device, Tensor]) -> None:
        """The step is over. What it encoded is decoded by the curves of the encode from here on, and what was seen makes those of the next.

        Args:
            skip: by device, 0-dim, where the device decides whether the step happens: not 0, and nothing has changed.
        """
        for device, numbers in _by_device(plan).items():
            # the two curves of all others are the same
            numbers = np.union1d(_due(plan.steps, numbers), _due(plan.steps - 1, numbers))
            if not numbers.size:
                continue
            tables = _tables(plan, numbers)
            before = torch.stack(tables)
            seen = torch.zeros(len(numbers), learned.BINS, dtype=torch.int64, device=device)
            if device in self._seen:
                looked_at = np.flatnonzero(due := self._rows[numbers] >= 0)
                seen[torch.from_numpy(looked_at).to(device)] = self._seen[device][1]
                assert (np.diff(self._rows[numbers][due]) == 1).all()
            after = plan.records[int(numbers[0])].pool.fmt.codec.learn(before, seen)
            if device in skip:
                after = torch.where(skip[device].reshape(()) != 0, before, after)
            torch._foreach_copy_(tables, list(after.unbind()))
        self._seen = {}

    def _groups(self, work: PageWork) -> tuple[list[int], list[int]]:
        """The groups of a page that are looked at, by their numbers in the page, and the row of each one's parameter.

        Which these are is a matter of where they lie in their parameter, not of how it is cut into pages.
        """
        group = work.pool.fmt.codec.group
        at: list[int] = []
        rows: list[int] = []
        for owner, row in zip(work.list, work.rows.tolist(), strict=True):
            if self._rows[owner] >= 0:
                stride = learned.stride(int(self._sizes[owner]))
                first, count = row[INDEX] // group, -(-row[NUMEL] // group)
                chosen = range(-(-first // stride) * stride, first + count, stride)
                at += [number - first + row[START] // group for number in chosen]
                rows += [int(self._rows[owner])] * len(chosen)
        return at, rows


def _by_device(plan: StepPlan) -> dict[torch.device, np.ndarray]:
    """The numbers of parameters with tables, in ascending order, by device; empty where no codec has any."""
    if not any(work.tables for works in plan.pages.values() for work in works):
        return {}
    found: dict[torch.device, list[int]] = {}
    for number, record in enumerate(plan.records):
        if record.block.table is not None:
            found.setdefault(record.pool.key.device, []).append(number)
    return {device: np.array(numbers, dtype=np.int64) for device, numbers in found.items()}


def _due(steps: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Those of the parameters whose state after their step is looked at."""
    return numbers[[learned.due(step) for step in steps[numbers].tolist()]]


def _tables(plan: StepPlan, numbers: np.ndarray) -> list[Tensor]:
    return [record.block.table for record in (plan.records[i] for i in numbers.tolist()) if record.block.table is not None]
