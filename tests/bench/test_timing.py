"""The round-robin: who runs when, and which samples are compared."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest

from flashoptim_hf.bench import timing
from flashoptim_hf.bench.report import Report
from flashoptim_hf.bench.timing import Turn, add_ratio, ratio, round_robin, shapes


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only where a test says so."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


def subject(clock, log, name, cost, repeats, **options):
    def step():
        log.append(name)
        clock.now += cost

    return Turn(step, repeats, **options)


def test_subjects_take_turns_and_slow_ones_are_spread(clock):
    log = []
    fast, slow = subject(clock, log, "f", 1, 4), subject(clock, log, "s", 10, 2)
    round_robin([fast, slow])
    assert "".join(log) == "fs" + "f" + "fs" + "f" + "fs"  # the first of each is not timed
    assert fast.samples == {0: 1, 1: 1, 2: 1, 3: 1}
    assert slow.samples == {1: 10, 3: 10}


def test_a_subject_may_begin_cold(clock):
    log = []
    round_robin([subject(clock, log, "w", 1, 1), subject(clock, log, "c", 1, 1, warm_up=False)])
    assert "".join(log) == "wwc"


def test_inner_steps_are_averaged_and_preparation_is_not_timed(clock):
    @contextmanager
    def around():
        clock.now += 100
        yield
        clock.now += 100

    log = []
    turn = subject(clock, log, "x", 2, 3, inner=5, around=around)
    round_robin([turn])
    assert turn.seconds == [2, 2, 2]
    assert len(log) == 1 + 3 * 5


def test_what_prepares_each_step_is_not_timed_and_any_clock_serves(clock):
    log = []

    def prepare():
        log.append("p")
        clock.now += 7

    turn = subject(clock, log, "x", 2, 2, inner=3, prepare=prepare)
    other = subject(clock, log, "y", 2, 2)
    other.clock = lambda: 10 * clock.now
    round_robin([turn, other])
    assert "".join(log) == "pxy" + 2 * ("pxpxpx" + "y")
    assert turn.seconds == [2, 2]
    assert other.seconds == [20, 20]


def test_a_subject_that_took_too_long_drops_out_after_a_sample(clock):
    log = []
    quick, endless = subject(clock, log, "q", 1, 6), subject(clock, log, "e", 50, 6, most_seconds=15)
    round_robin([quick, endless])
    assert len(quick.samples) == 6
    assert list(endless.samples) == [0]


def test_ratios_are_taken_within_a_round():
    a, b = Turn(lambda: None, 3, samples={0: 2.0, 1: 20.0, 2: 8.0}), Turn(lambda: None, 3, samples={0: 1.0, 1: 10.0, 2: 2.0})
    assert ratio(a, b) == [2, 2, 4]
    b.samples = {1: 10.0}
    assert ratio(a, b) == [2]
    b.samples = {5: 4.0}
    assert ratio(a, b) == [0.5, 5, 2]
    report = Report("b", "d")
    add_ratio(report, "c", "s", "m", a, b)
    assert (report.rows[0].value, report.rows[0].unit) == (2, "1")
    assert report.rows[0].p20 < 2 < report.rows[0].p80


@pytest.mark.parametrize("total", [10_000, 32_000_000])
def test_shapes_keep_total_and_multiple(total):
    sizes = shapes(total, (8, 4, 4, 2), 256)
    assert len(sizes) == 4
    assert all(size % 256 == 0 and size > 0 for size in sizes)
    assert math.isclose(sum(sizes), total, rel_tol=0.06)
    assert sizes[0] > sizes[-1]
