"""`none`: fp32 states, uncompressed. The baseline: 4 bytes per state and parameter, bit for bit what fp32 arithmetic gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._triton import jit, tl
from . import device
from .base import ALIGN, Codec, Plane, store

_GROUP = tl.constexpr(ALIGN)


@jit
def none_decode(planes, first, limit, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`NoneCodec.decode` for one tile; see `Codec.device_decode`."""
    values = ()
    for i in tl.static_range(len(planes)):
        values = values + (device.load(planes[i], first, limit, ROWS, _GROUP),)  # type: ignore[assignment] # noqa: RUF005
    return values


@jit
def none_encode(planes, values, first, limit, index, step, DITHER: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """`NoneCodec.encode` for one tile; see `Codec.device_encode`."""
    for i in tl.static_range(len(planes)):
        device.store(planes[i], values[i], first, limit, ROWS, _GROUP)


class NoneCodec(Codec):
    """fp32 states of any rule. Dither has no meaning here and is ignored."""

    name = "none"
    group = ALIGN
    device_decode = staticmethod(none_decode)
    device_encode = staticmethod(none_encode)

    @property
    def planes(self) -> tuple[Plane, ...]:
        return tuple(Plane(state.name, torch.float32) for state in self.states)

    def decode(self, planes: Sequence[Tensor], numel: int) -> tuple[Tensor, ...]:
        return tuple(plane[:numel].clone() for plane in planes)

    def encode(self, values: Sequence[Tensor], planes: Sequence[Tensor], *, index: int = 0, step: int = 0) -> None:  # noqa: ARG002
        store(planes, values)


CODEC = NoneCodec
