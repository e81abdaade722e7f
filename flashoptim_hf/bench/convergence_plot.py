"""The picture of `bench convergence`: for each task the mean training curves, and beside them what they are away from fp32's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .convergence_optimizers import CONTROL, NAMES, REFERENCE
from .convergence_records import Record
from .convergence_tasks import TASKS
from .report import require_matplotlib


def draw(records: Mapping[tuple[str, str, int], Record], path: Path) -> None:
    """Draw into `path`, see `figure`."""
    figure(records).savefig(path, dpi=85)


def figure(records: Mapping[tuple[str, str, int], Record]) -> Any:
    """A matplotlib figure with a row for each task; an optimizer has the same colour in each, the control is grey.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # not pyplot, which keeps a global list of figures
    from matplotlib.lines import Line2D

    others = [name for name in NAMES if name not in (REFERENCE, CONTROL)]
    colours = {REFERENCE: "black", CONTROL: "0.6", **{name: f"C{k}" for k, name in enumerate(others)}}
    tasks = [task for task in TASKS if any(record.task == task for record in records.values())]
    result = Figure(figsize=(11, 0.8 + 2.1 * max(1, len(tasks))), layout="constrained")
    axes = result.subplots(max(1, len(tasks)), 2, squeeze=False)
    shown: list[str] = []
    for (left, right), task in zip(axes, tasks, strict=False):
        curves, count = _mean_curves(records, task)
        shown += [name for name in curves if name not in shown]
        for name, (steps, curve, difference) in curves.items():
            style = {"color": colours[name], "linewidth": 2.0 if name == REFERENCE else 1.1}
            left.plot(steps, curve, **style)
            if name != REFERENCE:
                right.plot(steps, difference, **style)
        right.axhline(0, color="black", linewidth=0.8)
        over = f"mean of {count} seed{'s' * (count > 1)}" if count else "means of different seeds"
        left.set_title(f"{task}: training loss, {over}", loc="left", fontsize=9)
        right.set_title(f"{task}: minus fp32", loc="left", fontsize=9)
        for axis in (left, right):
            axis.grid(alpha=0.3)
            axis.tick_params(labelsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("step", fontsize=9)
    order = [name for name in NAMES if name in shown]
    handles = [Line2D([], [], color=colours[name], label=name, linewidth=2) for name in order]
    result.legend(handles=handles, loc="outside upper center", ncols=max(1, len(order)))
    return result


def _mean_curves(
    records: Mapping[tuple[str, str, int], Record], task: str
) -> tuple[dict[str, tuple[list[float], list[float], list[float]]], int]:
    """Optimizer to steps, mean curve and mean difference from fp32; and of how many seeds the curves are means.

    Curves are beside each other only where they are of the same seeds: those that every optimizer has. A difference is a pair's, and is
    the mean of all seeds that an optimizer has in common with fp32.
    """
    runs: dict[str, dict[int, Record]] = {}
    for name in NAMES:
        known = {seed: record for (of, optimizer, seed), record in records.items() if (of, optimizer) == (task, name)}
        known = {seed: record for seed, record in known.items() if (task, REFERENCE, seed) in records}
        if known:
            runs[name] = known
    common = sorted(set.intersection(*map(set, runs.values()))) if runs else []
    found = {}
    for name, known in runs.items():
        curve = _mean([known[seed] for seed in common or known])
        base = _mean([records[task, REFERENCE, seed] for seed in known])
        steps = next(iter(known.values())).settings["steps"]
        places = [(k + 0.5) * steps / len(curve) for k in range(len(curve))]
        found[name] = (places, curve, [a - b for a, b in zip(_mean(list(known.values())), base, strict=True)])
    return found, len(common)


def _mean(records: Sequence[Record]) -> list[float]:
    """The mean training curve."""
    return [statistics.fmean(values) for values in zip(*(record.curve for record in records), strict=True)]
