"""The recipe through its real command line: resumption, precision, processes, and what the options turn into."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes" / "qlora_sft.py"
STEPS, HALF = 6, 3


def launch(*options: str, launcher: tuple[str, ...] = (), expect: int = 0) -> str:
    """Run the recipe under `accelerate launch` in a new process, check the exit code, and return everything it printed."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "MASTER_", "WORLD_", "RANK", "LOCAL_"))}
    env.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", COLUMNS="200")
    settings = launcher or ("--config_file", str(ROOT / "configs/accelerate/single_gpu.yaml"))
    command = [sys.executable, "-m", "accelerate.commands.launch", *settings, str(SCRIPT), *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    output = done.stdout + done.stderr
    assert (done.returncode != 0) == (expect != 0), output[-6000:]
    return output


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"Number {i}?"}, {"role": "assistant", "content": "Yes, " * (i % 4 + 1) + str(i)}]}
        for i in range(24)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def options(model: Path, data: Path, output: Path, adapter: str) -> list[str]:
    settings = {
        "model_name_or_path": model,
        "dataset": data,
        "eval_fraction": 0.2,
        "output_dir": output,
        "adapter_name": adapter,
        "optim": "flashoptim_paged_adamw",
        "assistant_only_loss": True,
        "max_steps": STEPS,
        "save_steps": HALF,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "lora_dropout": 0.1,  # so that the state of the random numbers matters too
        "max_length": 96,
        "sample_tokens": 2,
        "disable_tqdm": True,
    }
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def state(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "trainer_state.json").read_text())


def tensors(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Every tensor and number in a nested state, by its path."""
    if isinstance(value, dict):
        return {key: leaf for name, item in value.items() for key, leaf in tensors(item, f"{path}/{name}").items()}
    if isinstance(value, list | tuple):
        return {key: leaf for i, item in enumerate(value) for key, leaf in tensors(item, f"{path}/{i}").items()}
    return {path: torch.as_tensor(value)} if isinstance(value, torch.Tensor | int | float) else {}


@pytest.fixture(scope="session", params=["default", "mine"])
def run(
    request: pytest.FixtureRequest, tiny_model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[str], str]:
    """An uninterrupted run: the adapter's name, its folder, its options, and what it printed."""
    output = tmp_path_factory.mktemp(request.param) / "whole"
    settings = options(tiny_model, data, output, request.param)
    return request.param, output, settings, launch(*settings)


def test_resumed_run_equals_uninterrupted_run(run: tuple[str, Path, list[str], str], tmp_path: Path) -> None:
    name, whole, settings, _ = run
    parts = tmp_path / "parts"  # holds what a run killed after its first checkpoint leaves behind
    shutil.copytree(whole / f"checkpoint-{HALF}", parts / f"checkpoint-{HALF}")
    settings = [str(parts) if word == str(whole) else word for word in settings]
    launch(*settings, "--resume_from_checkpoint", "true")

    last, resumed = whole / f"checkpoint-{STEPS}", parts / f"checkpoint-{STEPS}"
    keys = ("loss", "grad_norm", "learning_rate")
    losses = [[{key: row[key] for key in keys} for row in state(folder)["log_history"] if "loss" in row] for folder in (last, resumed)]
    assert len(losses[0]) == STEPS
    assert losses[0] == losses[1]
    folder = "." if name == "default" else name
    adapter, again = (load_file(path / folder / "adapter_model.safetensors") for path in (last, resumed))
    assert adapter.keys() == again.keys()
    assert all(adapter[key].dtype == again[key].dtype and torch.equal(adapter[key], again[key]) for key in adapter)
    optimizer, again = (tensors(torch.load(path / "optimizer.pt", weights_only=True)) for path in (last, resumed))
    assert len(optimizer) > 20
    assert optimizer.keys() == again.keys()
    assert all(torch.equal(optimizer[key], again[key]) for key in optimizer)
    # The final adapter is the last checkpoint's, and it is not the first one's.
    final = load_file(parts / folder / "adapter_model.safetensors")
    early = load_file(parts / f"checkpoint-{HALF}" / folder / "adapter_model.safetensors")
    assert all(torch.equal(final[key], adapter[key]) for key in adapter)
    assert not all(torch.equal(early[key], adapter[key]) for key in adapter)


def test_run_tells_what_is_in_force_and_leaves_its_results(run: tuple[str, Path, list[str], str]) -> None:
    _, output, _, printed = run
    assert "in force: 1 process(es), cpu, mixed precision bf16, trainable weights in bfloat16, optimizer flashoptim_paged_adamw" in printed
    assert "of them trained on" in printed
    assert "device map {'': 'cpu'}" in printed
    for row in (
        "held-out loss before / after",
        "perplexity",
        "tokens per second",
        "optimizer state",
        "fp32 AdamW would hold",
        "pages in / out",
    ):
        assert row in printed
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    history = state(output / f"checkpoint-{STEPS}")["log_history"]
    assert next(row["step"] for row in history if "eval_loss" in row) == 0


def test_adapter_and_optimizer_of_two_steps_are_refused(run: tuple[str, Path, list[str], str], tmp_path: Path) -> None:
    import sft_run

    from flashoptim_hf.errors import CheckpointError

    name, whole, settings, _ = run
    adapter = Path("." if name == "default" else name) / "adapter_model.safetensors"
    for file in (adapter, Path("optimizer.pt"), Path("trainer_state.json")):
        mixed = tmp_path / file.name / f"checkpoint-{HALF}"
        shutil.copytree(whole / f"checkpoint-{HALF}", mixed)
        sft_run.verify(mixed)
        shutil.copy(whole / f"checkpoint-{STEPS}" / file, mixed / file)
        with pytest.raises(CheckpointError, match="step 3"):
            sft_run.verify(mixed)
        (mixed / file).unlink()
        with pytest.raises((CheckpointError, FileNotFoundError), match=file.name):
            sft_run.resume_folder(str(mixed), "unused")
    unsealed = tmp_path / "unsealed"
    shutil.copytree(whole / f"checkpoint-{HALF}", unsealed)
    (unsealed / "fingerprint.json").unlink()
    with pytest.raises(CheckpointError, match=r"fingerprint\.json"):
        sft_run.resume_folder(str(unsealed), "unused")
    if name == "default":  # once through the command line: it stops before anything is trained
        mixed = tmp_path / "optimizer.pt" / f"checkpoint-{HALF}"
        shutil.copy(whole / f"checkpoint-{STEPS}" / "optimizer.pt", mixed)
        printed = launch(*settings, "--output_dir", str(tmp_path / "never"), "--resume_from_checkpoint", str(mixed), expect=1)
        assert "CheckpointError" in printed
        assert "optimizer.pt changed since step 3" in printed
        assert not (tmp_path / "never").exists()


def test_resume_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    import sft_run

    from flashoptim_hf.errors import CheckpointError

    for value in ("true", True):
        with pytest.raises(CheckpointError, match="holds no checkpoint"):
            sft_run.resume_folder(value, str(tmp_path))
    with pytest.raises(CheckpointError, match="trainer_state"):
        sft_run.resume_folder(str(tmp_path), "unused")
    for value in (None, "", "false", False):
        assert sft_run.resume_folder(value, str(tmp_path)) is None
