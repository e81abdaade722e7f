"""AdamW of other packages as optimizers that step real parameters, for the benches that time whole steps.

Peers are optional: what is not installed is left out, and the bench says so by name. On a CPU torchao's step is not compiled, and
flashoptim refuses to run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch
from torch import Tensor
from torch.optim import Optimizer

from .peers import installed

Params = Sequence[torch.nn.Parameter]


def torch_fused(params: Params) -> Optimizer:
    """`torch.optim.AdamW(fused=True)`: states in the dtype of the parameter."""
    return torch.optim.AdamW(params, fused=True)


def torch_foreach(params: Params) -> Optimizer:
    """`torch.optim.AdamW(foreach=True)`."""
    return torch.optim.AdamW(params, foreach=True)


def bitsandbytes_8bit(params: Params) -> Optimizer:
    """8-bit states, block-wise dynamic map, in device memory. Small tensors too, which by default stay in fp32."""
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, min_8bit_size=1)


def bitsandbytes_paged_8bit(params: Params) -> Optimizer:
    """The same in unified memory, which the driver moves to the host only when device memory runs short."""
    from bitsandbytes.optim import PagedAdamW8bit

    return PagedAdamW8bit(params, min_8bit_size=1)


def bitsandbytes_paged_32bit(params: Params) -> Optimizer:
    """fp32 states in unified memory."""
    from bitsandbytes.optim import PagedAdamW

    return PagedAdamW(params)


def torchao_8bit(params: Params) -> Optimizer:
    """8-bit states, dynamic map; on a GPU its step is compiled when it first runs, which takes up to a minute."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(params)


def flashoptim_8bit(params: Params) -> Optimizer:
    """Softsign states with 24-bit master weights where parameters are not fp32. Needs CUDA."""
    from flashoptim import FlashAdamW

    return FlashAdamW(params, master_weight_bits=None if params[0].dtype == torch.float32 else 24)


PEERS: Mapping[str, Callable[[Params], Optimizer]] = MappingProxyType(
    {
        "torch_fused": torch_fused,
        "torch_foreach": torch_foreach,
        "flashoptim": flashoptim_8bit,
        "bitsandbytes": bitsandbytes_8bit,
        "bitsandbytes_paged_8bit": bitsandbytes_paged_8bit,
        "bitsandbytes_paged_32bit": bitsandbytes_paged_32bit,
        "torchao": torchao_8bit,
    }
)
"""Subject to the function that makes its optimizer. A subject begins with the name of its package, which torch's always is there for."""


def available(subjects: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of `subjects` whose package is installed, and the packages that are missing."""
    packages = {subject: subject.partition("_")[0] for subject in subjects}
    missing = list(dict.fromkeys(package for package in packages.values() if not installed(package)))
    return [subject for subject in subjects if packages[subject] not in missing], missing


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of an optimizer's state: codes, scales, moments and corrections, ours and the peers'; step counts left out."""
    return sum(_nbytes(value) for values in optimizer.state.values() for value in values.values())


def _nbytes(value: object) -> int:
    parts = [getattr(value, name, None) for name in ("codes", "scale", "quantized", "scales")]
    tensors = [part for part in parts if isinstance(part, Tensor)] or ([value] if isinstance(value, Tensor) else [])
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor.dim())


def stance(subject: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """What a step of this subject on this device is run in: torchao's is kept from being compiled on a CPU."""
    if subject == "torchao" and device.type == "cpu":
        return lambda: torch.compiler.set_stance("force_eager")
    return nullcontext
