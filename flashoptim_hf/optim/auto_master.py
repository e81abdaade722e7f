"""`master_bits="auto"`: 24-bit master weights, and 32 bits for the tensors where 24 swallow updates.

A correction of 8 bits resolves ulp / 254 of a 16-bit weight, and an update below half of that is rounded away, at every step anew: the
weight stands still however long the update points the same way. So every `INTERVAL` steps a sample of each tensor's master weights is
compared before and after the step. Where more than `SHARE` of those that should have moved (their first state is not zero) did not, the
tensor gets 16-bit corrections from the next step on, for one byte more per parameter.

The decision is made at the end of the step that was looked at, so that it does not depend on when state is saved. It waits for the device,
once in `INTERVAL` steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
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
        sizes = torch.tensor([min(SAMPLE, record.block.numel) for record in records], device="cpu")
        owner = torch.repeat_interleave(torch.arange(len(records), device="cpu"), sizes)
        self.owner = owner.to(records[0].pool.key.device)
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

    def before(self, plan: StepPlan, param_groups: list[dict[str, Any]], layout: Layout) -> None:
        """Take a sample, if this step is one to look at. Call when the step's numbers are known and nothing has been launched."""
        if not any(group["master_bits"] == "auto" for group in param_groups):
            return
        steps = int(plan.steps.max())
        if steps % INTERVAL:
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

    def after(self, layout: Layout, skipped: bool, stepped: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Compare with the sample. Call when the step has been launched.

        Args:
            skipped: the step, or a part of it, did not happen, since a gradient was not finite: no verdict.
            stepped: the parameters that had a gradient, where a sample was taken of others too; None: all.

        Returns:
            the parameters that need more bits; their records are where they were.
        """
        samples, self._samples = self._samples, []
        if skipped or not samples:
            return []
        layout.synchronize()
        judged = None if stepped is None else set(stepped)
        promoted = [
            param
            for sample in samples
            for param, share in zip(sample.params, sample.swallowed().tolist(), strict=True)
            if share > SHARE and (judged is None or param in judged)
        ]
        if promoted:
            layout.promoted.update(promoted)
            warnings.warn(
                f"master_bits='auto': {len(promoted)} parameters get 32-bit master weights from now on (one byte more per parameter), "
                f"since more than {SHARE:.0%} of their updates were too small for 24 bits at this learning rate.",
                stacklevel=6,
            )
        return promoted

    @property
    def looking(self) -> bool:
        """Whether a sample waits to be compared."""
        return bool(self._samples)
