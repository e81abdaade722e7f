"""Several processes: what the Trainer has been told to do that cannot work, and the host memory that those of a machine will take."""

from __future__ import annotations

import os
from typing import Any

import psutil
from transformers.utils import logging

from ..errors import UnsupportedError

logger = logging.get_logger(__name__)


def check(args: Any) -> None:
    """Refuse FSDP1 and DeepSpeed when a Trainer is made, whether `TrainingArguments` or the launcher asks for them.

    Raises:
        UnsupportedError: says what to use instead.
    """
    from ..optim import modes

    if getattr(args, "deepspeed", None) or _launcher_says("ACCELERATE_USE_DEEPSPEED"):
        raise UnsupportedError(modes.DEEPSPEED)
    plugin = getattr(args, "fsdp_plugin_args", None) or {}
    # Accelerate's own default for the version is 1
    if (plugin and int(plugin.get("fsdp_version", 1)) != 2) or (
        not plugin and _launcher_says("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION", "1") != "2"
    ):
        raise UnsupportedError(modes.FSDP1)
    modes.check_accelerate()


def shards(args: Any) -> bool:
    """Whether parameters are going to be sharded with FSDP, by `TrainingArguments` or the launcher."""
    return bool(getattr(args, "fsdp_plugin_args", None)) or _launcher_says("ACCELERATE_USE_FSDP")


def _launcher_says(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")


def local_processes(args: Any) -> int:
    """Processes of this job on this machine, as the launcher says; where it does not, all of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))


def announce(args: Any, optimizer: Any) -> None:
    """Say once per machine, before training, what the optimizer state will take.

    A warning where several processes share the machine, since each keeps state of its own, or where memory will not suffice; else info.
    """
    if not args.should_log:
        return
    host, device = optimizer.planned_bytes()
    count = local_processes(args)
    free = psutil.virtual_memory().available
    line = f"Optimizer state: {host:,} bytes of host memory"
    if count > 1:
        line = f"{line} in each of {count} processes on this machine, {host * count:,} bytes in all"
    line += f", of {free:,} free" + (f"; {device:,} bytes on each device." if device else ".")
    if host * count > free:
        line += " That is more than there is: start fewer processes per machine, shard with FSDP2, or train fewer parameters."
    (logger.warning if count > 1 or host * count > free else logger.info)(line)
