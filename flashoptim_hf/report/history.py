"""What a report is made from: plain values, in memory while a run lasts, in `report.json` afterwards, or from a finished run's folder."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

FORMAT = 1
STATE = "trainer_state.json"
RECORD = "report.json"
PAGE = "report.html"
SAMPLES = "samples.jsonl"
MOST = 1e300
"""Magnitudes from here on count as infinite: differences of two such numbers are no numbers."""

Row = dict[str, Any]
Points = list[tuple[float, float]]


@dataclass
class Run:
    """One run.

    Attributes:
        name: what the page is called.
        ended: how it ended, in a sentence.
        step, max_steps: optimizer steps done, and asked for.
        log: the Trainer's `log_history`.
        records: what was measured beside the log: rows with "step".
        facts: section -> rows of (label, value).
        planned: rows of (what, planned least, planned most, measured), in bytes; measured None where it was not.
        plan_remark: the planner's verdict in a sentence, or why there is no plan.
        samples: rows with "label", "prompt" and "answer".
        warnings: in the order in which they came.
    """

    name: str = ""
    ended: str = ""
    step: int = 0
    max_steps: int = 0
    log: list[Row] = field(default_factory=list)
    records: list[Row] = field(default_factory=list)
    facts: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    planned: list[tuple[str, int, int, int | None]] = field(default_factory=list)
    plan_remark: str = ""
    samples: list[Row] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write everything but the log, which `trainer_state.json` has, as JSON; under another name first."""
        values = asdict(self)
        del values["log"]
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps({"format": FORMAT, **values}, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def series(rows: Iterable[Row], key: str) -> Points:
    """(step, value) of every row that has a finite number under `key`."""
    return [(float(row["step"]), float(row[key])) for row in rows if "step" in row and _finite(row.get(key))]


def numeric_keys(rows: Iterable[Row]) -> list[str]:
    """Keys with at least one number, in the order in which they appear."""
    return list({key: None for row in rows for key, value in row.items() if isinstance(value, int | float) and not isinstance(value, bool)})


def trouble(run: Run) -> list[str]:
    """What the numbers themselves warn of: a loss that is no number, skipped steps, an evaluation loss that has risen again."""
    said = []
    odd = [
        row.get("step")
        for row in run.log
        if any(isinstance(row.get(k), float) and not math.isfinite(row[k]) for k in ("loss", "eval_loss"))
    ]
    if odd:
        said.append(f"The loss is not a finite number at step {odd[0]}" + (f" and at {len(odd) - 1} later ones." if odd[1:] else "."))
    skipped = [value for _, value in series(run.log, "optim_skipped_steps")]
    if skipped and skipped[-1] > 0:
        said.append(f"{skipped[-1]:.0f} steps were skipped because a gradient was not finite.")
    held_out = series(run.log, "eval_loss")
    if held_out:
        at, best = min(held_out, key=lambda point: point[1])
        if held_out[-1][1] > best * 1.01:
            said.append(
                f"The held-out loss was lowest at step {at:.0f} ({best:.4g}) and is {held_out[-1][1]:.4g} at the end: fewer steps, or "
                "early stopping, would have kept the better model."
            )
    return said


def read(folder: Path) -> Run:
    """A run from its folder: `report.json` where a report was written while it ran, and the newest `trainer_state.json`.

    Raises:
        CheckpointError: neither is there, or one cannot be read.
    """
    state = newest_state(folder)
    record = next((path for name in (RECORD, f"_{RECORD}") if (path := folder / name).is_file()), None)
    if state is None and record is None:
        raise CheckpointError(
            f"{folder}: neither {STATE} nor a checkpoint-N folder with one is there, nor {RECORD}. Name the output_dir of a run, or a "
            "checkpoint of it."
        )
    run = Run(name=folder.resolve().name)
    if record is not None:
        values = _json(record)
        if values.pop("format", None) != FORMAT:
            raise CheckpointError(f"{record}: not in format {FORMAT}, which this version reads. Delete it to make a report from {STATE}.")
        try:
            run = Run(**values)
        except TypeError as error:
            raise CheckpointError(f"{record} has other keys than expected ({error}). Delete it to make a report from {STATE}.") from error
    if state is not None:
        values = _json(state)
        run.log = values.get("log_history", [])
        run.max_steps = run.max_steps or int(values.get("max_steps", 0))
        if record is None:
            run.step = int(values.get("global_step", 0))
            run.ended = f"read from {state.relative_to(folder)}, at step {run.step} of {run.max_steps}"
            run.facts = {"run": _facts(values)}
    if not run.samples:
        run.samples = samples(folder)
    return run


def newest_state(folder: Path) -> Path | None:
    """The `trainer_state.json` of the folder itself, or of its checkpoint with the highest step."""
    if (folder / STATE).is_file():
        return folder / STATE
    steps = {
        int(found[1]): path
        for path in folder.glob(f"checkpoint-*/{STATE}")
        if (found := re.fullmatch(r"checkpoint-(\d+)", path.parent.name))
    }
    return steps[max(steps)] if steps else None


def samples(folder: Path) -> list[Row]:
    """Answers that a recipe left in `samples.jsonl`; lines that cannot be read are left out."""
    path = next((path for name in (SAMPLES, f"_{SAMPLES}") if (path := folder / name).is_file()), None)
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(
                {"label": f"at step {row.get('step', '?')}", "prompt": str(row.get("prompt", "")), "answer": str(row.get("answer", ""))}
            )
    return found


def _facts(state: Row) -> list[tuple[str, str]]:
    named = {
        "train_batch_size": "batch size",
        "num_train_epochs": "epochs asked for",
        "logging_steps": "steps between logs",
        "epoch": "epoch",
    }
    return [(label, f"{state[key]:g}") for key, label in named.items() if _finite(state.get(key))]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST


def _json(path: Path) -> Row:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return found
