"""What a run left in its folder, read back; and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashoptim_hf.cli import app
from flashoptim_hf.errors import CheckpointError
from flashoptim_hf.report import history

LOG = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25, "optim_state_bytes": 64}]


def state(folder: Path, step: int, log: list[dict[str, Any]] = LOG) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / history.STATE).write_text(json.dumps({"global_step": step, "max_steps": 4, "log_history": log, "train_batch_size": 2}))


def test_the_command_takes_the_newest_checkpoint_of_any_run(tmp_path: Path, read: Any, agrees: Any) -> None:
    for step in (2, 10, 9):  # 10 is the newest, though not the last by name
        state(tmp_path / f"checkpoint-{step}", step, LOG if step == 10 else LOG[:1])
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "samples.jsonl").write_text('{"step": 2, "prompt": "p?", "answer": "a <b>"}\nnot json\n[1]\n')
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = read(tmp_path / "report.html")
    assert agrees(found.log(), LOG)
    assert [found.text(node) for node in found.all("pre")] == ["p?", "a <b>"]
    assert "read from checkpoint-10/trainer_state.json, at step 10 of 4" in found.text()
    done = CliRunner().invoke(app, ["report", str(tmp_path / "checkpoint-9"), "--out", str(tmp_path / "new" / "nine.html")])
    assert done.exit_code == 0, done.output
    assert agrees(read(tmp_path / "new" / "nine.html").log(), LOG[:1])


def test_a_record_brings_what_the_state_does_not_have(tmp_path: Path, read: Any) -> None:
    state(tmp_path / "checkpoint-2", 2)
    run = history.Run("mine", "finished", 2, 4, [], [{"step": 1, "step_seconds": 2.0}], {"run": [("seed", "7")]}, warnings=["careful"])
    run.save(tmp_path / "_report.json")
    found = history.read(tmp_path)
    assert (found.name, found.ended, found.log) == ("mine", "finished", LOG)
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 0
    page = read(tmp_path / "report.html")
    assert "Time of a step" in page.titles()
    assert "careful" in page.text()
    assert "log" not in json.loads((tmp_path / "_report.json").read_text())  # it is in trainer_state.json


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither trainer_state.json nor a checkpoint-N folder"),
        ({"trainer_state.json": "{"}, "trainer_state.json cannot be read"),
        ({"trainer_state.json": "[]"}, "holds no JSON object"),
        ({"report.json": '{"format": 99}'}, "not in format 1"),
        ({"report.json": '{"format": 1, "surprise": 2}'}, "has other keys than expected"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        history.read(tmp_path)
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path / "nowhere")])
    assert done.exit_code == 2
    assert "nowhere: no such folder" in done.output.replace("\n", "")
