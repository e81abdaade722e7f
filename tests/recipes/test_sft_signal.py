"""SIGTERM in the middle of a run, and the same command once more: the run that was stopped is the run that was not, bit for bit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import qlora_sft
import sft_callbacks
import sft_run
import torch
from recipe_launch import run_here, state
from safetensors.torch import load_file
from transformers import TrainerCallback

STEPS, AT = 5, 3


class Kill(TrainerCallback):
    """Sends this process a SIGTERM in the middle of a step."""

    def on_pre_optimizer_step(self, args: Any, trainer_state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if trainer_state.global_step == AT - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def run(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], kill: bool = False) -> None:
    attach = sft_callbacks.attach

    def with_kill(trainer: Any, *rest: Any) -> Any:
        if kill:
            trainer.add_callback(Kill())
        return attach(trainer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(sft_callbacks, "attach", with_kill)
        run_here(qlora_sft, patch, [word for key, value in settings.items() for word in (f"--{key}", str(value))])


def test_stopped_by_a_signal_and_resumed_by_the_same_command(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{i}? ", "completion": "Yes, " * (i % 3 + 1)}) for i in range(16)))
    settings = {
        "model_name_or_path": tiny_model,
        "dataset": data,
        "eval_fraction": 0,
        "max_steps": STEPS,
        "save_steps": 100,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "lora_dropout": 0.1,  # so that the state of the random numbers matters
        "max_length": 64,
        "sample_tokens": 0,
        "first_look": 0,
        "disable_tqdm": True,
        "enable_jit_checkpoint": True,
        "auto_resume": True,
    }
    before = signal.getsignal(signal.SIGTERM)
    run(monkeypatch, {**settings, "output_dir": tmp_path / "whole"})
    stopped = {**settings, "output_dir": tmp_path / "stopped"}
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, stopped, kill=True)
    assert caught.value.code == 143
    assert f"stopped by SIGTERM after step {AT} of {STEPS}; checkpoint-{AT}" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "stopped").glob("checkpoint-*")] == [f"checkpoint-{AT}"]
    assert not (tmp_path / "stopped" / "adapter_model.safetensors").exists()  # the run is not over
    assert signal.getsignal(signal.SIGTERM) is before
    assert f"stopped early, after step {AT} of {STEPS}" in (tmp_path / "stopped" / "report.html").read_text()
    run(monkeypatch, stopped)

    folders = [tmp_path / name / f"checkpoint-{STEPS}" for name in ("whole", "stopped")]
    losses = [[row["loss"] for row in state(folder)["log_history"] if "loss" in row] for folder in folders]
    assert len(losses[0]) == STEPS
    assert losses[0] == losses[1]
    adapter, again = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert all(torch.equal(adapter[key], again[key]) for key in adapter)


def test_auto_means_the_last_complete_checkpoint_or_a_start(tmp_path: Path) -> None:
    assert sft_run.resume_folder("auto", str(tmp_path / "none")) is None
    assert sft_run.resume_folder(None, str(tmp_path), auto=True) is None
    (tmp_path / "checkpoint-2").mkdir()  # cut off while it was saved
    assert sft_run.resume_folder("auto", str(tmp_path)) is None
    assert sft_run.resume_folder("false", str(tmp_path), auto=True) is None
