"""A few of the random schedules that `make race` plays by the thousand, and some that hypothesis looks for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.optim.conftest import bits
from tests.race.mutants import MUTANTS, Mutant, caught
from tests.race.optimizers import ACTIONS, SHAPES, Plan, placement, played
from tests.race.run import batch, compare, jobs, race

pytestmark = pytest.mark.filterwarnings("ignore")  # of skipped steps, converted corrections, memory that is short


@pytest.mark.parametrize("part", range(3))
def test_an_engine_gives_the_bits_of_the_host(part: int, tmp_path: Path) -> None:
    for seed in range(10**6 + part, 10**6 + 150, 3):
        race(seed, str(tmp_path))


@pytest.mark.parametrize("part", range(3))
def test_an_optimizer_gives_the_bits_of_the_unpaged_one(part: int, tmp_path: Path) -> None:
    for seed in range(10**6 + part, 10**6 + 12, 3):
        compare(seed, 6, str(tmp_path), length=10)


plans = st.builds(
    Plan,
    params=st.integers(2, 5),
    groups=st.integers(1, 2),
    shapes=st.integers(0, len(SHAPES) - 1),
    options=st.fixed_dictionaries({"codec": st.sampled_from(["log", "softsign", "none"]), "master_bits": st.sampled_from([24, 32, None])}),
    actions=st.lists(st.tuples(st.sampled_from(sorted(set(ACTIONS))), st.integers(0, 99)), max_size=12).map(tuple),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans, st.integers(0, 10**6))
def test_any_plan_that_hypothesis_finds(plan: Plan, seed: int) -> None:
    options: dict[str, Any] = placement(seed)
    assert bits(played(plan, seed, **options).result()) == bits(played(plan).result()), options


@pytest.mark.parametrize("mutant", MUTANTS[:10], ids=lambda mutant: mutant.what)
def test_a_fault_in_the_pager_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    assert caught(mutant, str(tmp_path), 60) is not None


def test_all_schedules_are_played_and_a_fault_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(jobs(20_000))
    count = {kind: sum(stop - start for name, start, stop in found if name == kind) for kind in ("engine", "optimizer")}
    assert count["engine"] + 8 * count["optimizer"] == 20_000
    assert batch(("engine", 3, 5), str(tmp_path)) == (2, [])
    monkeypatch.setattr("tests.race.run.race", lambda *_: 1 // 0)
    done, faults = batch(("engine", 3, 5), str(tmp_path))
    assert done == 0
    assert [fault.partition(":")[0] for fault in faults] == ["engine 3", "engine 4"]
    assert "ZeroDivisionError" in faults[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_runs_resume_from_the_last_complete_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.race.kills", str(tmp_path / "kills"), "6"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("6 kills: "), done.stdout
