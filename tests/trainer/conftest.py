"""A GPT-2 of a few thousand parameters, a data set, and Trainers that finish in a fraction of a second."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils import logging as transformers_logging

import flashoptim_hf  # noqa: F401  (registers the names)

MakeTrainer = Callable[..., Trainer]


def tiny_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    )


def tiny_data(count: int = 32) -> list[dict[str, torch.Tensor]]:
    rows = [(torch.arange(16) * (1 + start % 3) + start) % 64 for start in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.fixture
def make_args(tmp_path: Path) -> Callable[..., TrainingArguments]:
    def make(**changes: Any) -> TrainingArguments:
        values: dict[str, Any] = {
            "output_dir": str(tmp_path),
            "optim": "flashoptim_paged_adamw",
            "use_cpu": True,
            "report_to": "none",
            "per_device_train_batch_size": 4,
            "max_steps": 3,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        return TrainingArguments(**{**values, **changes})

    return make


@pytest.fixture
def make_trainer(make_args: Callable[..., TrainingArguments]) -> MakeTrainer:
    def make(model: Any = None, *, cls: type[Trainer] = Trainer, callbacks: Any = None, **changes: Any) -> Trainer:
        extra = {key: changes.pop(key) for key in ("optimizers", "optimizer_cls_and_kwargs") if key in changes}
        return cls(
            tiny_model() if model is None else model,
            make_args(**changes),
            train_dataset=tiny_data(),
            eval_dataset=tiny_data(8),
            callbacks=callbacks,
            **extra,
        )

    return make


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Warnings and errors that go through transformers' logging, as they come."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logger = transformers_logging.get_logger("flashoptim_hf")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
