"""Which kernel serves a device."""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from .. import _triton
from ..errors import UnsupportedError
from . import eager
from .rule import Format, Segment


class Kernel(Protocol):
    """The signature that every `update_page` has; see `eager.update_page`."""

    def __call__(
        self,
        planes: tuple[Tensor, ...],
        segments: list[Segment],
        fmt: Format,
        *,
        inv_scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None: ...


def kernel_for(device: torch.device, name: str = "auto") -> Kernel:
    """The kernel for tensors on `device`.

    Args:
        name: "fused" and "eager" are what they say; "auto" takes the fastest that works, and warns once where that is not the fused one
            on a device that it is made for.

    Raises:
        UnsupportedError: the kernel asked for by name cannot run here; the message says why and what can.
    """
    if name == "eager":
        return eager.update_page
    if name == "fused":
        _triton.require()
        # Triton reads this variable itself when it is imported; on a CPU it is what makes its kernels run at all
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UnsupportedError(
                "kernel='fused' needs a GPU: these parameters are on the CPU. Use kernel='auto', or set TRITON_INTERPRET=1 before Python "
                "starts to run the kernel in Triton's (slow) interpreter."
            )
        from . import fused

        return fused.update_page
    return _automatic(device.type)


@cache
def _automatic(device_type: str) -> Kernel:
    if device_type == "cpu":
        return eager.update_page
    if _triton.HAS_TRITON:
        from . import fused

        return fused.update_page
    warnings.warn(
        f"Triton cannot be imported, so the optimizer runs its plain torch path on {device_type}: same results, several times slower. "
        "Install triton for the fused kernel.",
        stacklevel=2,
    )
    return eager.update_page
