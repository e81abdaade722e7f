"""Which page sits in which staging slot, and which slot is given away next. Pure Python: pages and slots are only names here."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)
"""A page."""


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
