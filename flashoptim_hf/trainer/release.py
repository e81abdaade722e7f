"""Gradient release under the Trainer: which of its arguments exclude it, and whose hooks are on the model."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import ConfigurationError, UnsupportedError
from . import processes

NORM = "grad_norm"
"""The Trainer's log entry, which it computes from the gradients that are left after backward: none."""


def check(args: Any) -> None:
    """Refuse what needs all gradients at once, or changes them after backward.

    Args:
        args: `TrainingArguments` of a run with `gradient_release=True`.

    Raises:
        ConfigurationError: clipping (the Trainer's default), accumulation, or fp16 with its gradient scaler.
        UnsupportedError: DDP.
    """
    from ..optim import gradient_release

    if args.max_grad_norm is not None and args.max_grad_norm > 0:
        raise ConfigurationError(f"max_grad_norm={args.max_grad_norm}: {gradient_release.CLIPPING}")
    if args.gradient_accumulation_steps > 1:
        raise ConfigurationError(f"gradient_accumulation_steps={args.gradient_accumulation_steps}: {gradient_release.ACCUMULATION}")
    if args.fp16:
        raise ConfigurationError(f"fp16=True: {gradient_release.SCALER}")
    if args.world_size > 1 and not processes.shards(args):
        raise UnsupportedError(gradient_release.DDP)


def start(optimizer: Any | None, model: Any) -> None:
    """Training begins: the hooks of this run's optimizer go on the parameters as they are now, those of earlier ones go.

    Args:
        optimizer: this package's optimizer, or None where another package's is used.
        model: the model, maybe wrapped; None where the Trainer does not say.
    """
    release = sys.modules.get(f"{__package__.rpartition('.')[0]}.optim.gradient_release")
    if release is None:  # nobody can have made a hook
        return
    if optimizer is not None and optimizer.defaults["gradient_release"]:
        optimizer.reopen()
    elif model is not None:
        release.detach(model.parameters())


def stop(optimizer: Any | None) -> None:
    """Training is over: what is done with the model from here on is not for these hooks."""
    if optimizer is not None:
        optimizer.close()


def strip(logs: dict[str, Any]) -> None:
    """Take out the norm of gradients that were not there: it would read 0."""
    logs.pop(NORM, None)
