"""Optimizer states in files: found, read with what a user needs to know when they cannot be, and written whole or not at all."""

from __future__ import annotations

import os
import pickle
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..paging.plan import format_bytes

NAMES = ("optimizer.pt", "optimizer.bin")
"""The Trainer's name, and Accelerate's."""
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def locate(path: Path) -> Path:
    """The optimizer's file: `path` itself, or the one in that folder.

    Raises:
        CheckpointError: there is none, or it is spread over files of `torch.distributed.checkpoint`.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path} is not there.")
    for name in NAMES:
        if (path / name).is_file():
            return path / name
    sharded = [path] if path.joinpath(".metadata").is_file() else sorted(found.parent for found in path.glob("optimizer_*/.metadata"))
    if sharded:
        raise CheckpointError(
            f"{sharded[0]} is a sharded checkpoint (torch.distributed.checkpoint). Make one file of it first, which is read here: "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {shlex.quote(str(sharded[0]))} optimizer.pt"
        )
    raise CheckpointError(f"{path} holds no optimizer state: there is neither {' nor '.join(NAMES)} in it (save_only_model=True?).")


def companions(file: Path) -> list[Path]:
    """States of further optimizers beside `file` in a folder of Accelerate, which numbers them: optimizer_1.bin, ..."""
    return sorted(path for path in file.parent.glob(f"{file.stem}_*{file.suffix}") if path.is_file())


def read(path: Path) -> dict[str, Any]:
    """The state dict in a file, on the CPU. Only tensors and plain numbers are read, and torchao's state tensors where it is installed.

    Raises:
        CheckpointError: names the file, and says whether it is damaged or needs a package.
    """
    try:
        state = load(path)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        said = (str(error) if isinstance(error, OSError | RuntimeError) else f"{type(error).__name__} {error}").splitlines()[0]
        raise CheckpointError(f"{path} cannot be read: {said}. It is damaged, was cut off, or is not what torch.save writes.") from error
    if isinstance(state, dict) and len(state) == 1:
        state = next(iter(state.values()))  # what `dcp_to_torch` makes of a folder of Accelerate or the Trainer: {"optimizer": ...}
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        keys = list(state)[:5] if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(f"{path} holds no optimizer's state dict (state and param_groups), but {keys}.")
    return state


def load(path: Path) -> Any:
    """What is in a file, on the CPU and mapped where that is possible, with `weights_only=True`; torchao's own tensors too.

    Raises:
        CheckpointError: it holds tensors of torchao, which is not installed. Damage raises what `torch.load` raises.
    """
    try:
        return _mapped(path)
    except pickle.UnpicklingError as error:
        if "torchao" not in str(error):
            raise
        try:
            import torchao.optim  # noqa: F401  (its import allows its own classes to be loaded)
        except ImportError:
            raise CheckpointError(f"{path} holds tensors of torchao: install it to read them (pip install torchao).") from None
        return _mapped(path)


def _mapped(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError):  # files of torch before 1.6, and tensors of other classes, cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True)


def weight_dtypes(folder: Path) -> dict[torch.Size, torch.dtype]:
    """dtype of the weights of each shape, from a checkpoint's safetensors files; shapes that come in several dtypes are left out."""
    found: dict[torch.Size, set[torch.dtype | None]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found.setdefault(torch.Size(part.get_shape()), set()).add(_DTYPES.get(part.get_dtype()))
    single = {shape: next(iter(dtypes)) for shape, dtypes in found.items() if len(dtypes) == 1}
    return {shape: dtype for shape, dtype in single.items() if dtype is not None}


def write(state: Mapping[str, Any], path: Path) -> None:
    """Save under a temporary name, see to it that it reaches the disk, and rename: `path` is whole or as it was.

    Raises:
        CheckpointError: it cannot be written; says what is needed and what is free. Nothing is left behind.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as stream:
            torch.save(dict(state), stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        room = ""
        if path.parent.is_dir():
            part.unlink(missing_ok=True)
            room = f", and {format_bytes(shutil.disk_usage(path.parent).free)} are free there"
        said = str(error).splitlines()[0]
        raise CheckpointError(f"{path} could not be written ({said}): about {format_bytes(nbytes(state))} are needed{room}.") from error


def nbytes(state: Mapping[str, Any]) -> int:
    """Bytes of all tensors in a state dict."""
    return sum(plane_bytes(state).values())


def plane_bytes(state: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the tensors of all parameters together, by their name in the state."""
    totals: dict[str, int] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for inner, part in value.items():
                add(inner, part)
        elif isinstance(value, Tensor):
            parts = [getattr(value, part, None) for part in ("codes", "scale", "qmap")]  # torchao's tensors
            tensors = [part for part in parts if isinstance(part, Tensor)] or [value]
            totals[name] = totals.get(name, 0) + sum(part.numel() * part.itemsize for part in tensors)

    for values in state["state"].values():
        add("", values)
    return totals
