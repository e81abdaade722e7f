"""The plain Accelerate loop, through the launcher: a run that was interrupted and resumed is the run that was not, bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import accelerate_loop
import pytest
import torch
from recipe_launch import run_here
from recipe_tiny import build_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from flashoptim_hf.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "recipes" / "accelerate_loop.py")
LAUNCHERS = {
    1: [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(ROOT / "configs/accelerate/single_gpu.yaml"), "--cpu"],
    2: [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with dropout, which shows when random numbers are not restored, and nine samples, so that epochs end within a run."""
    folder = tmp_path_factory.mktemp("loop")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, attention_dropout=0.1
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    rows = [json.dumps({"text": f"sample {i} " * (1 + i % 4)}) for i in range(17)]
    (folder / "data.jsonl").write_text("\n".join(rows))
    (folder / "loop.yaml").write_text(f"model_name_or_path: {folder / 'model'}\ndataset: {folder / 'data.jsonl'}\nlearning_rate: 1.0e-3\n")
    return folder


def launch(ranks: int, assets: Path, output: Path, *options: str) -> dict[int, float]:
    """Losses by step, as printed."""
    command = [*LAUNCHERS[ranks], SCRIPT, "--config", str(assets / "loop.yaml"), "--output_dir", str(output), "--use_cpu", "true", *options]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(assets / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    said = rf"in force: {ranks} process\(es\), cpu(:0)?, mixed precision no, trainable weights in bfloat16"
    assert len(re.findall(said, done.stdout)) == 1
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss (\S+)$", done.stdout, re.MULTILINE)}


def content(folder: Path) -> dict[str, bytes]:
    """Every tensor and number that Accelerate saved, as bytes, by file."""

    def raw(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return (str(value.dtype), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        if isinstance(value, dict):
            return {key: raw(inner) for key, inner in value.items()}
        return [raw(inner) for inner in value] if isinstance(value, list | tuple) else value

    files = [path for path in sorted(folder.iterdir()) if path.suffix == ".bin"]
    assert {"optimizer.bin", "pytorch_model.bin", "scheduler.bin"} <= {path.name for path in files}
    return {path.name: repr(raw(torch.load(path, weights_only=True))).encode() for path in files}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_interrupted_and_resumed_equals_uninterrupted(ranks: int, assets: Path, tmp_path: Path) -> None:
    """Eight or four micro batches an epoch, two a step: steps 3 and 7 lie in the middle of an epoch, where the run is cut at 3."""
    options = ["--gradient_accumulation_steps", "2", "--save_steps", "3", "--max_steps", "7"]
    whole = launch(ranks, assets, tmp_path / "whole", *options)
    assert sorted(whole) == list(range(1, 8))
    assert len(set(whole.values())) == 7
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["checkpoint-3", "checkpoint-6", "checkpoint-7"]

    # what a crash while saving step 7 and a bad block leave behind: one complete checkpoint, one with a wrong byte, one part
    for step in (3, 6):
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", tmp_path / "cut" / f"checkpoint-{step}")
    weights = tmp_path / "cut" / "checkpoint-6" / "pytorch_model.bin"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    (tmp_path / "cut" / "checkpoint-7.part").mkdir()
    resumed = launch(ranks, assets, tmp_path / "cut", *options, "--resume", "true")
    assert resumed == {step: loss for step, loss in whole.items() if step > 3}
    assert content(tmp_path / "cut" / "checkpoint-7") == content(tmp_path / "whole" / "checkpoint-7")
    # and the state is that of seven steps
    state = torch.load(tmp_path / "cut" / "checkpoint-7" / "optimizer.bin", weights_only=True)["state"]
    assert {int(values["step"]) for values in state.values()} == {7}
    assert all("correction" in values for values in state.values())


WRONG = {
    "a typo": ({}, ["--max_stepz", "3"], "did you mean --max_steps\\?"),
    "another precision in the launcher": ({"ACCELERATE_MIXED_PRECISION": "fp16"}, [], "fp16, and the weights are bfloat16"),
    "several processes asked for, one started": (
        {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        [],
        "several processes or machines and started one",
    ),
    "a file that is not there": ({}, ["--dataset", "no/such.jsonl"], "no such file"),
    "nothing to resume": ({}, ["--resume", "true"], "none of the checkpoints in .* is complete and whole"),
}


@pytest.mark.parametrize(("environ", "words", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_said_before_the_first_step(
    environ: dict[str, str], words: list[str], message: str, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "checkpoint-3").mkdir()
    given = ["--config", str(assets / "loop.yaml"), "--output_dir", str(tmp_path), "--use_cpu", "true", "--max_steps", "1", *words]
    with pytest.raises((Exception, SystemExit), match=message):
        run_here(accelerate_loop, monkeypatch, given)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_another_models_tokenizer_is_refused(assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    shutil.copytree(assets / "model", model)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(9)])
    tokenizer.save_pretrained(model)
    words = ["--config", str(assets / "loop.yaml"), "--output_dir", str(tmp_path / "out"), "--use_cpu", "true"]
    with pytest.raises(ConfigurationError, match="ids up to 269"):
        run_here(accelerate_loop, monkeypatch, [*words, "--model_name_or_path", str(model)])


def test_the_loop_stays_short() -> None:
    assert len(Path(SCRIPT).read_text(encoding="utf-8").splitlines()) < 150
