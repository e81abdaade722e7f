"""Paging: how many bytes does a step move, and how long does it take, for models from 1B to 70B on four links?

    flashoptim-hf bench paging --json paging.json --plot paging.png

The real engine runs on the simulated device with a model of bandwidths and latencies; see `paging_model` for how it is scaled. A step is
forward, backward and update of 8192 tokens on a device that computes 120 TFLOP/s; `overhead_ratio` is what it takes longer than with all
state on the device (0.1: a tenth). With gradient release pages are updated while backward computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, get_args

import typer

from ..errors import ConfigurationError
from .fidelity import items
from .paging_model import LINKS, SHAPES, Job, Outcome, Way, full, lora, simulate
from .report import JsonOption, Panel, PlotOption, Report, Row, check_outputs, cpu_name, draw, show, table

BUDGETS = (0, 25, 50, 75, 100)
"""Per cent of the state that may stay on the device."""
SUBJECTS: dict[Way, str] = {way: way for way in get_args(Way) if way != "resident"}

WEIGHT = 2
"""Bytes of a bf16 weight, and of its gradient."""
MIXED_ADAMW = 16
"""Bytes per parameter of mixed-precision AdamW: bf16 weight and gradient, and master weight and two moments in fp32."""
FLASHOPTIM = 5
"""Of FlashOptim with gradient release: bf16 weight, 8-bit correction, two 8-bit moments (arXiv 2602.23349; group constants left out)."""


def run(
    models: Annotated[str, typer.Option(help="Models, with commas between.")] = ",".join(SHAPES),
    links: Annotated[str, typer.Option(help="Links, with commas between.")] = ",".join(LINKS),
    pages: Annotated[int, typer.Option(help="Run at most so many pages of a model.", min=8)] = 96,
    json_file: JsonOption = None,
    plot_file: PlotOption = None,
) -> None:
    """Bytes and predicted step overhead of paged state, on the simulated device: budgets, links, models, and gradient release."""
    check_outputs(json_file, plot_file)
    report = Report("paging", cpu_name())
    add_budgets(report, pages)
    chosen = known(models, SHAPES, "model")
    for link in known(links, LINKS, "link"):
        for model in chosen:
            add_model(report, f"model/{model}_full/{link}", full(SHAPES[model]), LINKS[link], SHAPES[model].params, pages)
            add_model(report, f"model/{model}_lora/{link}", lora(SHAPES[model]), LINKS[link], SHAPES[model].params, pages)
    show_report(report)
    if json_file is not None:
        report.write_json(json_file)
    if plot_file is not None:
        draw(panels(report.rows), plot_file)


def known(text: str, names: Iterable[str], what: str) -> list[str]:
    """The items of a list with commas.

    Raises:
        ConfigurationError: one of them is not among `names`.
    """
    wanted, names = items(text), list(names)
    for name in wanted:
        if name not in names:
            raise ConfigurationError(f"{what} {name!r} is not known; choose from {', '.join(names)}.")
    return wanted


def add_budgets(report: Report, pages: int) -> None:
    """Every budget for an 8B model's state over PCIe 4: bytes of a step beside what they should be, the fixed set beside LRU."""
    job, link = full(SHAPES["8b"]), LINKS["pcie4"]
    base = simulate(job, link, "resident", most_pages=pages)
    for budget in BUDGETS:
        case = f"simulated/budget={budget}%"
        for way in SUBJECTS if budget == 0 else [way for way in SUBJECTS if way != "no_overlap"]:
            found = simulate(job, link, way, budget / 100, pages)
            expected = 2 * found.state if way == "least_recently_used" and budget < 100 else 2 * (found.state - found.resident)
            add_outcome(report, case, way, found, base, expected)


def add_model(report: Report, case: str, job: Job, link: float, params: int, pages: int) -> None:
    """One model on one link, with nothing staying on the device."""
    base = simulate(job, link, "resident", most_pages=pages)
    for way in SUBJECTS:
        found = simulate(job, link, way, 0.0, pages)
        add_outcome(report, case, way, found, base, 2 * (found.state - found.resident))
        gradients = 0 if way == "release" else job.trained
        frozen = params - job.trained if job.trained < params // 2 else 0
        report.add(case, way, "device_bytes_per_param", (WEIGHT * (job.trained + frozen + gradients) + found.resident) / params, "B")
    if job.trained == params:
        report.add(case, "mixed_adamw", "device_bytes_per_param", MIXED_ADAMW, "B")
        report.add(case, "flashoptim_release", "device_bytes_per_param", FLASHOPTIM, "B")


def add_outcome(report: Report, case: str, way: Way, found: Outcome, base: Outcome, expected: int) -> None:
    """The rows of one run, beside one with all state on the device."""
    report.add(case, way, "bytes_per_step", found.moved, "B")
    report.add(case, way, "bytes_expected", expected, "B")
    # what is below a nanosecond is rounding
    beyond = round(found.seconds - base.seconds, 9) + 0.0
    report.add(case, way, "overhead_ratio", beyond / base.seconds)
    report.add(case, way, "overhead_seconds", beyond, "s")
    report.add(case, way, "step_seconds", found.seconds, "s")
    report.add(case, way, "staging_bytes", found.staging, "B")
    if found.hidden is not None:
        report.add(case, way, "hidden_share", found.hidden)


def show_report(report: Report) -> None:
    """Tables: bytes by budget, and overhead by model."""
    simulated = [row for row in report.rows if row.case.startswith("simulated")]
    moved = [
        Row(row.case, f"{row.subject}{', expected' if row.metric == 'bytes_expected' else ''}", "GB", row.value / 1e9, "1")
        for row in simulated
        if row.subject in ("ours", "least_recently_used") and row.metric in ("bytes_per_step", "bytes_expected")
    ]
    show(table(moved, "GB per step, 8B full fine-tuning"))
    for metric, title in (
        ("overhead_ratio", "Step time beyond that with all state on the device"),
        ("hidden_share", "Share of the transfer time in which no kernel waits"),
        ("device_bytes_per_param", "Device bytes per parameter, beyond activations and staging"),
    ):
        rows = [row for row in report.rows if row.metric == metric]
        show(table(rows, title, digits=3))


def panels(rows: Sequence[Row]) -> list[Panel]:
    """What the picture shows."""
    found = [
        Panel(
            "Bytes of a step, 8B full fine-tuning",
            "GB",
            [
                Row(row.case, row.subject, row.metric, row.value / 1e9, row.unit)
                for row in rows
                if row.metric == "bytes_per_step" and row.case.startswith("simulated") and row.subject in ("ours", "least_recently_used")
            ],
        )
    ]
    for case, title in (("simulated/", "Overhead by budget, 8B, PCIe 4 x16"), ("_full/", "Overhead, full fine-tuning, budget 0")):
        part = [row for row in rows if row.metric == "overhead_ratio" and case in row.case]
        found.append(Panel(title, "step time beyond that with all state on the device, ratio", part))
    return [panel for panel in found if panel.rows]
