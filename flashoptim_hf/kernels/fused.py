"""The fused path: one generic Triton kernel, which takes rule and codec as compile-time functions, and the one place where it is launched.

A page holds many segments of many parameters. One launch updates them all: the grid runs over *blocks* of at most TILE * TILES elements of
one segment, and each program looks up in tables which segment it works on, and where. Whole tiles of segments that lie on 16-byte
boundaries are loaded and stored in the widest words; what is left of a segment, and segments that do not lie there, go through a second,
masked loop over small tiles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import _triton
from .._triton import jit, tl
from ..codecs import device, weight_split
from ..codecs.base import ALIGN
from ..errors import ConfigurationError
from .rule import Format, Segment

NUM_WARPS = 4
TILE = NUM_WARPS * 32 * 16
"""Elements of a whole tile: 16 for each thread, so that a thread's codes fill one 128-bit word and four threads hold a group of 64."""
SMALL = 256
"""Elements of a masked tile."""
TILES = 4
"""Whole tiles in a block: what a program looks up serves so many."""
ROW = 8
"""Numbers in a segment's row: param, grad, start, numel, index, step, lr (a pointer), aligned."""

_FLOATS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@jit(do_not_specialize_on_alignment=["inv_scale_ptr", "skip_ptr"])
def page_kernel(  # type: ignore[no-untyped-def]
    planes,  # tuple of pointers to the codec's planes, in its order; in place
    correction_ptr,  # int8 or int16, one per element; in place; None where MASTER_BITS is 0
    segments_ptr,  # int64 [segments, ROW]
    hyper_ptr,  # fp32 [segments, NUM_HYPER]; the first is the learning rate, read through the row's pointer
    blocks_ptr,  # int32 [programs, 2]: segment, and block within it
    inv_scale_ptr,  # fp32 or None
    skip_ptr,  # one number or None; where it is not 0, nothing changes
    RULE: tl.constexpr,
    DECODE: tl.constexpr,
    ENCODE: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MASTER_BITS: tl.constexpr,
    DITHER: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HYPER: tl.constexpr,
    TILE: tl.constexpr,
    SMALL: tl.constexpr,
    TILES: tl.constexpr,
    ROW: tl.constexpr,
):
    """One step of RULE for one block of one segment."""
    if skip_ptr is not None:  # noqa: SIM102
        if tl.load(skip_ptr) != 0:
            return
    program = tl.program_id(0)
    segment = tl.load(blocks_ptr + 2 * program)
    begin = tl.load(blocks_ptr + 2 * program + 1).to(tl.int64) * (TILE * TILES)
    row = segments_ptr + segment * ROW
    param_ptr = tl.load(row).to(tl.pointer_type(PARAM)) + begin
    grad_ptr = tl.load(row + 1).to(tl.pointer_type(GRAD)) + begin
    first = tl.multiple_of(tl.load(row + 2) + begin, 64)
    limit = tl.minimum(tl.load(row + 3) - begin, TILE * TILES).to(tl.int32)
    index = tl.load(row + 4) + begin
    step = tl.load(row + 5)
    aligned = tl.load(row + 7).to(tl.int32)

    hyper = (tl.load(tl.load(row + 6).to(tl.pointer_type(tl.float32))),)
    for i in tl.static_range(1, NUM_HYPER):
        hyper = hyper + (tl.load(hyper_ptr + segment * NUM_HYPER + i),)  # type: ignore[assignment] # noqa: RUF005
    scale = None
    if inv_scale_ptr is not None:
        scale = tl.load(inv_scale_ptr)

    whole = limit // TILE * aligned * TILE
    for at in range(0, whole, TILE):
        p = tl.multiple_of(param_ptr + at, 16)
        g = tl.multiple_of(grad_ptr + at, 16)
        weight, grad = _read(p, g, correction_ptr, first + at, TILE, scale, MASTER_BITS, True, TILE // GROUP, GROUP)
        states, weight = RULE(DECODE(planes, first + at, TILE, True, TILE // GROUP), weight, grad, hyper)
        _write(p, correction_ptr, weight, first + at, TILE, PARAM, MASTER_BITS, True, TILE // GROUP, GROUP)
        ENCODE(planes, states, first + at, TILE, index + at, step, DITHER, True, TILE // GROUP)
    for at in range(whole, limit, SMALL):
        p = param_ptr + at
        left = limit - at
        weight, grad = _read(p, grad_ptr + at, correction_ptr, first + at, left, scale, MASTER_BITS, False, SMALL // GROUP, GROUP)
        states, weight = RULE(DECODE(planes, first + at, left, False, SMALL // GROUP), weight, grad, hyper)
        _write(p, correction_ptr, weight, first + at, left, PARAM, MASTER_BITS, False, SMALL // GROUP, GROUP)
        ENCODE(planes, states, first + at, left, index + at, step, DITHER, False, SMALL // GROUP)


@jit
def _read(  # type: ignore[no-untyped-def]
    param_ptr,
    grad_ptr,
    correction_ptr,
    first,
    limit,
    scale,
    MASTER_BITS: tl.constexpr,
    FULL: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Master weights and scaled gradients of one tile, fp32 [ROWS, GROUP]."""
    grad = device.load(grad_ptr, 0, limit, FULL, ROWS, GROUP).to(tl.float32)
    if scale is not None:
        grad = grad * scale
    param = device.load(param_ptr, 0, limit, FULL, ROWS, GROUP)
    if MASTER_BITS == 0:
        weight = param.to(tl.float32)
    else:
        weight = weight_split.device_join(param, device.load(correction_ptr, first, limit, FULL, ROWS, GROUP))
    return weight, grad


@jit
def _write(  # type: ignore[no-untyped-def]
    param_ptr,
    correction_ptr,
    weight,
    first,
    limit,
    PARAM: tl.constexpr,
    MASTER_BITS: tl.constexpr,
    FULL: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store the master weights of one tile."""
    if MASTER_BITS == 0:
        param = weight_split.round_to(weight, PARAM)
    else:
        param, correction = weight_split.device_split(weight, PARAM, MASTER_BITS)
        device.store(correction_ptr, correction, first, limit, FULL, ROWS, GROUP)
    device.store(param_ptr, param, 0, limit, FULL, ROWS, GROUP)


@torch.no_grad()
def update_page(
    planes: Sequence[Tensor],
    segments: Sequence[Segment],
    fmt: Format,
    *,
    inv_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Apply one step of `fmt.rule` to every segment of a page, in place, with one launch per dtype of gradients. Waits for nothing.

    Args:
        planes: the page's planes, flat: those of `fmt.codec` in its order, then the corrections when `fmt.master_bits` is not 0.
        segments: what to update; `param` and the planes change, `grad` does not. All parameters have one dtype.
        inv_scale: 0-dim on the page's device; gradients are multiplied by it.
        skip: 0-dim on the page's device; where it is not 0, nothing changes.

    Raises:
        UnsupportedError: Triton is not installed.
        ConfigurationError: segments that one launch cannot serve; the message names what differs.
    """
    _triton.require()
    by_grad: dict[torch.dtype, list[Segment]] = defaultdict(list)
    for segment in segments:
        if segment.param.numel():
            by_grad[segment.grad.dtype].append(segment)
    for members in by_grad.values():
        _launch(planes, members, fmt, inv_scale, skip)


def _launch(planes: Sequence[Tensor], segments: list[Segment], fmt: Format, inv_scale: Tensor | None, skip: Tensor | None) -> None:
    """The one launch site. All segments have the same dtypes."""
    dtype = segments[0].param.dtype
    if any(segment.param.dtype != dtype for segment in segments):
        found = sorted({str(segment.param.dtype) for segment in segments})
        raise ConfigurationError(f"a page holds parameters of {', '.join(found)}; keep each dtype in pages of its own.")
    codes = tuple(planes[: len(fmt.codec.planes)])
    correction = planes[len(codes)] if fmt.master_bits else None
    tables = _Tables(segments, planes)
    if inv_scale is not None:
        inv_scale = inv_scale.float()
    if skip is not None and skip.dtype == torch.bool:
        skip = skip.view(torch.uint8)
    with _on(segments[0].param.device):
        page_kernel[(tables.programs,)](
            codes,
            correction,
            tables.rows,
            tables.hyper,
            tables.blocks,
            inv_scale,
            skip,
            RULE=fmt.rule.device,
            DECODE=fmt.codec.device_decode,
            ENCODE=fmt.codec.device_encode,
            PARAM=getattr(tl, _FLOATS[dtype]),
            GRAD=getattr(tl, _FLOATS[segments[0].grad.dtype]),
            MASTER_BITS=fmt.master_bits,
            DITHER=fmt.codec.dither,
            GROUP=fmt.codec.group,
            NUM_HYPER=len(fmt.rule.hyper),
            TILE=TILE,
            SMALL=SMALL,
            TILES=TILES,
            ROW=ROW,
            num_warps=NUM_WARPS,
            **_triton.LAUNCH,
        )


class _Tables:
    """What the kernel looks up, built on the host and sent in one copy.

    Attributes:
        rows: int64 [segments, ROW].
        hyper: fp32 [segments, NUM_HYPER].
        blocks: int32 [programs, 2].
        programs: size of the grid.
    """

    def __init__(self, segments: list[Segment], planes: Sequence[Tensor]) -> None:
        where = segments[0].param.device
        count, width = len(segments), len(segments[0].hyper)
        blocks = _blocks(tuple(segment.param.numel() for segment in segments))
        self.programs = len(blocks)
        sizes = (count * ROW * 8, count * width * 4, blocks.nbytes)
        starts = [0, _round_up(sizes[0]), _round_up(sizes[0]) + _round_up(sizes[1])]
        total = starts[2] + sizes[2]
        sent = torch.empty(total, dtype=torch.uint8, device=where)
        # pinned, so that the copy neither waits for the device nor holds the host up
        host = sent if where.type == "cpu" else torch.empty(total, dtype=torch.uint8, pin_memory=True)

        aligned = all(plane.data_ptr() % 16 == 0 for plane in planes)
        lr_at = range(sent.data_ptr() + starts[1], sent.data_ptr() + starts[2], width * 4)
        self._keep: list[Tensor] = []
        rows: list[int] = []
        hyper: list[float] = []
        for segment, at in zip(segments, lr_at, strict=False):
            param, grad = segment.param.data_ptr(), segment.grad.data_ptr()
            lr = segment.hyper[0]
            if isinstance(lr, Tensor):
                at, lr = self._pointer(lr, where), 0.0
            whole = aligned and (param | grad) % 16 == 0
            rows += (param, grad, segment.start, segment.param.numel(), segment.index, segment.step, at, whole)
            hyper += (lr, *segment.hyper[1:])
        bytes_ = host.numpy()
        bytes_[: sizes[0]].view(np.int64)[:] = rows
        bytes_[starts[1] : starts[1] + sizes[1]].view(np.float32)[:] = hyper
        bytes_[starts[2] :].view(np.int32)[:] = blocks.reshape(-1)
        if host is not sent:
            sent.copy_(host, non_blocking=True)
        self.rows = sent[: sizes[0]].view(torch.int64)
        self.hyper = sent[starts[1] : starts[1] + sizes[1]].view(torch.float32)
        self.blocks = sent[starts[2] :].view(torch.int32)

    def _pointer(self, lr: Tensor, where: torch.device) -> int:
        """Address of a learning rate as fp32 on the page's device."""
        lr = lr.detach().to(device=where, dtype=torch.float32)
        self._keep.append(lr)
        return lr.data_ptr()


def _round_up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


@lru_cache(maxsize=1024)
def _blocks(numels: tuple[int, ...]) -> np.ndarray:
    """int32 [programs, 2]: every block of every segment, as (segment, block within it)."""
    counts = -(-np.asarray(numels, dtype=np.int64) // (TILE * TILES))
    segment = np.repeat(np.arange(len(numels)), counts)
    block = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([segment, block], 1).astype(np.int32)


def _on(where: torch.device) -> AbstractContextManager[Any]:
    """Make a device current: Triton launches on the current one, whatever the tensors say."""
    return nullcontext() if where.type == "cpu" else torch.get_device_module(where).device(where)


assert TILE % ALIGN == SMALL % ALIGN == 0  # a tile must begin where a group does
