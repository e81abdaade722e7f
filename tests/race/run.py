"""`python -m tests.race.run [--schedules 20000] [--kills 50]`: many random schedules on all cores, for `make race`.

Seven in ten are of an engine alone, the others of whole optimizers, eight placements to a plan. Every failure is named by its seed, with
which it can be played again: `Race(seed).play()`, or `compare(seed)`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from flashoptim_hf.paging.files import OffloadFiles
from tests.optim.conftest import bits
from tests.race.engines import Race
from tests.race.optimizers import placement, played, schedule

PLACEMENTS = 8
"""Placements and orders of execution that one plan is played on."""
BATCH = 80


def compare(seed: int, placements: int = PLACEMENTS, folder: str | None = None, length: int = 6) -> int:
    """One plan on several placements, each with failures of its own: the unpaged optimizer's bits from all. Returns how many it were."""
    plan = schedule(seed, length)
    expected = bits(played(plan).result())
    for number in range(seed * placements, (seed + 1) * placements):
        options = placement(number, folder)
        assert bits(played(plan, number, **options).result()) == expected, f"{plan} on {options}"
    return placements


def race(seed: int, folder: str) -> int:
    """One schedule of an engine, one in five with state in files."""
    Race(seed, OffloadFiles(folder) if seed % 5 == 0 else None).play()
    return 1


def batch(job: tuple[str, int, int], folder: str) -> tuple[int, list[str]]:
    """Schedules `start` to `stop` of a kind: how many were played, and what went wrong."""
    kind, start, stop = job
    torch.set_num_threads(1)
    done, faults = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(start, stop):
            try:
                done += race(seed, folder) if kind == "engine" else compare(seed, folder=folder)
            except Exception:
                faults.append(f"{kind} {seed}: {traceback.format_exc(limit=-3)}")
    return done, faults


def jobs(schedules: int) -> Iterator[tuple[str, int, int]]:
    plans = schedules * 3 // 10 // PLACEMENTS
    engines = schedules - plans * PLACEMENTS
    for start in range(0, plans, BATCH // PLACEMENTS):
        yield "optimizer", start, min(start + BATCH // PLACEMENTS, plans)
    for start in range(0, engines, BATCH):
        yield "engine", start, min(start + BATCH, engines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options: Any = parser.parse_args(arguments)
    started, done, faults = time.monotonic(), 0, []
    folder = tempfile.mkdtemp()
    try:
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
            for count, found in pool.imap_unordered(partial(batch, folder=folder), jobs(options.schedules)):
                done, faults = done + count, faults + found
                for fault in found:
                    print(fault, flush=True)
        print(
            f"{done:,} schedules in {time.monotonic() - started:.0f} s, {len(faults)} with a difference or a broken invariant", flush=True
        )
        if options.kills:
            command = [sys.executable, "-m", "tests.race.kills", f"{folder}/kills", str(options.kills)]
            failed = subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
            faults += ["a kill"] * bool(failed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return len(faults)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
