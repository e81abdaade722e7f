"""`flashoptim-hf doctor`: what this machine and this installation are, and which of the package's paths are in use and why."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import warnings
from typing import Annotated, Any

import typer

PACKAGES = (
    *("torch", "triton", "transformers", "accelerate", "peft", "bitsandbytes", "trl", "datasets", "safetensors", "numpy"),
    *("flashoptim", "torchao"),
)
VARIABLES = ("ACCELERATE_", "CUDA_VISIBLE_DEVICES", "FSDP_", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_", "TRITON_", "WORLD_SIZE")
"""Beginnings of the environment variables that are shown; none of them holds a secret."""

PINNED_TRY = 1 << 20
GAP = 1e-2
"""Largest difference of a step from plain torch, over its size, that is rounding: fused steps differ by some 1e-5."""

RECIPES = ("peft", "bitsandbytes", "datasets", "trl")
Section = dict[str, Any]


def run(
    json_file: Annotated[str | None, typer.Option("--json", help="Write it as JSON to this file; - prints it instead of the text.")] = None,
) -> None:
    """Tell what matters about this machine: versions, devices, pinning, memory limits, compilers, and which paths are in use and why."""
    report = examine()
    if json_file == "-":
        typer.echo(json.dumps(report, indent=1))
        return
    for title, section in report.items():
        typer.echo(title)
        width = max(map(len, section), default=0)
        for name, value in section.items():
            typer.echo(f"  {name:<{width}}  {value}")
    if json_file is not None:
        with open(json_file, "w", encoding="utf-8") as stream:
            json.dump(report, stream, indent=1)


def examine() -> dict[str, Section]:
    """Every section of the report; values are text, numbers or truth values."""
    import torch

    from .paging.streams import devices

    found = devices()
    report: dict[str, Section] = {
        "flashoptim-hf": {
            "version": _version("flashoptim-hf"),
            "python": f"{platform.python_version()} ({sys.executable})",
            "system": f"{platform.platform()}, {os.cpu_count()} processors, torch uses {torch.get_num_threads()} threads",
        },
        "versions": {name: _version(name) for name in PACKAGES},
        "host memory": _memory(bool(found)),
        "devices": {str(device): _device(device) for device in found} or {"none": "the CPU alone: state is on the host, nothing is moved"},
        "compilers": {name: _tool(name) for name in ("cc", "gcc", "clang", "ptxas", "nvcc")},
        "paths": {**{str(device): _path(device) for device in [*found, torch.device("cpu")]}, "lists of tensors": _lists()},
        "transformers": _registration(),
    }
    shown = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    report["environment"] = shown or {"none": "of " + ", ".join(VARIABLES)}
    report["verdict"] = verdict(report, [str(device) for device in found])
    return report


def verdict(report: dict[str, Section], devices: list[str]) -> Section:
    """Three lines at most: what works here, what to look at, what to do next.

    Args:
        report: the other sections.
        devices: names of the accelerators.
    """
    paths, fits = report["paths"], report["transformers"]
    broken = [name for name, said in paths.items() if "FAILS" in said]
    works = [name for name in [*devices, "cpu"] if name not in broken]
    faults = [f"a step on {name} fails (see paths)" for name in broken]
    faults += [f"{name}: {said.partition(':')[0]} (see transformers)" for name, said in fits.items() if not _whole(said)]
    faults += [
        f"no memory can be pinned for {name}, copies are slower (see devices)" for name in devices if "works" not in report["devices"][name]
    ]
    faults += [f"no Triton: {name} is updated by plain torch" for name in devices if "plain torch: Triton" in paths[name]]
    if "was not built" in paths["cpu"] and not devices:
        faults.append(
            "no compiled path: a C compiler (apt install gcc), then pip install again, makes steps on this CPU tens of times faster"
        )
    absent = [name for name in RECIPES if report["versions"][name] == "absent"]
    found: Section = {"works": "nothing" if not works else f"training on {', '.join(works)}"}
    if works and not devices:
        found["works"] += "; without a GPU that is for small models"
    if faults:
        found["look at"] = "; ".join(faults)
    if broken:
        found["next"] = "report it, with this text"
    elif absent:
        found["next"] = f"pip install 'flashoptim-hf[recipes]' ({', '.join(absent)} absent: the recipes need them)"
    elif devices:
        found["next"] = (
            "flashoptim-hf plan MODEL --gpu 24GiB --ram 64GiB (the sizes are under devices and host memory), then docs/getting-started.md"
        )
    else:
        found["next"] = "make demo; and flashoptim-hf plan MODEL --gpu 24GiB says what a model would take on a GPU"
    return found


def _whole(said: str) -> bool:
    """Whether "5 of 6 ..." tells that all are there."""
    have, _, rest = said.partition(" of ")
    return have == rest.partition(" ")[0]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _memory(pins: bool) -> Section:
    """`pins`: whether there is a device that memory is pinned for."""
    from .paging import host_limits
    from .paging.plan import format_bytes

    memory = host_limits.host_memory()
    return {
        "available": f"{format_bytes(memory.available)} of {format_bytes(memory.total)}, limited by {memory.source}",
        "locked memory": host_limits.locked_text() + ("" if pins else ", which does not matter here: nothing is pinned without a GPU"),
        "processes of this job here": host_limits.local_ranks(),
    }


def _device(device: Any) -> str:
    """Name, memory, and whether host memory can be pinned for it, tried with one MiB."""
    from .paging.plan import format_bytes
    from .paging.streams import backend_for, device_name

    backend = backend_for(device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        backend.host_empty(PINNED_TRY)
    pinning = "works" if backend.pinned else "; ".join(str(warning.message) for warning in said) or "not tried"
    free, total = backend.device_memory() or (0, 0)
    return f"{device_name(device)}, {format_bytes(free)} free of {format_bytes(total)}; pinning: {pinning}"


def _tool(name: str) -> str:
    """A program's place and the first line that says its version."""
    path = shutil.which(name)
    if path is None:
        return "absent"
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}, which does not run: {error}"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    number = next((line for line in lines if "release" in line or "version" in line.lower()), lines[0] if lines else "says nothing")
    return f"{path}: {number.strip()}"


