"""What `bench convergence` keeps of each run, and what it says about all of them.

The file is a report like every bench's, with one more key: "records", one for each task, optimizer and seed, in a line of its own. Rows are
computed from the records each time it is written.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from .convergence_optimizers import NAMES, REFERENCE
from .convergence_tasks import TASKS, Task
from .report import Report

LAST = 3
"""Evaluations whose mean is a run's final figure."""
POINTS = 40
"""Most points of a training curve; each is the mean loss of equally many steps."""


@dataclass(frozen=True)
class Record:
    """One finished run.

    Attributes:
        task, optimizer, seed: which run; a file holds each once.
        settings: the task's, see `Task.settings`.
        curve: training loss, at most `POINTS` means over equally many steps.
        evaluations: [{"step", "loss", ("accuracy")}], the first before any step.
        seconds: processor time of the whole run, all threads together.
        threads: torch's.
        commit, versions, date: when, and of what.
    """

    task: str
    optimizer: str
    seed: int
    settings: dict[str, Any]
    curve: list[float]
    evaluations: list[dict[str, float]]
    seconds: float
    threads: int
    commit: str | None
    versions: dict[str, str]
    date: str

    @property
    def key(self) -> tuple[str, str, int]:
        return self.task, self.optimizer, self.seed

    def final(self, metric: str) -> float:
        """Mean of a held-out figure over the last evaluations; not a number where a run has none or left the finite numbers."""
        values = [entry.get(metric, math.nan) for entry in self.evaluations[1:][-LAST:]]
        return statistics.fmean(values) if values else math.nan


