"""Resharding: what becomes of optimizer state that some ranks saved and another number of ranks loads?

    flashoptim-hf bench reshard --json reshard.json

Starts processes on the CPU (gloo). 1 is a plain model in one process, more ranks are FSDP2 (`fully_shard`). State goes through
`torch.distributed.checkpoint` in its three forms: sharded, whole, and flattened; the largest difference of the three is shown.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from ..errors import UnsupportedError
from .fidelity import items
from .report import JsonOption, Report, Row, check_outputs, cpu_name, show, table

METRICS = {
    "codes": "largest difference of a code; where group constants change, codes count in other units",
    "v_steps": "largest difference of sqrt(v), in what one code is worth after loading",
    "m_steps": "largest difference of m, in what one code is worth after loading",
}
_WORKER = "flashoptim_hf.bench.reshard_ranks"


def measure(cases: Iterable[str]) -> list[dict[str, Any]]:
    """Run the cases in processes of their own; see `reshard_ranks` for how they are written and what is found.

    Raises:
        UnsupportedError: a process failed; the message ends with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", _WORKER, folder, *cases],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    if done.returncode:
        raise UnsupportedError(f"the ranks of {' '.join(cases)} failed (exit status {done.returncode}): {done.stderr[-3000:]}")
    return [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")]


def run(
    cases: Annotated[str, typer.Option(help="Ranks that save and ranks that load, with commas between.")] = "2-2,2-1,1-2,2-4,4-2",
    json_file: JsonOption = None,
) -> None:
    """Optimizer state saved on some ranks and loaded on others: largest differences, for shapes that do and do not divide evenly."""
    from .reshard_ranks import parse

    check_outputs(json_file, None)
    names = items(cases)
    for name in names:
        parse(name)
    report = Report("reshard", cpu_name())
    add(report, measure(names))
    for metric, meaning in METRICS.items():
        rows = [row for row in report.rows if row.metric == metric]
        show(
            table(
                [Row(row.case.split("/")[1], row.case.split("/")[0], metric, row.value, row.unit) for row in rows], f"{metric}: {meaning}"
            )
        )
    if json_file is not None:
        report.write_json(json_file)


def add(report: Report, found: Iterable[dict[str, Any]]) -> None:
    """A row for each parameter and metric, the worst of the ways of loading: case "2->4/odd (5, 7)"."""
    from .reshard_ranks import SHAPES

    worst: dict[str, dict[str, float]] = {}
    for result in found:
        case = f"{result['from']}->{result['to']}/{result['name']} {SHAPES[result['name']]}"
        entry = worst.setdefault(case, dict.fromkeys(METRICS, 0.0))
        for metric in METRICS:
            entry[metric] = max(entry[metric], float(result[metric]))
    for case, entry in worst.items():
        for metric, value in entry.items():
            report.add(case, "ours", metric, value)
