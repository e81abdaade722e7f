"""Gradient release through the Trainer: the loss curve of a run without, and what is refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

from flashoptim_hf import FlashAdamW
from flashoptim_hf.errors import ConfigurationError, UnsupportedError
from flashoptim_hf.trainer import release

MakeTrainer = Callable[..., Trainer]

RELEASE = "gradient_release=true,page_bytes=8KiB,simulate=1"
RUN: dict[str, Any] = {
    "max_steps": 6,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "max_grad_norm": 0,
    "seed": 3,
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).bfloat16()


def everything(trainer: Any) -> dict[str, Any]:
    def raw(tensor: torch.Tensor) -> bytes:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": {name: raw(p) for name, p in trainer.model.named_parameters()},
        "state": {i: {k: raw(v) for k, v in values.items()} for i, values in trainer.optimizer.state_dict()["state"].items()},
    }


class Look(TrainerCallback):
    """How many gradients are left when backward is over, and what reporters see."""

    def __init__(self) -> None:
        self.left: list[int] = []
        self.logs: list[dict[str, Any]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.left.append(sum(p.grad is not None for p in model.parameters()))

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        self.logs.append(dict(logs))


def hooks_of(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())


@pytest.mark.parametrize("extra", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpointing"])
def test_the_loss_curve_is_that_of_a_run_without(make_trainer: MakeTrainer, extra: dict[str, Any]) -> None:
    """Full fine-tuning in bf16 with 24-bit masters, paged through the simulated device: bit for bit."""
    runs, looks = [], []
    for optim_args in (None, RELEASE):
        look = Look()
        trainer = make_trainer(llama(), optim_args=optim_args, callbacks=[look], **RUN, **extra)
        trainer.train()
        runs.append(everything(trainer))
        looks.append(look)
    assert runs[0] == runs[1]
    assert len(runs[0]["losses"]) == 6
    assert runs[0]["losses"][-1] < runs[0]["losses"][0]
    count = len(list(trainer.model.parameters()))
    assert looks[0].left == [count] * 6
    assert looks[1].left == [0] * 6
    assert trainer.optimizer.optimizer.memory_report().page_in_bytes > 0


def test_no_norm_is_logged_where_there_are_no_gradients(make_trainer: MakeTrainer) -> None:
    for optim_args in (None, RELEASE):
        look = Look()
        trainer = make_trainer(llama(), optim_args=optim_args, callbacks=[look], **RUN)
        trainer.train()
        for entries in (look.logs, trainer.state.log_history):
            assert any("loss" in entry for entry in entries)
            assert all((release.NORM in entry) == (optim_args is None) for entry in entries if "loss" in entry)


def test_resumed_equals_uninterrupted(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def trainer(folder: str, **options: Any) -> Any:
        return make_trainer(llama(), optim_args=RELEASE, output_dir=str(tmp_path / folder), **RUN, **options)

    whole = trainer("whole")
    whole.train()
    first = trainer("first", save_steps=3, save_strategy="steps")
    first.train()
    second = trainer("second")
    second.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-3"))
    expected, resumed = everything(whole), everything(second)
    assert resumed["losses"][-3:] == expected["losses"][-3:]
    assert resumed["weights"] == expected["weights"]
    assert resumed["state"] == expected["state"]


EXCLUDED = [
    ({"max_grad_norm": 1.0}, r"max_grad_norm=1\.0: .*set max_grad_norm=0"),
    ({"gradient_accumulation_steps": 4}, r"gradient_accumulation_steps=4: .*gradient_accumulation_steps=1"),
    ({"fp16": True}, r"fp16=True: .*bf16=True"),
]


@pytest.mark.parametrize(("changes", "message"), EXCLUDED)
def test_what_excludes_it_is_refused_when_a_trainer_is_made(make_trainer: MakeTrainer, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(llama(), optim_args=RELEASE, **{**RUN, **changes})
    make_trainer(llama(), optim_args=None, **{**RUN, **changes})


def test_the_default_norm_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ConfigurationError, match="max_grad_norm=0"):
        make_trainer(llama(), optim_args=RELEASE)


@pytest.mark.parametrize("way", ["optimizers", "optimizer_cls_and_kwargs"])
@pytest.mark.parametrize(("changes", "message"), EXCLUDED[:2])
def test_however_the_optimizer_comes(make_trainer: MakeTrainer, way: str, changes: dict[str, Any], message: str) -> None:
    model = llama()
    before = [p.detach().clone() for p in model.parameters()]
    options = {"lr": 1e-3, "gradient_release": True}
    given = (FlashAdamW(model.parameters(), **options), None) if way == "optimizers" else (FlashAdamW, options)
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(model, **{way: given}, **{**RUN, **changes}).train()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_ddp_is_refused(make_args: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    args = make_args(**RUN)
    release.check(args)
    monkeypatch.setattr(type(args), "world_size", property(lambda _: 2))
    with pytest.raises(UnsupportedError, match=r"DDP.*FSDP2"):
        release.check(args)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    release.check(args)


def test_hooks_do_not_outlive_a_run(make_trainer: MakeTrainer) -> None:
    """They go when training ends, are back when it goes on, and a run with another optimizer finds none."""
    model = llama()
    first = make_trainer(model, optim_args=RELEASE, **RUN)
    first.train()
    assert hooks_of(model) == 0
    first.train()
    assert hooks_of(model) == 0
    # a run that was interrupted leaves its hooks
    first.optimizer.optimizer.reopen()
    assert hooks_of(model) == len(list(model.parameters()))
    look = Look()
    other = make_trainer(model, optim="adamw_torch", callbacks=[look], **RUN)
    other.train()
    assert hooks_of(model) == 0
    assert look.left == [len(list(model.parameters()))] * 6


def test_a_second_trainer_does_not_double(make_trainer: MakeTrainer) -> None:
    results = []
    for twice in (False, True):
        model = llama()
        if twice:
            earlier = make_trainer(model, optim_args=RELEASE, **RUN)
            earlier.create_optimizer()
        trainer = make_trainer(model, optim_args=RELEASE, **RUN)
        trainer.train()
        results.append(everything(trainer))
    assert results[0] == results[1]
    assert not earlier.optimizer.state
