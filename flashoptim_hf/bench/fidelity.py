"""Fidelity: how far 8-bit states take the weights from where float64 ones take them, ours and the peers' in the same run.

    flashoptim-hf bench fidelity --gradients FILE.safetensors --scales 1e-8,1,1e8 --json fidelity.json --plot fidelity.png
    flashoptim-hf bench fidelity --algorithm lion --gradients FILE.safetensors

Only the states are rounded: the weights, from zero, are kept outside the codec, and every subject sees the same gradients. Cases in the
report are the file's tensors, `all` for all of them together, `scale=S/...` with gradients and eps multiplied by S, `scale=S,eps=0/...`
with eps 0, `synthetic/NAME`, one line per seed and one for all seeds, and those of the laboratory, see `lab.py`. Streams, subjects and
metrics are in the files of those names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..codecs.base import codecs_for
from ..errors import ConfigurationError
from . import horizon, lab, lab_streams, streams, swallowed
from . import peers as peer_packages
from .lab import worst
from .metrics import METRICS
from .report import JsonOption, Panel, PlotOption, Report, Row, check_outputs, cpu_name, draw, show, table
from .streams import Problem
from .subjects import ALGORITHMS, Algorithm, Subject, algorithm, codec_subject
from .variants import Variant, variants

Groups = Mapping[str, Sequence[Problem]]
"""A summarizing case ("all", "synthetic/sparse") to the problems that it sums up."""


def run(
    gradients: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="safetensors file; each tensor is [steps, elements] of one parameter.")
    ] = None,
    algorithm_name: Annotated[str, typer.Option("--algorithm", help="adamw, lion (betas 0.9 and 0.99) or sgd (momentum 0.9).")] = "adamw",
    codecs: Annotated[str, typer.Option(help="Codecs, with commas between, or 'all' that hold the algorithm's states.")] = "all",
    peers: Annotated[str, typer.Option(help="Peers (flashoptim, bitsandbytes, torchao), 'installed' or 'none'.")] = "installed",
    scales: Annotated[str, typer.Option(help="Factors on the file's gradients and on eps, for example 1e-8,1,1e8.")] = "",
    zero_eps: Annotated[bool, typer.Option(help="Run every scale with eps = 0 as well; without --scales, the file as it is.")] = False,
    synthetic: Annotated[bool, typer.Option(help="Run the synthetic streams: 1000 steps of 4096 elements.")] = True,
    laboratory: Annotated[
        bool | None,
        typer.Option("--lab/--no-lab", help="Run the laboratory: streams that break 8-bit states. Default: as --synthetic."),
    ] = None,
    roundings: Annotated[str, typer.Option(help="In the laboratory: dither, nearest, or both with a comma between.")] = "dither,nearest",
    group_sizes: Annotated[
        str, typer.Option("--groups", help="In the laboratory: sizes of groups besides each codec's own.")
    ] = "16,32,64,128",
    long_steps: Annotated[int, typer.Option("--horizon", min=0, help="In the laboratory: steps of the long run; 0: none.")] = 10_000,
    seeds: Annotated[str, typer.Option(help="Seeds of the synthetic streams.")] = "0,1,2",
    json_file: JsonOption = None,
    plot_file: PlotOption = None,
) -> None:
    """How far 8-bit states take the weights from where float64 states take them, side by side with other packages.

    Prints the relative error of the total weight update, for gradients from a file and for synthetic ones. Every error is a ratio, so that
    0.01 means: one percent of the way that the weights went.
    """
    check_outputs(json_file, plot_file)
    chosen = algorithm(algorithm_name)
    others, missing = peer_packages.choose(peers, algorithm_name)
    names = list(codecs_for(chosen.rule.states)) if codecs == "all" else items(codecs)
    subjects = [*(codec_subject(name, algorithm=chosen) for name in names), *others]
    numbers = whole(seeds, "--seeds")
    in_lab = numbers if (synthetic if laboratory is None else laboratory) else []
    groups = collect(gradients, positive(scales, "--scales"), zero_eps, numbers if synthetic else [], bool(in_lab))
    own, sized = (variants(names, items(roundings), sizes, chosen) for sizes in ([None], whole(group_sizes, "--groups")))

    report = measure(groups, subjects, chosen)
    show(*(table(rows, title) for title, rows in tables(report, groups)))
    if in_lab:
        streams_ = lab_streams.groups(in_lab)
        measure_lab(report, streams_, groups.get("all"), own, sized, others, chosen, long_steps)
        groups |= streams_
        show(*(table(rows, title, digits=3) for title, rows in lab.tables(report, groups)))
    show(*lab.verdict(report, groups))
    if missing:
        show(f"Peers that are not installed and were left out: {', '.join(missing)}.")
    if json_file is not None:
        report.write_json(json_file)
    if plot_file is not None:
        draw([*panels(report, groups), *lab.panels(report, groups)], plot_file)


def items(text: str) -> list[str]:
    """The parts between commas, without those that are empty."""
    return [item.strip() for item in text.split(",") if item.strip()]


def positive(text: str, option: str) -> list[float]:
    """Positive finite numbers with commas between; an empty text is an empty list.

    Raises:
        ConfigurationError: an item that is not such a number.
    """
    try:
        numbers = [float(item) for item in items(text)]
    except ValueError as error:
        raise ConfigurationError(f"{option} {text!r}: {error}; give numbers with commas between, for example 1e-8,1,1e8.") from error
    for number in numbers:
        if not 0 < number < math.inf:
            raise ConfigurationError(f"{option} {text!r}: {number} is not a positive finite number.")
    return numbers


def whole(text: str, option: str) -> list[int]:
    """Whole numbers with commas between; an empty text is an empty list.

    Raises:
        ConfigurationError: an item that is not such a number.
    """
    try:
        return [int(item) for item in items(text)]
    except ValueError as error:
        raise ConfigurationError(f"{option} {text!r}: {error}; give whole numbers with commas between, for example 0,1,2.") from error


def collect(
    gradients: Path | None, scales: Sequence[float], zero_eps: bool, seeds: Sequence[int], more: bool = False
) -> dict[str, list[Problem]]:
    """All problems by the case that sums them up; none is an error unless there is `more` to run.

    Raises:
        ConfigurationError: there is nothing to run, scales without a file, or a file that cannot be used.
    """
    groups: dict[str, list[Problem]] = {}
    if gradients is not None:
        captured = groups["all"] = streams.from_file(gradients)
        variants = [(scale, False) for scale in scales] + [(scale, True) for scale in scales or [1.0] if zero_eps]
        for scale, no_eps in variants:
            scaled = [problem.scaled(scale, no_eps) for problem in captured]
            groups[scaled[0].case.partition("/")[0] + "/all"] = scaled
    elif scales or zero_eps:
        raise ConfigurationError("--scales and --zero-eps scale the gradients of a file; give one with --gradients.")
    for problem in streams.synthetic(seeds):
        groups.setdefault(problem.case.rpartition("/")[0], []).append(problem)
    if not groups and not more:
        raise ConfigurationError("there is nothing to run: give --gradients FILE, or --synthetic with at least one of --seeds.")
    return groups


def measure(
    groups: Groups, subjects: Sequence[Subject], algorithm: Algorithm = ALGORITHMS["adamw"], report: Report | None = None
) -> Report:
    """Every metric of every subject on every problem, and the summary of each group, in a new report or at the end of the one given."""
    report = Report("fidelity", cpu_name()) if report is None else report
    problems = [problem for group in groups.values() for problem in group]
    truths = [algorithm.exact(problem) for problem in problems]
    for subject in subjects:
        found: dict[tuple[str, str], float] = {}
        for problem, truth, outcome in zip(problems, truths, subject.solve(problems), strict=True):
            for metric, (function, unit) in METRICS.items():
                value = found[problem.case, metric] = function(outcome.weights, truth, algorithm.unit(problem, truth))
                report.add(problem.case, subject.name, metric, value, unit)
            found[problem.case, "bytes_per_param"] = outcome.bytes_per_param
        for case, group in groups.items():
            summarize(report, case, subject.name, group, found)
    return report


def measure_lab(
    report: Report,
    groups: Groups,
    captured: Sequence[Problem] | None,
    own: Sequence[Variant],
    sized: Sequence[Variant],
    peers: Sequence[Subject],
    algorithm: Algorithm,
    long_steps: int,
) -> None:
    """Every part of the laboratory: streams, sizes of groups (on the captured gradients, if there are any), the long run, weights."""
    measure(groups, [*(variant.subject(algorithm) for variant in own), *peers], algorithm, report)
    lab.sweep(report, captured or [problem for group in groups.values() for problem in group], sized, algorithm)
    if long_steps:
        horizon.measure(report, own, peers, algorithm, long_steps)
    swallowed.measure(report)


def summarize(report: Report, case: str, subject: str, group: Sequence[Problem], found: Mapping[tuple[str, str], float]) -> None:
    """Rows of a summarizing case: mean and worst error, the largest and the most wrong step, and bytes per parameter over all elements.

    The problems of a synthetic case differ in the seed only, so that their mean is the case's error too.
    """
    errors, steps, nbytes = ([found[p.case, metric] for p in group] for metric in ("update_error", "worst_step", "bytes_per_param"))
    largest = max(group, key=lambda p: found[p.case, "worst_step"])
    mean = math.fsum(errors) / len(errors)
    if case.startswith("synthetic/"):
        report.add(case, subject, "update_error", mean)
    report.add(case, subject, "update_error_mean", mean)
    report.add(case, subject, "update_error_worst", worst(errors))
    report.add(case, subject, "cosine", min(found[p.case, "cosine"] for p in group))
    report.add(case, subject, "worst_step", worst(steps), "lr")
    report.add(case, subject, "worst_step_exact", found[largest.case, "worst_step_exact"], "lr")
    report.add(case, subject, "step_beyond", worst([found[p.case, "step_beyond"] for p in group]), "lr")
    elements = [p.grads.shape[1] for p in group]
    total = math.fsum(b * n for b, n in zip(nbytes, elements, strict=True))
    report.add(case, subject, "bytes_per_param", total / sum(elements), "B")


def tables(report: Report, groups: Groups) -> list[tuple[str, list[Row]]]:
    """Titles and rows of the tables that are printed: the file's tensors, its scales, the synthetic streams."""
    result = []
    if "all" in groups:
        singles = [row for p in groups["all"] for row in report.rows if row.case == p.case and row.metric == "update_error"]
        steps = sorted({p.grads.shape[0] for p in groups["all"]})
        title = f"Error of the total update after {' or '.join(map(str, steps))} steps"
        result.append((title, singles + summary(report, ["all"])))
    scaled = [case for case in groups if case.startswith("scale=")]
    if scaled:
        result.append(("The same with gradients and eps scaled", summary(report, scaled, bytes_too=False)))
    streams_ = [case for case in groups if case.startswith("synthetic/")]
    if streams_:
        seeds = ", ".join(p.case.rpartition("=")[2] for p in groups[streams_[0]])
        title = f"Synthetic streams, {groups[streams_[0]][0].grads.shape[0]} steps, seeds {seeds}"
        result.append((title, summary(report, streams_, bytes_too=False)))
    return result


