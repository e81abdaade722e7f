"""What steps moved and launched, and how long they waited for it: counted on the host, timed by the device's own events."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from .streams import Backend, Event


@dataclass
class Traffic:
    """What the last step (or the one that is going on) moved and launched, and what all steps did.

    Attributes:
        bytes_in, bytes_out: bytes that travelled to and from the device; with zero copy, what the kernels read and wrote over the link.
        pages: pages updated.
        launches: launches of the closures that update them.
        hits: pages updated that were on the device already.
        total_...: the same over all steps, and what saving and eviction moved between steps.
        evictions: pages that left the device although they were to stay there, ever.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    pages: int = 0
    launches: int = 0
    hits: int = 0
    steps: int = 0
    total_bytes_in: int = 0
    total_bytes_out: int = 0
    total_pages: int = 0
    total_launches: int = 0
    total_hits: int = 0
    evictions: int = 0
    stepping: bool = False

    def start_step(self) -> None:
        """Count a new step from zero; the totals go on."""
        self.bytes_in = self.bytes_out = self.pages = self.launches = self.hits = 0
        self.steps += 1
        self.stepping = True

    def end_step(self) -> None:
        """What is moved from here on belongs to no step."""
        self.stepping = False

    def copied_in(self, nbytes: int) -> None:
        self.bytes_in += nbytes * self.stepping
        self.total_bytes_in += nbytes

    def copied_out(self, nbytes: int) -> None:
        self.bytes_out += nbytes * self.stepping
        self.total_bytes_out += nbytes

    def launched(self, hit: bool = False) -> None:
        self.pages += 1
        self.launches += 1
        self.hits += hit
        self.total_pages += 1
        self.total_launches += 1
        self.total_hits += hit


Kind = Literal["copy", "wait"]

KEPT = 3
"""Steps whose events are kept until they can be read."""


class Stopwatch:
    """Sums the time of copies, and the time for which kernels waited for copies, of one step.

    The pairs of events of a step are read when a later step begins or somebody asks, and only if all have been reached by then: nobody
    waits for a measurement.

    Attributes:
        seconds: (sum over the copies of the last step that could be read, in both directions; for how long of it the compute stream stood
            still), None before the first.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._running: list[tuple[Kind, Event, Event]] = []
        self._pending: deque[list[tuple[Kind, Event, Event]]] = deque(maxlen=KEPT)
        self.seconds: tuple[float, float] | None = None

    def add(self, kind: Kind, start: Event, stop: Event) -> None:
        """Two events on one stream."""
        self._running.append((kind, start, stop))

    def end_step(self) -> None:
        """The step's pairs are complete. Those of old steps that were not read are dropped."""
        self._pending.append(self._running)
        self._running = []

    def read(self) -> None:
        """Sum the pairs of the last step of which the device has reached all."""
        while self._pending and self._sum(self._pending[0]):
            self._pending.popleft()

    def _sum(self, pairs: list[tuple[Kind, Event, Event]]) -> bool:
        sums: dict[Kind, float] = {"copy": 0.0, "wait": 0.0}
        for kind, start, stop in pairs:
            seconds = self._backend.elapsed(start, stop)
            if seconds is None:
                return False
            sums[kind] += seconds
        self.seconds = sums["copy"], sums["wait"]
        return True


def hidden_share(transfer: float, waited: float) -> float | None:
    """Share of the transfer time during which kernels did not wait for it; None where nothing was moved."""
    return min(1.0, max(0.0, 1 - waited / transfer)) if transfer else None
