"""What a training says of memory, counted by hand: full fine-tuning and LoRA, with and without a device, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

MakeTrainer = Callable[..., Trainer]

GROUP, CONSTANTS = 64, 10  # elements that share ten bytes: hi and step in fp32, umax in bf16


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))


def lora(dtype: torch.dtype) -> Any:
    model = get_peft_model(gpt2(), LoraConfig(r=3, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True))
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(dtype)
    return model


CASES: dict[str, tuple[Callable[[], Any], int]] = {
    "full, fp32": (gpt2, 0),
    "full, bf16": (lambda: gpt2().bfloat16(), 1),
    "LoRA, fp32": (lambda: lora(torch.float32), 0),
    "LoRA, bf16": (lambda: lora(torch.bfloat16), 1),
}
"""Model, and the bytes that complete each weight to a 24-bit one."""


@pytest.mark.parametrize("device", [False, True], ids=["no device", "device"])
@pytest.mark.parametrize(("model", "correction"), CASES.values(), ids=CASES.keys())
def test_state_is_the_hand_count(model: Callable[[], Any], correction: int, device: bool, make_trainer: MakeTrainer) -> None:
    made = make_trainer(model(), optim_args="simulate=1,page_bytes=16KiB,device_budget_bytes=16KiB" if device else "page_bytes=16KiB")
    made.train()
    trained = [weight.numel() for weight in made.model.parameters() if weight.requires_grad]
    frozen = [weight.numel() for weight in made.model.parameters() if not weight.requires_grad]
    groups = sum(-(-count // GROUP) for count in trained)
    report = made.optimizer.optimizer.memory_report()
    assert report.moment_bytes == 2 * sum(trained) + CONSTANTS * groups
    assert report.correction_bytes == correction * sum(trained)
    assert report.state_bytes == report.moment_bytes + report.correction_bytes == sum(report.planes.values())
    assert report.planes["exp_avg"] == report.planes["exp_avg_sq"] == sum(trained)  # one byte each: quantization is active
    assert report.quantized_share == 1.0
    assert report.num_params == sum(trained)  # and nothing of what is frozen
    assert bool(frozen) == ("lora" in str(made.model).lower())

    entry = made.state.log_history[0]
    assert entry["optim_state_bytes"] == report.state_bytes
    assert entry["optim_host_bytes"] == report.host_bytes == report.host_pinned_bytes + report.host_pageable_bytes
    if not device:
        assert report.device_bytes is None
        assert entry["optim_page_in_bytes"] == 0
        return
    assert report.staging_bytes + report.resident_bytes <= report.device_bytes  # slots are whole pages
    assert report.resident_bytes <= 16 * 2**10
    last = made.state.log_history[-2]
    assert 0 <= last["optim_page_in_bytes"] <= report.host_bytes
    assert (last["optim_page_in_bytes"] == 0) == (report.resident_bytes >= report.state_bytes)
