"""Which pages stay on the device, which page sits in which staging slot, and what leaves next. Pure Python: pages and slots are only names.

A step visits its pages in the same order every time. For such a cyclic scan "least recently used" is the worst choice: whatever it keeps is
gone before it is asked for again, so all state travels in both directions as long as one page does not fit. A fixed set of pages never
leaves, and a step moves exactly 2 (S - B) bytes, S being all state and B the part that stays. No policy does better, since what is not on
the device at the start of a step has to come, and what is changed elsewhere has to go.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping
from fractions import Fraction
from typing import Generic, Protocol, TypeVar

from ..errors import ConfigurationError
from .plan import parse_bytes

P = TypeVar("P", bound=Hashable)
"""A page."""

Budget = int | float | str
"""Device memory for pages that stay: bytes, a share of the state (0 < share <= 1, a float), or "auto"."""

RESERVE = 16
"""One part in so many of the device's memory stays free when pages are admitted by what is free."""

IN_FLIGHT = 8 * 2**20
"""Bytes that have to be under way to keep the link busy: what 64 GB/s move in the 0.13 ms that a page waits for host, launch and kernel."""

BURST = 192 * 2**20
"""The same where pages become due in bursts, as they do during backward when a large gradient is final: state of such a parameter."""

MOST_AHEAD = 8
"""Pages fetched ahead at most, so that tiny pages do not take many slots."""


def parse_budget(value: Budget) -> Budget:
    """A budget as an integer of bytes, a float in (0, 1), or "auto".

    Args:
        value: 0, 2147483648, "2GiB"; 0.25, "0.25" or "25%" for a share of the state (1.0 and "100%": all of it); "auto" for what is free on
            the device after the first full step, less a sixteenth of the device's memory.

    Raises:
        ConfigurationError: anything else.
    """
    share: Fraction | None = None
    if isinstance(value, float):
        share = Fraction(value) if 0 <= value <= 1 else Fraction(-1)
    elif isinstance(value, str):
        text = value.strip()
        if text.lower() == "auto":
            return "auto"
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text, re.ASCII):
            share = Fraction(match[1]) / 100
        elif re.fullmatch(r"\d*\.\d+", text, re.ASCII):
            share = Fraction(text)
    if share is None:
        try:
            return parse_bytes(value)  # type: ignore[arg-type]
        except ConfigurationError as error:
            raise ConfigurationError(f"{error} A share of the state is written 0.25 or '25%', and 'auto' takes what is free.") from None
    if not 0 <= share <= 1:
        raise ConfigurationError(
            f"{value!r} is no share of the state: it must be between 0 and 1 (1.0: all of it). Sizes are '2GiB' or whole."
        )
    return float(share) if share else 0


