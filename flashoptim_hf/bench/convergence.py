"""Convergence: whole trainings with fp32 states, with ours and with other packages' 8-bit states, over several seeds.

    flashoptim-hf bench convergence --json convergence.json --plot convergence.png
    flashoptim-hf bench convergence --tasks gpt,vit/lion --optimizers log,square --seeds 0,1,2,3,4 --max-minutes 30 --json convergence.json

For a task and a seed every optimizer sees the same data in the same order from the same weights. `fp32_nudged` is fp32 once more from
weights that differ by a millionth: as far as it ends from fp32, a difference says nothing about an optimizer. A run that has ended is kept
in the file and not repeated, unless `--again` asks for it; when all are there the command shows what the file holds. Several commands may
fill one file at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..errors import ConfigurationError, UnsupportedError
from . import convergence_file, convergence_plot, convergence_records
from . import convergence_optimizers as optimizers_
from .convergence_file import Records
from .convergence_optimizers import CONTROL, OPTIMIZERS, OURS, PEERS, REFERENCE, Stepper
from .convergence_records import Comparison, Record, add_rows, check_settings, compare
from .convergence_tasks import TASKS, Assets, Task, begin
from .fidelity import items, whole
from .report import PlotOption, Report, check_outputs, commit, cpu_name, show, versions


def run(
    tasks: Annotated[str, typer.Option(help="Tasks ('vit/lion') or models ('vit'), with commas between, or 'all'.")] = "all",
    optimizers: Annotated[str, typer.Option(help="Optimizers, with commas between, or 'all'; fp32 always comes along.")] = "all",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between.")] = "0,1,2",
    assets: Annotated[Path, typer.Option(help="Folder that recipes/demo_assets.py has made: text and model.")] = Path(".demo"),
    steps: Annotated[int, typer.Option(min=0, help="Steps of every run; 0: the task's own number.")] = 0,
    again: Annotated[
        str, typer.Option(help="Optimizers, with commas between, or 'all': repeat those of the chosen runs that another commit made.")
    ] = "",
    max_minutes: Annotated[float, typer.Option(min=0, help="End after the run in which this time is over; 0: do all runs.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Keep every run in this JSON file, and go on from what it holds.")
    ] = None,
    plot_file: PlotOption = None,
) -> None:
    """Does training end where it ends with fp32 states? Ours, bitsandbytes and torchao beside fp32 torch, with confidence intervals."""
    check_outputs(json_file, plot_file)
    numbers, store = whole(seeds, "--seeds"), Assets(assets)
    if not numbers:
        raise ConfigurationError(f"--seeds {seeds!r} names none; give whole numbers with commas between, for example 0,1,2.")
    chosen, notes = choose_tasks(None if tasks == "all" else items(tasks), store)
    names, missing = optimizers_.choose(None if optimizers == "all" else items(optimizers))
    chosen = [replace(task, steps=steps or task.steps) for task in chosen]
    repeated = repeats(again, names)
    records: Records = {}
    if json_file is not None:
        with convergence_file.alone(json_file):  # that it can be locked is better known before the runs
            records = convergence_records.read(json_file)
    check_settings(records, chosen)

    left = work(chosen, names, numbers, store, records, json_file, 60 * max_minutes, repeated)
    comparisons = compare(records)
    show(table(comparisons), *footnotes(comparisons, records), *notes)
    if missing:
        show(f"Packages that are not installed and were left out: {', '.join(missing)}.")
    if left:
        show(f"{left} runs are left; the same command goes on with them.")
    if plot_file is not None:
        convergence_plot.draw(records, plot_file)


def choose_tasks(names: Sequence[str] | None, assets: Assets) -> tuple[list[Task], list[str]]:
    """The tasks to run, and a sentence for each model that was left out since something is missing.

    Args:
        names: tasks or their models; None: all that can be run.
        assets: where text and pretrained model are looked for.

    Raises:
        ConfigurationError: an unknown name, or nothing is left.
        UnsupportedError: something that a task takes is missing, and the task is asked for by name.
    """
    models = list(dict.fromkeys(task.model for task in TASKS.values()))
    for name in names or ():
        if name not in TASKS and name not in models:
            raise ConfigurationError(f"--tasks: {name!r} is not known; choose from {', '.join((*TASKS, *models))}, or give 'all'.")
    chosen = [task for task in TASKS.values() if names is None or task.name in names or task.model in names]
    missing = {model: words for model in dict.fromkeys(task.model for task in chosen) if (words := assets.missing(model))}
    notes = [f"{model} was left out; it takes what is not there: {'; '.join(words)}." for model, words in missing.items()]
    if notes and names is not None:
        raise UnsupportedError(" ".join(notes).replace(" was left out; it takes", " takes"))
    chosen = [task for task in chosen if task.model not in missing]
    if not chosen:
        raise ConfigurationError(" ".join(("there is nothing to run.", *notes)))
    return chosen, notes


def repeats(again: str, names: Sequence[str]) -> list[str]:
    """The optimizers whose runs are to be repeated where another commit made them.

    Args:
        again: what the option says.
        names: those that are run.

    Raises:
        ConfigurationError: one that is not run.
    """
    wanted = list(names) if again == "all" else items(again)
    for name in wanted:
        if name not in names:
            raise ConfigurationError(f"--again: {name!r} is none of the optimizers that are run here ({', '.join(names)}).")
    return wanted


def work(
    tasks: Sequence[Task],
    names: Sequence[str],
    seeds: Sequence[int],
    assets: Assets,
    records: Records,
    json_file: Path | None,
    most_seconds: float,
    again: Sequence[str] = (),
) -> int:
    """Do the runs that `records` lacks and put them there and into the file; the number of those that time did not suffice for.

    Tasks in their order, and of a task one seed after the other, so that an end before time leaves whole seeds. What other processes have
    put into the file comes into `records` too, and is not done once more.

    Args:
        again: optimizers whose runs are done too where the record's commit is not this one, or was not a commit's tree.
    """
    here = commit()

    def lacks(key: tuple[str, str, int]) -> bool:
        return key not in records or (key[1] in again and not (here == records[key].commit and here and not here.endswith("+")))

    plan = [(task, name, seed) for task in tasks for seed in seeds for name in names if name in OPTIMIZERS[task.algorithm]]
    plan = [(task, name, seed) for task, name, seed in plan if lacks((task.name, name, seed))]
    start, done = time.monotonic(), 0
    for number, (task, name, seed) in enumerate(plan):
        left = [run for run in plan[number:] if lacks((run[0].name, *run[1:]))]
        if done and most_seconds and time.monotonic() - start > most_seconds:
            return len(left)
        if (task, name, seed) not in left:
            continue
        record = train(task, name, seed, assets)
        before = records.get(record.key)
        was = "" if before is None else f" (was {before.final('loss'):.4f} at commit {str(before.commit)[:10]})"
        show(
            f"[{number + 1}/{len(plan)}] {task.name}, {name}, seed {seed}: held-out loss {record.evaluations[0]['loss']:.4f} to "
            f"{record.final('loss'):.4f}{was} in {record.seconds:.0f} s"
        )
        records[record.key] = record
        if json_file is not None:
            records |= convergence_file.add(json_file, record, lambda found: settle(found, tasks))
        done += 1
    return 0


def settle(records: Records, tasks: Sequence[Task]) -> Report:
    """The rows that follow from the records, once they are known to go together."""
    check_settings(records, tasks)
    report = Report("convergence", cpu_name())
    add_rows(report, compare(records))
    return report


def train(task: Task, name: str, seed: int, assets: Assets) -> Record:
    """One run from the first weights to the last evaluation."""
    start = time.process_time()
    training = begin(task, assets, seed)
    stepper = Stepper(task.algorithm, name, training.params, task.lr, task.weight_decay, seed)
    evaluations, losses = [{"step": 0.0, **training.evaluate()}], []
    for step in range(task.steps):
        loss = training.loss(step)
        loss.backward()
        losses.append(loss.item())
        stepper.step(task.rate(step))
        if task.evaluates_after(step + 1):
            evaluations.append({"step": step + 1.0, **training.evaluate()})
    return Record(
        task=task.name,
        optimizer=name,
        seed=seed,
        settings=task.settings(),
        curve=convergence_records.thinned(losses),
        evaluations=[{key: float(f"{value:.8g}") for key, value in entry.items()} for entry in evaluations],
        seconds=round(time.process_time() - start, 1),
        threads=torch.get_num_threads(),
        commit=commit(),
        versions=versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def table(comparisons: Sequence[Comparison]) -> Any:
    """All comparisons, one line each."""
    from rich.table import Table

    result = Table(title="Final held-out loss beside fp32, mean over seeds", title_justify="left")
    for column in ("task", "optimizer", "seeds", "loss", "minus fp32, 95 %", "curves apart", "accuracy", "verdict", "in fp32's own"):
        result.add_column(column, justify="left" if column in ("task", "optimizer") else "right", no_wrap=True)
    last = None
    for found in comparisons:
        if last is not None and found.task != last:
            result.add_section()
        own = found.optimizer == REFERENCE
        result.add_row(
            found.task if found.task != last else "",
            found.optimizer,
            str(found.seeds),
            f"{found.loss:.4f}" + (f" ± {found.own_interval:.4f}" if own else ""),
            "" if own else f"{found.difference:+.5f} ± {found.interval:.5f}",
            "" if own else f"{found.distance:.4f}",
            "" if found.accuracy != found.accuracy else f"{found.accuracy:.4f}",
            found.verdict(),
            "" if own else {True: "yes", False: "no", None: "?"}[found.within_own],
        )
        last = found.task
    return result


def footnotes(comparisons: Sequence[Comparison], records: Mapping[tuple[str, str, int], Record]) -> list[str]:
    """What must be known to read the table."""
    if not records:
        return ["No runs."]
    notes = [
        "loss: mean of the last three evaluations, nats; minus fp32: paired by seed, Student's 95 % interval; verdict: whether 0 is in it;",
        "in fp32's own: whether the mean is in the 95 % interval of fp32's mean; curves apart: largest distance of the mean training",
        "curves; fp32_nudged: fp32 from weights that differ by a millionth. One difference in twenty is outside by chance.",
    ]
    for title, names in (("ours", OURS), ("other packages", PEERS), ("fp32_nudged", (CONTROL,))):
        judged = [found for found in comparisons if found.optimizer in names and found.within is not None]
        outside = [f"{found.task} {found.optimizer} ({found.difference:+.5f})" for found in judged if not found.within]
        if judged:
            notes.append(f"{title}: {len(judged) - len(outside)} of {len(judged)} within; outside: {', '.join(outside) or 'none'}.")
    commits = sorted({str(record.commit)[:10] + "+" * str(record.commit).endswith("+") for record in records.values()})
    return [*notes, f"{len(records)} runs, of commits {', '.join(commits)}."]