def _path(device: Any) -> str:
    """Which kernel updates parameters on a device, why, and whether a step of it agrees with the plain torch path."""
    from . import _triton
    from .kernels import cpu

    if device.type == "cpu":
        built = cpu.library()
        why = "plain torch: the compiled path was not built"
        if built is not None:
            why = f"compiled C ({built._name.rpartition('/')[2]}) for {cpu.compiled()}; other codecs in plain torch"
    elif _triton.HAS_TRITON:
        why = f"fused Triton kernel, Triton {_triton.triton.__version__}"
    else:
        why = "plain torch: Triton cannot be imported"
    try:
        gap = _step_against_eager(device)
    except Exception as error:
        return f"{why}; a step FAILS: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not gap <= GAP:  # nan is none either
        return f"{why}; a step FAILS: it differs from plain torch by {gap:.1e} of its size"
    return f"{why}; a step differs from plain torch by {gap:.1e} of its size"


def _lists() -> str:
    """How a step asks hundreds of tensors where they lie."""
    from .kernels import cpu, tensors

    reader = tensors.reader()
    if reader is not None:
        return "read by compiled C" + ("" if reader.reads_gradients else ", gradients through Python")
    why = "it was not built" if cpu.where("_tensors") is None else "it does not fit this torch, this Python or this version of the package"
    return f"read through Python, which takes a step over hundreds of tensors some 0.3 ms more: {why}"


def _step_against_eager(device: Any) -> float:
    """Largest difference of one update, from that of the plain torch path, over its size."""
    import torch

    from .optim.adamw import FlashAdamW

    updates = []
    start = torch.linspace(-1, 1, 4096)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kernel in ("auto", "eager"):
            weight = torch.nn.Parameter(start.to(device, copy=True))
            weight.grad = torch.sin(37 * start).to(device)
            FlashAdamW([weight], lr=1e-2, kernel=kernel).step()
            updates.append(weight.detach().cpu() - start)
    return float((updates[0] - updates[1]).abs().max() / updates[1].abs().max())


def _registration() -> Section:
    """Which names transformers knows, and which methods of the Trainer are wrapped for safe checkpoints."""
    from transformers import trainer
    from transformers.training_args import OptimizerNames

    from .trainer import register, saving

    names = register.handlers()
    known = [name for name in names if name in OptimizerNames._value2member_map_]
    served = [name for name in known if _serves(name)]
    wrapped = [name for name in saving.SEAMS if hasattr(getattr(trainer.Trainer, name, None), saving._OURS)]
    return {
        "optimizer names": f"{len(served)} of {len(names)} registered: {', '.join(served)}",
        "safe checkpoints": f"{len(wrapped)} of {len(saving.SEAMS)} methods of Trainer wrapped: {', '.join(wrapped)}",
    }


def _serves(name: str) -> bool:
    """Whether transformers would hand a name to this package."""
    from types import SimpleNamespace

    from transformers.training_args import OptimizerNames

    from .trainer.register import handler_of

    return handler_of(SimpleNamespace(optim=OptimizerNames(name))) is not None
