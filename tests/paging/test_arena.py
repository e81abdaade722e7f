"""Buffers and views of one extent."""

import pytest
import torch

from flashoptim_hf.codecs.base import Plane
from flashoptim_hf.paging.arena import Arena

PLANES = (Plane("code", torch.int8), Plane("value", torch.float32), Plane("scale", torch.bfloat16, 64), Plane("range", torch.float32, 32))


def dirty(nbytes):
    return torch.full((nbytes,), 0xEE, dtype=torch.uint8)


def test_buffers_are_zero_and_as_large_as_planned():
    arena = Arena(PLANES, 640, dirty)
    assert [buffer.numel() for buffer in arena.buffers] == [640, 640, 10, 20]
    assert [buffer.dtype for buffer in arena.buffers] == [plane.dtype for plane in PLANES]
    assert all(not buffer.any() for buffer in arena.buffers)
    assert arena.nbytes == 640 + 4 * 640 + 2 * 10 + 4 * 20
    assert arena.pinned is False


@pytest.mark.parametrize(("start", "numel"), [(0, 640), (64, 1), (128, 65), (576, 64), (64, 0)])
def test_views_are_the_entries_of_their_elements(start, numel):
    arena = Arena(PLANES, 640, dirty)
    for i, plane in enumerate(PLANES):
        arena.buffers[i].copy_(torch.arange(arena.buffers[i].numel()).to(plane.dtype))
        entry_of = torch.tensor([element // plane.group for element in range(start, start + numel)], dtype=torch.long)
        expected = arena.buffers[i][entry_of.unique()]
        view = arena.view(i, start, numel)
        assert torch.equal(view, expected)
        assert view.is_contiguous()
        if numel:
            view.fill_(77)
            assert arena.buffers[i][start // plane.group] == 77


def test_a_failing_allocation_is_passed_on():
    sizes = []

    def allocate(nbytes):
        sizes.append(nbytes)
        if len(sizes) == 3:
            raise MemoryError("no more")
        return dirty(nbytes)

    with pytest.raises(MemoryError, match="no more"):
        Arena(PLANES, 64, allocate)
