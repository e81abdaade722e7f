"""Which kernel serves a device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import _triton
from ..errors import UnsupportedError
from . import cpu, eager
from .rule import Format, Segment, Segments


class Kernel(Protocol):
    """The signature that every `update_page` has; see `eager.update_page`."""

    def __call__(
        self,
        planes: tuple[Tensor, ...],
        segments: Sequence[Segment] | Segments,
        fmt: Format,
        *,
        inv_scale: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None: ...


class Look(Protocol):
    """The signature of `look.too_large`."""

    def __call__(self, addresses: np.ndarray, numels: np.ndarray, codes: int | np.ndarray, where: torch.device) -> Tensor: ...


def kernel_for(device: torch.device, name: str = "auto") -> Kernel:
    """The kernel for tensors on `device`.

    Args:
        name: "fused" (Triton), "cpu" (compiled C) and "eager" (plain torch) are what they say; "auto" takes the fastest that works, and
            warns once where the one that is made for the device cannot be had.

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
    if name == "cpu":
        if device.type != "cpu":
            raise UnsupportedError(f"kernel='cpu' needs parameters on the CPU; these are on {device}. Use kernel='auto'.")
        return cpu.update_page
    return _automatic(device.type)


def launch(kernel: Kernel, planes: tuple[Tensor, ...], segments: Segments, fmt: Format, **options: Any) -> Callable[[], None]:
    """The kernel's call as a function without arguments, with as much of the work done before as the kernel can."""
    if kernel is cpu.update_page or (kernel is _compiled_or_eager and cpu.supports(fmt)):
        return cpu.launch(planes, segments, fmt, **options)
    return partial(kernel, planes, segments, fmt, **options)


def look_for(device: torch.device, name: str = "auto") -> Look | None:
    """What looks at the gradients on `device` where a kernel can; None: plain torch has to.

    Args:
        name: of the kernel that updates there.
    """
    # on a CPU, Triton's kernels run only in its interpreter, when they were asked for by name
    runs = device.type in ("cuda", "xpu") or (device.type == "cpu" and name == "fused" and _triton.INTERPRET)
    if not runs or name not in ("auto", "fused") or not _triton.HAS_TRITON:
        return None
    from . import look

    return look.too_large


@cache
def _automatic(device_type: str) -> Kernel:
    if device_type == "cpu":
        if cpu.library() is not None:
            return _compiled_or_eager
        warnings.warn(
            "the compiled CPU path was not built (no C compiler when flashoptim-hf was installed): the optimizer runs its plain torch "
            "path, same results, several times slower. Install gcc or clang and reinstall for the fast one.",
            stacklevel=2,
        )
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


def _compiled_or_eager(
    planes: tuple[Tensor, ...],
    segments: Sequence[Segment] | Segments,
    fmt: Format,
    *,
    inv_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """The compiled path where it has the rule and codec, else the eager one, which is said once."""
    if cpu.supports(fmt):
        cpu.update_page(planes, segments, fmt, inv_scale=inv_scale, skip=skip)
    else:
        cpu.say_eager(fmt.rule.name, fmt.codec.name)
        eager.update_page(planes, segments, fmt, inv_scale=inv_scale, skip=skip)
