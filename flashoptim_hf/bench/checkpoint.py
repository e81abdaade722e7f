"""Checkpoint: host memory that saving and loading the optimizer's state takes at its peak, and the size of the file.

    flashoptim-hf bench checkpoint --json checkpoint.json

Saving and loading run in a process each, whose peak of resident memory is set back just before. `save_peak` is what `state_dict()` and
`torch.save` take beyond what the process held: a copy of the state, so the file's size at most. `load_peak` is what `torch.load` and
`load_state_dict` take beyond the live state that they fill, so again the file's size. Both are given in bytes and in sizes of the file.

`device_bytes` is device memory that saving and loading take, measured on the simulated device with a hundredth of the parameters.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..errors import UnsupportedError
from ..optim.adamw import FlashAdamW
from .report import JsonOption, Report, check_outputs, cpu_name, show, table

CASES = {"adamw/log/bf16+24": torch.bfloat16, "adamw/log/fp32": torch.float32}
TENSOR = 4_000_000
"""Elements of one parameter, about those of a linear layer of a small model."""
PAGE = "1MiB"


def run(
    params: Annotated[int, typer.Option(min=1000, help="Parameters of the model.")] = 200_000_000,
    json_file: JsonOption = None,
) -> None:
    """Peak of host memory while the optimizer's state is saved and loaded, size of the file, and device memory (none)."""
    check_outputs(json_file, None)
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(
            f"bench checkpoint reads the peak of memory from /proc, which {sys.platform} does not have. Run it on Linux."
        )
    report = Report("checkpoint", cpu_name())
    with tempfile.TemporaryDirectory() as folder:
        for case, dtype in CASES.items():
            for metric, (value, unit) in measure(params, dtype, Path(folder, "optimizer.pt")).items():
                report.add(case, "ours", metric, value, unit)
    show(table(report.rows, f"Saving and loading the state of {params:,} parameters", down="metric", across="case"))
    if json_file is not None:
        report.write_json(json_file)


def measure(params: int, dtype: torch.dtype, path: Path) -> dict[str, tuple[float, str]]:
    """Metric -> (value, unit). `path`: where the file is written.

    Returns:
        `file_bytes`, `file_bytes_per_param`, the same without corrections, `save_peak` and `load_peak` in bytes and per `file_bytes`, and
        `device_bytes`.
    """
    found = _apart(_save, params, dtype, path) | _apart(_load, params, dtype, path)
    size, corrections = found["file_bytes"], found["correction_bytes"]
    return {
        "file_bytes": (size, "B"),
        "file_bytes_per_param": (size / params, "B"),
        "file_bytes_per_param_without_corrections": ((size - corrections) / params, "B"),
        "save_peak": (found["save_peak"], "B"),
        "load_peak": (found["load_peak"], "B"),
        "save_peak_per_file": (found["save_peak"] / size, "1"),
        "load_peak_per_file": (found["load_peak"] / size, "1"),
        "device_bytes": (_device_bytes(max(params // 100, 1000), dtype), "B"),
    }


def _apart(job: Any, *args: Any) -> dict[str, int]:
    """What `job` returns, run in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        result: dict[str, int] = pool.submit(job, *args).result()
        return result


def _save(params: int, dtype: torch.dtype, path: Path) -> dict[str, int]:
    optimizer = _stepped(_optimizer(params, dtype))
    before = _start_peak()
    torch.save(optimizer.state_dict(), path)
    return {
        "save_peak": _peak() - before,
        "file_bytes": path.stat().st_size,
        "correction_bytes": optimizer.memory_report().correction_bytes,
    }


def _load(params: int, dtype: torch.dtype, path: Path) -> dict[str, int]:
    # the state of one small parameter, so that code and tables that any step loads are there before
    _stepped(_optimizer(1000, dtype))
    optimizer = _optimizer(params, dtype)
    before = _start_peak()
    optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return {"load_peak": _peak() - before - optimizer.memory_report().host_bytes}


def _device_bytes(params: int, dtype: torch.dtype) -> int:
    """Most simulated device memory that saving and loading take beyond what training has taken."""
    optimizer = _stepped(_optimizer(params, dtype, simulate=0, page_bytes=PAGE))
    memories = [engine.backend.memory for engine in optimizer._layout.engines.values()]  # type: ignore[attr-defined]
    before = sum(memory.now for memory in memories)
    for memory in memories:
        memory.peak = memory.now
    optimizer.load_state_dict(optimizer.state_dict())
    return sum(memory.peak for memory in memories) - before


def _optimizer(params: int, dtype: torch.dtype, **options: Any) -> FlashAdamW:
    """A model of tensors of equal size, all ones, and its optimizer without state."""
    sizes = [TENSOR] * (params // TENSOR) + ([params % TENSOR] if params % TENSOR else [])
    return FlashAdamW([torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes], paged=True, **options)


def _stepped(optimizer: FlashAdamW) -> FlashAdamW:
    """Make one step, and free the gradients."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, 1e-2)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _start_peak() -> int:
    """Set the peak back; the bytes resident now."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc keeps freed gradients, and would serve the copy from them unseen
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key + ":"))) * 1024
