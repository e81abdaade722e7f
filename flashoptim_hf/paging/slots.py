"""Device memory for one page, and the copies between it and the page's home."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .store import Page
from .streams import Backend, Event
from .traffic import Kind, Stopwatch, Traffic


@dataclass(eq=False)
class Slot:
    """Device memory for one page.

    Attributes:
        buffer: uint8, carved into the planes of the page that holds the slot.
        free: event after which the slot may be written.
        fetched, written: planes of the current page whose copies in and out have been queued.
        ready: event of the last copy in, until a kernel waits for it.
        dirty: home is behind the slot.
        begun: an update of the page is under way. `dirty` and `begun` are kept for pages that stay.
    """

    buffer: Tensor
    free: Event
    fetched: int = 0
    written: int = 0
    ready: Event | None = None
    dirty: bool = False
    begun: bool = False
    carved: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)

    def views(self, page: Page) -> tuple[Tensor, ...]:
        """The slot as the page's planes: flat, of its dtypes, each at a 256-byte boundary."""
        if page.layout not in self.carved:
            views = [self.buffer.narrow(0, offset, size).view(dtype) for offset, size, dtype in page.layout]
            self.carved[page.layout] = tuple(views)
        return self.carved[page.layout]


class Mover:
    """Queues the copies of pages, with the waits that they need.

    Attributes:
        last_out: event of the last copy to the host.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.traffic = Traffic()
        self.stopwatch = Stopwatch(backend)
        self.last_out: Event | None = None

    def slot(self, nbytes: int) -> Slot:
        """A new slot. What the backend raises is passed on."""
        buffer = self.backend.device_empty(nbytes)
        # the memory may have had another owner, whose work on the compute stream is not done
        return Slot(buffer, free=self.backend.record("compute"))

    def fetch(self, page: Page, slot: Slot) -> None:
        """Bring a page in, when the slot is free and home is current."""
        slot.fetched = slot.written = 0
        slot.ready = None
        slot.dirty = True  # home is not read again before it has been written
        self.backend.wait("in", slot.free)
        self.backend.wait("in", page.written)
        start = self.backend.record("in")
        for home, there in zip(page.views, slot.views(page), strict=True):
            self.backend.copy("in", there, home)
            slot.fetched += 1
            self.traffic.copied_in(home.numel() * home.itemsize)
        slot.ready = page.written = self.backend.record("in")
        self._timed("copy", start, slot.ready)

    def arrive(self, slot: Slot) -> None:
        """Kernels wait for the slot's copy in."""
        if slot.ready is not None:
            before = self.backend.record("compute")
            self.backend.wait("compute", slot.ready)
            self._timed("wait", before, self.backend.record("compute"))
            slot.ready = None

    def write_back(self, page: Page, slot: Slot, *, arriving: bool = False, keep: bool = False) -> None:
        """Send a page home, as far as it was fetched and has not been sent yet.

        Args:
            arriving: its copy in may still be under way.
            keep: the slot's content remains in use.
        """
        if arriving:
            self.backend.wait("out", self.backend.record("in"))
        self.backend.wait("out", self.backend.record("compute"))
        start = self.backend.record("out")
        pairs = list(zip(page.views, slot.views(page), strict=True))
        for home, there in pairs[slot.written : slot.fetched]:
            self.backend.copy("out", home, there, keep=keep)
            slot.written += 1
            self.traffic.copied_out(home.numel() * home.itemsize)
        slot.free = page.written = self.last_out = self.backend.record("out")
        slot.dirty = False
        self._timed("copy", start, slot.free)

    def _timed(self, kind: Kind, start: Event, stop: Event) -> None:
        if self.traffic.stepping:
            self.stopwatch.add(kind, start, stop)
