"""Pinned buffers through which pages travel whose home the device cannot reach: files mapped into memory.

A device copies from and to such memory only while the host waits. So the host copies a page into a pinned buffer before the copy in is
queued, and a copy out goes into a pinned buffer, from where the host brings it home when its buffer is needed again, when the page is, or
when home has to be current. By then the copy is long done, and nobody waits.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from .store import Page
from .streams import Backend, Event, Stream

BUFFERS = 2
"""In each direction: one that the device copies, and one that the host does."""


@dataclass(eq=False)
class Passage:
    """A page in a pinned buffer.

    Attributes:
        page: which; a page that is freed goes, and its memory with it.
        buffer: uint8, as large as a staging slot at least.
        views: the buffer as the page's planes.
        event: when the device is done with the buffer; None: its last copy was not queued completely, and nobody knows.
        coming: planes that have been sent here and are not home yet.
    """

    page: weakref.ref[Page]
    buffer: Tensor
    views: tuple[Tensor, ...]
    event: Event | None = None
    coming: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, page: Page, buffer: Tensor) -> Passage:
        views = tuple(buffer.narrow(0, offset, size).view(dtype) for offset, size, dtype in page.layout)
        return cls(weakref.ref(page), buffer, views)


class Bounce:
    """A few pinned buffers, made when they are first needed: bounded, whatever the size of the model."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._loads: deque[Passage] = deque()
        self._landings: deque[Passage] = deque()
        self._spare: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Host memory that the buffers take."""
        buffers = [*self._spare, *(passage.buffer for passage in (*self._loads, *self._landings))]
        return sum(buffer.numel() for buffer in buffers)

    def reserve(self, nbytes: int) -> None:
        """Take the memory that pages of up to so many bytes need, so that it does not run out half-way.

        Raises:
            HostMemoryError: it cannot be had.
        """
        passages = (*self._loads, *self._landings)
        if any(buffer.numel() < nbytes for buffer in (*self._spare, *(passage.buffer for passage in passages))):
            self.clear()
        missing = 2 * BUFFERS - len(self._spare) - len(self._loads) - len(self._landings)
        self._spare += [self._backend.host_empty(nbytes) for _ in range(missing)]

    def load(self, page: Page) -> Passage:
        """Copy a page into the next buffer. Whoever queues copies from there sets `event`."""
        self._land_page(page)
        passage = self._take(self._loads, page, "in")
        for home, there in zip(page.views, passage.views, strict=True):
            self._backend.host_copy(there, home)
        return passage

    def unload(self, page: Page) -> Passage:
        """A buffer for a page on its way home. Whoever queues copies to it says which planes are coming, and sets `event`."""
        return self._take(self._landings, page, "out")

    def land(self) -> None:
        """Wait until all that is under way is home."""
        for passage in self._landings:
            self._land(passage)

    def clear(self) -> None:
        """Give the buffers back, after what is under way."""
        self.land()
        for passage in self._loads:
            self._wait(passage, "in")
        self._loads.clear()
        self._landings.clear()
        self._spare.clear()

    def _land_page(self, page: Page) -> None:
        """Bring home what is under way of one page, oldest first."""
        for passage in self._landings:
            if passage.page() is page:
                self._land(passage)

    def _take(self, passages: deque[Passage], page: Page, stream: Stream) -> Passage:
        """The buffer that was taken longest ago, when nobody uses it any more."""
        buffer: Tensor | None = None
        if len(passages) == BUFFERS:
            oldest = passages[0]
            if stream == "out":
                self._land(oldest)
            else:
                self._wait(oldest, stream)
            buffer = passages.popleft().buffer
        elif self._spare:
            buffer = self._spare.pop()
        if buffer is None or buffer.numel() < page.slot_bytes:
            buffer = self._backend.host_empty(page.slot_bytes)
        passages.append(Passage.of(page, buffer))
        return passages[-1]

    def _land(self, passage: Passage) -> None:
        if not passage.coming:
            return
        self._wait(passage, "out")
        page = passage.page()
        if page is not None:
            for i in passage.coming:
                self._backend.host_copy(page.views[i], passage.views[i])
            page.write_behind()
        passage.coming.clear()

    def _wait(self, passage: Passage, stream: Stream) -> None:
        self._backend.wait_host(self._backend.record(stream) if passage.event is None else passage.event)