def thinned(losses: Sequence[float]) -> list[float]:
    """Means over equally many steps, at most `POINTS` of them; six digits."""
    size = -(-len(losses) // POINTS)
    return [float(f"{statistics.fmean(losses[k : k + size]):.6g}") for k in range(0, len(losses), size)]


def read(path: Path) -> dict[tuple[str, str, int], Record]:
    """The records of a file; none where there is no file.

    Raises:
        ConfigurationError: the file is no result of this bench.
    """
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["records"]
        records = [Record(**_numbers(entry)) for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"--json {path} is there and is no result of `bench convergence` ({error!r}); name another file."
        ) from error
    return {record.key: record for record in records}


def _numbers(value: Any) -> Any:
    """JSON's null in a list or dictionary of figures as not a number; what may be null by itself stays."""
    if isinstance(value, list):
        return [math.nan if item is None else _numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: math.nan if item is None and key in ("loss", "accuracy") else _numbers(item) for key, item in value.items()}
    return value


def _plain(value: Any) -> Any:
    """What is not finite as None, since JSON has no word for it."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(path: Path, records: Mapping[tuple[str, str, int], Record], report: Report) -> None:
    """Write rows and records to `path`, whole or not at all."""
    head = json.dumps({**report.to_dict(), "records": []}, indent=1, allow_nan=False)
    lines = ",\n".join("  " + json.dumps(_plain(asdict(record)), allow_nan=False) for record in records.values())
    part = path.with_name(path.name + ".part")
    part.write_text(head.removesuffix("[]\n}") + (f"[\n{lines}\n ]\n}}\n" if lines else "[]\n}\n"), encoding="utf-8")
    part.replace(path)


def check_settings(records: Mapping[tuple[str, str, int], Record], tasks: Iterable[Task]) -> None:
    """Raise where a file's records were made with other settings than these tasks have.

    Raises:
        ConfigurationError: with the first setting that differs.
    """
    wanted = {task.name: task.settings() for task in tasks}
    for record in records.values():
        for key, value in wanted.get(record.task, {}).items():
            if record.settings.get(key) != value:
                raise ConfigurationError(
                    f"--json: its run of {record.task} with {record.optimizer} has {key}={record.settings.get(key)!r}, and this one would "
                    f"have {value!r}: they cannot be compared. Name another file, or give the same options."
                )


# ---------------------------------------------------------------------- statistics


def student(degrees: int) -> float:
    """The 97.5 % point of Student's t distribution with at least one degree of freedom, to six digits."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)

    # with t = sqrt(degrees) tan(a), the distribution is an integral of a power of the cosine over a finite range
    def below(angle: float, pieces: int = 400) -> float:
        width = angle / pieces
        values = [math.cos(k * width) ** (degrees - 1) for k in range(pieces + 1)]
        return scale * width / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < 0.475 else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of the mean; not a number for fewer than two values."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Comparison:
    """One optimizer beside fp32 on one task, over the seeds that both have.

    Attributes:
        task, optimizer: which.
        seeds: how many.
        loss, accuracy: means of the final held-out figures; accuracy is not a number for language models.
        difference, interval: of the final loss from fp32's, paired by seed: mean, and half of its 95 % interval.
        own_interval: half of the 95 % interval of fp32's mean final loss over its seeds.
        distance, at: the largest distance between the two mean training curves, and its share of the steps.
    """

    task: str
    optimizer: str
    seeds: int
    loss: float
    accuracy: float
    difference: float
    interval: float
    own_interval: float
    distance: float
    at: float

    @property
    def within(self) -> bool | None:
        """Whether 0 lies in the interval of the difference; None where there is no interval."""
        return None if math.isnan(self.interval) and math.isfinite(self.difference) else abs(self.difference) <= self.interval

    @property
    def within_own(self) -> bool | None:
        """Whether the mean lies in the interval of fp32's own mean; None where there is none."""
        return None if math.isnan(self.own_interval) else abs(self.difference) <= self.own_interval

    def verdict(self) -> str:
        """For the table."""
        if self.optimizer == REFERENCE:
            return ""
        if self.within is None:
            return "too few seeds"
        if self.within:
            return "within"
        return "not finite" if not math.isfinite(self.difference) else f"outside, {'worse' if self.difference > 0 else 'better'}"


def compare(records: Mapping[tuple[str, str, int], Record]) -> list[Comparison]:
    """Every task and optimizer that has a seed in common with fp32, in the order of `TASKS` and `NAMES`."""
    found = []
    for task in TASKS:
        reference = {seed: record for (name, optimizer, seed), record in records.items() if (name, optimizer) == (task, REFERENCE)}
        for optimizer in NAMES:
            seeds = sorted(seed for seed in reference if (task, optimizer, seed) in records)
            if seeds:
                found.append(_compare([reference[seed] for seed in seeds], [records[task, optimizer, seed] for seed in seeds]))
    return found


def _compare(reference: Sequence[Record], runs: Sequence[Record]) -> Comparison:
    """Runs of one optimizer beside those of fp32 with the same seeds."""
    apart = [run.final("loss") - other.final("loss") for run, other in zip(runs, reference, strict=True)]
    curves = [statistics.fmean(column) for column in zip(*(run.curve for run in runs), strict=True)]
    others = [statistics.fmean(column) for column in zip(*(run.curve for run in reference), strict=True)]
    distances = [abs(a - b) for a, b in zip(curves, others, strict=True)]
    finite = all(map(math.isfinite, distances))
    far = max(range(len(distances)), key=distances.__getitem__) if finite else len(distances) - 1
    return Comparison(
        runs[0].task,
        runs[0].optimizer,
        len(runs),
        statistics.fmean(run.final("loss") for run in runs),
        statistics.fmean(run.final("accuracy") for run in runs),
        statistics.fmean(apart),
        half_width(apart),
        half_width([run.final("loss") for run in reference]),
        distances[far] if finite else math.nan,
        (far + 0.5) / len(distances),
    )


def add_rows(report: Report, comparisons: Iterable[Comparison]) -> None:
    """The figures of each comparison; `within` and `within_own` are 1, 0, or null where there is no interval."""
    for found in comparisons:
        report.add(found.task, found.optimizer, "seeds", found.seeds)
        report.add(found.task, found.optimizer, "final_loss", found.loss, "nat")
        if not math.isnan(found.accuracy):
            report.add(found.task, found.optimizer, "final_accuracy", found.accuracy)
        if found.optimizer == REFERENCE:
            report.add(found.task, found.optimizer, "interval_of_mean", found.own_interval, "nat")
            continue
        report.add(found.task, found.optimizer, "difference", found.difference, "nat")
        report.add(found.task, found.optimizer, "interval_of_difference", found.interval, "nat")
        report.add(found.task, found.optimizer, "curve_distance", found.distance, "nat")
        for metric in ("within", "within_own"):
            value = getattr(found, metric)
            report.add(found.task, found.optimizer, metric, math.nan if value is None else value)
