"""Conversions: every optimizer's state into every other's, what is lost, and whether training goes on as before.

    flashoptim-hf bench conversions --json conversions.json --markdown conversions.md

For each source: some steps of a tiny model; then it goes on by itself, and beside it, converted, each target goes on from the same weights
over the same batches. A cell says whether the states are the same numbers afterwards, else ‖after - before‖ / ‖before‖ of the state that
lost most (v as its square root), and the largest difference of a loss between the two runs. All packages run their own code.

Two kinds of weights: fp32, and bf16 with 24-bit masters where a package has them. A cell then says whether the corrections came along,
bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ..errors import CheckpointError, ConfigurationError
from ..optim import convert
from ..optim.layout import CORRECTION
from . import conversion_model as runs
from .conversion_model import Job, Outcome
from .fidelity import items
from .peers import installed
from .report import JsonOption, Report, check_outputs, cpu_name, show

CODECS = {"adamw": ("log", "softsign", "none"), "lion": ("square", "softsign", "none"), "sgd": ("square", "softsign", "none")}
PACKAGES = {
    "adamw": ("torch", "bitsandbytes32", "bitsandbytes8", "flashoptim", "torchao"),
    "lion": ("bitsandbytes32", "bitsandbytes8", "flashoptim"),
    "sgd": ("torch", "bitsandbytes32", "bitsandbytes8", "flashoptim"),
}
TORCH_NAMES = {"adamw": "adamw_torch", "sgd": "sgd"}
WEIGHTS = {"float32": "", "bfloat16": "bf16+24"}
"""dtype of the weights -> what cases and tables call it."""


@dataclass(frozen=True)
class Cell:
    """One conversion.

    Attributes:
        error: of the state that lost most, 0.0 where all are the same bits; None where it is refused.
        difference: largest difference of a loss; None where training did not go on.
        message: why it is refused, or what was said.
        masters: whether every correction came along in every bit; None where the source has none.
    """

    error: float | None
    difference: float | None
    message: str
    masters: bool | None = None

    @property
    def text(self) -> str:
        if self.error is None:
            return "refused"
        masters = "" if self.masters is None else ", masters" if self.masters else ", no masters"
        loss = "" if self.difference is None else f", loss ±{self.difference:.1g}"
        return ("exact" if self.error == 0 else f"{self.error:.2g}") + masters + loss


def run(
    algorithms: Annotated[str, typer.Option(help="Of adamw, lion and sgd, with commas between.")] = "adamw,lion,sgd",
    packages: Annotated[str, typer.Option(help="'installed', or names of packages with commas between, beside torch.")] = "installed",
    before: Annotated[int, typer.Option(min=1, help="Steps before the conversion.")] = 30,
    after: Annotated[int, typer.Option(min=1, help="Steps after it.")] = 20,
    weights: Annotated[str, typer.Option(help="Of float32 and bfloat16 (with 24-bit masters), with commas between.")] = "float32,bfloat16",
    json_file: JsonOption = None,
    markdown: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the tables to this file.")] = None,
) -> None:
    """Every optimizer state into every other: what is lost, and whether training goes on with the same losses."""
    check_outputs(json_file, None)
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
    chosen = items(algorithms)
    if not chosen or not set(chosen) <= set(CODECS):
        raise ConfigurationError(f"--algorithms {algorithms!r}: choose from {', '.join(CODECS)}.")
    dtypes = items(weights)
    if not dtypes or not set(dtypes) <= set(WEIGHTS):
        raise ConfigurationError(f"--weights {weights!r}: choose from {', '.join(WEIGHTS)}.")
    report, pages = Report("conversions", cpu_name()), []
    for algorithm, dtype in ((algorithm, dtype) for dtype in dtypes for algorithm in chosen):
        cells = table_of(algorithm, packages, before, after, dtype)
        add(report, "/".join(filter(None, (algorithm, WEIGHTS[dtype]))), cells)
        pages.append(as_markdown(algorithm, cells, dtype))
        show(pages[-1])
    pages.append(refusals(chosen))
    show(pages[-1])
    if json_file is not None:
        report.write_json(json_file)
    if markdown is not None:
        markdown.write_text("\n".join(pages), encoding="utf-8")


def add(report: Report, prefix: str, cells: dict[tuple[str, str], Cell]) -> None:
    """A row for each number of each cell."""
    for (source, target), cell in cells.items():
        case = f"{prefix}/{source}->{target}"
        report.add(case, "ours", "refused", cell.error is None)
        if cell.error is not None:
            report.add(case, "ours", "state_error", cell.error)
        if cell.difference is not None:
            report.add(case, "ours", "loss_difference", cell.difference)
        if cell.masters is not None:
            report.add(case, "ours", "masters_kept", cell.masters)


def forms(algorithm: str, packages: str) -> list[str]:
    """Ours first, then those of the packages that are wanted and there."""
    wanted = items(packages)
    found = list(CODECS[algorithm])
    for form in PACKAGES[algorithm]:
        package = form.rstrip("0123456789")
        if package == "torch" or (installed(package) if packages == "installed" else package in wanted):
            found.append(form)
    return found


def table_of(algorithm: str, packages: str, before: int, after: int, dtype: str = "float32") -> dict[tuple[str, str], Cell]:
    """(source, target) -> cell, for weights of a dtype."""
    names = forms(algorithm, packages)
    start = dict(zip(names, do([(name, Job(algorithm, {}, None, 0, before, dtype)) for name in names]), strict=True))
    rest = [(name, Job(algorithm, start[name].weights, start[name].state, before, after, dtype)) for name in names]
    alone = dict(zip(names, do(rest), strict=True))
    cells: dict[tuple[str, str], Cell] = {}
    after_conversion: dict[tuple[str, str], dict[str, Any]] = {}
    todo: list[tuple[tuple[str, str], Job, float, str]] = []
    for source in names:
        for target in names:
            if target == source:
                continue
            try:
                state, notes = converted(algorithm, start[source].state, target, dtype)
            except (CheckpointError, ConfigurationError) as error:
                cells[source, target] = Cell(None, None, str(error))
                continue
            job = Job(algorithm, start[source].weights, state, before, after, dtype)
            after_conversion[source, target] = state
            todo.append(((source, target), job, lost(start[source].state, state), " ".join(notes)))
    outcomes = do([(pair[1], job) for pair, job, _, _ in todo])
    for (pair, _, gone, said), outcome in zip(todo, outcomes, strict=True):
        apart = max(abs(a - b) for a, b in zip(outcome.losses, alone[pair[0]].losses, strict=True))
        cells[pair] = Cell(gone, apart, said, masters_kept(start[pair[0]].state, after_conversion[pair]))
    return {(source, target): cells[source, target] for source in names for target in names if source != target}


def do(jobs: Sequence[tuple[str, Job]]) -> list[Outcome]:
    """Do jobs, each with the optimizer of its form; flashoptim's together, in their own process."""
    peers = iter(runs.run_flashoptim([job for form, job in jobs if form == "flashoptim"]))
    return [next(peers) if form == "flashoptim" else runs.train(maker(form, job.algorithm), job) for form, job in jobs]


