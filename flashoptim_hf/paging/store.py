"""Where the planes of many tensors live: blocks, cut into pages, in memory that never moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..codecs.base import ALIGN, Plane
from . import plan
from .arena import Arena
from .files import OffloadFiles
from .streams import Backend, Event

BOUNDARY = 256
"""Bytes: where planes of a page start, in home memory (unless pages are too small for it) and in a staging slot."""


Kind = Literal["device", "pinned", "pageable", "file"]
"""What home memory is."""


class Block:
    """The elements of one request: a contiguous range of every plane.

    Attributes:
        numel: elements.
        owner: whatever the user wants to find again from a page's pieces; opaque here.
        table: a tensor that belongs to the block and is not paged; opaque here.
    """

    def __init__(self, numel: int, extent: _Extent | None, start: int, empty: tuple[Tensor, ...]) -> None:
        self.numel = numel
        self.owner: Any = None
        self.table: Tensor | None = None
        self._extent = extent
        self._start = start
        self._empty = empty
        self._freed = False

    def view(self, plane_index: int) -> Tensor:
        """The block's entries in a plane, flat, in the plane's dtype, where they are at home.

        Home is host memory when the store is paged, else the device. With staged pages it is current after `Engine.synchronize`.
        """
        if self._freed:
            raise ValueError("this block was freed and has no memory any more.")
        if self._extent is None:
            return self._empty[plane_index]
        return self._extent.arena.view(plane_index, self._start, self.numel)


@dataclass(eq=False)
class Piece:
    """The part of a block that lies in a page: `numel` elements from `index` in the block, from `start` in the page."""

    block: Block
    start: int
    index: int
    numel: int


@dataclass(eq=False)
class Page:
    """The same element range in every plane: what is fetched, updated by one launch and written back.

    Attributes:
        views: the page's entries in each plane, at home, flat.
        pieces: what lies in it, in order.
        staged: whether it has to travel to device memory to be updated.
        files: where home memory is mapped from files: those.
        written: event of the last copy or kernel that uses home memory, None when there was none, and where the device does not use it
            (see `bounced`).
    """

    views: tuple[Tensor, ...]
    pieces: list[Piece]
    staged: bool
    files: OffloadFiles | None = None
    written: Event | None = None
    layout: tuple[tuple[int, int, torch.dtype], ...] = field(init=False)
    nbytes: int = field(init=False)
    slot_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        sizes = [view.numel() * view.itemsize for view in self.views]
        offsets, self.slot_bytes = plan.place(sizes, BOUNDARY)
        # a staging slot is carved by this; pages of one size share it
        self.layout = tuple((offset, size, view.dtype) for offset, size, view in zip(offsets, sizes, self.views, strict=True))
        self.nbytes = sum(sizes)

    @property
    def bounced(self) -> bool:
        """Whether the page travels through pinned buffers, since the device cannot copy from and to its home by itself."""
        return self.staged and self.files is not None

    def read_ahead(self) -> None:
        """The page is going to be used soon."""
        if self.files is not None:
            for view in self.views:
                self.files.read_ahead(view)

    def write_behind(self) -> None:
        """Home was changed by the host, or by a kernel on it."""
        if self.files is not None:
            for view in self.views:
                self.files.write_behind(view)


@dataclass(frozen=True)
class Usage:
    """Bytes of one plane: what live blocks take, and what is allocated for them."""

    used: int
    allocated: int


class _Extent:
    """One arena with its blocks and its pages; goes as a whole when its last block is freed."""

    def __init__(self, arena: Arena, page_elements: int, kind: Kind, files: OffloadFiles | None) -> None:
        self.arena = arena
        self.kind = kind
        self.files = files
        self.page_elements = page_elements
        self.live = 0
        self.pages: dict[int, Page] = {}

    def fill(self, blocks: Sequence[Block], starts: Sequence[int], used: int, staged: bool) -> None:
        """Put blocks at their starts, and cut the used elements into pages."""
        numels = [block.numel for block in blocks]
        self.live = sum(1 for numel in numels if numel)
        for number, (start, stop) in enumerate(plan.cut(used, self.page_elements)):
            views = tuple(self.arena.view(i, start, stop - start) for i in range(len(self.arena.planes)))
            found = plan.pieces(starts, numels, start, stop)
            self.pages[number] = Page(views, [Piece(blocks[item], *place) for item, *place in found], staged, self.files)

    def remove(self, block: Block, start: int) -> list[Event]:
        """Take a block's pieces out of its pages; pages without pieces go. Returns the events of their last write-backs."""
        events = []
        for number in range(start // self.page_elements, -(-(start + block.numel) // self.page_elements)):
            page = self.pages[number]
            page.pieces = [piece for piece in page.pieces if piece.block is not block]
            if not page.pieces:
                del self.pages[number]
            if page.written is not None:
                events.append(page.written)
        self.live -= 1
        return events


class StateStore:
    """The planes of many blocks.

    Args:
        planes: the planes that every block has. They share element ranges.
        backend: gives the memory.
        paged: home is host memory, pinned where there is a device. False: home is on the device, and nothing is ever copied.
        page_bytes: bytes of a page over all planes, at most.
        files: gives home memory of paged state, instead of the backend's host memory. What it raises is passed on, and the store is as it
            was.

    Raises:
        ConfigurationError: `page_bytes` is too small for one group of elements.
    """

    def __init__(
        self,
        planes: tuple[Plane, ...],
        *,
        backend: Backend,
        paged: bool,
        page_bytes: int,
        files: OffloadFiles | None = None,
    ) -> None:
        self.planes = tuple(planes)
        self.backend = backend
        self.paged = paged
        self.page_bytes = page_bytes
        self._files = files if paged else None
        self._pages: list[Page] | None = None
        self._layouts = [(plane.dtype.itemsize, plane.group) for plane in self.planes]
        largest = plan.page_elements(page_bytes, self._layouts, ALIGN)
        self._page_elements = plan.round_page(largest, self._layouts, BOUNDARY, ALIGN)
        self._extents: list[_Extent] = []
        self._live: dict[Block, None] = {}

    @property
    def pages(self) -> list[Page]:
        """All pages, in the order of allocation."""
        if self._pages is None:
            self._pages = [page for extent in self._extents for page in extent.pages.values()]
        return self._pages

    @property
    def staged(self) -> bool:
        """Whether pages travel: home is the host, and kernels run elsewhere."""
        return self.paged and self.backend.stages

    def allocate(self, numels: Sequence[int]) -> list[Block]:
        """Make zeroed blocks, in order, in new memory with pages of its own; what is stored already stays where it is.

        Args:
            numels: elements of each block, 0 allowed.

        Raises:
            HostMemoryError: the memory cannot be had. The store is as it was.
        """
        blocks: list[Block] = []
        made: list[_Extent] = []
        todo = deque(plan.extents(numels, ALIGN, pinned=self._pins))
        while todo:
            extent, pins = todo.popleft(), self._pins
            arena = Arena(self.planes, extent.capacity, self._memory, zeroed=self._files is not None)
            if pins and not self._pins:
                # some of its buffers are pinned and some are not: let them go, and plan what is left without rounding
                del arena
                self.backend.trim()
                todo = deque(plan.extents(numels[len(blocks) :], ALIGN, pinned=False))
                continue
            made.append(_Extent(arena, self._page_elements, self._kind, self._files))
            members = zip(numels[len(blocks) :], extent.starts, strict=False)
            inside = [self._block(numel, made[-1], start) for numel, start in members]
            made[-1].fill(inside, extent.starts, extent.used, self.staged)
            blocks += inside
        # nothing, or only empty blocks, was asked for
        blocks += [self._block(numel, None, 0) for numel in numels[len(blocks) :]]
        self._extents += made
        self._live |= dict.fromkeys(blocks)
        self._pages = None
        return blocks

    def free(self, block: Block) -> None:
        """Give a block up: its pieces leave their pages, pages without pieces go, and memory without blocks goes.

        Memory that live blocks share with it stays until they are freed too.

        Raises:
            ValueError: the block is not a live block of this store.
        """
        if block not in self._live:
            raise ValueError("this block is not a live block of this store: it was freed before, or is another store's.")
        del self._live[block]
        extent, block._extent, block._freed = block._extent, None, True
        if extent is None:
            return
        for event in extent.remove(block, block._start):
            # a copy in flight may still read or write this memory
            self.backend.wait_host(event)
        if not extent.live:
            self._extents.remove(extent)
        self._pages = None

    @property
    def nbytes(self) -> dict[str, Usage]:
        """Bytes by plane name."""
        return {
            plane.name: Usage(
                sum(plane.nbytes(block.numel) for block in self._live),
                sum(plane.nbytes(extent.arena.elements) for extent in self._extents),
            )
            for plane in self.planes
        }

    @property
    def used_bytes(self) -> int:
        """Bytes that live blocks take."""
        return sum(usage.used for usage in self.nbytes.values())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all buffers: live blocks, alignment, and what pinning rounds up."""
        return sum(extent.arena.nbytes for extent in self._extents)

    def bytes_of(self, kind: Kind) -> int:
        """Bytes of all buffers that are memory of this kind."""
        return sum(extent.arena.nbytes for extent in self._extents if extent.kind == kind)

    def host_bytes(self, numels: Sequence[int]) -> int:
        """Bytes of host memory that allocating blocks of these sizes would take now: none on the device and in files."""
        if self._files is not None or (not self.paged and self.backend.stages):
            return 0
        return plan.host_bytes(numels, self._layouts, ALIGN, pinned=self._pins)

    def file_bytes(self, numels: Sequence[int]) -> int:
        """Bytes of files that allocating blocks of these sizes would take."""
        return 0 if self._files is None else plan.host_bytes(numels, self._layouts, ALIGN, pinned=False)

    @property
    def _kind(self) -> Kind:
        if not self.paged and self.backend.stages:
            return "device"
        if self._files is not None:
            return "file"
        return "pinned" if self._pins else "pageable"

    @property
    def _pins(self) -> bool:
        return self.staged and self.backend.pins and self._files is None

    def _memory(self, nbytes: int) -> Tensor:
        if self._files is not None:
            return self._files.allocate(nbytes)
        return self.backend.host_empty(nbytes) if self.paged else self.backend.device_home(nbytes)

    def _block(self, numel: int, extent: _Extent | None, start: int) -> Block:
        if numel:
            return Block(numel, extent, start, ())
        device = torch.device("cpu") if self.paged else self.backend.device
        return Block(0, None, 0, tuple(torch.empty(0, dtype=plane.dtype, device=device) for plane in self.planes))
