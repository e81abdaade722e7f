"""What the sections of the GPU bench run on: a GPU, or for a dry run the CPU, with its clock, its time limits and its report."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import HostMemoryError, UnsupportedError
from ..optim.adamw import FlashAdamW
from . import adamw_peers
from .report import Report, Row, cpu_name

KINDS = ("cuda", "xpu")
"""Device types to look for; AMD's GPUs go by the first name too."""
SEED = 7
"""Of the simulated device, in a dry run."""
CPU_PEERS = ("torch_fused", "bitsandbytes")
"""Subjects that a dry run steps: they take CPU tensors, and do not take long."""
DRY_REPEATS = 3
HOST_CALLS = 5
"""Calls that the host's time is taken from."""
SPACER, SPACER_MOST = 4096, 400
"""Order of the matrices that keep the device busy between calls, and most products at a time."""
LEAST_SECONDS = 5.0
"""A section does not begin another subject with less time than this left."""
COMPILE_SECONDS = 60.0
"""torchao compiles its step when it first runs."""


class OutOfTime(Exception):
    """A section's time is over; what it has measured stays."""


@dataclass
class GpuReport(Report):
    """A report with remarks: what was left out, scaled down or failed, and why. In JSON, `notes`.

    Attributes:
        notes: sentences.
    """

    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # commit, versions and date, worked out once: the report is written after every row
        self._head = super().to_dict()

    def to_dict(self) -> dict[str, Any]:
        return self._head | {"rows": [row.to_dict() for row in self.rows], "notes": self.notes}


