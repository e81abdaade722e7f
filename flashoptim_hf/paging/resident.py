"""Pages that stay on the device: brought in once, used in place, written home when somebody needs home to be current or the memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from .plan import format_bytes
from .residency import RESERVE, FixedSet, Residency
from .slots import Mover, Slot
from .store import Page
from .streams import OUT_OF_MEMORY, Backend


class Residents:
    """Carries out what a residency policy decides.

    Home is behind a resident page from its fetch until `write_home`. After that both are current, and whoever writes to home then (a load,
    a reset) is noticed at the next step by the version counters of home's tensors: such pages are dropped and fetched anew.

    Args:
        mover: makes and moves.
        policy: which pages stay.
    """

    def __init__(self, mover: Mover, policy: Residency[Page] | None = None) -> None:
        self._mover = mover
        self._backend: Backend = mover.backend
        self.policy: Residency[Page] = FixedSet() if policy is None else policy
        # a page whose last block is freed goes, and its memory with it
        self._slots: WeakKeyDictionary[Page, Slot] = WeakKeyDictionary()
        self._watched: WeakKeyDictionary[Page, int] = WeakKeyDictionary()
        self._refused = False
        self._cautious = False
        self._warned = False

    # ------------------------------------------------------------------ what is here

    def slot(self, page: Page) -> Slot | None:
        """The page's slot, None for a page that is not resident."""
        return self._slots.get(page)

    @property
    def pages(self) -> Mapping[Page, Slot]:
        """Resident pages in the order in which they came."""
        return dict(self._slots)

    @property
    def state_bytes(self) -> int:
        """Bytes of state that are resident."""
        return sum(page.nbytes for page in self._slots)

    @property
    def device_bytes(self) -> int:
        """Device memory that they take, with the padding between planes."""
        return sum(slot.buffer.numel() for slot in self._slots.values())

    # ------------------------------------------------------------------ in

    def start_step(self) -> bool:
        """Drop what is stale, and what the policy does not want any more; try again to admit what had no room.

        Returns:
            Whether the policy has just decided which pages stay.
        """
        if self._watched:
            self._check_home()
        self._refused = False
        settles = self.policy.unsettled and self._mover.traffic.steps > 1
        if settles:
            memory = self._backend.device_memory()
            free, total = (None, 0) if memory is None else memory
            self.policy.settle(free, total)
        for page in self.pages if self._slots else ():
            if not self.policy.admits(page):
                self.leave(page)
        return settles

    def wanted(self, page: Page) -> bool:
        """Whether the page is to stay, and had room so far."""
        return not self._refused and self.policy.admits(page)

    def admit(self, page: Page, *, replacing: bool = True) -> Slot | None:
        """The slot of a page that is to stay, fetched if it was not there; None where it cannot stay: then it travels like the others.

        Args:
            replacing: other pages may leave for it, if the policy says so.
        """
        if page in self._slots:
            return self._slots[page]
        if not self.wanted(page):
            return None
        if self._cautious and not self.has_room(page.slot_bytes):
            self._refused = True  # asking the device is not free: once a step is enough
            return None
        leaving = self.policy.victims(page)
        if leaving and (not replacing or any(self._slots[other].begun for other in leaving)):
            return None
        for other in leaving:
            self.leave(other)
        try:
            slot = self._mover.slot(page.slot_bytes)
        except OUT_OF_MEMORY:
            self._stop(page.slot_bytes)
            return None
        self._slots[page] = slot
        self.policy.entered(page, page.nbytes)
        self._mover.fetch(page, slot)
        return slot

    def begin(self, page: Page, slot: Slot) -> None:
        """The page is going to be updated."""
        self.policy.touched(page)
        slot.begun = slot.dirty = True
        slot.written = 0

    def has_room(self, nbytes: int) -> bool:
        """Whether the device has so much to spare: what is asked for again after memory ran out or was given back."""
        memory = self._backend.device_memory()
        return memory is None or memory[0] - nbytes >= memory[1] // RESERVE

    def _stop(self, nbytes: int) -> None:
        """The allocator refused: no more pages in this step."""
        self._refused = self._cautious = True
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"device_budget_bytes: the device has no {format_bytes(nbytes)} for one more page of optimizer state; "
                f"{format_bytes(self.state_bytes)} stay on it and the rest travels at each step. Training is right, only slower. Pass a "
                "smaller budget to leave this memory to the model, or 'auto'.",
                RuntimeWarning,
                stacklevel=2,
            )

    # ------------------------------------------------------------------ out

    def leave(self, page: Page) -> None:
        """Write a page home where it is ahead of it, and give its memory back to the allocator."""
        slot = self._slots[page]
        if slot.dirty:
            # kept, since the page stays where it is if a copy fails
            self._mover.write_back(page, slot, arriving=slot.ready is not None or slot.fetched < len(page.views), keep=True)
        del self._slots[page]
        self._watched.pop(page, None)
        self.policy.left(page)
        self._mover.traffic.evictions += 1

    def evict(self, nbytes: int | None) -> int:
        """Let pages go, the latest first, until they have given back `nbytes` (None: all of them); not those whose update is under way.

        Returns:
            Bytes of device memory given back. They are free when the copies of this call are done.
        """
        self._check_home()
        freed = 0
        for page, slot in reversed(list(self.pages.items())):
            if nbytes is not None and freed >= nbytes:
                break
            if not slot.begun:
                self.leave(page)
                freed += slot.buffer.numel()
        self._cautious = self._cautious or freed > 0
        return freed

    def write_home(self) -> None:
        """Queue copies of all pages that are ahead of home; they stay."""
        self._check_home()
        for page, slot in self.pages.items():
            if slot.dirty:
                self._mover.write_back(page, slot, arriving=slot.ready is not None, keep=True)

    def watch_home(self) -> None:
        """Home is current and nothing is under way: remember its versions, to notice whoever writes there before the next step."""
        for page, slot in self.pages.items():
            if not slot.dirty:
                self._watched[page] = _version(page)

    def recover(self) -> None:
        """After a failure: no update is under way, and what was not fetched completely goes home."""
        for page, slot in self.pages.items():
            slot.begun = False
            if slot.fetched < len(page.views):
                self.leave(page)

    def _check_home(self) -> None:
        for page, version in list(self._watched.items()):
            if page in self._slots and _version(page) != version:
                self.leave(page)
        self._watched.clear()


def _version(page: Page) -> int:
    return sum(view._version for view in page.views)
