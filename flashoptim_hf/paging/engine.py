"""For one page: fetch, update, write back. No policy, no allocation of state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import ConfigurationError
from .residency import Ring
from .store import Page
from .streams import Backend, Event

Update = Callable[[Page, tuple[Tensor, ...]], Callable[[], None]]
"""(page, its planes where the kernel must use them) -> what starts the kernel. Called when the page is queued, not when it is there."""


@dataclass
class Traffic:
    """What the last step (or the one that is going on) moved and launched, and what all steps did.

    Attributes:
        bytes_in, bytes_out: bytes queued to and from the device.
        pages: pages updated.
        launches: launches of the closures that update them.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    pages: int = 0
    launches: int = 0
    steps: int = 0
    total_bytes_in: int = 0
    total_bytes_out: int = 0
    total_pages: int = 0
    total_launches: int = 0

    def start_step(self) -> None:
        """Count a new step from zero; the totals go on."""
        self.bytes_in = self.bytes_out = self.pages = self.launches = 0
        self.steps += 1

    def copied_in(self, nbytes: int) -> None:
        self.bytes_in += nbytes
        self.total_bytes_in += nbytes

    def copied_out(self, nbytes: int) -> None:
        self.bytes_out += nbytes
        self.total_bytes_out += nbytes

    def launched(self) -> None:
        self.pages += 1
        self.launches += 1
        self.total_pages += 1
        self.total_launches += 1


@dataclass
class _Slot:
    """Device memory for one page.

    Attributes:
        buffer: uint8, carved into the planes of the page that holds the slot.
        free: event after which the slot may be written.
        fetched, written: planes of the current page whose copies in and out have been queued.
        ready: event of the last copy in.
    """

    buffer: Tensor
    free: Event
    fetched: int = 0
    written: int = 0
    ready: Event | None = None
    carved: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict)

    def views(self, page: Page) -> tuple[Tensor, ...]:
        """The slot as the page's planes: flat, of its dtypes, each at a 256-byte boundary."""
        if page.layout not in self.carved:
            views = [self.buffer.narrow(0, offset, size).view(dtype) for offset, size, dtype in page.layout]
            self.carved[page.layout] = tuple(views)
        return self.carved[page.layout]