class Machine:
    """The device and everything that a section needs to measure on it.

    Args:
        minutes: time for all sections together.
        dry: run on the CPU with tiny shapes; paged state uses the simulated device.
        json_file: where the report goes, after each result.

    Attributes:
        device: where parameters are.
        api: torch's module of this device type; None in a dry run.
        report: the rows so far.
        failures: what is wrong, in sentences. The bench ends with an error when there is one.

    Raises:
        UnsupportedError: there is no GPU, and it is not a dry run.
    """

    def __init__(self, minutes: float, *, dry: bool, json_file: Path | None = None) -> None:
        self.dry = dry
        self.api: Any = None
        self.device = torch.device("cpu")
        if not dry:
            self.api, self.device = _find()
        name = f"dry run on {cpu_name()}" if self.api is None else self.api.get_device_name(self.device)
        self.report = GpuReport("gpu", name)
        self.failures: list[str] = []
        self._json_file = json_file
        self._missing: set[str] = set()
        self._end = time.monotonic() + 60 * minutes
        self._section_end = self._end
        self._ballast: torch.Tensor | None = None

    # ------------------------------------------------------------------ time

    def limit_section(self, seconds: float) -> None:
        """From now on, this is the section's time; never more than what is left of the whole."""
        self._section_end = min(self._end, time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds that the section has left."""
        return self._section_end - time.monotonic()

    def whole_left(self) -> float:
        """Seconds that all sections together have left."""
        return self._end - time.monotonic()

    def need(self, what: str, seconds: float = LEAST_SECONDS) -> None:
        """Go on only while there is time.

        Raises:
            OutOfTime: less than `seconds` are left in this section; `what`, and all that follows in it, is noted as left out.
        """
        if self.left() < seconds and not self.dry:
            raise OutOfTime(f"no time was left for {what} and what comes after it in its section.")

    def time_ms(self, function: Callable[[], object], repeats: int, *, apart: bool = False) -> tuple[list[float], float]:
        """Time calls, after a warm-up, by the device's clock and by the host's.

        Args:
            function: what queues work on the current stream.
            repeats: how many calls; fewer where the section's time is short.
            apart: keep the device busy with something else between the calls, as a training run does, so that it never waits for the host
                and the host never for the last call. Default False: calls are back to back, and what Python takes can show.

        Returns:
            milliseconds of each call on the device, and the host's median milliseconds to queue a call while the device is idle.
        """
        function()
        self.synchronize()
        host = [self._host_ms(function) for _ in range(HOST_CALLS)]
        spacer = self._spacer(max(host)) if apart and self.api is not None else None
        repeats = max(1, min(DRY_REPEATS if self.dry else repeats, int(0.3e3 * self.left() / max(*host, 1e-3))))
        marks = []
        for _ in range(repeats):
            if spacer is not None:
                spacer()
            start = self._mark()
            function()
            marks.append((start, self._mark()))
        self.synchronize()
        return [_between(start, end) for start, end in marks], statistics.median(host)

    def _host_ms(self, function: Callable[[], object]) -> float:
        """Milliseconds until a call returns."""
        start = time.perf_counter()
        function()
        end = time.perf_counter()
        self.synchronize()
        return (end - start) * 1e3

    def _spacer(self, host_ms: float) -> Callable[[], None]:
        """A function that queues matrix products for twice `host_ms`."""
        factor = torch.randn(SPACER, SPACER, device=self.device, dtype=torch.bfloat16)
        product = torch.empty_like(factor)

        def multiply(times: int) -> None:
            for _ in range(times):
                torch.mm(factor, factor, out=product)

        multiply(4)
        start = self._mark()
        multiply(16)
        end = self._mark()
        self.synchronize()
        times = min(SPACER_MOST, 4 + int(2 * host_ms / (_between(start, end) / 16)))
        return lambda: multiply(times)

    def _mark(self) -> Any:
        """A point in the current stream, or in time where there is no device."""
        if self.api is None:
            return time.perf_counter()
        event = self.api.Event(enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.api is not None:
            self.api.synchronize(self.device)

    # ------------------------------------------------------------------ memory

    def free(self) -> None:
        """Let go of device memory that nobody refers to any more."""
        if self.api is not None:
            gc.collect()
            self.api.empty_cache()

    def free_bytes(self) -> int:
        """Device memory that is free now; in a dry run, none is counted and a token amount is given."""
        return 1 << 30 if self.api is None else int(self.api.mem_get_info(self.device)[0])

    @contextmanager
    def capped(self, nbytes: int) -> Iterator[None]:
        """Leave only so much device memory. A tensor takes the rest, so that unified memory, which no allocator counts, is short too."""
        self.free()
        if self.api is not None and self.free_bytes() > nbytes:
            self._ballast = torch.empty(self.free_bytes() - nbytes, dtype=torch.uint8, device=self.device)
        try:
            yield
        finally:
            self._ballast = None
            self.free()

    def start_peak(self) -> None:
        """Count the peak of device memory from here."""
        if self.api is not None:
            self.api.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        """The peak since `start_peak`, what `capped` takes left out; 0 in a dry run."""
        ballast = 0 if self._ballast is None else self._ballast.numel()
        return 0 if self.api is None else int(self.api.max_memory_allocated(self.device)) - ballast

    # ------------------------------------------------------------------ subjects

    def ours(self, params: Sequence[torch.nn.Parameter], **options: Any) -> FlashAdamW:
        """Our AdamW. On a GPU it has the fused kernel or none; in a dry run, paged state goes through the simulated device."""
        if not self.dry:
            options = {"kernel": "fused"} | options
        elif options.get("paged"):
            options["simulate"] = SEED
        return FlashAdamW(params, **options)

    def peers(self, *wanted: str) -> list[str]:
        """Those of the wanted subjects that can run here; a missing package is noted once."""
        present, missing = adamw_peers.available(wanted)
        for package in sorted(set(missing) - self._missing):
            self.note(f"{package} is not installed and was left out.")
        self._missing |= set(missing)
        return [name for name in present if not self.dry or name in CPU_PEERS]

    def make(self, subject: str, params: Sequence[torch.nn.Parameter], **options: Any) -> Optimizer:
        """The optimizer of a subject: a peer's name, or "ours" and "ours_paged", which take options."""
        if subject.startswith("ours"):
            return self.ours(params, paged=subject == "ours_paged", **options)
        if subject == "torchao":
            self.need("torchao", COMPILE_SECONDS)
        return adamw_peers.PEERS[subject](params)

    # ------------------------------------------------------------------ results

    def timing(self, case: str, subject: str, metric: str, samples: Sequence[float], unit: str = "ms") -> None:
        """Add a row with median and percentiles, and save."""
        self.report.rows.append(Row.timing(case, subject, metric, samples, unit))
        self.save()

    def add(self, case: str, subject: str, metric: str, value: float, unit: str = "1") -> None:
        """Add a row, and save."""
        self.report.add(case, subject, metric, value, unit)
        self.save()

    def check(self, case: str, what: str, passed: bool) -> None:
        """Add a row with 1 or 0; 0 is a failure of the whole bench."""
        self.add(case, "ours", what, float(passed))
        if not passed:
            self.fail(f"{case}: {what} is not so.")

    def fail(self, text: str) -> None:
        """Note a failure."""
        self.failures.append(text)
        self.note(text)

    def note(self, text: str) -> None:
        """Note a sentence, and save."""
        self.report.notes.append(text)
        self.save()

    def save(self) -> None:
        """Write the report as it is now; the file is whole at any moment."""
        if self._json_file is not None:
            self.report.write_json(self._json_file)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether device or host memory ran out; not every library has a class for it."""
    return isinstance(error, torch.OutOfMemoryError | HostMemoryError) or "out of memory" in str(error).lower()


def _between(start: Any, end: Any) -> float:
    """Milliseconds between two marks."""
    return (end - start) * 1e3 if isinstance(start, float) else float(start.elapsed_time(end))


def _find() -> tuple[Any, torch.device]:
    for kind in KINDS:
        api = torch.get_device_module(kind)
        if api.is_available():
            return api, torch.device(kind, api.current_device())
    raise UnsupportedError("this bench needs a GPU that torch can use, and there is none. --dry-run runs every section on the CPU.")
