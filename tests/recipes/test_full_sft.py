"""Full fine-tuning and preference training through their real command lines, on the tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import full_sft
import pytest
import qlora_dpo
import torch
from datasets import Dataset
from recipe_launch import launch, run_here, state, tensors
from safetensors.torch import load_file

from flashoptim_hf.errors import ConfigurationError

STEPS, HALF = 4, 2


def words(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


@pytest.fixture(scope="module")
def alpaca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alpaca") / "train.json"
    path.write_text(json.dumps([{"instruction": f"Number {i}?", "input": "", "output": "Yes, " * (i % 4 + 1)} for i in range(24)]))
    return path


def test_full_fine_tuning_resumed_equals_uninterrupted(tiny_model: Path, alpaca: Path, tmp_path: Path) -> None:
    settings = {
        "model_name_or_path": tiny_model,
        "dataset": alpaca,
        "eval_fraction": 0.2,
        "max_steps": STEPS,
        "save_steps": HALF,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": HALF,
        "sample_every_evals": 1,
        "early_stopping_patience": 5,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.001,
        "optim_args": "gradient_release=true",
        "max_length": 96,
        "sample_tokens": 2,
        "first_look": 1,
        "auto_resume": True,
        "disable_tqdm": True,
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    printed = launch("full_sft.py", *words(settings), "--output_dir", str(whole))
    assert "trainable weights in bfloat16, optimizer flashoptim_paged_adamw" in printed
    assert "format alpaca" in printed
    assert "(3.18 bytes per parameter)" in printed or "(3.17 bytes per parameter)" in printed or "(3.16 bytes per parameter)" in printed
    shutil.copytree(whole / f"checkpoint-{HALF}", parts / f"checkpoint-{HALF}")
    launch("full_sft.py", *words(settings), "--output_dir", str(parts))

    last, resumed = whole / f"checkpoint-{STEPS}", parts / f"checkpoint-{STEPS}"
    losses = [[row["loss"] for row in state(folder)["log_history"] if "loss" in row] for folder in (last, resumed)]
    assert len(losses[0]) == STEPS
    assert losses[0] == losses[1]
    weights, again = (load_file(path / "model.safetensors") for path in (last, resumed))
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    optimizer, again = (tensors(torch.load(path / "optimizer.pt", weights_only=True)) for path in (last, resumed))
    assert any("correction" in key for key in optimizer)
    assert optimizer.keys() == again.keys()
    assert all(torch.equal(optimizer[key], again[key]) for key in optimizer)

    rows = [row for row in state(last)["log_history"] if "eval_loss" in row]
    assert [row["step"] for row in rows] == [0, HALF, STEPS]
    assert all(row["eval_perplexity"] == pytest.approx(torch.tensor(row["eval_loss"]).exp().item()) for row in rows)
    answers = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    assert [answer["step"] for answer in answers] == [HALF, STEPS]
    assert "flashoptim-hf" in (whole / "README.md").read_text()
    page = (whole / "report.html").read_text()
    for part in (
        "finished, 4 steps",
        "answer before training",
        "answer at step 2",
        "answer after training",
        "optimizer state in use",
        "equal",
    ):
        assert part in page
    assert str(whole / "report.html") in printed

    # the same command once more: the run is at its end, so nothing is trained, and the results are the same
    printed = launch("full_sft.py", *words(settings), "--output_dir", str(whole))
    assert "nothing is left to train" in printed
    assert not (whole / f"checkpoint-{STEPS + 1}").exists()
    assert all(torch.equal(weight, weights[key]) for key, weight in load_file(whole / "model.safetensors").items())


REFUSED = {
    "adapter": (("--use_peft", "true"), "qlora_sft"),
    "quantized": (("--load_in_4bit", "true"), "qlora_sft"),
    "fp16 weights": (("--dtype", "float16"), "dtype=float16: gradients in fp16"),
    "two precisions": (("--fp16", "true", "--bf16", "false"), "dtype=bfloat16 contradicts fp16=true"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_full_fine_tuning_does_not_do(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    given = ["--model_name_or_path", "m", "--dataset", "d.jsonl", "--output_dir", str(tmp_path), "--use_cpu", "true", *options]
    _, args, model_args = full_sft.make_parser().parse_args_and_config(given)
    with pytest.raises(ConfigurationError, match=message):
        full_sft.check(args, model_args)


def test_preferences_train_and_resume_like_an_uninterrupted_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "preferences.jsonl"
    rows = [{"prompt": f"Number {i}? ", "chosen": "Yes, " * (i % 3 + 1), "rejected": "No.", "id": i} for i in range(12)]
    data.write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "model_name_or_path": tiny_model,
        "dataset": data,
        "eval_fraction": 0.2,
        "max_steps": STEPS,
        "save_steps": HALF,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "max_length": 96,
        "disable_tqdm": True,
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_here(qlora_dpo, monkeypatch, [*words(settings), "--output_dir", str(whole)])
    assert "optimizer flashoptim_paged_adamw" in capsys.readouterr().out
    history = state(whole / f"checkpoint-{STEPS}")["log_history"]
    losses = [row["loss"] for row in history if "loss" in row]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # log 2: adapter and reference agree before the first step
    assert losses[-1] < losses[0]
    assert any("rewards/margins" in row and "optim_state_bytes" in row for row in history)
    assert not any("eval_perplexity" in row for row in history)
    assert "rewards/margins" in (whole / "report.html").read_text()

    shutil.copytree(whole / f"checkpoint-{HALF}", parts / f"checkpoint-{HALF}")
    run_here(qlora_dpo, monkeypatch, [*words(settings), "--output_dir", str(parts), "--resume_from_checkpoint", "auto"])
    adapter, again = (load_file(path / f"checkpoint-{STEPS}" / "adapter_model.safetensors") for path in (whole, parts))
    assert all(adapter[key].dtype == again[key].dtype and torch.equal(adapter[key], again[key]) for key in adapter)


def test_preferences_without_a_rejected_answer_are_refused() -> None:
    data = Dataset.from_list([{"prompt": "a", "chosen": "b", "id": 1}])
    with pytest.raises(ConfigurationError, match=r"columns chosen, id, prompt, .*rejected missing"):
        qlora_dpo.check_columns(data, "training")
    assert qlora_dpo.check_columns(data.add_column("rejected", ["c"]), "training").column_names == list(qlora_dpo.COLUMNS)
