"""Device memory for one page, and the copies between it and the page's home."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .bounce import Bounce
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
        self.bounce = Bounce(backend)

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
        load = self.bounce.load(page) if page.bounced else None
        start = self.backend.record("in")
        sources = page.views if load is None else load.views
        for home, source, there in zip(page.views, sources, slot.views(page), strict=True):
            self.backend.copy("in", there, source)
            slot.fetched += 1
            self.traffic.copied_in(home.numel() * home.itemsize)
            if load is not None:
                self.backend.leave_stale(home)
        slot.ready = self.backend.record("in")
        if load is not None:
            load.event = slot.ready
        else:
            page.written = slot.ready
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
        landing = self.bounce.unload(page) if page.bounced else None
        start = self.backend.record("out")
        targets = page.views if landing is None else landing.views
        for i, (target, there) in list(enumerate(zip(targets, slot.views(page), strict=True)))[slot.written : slot.fetched]:
            self.backend.copy("out", target, there, keep=keep)
            slot.written += 1
            self.traffic.copied_out(there.numel() * there.itemsize)
            if landing is not None:
                landing.coming.append(i)
        slot.free = self.last_out = self.backend.record("out")
        if landing is not None:
            landing.event = slot.free
        else:
            page.written = slot.free
        slot.dirty = False
        self._timed("copy", start, slot.free)

    def _timed(self, kind: Kind, start: Event, stop: Event) -> None:
        if self.traffic.stepping:
            self.stopwatch.add(kind, start, stop)
