"""What a run checks and tells, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sft_run
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flashoptim_hf import FlashAdamW
from flashoptim_hf.errors import CheckpointError
from flashoptim_hf.trainer import complete


class Checkpoint:
    """An adapter of the tiny model with its optimizer, three steps on, and its files in `folder`."""

    def __init__(self, model: Path, folder: Path, name: str) -> None:
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config, adapter_name=name)
        self.trainable = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = FlashAdamW(self.trainable, lr=1e-2)
        for _ in range(3):
            for weight in self.trainable:
                weight.grad = torch.ones_like(weight)
            self.optimizer.step()
        self.folder = folder
        self.model.save_pretrained(folder)
        self.adapter = next(folder.rglob(sft_run.ADAPTER))

    def check(self, step: int = 3, fp16: bool = False) -> None:
        args: Any = SimpleNamespace(fp16=fp16, gradient_checkpointing=False)
        state: Any = SimpleNamespace(global_step=step, num_input_tokens_seen=0, max_steps=9)
        sft_run.Watch(str(self.folder)).on_train_begin(args, state, SimpleNamespace(), model=self.model, optimizer=self.optimizer)  # type: ignore[arg-type]


@pytest.fixture(params=["default", "mine"])
def checkpoint(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Checkpoint:
    return Checkpoint(tiny_model, tmp_path / "checkpoint-3", request.param)


def test_adapter_and_optimizer_of_one_step_pass(checkpoint: Checkpoint) -> None:
    checkpoint.check()


def test_an_adapter_that_was_replaced_after_loading_is_an_error(checkpoint: Checkpoint) -> None:
    checkpoint.trainable[5].data.add_(1e-3)
    with pytest.raises(CheckpointError, match="not what"):
        checkpoint.check()


def test_an_adapter_file_with_other_weights_is_an_error(checkpoint: Checkpoint) -> None:
    weights = load_file(checkpoint.adapter)
    save_file({f"other.{name}": weight for name, weight in weights.items()}, checkpoint.adapter)
    with pytest.raises(CheckpointError, match="was not loaded"):
        checkpoint.check()


def test_an_optimizer_at_another_step_is_an_error(checkpoint: Checkpoint) -> None:
    for step in (2, 4):
        with pytest.raises(CheckpointError, match="optimizer is at step 3"):
            checkpoint.check(step)
    checkpoint.check(4, fp16=True)  # loss scaling skips steps, so that the optimizer may be behind, never ahead
    with pytest.raises(CheckpointError, match="optimizer is at step 3"):
        checkpoint.check(2, fp16=True)


def test_a_fresh_start_checks_nothing(checkpoint: Checkpoint) -> None:
    checkpoint.folder = None  # type: ignore[assignment]
    watch = sft_run.Watch(None)
    watch.on_train_begin(SimpleNamespace(), SimpleNamespace(num_input_tokens_seen=0), SimpleNamespace())  # type: ignore[arg-type]


def test_a_checkpoint_of_another_optimizer_is_sealed_too(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    (folder / "mine").mkdir(parents=True)
    for name in ("mine/adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (folder / name).write_bytes(name.encode())
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    args, state = SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(global_step=3, is_world_process_zero=True)
    sft_run.Watch(None).on_save(args, state)  # type: ignore[arg-type]
    assert sft_run.resume_folder("true", str(tmp_path)) == sft_run.resume_folder(str(folder), "unused") == str(folder)
    mark = (folder / complete.MARK).read_bytes()
    assert json.loads(mark)["step"] == 3
    assert "mine/adapter_model.safetensors" in json.loads(mark)["files"]
    complete.seal(folder, 3, optimizer_step=2)  # as the Trainer does for an optimizer of this package: it stays
    sft_run.Watch(None).on_save(args, state)  # type: ignore[arg-type]
    assert json.loads((folder / complete.MARK).read_text())["optimizer_step"] == 2


@pytest.mark.parametrize(("dtype", "fp32_bytes"), [(torch.float32, 8), (torch.bfloat16, 12)])
def test_optimizer_rows_count_beside_fp32(dtype: torch.dtype, fp32_bytes: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(1024, dtype=dtype))
    optimizer = FlashAdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    for given in (optimizer, SimpleNamespace(optimizer=optimizer)):  # Accelerate wraps it
        rows = dict(sft_run.optimizer_rows(given, [weight], world_size=1))
        report = optimizer.memory_report()
        assert f"({report.state_bytes / 1024:.2f} bytes per parameter)" in rows["optimizer state"]
        assert rows["  fp32 AdamW would hold"] == f"{fp32_bytes}.00 KiB ({fp32_bytes}.00 bytes per parameter)"
        assert rows["  on the host / on the device"].endswith("/ no device")
    assert "optimizer state (this process)" in dict(sft_run.optimizer_rows(optimizer, [weight], world_size=2))


def test_other_optimizers_have_no_rows() -> None:
    weight = torch.nn.Parameter(torch.zeros(8))
    assert sft_run.optimizer_rows(torch.optim.AdamW([weight]), [weight], world_size=1) == []


def test_loss_rows_and_curve(tmp_path: Path) -> None:
    history = [{"eval_loss": 2.0, "step": 0}, {"loss": 1.5, "step": 1}, {"loss": 1.2, "step": 2}, {"eval_loss": 1.0, "step": 2}]
    assert sft_run.loss_rows(history) == [
        ("held-out loss before / after", "2.0000 / 1.0000"),
        ("perplexity before / after", "7.39 / 2.72"),
    ]
    assert sft_run.loss_rows(history[1:3]) == []
    sft_run.plot_losses(history, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (5 * 2**20, "5.00 MiB"), (3 * 2**40, "3072.00 GiB")]
)
def test_bytes_have_a_unit(number: int, text: str) -> None:
    weights = SimpleNamespace(
        memory_report=lambda: SimpleNamespace(
            to_dict=lambda: {
                "state_bytes": number,
                "num_params": 1,
                "host_bytes": 0,
                "device_bytes": 0,
                "page_in_bytes": 0,
                "page_out_bytes": 0,
                "pages": 0,
            }
        )
    )
    assert dict(sft_run.optimizer_rows(weights, [], 1))["optimizer state"].startswith(text + " (")
