"""The laboratory of `bench fidelity`: streams that break 8-bit states, both roundings, other sizes of groups, and the report on them.

lab/STREAM             every metric, for each codec with each rounding and for the peers; streams are in `lab_streams.py`
group=G                mean and worst error with groups of G elements, over the file's tensors or, without a file, the lab's streams
horizon/...            ten thousand steps, see `horizon.py`
weights/...            swallowed updates, see `swallowed.py`
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from . import horizon, swallowed
from .metrics import METRICS
from .report import Grid, Report, Row
from .streams import Problem
from .subjects import Algorithm
from .variants import Variant

ALLOWED = 0.1
"""How far a step may go beyond twice the exact one, in units of lr, before the verdict says so."""


def sweep(report: Report, problems: Sequence[Problem], sized: Sequence[Variant], algorithm: Algorithm) -> None:
    """Rows "group=G": error and bytes of each codec and rounding with groups of G elements."""
    truths = [algorithm.exact(problem) for problem in problems]
    for variant in sized:
        subject = replace(variant, group=None).name
        errors, beyond, nbytes, elements = [], [], 0.0, 0
        for problem, truth, outcome in zip(problems, truths, variant.subject(algorithm).solve(problems), strict=True):
            unit = algorithm.unit(problem, truth)
            errors.append(METRICS["update_error"][0](outcome.weights, truth, unit))
            beyond.append(METRICS["step_beyond"][0](outcome.weights, truth, unit))
            elements += problem.grads.shape[1]
            nbytes += outcome.bytes_per_param * problem.grads.shape[1]
        case = f"group={variant.group}"
        report.add(case, subject, "update_error_mean", math.fsum(errors) / len(errors))
        report.add(case, subject, "update_error_worst", worst(errors))
        report.add(case, subject, "step_beyond", worst(beyond), "lr")
        report.add(case, subject, "bytes_per_param", nbytes / elements, "B")


def worst(values: Sequence[float]) -> float:
    """The maximum; not a number where one of them is none."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def tables(report: Report, groups: Mapping[str, Sequence[Problem]]) -> list[tuple[str, list[Row]]]:
    """Titles and rows of the laboratory's tables, of those parts that were run."""
    cases = [case for case in groups if case.startswith("lab/")]
    result = []
    if cases:
        shape = groups[cases[0]][0].grads.shape
        seeds = ", ".join(problem.case.rpartition("=")[2] for problem in groups[cases[0]])
        title = f"Laboratory, {shape[0]} steps of {shape[1]} elements, seeds {seeds}: "
        named = {
            "update_error_mean": "error of the total update, mean over seeds",
            "cosine": "1 - cosine between total update and the exact one, worst",
            "worst_step": "largest move of a weight in one step, and the exact one in the same step",
            "step_beyond": f"furthest move beyond twice the exact one ({ALLOWED} is allowed)",
        }
        result += [(title + words, _rows(report, cases, metric)) for metric, words in named.items()]
    long, weights = horizon.rows(report), swallowed.rows(report)
    if long:
        result.append((f"Long run, {horizon.ELEMENTS} elements of stationary gradients: relative error of v̂ (Lion, SGD: of m̂)", long))
    if weights:
        result.append((f"Weights of size {swallowed.WEIGHT}: share of updates that leave no trace in {swallowed.STEPS} steps", weights))
    sizes = [row for row in report.rows if row.case.startswith("group=")]
    words = {
        "update_error_mean": "mean",
        "update_error_worst": "worst",
        "step_beyond": "beyond twice the exact step",
        "bytes_per_param": "B",
    }
    if sizes:
        shown = [replace(row, case=f"{row.case}: {words[row.metric]}", unit="1" if row.unit == "B" else row.unit) for row in sizes]
        result.append(("Size of groups: error of the total update", shown))
    return result


def _rows(report: Report, cases: Sequence[str], metric: str) -> list[Row]:
    """One line for each stream."""
    found = {(row.case, row.subject, row.metric): row.value for row in report.rows}
    chosen = [row for case in cases for row in report.rows if row.case == case and row.metric == metric]
    shown = [replace(row, case=row.case.removeprefix("lab/"), unit="1") for row in chosen]
    if metric == "cosine":
        return [replace(row, value=1 - row.value) for row in shown]
    if metric == "step_beyond":
        return [replace(row, value=round(row.value, 4) + 0.0) for row in shown]  # not -0
    if metric == "worst_step":
        exact = [found[row.case, row.subject, "worst_step_exact"] for row in chosen]
        shown = [replace(row, value=_short(row.value), note=f"({_short(value):.2g})") for row, value in zip(shown, exact, strict=True)]
        return [row for row in shown if row.subject != "none"]  # fp32 moves as the exact one does, and the table is wide
    return shown


def _short(value: float) -> float:
    """Two places, and of thousands two digits, so that nine columns fit a page."""
    return round(value, 2) if not abs(value) >= 1000 else float(f"{value:.2g}")


def panels(report: Report, groups: Mapping[str, Sequence[Problem]]) -> list[Grid]:
    """The laboratory's charts: a square for each stream and subject."""
    cases = [case for case in groups if case.startswith("lab/")]
    if not cases:
        return []
    kinds = {"update_error_mean": "error of the total update", "step_beyond": "furthest move beyond twice the exact one, in lr"}
    result = [Grid(f"Laboratory: {words}", _rows(report, cases, metric)) for metric, words in kinds.items()]
    long = [row for row in horizon.rows(report) if row.metric == "bias"]
    return [*result, Grid("Long run: |mean of v̂ / v - 1|", [replace(row, value=abs(row.value)) for row in long])] if long else result


def verdict(report: Report, groups: Mapping[str, Sequence[Problem]]) -> list[str]:
    """For each subject, one line: its furthest step beyond twice the exact one over all cases that are single streams."""
    singles = {problem.case for group in groups.values() for problem in group}
    lines = []
    for subject in dict.fromkeys(row.subject for row in report.rows if row.metric == "step_beyond" and row.case in singles):
        rows = [row for row in report.rows if row.subject == subject and row.metric == "step_beyond" and row.case in singles]
        lost = sorted({row.case.rpartition("/seed=")[0] or row.case for row in rows if math.isnan(row.value)})
        known = [row for row in rows if not math.isnan(row.value)]
        furthest = max(known, key=lambda row: row.value) if known else None
        line = f"{subject}: no finite step"
        if furthest is not None:
            word = "within" if furthest.value <= ALLOWED else "BEYOND"
            where = f"the furthest is {furthest.value:.3g} lr beyond twice ({furthest.case})"
            line = f"{subject}: {word} twice the exact step + {ALLOWED} lr; {where}"
        lines.append(line + (f"; not finite in {len(lost)} cases, the first {lost[0]}" if lost else ""))
    return lines
