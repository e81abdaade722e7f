"""How recipes end: a sentence for what a user can mend and for Ctrl-C, a traceback for everything else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import accelerate_loop
import full_sft
import pytest
import qlora_sft
import sft_entry
from recipe_launch import HANG, ROOT, environment, run_here
from transformers import Trainer, TrainerCallback

from flashoptim_hf.errors import CheckpointError, ConfigurationError
from flashoptim_hf.trainer import complete


def ended(main: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str | None = None) -> tuple[int, str]:
    """The exit status of a recipe with this `main`, and what it says last."""
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    with monkeypatch.context() as patch:
        if rank is not None:
            patch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as caught:
            sft_entry.run(main)
    return int(caught.value.code or 0), capsys.readouterr().err


def raises(error: BaseException) -> Any:
    """A `main` that ends so."""

    def main() -> None:
        raise error

    return main


def test_an_error_of_the_package_is_its_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ConfigurationError("x=1 is wrong; use 2.")
    assert ended(raises(wrong), monkeypatch, capsys) == (1, "\nerror: x=1 is wrong; use 2.\n")
    assert sys.last_value is wrong
    waited: list[float] = []
    monkeypatch.setattr(sft_entry.time, "sleep", waited.append)
    assert ended(raises(CheckpointError("damaged")), monkeypatch, capsys, rank="1") == (1, "\n[local rank 1] error: damaged\n")
    assert waited == []
    assert ended(raises(wrong), monkeypatch, capsys, rank="1") == (1, "\n[local rank 1] error: x=1 is wrong; use 2.\n")
    assert waited == [sft_entry.WAIT]
    assert ended(raises(KeyboardInterrupt()), monkeypatch, capsys, rank="1") == (130, "")


def test_a_bug_is_left_alone() -> None:
    for error in (ValueError("a bug"), SystemExit(143)):
        with pytest.raises(type(error)) as caught:
            sft_entry.run(raises(error))
        assert caught.value is error


def test_of_warnings_the_one_about_a_spelling_is_left_out(recwarn: pytest.WarningsRecorder) -> None:
    def main() -> None:
        for name in ("gradient_checkpointing", "is_gradient_checkpointing", "another_option"):
            warnings.warn(f"`{name}` is deprecated and will be removed in v6.", FutureWarning, stacklevel=1)

    sft_entry.run(main)
    assert [str(warning.message).split()[0] for warning in recwarn] == ["`another_option`"]


def test_ctrl_c_says_where_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        with sft_entry.stoppable(lambda: 7, tmp_path, "--resume true"):
            raise KeyboardInterrupt

    status, said = ended(main, monkeypatch, capsys)
    assert (status, said) == (
        130,
        f"\nstopped by Ctrl-C after step 7; {tmp_path} has no complete checkpoint yet: the same command begins anew\n",
    )
    for step in (2, 4, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step < 6:
            complete.seal(tmp_path / f"checkpoint-{step}", step)
    assert ended(main, monkeypatch, capsys)[1].endswith(
        f"the last complete checkpoint is {tmp_path / 'checkpoint-4'}: go on with the same command and --resume true\n"
    )
    assert ended(raises(KeyboardInterrupt()), monkeypatch, capsys) == (130, "\nstopped by Ctrl-C, outside of the training steps\n")


def test_a_mistake_in_a_process_of_its_own(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a"}\n{"text": "b"\n')
    loop = [sys.executable, str(ROOT / "recipes/accelerate_loop.py"), "--dataset", str(data), "--model_name_or_path", "./no/model"]
    done = subprocess.run(loop, env=environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=HANG)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: model_name_or_path='./no/model': no such folder")
    assert "Traceback" not in done.stdout + done.stderr


@pytest.fixture
def words(tmp_path: Path, tiny_model: Path) -> list[str]:
    """A short run's options."""
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{i}?", "completion": "Yes."}) for i in range(16)))
    return ["--model_name_or_path", str(tiny_model), "--dataset", str(data), "--output_dir", str(tmp_path / "run"), "--use_cpu", "true"]


QUIET = ["--eval_fraction", "0", "--sample_tokens", "0", "--first_look", "0", "--max_length", "64", "--per_device_train_batch_size", "1"]


class Interrupt(TrainerCallback):
    """Ctrl-C in step 3."""

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("recipe", [qlora_sft, full_sft])
def test_a_run_that_is_interrupted_goes_on(
    recipe: Any, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*words, *QUIET, "--max_steps", "4", "--save_steps", "1", "--gradient_checkpointing", "true"]
    begin = Trainer.train

    def interrupted(trainer: Any, *args: Any, **options: Any) -> Any:
        trainer.add_callback(Interrupt())
        return begin(trainer, *args, **options)

    monkeypatch.setattr(Trainer, "train", interrupted)
    status, said = ended(lambda: run_here(recipe, monkeypatch, given), monkeypatch, capsys)
    checkpoint = tmp_path / "run/checkpoint-2"
    assert status == 130
    assert said.splitlines()[-1] == (
        f"stopped by Ctrl-C after step 2; the last complete checkpoint is {checkpoint}: go on with the same command and "
        "--resume_from_checkpoint true"
    )
    monkeypatch.setattr(Trainer, "train", begin)
    run_here(recipe, monkeypatch, [*given, "--resume_from_checkpoint", "true"])
    assert f"resuming from {checkpoint} (step 2)" in capsys.readouterr().out
    run_here(recipe, monkeypatch, [*given, "--output_dir", str(tmp_path / "other"), "--resume_from_checkpoint", "auto", "--max_steps", "1"])
    assert "resuming from nothing" in capsys.readouterr().out


def test_the_plain_loop_says_it_too(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*words, "--max_steps", "3", "--save_steps", "1", "--max_length", "64"]
    save = accelerate_loop.save

    def interrupted(accelerator: Any, folder: Path, step: int) -> None:
        save(accelerator, folder, step)
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(accelerate_loop, "save", interrupted)
    status, said = ended(lambda: run_here(accelerate_loop, monkeypatch, given), monkeypatch, capsys)
    assert status == 130
    assert "stopped by Ctrl-C after step 2; the last complete checkpoint is" in said
    monkeypatch.setattr(accelerate_loop, "save", save)
    run_here(accelerate_loop, monkeypatch, [*given, "--resume", "true"])
    assert f"resuming from {tmp_path / 'run/checkpoint-2'} (step 2)" in capsys.readouterr().out
