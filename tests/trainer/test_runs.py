"""Whole runs through the Trainer that must be equal, bit for bit or nearly: where state lies must not show in what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

RUN = {"max_steps": 10, "logging_steps": 1, "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "weight_decay": 0.1, "seed": 3}


def model(dtype: torch.dtype = torch.float32) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)
    return GPT2LMHeadModel(config).to(dtype)


def everything(trainer: Any) -> dict[str, Any]:
    """Losses, weights, and the optimizer's whole state, as bytes."""

    def raw(tensor: torch.Tensor) -> bytes:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    optimizer = trainer.optimizer
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": {name: raw(p) for name, p in trainer.model.named_parameters()},
        "state": {i: {name: raw(value) for name, value in values.items()} for i, values in optimizer.state_dict()["state"].items()},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_through_a_device_equals_unpaged(make_trainer: Any, dtype: torch.dtype) -> None:
    """Ten steps with pages of a few KiB through the simulated device, in a random legal order, equal ten steps in plain memory."""
    runs = []
    for optim, optim_args in (
        ("flashoptim_adamw", None),
        ("flashoptim_paged_adamw", None),
        ("flashoptim_paged_adamw", "page_bytes=8KiB,simulate=1"),
        ("flashoptim_paged_adamw", "page_bytes=2KiB,simulate=2"),
    ):
        trainer = make_trainer(model(dtype), optim=optim, optim_args=optim_args, **RUN)
        trainer.train()
        runs.append(everything(trainer))
        report = trainer.optimizer.optimizer.memory_report()
        if optim_args:
            # it did travel: every page in and out once per step
            assert report.page_in_bytes == report.page_out_bytes >= report.state_bytes
            assert report.pages >= 3
        else:
            assert report.page_in_bytes == 0
    assert len(runs[0]["losses"]) == 10
    for other in runs[1:]:
        assert other == runs[0]


PLACEMENTS = (
    "device_budget_bytes=0.5",
    "device_budget_bytes=auto",
    "device_budget_bytes=4KiB",
    "transport=zero_copy",
    "transport=resident",
)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_stays_on_the_device_does_not_show(make_trainer: Any, placement: str) -> None:
    """Budgets and transports on the simulated device, with a save in the middle, equal plain memory; and they did what they say."""
    runs = []
    for optim, optim_args in (("flashoptim_adamw", None), ("flashoptim_paged_adamw", f"page_bytes=4KiB,simulate=5,{placement}")):
        trainer = make_trainer(model(torch.bfloat16), optim=optim, optim_args=optim_args, save_strategy="steps", save_steps=5, **RUN)
        trainer.train()
        report = trainer.optimizer.optimizer.memory_report()
        runs.append(everything(trainer))
    assert runs[1] == runs[0]
    assert report.page_in_bytes == report.page_out_bytes
    assert (report.resident_bytes > 0) == ("zero_copy" not in placement)
    assert (report.page_hits > 0) == (report.resident_bytes > 0)
    entry = [entry for entry in trainer.state.log_history if "optim_resident_bytes" in entry][-1]
    assert entry["optim_resident_bytes"] == report.resident_bytes


def test_another_seed_is_another_run(make_trainer: Any) -> None:
    """The comparison above can fail."""
    runs = []
    for seed in (3, 4):
        trainer = make_trainer(optim="flashoptim_adamw", **{**RUN, "seed": seed})
        trainer.train()
        runs.append(everything(trainer))
    assert runs[0]["losses"] != runs[1]["losses"]


@pytest.mark.parametrize("optim_args", [None, "page_bytes=3KiB,simulate=5", "codec=learned,learn_interval=5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_equals_uninterrupted(make_trainer: Any, tmp_path: Path, dtype: torch.dtype, optim_args: str | None) -> None:
    def trainer(folder: str, **options: Any) -> Any:
        return make_trainer(
            model(dtype),
            optim="flashoptim_paged_adamw",
            optim_args=optim_args,
            output_dir=str(tmp_path / folder),
            **{**RUN, **options},
        )

    whole = trainer("whole")
    whole.train()
    first = trainer("first", save_steps=5, save_strategy="steps")
    first.train()
    second = trainer("second")
    second.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-5"))
    expected, resumed = everything(whole), everything(second)
    assert resumed["losses"][-5:] == expected["losses"][-5:]
    assert resumed["weights"] == expected["weights"]
    assert resumed["state"] == expected["state"]
    assert second.optimizer.optimizer.memory_report().pages == first.optimizer.optimizer.memory_report().pages


def test_accumulation_of_micro_batches_equals_one_batch_nearly(make_trainer: Any) -> None:
    losses = []
    for batch, accumulation in ((4, 1), (1, 4)):
        trainer = make_trainer(
            optim="flashoptim_paged_adamw",
            optim_args="page_bytes=8KiB,simulate=1",
            **{**RUN, "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "logging_steps": 10},
        )
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
        norm = trainer.state.log_history[0]["grad_norm"]
        assert norm > 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
