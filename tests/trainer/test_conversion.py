"""From transformers' own optimizers to ours in the middle of a run, and back through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flashoptim_hf import cli
from flashoptim_hf.errors import CheckpointError
from flashoptim_hf.trainer import complete

RUN = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant", "learning_rate": 1e-3}


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def steps(trainer) -> set[int]:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return {int(values["step"]) for values in optimizer.state.values() if "step" in values}


def convert(*arguments) -> str:
    result = CliRunner().invoke(cli.app, ["convert", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(("optim_args", "off"), [("codec=none", 1e-5), ("codec=log", 1e-3)])
def test_a_run_of_adamw_torch_goes_on_as_paged_adamw(make_trainer, tmp_path, optim_args, off):
    whole = make_trainer(optim="adamw_torch", max_steps=6, output_dir=str(tmp_path / "whole"), **RUN)
    whole.train()
    run = make_trainer(optim="flashoptim_paged_adamw", optim_args=optim_args, max_steps=6, output_dir=str(tmp_path / "ours"), **RUN)
    with pytest.warns(UserWarning, match="the optimizer state is one of torch AdamW; FlashAdamW has taken it over"):
        run.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert steps(run) == {6}
    assert losses(run)[-3:] == pytest.approx(losses(whole)[-3:], abs=off)


def test_and_back_through_the_command_line(make_trainer, tmp_path):
    ours = make_trainer(optim="flashoptim_paged_adamw", optim_args="codec=none", max_steps=6, output_dir=str(tmp_path / "ours"), **RUN)
    ours.train()
    source, target = tmp_path / "ours" / "checkpoint-3", tmp_path / "theirs" / "checkpoint-3"
    assert "flashoptim_hf FlashAdamW -> torch AdamW" in convert(source, target, "--to", "adamw_torch")
    assert complete.defect(target) is None
    assert json.loads((target / complete.MARK).read_text())["step"] == 3
    same = {path.name for path in source.iterdir()} - {"optimizer.pt", complete.MARK}
    assert {path.name for path in target.iterdir()} == same | {"optimizer.pt", complete.MARK}
    assert all((source / name).read_bytes() == (target / name).read_bytes() for name in same)
    theirs = make_trainer(optim="adamw_torch", max_steps=6, output_dir=str(tmp_path / "theirs"), **RUN)
    theirs.train(resume_from_checkpoint=str(target))
    assert steps(theirs) == {6}
    assert losses(theirs)[-3:] == pytest.approx(losses(ours)[-3:], abs=1e-5)


def test_paged_and_not_paged_are_one_format(make_trainer, tmp_path):
    paged = make_trainer(optim="flashoptim_paged_adamw", max_steps=6, output_dir=str(tmp_path / "paged"), **RUN)
    paged.train()
    resident = make_trainer(optim="flashoptim_adamw", max_steps=6, output_dir=str(tmp_path / "resident"), **RUN)
    resident.train(resume_from_checkpoint=str(tmp_path / "paged" / "checkpoint-3"))
    assert losses(resident) == losses(paged)


@pytest.mark.parametrize("other", ["adamw_torch", "flashoptim_paged_adamw", "sgd"])
def test_the_wrong_algorithm_stops_before_training(make_trainer, tmp_path, other):
    extra = {"optim_args": "momentum=0.9"} if other == "sgd" else {}
    make_trainer(optim=other, max_steps=3, output_dir=str(tmp_path / "a"), **RUN, **extra).train()
    lion = make_trainer(optim="flashoptim_paged_lion", max_steps=6, output_dir=str(tmp_path / "b"), **RUN)
    name = {"sgd": "torch SGD", "adamw_torch": "torch AdamW"}.get(other, "flashoptim_hf FlashAdamW")
    with pytest.raises(CheckpointError, match=f"this is a state of {name}.*FlashLion takes states of lion"):
        lion.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert not losses(lion)[3:]


def test_sgd_which_does_not_count_its_steps(make_trainer, tmp_path):
    whole = make_trainer(optim="sgd", optim_args="momentum=0.9", max_steps=6, output_dir=str(tmp_path / "a"), **RUN)
    whole.train()
    ours = make_trainer(optim="flashoptim_sgd", optim_args="momentum=0.9,codec=none", max_steps=9, output_dir=str(tmp_path / "b"), **RUN)
    with pytest.warns(UserWarning, match="torch SGD"):
        ours.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert losses(ours)[3:6] == pytest.approx(losses(whole)[-3:], abs=1e-5)
    again = make_trainer(optim="flashoptim_sgd", optim_args="momentum=0.9,codec=none", max_steps=9, output_dir=str(tmp_path / "b"), **RUN)
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-6"))
    assert losses(again) == losses(ours)


def test_bitsandbytes_runs_go_on_in_both_directions(make_trainer, tmp_path):
    theirs = make_trainer(optim="adamw_bnb_8bit", max_steps=6, output_dir=str(tmp_path / "a"), **RUN)
    theirs.train()
    ours = make_trainer(optim="flashoptim_paged_adamw", max_steps=6, output_dir=str(tmp_path / "b"), **RUN)
    with pytest.warns(UserWarning, match="bitsandbytes AdamW"):
        ours.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert losses(ours)[-3:] == pytest.approx(losses(theirs)[-3:], abs=1e-2)
    convert(tmp_path / "b" / "checkpoint-6", tmp_path / "c" / "checkpoint-6", "--to", "bitsandbytes")
    back = make_trainer(optim="paged_adamw_8bit", max_steps=7, output_dir=str(tmp_path / "c"), **RUN)
    back.train(resume_from_checkpoint=str(tmp_path / "c" / "checkpoint-6"))
    assert steps(back) == {7}
    assert torch.tensor(losses(back)).isfinite().all()
    assert Path(tmp_path / "c" / "checkpoint-6" / complete.MARK).is_file()
