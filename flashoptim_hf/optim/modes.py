"""Ways of spreading a training over processes that keep no state which a parameter's own state could be made from: refused by name.

FSDP1 joins the parameters of several layers into one flat tensor and cuts that; DeepSpeed hands the optimizer flat fp32 partitions and
keeps master weights of its own. DDP and FSDP2 (`fully_shard`) leave every parameter what it is, and are served.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from ..errors import UnsupportedError

FSDP1 = (
    "FSDP1 (FullyShardedDataParallel, FlatParameter) is not supported: it joins parameters into flat ones, and the optimizer state of a "
    "parameter could be neither saved nor loaded. Use FSDP2: fsdp_version: 2 in the accelerate config (configs/accelerate/fsdp2_*.yaml), "
    "fsdp_config={'version': 2} in TrainingArguments, or torch's fully_shard; or DDP."
)
DEEPSPEED = (
    "DeepSpeed is not supported: its engine gives the optimizer flat fp32 partitions and keeps master weights and checkpoints of its own. "
    "Use FSDP2 (fsdp_version: 2 in the accelerate config, see configs/accelerate/fsdp2_*.yaml) to shard, or DDP "
    "(configs/accelerate/multi_gpu.yaml); paged=True keeps the state in host memory as DeepSpeed's offload would."
)


def check_param(param: Tensor) -> None:
    """Refuse a parameter that FSDP1 or DeepSpeed (ZeRO-3) has taken over.

    Raises:
        UnsupportedError: says what to use instead.
    """
    # set by FSDP1 on flat parameters, and with use_orig_params=True on every parameter that it flattens
    if getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False):
        raise UnsupportedError(FSDP1)
    if hasattr(param, "ds_id"):
        raise UnsupportedError(DEEPSPEED)


def check_accelerate() -> None:
    """Refuse what Accelerate has been told to do, where it is in use.

    Raises:
        UnsupportedError: says what to use instead.
    """
    module = sys.modules.get("accelerate.state")
    if module is not None:
        check_accelerate_state(module.AcceleratorState._shared_state)


def check_accelerate_state(state: dict[str, Any]) -> None:
    """The same for the values of an `AcceleratorState`, empty where there is none.

    Raises:
        UnsupportedError: says what to use instead.
    """
    mode = getattr(state.get("distributed_type"), "value", None)
    if mode == "DEEPSPEED":
        raise UnsupportedError(DEEPSPEED)
    if mode == "FSDP" and getattr(state.get("fsdp_plugin"), "fsdp_version", 1) != 2:
        raise UnsupportedError(FSDP1)
