"""Blocks, pages and pieces: what the store promises about memory that never moves."""

import gc
import warnings
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashoptim_hf.codecs.base import ALIGN, Plane
from flashoptim_hf.errors import ConfigurationError, HostMemoryError
from flashoptim_hf.paging.simulated import SimulatedBackend
from flashoptim_hf.paging.store import StateStore
from flashoptim_hf.paging.streams import HostBackend

PLANES = (Plane("code", torch.int8), Plane("value", torch.float32), Plane("scale", torch.bfloat16, 64), Plane("range", torch.float32, 32))
GROUP_BYTES = 64 * (1 + 4) + 2 + 8


def store_with(numels, *, paged=True, groups=2, backend=None):
    store = StateStore(PLANES, backend=backend or HostBackend(), paged=paged, page_bytes=groups * GROUP_BYTES)
    return store, store.allocate(numels)


def scribble(store, seed=0):
    """Fill every page with noise, and return all bytes of all blocks."""
    generator = torch.Generator().manual_seed(seed)
    for page in store.pages:
        for view in page.views:
            raw = view.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))


def content(blocks):
    return [[block.view(i).view(torch.uint8).clone() for i in range(len(PLANES))] for block in blocks]


def same(left, right):
    return all(torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


@settings(deadline=None)
@given(st.lists(st.integers(0, 500), max_size=8), st.integers(1, 5), st.booleans())
def test_pages_and_blocks_are_the_same_memory(numels, groups, paged):
    store, blocks = store_with(numels, groups=groups, paged=paged)
    assert [block.numel for block in blocks] == numels
    seen = dict.fromkeys(blocks, 0)
    for page in store.pages:
        assert page.nbytes == sum(view.numel() * view.itemsize for view in page.views) <= store.page_bytes
        assert page.pieces
        for piece in page.pieces:
            assert piece.index == seen[piece.block]
            assert piece.start % ALIGN == piece.index % ALIGN == 0
            seen[piece.block] += piece.numel
            for i, plane in enumerate(PLANES):
                there = page.views[i][piece.start // plane.group :][: plane.entries(piece.numel)]
                here = piece.block.view(i)[piece.index // plane.group :][: plane.entries(piece.numel)]
                assert there.data_ptr() == here.data_ptr()
                assert there.shape == here.shape
    assert seen == {block: block.numel for block in blocks}
    assert all(not block.view(i).any() for block in blocks for i in range(len(PLANES)))


def test_empty_blocks_have_empty_views():
    store, blocks = store_with([0, 0])
    assert store.pages == []
    assert store.allocated_bytes == 0
    assert [blocks[0].view(i).dtype for i in range(4)] == [plane.dtype for plane in PLANES]
    assert all(block.view(i).shape == (0,) for block in blocks for i in range(4))
    for block in blocks:
        store.free(block)


def test_growing_leaves_state_where_and_what_it_is():
    store, blocks = store_with([300, 64, 0, 129])
    scribble(store)
    before, pages = content(blocks), list(store.pages)
    addresses = [block.view(i).data_ptr() for block in blocks for i in range(4)]
    more = store.allocate([1000, 5])
    assert store.pages[: len(pages)] == pages
    assert len(store.pages) > len(pages)
    assert [block.view(i).data_ptr() for block in blocks for i in range(4)] == addresses
    scribble_new = [page for page in store.pages if page not in pages]
    for page in scribble_new:
        for view in page.views:
            view.fill_(1)
    assert same(before, content(blocks))
    assert all((block.view(i) == 1).all() for block in more for i in range(4))


def test_bytes_are_counted_to_the_last():
    store, blocks = store_with([65, 1, 640], backend=SimulatedBackend(0))
    used = store.nbytes
    assert {name: usage.used for name, usage in used.items()} == {
        "code": 706,
        "value": 4 * 706,
        "scale": 2 * (2 + 1 + 10),
        "range": 4 * (3 + 1 + 20),
    }
    assert {name: usage.allocated for name, usage in used.items()} == {"code": 832, "value": 4 * 832, "scale": 2 * 13, "range": 4 * 26}
    assert store.used_bytes == sum(usage.used for usage in used.values())
    assert store.allocated_bytes == sum(usage.allocated for usage in used.values())
    assert sum(page.nbytes for page in store.pages) == store.allocated_bytes
    for block in blocks:
        store.free(block)
    assert store.used_bytes == store.allocated_bytes == 0


def test_freeing_takes_pieces_pages_and_memory():
    store, (a, b, c) = store_with([128, 128, 64], groups=1)
    assert len(store.pages) == 5
    scribble(store)
    before, allocated = content([a, c]), store.allocated_bytes
    store.free(b)
    assert len(store.pages) == 3
    assert all(piece.block is not b for page in store.pages for piece in page.pieces)
    assert same(before, content([a, c]))
    assert store.allocated_bytes == allocated
    with pytest.raises(ValueError, match="freed"):
        b.view(0)
    with pytest.raises(ValueError, match="not a live block"):
        store.free(b)
    with pytest.raises(ValueError, match="another store"):
        store_with([1])[0].free(a)
    store.free(a)
    store.free(c)
    assert store.pages == []
    assert store.allocated_bytes == 0


def test_a_shared_page_stays_until_its_last_piece_goes():
    store, (a, b) = store_with([64, 64], groups=2)
    (page,) = store.pages
    store.free(a)
    assert store.pages == [page]
    assert [piece.block for piece in page.pieces] == [b]
    store.free(b)
    assert store.pages == []


@pytest.mark.parametrize("paged", [True, False])
def test_swapping_blocks_leaks_nothing(paged):
    backend = SimulatedBackend(1)
    store, blocks = store_with([500, 70, 0], paged=paged, backend=backend)
    allocated, on_device = store.allocated_bytes, backend.memory.now
    assert on_device == (0 if paged else allocated)
    memory, freed = weakref.ref(store._extents[0]), []
    for _ in range(20):
        fresh = store.allocate([block.numel for block in blocks])
        for block in blocks:
            store.free(block)
        # whoever still has the block does not keep its memory
        freed += blocks
        blocks = fresh
        assert store.allocated_bytes == allocated
    gc.collect()
    assert memory() is None
    assert backend.memory.now == on_device
    assert backend.memory.peak <= 2 * on_device


def test_too_small_pages_are_refused():
    with pytest.raises(ConfigurationError, match=f"page_bytes={GROUP_BYTES - 1} "):
        StateStore(PLANES, backend=HostBackend(), paged=True, page_bytes=GROUP_BYTES - 1)


def test_large_pages_are_aligned_in_every_plane():
    store = StateStore(PLANES, backend=HostBackend(), paged=True, page_bytes=2**20)
    (block,) = store.allocate([500_000])
    assert len(store.pages) > 2
    origin = [block.view(i).data_ptr() for i in range(4)]
    assert all((view.data_ptr() - origin[i]) % 256 == 0 for page in store.pages for i, view in enumerate(page.views))


# ---------------------------------------------------------------------- pinning


class Pinning:
    """Stands in for torch's pinned allocator: counts, remembers what it gave, and can refuse from a certain call on."""

    def __init__(self, monkeypatch, refuse_from=10**9, message=""):
        self.calls, self.given, self.trimmed = [], [], 0
        self.refuse_from, self.message = refuse_from, message
        plain = torch.empty

        def empty(*size, pin_memory=False, **kwargs):
            if pin_memory:
                self.calls.append(size[0])
                if len(self.calls) >= self.refuse_from:
                    raise RuntimeError(self.message)
                array = np.empty(size[0], dtype=np.uint8)
                self.given.append(weakref.ref(array))
                return torch.from_numpy(array)
            return plain(*size, **kwargs)

        monkeypatch.setattr(torch, "empty", empty)

    @property
    def addresses(self):
        """Where the pinned memory is that somebody still holds."""
        return {array().ctypes.data for array in self.given if array() is not None}


def buffers(store):
    return {buffer.untyped_storage().data_ptr() for extent in store._extents for buffer in extent.arena.buffers}


def test_pinned_blocks_are_powers_of_two(monkeypatch):
    pinning = Pinning(monkeypatch)
    store, blocks = store_with([64 * 9] * 8, backend=SimulatedBackend(0, pin=True))
    assert all(size.bit_count() == 1 for size in pinning.calls)
    assert store.allocated_bytes == sum(pinning.calls) < 1.2 * store.used_bytes
    assert store.backend.pinned is True
    assert [block.numel for block in blocks] == [64 * 9] * 8
    # what the power of two adds is never copied
    assert sum(page.nbytes for page in store.pages) == store.used_bytes


@pytest.mark.parametrize("message", ["CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA", "operation not supported"])
@pytest.mark.parametrize("call", [1, 2, 4, 5, 6, 11])
def test_refused_pinning_falls_back_with_one_warning(monkeypatch, message, call):
    """At the first buffer, half-way through an arena, between two, and in a later request."""
    backend = SimulatedBackend(0, pin=True)
    backend.trim = lambda: setattr(pinning, "trimmed", pinning.trimmed + 1)
    pinning = Pinning(monkeypatch, call, message)
    numels = [64] * 9
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store, blocks = store_with(numels, backend=backend)
        scribble(store)
        before = content(blocks)
        more = store.allocate(numels)
        late = store.allocate([1000])
    assert [str(w.message) for w in caught if "pinning" in str(w.message)] == [str(w.message) for w in caught]
    (warning,) = caught
    assert message.partition("\n")[0] in str(warning.message)
    assert "TORCH_USE" not in str(warning.message)
    assert backend.pinned is False
    assert len(pinning.calls) == call
    assert pinning.trimmed == 1
    assert same(before, content(blocks))
    assert [block.numel for block in (*blocks, *more, *late)] == [*numels, *numels, 1000]
    # every arena is pinned as a whole or not at all, and what was pinned for nothing is gone
    for extent in store._extents:
        kinds = {buffer.untyped_storage().data_ptr() in pinning.addresses for buffer in extent.arena.buffers}
        assert len(kinds) == 1
    gc.collect()
    assert pinning.addresses <= buffers(store)
    assert len(pinning.addresses) == (call - 1) // len(PLANES) * len(PLANES)
    # pageable memory is not rounded up
    assert store._extents[-1].arena.elements == 1024


def test_pinning_that_this_machine_refuses():
    """No accelerator here: torch itself raises."""
    if torch.accelerator.is_available():
        pytest.skip("an accelerator is present, so pinning works")
    with pytest.warns(RuntimeWarning, match="stays pageable: pinning .* failed"):
        store, _ = store_with([100], backend=SimulatedBackend(0, pin=True))
    assert store.backend.pinned is False
    assert store.backend.pins is False


def test_host_memory_that_cannot_be_had_changes_nothing(monkeypatch):
    store, blocks = store_with([100])
    scribble(store)
    before, pages = content(blocks), list(store.pages)
    plain, calls = torch.empty, []

    def empty(*size, **kwargs):
        calls.append(size)
        if len(calls) == 3:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return plain(*size, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        with pytest.raises(HostMemoryError, match=r"can't allocate memory.*Free host memory"):
            store.allocate([500])
    assert store.pages == pages
    assert same(before, content(blocks))
    assert store.allocate([500])[0].numel == 500
