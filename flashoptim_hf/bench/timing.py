"""Timing of several subjects in one process, in turns, so that drift of the machine hits all of them alike."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from .report import Report, Row


@dataclass
class Turn:
    """One subject of a round-robin.

    Attributes:
        step: what is timed.
        repeats: in how many rounds it takes part.
        inner: how often `step` runs in one round; the sample is the mean. Default 1.
        around: entered before the clock starts and left after it stops.
        warm_up: whether it runs once untimed first, since the first step makes state. Default True.
        prepare: called before each step, untimed. Default: nothing.
        clock: gives seconds. Default: `time.perf_counter`.
        most_seconds: the subject drops out of later rounds once its samples have taken this long together. Default: never.
        samples: round to seconds per call, filled by `round_robin`.
    """

    step: Callable[[], object]
    repeats: int
    inner: int = 1
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    warm_up: bool = True
    prepare: Callable[[], object] | None = None
    clock: Callable[[], float] | None = None
    most_seconds: float = math.inf
    samples: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> list[float]:
        return list(self.samples.values())

    def measure(self) -> float:
        """Seconds per call, of `inner` calls."""
        clock = self.clock or time.perf_counter
        if self.prepare is None:
            start = clock()
            for _ in range(self.inner):
                self.step()
            return (clock() - start) / self.inner
        spent = 0.0
        for _ in range(self.inner):
            self.prepare()
            start = clock()
            self.step()
            spent += clock() - start
        return spent / self.inner


def round_robin(turns: Sequence[Turn]) -> None:
    """Run every subject once untimed, if it wants that, and then in rounds.

    A subject with fewer repeats takes part in evenly spread rounds.
    """
    for turn in turns:
        if turn.warm_up:
            with turn.around():
                if turn.prepare is not None:
                    turn.prepare()
                turn.step()
    rounds = max(turn.repeats for turn in turns)
    for number in range(rounds):
        for turn in turns:
            if not _takes_part(turn, number, rounds):
                continue
            with turn.around():
                turn.samples[number] = turn.measure()


def _takes_part(turn: Turn, number: int, rounds: int) -> bool:
    """Whether this round is one of the subject's. The first that is spread to it always is, however slow it was before."""
    mine = number * turn.repeats // rounds != (number + 1) * turn.repeats // rounds
    return mine and sum(turn.seconds) * turn.inner <= turn.most_seconds


def ratio(above: Turn, below: Turn) -> list[float]:
    """Ratios of two subjects, round by round, of the rounds in which both took part; else of all pairs."""
    common = above.samples.keys() & below.samples.keys()
    if common:
        return [above.samples[number] / below.samples[number] for number in sorted(common)]
    return [a / b for a in above.seconds for b in below.seconds]


def add_ratio(report: Report, case: str, subject: str, metric: str, above: Turn, below: Turn) -> None:
    """A row with the median, p20 and p80 of `ratio`."""
    report.rows.append(Row.timing(case, subject, metric, ratio(above, below), "1"))


def add_load(report: Report) -> None:
    """A row that says how busy the machine was before the run: the load average of the last minute."""
    if hasattr(os, "getloadavg"):
        report.add("machine", "machine", "load_average_1min", os.getloadavg()[0])


def label(row: Row) -> Row:
    """The row with case and subject in one field, so that a table has one line for each pair."""
    return replace(row, case=f"{row.case}: {row.subject}")


def shapes(total: int, parts: Sequence[int], multiple: int) -> list[int]:
    """`total` split in the proportion of `parts`, each at least once and a multiple of `multiple`."""
    return [max(1, round(total * part / sum(parts) / multiple)) * multiple for part in parts]
