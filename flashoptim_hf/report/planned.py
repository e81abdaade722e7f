"""The planner's figures for a run that has begun, beside what was measured in it."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigurationError
from ..planner.memory import Plan, paging_pays, plan
from ..planner.setup import Setup
from ..planner.shapes import shape_of
from ..trainer import processes
from ..trainer.callbacks import flash_optimizer
from .facts import unwrapped

Row = tuple[str, int, int, int | None]


def plan_of(args: Any, model: Any, optimizer: Any) -> Plan:
    """The plan of the run that `args`, model and optimizer make, from the model's config.

    Raises:
        ConfigurationError: the planner does not count such a run, or the optimizer is not one of this package.
    """
    flash = flash_optimizer(optimizer)
    model = unwrapped(model)
    config = model.config
    adapter = next(iter((getattr(model, "peft_config", None) or {}).values()), None)
    quantization = getattr(config, "quantization_config", None)
    _countable(model, adapter)
    values: dict[str, Any] = {
        "full": adapter is None,
        "load_in_4bit": bool(getattr(model, "is_loaded_in_4bit", False)),
        "double_quant": bool(getattr(quantization, "bnb_4bit_use_double_quant", True)),
        "dtype": getattr(config, "dtype", None) or torch.float32,
        "batch": args.per_device_train_batch_size,
        "seq_len": getattr(args, "max_length", None) or 1024,
        "accumulation": args.gradient_accumulation_steps,
        "checkpointing": bool(args.gradient_checkpointing),
        "attention": getattr(config, "_attn_implementation", None) or "sdpa",
        "fused_head": type(args).__name__ == "SFTConfig",
        "optimizer": str(getattr(args.optim, "value", args.optim)),
        "options": dict(flash.defaults) if flash is not None else {},
        "ranks": args.world_size,
        "ranks_per_host": processes.local_processes(args),
        "fsdp": bool(getattr(args, "fsdp_plugin_args", None)),
    }
    if adapter is not None:
        targets = adapter.target_modules
        values |= {"lora_r": adapter.r, "lora_targets": targets if isinstance(targets, str) else tuple(sorted(targets))}
        values["lora_dropout"] = adapter.lora_dropout
    setup = Setup(**values)
    with torch.random.fork_rng(devices=[]):  # the model is made once more, without memory: the run's random numbers stay as they are
        return plan(shape_of(config, getattr(config, "_name_or_path", "") or type(model).__name__, setup.dtype), setup)


def _countable(model: Any, adapter: Any) -> None:
    """Raise for what would be trained and is not planned, so that the figures would be those of another run."""
    if adapter is None:
        frozen = sum(not weight.requires_grad for weight in model.parameters())
        if frozen:
            raise ConfigurationError(f"{frozen} weights are frozen, and there is no adapter; planned is that all are trained.")
        return
    if getattr(adapter.peft_type, "value", adapter.peft_type) != "LORA":
        raise ConfigurationError(f"{adapter.peft_type} is not planned, LoRA is.")
    for option in ("use_dora", "modules_to_save", "trainable_token_indices", "rank_pattern", "layers_to_transform"):
        if getattr(adapter, option, None):
            raise ConfigurationError(f"{option}={getattr(adapter, option)!r} is not planned.")


def rows(found: Plan, model: Any, optimizer: Any, peaks: dict[str, int]) -> list[Row]:
    """(what, planned least, planned most, measured) in bytes.

    Args:
        found: the plan.
        model: the model, wrapped or not.
        optimizer: the optimizer, wrapped or not, after at least one step.
        peaks: the most that was seen, under "host" (resident set of the process) and "device".
    """
    flash = flash_optimizer(optimizer)
    if flash is None:
        return []
    report = flash.memory_report()
    model = unwrapped(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    gpu = report.device_bytes is not None
    measured: list[Row] = [
        _exact("weights that are not trained", found.weights.base, _base(model)),
        _exact("weights that are trained", found.weights.trained_bytes, sum(w.numel() * w.itemsize for w in trained)),
        _exact("optimizer state in use", found.state.used, report.state_bytes),
    ]
    if gpu:  # without one all lies in host memory, nothing is pinned and nothing travels: another run than the planned one
        measured += [
            _exact("optimizer state, host memory allocated", found.state.host, report.host_bytes),
            _exact("moved in by a step", found.state.travels, report.page_in_bytes),
            ("host memory of the process, the most", found.host.low, found.host.high, peaks.get("host")),
            ("device memory, the most", found.device.low, found.device.high, peaks.get("device")),
        ]
    return measured


def remark(found: Plan) -> str:
    """What the planner says of the run in a sentence."""
    return f"The run as planned on a GPU: {found.needs}. {paging_pays(found) or ''}".strip()


def _exact(what: str, planned: int, measured: int) -> Row:
    return what, planned, planned, measured


def _base(model: Any) -> int:
    """Bytes of frozen weights, of the constants of 4-bit weights, and of buffers."""
    held = [weight for weight in model.parameters() if not weight.requires_grad]
    tensors = [*held, *model.buffers()]
    for state in (weight.quant_state for weight in held if getattr(weight, "quant_state", None) is not None):
        tensors += [state.absmax, state.code]
        if state.nested:
            tensors += [state.state2.absmax, state.state2.code, state.offset]
    return sum({tensor.data_ptr() or -i: tensor.numel() * tensor.itemsize for i, tensor in enumerate(tensors, 1)}.values())
