"""`master_bits="auto"`: 24-bit master weights, and 32 bits for the tensors where 24 swallow updates.

A correction of 8 bits resolves ulp / 254 of a 16-bit weight, and an update below half of that is rounded away, at every step anew: the
weight stands still however long the update points the same way. So every `INTERVAL` steps a sample of each tensor's master weights is
compared before and after the step. Where more than `SHARE` of those that should have moved (their first state is not zero) did not, the
tensor gets 16-bit corrections from the next step on, for one byte more per parameter.

Nobody waits for this: the sample is taken and compared on the device, and the answer is read one step later.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..codecs import weight_split
from .layout import CORRECTION, Layout, Record, local
from .work import StepPlan

INTERVAL = 32
"""Steps from one look to the next."""
SAMPLE = 1024
"""Weights of a tensor that are looked at."""
SHARE = 0.25
"""Share of swallowed updates above which a tensor gets 32 bits."""


class _Sample:
    """Master weights of many tensors of one pool, and what became of them after a step."""

    def __init__(self, params: list[Tensor], records: list[Record], look: int) -> None:
        self.params = params
        self.records = records
        # another part of each tensor every time
        self.cuts = [(look * SAMPLE) % max(record.block.numel - SAMPLE + 1, 1) for record in records]
        sizes = torch.tensor([min(SAMPLE, record.block.numel) for record in records])
        self.owner = torch.repeat_interleave(torch.arange(len(records)), sizes).to(records[0].pool.key.device)
        self.before = self.masters()

    def _cat(self, tensors: list[Tensor]) -> Tensor:
        parts = [tensor.reshape(-1)[start : start + SAMPLE] for tensor, start in zip(tensors, self.cuts, strict=True)]
        return torch.cat(parts).to(self.owner.device, non_blocking=True)

    def masters(self) -> Tensor:
        weights = self._cat([local(param).detach() for param in self.params])
        return weight_split.join(weights, self._cat([record.views[CORRECTION] for record in self.records]))

    def swallowed(self) -> Tensor:
        """fp32, one number for each tensor: the share of updates that left no trace."""
        first = self.records[0].pool.fmt.rule.states[0].name
        due = self._cat([record.views[first] for record in self.records]) != 0
        still = (self.masters() == self.before) & due
        counts = torch.zeros(2, len(self.records), device=due.device)
        counts.index_add_(1, self.owner, torch.stack([still, due]).float())
        return counts[0] / counts[1].clamp_min(1)


class AutoMaster:
    """Watches the parameters of groups with `master_bits="auto"` and moves them to 32 bits where needed."""

    def __init__(self) -> None:
        self._samples: list[_Sample] = []
        self._answers: list[tuple[_Sample, Callable[[], Tensor]]] = []

    def before(self, plan: StepPlan, param_groups: list[dict[str, Any]], layout: Layout) -> None:
        """Take a sample, if this step is one to look at. Call when the step's numbers are known and nothing has been launched."""
        steps = int(plan.steps.max())
        if steps % INTERVAL or not any(group["master_bits"] == "auto" for group in param_groups):
            return
        layout.synchronize()
        members: dict[Any, tuple[list[Tensor], list[Record]]] = {}
        auto = {param for group in param_groups if group["master_bits"] == "auto" for param in group["params"]}
        for param, record, lr in zip(plan.params, plan.records, plan.hyper[:, 0], strict=True):
            moves = lr > 0 or plan.lr is not None
            key = record.pool.key
            if moves and param in auto and key.master_bits == 24 and key.stateful and record.block.numel:
                params, records = members.setdefault(key, ([], []))
                params.append(param)
                records.append(record)
        self._samples = [_Sample(params, records, steps // INTERVAL) for params, records in members.values()]

    def discard(self) -> None:
        """Forget the sample: the step after it did not happen."""
        self._samples = []

    def after(self, layout: Layout) -> bool:
        """Compare the last sample, and act on what an earlier comparison said. Call before a step.

        Returns:
            Whether parameters have to move to another pool.
        """
        promoted: list[Tensor] = []
        for sample, read in self._answers:
            promoted += [param for param, share in zip(sample.params, read().tolist(), strict=True) if share > SHARE]
        self._answers = []
        if self._samples:
            layout.synchronize()
            for sample in self._samples:
                backend = layout.engine(sample.owner.device).backend
                self._answers.append((sample, backend.read_later(sample.swallowed())))
            self._samples = []
        if promoted:
            layout.promoted.update(promoted)
            warnings.warn(
                f"master_bits='auto': {len(promoted)} parameters get 32-bit master weights from now on (one byte more per parameter), "
                f"since more than {SHARE:.0%} of their updates were too small for 24 bits at this learning rate.",
                stacklevel=5,
            )
        return bool(promoted)
