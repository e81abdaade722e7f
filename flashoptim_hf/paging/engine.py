"""For one page: fetch, update, write back. No policy, no allocation of state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from ..errors import ConfigurationError
from .residency import Residency
from .resident import Residents
from .slots import Mover, Slot
from .staging import Staging
from .store import Page
from .streams import Backend, Event
from .traffic import Stopwatch, Traffic

Update = Callable[[Page, tuple[Tensor, ...]], Callable[[], None]]
"""(page, its planes where the kernel must use them) -> what starts the kernel. Called when the page is queued, not when it is there."""


class _Failures:
    """Remembers that something went wrong inside a `with`; the exception goes on."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.seen = True


class Engine:
    """Moves pages through a few slots of device memory, with copies in both directions behind the kernels; some stay on the device.

    `run` does a whole step. `begin`, `finish` and `end_step`, of which it is made, serve steps that are spread over backward. Every wait
    is one that the data needs: a copy in waits for its slot and for the page's last copy, a kernel for its copy in, a copy out for its
    kernel, and the host only in `synchronize`, `evict`, `release_staging`, and where slots have to become larger or memory runs out.

    After an exception the next call first writes back the pages that were under way, as far as they had been fetched, so home is whole
    again; what the failed update had already changed stays changed, as it does where kernels work on home memory.

    Where the device has no memory for all slots, fewer serve: one is enough, without overlap. Where there is not even one, resident pages
    leave for it.

    Args:
        backend: the device.
        prefetch: pages that are fetched ahead of the one that is updated. Two more slots are needed: for that one, and for the one
            before, which is on its way back.
        residency: which pages stay on the device; None: none.
        zero_copy: kernels read and write home memory in place, over the link, instead of having it copied.

    Raises:
        ConfigurationError: `prefetch` is negative.
    """

    def __init__(self, backend: Backend, *, prefetch: int = 1, residency: Residency[Page] | None = None, zero_copy: bool = False) -> None:
        if prefetch < 0:
            raise ConfigurationError(f"prefetch={prefetch} must be 0 (copies do not overlap with kernels) or more; 1 is usual.")
        self.backend = backend
        self.prefetch = prefetch
        self.zero_copy = zero_copy
        self._mover = Mover(backend)
        self._residents = Residents(self._mover, residency)
        self._staging = Staging(self._mover, prefetch, self.evict, self._wait_for_home)
        self._reached: WeakKeyDictionary[Page, tuple[Tensor, ...]] = WeakKeyDictionary()
        self._in_place: set[Page] = set()
        self._offered: list[Page] = []
        self._regrouped = False
        self._last_in_place: Event | None = None
        self._failures = _Failures()

    @property
    def traffic(self) -> Traffic:
        """What steps moved."""
        return self._mover.traffic

    @property
    def stopwatch(self) -> Stopwatch:
        """How long it took."""
        return self._mover.stopwatch

    # ------------------------------------------------------------------ a step

    def offer(self, pages: Sequence[Page]) -> None:
        """Say which pages exist: of these some stay. Call again when pages come or go; pages that were never offered do not stay.

        Raises:
            UnsupportedError: zero copy, and the device cannot reach their home.
        """
        staged = [page for page in pages if page.staged]
        if staged == self._offered:
            return
        self._residents.policy.offer({page: page.nbytes for page in staged}, {page: page.slot_bytes for page in staged})
        self._regrouped = True
        if self.zero_copy:
            for page in staged:
                self._reach(page)
        self._offered = staged

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
            if not any(page.staged or page.files is not None for page in pages):
                with self._failures:
                    if self.backend.device.type == "cpu":
                        # after a kernel the caches are full of what it worked on, so that all that is Python comes before the first
                        for page, closure in [(page, update(page, page.views)) for page in pages]:
                            self._launch(page, closure)
                        return
                    for page in pages:
                        self._launch(page, update(page, page.views))
                return
            coming = [number for number, page in enumerate(pages) if self.has_to_come(page)]
            passed = 0
            for page in pages[: self.prefetch + 1]:
                page.read_ahead()
            for number, page in enumerate(pages):
                for following in pages[number + self.prefetch + 1 : number + self.prefetch + 2]:
                    following.read_ahead()
                while passed < len(coming) and coming[passed] <= number:
                    passed += 1
                views = self.begin(page, [pages[i] for i in coming[passed : passed + self.prefetch]])
                with self._failures:
                    closure = update(page, views)
                self.finish(page, closure)
        finally:
            # also after an exception: the user's own work goes on
            self.end_step()

    def reserve(self, pages: Sequence[Page]) -> None:
        """Take the device memory that updating these pages needs: afterwards nothing runs out half-way. `begin` does so page by page."""
        if self._regrouped and not any(self._staging.ring.in_use()):
            self._regrouped = False
            if self._staging.slots:
                self._staging.release()  # other pages may need them now, or none
        if not any(page.staged for page in pages):
            return
        with self._failures:
            if through := [page.slot_bytes for page in pages if page.bounced]:
                self._mover.bounce.reserve(max(through))
            for page in pages:
                if page.staged and self._staging.slot(page) is None:
                    self._residents.admit(page, replacing=False)
        streamed: list[Page] = []
        while len(now := [page for page in pages if self._streams(page)]) > len(streamed):
            streamed = now
            self._staging.reserve(streamed)  # for which residents may have to leave, which then travel too

    def begin(self, page: Page, ahead: Sequence[Page] = ()) -> tuple[Tensor, ...]:
        """Start to fetch a page, and those ahead.

        Args:
            page: the page to update; it keeps its slot until `finish`.
            ahead: what will be begun next, in order; a hint. They are fetched as far as slots are free.

        Returns:
            the page's planes, where the kernel must use them. What is in them is valid only inside the closure given to `finish`.
        """
        self._recover()
        with self._failures:
            self._start_step()
            views = self._bring(page)
            for following in ahead:
                if not self.has_to_come(following) or self._residents.admit(following) is not None or self.zero_copy:
                    continue
                if following.slot_bytes > self._staging.slot_bytes or not self._staging.ring.has_free:
                    break
                self._staging.fetch(following)
            return views

    def finish(self, page: Page, closure: Callable[[], None]) -> None:
        """Launch the update of a page that was begun, and write the page back unless it stays."""
        with self._failures:
            resident = self._residents.slot(page)
            if not page.staged:
                self._launch(page, closure)
                page.write_behind()
            elif page in self._in_place:
                self._in_place.discard(page)
                self._launch(page, closure, linked=True)
                self.traffic.copied_in(page.nbytes)
                self.traffic.copied_out(page.nbytes)
                page.written = self._last_in_place = self.backend.record("compute")
            else:
                slot = self._slot(page)
                hit = resident is not None and slot.ready is None
                # here and not in `begin`, since the current stream may be another one by now
                self._mover.arrive(slot)
                self._launch(page, closure, hit=hit)
                if resident is None:
                    self._staging.write_back(page)
                else:
                    slot.begun = False

    def _launch(self, page: Page, closure: Callable[[], None], *, hit: bool = False, linked: bool = False) -> None:
        self.backend.launch(closure, nbytes=page.nbytes, linked=linked)
        self.traffic.launched(hit)

    def _start_step(self) -> None:
        if not self.traffic.stepping:
            self.stopwatch.read()
            self.traffic.start_step()
            with self._failures:
                self._regrouped |= self._residents.start_step()
                if self._staging.most < self._staging.wanted and self._residents.has_room(self._staging.slot_bytes):
                    self._staging.most = self._staging.wanted

    def end_step(self) -> None:
        """The user's own work goes on after this. The next `begin` starts a new step."""
        if self.traffic.stepping:
            self.traffic.end_step()
            self.stopwatch.end_step()
        self.backend.end_step()

    def synchronize(self) -> None:
        """Wait until home is current for every page. Pages that were begun are sent back as they are; residents stay.

        What is written to home after this and before the next step counts: residents are then fetched anew.
        """
        self._recover(everything=True)
        with self._failures:
            self._residents.write_home()
        self._wait_for_home()
        self._residents.watch_home()

    def _wait_for_home(self) -> None:
        for event in (self._mover.last_out, self._last_in_place):
            if event is not None:
                self.backend.wait_host(event)
        self._mover.bounce.land()

    # ------------------------------------------------------------------ where a page is

    def _streams(self, page: Page) -> bool:
        """Whether the page travels through a slot when it is next begun, unless another leaves for it."""
        return page.staged and self._residents.slot(page) is None and not self.zero_copy

    def has_to_come(self, page: Page) -> bool:
        """Whether the page has to be copied before it can be begun."""
        if not page.staged or self._residents.slot(page) is not None or self._staging.slot(page) is not None:
            return False
        return not self.zero_copy or self._residents.wanted(page)

    def _bring(self, page: Page) -> tuple[Tensor, ...]:
        """See to it that the page's planes are where a kernel can use them, or on the way there."""
        if not page.staged:
            return page.views
        if self._staging.slot(page) is None:
            resident = self._residents.admit(page)
            if resident is not None:
                self._residents.begin(page, resident)
                return resident.views(page)
            if self.zero_copy:
                self._in_place.add(page)
                self.backend.wait("compute", page.written)
                return self._reach(page)
            self._staging.make_room(page)
            self._staging.fetch(page)
        self._staging.ring.claim(page)
        return self._slot(page).views(page)

    def _reach(self, page: Page) -> tuple[Tensor, ...]:
        if page not in self._reached:
            self._reached[page] = tuple(self.backend.reach(view) for view in page.views)
        return self._reached[page]

    def _slot(self, page: Page) -> Slot:
        resident = self._residents.slot(page)
        if resident is not None and resident.begun:
            return resident
        slot = self._staging.slot(page)
        if slot is None:
            raise RuntimeError("this page was not begun, or was sent back since: begin it first.")
        return slot

    # ------------------------------------------------------------------ memory

    @property
    def staging_bytes(self) -> int:
        """Device memory that the slots take."""
        return self._staging.nbytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of state that stay on the device."""
        return self._residents.state_bytes

    @property
    def bounce_bytes(self) -> int:
        """Host memory for pages on their way from and to files."""
        return self._mover.bounce.nbytes

    @property
    def device_bytes(self) -> int:
        """Device memory that slots and resident pages take."""
        return self.staging_bytes + self._residents.device_bytes

    def evict(self, nbytes: int | None = None) -> int:
        """Write resident pages home and give their memory back to the device, at any time; pages being updated stay.

        They come back one by one when the device has memory to spare again, at the price of nothing: a page that travels anyway stays.

        Args:
            nbytes: give back at least so much, as far as there is; None: all.

        Returns:
            Bytes of device memory given back.
        """
        self._recover()
        with self._failures:
            freed = self._residents.evict(nbytes)
        if freed:
            self._wait_for_home()
            self.backend.trim_device()
        if not self.traffic.stepping:
            self._residents.watch_home()
        return freed

    def trim(self) -> int:
        """Give back all device memory, staging too; the next step takes what it needs. Returns the bytes."""
        freed = self.device_bytes
        self._recover(everything=True)
        with self._failures:
            self._residents.evict(None)
        self.release_staging()
        self.backend.trim_device()
        return freed - self.device_bytes

    def release_staging(self) -> None:
        """Give the slots back, after what is in flight; the next step makes new ones."""
        self._recover(everything=True)
        self._staging.release()
        self._mover.bounce.clear()

    # ------------------------------------------------------------------ after a failure

    def _recover(self, everything: bool = False) -> None:
        """After a failure, or in any case: send back the pages that hold slots. A failure here is tried again at the next call."""
        if not (self._failures.seen or everything):
            return
        self._staging.send_all_back()
        self._in_place.clear()
        self._residents.recover()
        self._failures.seen = False
