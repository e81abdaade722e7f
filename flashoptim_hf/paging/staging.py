"""A few slots of device memory through which pages travel: bounded, whatever the size of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import DeviceMemoryError
from .plan import format_bytes
from .residency import Ring
from .slots import Mover, Slot
from .store import Page
from .streams import OUT_OF_MEMORY


class Staging:
    """Slots of one size, given away in turn.

    Where the device has no memory for all of them, fewer serve; one is enough, without overlap.

    Args:
        mover: makes slots and moves pages.
        prefetch: pages that are fetched ahead. Two more slots are used: for the page that is updated, and for the one on its way back.
        evict: (bytes) -> makes other pages give back device memory; returns how much it was.
        settle: waits for all copies in flight.
    """

    def __init__(self, mover: Mover, prefetch: int, evict: Callable[[int], int], settle: Callable[[], None]) -> None:
        self._mover = mover
        self._evict = evict
        self._settle = settle
        self.wanted = self.most = prefetch + 2
        self.ring: Ring[Page] = Ring()
        self.slots: list[Slot] = []
        self.slot_bytes = 0

    @property
    def nbytes(self) -> int:
        """Device memory that the slots take."""
        return sum(slot.buffer.numel() for slot in self.slots)

    def slot(self, page: Page) -> Slot | None:
        """The slot that the page holds."""
        number = self.ring.slot_of(page)
        return None if number is None else self.slots[number]

    def reserve(self, pages: Sequence[Page]) -> None:
        """Make the slots that these pages need when they are updated one after the other."""
        self.fit(max(page.slot_bytes for page in pages))
        while len(self.slots) < min(len(pages), self.most):
            self.add()

    def fetch(self, page: Page) -> None:
        """Fetch the page into the next free slot."""
        self._mover.fetch(page, self.slots[self.ring.take(page)])

    def write_back(self, page: Page, *, arriving: bool = False) -> None:
        """Write a page home and give its slot to others. `arriving`: it may not be here completely, and need not have been updated."""
        slot = self.slot(page)
        assert slot is not None
        self._mover.write_back(page, slot, arriving=arriving)
        self.ring.release(page)

    def send_all_back(self) -> None:
        """Write every page home that holds a slot."""
        for page in self.ring.held():
            self.write_back(page, arriving=True)

    def make_room(self, page: Page) -> None:
        """See to it that a free slot fits the page."""
        self.fit(page.slot_bytes)
        if not self.ring.has_free and len(self.slots) < self.most:
            self.add()
        if self.ring.has_free:
            return
        victim = self.ring.victim()
        if victim is None:
            raise RuntimeError(f"all {len(self.slots)} slots hold pages that were begun: finish one, or use a larger prefetch.")
        self.write_back(victim, arriving=True)

    def fit(self, nbytes: int) -> None:
        """Make every slot large enough; the number of slots stays."""
        if nbytes <= self.slot_bytes:
            return
        busy = len(list(self.ring.in_use()))
        if busy:
            raise RuntimeError(
                f"a page of {nbytes} bytes needs larger slots while {busy} pages are in use: finish them first, or reserve()."
            )
        count = len(self.slots)
        if count:
            self.release()
        self.slot_bytes = nbytes
        while len(self.slots) < min(count, self.most):
            self.add()

    def add(self) -> None:
        """One more slot, or the knowledge that those that are there have to do.

        Raises:
            DeviceMemoryError: there is none, and no memory for one.
        """
        while True:
            try:
                slot = self._mover.slot(self.slot_bytes)
            except OUT_OF_MEMORY as error:
                if self.slots:
                    self.most = len(self.slots)
                    return
                if not self._evict(self.slot_bytes):
                    raise DeviceMemoryError(
                        f"the device is out of memory. Updating paged optimizer state needs room for one page there, "
                        f"{format_bytes(self.slot_bytes)}, and no other page is left to make room ({error}). The state is whole, and the "
                        "step can be repeated. Pass a smaller page_bytes, or free device memory (a smaller batch, gradient checkpointing)."
                    ) from error
            else:
                self.slots.append(slot)
                self.ring.grow()
                return

    def release(self) -> None:
        """Give the slots back, after what is in flight."""
        self.send_all_back()
        self._settle()
        self.ring.clear()
        self.slots.clear()
        self.slot_bytes = 0
        self.most = self.wanted