def pages_ahead(page_bytes: int, in_flight: int = IN_FLIGHT) -> int:
    """How many pages are fetched ahead of the one that is updated, so that copies follow each other without a gap.

    Args:
        in_flight: bytes that are to be under way.
    """
    return min(max(1, -(-in_flight // max(page_bytes, 1))), MOST_AHEAD)


class Residency(Protocol[P]):
    """A policy: it decides, and the engine carries out and reports."""

    @property
    def unsettled(self) -> bool:
        """Whether `settle` has something to decide."""

    def offer(self, sizes: Mapping[P, int], device_sizes: Mapping[P, int]) -> None:
        """These pages exist now; others are gone. Bytes of state, and bytes that they take on the device, with padding."""

    def settle(self, free: int | None, total: int) -> None:
        """A full step is over, and so much device memory is free of so much; None: without limit."""

    def admits(self, page: P) -> bool:
        """Whether the page is to stay on the device from now on."""

    def victims(self, page: P) -> list[P]:
        """Pages that must leave before this one can stay."""

    def entered(self, page: P, nbytes: int) -> None:
        """The page is on the device."""

    def touched(self, page: P) -> None:
        """The page, which is on the device, is being used."""

    def left(self, page: P) -> None:
        """The page is not on the device any more."""


class FixedSet(Generic[P]):
    """The same pages stay for ever: as many bytes as the budget allows, spread evenly, so that their work hides copies of the others.

    Pages that were chosen stay chosen while they exist and the budget allows them.
    """

    def __init__(self, budget: Budget = 0) -> None:
        self.budget = budget
        self._sizes: dict[P, int] = {}
        self._chosen: dict[P, None] = {}
        self._automatic: int | None = None

    @property
    def limit(self) -> int:
        """Bytes of state that may stay on the device now."""
        if self.budget == "auto":
            return self._automatic or 0
        if isinstance(self.budget, float):
            return int(Fraction(self.budget) * sum(self._sizes.values()))
        return int(self.budget)

    @property
    def unsettled(self) -> bool:
        return self.budget == "auto" and self._automatic is None

    def offer(self, sizes: Mapping[P, int], device_sizes: Mapping[P, int]) -> None:
        # a budget is a part of the state; what is free is free on the device
        self._sizes = dict(device_sizes if self.budget == "auto" else sizes)
        self._choose()

    def settle(self, free: int | None, total: int) -> None:
        if self.unsettled:
            # decided once: what the pages take themselves is not free any more
            self._automatic = sum(self._sizes.values()) if free is None else max(0, free - total // RESERVE)
            self._choose()

    def admits(self, page: P) -> bool:
        return page in self._chosen

    def victims(self, page: P) -> list[P]:  # noqa: ARG002
        return []

    def entered(self, page: P, nbytes: int) -> None:
        pass

    def touched(self, page: P) -> None:
        pass

    def left(self, page: P) -> None:
        pass

    def _choose(self) -> None:
        room = self.limit
        kept: dict[P, None] = {}
        for page in self._chosen:
            if page in self._sizes and self._sizes[page] <= room:
                kept[page] = None
                room -= self._sizes[page]
        others = [page for page in self._sizes if page not in kept]
        whole, share, due = sum(self._sizes[page] for page in others), room, 0
        for page in others:
            # of every stretch of pages the same part, to the nearest page
            due += self._sizes[page] * share
            if due >= self._sizes[page] * whole and self._sizes[page] <= room:
                kept[page] = None
                room -= self._sizes[page]
                due -= self._sizes[page] * whole
        for page in others:
            if page not in kept and self._sizes[page] <= room:
                kept[page] = None
                room -= self._sizes[page]
        self._chosen = kept


class LeastRecentlyUsed(Generic[P]):
    """What unified memory does: every page is kept after its use, and the one used longest ago leaves. For comparison only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._sizes: dict[P, int] = {}
        self._order: OrderedDict[P, int] = OrderedDict()

    @property
    def unsettled(self) -> bool:
        return False

    def offer(self, sizes: Mapping[P, int], device_sizes: Mapping[P, int]) -> None:  # noqa: ARG002
        self._sizes = dict(sizes)

    def settle(self, free: int | None, total: int) -> None:
        pass

    def admits(self, page: P) -> bool:
        return self._sizes.get(page, self.limit + 1) <= self.limit

    def victims(self, page: P) -> list[P]:
        excess = sum(self._order.values()) + self._sizes[page] - self.limit
        leaving = []
        for other, nbytes in self._order.items():
            if excess <= 0:
                break
            leaving.append(other)
            excess -= nbytes
        return leaving

    def entered(self, page: P, nbytes: int) -> None:
        self._order[page] = nbytes

    def touched(self, page: P) -> None:
        self._order.move_to_end(page)

    def left(self, page: P) -> None:
        self._order.pop(page, None)


class Ring(Generic[P]):
    """Slots that are given away in turn, so that the one whose last page left longest ago comes first.

    A page holds its slot from `take` to `release`. A held page is `ahead` (fetched, not yet asked for) until `claim`.
    """

    def __init__(self) -> None:
        self._free: deque[int] = deque()
        self._held: dict[P, int] = {}
        self._ahead: dict[P, None] = {}
        self.count = 0

    def grow(self) -> int:
        """Add one slot, which is next in turn; returns its number."""
        self._free.appendleft(self.count)
        self.count += 1
        return self.count - 1

    def clear(self) -> None:
        """Forget all slots. No page may hold one."""
        assert not self._held
        self._free.clear()
        self.count = 0

    def slot_of(self, page: P) -> int | None:
        """The slot that the page holds."""
        return self._held.get(page)

    @property
    def has_free(self) -> bool:
        """Whether `take` has a slot to give."""
        return bool(self._free)

    def take(self, page: P) -> int:
        """Give the page the next slot in turn."""
        assert page not in self._held
        slot = self._held[page] = self._free.popleft()
        self._ahead[page] = None
        return slot

    def claim(self, page: P) -> None:
        """The page is in use from now on and keeps its slot until it is released."""
        self._ahead.pop(page, None)

    def release(self, page: P) -> None:
        """The page gives its slot back; it is last in turn."""
        self._ahead.pop(page, None)
        self._free.append(self._held.pop(page))

    def held(self) -> Iterator[P]:
        """Pages that hold a slot."""
        return iter(tuple(self._held))

    def in_use(self) -> Iterator[P]:
        """Pages that were claimed and not released."""
        return iter(tuple(page for page in self._held if page not in self._ahead))

    def victim(self) -> P | None:
        """The page that is sent back when a slot is needed and none is free: the latest that was fetched ahead."""
        return next(reversed(self._ahead), None)
