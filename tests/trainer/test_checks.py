"""Mistakes that any training can make, found when it begins, each in a sentence; and that what is right passes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

from flashoptim_hf import FlashAdamW
from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.trainer import checks

MakeTrainer = Callable[..., Trainer]

LORA = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)


def gpt2(**changes: Any) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(**{"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, **changes}))


@pytest.fixture
def asleep(tmp_path: Any) -> Any:
    """An adapter as `PeftModel.from_pretrained` loads it by default, with a loss that has a gradient: training would run to its end."""
    get_peft_model(gpt2(), LORA).save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(gpt2(), tmp_path / "adapter")
    assert not any(param.requires_grad for param in model.parameters())
    model.enable_input_require_grads()
    return model


def snapshot(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("given", ["name", "optimizer_cls_and_kwargs", "optimizers"])
def test_nothing_to_train_is_an_error_however_the_optimizer_is_given(asleep: Any, given: str, make_trainer: MakeTrainer) -> None:
    ways: dict[str, dict[str, Any]] = {
        "name": {},
        "optimizer_cls_and_kwargs": {"optim": "adamw_torch", "optimizer_cls_and_kwargs": (FlashAdamW, {})},
        "optimizers": {"optim": "adamw_torch", "optimizers": (FlashAdamW(asleep.parameters()), None)},
    }
    with pytest.raises(ConfigurationError, match=r"is_trainable=True"):
        make_trainer(asleep, **ways[given]).train()


def test_without_the_check_it_would_have_run_and_changed_nothing(
    asleep: Any, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "check", lambda *_: None)
    before = snapshot(asleep)
    made = make_trainer(asleep, optim="adamw_torch", optimizers=(FlashAdamW(asleep.parameters()), None))
    made.train()
    assert made.state.global_step == 3
    assert all(torch.equal(one, other) for one, other in zip(before, snapshot(asleep), strict=True))


def test_an_adapter_that_is_awake_trains(tmp_path: Any, make_trainer: MakeTrainer) -> None:
    get_peft_model(gpt2(), LORA).save_pretrained(tmp_path / "adapter")
    model = PeftModel.from_pretrained(gpt2(), tmp_path / "adapter", is_trainable=True)
    before = snapshot(model)
    make_trainer(model).train()
    assert not all(torch.equal(one, other) for one, other in zip(before, snapshot(model), strict=True))


def test_fp16_weights_under_loss_scaling_are_refused_with_the_way_out(make_trainer: MakeTrainer) -> None:
    with pytest.raises(
        ConfigurationError, match=r"16 of the 16 trained tensors are in float16, and fp16=True.*param\.data\.float\(\).*bf16=True"
    ):
        make_trainer(gpt2().half(), fp16=True).train()
    make_trainer(gpt2(), fp16=True).train()
    make_trainer(gpt2().bfloat16(), bf16=True).train()


def test_an_adapter_in_fp16_is_refused_and_its_base_may_be() -> None:
    """The base is frozen, so its dtype is no matter; PEFT makes adapters of 16-bit bases in fp32 unless told otherwise."""
    args: Any = SimpleNamespace(fp16=True)
    model = get_peft_model(gpt2().half(), LORA)
    trained = [param for param in model.parameters() if param.requires_grad]
    assert {param.dtype for param in trained} == {torch.float32}
    checks.check(args, FlashAdamW(trained))
    for param in trained:
        param.data = param.data.half()
    with pytest.raises(ConfigurationError, match="2 of the 2 trained tensors are in float16"):
        checks.check(args, FlashAdamW(trained))
    checks.check(SimpleNamespace(fp16=False), FlashAdamW(trained))
