"""The laboratory's look at weights: how many updates leave no trace in a 16-bit weight, with and without a correction.

A bf16 weight p moves when an update is more than half of ulp(p), which is 2^-8 of it or more. With an 8-bit correction the limit is a 254th
of that, with 16 bits a 65534th. Updates are those of AdamW in float64, so that only the weights are rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..codecs import weight_split
from .report import Report, Row
from .streams import Problem, drifting
from .subjects import exact

STEPS, ELEMENTS = 200, 4096
WEIGHT = 0.02
"""Standard deviation of the weights, what transformers are initialized with."""
RATES = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
FORMATS = {"bf16": 0, "bf16 + 8 bits": 24, "bf16 + 16 bits": 32}
"""Name to `master_bits`, 0 for none."""


def measure(report: Report) -> None:
    """Rows "weights/lr=L" for each format: the share of updates that are swallowed, and the error of the total update."""
    start = WEIGHT * torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    start = start.bfloat16().double()
    for lr in RATES:
        moves = exact(Problem("", drifting(0.5, 1.0, seed=0, steps=STEPS, elements=ELEMENTS), lr=lr))
        updates = torch.cat((moves[:1], moves.diff(dim=0)))
        for name, bits in FORMATS.items():
            share, error = follow(start, updates, bits)
            report.add(f"weights/lr={lr:g}", name, "swallowed", share)
            report.add(f"weights/lr={lr:g}", name, "update_error", error)


def follow(start: Tensor, updates: Tensor, bits: int) -> tuple[float, float]:
    """The share of updates, fp64 [steps, elements], after which the weight is what it was, and the relative error of all together."""
    p = start.bfloat16()
    c = torch.zeros(len(p), dtype=weight_split.CORRECTION_DTYPE[bits]) if bits else None
    still = due = 0
    for update in updates:
        before = p.float() if c is None else weight_split.join(p, c)
        after = (before.double() + update).float()
        if c is None:
            p = after.bfloat16()
            after = p.float()
        else:
            p, c = weight_split.split(after, p.dtype, bits)
            after = weight_split.join(p, c)
        due += int((update != 0).sum())
        still += int(((update != 0) & (after == before)).sum())
    total = updates.sum(0)
    return still / max(due, 1), ((after.double() - start - total).norm() / total.norm()).item()


def rows(report: Report) -> list[Row]:
    """The table's rows."""
    words = {"swallowed": "swallowed", "update_error": "error of the total update"}
    return [
        Row(f"{row.case.removeprefix('weights/')}: {words[row.metric]}", row.subject, row.metric, row.value, row.unit)
        for row in report.rows
        if row.case.startswith("weights/")
    ]
