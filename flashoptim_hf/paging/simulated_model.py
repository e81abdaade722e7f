"""What the simulated device costs in time, and where it is made to fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

Fault = Literal["allocate", "copy", "launch", "pin", "host"]
"""Device memory, a copy, a kernel launch, page-locked memory, ordinary host memory."""


@dataclass(frozen=True)
class Speeds:
    """A machine as numbers: bytes per second, and seconds for each call whatever its size. The default is PCIe 4 x16 with a large GPU.

    Attributes:
        link_in, link_out: host to device and back; both directions at once.
        copy_latency: of each copy, on its stream.
        memory: of device memory, for kernels, which read and write each byte of state.
        launch_latency: of each kernel, on the compute stream.
        call: host time for each thing that is queued.
        host: copies between two places in host memory.
    """

    link_in: float = 25e9
    link_out: float = 25e9
    copy_latency: float = 8e-6
    memory: float = 2e12
    launch_latency: float = 5e-6
    call: float = 4e-6
    host: float = 8e9

    def copy_seconds(self, nbytes: int, into: bool) -> float:
        """One copy."""
        return self.copy_latency + nbytes / (self.link_in if into else self.link_out)

    def kernel_seconds(self, nbytes: int, linked: bool) -> float:
        """One kernel that reads and writes `nbytes` of state, in device memory or over the link."""
        slowest = max(nbytes / self.link_in, nbytes / self.link_out) if linked else 2 * nbytes / self.memory
        return self.launch_latency + slowest


class InjectedError(RuntimeError):
    """A failure that a test asked for."""


@dataclass
class _Order:
    """Calls `at` to `at + times - 1`, counted from when `step` begins."""

    at: int
    times: int
    step: int
    seen: int = 0


@dataclass
class Faults:
    """Failures to come, by kind."""

    orders: dict[str, list[_Order]] = field(default_factory=dict)

    def add(self, what: Fault, at: int, times: int, step: int) -> None:
        """See `SimulatedBackend.fail`."""
        self.orders.setdefault(what, []).append(_Order(at, times, step))

    def hit(self, what: Fault, step: int) -> None:
        """Count a call, and fail it if that was asked for.

        Raises:
            torch.OutOfMemoryError: device memory.
            InjectedError: everything else.
        """
        failing = False
        for order in self.orders.get(what, ()):
            if step >= order.step:
                order.seen += 1
                failing = failing or order.at <= order.seen < order.at + order.times
        if failing and what == "allocate":
            raise torch.OutOfMemoryError("simulated device: out of memory, as asked for")
        if failing:
            raise InjectedError(f"simulated device: {what} failed, as asked for")
