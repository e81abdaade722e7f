"""What a training would do wrong without a word, or with another package's words, found before its first step."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigurationError


def check(args: Any, optimizer: Any) -> None:
    """Check what an optimizer of this package is about to train.

    Args:
        args: `TrainingArguments`.
        optimizer: the optimizer, unwrapped.

    Raises:
        ConfigurationError: nothing in it can be trained, or fp16 weights are to be trained with loss scaling.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    trained = [param for param in params if param.requires_grad]
    if not trained:
        raise ConfigurationError(
            f"the optimizer has {len(params)} parameters, every one with requires_grad=False: the training would end as it began. The "
            "usual cause is an adapter loaded for inference: load it with PeftModel.from_pretrained(..., is_trainable=True), and make the "
            "optimizer afterwards."
        )
    halves = [param for param in trained if param.dtype == torch.float16]
    if halves and getattr(args, "fp16", False):
        raise ConfigurationError(
            f"{len(halves)} of the {len(trained)} trained tensors are in float16, and fp16=True scales the loss: gradients in float16 "
            "cannot be unscaled. Keep what is trained in float32 (load the model with dtype=torch.float32; of an adapter: param.data = "
            "param.data.float() for each trained parameter), or use bf16=True and bfloat16."
        )
