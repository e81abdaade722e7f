"""The memory of one extent: one flat buffer per plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..codecs.base import Plane


class Arena:
    """Flat buffers, one per plane, zero-initialised, all over the same elements.

    Args:
        planes: the planes, in order.
        elements: how many elements each buffer has room for.
        allocate: gives an uninitialised uint8 tensor of shape (nbytes,). What it raises is passed on, and the buffers made so far go.
        zeroed: what it gives is zero already, and must not be written for nothing (files: that would fill the disk's queue).
    """

    def __init__(self, planes: Sequence[Plane], elements: int, allocate: Callable[[int], Tensor], *, zeroed: bool = False) -> None:
        self.planes = tuple(planes)
        self.elements = elements
        raw = [allocate(plane.nbytes(elements)) for plane in self.planes]
        self.buffers = tuple((buffer if zeroed else buffer.zero_()).view(plane.dtype) for buffer, plane in zip(raw, planes, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(plane.nbytes(self.elements) for plane in self.planes)

    @property
    def pinned(self) -> bool:
        """Whether every buffer is page-locked host memory."""
        return all(buffer.is_pinned() for buffer in self.buffers)

    def view(self, plane_index: int, start: int, numel: int) -> Tensor:
        """The entries of elements `start` to `start + numel` in a plane, flat and contiguous, in the plane's dtype.

        Args:
            plane_index: position of the plane in `planes`.
            start: first element, a multiple of the plane's group.
            numel: elements; a last group that is not full has an entry of its own.
        """
        plane = self.planes[plane_index]
        return self.buffers[plane_index].narrow(0, start // plane.group, plane.entries(numel))
