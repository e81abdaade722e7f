"""The compiled CPU path: `cpu/adamw.c` through ctypes. It needs no torch headers and is optional: without it the eager path serves.

The library is built with the package where there is a C compiler (see `pyproject.toml`). It uses torch's number of threads, and the widest
instruction set that the processor has (AVX-512, AVX2, or what the compiler targets).
"""

from __future__ import annotations

import ctypes
import importlib.machinery
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import UnsupportedError
from .rule import Format, Segment, Segments

LIBRARY = "_cpu_adamw"


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None where it was not built."""
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / (LIBRARY + suffix)
        if path.exists():
            return _load(path)
    return None


def _load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.flashoptim_isa.restype = ctypes.c_int
    loaded.flashoptim_adamw_log.argtypes = [
        pointer, pointer, number, pointer, ctypes.c_int, ctypes.c_int, ctypes.c_float, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    loaded.flashoptim_adamw_log.restype = None
    for name in ("flashoptim_log2", "flashoptim_exp2"):
        function = getattr(loaded, name)
        function.argtypes, function.restype = [pointer, pointer, number, ctypes.c_int], None
    return loaded


def supports(fmt: Format) -> bool:
    """Whether the compiled path has this algorithm and codec; the others take the eager path on a CPU."""
    return fmt.rule.name == "adamw" and fmt.codec.name == "log"


@torch.no_grad()
def update_page(
    planes: Sequence[Tensor],
    segments: Sequence[Segment] | Segments,
    fmt: Format,
    *,
    inv_scale: Tensor | None = None,
    skip: Tensor | None = None,
    isa: int | None = None,
) -> None:
    """`eager.update_page`, compiled. Codes differ from the eager ones at rounding boundaries only, by one.

    Args:
        isa: 2 AVX-512, 1 AVX2, 0 what the compiler targets; None takes the best that the processor has.

    Raises:
        UnsupportedError: the library was not built, or does not have this rule and codec.
    """
    loaded = library()
    if loaded is None:
        raise UnsupportedError(
            "kernel='cpu' needs the compiled library, which was not built when the package was installed. Install a C compiler (gcc or "
            "clang) and reinstall flashoptim-hf, or use kernel='eager'."
        )
    if not supports(fmt):
        raise UnsupportedError(
            f"kernel='cpu' has no {fmt.rule.name} with codec={fmt.codec.name!r}; use codec='log', or kernel='eager' or 'auto'."
        )
    if not len(segments) or (skip is not None and bool(skip)):
        return
    columns = Segments.of(segments)
    rows, hyper = np.ascontiguousarray(columns.rows), np.ascontiguousarray(columns.hyper, dtype=np.float32)
    if columns.lr is not None:
        hyper = hyper.copy()
        hyper[:, 0] = [float(lr) for lr in columns.lr]
    addresses = (ctypes.c_void_p * 6)(*(plane.data_ptr() for plane in planes))
    loaded.flashoptim_adamw_log(
        rows.ctypes.data,
        hyper.ctypes.data,
        len(columns),
        addresses,
        fmt.master_bits,
        int(fmt.codec.dither),
        1.0 if inv_scale is None else float(inv_scale),
        torch.get_num_threads(),
        loaded.flashoptim_isa() if isa is None else isa,
    )
