"""The readable path: decode, apply the rule, encode, in plain torch on any device. The reference for every other path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..codecs import weight_split
from .rule import Format, Segment, Segments

CHUNK = 1 << 18
"""Elements worked on at once: bounds the fp32 temporaries whatever the size of a parameter. A multiple of every group size."""


@torch.no_grad()
def update_page(
    planes: Sequence[Tensor],
    segments: Sequence[Segment] | Segments,
    fmt: Format,
    *,
    inv_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Apply one step of `fmt.rule` to every segment of a page, in place.

    Args:
        planes: the page's planes, flat: those of `fmt.codec` in its order, then the corrections when `fmt.master_bits` is not 0.
        segments: what to update; `param` and the planes change, `grad` does not.
        inv_scale: 0-dim fp32 on the page's device; gradients are multiplied by it.
        skip: 0-dim on the page's device; where it is not 0, nothing changes. Read on the host here, so it waits for the device.
    """
    if skip is not None and bool(skip):
        return
    for segment in segments:
        for begin in range(0, segment.param.numel(), CHUNK):
            _update_chunk(planes, segment, begin, min(begin + CHUNK, segment.param.numel()), fmt, inv_scale)


def _update_chunk(planes: Sequence[Tensor], segment: Segment, begin: int, end: int, fmt: Format, inv_scale: Tensor | None) -> None:
    specs = fmt.codec.planes
    views = [_cut(plane, spec.group, segment.start + begin, end - begin) for plane, spec in zip(planes, specs, strict=False)]
    if segment.table is not None:
        views.append(segment.table)
    param, grad = segment.param[begin:end], segment.grad[begin:end].float()
    if inv_scale is not None:
        grad = grad * inv_scale

    if fmt.master_bits:
        correction = _cut(planes[len(specs)], 1, segment.start + begin, end - begin)
        weight = weight_split.join(param, correction)
    else:
        weight = param.float()
    states, weight = fmt.rule.eager(fmt.codec.decode(views, end - begin), weight, grad, segment.hyper)
    lost = fmt.codec.encode(states, views, index=segment.index + begin, step=segment.step)
    if lost is not None and fmt.rule.settle is not None:
        weight = fmt.rule.settle(states, lost, weight, segment.hyper, segment.step)
    if fmt.master_bits:
        p, c = weight_split.split(weight, param.dtype, fmt.master_bits)
        param.copy_(p)
        correction.copy_(c)
    else:
        param.copy_(weight)


def _cut(plane: Tensor, group: int, start: int, numel: int) -> Tensor:
    """The entries of elements [start, start + numel) in a plane; start is a multiple of the plane's group."""
    return plane[start // group : -(-(start + numel) // group)]
