"""Runs a recipe through its real command line, and reads what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

ROOT = Path(__file__).resolve().parents[2]
HANG = 600  # seconds: no limit on speed, only the end of a run that waits for ever


def environment() -> dict[str, str]:
    """This process's environment without what a launcher has left in it."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "MASTER_", "WORLD_", "RANK", "LOCAL_"))}
    env.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", COLUMNS="200")
    return env


def command(script: str, *options: str, launcher: tuple[str, ...] = ()) -> list[str]:
    """The words that start a recipe under `accelerate launch`."""
    settings = launcher or ("--config_file", str(ROOT / "configs/accelerate/single_gpu.yaml"))
    return [sys.executable, "-m", "accelerate.commands.launch", *settings, str(ROOT / "recipes" / script), *options]


def launch(script: str, *options: str, launcher: tuple[str, ...] = (), expect: int = 0) -> str:
    """Run the recipe in a new process, check whether it succeeds, and return everything it printed."""
    words = command(script, *options, launcher=launcher)
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=HANG)
    output = done.stdout + done.stderr
    assert (done.returncode != 0) == (expect != 0), output[-6000:]
    return output


def run_here(recipe: Any, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    """Run a recipe's `main` in this process, which spares the seconds of its imports. `options` as on the command line."""
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [f"{recipe.__name__}.py", *options])
        patch.setenv("HF_HUB_OFFLINE", "1")
        recipe.main()


def state(checkpoint: Path) -> dict[str, Any]:
    """The Trainer's state in a checkpoint."""
    return json.loads((checkpoint / "trainer_state.json").read_text())


def tensors(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Every tensor and number in a nested state, by its path."""
    if isinstance(value, dict):
        return {key: leaf for name, item in value.items() for key, leaf in tensors(item, f"{path}/{name}").items()}
    if isinstance(value, list | tuple):
        return {key: leaf for i, item in enumerate(value) for key, leaf in tensors(item, f"{path}/{i}").items()}
    return {path: torch.as_tensor(value)} if isinstance(value, torch.Tensor | int | float) else {}
