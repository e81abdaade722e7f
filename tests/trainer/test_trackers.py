"""What reaches the trackers: each training's events, read back from where a tracker has written them, hold the optimizer's numbers."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

MakeTrainer = Callable[..., Trainer]
Read = dict[str, dict[int, float]]  # key -> step -> value

KEYS = (
    "state_bytes",
    "host_bytes",
    "device_bytes",
    "staging_bytes",
    "resident_bytes",
    "page_in_bytes",
    "page_out_bytes",
    "skipped_steps",
)


def tensorboard(folder: Path, _monkeypatch: pytest.MonkeyPatch) -> Callable[[], Read]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read() -> Read:
        found: Read = {}
        for file in folder.rglob("events.out.tfevents.*"):
            events = EventAccumulator(str(file))
            events.Reload()
            for tag in events.Tags()["scalars"]:
                found.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
        return found

    return read


def records(data: bytes) -> Iterator[bytes]:
    """Records in LevelDB's log format: blocks of 32 KiB; parts with a checksum, a length and a kind (1 whole, 2 first, 4 last)."""
    place, parts = 7, b""  # after the file's own header
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def wandb(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Read]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(folder))
    monkeypatch.setenv("WANDB_SILENT", "true")

    def read() -> Read:
        import wandb as package
        from wandb.proto import wandb_internal_pb2

        package.finish()
        (file,) = folder.rglob("run-*.wandb")
        found: Read = {}
        for raw in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(raw)
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for key, value in row.items():
                if isinstance(value, int | float) and "train/global_step" in row:
                    found.setdefault(key, {})[row["train/global_step"]] = value
        return found

    return read


def trackio(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Read]:
    monkeypatch.setenv("TRACKIO_DIR", str(folder))

    def read() -> Read:  # transformers has finished the run already
        found: Read = {}
        for file in folder.rglob("*.db"):
            with sqlite3.connect(file) as database:
                for (line,) in database.execute("select metrics from metrics"):
                    row = json.loads(line)
                    for key, value in row.items():
                        if isinstance(value, int | float) and "train/global_step" in row:
                            found.setdefault(key, {})[row["train/global_step"]] = value
        return found

    return read


@pytest.mark.parametrize("tracker", [tensorboard, wandb, trackio])
def test_events_hold_the_optimizers_numbers(
    tracker: Callable[..., Any], make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = tracker.__name__
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(folder))
    read = tracker(folder, monkeypatch)
    made = make_trainer(report_to=name, eval_strategy="steps", eval_steps=1, optim_args="simulate=1,page_bytes=16KiB")
    made.train()
    found = read()
    logged = {row["step"]: row for row in made.state.log_history if "loss" in row}
    assert sorted(logged) == [1, 2, 3]
    for key in ("loss", *(f"optim_{key}" for key in KEYS)):
        seen = {step: value for step, value in found[f"train/{key}"].items() if step in logged}
        assert seen == {step: pytest.approx(row[key], rel=1e-6) for step, row in logged.items()}, key
    assert found["train/optim_page_in_bytes"][2] > 0
    assert sorted(found["eval/loss"]) == [1, 2, 3]
    assert not any(key.startswith("eval/optim") for key in found)
