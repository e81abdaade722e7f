"""What was in force in a run, as rows of (label, value): the run, the model, the optimizer with its options, versions, arguments."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import platform
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from .. import __version__
from ..trainer.callbacks import flash_optimizer

PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "bitsandbytes", "datasets", "triton")
SHOWN = 300  # characters of one value

Rows = list[tuple[str, str]]


def gather(args: Any, model: Any, optimizer: Any) -> dict[str, Rows]:
    """Everything that is known when training begins.

    Args:
        args: `TrainingArguments`.
        model: the model, wrapped or not; None where the Trainer told of none.
        optimizer: the optimizer, wrapped or not.
    """
    return {
        "run": _run(args),
        "model": _model(model) if model is not None else [],
        "optimizer": _optimizer(args, optimizer),
        "versions": versions(),
        "arguments other than their defaults": arguments(args),
    }


def versions() -> Rows:
    """This package, Python, and the packages that a run rests on, as far as they are installed."""
    found = [("flashoptim-hf", __version__), ("Python", platform.python_version())]
    for name in PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def arguments(args: Any) -> Rows:
    """The arguments that differ from their defaults. Tokens are left out."""
    if not dataclasses.is_dataclass(args):
        return []
    rows = []
    for item in dataclasses.fields(args):
        if item.name.startswith("_") or item.name.endswith("_token") or not item.init:
            continue
        value = getattr(args, item.name, None)
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        if value != default and not isinstance(value, torch.device):
            rows.append((item.name, short(getattr(value, "value", value))))
    return rows


def unwrapped(model: Any) -> Any:
    """The model inside the wrappers of DDP and of torch.compile."""
    while hasattr(model, "module") or hasattr(model, "_orig_mod"):
        model = getattr(model, "module", None) or model._orig_mod
    return model


def short(value: Any) -> str:
    """A value as text, cut off where it is long."""
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(text)} characters)"


def _run(args: Any) -> Rows:
    micro, accumulated, ranks = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
    device = args.device
    name = platform.processor() or platform.machine()
    if device.type != "cpu":
        name = str(getattr(torch.get_device_module(device), "get_device_name", lambda _: "")(device))
    return [
        ("processes", str(ranks)),
        ("device", f"{device}, {name}" if name else str(device)),
        ("host memory", f"{psutil.virtual_memory().total / 2**30:.1f} GiB"),
        ("mixed precision", str(getattr(args, "mixed_precision", "no"))),
        ("samples per step", f"{micro * accumulated * ranks}: {micro} per process, {accumulated} micro batches, {ranks} processes"),
        ("seed", str(args.seed)),
    ]


def _model(model: Any) -> Rows:
    model = unwrapped(model)
    config = getattr(model, "config", None)
    weights = list(model.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    # a 4-bit weight has two elements in each byte, and says how many it stands for
    count = sum(
        math.prod(weight.quant_state.shape) if getattr(weight, "quant_state", None) is not None else weight.numel() for weight in weights
    )
    share = sum(weight.numel() for weight in trained)
    rows = [
        ("class", type(model).__name__),
        ("name", short(getattr(config, "_name_or_path", "") or "")),
        ("parameters", f"{count:,}"),
        ("trained", f"{share:,} in {len(trained)} tensors ({share / max(count, 1):.2%})"),
        ("trained in", ", ".join(sorted({str(weight.dtype).removeprefix("torch.") for weight in trained}))),
    ]
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():
        rows.append((f"adapter {name}", f"{getattr(adapter.peft_type, 'value', adapter.peft_type)}, r={getattr(adapter, 'r', None)}"))
    return [row for row in rows if row[1]]


def _optimizer(args: Any, optimizer: Any) -> Rows:
    flash = flash_optimizer(optimizer)
    inner = flash if flash is not None else getattr(optimizer, "optimizer", optimizer)
    rows = [("name", str(getattr(args.optim, "value", args.optim))), ("class", type(inner).__name__)]
    options: Mapping[str, Any] = getattr(inner, "defaults", {})
    return rows + [(key, short(value)) for key, value in options.items()]
