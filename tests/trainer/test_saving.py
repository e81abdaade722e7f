"""Saving and resuming through real Trainers: kills, full disks, rotation, damage; other optimizers go the Trainer's own way."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, trainer

import flashoptim_hf
from flashoptim_hf.errors import CheckpointError, CheckpointWriteError
from flashoptim_hf.trainer import complete, saving

HANG = 300
SAVES = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


class Begin(TrainerCallback):
    """The step at which training begins, which shows what it was resumed from; it then goes no further if told so."""

    def __init__(self, stop: bool = True) -> None:
        self.step: int | None = None
        self.stop = stop

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.step = state.global_step

    def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or self.stop


def state_of(flash: Trainer) -> dict[str, Any]:
    """Weights and optimizer state as nested lists, to be compared."""
    state = flash.optimizer.state_dict()["state"]
    return {
        "weights": {name: weight.tolist() for name, weight in flash.model.named_parameters()},
        "state": {key: {name: value.tolist() for name, value in values.items()} for key, values in state.items()},
    }


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---------------------------------------------------------------------- what a save leaves


def test_a_checkpoint_is_sealed_before_older_ones_are_deleted(make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(output_dir: str, **kwargs: Any) -> None:
        seen.append((flashoptim_hf.last_complete_checkpoint(output_dir), len(complete.checkpoints(output_dir))))
        rotate(output_dir=output_dir, **kwargs)

    rotate = trainer.rotate_checkpoints
    monkeypatch.setattr(trainer, "rotate_checkpoints", spy)
    make_trainer(**{**SAVES, "max_steps": 8}, save_total_limit=1).train()
    assert [Path(str(found)).name for found, _ in seen] == [f"checkpoint-{step}" for step in (2, 4, 6, 8)]
    assert [count for _, count in seen] == [1, 2, 2, 2]
    assert names(tmp_path) == {"checkpoint-8"}
    assert complete.STAGE not in names(tmp_path / "checkpoint-8")


def test_a_checkpoint_that_cannot_be_sealed_deletes_none(make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, step: int, *args: Any) -> None:
        if step > 4:
            raise OSError(28, "No space left on device")
        seal(folder, step, *args)

    seal = complete.seal
    monkeypatch.setattr(complete, "seal", fail)
    flash = make_trainer(**{**SAVES, "max_steps": 6}, save_total_limit=1)
    with pytest.raises(CheckpointWriteError):
        flash.train()
    assert names(tmp_path) == {"checkpoint-4"}
    assert complete.defect(tmp_path / "checkpoint-4") is None


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_other_optimizers_save_and_resume_as_before(make_trainer: Any, tmp_path: Path, optim: str) -> None:
    make_trainer(**SAVES, optim=optim).train()
    assert complete.MARK not in names(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / "scheduler.pt").unlink()
    begin = Begin()
    make_trainer(**{**SAVES, "max_steps": 6}, optim=optim, callbacks=[begin]).train(resume_from_checkpoint=True)
    assert begin.step == 4  # in silence, which is the Trainer's own way


def test_an_optimizer_that_was_handed_over_is_served_too(make_trainer: Any, tmp_path: Path) -> None:
    given = (flashoptim_hf.FlashAdamW, {"lr": 1e-3})
    make_trainer(**SAVES, optim="adamw_torch", optimizer_cls_and_kwargs=given).train()
    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()
    begin = Begin()
    flash = make_trainer(**SAVES, optim="adamw_torch", optimizer_cls_and_kwargs=given, callbacks=[begin])
    flash.train(resume_from_checkpoint=True)
    assert begin.step == 2


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "paged_adamw_8bit"])
def test_another_optimizer_does_not_take_codes_for_floats(make_trainer: Any, tmp_path: Path, optim: str) -> None:
    """torch's would load int8 codes as fp32 moments without a word."""
    make_trainer(**SAVES).train()
    begin = Begin()
    other = make_trainer(**{**SAVES, "max_steps": 6}, optim=optim, callbacks=[begin])
    with pytest.raises(CheckpointError, match=r"state of flashoptim_hf FlashAdamW, and \w+ of \w+ cannot read it.*flashoptim-hf convert"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert begin.step is None


def test_a_save_that_fails_in_a_linked_folder(make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "checkpoint-4").symlink_to(elsewhere)
    flash = make_trainer(**SAVES)

    def full(*_: Any) -> None:
        if flash.state.global_step == 4:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(flash, "_save_scaler", full)
    with pytest.raises(CheckpointWriteError, match="No space left"):
        flash.train()
    assert not names(elsewhere)
    assert flashoptim_hf.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")


def test_a_save_into_an_old_folder_takes_the_mark_away_first(make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_trainer(**SAVES).train()
    (tmp_path / "checkpoint-2" / "notes.txt").write_text("mine")
    flash = make_trainer(**SAVES)

    def interrupted(*_: Any) -> None:
        assert complete.MARK not in names(tmp_path / "checkpoint-2")
        raise KeyboardInterrupt

    monkeypatch.setattr(flash, "_save_scaler", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flash.train()
    left = names(tmp_path / "checkpoint-2")
    assert "notes.txt" in left
    assert "optimizer.pt" not in left
    assert Path(str(flashoptim_hf.last_complete_checkpoint(tmp_path))).name == "checkpoint-4"


# ---------------------------------------------------------------------- the disk is full


def check_full(flash: Trainer, output: Path, path: str) -> None:
    """Train until the disk is full, with one complete checkpoint before."""
    with pytest.raises(CheckpointWriteError) as caught:
        flash.train()
    message = str(caught.value)
    assert path in message
    assert "bytes, and" in message
    assert " are free there" in message
    assert names(output) == {"checkpoint-2"}
    assert complete.last_complete_checkpoint(output) == str(output / "checkpoint-2")


def test_a_device_that_is_full(make_trainer: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "optimizer.pt").symlink_to("/dev/full")
    flash = make_trainer(**{**SAVES, "max_steps": 6})
    with pytest.raises(CheckpointWriteError, match="No space left") as caught:
        flash.train()
    assert caught.value.errno == 28
    assert "checkpoint-4" in str(caught.value)
    assert complete.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert names(tmp_path / "checkpoint-4") <= {"optimizer.pt"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of the tiny model and a part of the next."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)  # lazily: a failed test may still hold files open


def test_a_small_disk_that_fills_up(make_trainer: Any, small_disk: Path, tmp_path: Path) -> None:
    output = small_disk / "out"
    flash = make_trainer(**{**SAVES, "max_steps": 6}, output_dir=str(output))
    sizes: list[int] = []
    # fill the disk so that the second checkpoint breaks off in its model, its optimizer or a small file, whichever comes next
    make_trainer(**{**SAVES, "max_steps": 2}, output_dir=str(tmp_path / "elsewhere")).train()
    sizes = [path.stat().st_size for path in (tmp_path / "elsewhere" / "checkpoint-2").iterdir()]
    room = shutil.disk_usage(small_disk).free
    (small_disk / "filler").write_bytes(bytes(room - int(1.6 * sum(sizes)) - 40960))
    check_full(flash, output, "checkpoint-4")
    # what is in memory is as it was: it can be saved where there is room, and trains on
    steps = set(saving.steps_of(flash.optimizer))
    assert steps == {4}
    flash.args.output_dir = str(tmp_path / "roomy")
    flash._save_checkpoint(flash.model, None)
    assert complete.defect(tmp_path / "roomy" / "checkpoint-4") is None
    begin = Begin(stop=False)
    again = make_trainer(**{**SAVES, "max_steps": 6}, output_dir=str(tmp_path / "roomy"), callbacks=[begin])
    again.train(resume_from_checkpoint=True)
    whole = make_trainer(**{**SAVES, "max_steps": 6}, output_dir=str(tmp_path / "whole"))
    whole.train()
    assert begin.step == 4
    assert state_of(again) == state_of(whole)


def test_any_file_that_breaks_off(make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.save` writes a part of a file and fails as it does on a full disk."""

    def write_part(value: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        save(value, path, *args, **kwargs)
        if Path(path).name == failing and any(part == "checkpoint-4" for part in Path(path).parts):
            os.truncate(path, os.path.getsize(path) * 2 // 3)
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")

    save = torch.save
    for failing in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        output = tmp_path / failing
        monkeypatch.setattr(torch, "save", write_part)
        check_full(make_trainer(**{**SAVES, "max_steps": 6}, output_dir=str(output)), output, failing)


# ---------------------------------------------------------------------- killed while saving

KILLED = """
import os, pathlib, sys, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
import flashoptim_hf

save = torch.save

def slow(value, path, *args, **kwargs):
    save(value, path, *args, **kwargs)
    if pathlib.Path(path).name == "optimizer.pt" and "checkpoint-4" in str(path):
        os.truncate(path, os.path.getsize(path) // 2)
        print("half", flush=True)
        time.sleep(600)

torch.save = slow
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))
rows = [{"input_ids": torch.arange(16) + i, "labels": torch.arange(16) + i} for i in range(8)]
args = TrainingArguments(
    sys.argv[1], optim="flashoptim_paged_adamw", use_cpu=True, report_to="none", max_steps=6, save_steps=2, save_total_limit=1
)
Trainer(model, args, train_dataset=rows).train()
"""


def test_killed_while_saving(make_trainer: Any, tmp_path: Path, said: list[str]) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert names(tmp_path) == {"checkpoint-2", "checkpoint-4"}
    assert not {"optimizer.pt", complete.MARK} & names(tmp_path / "checkpoint-4")
    begin = Begin(stop=False)
    flash = make_trainer(**SAVES, save_total_limit=1, callbacks=[begin])
    flash.train(resume_from_checkpoint=True)
    assert begin.step == 2
    assert any("checkpoint-4 is passed over" in line for line in said)
    assert complete.last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")  # written anew, over what was left
    assert complete.STAGE not in names(tmp_path / "checkpoint-4")


# ---------------------------------------------------------------------- resuming


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "model.safetensors", "trainer_state.json"])
@pytest.mark.parametrize("removed", [True, False])
def test_no_run_goes_on_with_lost_state(make_trainer: Any, tmp_path: Path, name: str, removed: bool, marked: bool, said: list[str]) -> None:
    make_trainer(**SAVES).train()
    newest = tmp_path / "checkpoint-4"
    for folder in complete.checkpoints(tmp_path):
        if not marked:
            complete.unseal(folder)
    if removed:
        (newest / name).unlink()
    else:
        (newest / name).write_bytes((newest / name).read_bytes()[:-30])
    begin = Begin()
    flash = make_trainer(**{**SAVES, "max_steps": 8}, callbacks=[begin])
    with pytest.raises((CheckpointError, ValueError), match=rf"{name}|valid checkpoint"):
        flash.train(resume_from_checkpoint=str(newest))
    assert begin.step is None
    assert flash.optimizer is None
    if marked:
        flash.train(resume_from_checkpoint=True)
        assert begin.step == 2
        assert any(str(newest / name) in line for line in said)


def test_weights_alone_are_no_checkpoint_to_resume_from(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer(**SAVES, save_only_model=True).train()
    assert complete.MARK in names(tmp_path / "checkpoint-4")
    for option in (True, str(tmp_path / "checkpoint-4")):
        flash = make_trainer(**SAVES)
        with pytest.raises(CheckpointError, match=r"optimizer\.pt is missing.*save_only_model"):
            flash.train(resume_from_checkpoint=option)


def test_an_empty_folder_is_passed_over(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer(**SAVES).train()
    (tmp_path / "checkpoint-9999").mkdir()
    begin = Begin()
    make_trainer(**{**SAVES, "max_steps": 6}, callbacks=[begin]).train(resume_from_checkpoint=True)
    assert begin.step == 4


def test_without_any_checkpoint_the_error_is_the_trainers(make_trainer: Any) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint"):
        make_trainer().train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="is not there"):
        make_trainer().train(resume_from_checkpoint="nowhere")


def test_an_optimizer_of_another_step_is_an_error(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer(**SAVES).train()
    newest = tmp_path / "checkpoint-4"
    shutil.copy(tmp_path / "checkpoint-2" / "optimizer.pt", newest)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is corrupt"):
        make_trainer(**SAVES).train(resume_from_checkpoint=str(newest))
    complete.unseal(newest)
    begin = Begin()
    with pytest.raises(CheckpointError, match="optimizer is at step 2, the weights and the Trainer are at step 4"):
        make_trainer(**SAVES, callbacks=[begin]).train(resume_from_checkpoint=str(newest))
    assert begin.step is None


def test_skipped_steps_are_no_other_step(make_trainer: Any, tmp_path: Path) -> None:
    """A step left out for its gradients makes the optimizer's count smaller than the Trainer's, and the mark knows it."""

    class Spoil(TrainerCallback):
        def on_pre_optimizer_step(self, _args: Any, state: Any, _control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 1:
                next(model.parameters()).grad.fill_(float("nan"))

    make_trainer(**SAVES, max_grad_norm=0, callbacks=[Spoil()]).train()
    assert json.loads((tmp_path / "checkpoint-4" / complete.MARK).read_text())["optimizer_step"] == 3
    begin = Begin()
    make_trainer(**{**SAVES, "max_steps": 6}, callbacks=[begin]).train(resume_from_checkpoint=True)
    assert begin.step == 4


def test_resuming_on_several_devices_takes_no_device_memory(make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several processes the Trainer loads the file onto its device; there is none here, so that would be an error."""
    make_trainer(**SAVES).train()
    flash = make_trainer(**SAVES)
    flash.create_optimizer_and_scheduler(4)
    flash.state.global_step = 4
    monkeypatch.setattr(type(flash.args), "device", torch.device("cuda"))
    monkeypatch.setattr(type(flash.args), "world_size", 2)
    flash._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-4"))
    assert saving.steps_of(flash.optimizer) == [4] * len(list(flash.model.parameters()))
    assert flash.lr_scheduler.last_epoch == 4


def test_a_file_that_breaks_between_check_and_load_is_named(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer(**SAVES).train()
    for data in (b"", b"PK", (tmp_path / "checkpoint-4" / "optimizer.pt").read_bytes()[:5000]):
        (tmp_path / "checkpoint-2" / "optimizer.pt").write_bytes(data)
        flash = make_trainer(**SAVES)
        flash.create_optimizer_and_scheduler(4)
        with pytest.raises(CheckpointError, match=r"optimizer\.pt.*is corrupt"):
            flash._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-2"))


def test_another_set_of_trained_parameters_is_an_error_before_anything_is_loaded(make_trainer: Any) -> None:
    make_trainer(**SAVES).train()
    flash = make_trainer(**SAVES)
    flash.model.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)
    with pytest.raises(CheckpointError, match="other frozen layers") as caught:
        flash.train(resume_from_checkpoint=True)
    assert "parameters" in str(caught.value)
    assert not flash.optimizer.state


# ---------------------------------------------------------------------- several processes

RANKS = """
import os, pathlib, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
import flashoptim_hf

def train(out, steps, resume):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    rows = [{"input_ids": torch.arange(16) + i, "labels": torch.arange(16) + i} for i in range(16)]
    args = TrainingArguments(out, optim="flashoptim_adamw", use_cpu=True, report_to="none", max_steps=steps, save_steps=2)
    trainer = Trainer(model, args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.global_step

out = pathlib.Path(sys.argv[1])
train(str(out), 4, None)
torch.distributed.barrier()
if os.environ["RANK"] == "0":
    mark = flashoptim_hf.trainer.complete.read_mark(out / "checkpoint-4")
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= mark["files"].keys(), mark
    (out / "checkpoint-4" / "rng_state_1.pth").write_bytes(b"PK")
torch.distributed.barrier()
assert train(str(out), 3, True) == 3  # 4 if it had gone on from the newest
torch.distributed.barrier()
try:
    train(str(out), 3, str(out / "checkpoint-4"))
except flashoptim_hf.errors.CheckpointError as error:
    assert "rng_state_1.pth is corrupt" in str(error), error
    print("refused", flush=True)
torch.distributed.barrier()
os._exit(0)
"""


def test_two_processes_seal_once_and_agree_on_what_to_resume(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(tmp_path)],
            env={**common, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]
    said = [run.communicate(timeout=HANG)[0] for run in runs]
    for output in said:
        assert output.count("refused") == 1, said
    assert ["is passed over" in output for output in said] == [True, False]  # one decides


# ---------------------------------------------------------------------- the seams


def test_seams_come_and_go() -> None:
    ours = {name: inspect.getattr_static(Trainer, name) for name in saving.SEAMS}
    saving.install(Trainer)
    assert {name: inspect.getattr_static(Trainer, name) for name in saving.SEAMS} == ours  # not wrapped twice
    flashoptim_hf.unregister()
    try:
        for name, method in ours.items():
            assert inspect.getattr_static(Trainer, name) is method.__wrapped__
            assert not hasattr(inspect.getattr_static(Trainer, name), saving._OURS)
    finally:
        flashoptim_hf.register()
    assert inspect.signature(Trainer.train) == inspect.signature(ours["train"].__wrapped__)


def test_a_trainer_without_the_methods_is_left_alone(said: list[str]) -> None:
    class Other:
        def train(self) -> None: ...

    method = Other.train
    saving.install(Other)
    assert Other.train is method
    assert any("_save_checkpoint" in line for line in said)
    saving.remove(Other)