class Engine:
    """Moves pages through a few slots of device memory, with copies in both directions behind the kernels.

    `run` does a whole step. `begin`, `finish` and `end_step`, of which it is made, serve steps that are spread over backward. Every wait
    is one that the data needs: a copy in waits for its slot and for the page's last write-back, a kernel for its copy in, a copy out
    for its kernel, and the host only in `synchronize`, `release_staging` and when the slots have to become larger.

    After an exception the next call first writes back the pages that were under way, as far as they had been fetched, so home is whole
    again; what the failed update had already changed stays changed, as it does where kernels work on home memory.

    Args:
        backend: the device.
        prefetch: pages that are fetched ahead of the one that is updated. Two more slots are needed: for that one, and for the one
            before, which is on its way back.

    Raises:
        ConfigurationError: `prefetch` is negative.
    """

    def __init__(self, backend: Backend, *, prefetch: int = 1) -> None:
        if prefetch < 0:
            raise ConfigurationError(f"prefetch={prefetch} must be 0 (copies do not overlap with kernels) or more; 1 is usual.")
        self.backend = backend
        self.prefetch = prefetch
        self.traffic = Traffic()
        self._ring: Ring[Page] = Ring()
        self._slots: list[_Slot] = []
        self._slot_bytes = 0
        self._last_out: Event | None = None
        self._stepping = False
        self._failed = False

    # ------------------------------------------------------------------ a step

    def run(self, pages: Sequence[Page], update: Update) -> None:
        """Update every page, in order, and end the step. Pages may come from several stores.

        Args:
            pages: those that have something to update.
            update: called once for each page; see `Update`.
        """
        try:
            self._start_step()
            self._recover()
            self.reserve(pages)
            for number, page in enumerate(pages):
                views = self.begin(page, pages[number + 1 : number + 1 + self.prefetch])
                with self._guard():
                    closure = update(page, views)
                self.finish(page, closure)
        finally:
            # also after an exception: the user's own work goes on
            self.end_step()

    def reserve(self, pages: Sequence[Page]) -> None:
        """Make the slots that updating these pages needs. `begin` does so too, page by page."""
        staged = [page for page in pages if page.staged]
        if not staged:
            return
        self._fit(max(page.slot_bytes for page in staged))
        while len(self._slots) < min(len(staged), self.prefetch + 2):
            self._add_slot()

    def begin(self, page: Page, ahead: Sequence[Page] = ()) -> tuple[Tensor, ...]:
        """Start to fetch a page, and those ahead.

        Args:
            page: the page to update; it keeps its slot until `finish`.
            ahead: what will be begun next, in order; a hint. They are fetched as far as slots are free.

        Returns:
            the page's planes, where the kernel must use them. What is in them is valid only inside the closure given to `finish`.
        """
        self._recover()
        with self._guard():
            self._start_step()
            if not page.staged:
                return page.views
            if self._ring.slot_of(page) is None:
                self._make_room(page)
                self._fetch(page)
            self._ring.claim(page)
            for following in ahead:
                if following.staged and self._ring.slot_of(following) is None:
                    if following.slot_bytes > self._slot_bytes or not self._ring.has_free:
                        break
                    self._fetch(following)
            return self._slot(page).views(page)

    def finish(self, page: Page, closure: Callable[[], None]) -> None:
        """Launch the update of a page that was begun, and write the page back."""
        with self._guard():
            if page.staged:
                # here and not in `begin`, since the current stream may be another one by now
                self.backend.wait("compute", self._slot(page).ready)
            self.backend.launch(closure)
            self.traffic.launched()
            if page.staged:
                self._write_back(page)

    def _start_step(self) -> None:
        if not self._stepping:
            self._stepping = True
            self.traffic.start_step()

    def end_step(self) -> None:
        """The user's own work goes on after this. The next `begin` starts a new step."""
        self._stepping = False
        self.backend.end_step()

    def synchronize(self) -> None:
        """Wait until home is current for every page. Pages that were begun are sent back as they are."""
        self._recover(everything=True)
        if self._last_out is not None:
            self.backend.wait_host(self._last_out)

    # ------------------------------------------------------------------ staging

    @property
    def staging_bytes(self) -> int:
        """Device memory that the slots take."""
        return sum(slot.buffer.numel() for slot in self._slots)

    def release_staging(self) -> None:
        """Give the slots back, after what is in flight; the next step makes new ones."""
        self.synchronize()
        self._ring.clear()
        self._slots.clear()
        self._slot_bytes = 0

    def _fit(self, nbytes: int) -> None:
        """Make every slot large enough; the number of slots stays."""
        if nbytes <= self._slot_bytes:
            return
        busy = len(list(self._ring.in_use()))
        if busy:
            raise RuntimeError(
                f"a page of {nbytes} bytes needs larger slots while {busy} pages are in use: finish them first, or reserve()."
            )
        count = len(self._slots)
        if count:
            self.release_staging()
        self._slot_bytes = nbytes
        for _ in range(count):
            self._add_slot()

    def _add_slot(self) -> None:
        buffer = self.backend.device_empty(self._slot_bytes)
        # the memory may have had another owner, whose work on the compute stream is not done
        self._slots.append(_Slot(buffer, free=self.backend.record("compute")))
        self._ring.grow()

    def _make_room(self, page: Page) -> None:
        """See to it that a free slot fits the page."""
        self._fit(page.slot_bytes)
        if self._ring.has_free:
            return
        if len(self._slots) < self.prefetch + 2:
            self._add_slot()
            return
        victim = self._ring.victim()
        if victim is None:
            raise RuntimeError(f"all {len(self._slots)} slots hold pages that were begun: finish one, or use a larger prefetch.")
        self._send_back(victim)

    def _slot(self, page: Page) -> _Slot:
        number = self._ring.slot_of(page)
        if number is None:
            raise RuntimeError("this page was not begun, or was sent back since: begin it first.")
        return self._slots[number]

    # ------------------------------------------------------------------ copies

    def _fetch(self, page: Page) -> None:
        slot = self._slots[self._ring.take(page)]
        slot.fetched = slot.written = 0
        self.backend.wait("in", slot.free)
        self.backend.wait("in", page.written)
        for home, there in zip(page.views, slot.views(page), strict=True):
            self.backend.copy("in", there, home)
            slot.fetched += 1
            self.traffic.copied_in(home.numel() * home.itemsize)
        slot.ready = self.backend.record("in")

    def _write_back(self, page: Page) -> None:
        slot = self._slot(page)
        self.backend.wait("out", self.backend.record("compute"))
        pairs = list(zip(page.views, slot.views(page), strict=True))
        for home, there in pairs[slot.written : slot.fetched]:
            self.backend.copy("out", home, there)
            slot.written += 1
            self.traffic.copied_out(home.numel() * home.itemsize)
        slot.free = page.written = self._last_out = self.backend.record("out")
        self._ring.release(page)

    def _send_back(self, page: Page) -> None:
        """Write back a page that was fetched, perhaps not completely, whether or not it was updated."""
        self.backend.wait("out", self.backend.record("in"))
        self._write_back(page)

    # ------------------------------------------------------------------ after a failure

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Remember that something went wrong inside; the exception goes on."""
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def _recover(self, everything: bool = False) -> None:
        """After a failure, or in any case: send back the pages that hold slots. A failure here is tried again at the next call."""
        if not (self._failed or everything):
            return
        for page in self._ring.held():
            self._send_back(page)
        self._failed = False
