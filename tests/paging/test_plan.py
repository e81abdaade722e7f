"""Plans against slow oracles that count elements one by one, and at sizes beyond 32 bits."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.paging import plan

ALIGN = 64
LOG_PLANES = [(1, 1), (1, 1), (4, 64), (4, 64), (2, 64), (1, 1)]
NUMELS = st.lists(st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 400)), max_size=12)
ALIGNS = st.sampled_from([1, 2, 4, 64])

# ---------------------------------------------------------------------- sizes as text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (33554432, 33554432),
        ("33554432", 33554432),
        ("32MiB", 32 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("512KiB", 2**19),
        ("512kib", 2**19),
        (" 2 TiB ", 2**41),
        ("64MB", 64 * 10**6),
        ("64kB", 64000),
        ("7B", 7),
        ("0.1GiB", 107374182),
    ],
)
def test_sizes_are_read(value, expected):
    assert plan.parse_bytes(value) == expected


@pytest.mark.parametrize(
    "value", ["", "MiB", "32M", "32 mebibytes", "-1MiB", "1e6", "1,5GiB", "0x10", "nan", -1, True, 1.5, None, [], "٣MiB"]
)
def test_what_is_no_size_is_named(value):
    with pytest.raises(ConfigurationError) as caught:
        plan.parse_bytes(value)
    assert repr(value) in str(caught.value)
    assert "'32MiB'" in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (2**25, "32 MiB"), (3 * 2**29, "1.5 GiB"), (10 * 2**40, "10 TiB")]
)
def test_sizes_are_written(nbytes, text):
    assert plan.format_bytes(nbytes) == text


@given(st.integers(0, 2**60))
def test_written_sizes_are_read_back(nbytes):
    assert abs(plan.parse_bytes(plan.format_bytes(nbytes)) - nbytes) <= nbytes * 5e-4 + 1


# ---------------------------------------------------------------------- places


@given(NUMELS, ALIGNS)
def test_places_against_counting(numels, align):
    cell = 0
    for start, numel in zip(plan.place(numels, align)[0], numels, strict=True):
        assert start == cell
        cell += numel
        while cell % align:
            cell += 1
    assert plan.place(numels, align)[1] == cell


@given(NUMELS, st.integers(1, 300))
def test_pieces_against_counting(numels, page):
    """Every element of every item is in exactly one piece, at the place where a map of all cells has it."""
    starts, total = plan.place(numels, 4)
    cells = [None] * total
    for item, (start, numel) in enumerate(zip(starts, numels, strict=True)):
        for index in range(numel):
            cells[start + index] = (item, index)
    found = [None] * total
    for page_start, page_stop in plan.cut(total, page):
        for item, start, index, numel in plan.pieces(starts, numels, page_start, page_stop):
            assert numel > 0
            for offset in range(numel):
                assert found[page_start + start + offset] is None
                found[page_start + start + offset] = (item, index + offset)
    assert found == cells


@given(st.integers(0, 1000), st.integers(1, 300))
def test_cut_covers_everything_once(total, page):
    cells = [cell for start, stop in plan.cut(total, page) for cell in range(start, stop)]
    assert cells == list(range(total))
    assert all(stop - start <= page for start, stop in plan.cut(total, page))


def test_places_beyond_32_bits():
    numels = [3 * 2**31 + 5, 0, 2**33 - 1, 7]
    starts, total = plan.place(numels, ALIGN)
    assert starts == [0, 3 * 2**31 + 64, 3 * 2**31 + 64, 3 * 2**31 + 64 + 2**33]
    assert total == starts[3] + 64
    page = 2**31 + 64
    pages = plan.cut(total, page)
    got = [piece for start, stop in pages for piece in plan.pieces(starts, numels, start, stop)]
    for item, numel in enumerate(numels):
        mine = [(index, length) for owner, _, index, length in got if owner == item]
        assert sum(length for _, length in mine) == numel
        assert [index for index, _ in mine] == list(itertools.accumulate([length for _, length in mine], initial=0))[:-1]
    last = plan.pieces(starts, numels, *pages[-1])[-1]
    assert last == (3, starts[3] - pages[-1][0], 0, 7)
    assert plan.plane_bytes(2**34 + 1, (4, 64)) == 2**30 + 4


# ---------------------------------------------------------------------- extents


def cheapest_by_trying_all(numels, align):
    """Least cost of a pinned plan over all ways to cut the list."""
    total = plan.place(numels, align)[1]
    price = max(1, total // plan.EXTENT_COST)
    best = None
    for cuts in itertools.product([False, True], repeat=len(numels) - 1):
        parts, current = [], [numels[0]]
        for numel, new in zip(numels[1:], cuts, strict=True):
            if new:
                parts.append(current)
                current = []
            current.append(numel)
        parts.append(current)
        cost = 0
        for part in parts:
            size = align
            while size < plan.place(part, align)[1]:
                size *= 2
            cost += size + price
        best = cost if best is None else min(best, cost)
    return best


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.just(0), st.integers(1, 3000)), min_size=1, max_size=8))
def test_pinned_extents_are_the_cheapest(numels):
    extents = plan.extents(numels, ALIGN, pinned=True)
    total = plan.place(numels, ALIGN)[1]
    if total == 0:
        assert extents == []
        return
    assert sum(extent.capacity + max(1, total // plan.EXTENT_COST) for extent in extents) == cheapest_by_trying_all(numels, ALIGN)


@given(NUMELS, st.booleans())
def test_extents_hold_every_item_once(numels, pinned):
    extents = plan.extents(numels, ALIGN, pinned=pinned)
    assert [i for extent in extents for i in range(extent.first, extent.stop)] == (list(range(len(numels))) if any(numels) else [])
    for extent in extents:
        starts, used = plan.place(numels[extent.first : extent.stop], ALIGN)
        assert (list(extent.starts), extent.used) == (starts, used)
        assert 0 < extent.used <= extent.capacity
        if pinned:
            assert extent.capacity.bit_count() == 1
        else:
            assert extent.capacity == extent.used


@pytest.mark.parametrize("gib", [2.25, 1.125, 0.56, 1.0, 1.9, 17.2])
def test_pinning_takes_little_more_than_is_asked(gib):
    """1.125 GiB in one block would take 2 GiB."""
    numels = [2**20] * int(gib * 2**10)
    asked = sum(plan.plane_bytes(numel, layout) for numel in numels for layout in LOG_PLANES)
    taken = plan.host_bytes(numels, LOG_PLANES, ALIGN, pinned=True)
    assert asked <= taken <= asked * 1.07
    assert len(plan.extents(numels, ALIGN, pinned=True)) <= 5
    assert plan.host_bytes(numels, LOG_PLANES, ALIGN, pinned=False) == asked


@given(NUMELS)
def test_the_allocator_rounds_nothing_up_that_was_planned(numels):
    planned = sum(plan.plane_bytes(extent.capacity, p) for extent in plan.extents(numels, ALIGN, pinned=True) for p in LOG_PLANES)
    assert plan.host_bytes(numels, LOG_PLANES, ALIGN, pinned=True) == planned


def test_extents_beyond_32_bits():
    extents = plan.extents([2**32 + 64, 2**34], ALIGN, pinned=True)
    assert sum(extent.used for extent in extents) == 2**34 + 2**32 + 64
    assert plan.extents([2**33], ALIGN, pinned=True)[0].capacity == 2**33
    assert plan.extents([2**33 + 1], ALIGN, pinned=False)[0].capacity == 2**33 + 64


@pytest.mark.parametrize(("number", "expected"), [(0, 0), (1, 1), (2, 2), (3, 4), (2**40, 2**40), (2**40 + 1, 2**41)])
def test_power_of_two(number, expected):
    assert plan.power_of_two(number) == expected


# ---------------------------------------------------------------------- page sizes


@given(st.integers(1, 3000), st.lists(st.sampled_from(LOG_PLANES), min_size=1, max_size=4))
def test_page_elements_against_counting(page_bytes, planes):
    def takes(elements):
        return sum(-(-elements // group) * itemsize for itemsize, group in planes)

    largest = 0
    while takes(largest + ALIGN) <= page_bytes:
        largest += ALIGN
    if largest:
        assert plan.page_elements(page_bytes, planes, ALIGN) == largest
    else:
        with pytest.raises(ConfigurationError):
            plan.page_elements(page_bytes, planes, ALIGN)


def test_too_small_pages_are_named():
    least = 3 * 64 + 10
    assert plan.page_elements(least, LOG_PLANES, ALIGN) == ALIGN
    with pytest.raises(ConfigurationError, match=rf"page_bytes={least - 1} is too small.*at least {least}"):
        plan.page_elements(least - 1, LOG_PLANES, ALIGN)


def test_pages_start_where_kernels_want_them():
    elements = plan.round_page(plan.page_elements(2**25, LOG_PLANES, ALIGN), LOG_PLANES, 256, ALIGN)
    assert all(plan.plane_bytes(elements, layout) % 256 == 0 for layout in LOG_PLANES)
    assert 2**25 * 0.99 < sum(plan.plane_bytes(elements, layout) for layout in LOG_PLANES) <= 2**25
    assert plan.round_page(3 * ALIGN, LOG_PLANES, 256, ALIGN) == 3 * ALIGN
