"""Sizes, places, extents and pages: integers in, integers out.

Elements are counted, not bytes, until a plane's layout is known. A layout is (bytes per entry, elements per entry); both are powers of
two. An *extent* is what one allocation request becomes: one flat buffer per plane over the same elements.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from ..errors import ConfigurationError

Layout = tuple[int, int]
"""One plane: bytes per entry, and how many elements share an entry."""

DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

EXTENT_COST = 32
"""One more extent is worth it when it saves at least this fraction (1/32) of what is asked for."""


def parse_bytes(value: int | str) -> int:
    """A number of bytes, from an integer or from text.

    Args:
        value: 33554432, "33554432", "32MiB", "1.5GiB", "512KiB" (powers of 1024) or "64MB" (powers of 1000). Case does not matter, a
            fraction of a byte is dropped.

    Raises:
        ConfigurationError: anything else, and negative sizes.
    """
    units = DECIMAL | BINARY
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip(), re.ASCII)
        if match and match[2].upper() in units:
            return int(Fraction(match[1]) * units[match[2].upper()])
    elif not isinstance(value, bool) and hasattr(value, "__index__") and operator.index(value) >= 0:
        return operator.index(value)
    raise ConfigurationError(
        f"{value!r} is not a size in bytes: give a whole number of at least 0 (33554432), or text such as '32MiB', '1.5GiB', '512KiB' "
        "(powers of 1024) or '64MB' (powers of 1000)."
    )


def format_bytes(nbytes: int) -> str:
    """Bytes for people: "512 B", "32 MiB", "2.156 GiB", rounded to four or five digits. `parse_bytes` reads it."""
    if abs(nbytes) < 2**10:
        return f"{nbytes} B"
    names = ["KiB", "MiB", "GiB", "TiB"]
    value = nbytes / 2**10
    while round(abs(value), 1) >= 2**10 and len(names) > 1:
        value /= 2**10
        del names[0]
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") + f" {names[0]}"


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`, 0 for 0: what torch's pinned allocator takes for a block of that size."""
    return 1 << (number - 1).bit_length() if number > 0 else 0


def place(numels: Sequence[int], align: int) -> tuple[list[int], int]:
    """Where each item starts when items lie side by side, and the elements they take together.

    Every start and the total are multiples of `align`. An item of size 0 takes nothing and starts where the next one does.
    """
    ends = list(accumulate((round_up(numel, align) for numel in numels), initial=0))
    return ends[:-1], ends[-1]


@dataclass(frozen=True)
class Extent:
    """Items `first` to `stop` of a request, side by side: their starts, the elements they take, the elements to allocate."""

    first: int
    stop: int
    starts: tuple[int, ...]
    used: int
    capacity: int


def extents(numels: Sequence[int], align: int, *, pinned: bool) -> list[Extent]:
    """Divide a request into extents, in order, each item whole in one of them; none when nothing is asked for.

    Args:
        numels: elements of each item.
        align: elements, a power of two.
        pinned: plan for an allocator that rounds every block up to a power of two. Every extent then has a power of two as its capacity,
            so that every plane's buffer has one too and nothing is taken beyond what is planned. The sum of the capacities, with one
            more `1/EXTENT_COST` of the request for each extent, is the least that is possible in the given order. False: one
            extent of the exact size.
    """
    starts, total = place(numels, align)
    if total == 0:
        return []
    ends = [*starts[1:], total]
    cuts = _cheapest_cuts(starts, ends, align) if pinned else [0, len(numels)]
    result = []
    for first, stop in pairwise(cuts):
        base = starts[first]
        used = ends[stop - 1] - base
        inside = tuple(start - base for start in starts[first:stop])
        result.append(Extent(first, stop, inside, used, power_of_two(used) if pinned else used))
    return result


def _cheapest_cuts(starts: Sequence[int], ends: Sequence[int], align: int) -> list[int]:
    """First item of each extent, then the number of items.

    Leaving items out never makes a plan dearer, so for each capacity only the longest run of items that fits has to be looked at.
    """
    count, total = len(starts), ends[-1]
    price = max(1, total // EXTENT_COST)
    cost = [0] * (count + 1)
    chosen = [count] * (count + 1)
    for i in range(count - 1, -1, -1):
        capacity = max(align, power_of_two(ends[i] - starts[i]))
        stop = bisect_right(ends, starts[i] + capacity, i)
        cost[i], chosen[i] = capacity + price + cost[stop], stop
        while stop < count:
            capacity *= 2
            stop = bisect_right(ends, starts[i] + capacity, i)
            if capacity + price + cost[stop] <= cost[i]:
                cost[i], chosen[i] = capacity + price + cost[stop], stop
    cuts = [0]
    while cuts[-1] < count:
        cuts.append(chosen[cuts[-1]])
    return cuts


def plane_bytes(elements: int, layout: Layout) -> int:
    """Bytes that `elements` elements take in a plane."""
    itemsize, group = layout
    return -(-elements // group) * itemsize


def host_bytes(numels: Sequence[int], planes: Sequence[Layout], align: int, *, pinned: bool) -> int:
    """Bytes that the host allocator takes for items of these sizes, all planes, rounding of pinned blocks included."""
    buffers = [plane_bytes(extent.capacity, plane) for extent in extents(numels, align, pinned=pinned) for plane in planes]
    return sum(power_of_two(nbytes) if pinned else nbytes for nbytes in buffers)


def page_elements(page_bytes: int, planes: Sequence[Layout], align: int) -> int:
    """Elements per page: the largest multiple of `align` whose bytes over all planes fit into `page_bytes`.

    Raises:
        ConfigurationError: not even `align` elements fit.
    """
    group_bytes = sum(plane_bytes(align, plane) for plane in planes)
    if page_bytes < group_bytes:
        raise ConfigurationError(
            f"page_bytes={page_bytes} is too small: {align} elements, the least a page can hold, take {group_bytes} bytes over "
            f"{len(planes)} planes. Pass at least {group_bytes}; tens of MiB ('32MiB') are usual."
        )
    return page_bytes // max(group_bytes, 1) * align  # 0 bytes: nothing is stored


def round_page(elements: int, planes: Sequence[Layout], boundary: int, align: int) -> int:
    """Page elements made smaller so that every plane of every page starts at a multiple of `boundary` bytes; too small pages stay.

    Kernels are compiled for aligned pointers, and one unaligned page would mean a second, slower kernel.
    """
    step = max([align, *(boundary // itemsize * group for itemsize, group in planes)])
    return elements // step * step or elements


def cut(total: int, page_elements: int) -> list[tuple[int, int]]:
    """Pages of `total` elements: (start, stop) of each, the last one possibly shorter."""
    return [(start, min(start + page_elements, total)) for start in range(0, total, page_elements)]


def pieces(starts: Sequence[int], numels: Sequence[int], page_start: int, page_stop: int) -> list[tuple[int, int, int, int]]:
    """What lies in a page: (item, start in the page, index in the item, numel) for each item with elements there, in order.

    `starts` ascend, as `place` gives them.
    """
    found = []
    for item in range(max(0, bisect_right(starts, page_start) - 1), len(starts)):
        if starts[item] >= page_stop:
            break
        begin, end = max(starts[item], page_start), min(starts[item] + numels[item], page_stop)
        if begin < end:
            found.append((item, begin - page_start, begin - starts[item], end - begin))
    return found
