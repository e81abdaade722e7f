"""`none`: fp32 states, uncompressed. The baseline: 4 bytes per state and parameter, bit for bit what fp32 arithmetic gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import ALIGN, Codec, Plane, store


class NoneCodec(Codec):
    """fp32 states of any rule. Dither has no meaning here and is ignored."""

    name = "none"
    group = ALIGN

    @property
    def planes(self) -> tuple[Plane, ...]:
        return tuple(Plane(state.name, torch.float32) for state in self.states)

    def decode(self, planes: Sequence[Tensor], numel: int) -> tuple[Tensor, ...]:
        return tuple(plane[:numel].clone() for plane in planes)

    def encode(self, values: Sequence[Tensor], planes: Sequence[Tensor], *, index: int = 0, step: int = 0) -> None:  # noqa: ARG002
        store(planes, values)


CODEC = NoneCodec
