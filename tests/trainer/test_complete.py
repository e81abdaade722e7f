"""Each file of a checkpoint, damaged in each way: a clear error that names it, or the checkpoint before it. Without training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import flashoptim_hf
from flashoptim_hf.errors import CheckpointError
from flashoptim_hf.trainer import complete
from flashoptim_hf.trainer.saving import resume_folder

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
    complete.MARK,
)


def flip(path: Path, place: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 0x10
    path.write_bytes(data)


def cut(size: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(path.read_bytes()[: size(path.stat().st_size)])


DAMAGES = {
    "empty": cut(lambda _: 0),
    "100 bytes": cut(lambda _: 100),
    "half": cut(lambda size: size // 2),
    "one byte short": cut(lambda size: size - 1),
    "one byte flipped": flip,
    "removed": Path.unlink,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run with checkpoints at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    args = TrainingArguments(
        output_dir=str(folder), optim="flashoptim_adamw", use_cpu=True, report_to="none", max_steps=4, save_steps=2, disable_tqdm=True
    )
    rows = [{"input_ids": torch.arange(16) + i, "labels": torch.arange(16) + i} for i in range(8)]
    Trainer(model, args, train_dataset=rows).train()
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "out"))


def test_a_mark_names_every_file_and_reads_anywhere(saved: Path) -> None:
    newest = saved / "checkpoint-4"
    assert sorted(path.name for path in newest.iterdir()) == sorted(FILES)
    mark = json.loads((newest / complete.MARK).read_text())
    assert mark["step"] == mark["optimizer_step"] == 4
    assert set(mark["files"]) == set(FILES) - {complete.MARK}
    assert mark["files"]["optimizer.pt"]["bytes"] == (newest / "optimizer.pt").stat().st_size
    assert flashoptim_hf.last_complete_checkpoint(saved) == str(newest)
    assert resume_folder(True, str(saved)) == resume_folder(str(newest), "unused") == str(newest)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named_or_the_checkpoint_before_is_taken(copy: Path, name: str, damage: Callable[[Path], None], said: list[str]) -> None:
    newest = copy / "checkpoint-4"
    damage(newest / name)
    assert resume_folder(True, str(copy)) == flashoptim_hf.last_complete_checkpoint(str(copy)) == str(copy / "checkpoint-2")
    assert any(str(newest / name) in line for line in said)
    said.clear()
    if name == complete.MARK and damage is Path.unlink:
        # nothing is lost: every file is there, and whole as far as can be known
        assert resume_folder(str(newest), "unused") == str(newest)
        assert any(complete.MARK in line for line in said)
    else:
        with pytest.raises(CheckpointError, match=f"{name.replace('.', '[.]')} is (corrupt|missing)"):
            resume_folder(str(newest), "unused")


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "model.safetensors"])
def test_without_a_mark_damage_shows_by_the_files_formats(copy: Path, name: str, damage: Callable[[Path], None]) -> None:
    if name.endswith(("json", "safetensors")) and damage in (flip, DAMAGES["one byte short"] if name.endswith("json") else None):
        pytest.skip("JSON and safetensors hold no checksum, and JSON may end in a line break")
    if name == "model.safetensors" and damage is Path.unlink:
        pytest.skip("the Trainer itself refuses a folder without weights")
    for folder in complete.checkpoints(copy):
        complete.unseal(folder)
        damage(folder / name) if damage is not flip else flip(folder / name, (folder / name).read_bytes().index(b"\x80\x02") + 9)
    assert complete.last_complete_checkpoint(copy) is None
    for option in (True, str(copy / "checkpoint-4")):
        with pytest.raises(CheckpointError, match=f"checkpoint-4/{name.replace('.', '[.]')} is (corrupt|missing)"):
            resume_folder(option, str(copy))


def test_the_newest_is_the_highest_step_and_other_folders_do_not_count(copy: Path, said: list[str]) -> None:
    (copy / "checkpoint-10").mkdir()
    (copy / "checkpoint-9999").mkdir()
    (copy / "checkpoint-best").mkdir()
    (copy / "runs").mkdir()
    assert [path.name for path in complete.checkpoints(copy)] == [f"checkpoint-{step}" for step in (9999, 10, 4, 2)]
    assert complete.last_complete_checkpoint(copy) == str(copy / "checkpoint-4")
    assert [line.split(" is passed over")[0] for line in said] == [str(copy / f"checkpoint-{step}") for step in (9999, 10)]
    assert complete.last_complete_checkpoint(copy / "nowhere") is None
    with pytest.raises(CheckpointError, match=r"trainer_state.*checkpoint-4 has a mark"):
        resume_folder(str(copy / "checkpoint-9999"), "unused")


def test_files_of_another_step_are_an_error(copy: Path) -> None:
    for name in ("model.safetensors", "optimizer.pt", "trainer_state.json"):
        mixed = copy / f"mixed-{name}"
        shutil.copytree(copy / "checkpoint-2", mixed)
        shutil.copy(copy / "checkpoint-4" / name, mixed / name)
        with pytest.raises(CheckpointError, match=f"{name} is corrupt"):
            complete.require(mixed)


def test_files_that_came_later_are_no_matter(copy: Path) -> None:
    (copy / "checkpoint-4" / "notes.txt").write_text("x")
    assert complete.defect(copy / "checkpoint-4") is None


def test_a_mark_of_a_newer_version_is_an_error(copy: Path) -> None:
    path = copy / "checkpoint-4" / complete.MARK
    body = {**complete.read_mark(path.parent), "format": complete.FORMAT + 1}  # type: ignore[dict-item]
    path.write_text(json.dumps({**body, "crc32": complete._body_crc32(body)}))
    with pytest.raises(CheckpointError, match="newer flashoptim-hf"):
        complete.read_mark(path.parent)


@pytest.mark.parametrize(
    ("steps", "step", "marked", "skips", "fits"),
    [
        ([4, 4], 4, True, False, True),
        ([3, 4], 4, False, False, True),
        ([2], 4, True, True, False),  # the mark knows that none was skipped
        ([], 4, True, False, False),
        ([4], 2, True, False, False),
        ([3], 4, False, False, False),
        ([3], 4, False, True, True),
        ([5], 4, False, True, False),
        ([], 4, False, False, True),  # an optimizer without step counts
    ],
)
def test_steps(copy: Path, steps: list[int], step: int, marked: bool, skips: bool, fits: bool) -> None:
    folder = copy / "checkpoint-4"
    if not marked:
        complete.unseal(folder)
    if fits:
        complete.check_steps(folder, steps, step, skips)
    else:
        with pytest.raises(CheckpointError, match="not saved together"):
            complete.check_steps(folder, steps, step, skips)


def test_seal_of_a_folder_that_cannot_be_read_leaves_no_mark(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(complete.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        complete.seal(copy / "checkpoint-4", 4)
    assert not (copy / "checkpoint-4" / complete.MARK).exists()


def test_what_is_new_or_changed_is_discarded_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    assert complete.snapshot(folder) == {}
    (folder / "sub").mkdir(parents=True)
    for name in ("kept", "changed", "sub/new"):
        (folder / name).write_text(name)
        if name == "changed":
            before = complete.snapshot(folder)
    (folder / "changed").write_text("otherwise")
    (folder / complete.STAGE).mkdir()
    complete.discard_since(folder, before)
    assert [path.name for path in folder.rglob("*")] == ["kept"]
    complete.discard_since(folder, {})
    assert not folder.exists()


@pytest.mark.parametrize("marked", [True, False])
def test_a_checkpoint_of_a_loop_with_accelerate(tmp_path: Path, marked: bool) -> None:
    """It has no trainer_state.json and perhaps no scheduler."""
    from accelerate import Accelerator

    net = torch.nn.Linear(3, 2)
    accelerator = Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(net, flashoptim_hf.FlashAdamW(net.parameters()))
    for step in (1, 2):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        accelerator.save_state(str(tmp_path / f"checkpoint-{step}"))
        if marked:
            complete.seal(tmp_path / f"checkpoint-{step}", step)
    newest = tmp_path / "checkpoint-2"
    assert complete.defect(newest) is None
    names = sorted(path.name for path in newest.iterdir())
    assert {"optimizer.bin", "model.safetensors", "random_states_0.pkl"} <= set(names)
    assert complete.last_complete_checkpoint(tmp_path) == (str(newest) if marked else None)
    cut(lambda size: size - 1)(newest / "optimizer.bin")
    assert "optimizer.bin is corrupt" in str(complete.defect(newest))
    (newest / "optimizer.bin").unlink()
    assert "optimizer.bin is missing" in str(complete.defect(newest))
    assert complete.last_complete_checkpoint(tmp_path) == (str(tmp_path / "checkpoint-1") if marked else None)