def maker(form: str, algorithm: str) -> Callable[[Any], torch.optim.Optimizer]:
    """What makes the optimizer of a form."""
    if form.startswith("bitsandbytes"):
        return runs.bitsandbytes(algorithm, int(form.removeprefix("bitsandbytes")))
    makers: dict[str, Callable[[str], Any]] = {"torch": runs.torch_optimizer, "torchao": runs.torchao}
    return makers.get(form, partial(runs.ours, codec=form))(algorithm)


def converted(algorithm: str, state: dict[str, Any], target: str, dtype: str) -> tuple[dict[str, Any], list[str]]:
    """A state dict of any form in the form `target`, and what was said.

    Raises:
        CheckpointError, ConfigurationError: it is refused.
    """
    if target in CODECS[algorithm]:
        return convert.to_ours(state, [(target, True)] * len(state["param_groups"]))
    mine, notes = convert.to_ours(state)
    bits = 32 if target == "bitsandbytes32" else 8
    name = TORCH_NAMES[algorithm] if target == "torch" else target.rstrip("0123456789")
    state, more = convert.from_ours(mine, name, bits=bits, weight_dtype=getattr(torch, dtype))
    return state, [*notes, *more]


def masters_kept(before: dict[str, Any], after: dict[str, Any]) -> bool | None:
    """Whether every correction is the same afterwards; None where there was none."""
    old, new = convert.to_ours(before)[0]["state"], convert.to_ours(after)[0]["state"]
    corrections = {key: values[CORRECTION] for key, values in old.items() if CORRECTION in values}
    if not corrections:
        return None
    return all(CORRECTION in new[key] and torch.equal(new[key][CORRECTION], value) for key, value in corrections.items())


def decoded(state: dict[str, Any]) -> dict[str, list[Tensor]]:
    """State -> one fp32 tensor for each parameter; v as its square root."""
    source = convert.recognise(state)
    assert source is not None
    mine, _ = convert.to_ours(state)
    found: dict[str, list[Tensor]] = {one.name: [] for one in convert.STATES[source.algorithm]}
    for group in mine["param_groups"]:
        for key in group["params"]:
            values, _ = convert.decode(source.algorithm, mine["state"][key], group)
            for one, value in zip(convert.STATES[source.algorithm], values, strict=True):
                found[one.name].append(value if one.signed else value.sqrt())
    return found


def lost(before: dict[str, Any], after: dict[str, Any]) -> float:
    """The largest relative error of a state over all parameters together."""
    worst = 0.0
    old, new = decoded(before), decoded(after)
    for name, values in old.items():
        off = sum(float((a - b).double().square().sum()) for a, b in zip(new[name], values, strict=True))
        size = sum(float(b.double().square().sum()) for b in values)
        worst = max(worst, (off / size) ** 0.5)
    return worst


def as_markdown(algorithm: str, cells: dict[tuple[str, str], Cell], dtype: str = "float32") -> str:
    """The cells as a table: sources down, targets across."""
    names = list(dict.fromkeys(source for source, _ in cells))
    heads = [f"`{name}`" if name in CODECS[algorithm] else name for name in names]
    title = " ".join(filter(None, (algorithm, WEIGHTS[dtype])))
    lines = [f"| {title}, from \\ to | " + " | ".join(heads) + " |", "| --- " * (len(names) + 1) + "|"]
    for source, head in zip(names, heads, strict=True):
        texts = ["" if source == target else cells[source, target].text for target in names]
        lines.append(f"| {head} | " + " | ".join(texts) + " |")
    why = dict.fromkeys(cell.message for cell in cells.values() if cell.error is None)
    return "\n".join([*lines, *("", *(f"Refused: {message}" for message in why)), ""])


def refusals(algorithms: Sequence[str]) -> str:
    """What is said when one algorithm's optimizer is given another's state."""
    lines = ["Refused on load, before anything changes:", ""]
    for algorithm in algorithms:
        outcome = runs.train(runs.ours(algorithm, "none"), Job(algorithm, {}, None, 0, 1))
        for other in algorithms:
            if other != algorithm:
                try:
                    runs.train(runs.ours(other, "none"), Job(other, {}, outcome.state, 0, 1))
                except CheckpointError as error:
                    lines.append(f"- {error}")
    return "\n".join([*lines, ""])
