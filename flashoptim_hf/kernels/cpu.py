"""The compiled CPU path: the files in `cpu/` through ctypes. They need no torch headers; without them the eager path serves.

One library for each `.c` file is built with the package where there is a C compiler (see `pyproject.toml`). It uses torch's number of
threads, and the widest instruction set that the processor has (AVX-512, AVX2, or what the compiler targets).
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UnsupportedError
from .rule import DTYPE_CODE, Format, Segment, Segments

FUNCTIONS = MappingProxyType(
    {
        ("adamw", "log"): ("_cpu_adamw", "flashoptim_adamw_log"),
        ("adamw", "joint"): ("_cpu_adamw", "flashoptim_adamw_joint"),
        ("adamw", "learned"): ("_cpu_adamw", "flashoptim_adamw_learned"),
        ("lion", "square"): ("_cpu_momentum", "flashoptim_lion_square"),
        ("sgd", "square"): ("_cpu_momentum", "flashoptim_sgd_square"),
    }
)
"""(rule, codec) to the library and its function: all that is compiled. The others take the eager path on a CPU."""


@cache
def library(name: str = "_cpu_adamw") -> ctypes.CDLL | None:
    """A compiled library, or None where it was not built."""
    path = where(name)
    return None if path is None else _load(path, name)


def where(name: str) -> Path | None:
    """The file of a compiled library, or None where it was not built."""
    places = (Path(__file__).parent / (name + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in places if path.exists()), None)


def _load(path: Path, name: str) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.flashoptim_isa.restype = ctypes.c_int
    for home, entry in FUNCTIONS.values():
        if home == name:
            function = getattr(loaded, entry)
            function.argtypes = [
                pointer, pointer, number, pointer, ctypes.c_int, ctypes.c_int, ctypes.c_float, ctypes.c_int, ctypes.c_int,
            ]  # fmt: skip
            function.restype = None
    for entry in ("flashoptim_log2", "flashoptim_exp2") if name == "_cpu_adamw" else ():
        function = getattr(loaded, entry)
        function.argtypes, function.restype = [pointer, pointer, number, ctypes.c_int], None
    if name == "_cpu_adamw":
        loaded.flashoptim_too_large.argtypes = [pointer, number, ctypes.c_int, ctypes.c_int]
        loaded.flashoptim_too_large.restype = ctypes.c_int
        for entry in ("flashoptim_join", "flashoptim_split"):
            function = getattr(loaded, entry)
            function.argtypes, function.restype = [pointer, pointer, pointer, number, ctypes.c_int, ctypes.c_int], None
    return loaded


def supports(fmt: Format) -> bool:
    """Whether the compiled path has this algorithm and codec, and was built; the others take the eager path on a CPU."""
    key = (fmt.rule.name, fmt.codec.name)
    return key in FUNCTIONS and library(FUNCTIONS[key][0]) is not None


def compiled() -> str:
    """All that the compiled path has, for people: "adamw with codec='log' or 'joint' or 'learned', ..."."""
    codecs: dict[str, list[str]] = {}
    for rule, codec in FUNCTIONS:
        codecs.setdefault(rule, []).append(codec)
    return ", ".join(f"{rule} with codec={' or '.join(map(repr, names))}" for rule, names in codecs.items())


@cache
def say_eager(rule: str, codec: str) -> None:
    """Warn, once for each algorithm and codec, that the compiled path has no such, and the eager path serves."""
    warnings.warn(
        f"on a CPU, {rule} with codec={codec!r} runs in plain torch: same results, tens of times slower than the compiled path, which has "
        f"{compiled()}.",
        stacklevel=4,
    )


def can_look_at(tensor: Tensor) -> bool:
    """Whether `too_large` takes this tensor: the library was built, and it is contiguous and on the CPU, in bf16, fp16 or fp32."""
    return tensor.dtype in DTYPE_CODE and tensor.is_contiguous() and tensor.device.type == "cpu" and library() is not None


def too_large(tensors: Sequence[Tensor], *, isa: int | None = None) -> bool:
    """Whether any element of any tensor is NaN, infinite or of magnitude 2^62 and above, at the speed of memory.

    Args:
        tensors: those that `can_look_at` admits.
        isa: as in `update_page`.
    """
    return spans_too_large(np.array([(x.data_ptr(), x.numel(), DTYPE_CODE[x.dtype]) for x in tensors], dtype=np.int64), isa=isa)


def spans_too_large(spans: np.ndarray, *, isa: int | None = None) -> bool:
    """`too_large` of int64 rows of address, elements and code of the dtype, where the library was built."""
    loaded = library()
    assert loaded is not None
    isa = best_isa() if isa is None else isa
    return bool(loaded.flashoptim_too_large(spans.ctypes.data, len(spans), torch.get_num_threads(), isa))


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
    launch(planes, segments, fmt, inv_scale=inv_scale, skip=skip, isa=isa)()


def launch(
    planes: Sequence[Tensor],
    segments: Sequence[Segment] | Segments,
    fmt: Format,
    *,
    inv_scale: Tensor | None = None,
    skip: Tensor | None = None,
    isa: int | None = None,
) -> Callable[[], None]:
    """`update_page` as a function without arguments, with all that Python has to do done before. After an update Python finds the caches
    full of something else, so that where several pages follow each other, it is best to prepare them all first.

    Raises:
        UnsupportedError: as `update_page`.
    """
    function = _function(fmt.rule.name, fmt.codec.name)
    if not len(segments):
        return _nothing
    columns = Segments.of(segments)
    rows, hyper = np.ascontiguousarray(columns.rows), np.ascontiguousarray(columns.hyper, dtype=np.float32)
    if columns.lr is not None:
        hyper = hyper.copy()
        hyper[:, 0] = [float(lr) for lr in columns.lr]
    addresses = (ctypes.c_void_p * 7)(*map(Tensor.data_ptr, planes))
    keeps: list[object] = [planes, columns, rows, hyper]
    if fmt.codec.tables:
        assert columns.tables is not None
        tables = np.array(list(map(Tensor.data_ptr, columns.tables)), dtype=np.int64)
        addresses[6] = tables.ctypes.data
        keeps.append(tables)
    arguments = (
        rows.ctypes.data,
        hyper.ctypes.data,
        len(columns),
        addresses,
        fmt.master_bits,
        int(fmt.codec.dither),
        1.0 if inv_scale is None else float(inv_scale),
        torch.get_num_threads(),
        best_isa(FUNCTIONS[fmt.rule.name, fmt.codec.name][0]) if isa is None else isa,
    )
    return partial(_run, function, arguments, skip, *keeps)


def _run(function: Callable[..., None], arguments: tuple[Any, ...], skip: Tensor | None, *_: object) -> None:
    """Call the library. The rest is what the addresses in `arguments` point to."""
    if skip is None or not bool(skip):
        function(*arguments)


def _nothing() -> None:
    pass


def _function(rule: str, codec: str) -> Callable[..., None]:
    """What updates a page.

    Raises:
        UnsupportedError: as `update_page`.
    """
    if (rule, codec) not in FUNCTIONS:
        raise UnsupportedError(
            f"kernel='cpu' has no {rule} with codec={codec!r}, only {compiled()}; use kernel='eager' or 'auto' for the others."
        )
    home, entry = FUNCTIONS[rule, codec]
    loaded = library(home)
    if loaded is None:
        raise UnsupportedError(
            "kernel='cpu' needs the compiled library, which was not built when the package was installed. Install a C compiler (gcc or "
            "clang) and reinstall flashoptim-hf, or use kernel='eager'."
        )
    return getattr(loaded, entry)


@cache
def best_isa(name: str = "_cpu_adamw") -> int:
    """The widest instruction set that the processor has: 2 AVX-512, 1 AVX2, 0 what the compiler targets. Asks a library that was built."""
    loaded = library(name)
    assert loaded is not None
    return int(loaded.flashoptim_isa())