def summary(report: Report, cases: Sequence[str], bytes_too: bool = True) -> list[Row]:
    """The summarizing rows of some cases, renamed for the eye."""
    words = {"update_error_mean": "mean", "update_error_worst": "worst", "worst_step": "largest step"}
    if bytes_too:
        words["bytes_per_param"] = "bytes per parameter"
    return [
        Row(f"{case.removesuffix('/all').removeprefix('synthetic/')}: {words[metric]}", row.subject, metric, row.value, row.unit)
        for case in cases
        for metric in words
        for row in report.rows
        if row.case == case and row.metric == metric
    ]


def panels(report: Report, groups: Groups) -> list[Panel]:
    """The charts: one for each table, of the errors only. fp32 states are left out: five decades better, they would squeeze the rest."""
    label = "relative error of the total update"
    chosen = [p.case for p in groups.get("all", ())]
    drawn = [row for row in report.rows if row.subject != "none"] or report.rows
    kinds = [
        ("Gradients from the file", chosen, "update_error"),
        ("Gradients and eps scaled, mean over tensors", [c for c in groups if c.startswith("scale=")], "update_error_mean"),
        ("Synthetic streams, mean over seeds", [c for c in groups if c.startswith("synthetic/")], "update_error"),
    ]
    return [
        Panel(title, label, [row for case in cases for row in drawn if row.case == case and row.metric == metric])
        for title, cases, metric in kinds
        if cases
    ]
