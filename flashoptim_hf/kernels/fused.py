"""The fused path: one generic Triton kernel, which takes rule and codec as compile-time functions, and the one place where it is launched.

A page holds many segments of many parameters. One launch updates them all: the grid runs over *blocks* of one to TILES tiles of one
segment, and each program looks up in tables which segment it works on, and where. Tiles are loaded and stored in the widest words. Weights
and gradients of a tile that allows none, the ragged end of a segment or all of one that does not lie on 16-byte boundaries, are brought to
scratch memory first, one by one, and from there take the same way: there is one body of code, and it knows no masks but for whole groups.
"""

from __future__ import annotations

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
from .rule import Format, Segment, Segments

NUM_WARPS = 1
"""One warp: its threads exchange data without a barrier, where a store wants another order than the arithmetic."""
TILE = NUM_WARPS * 32 * 16
"""Elements of a whole tile: 16 for each thread, so that a thread's codes fill one 128-bit word and four threads hold a group of 64."""
LANES = NUM_WARPS * 32
"""Elements that are brought to scratch memory at a time: one for each thread."""
TILES = 8
"""Most tiles in a block: what a program looks up serves so many."""
ENOUGH = 4096
"""Programs that fill any GPU; below that, blocks are made shorter."""
ROW = 8
"""Numbers in a segment's row: param, grad, start, numel, index, step, lr (a pointer), and how many elements a tile must have left in the
segment to be moved in wide words: TILE, or more than there can be where the segment is not aligned."""
NEVER = 2**31 - 1

_FLOATS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@jit(do_not_specialize=["block"], do_not_specialize_on_alignment=["inv_scale_ptr", "skip_ptr"])
def page_kernel(  # type: ignore[no-untyped-def]
    planes,  # tuple of pointers to the codec's planes, in its order; in place
    correction_ptr,  # int8 or int16, one per element; in place; None where MASTER_BITS is 0
    segments_ptr,  # int64 [segments, ROW]
    hyper_ptr,  # fp32 [segments, NUM_HYPER]; the first is the learning rate, read through the row's pointer
    blocks_ptr,  # int32 [programs, 3]: segment, block within it, and slot of scratch memory
    tables_ptr,  # int64 [segments]: addresses of the codec's tables, fp16; None where it has none
    block,  # elements in a block
    scratch_ptr,  # uint8 [slots, bytes of TILE weights and TILE gradients]
    inv_scale_ptr,  # fp32 or None
    skip_ptr,  # one number or None; where it is not 0, nothing changes
    RULE: tl.constexpr,
    DECODE: tl.constexpr,
    ENCODE: tl.constexpr,
    TABLES: tl.constexpr,  # None where the codec has none
    UNITS: tl.constexpr,  # None where the codec knows no units
    BETAS: tl.constexpr,  # None where the rule is not one of averages; else, with UNITS, RULE takes states as sums
    SETTLE: tl.constexpr,  # None where errors of rounding are not fed back
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MASTER_BITS: tl.constexpr,
    DITHER: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HYPER: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    ROW: tl.constexpr,
):
    """One step of RULE for one block of one segment."""
    if skip_ptr is not None:  # noqa: SIM102
        if tl.load(skip_ptr) != 0:
            return
    entry = blocks_ptr + 3 * tl.program_id(0)
    segment = tl.load(entry)
    begin = tl.load(entry + 1).to(tl.int64) * block
    row = segments_ptr + segment * ROW
    param_ptr = tl.load(row).to(tl.pointer_type(PARAM)) + begin
    grad_ptr = tl.load(row + 1).to(tl.pointer_type(GRAD)) + begin
    first = tl.multiple_of(tl.load(row + 2) + begin, 64)
    limit = tl.minimum(tl.load(row + 3) - begin, block).to(tl.int32)
    index = tl.load(row + 4) + begin
    step = tl.load(row + 5)
    wide = tl.load(row + 7).to(tl.int32)
    slot_bytes: tl.constexpr = TILE * (PARAM.primitive_bitwidth + GRAD.primitive_bitwidth) // 8
    scratch = scratch_ptr + tl.load(entry + 2).to(tl.int64) * slot_bytes
    param_scratch = scratch.to(tl.pointer_type(PARAM))
    grad_scratch = (scratch + TILE * PARAM.primitive_bitwidth // 8).to(tl.pointer_type(GRAD))

    hyper = (tl.load(tl.load(row + 6).to(tl.pointer_type(tl.float32))),)
    for i in tl.static_range(1, NUM_HYPER):
        hyper = hyper + (tl.load(hyper_ptr + segment * NUM_HYPER + i),)  # type: ignore[assignment] # noqa: RUF005
    if tables_ptr is not None:
        planes = planes + (TABLES(tl.load(tables_ptr + segment).to(tl.pointer_type(tl.float16))),)  # noqa: RUF005

    exponents = device.hidden(0x7F800000, block)
    if UNITS is not None:
        planes = planes + (UNITS(hyper, BETAS),)  # noqa: RUF005
    scale = None
    if inv_scale_ptr is not None:
        scale = tl.load(inv_scale_ptr)

    # one bit for each turn: a loop that is not counted is not unrolled either, and these rare ones must not take room
    TURNS: tl.constexpr = (1 << (TILE // LANES)) - 1
    for tile in range(0, limit, TILE):
        at = tl.multiple_of(device.opaque(tile), 64)
        left = limit - at
        p = tl.multiple_of(tl.where(left < wide, param_scratch, param_ptr + at), 16)
        g = tl.multiple_of(tl.where(left < wide, grad_scratch, grad_ptr + at), 16)
        if left < wide:
            lane = tl.arange(0, LANES)
            turns = device.opaque(TURNS)
            while turns != 0:
                tl.store(param_scratch + lane, tl.load(param_ptr + at + lane, mask=lane < left, other=0))
                tl.store(grad_scratch + lane, tl.load(grad_ptr + at + lane, mask=lane < left, other=0))
                lane += LANES
                turns = turns >> 1
            tl.debug_barrier()  # threads read what others wrote
        grad = device.widen(tl.load(g + device.offsets(TILE // GROUP, GROUP)))
        if scale is not None:
            grad = grad * scale
        weight = _read(p, correction_ptr, first + at, left, MASTER_BITS, TILE // GROUP, GROUP)
        states, weight = RULE(DECODE(planes, first + at, left, TILE // GROUP), weight, grad, hyper)
        if SETTLE is None:
            _write(p, correction_ptr, weight, first + at, left, PARAM, MASTER_BITS, TILE // GROUP, GROUP, exponents)
            ENCODE(planes, states, first + at, left, index + at, step, DITHER, TILE // GROUP)
        else:
            lost = ENCODE(planes, states, first + at, left, index + at, step, DITHER, TILE // GROUP)
            weight = SETTLE(states, lost, weight, hyper, step)
            _write(p, correction_ptr, weight, first + at, left, PARAM, MASTER_BITS, TILE // GROUP, GROUP, exponents)
        if left < wide:
            tl.debug_barrier()
            lane = tl.arange(0, LANES)
            turns = device.opaque(TURNS)
            while turns != 0:
                tl.store(param_ptr + at + lane, tl.load(param_scratch + lane), mask=lane < left)
                lane += LANES
                turns = turns >> 1


@jit
def _read(param_ptr, correction_ptr, first, limit, MASTER_BITS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Master weights of one tile, fp32 [ROWS, GROUP]."""
    param = tl.load(param_ptr + device.offsets(ROWS, GROUP))
    if MASTER_BITS == 0:
        weight = param.to(tl.float32)
    else:
        weight = weight_split.device_join(param, device.load(correction_ptr, first, limit, ROWS, GROUP))
    return weight


@jit
def _write(  # type: ignore[no-untyped-def]
    param_ptr,
    correction_ptr,
    weight,
    first,
    limit,
    PARAM: tl.constexpr,
    MASTER_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    exponents,
):
    """Store the master weights of one tile."""
    if MASTER_BITS == 0:
        param = weight_split.round_to(weight, PARAM)
    else:
        param, correction = weight_split.device_split(weight, PARAM, MASTER_BITS, exponents)
        device.store(correction_ptr, correction, first, limit, ROWS, GROUP)
    tl.store(param_ptr + device.offsets(ROWS, GROUP), param)


def update_page(
    planes: Sequence[Tensor],
    segments: Sequence[Segment] | Segments,
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
    segments = Segments.of(segments)
    if segments.uniform:
        return _launch(planes, segments, fmt, inv_scale, skip)
    numel, grad_type = segments.rows[:, 3], segments.rows[:, 7]
    for code in np.unique(grad_type[numel > 0]):
        _launch(planes, segments.some(np.flatnonzero((numel > 0) & (grad_type == code))), fmt, inv_scale, skip)
    return None


def _launch(planes: Sequence[Tensor], segments: Segments, fmt: Format, inv_scale: Tensor | None, skip: Tensor | None) -> None:
    """The one launch site. Gradients have one dtype, and no segment is empty."""
    param, types = segments.params[0], segments.rows[:, 6]
    if not segments.uniform and (types != types[0]).any():
        found = sorted({str(param.dtype) for param in segments.params})
        raise ConfigurationError(f"a page holds parameters of {', '.join(found)}; keep each dtype in pages of its own.")
    codes = tuple(planes[:-1] if fmt.master_bits else planes)
    tables = _Tables(segments)
    if inv_scale is not None:
        inv_scale = inv_scale.float()
    if skip is not None and skip.dtype == torch.bool:
        skip = skip.view(torch.uint8)
    with on_device(param.device):
        page_kernel[(tables.programs,)](
            codes,
            planes[len(codes)] if fmt.master_bits else None,
            tables.rows,
            tables.hyper,
            tables.blocks,
            tables.of_codec,
            tables.block,
            tables.scratch,
            inv_scale,
            skip,
            **specialize(fmt, param.dtype, segments.grad_dtype),
        )


def specialize(fmt: Format, param: torch.dtype, grad: torch.dtype) -> dict[str, Any]:
    """Everything that the kernel is compiled for besides the types of its pointers: compile-time arguments and launch options."""
    units, betas = fmt.codec.device_units, fmt.rule.device_betas
    return {
        "RULE": fmt.rule.device if units is None or betas is None else fmt.rule.device_sums,
        "DECODE": fmt.codec.device_decode,
        "ENCODE": fmt.codec.device_encode,
        "TABLES": fmt.codec.device_tables,
        "UNITS": units,
        "BETAS": betas,
        "SETTLE": fmt.rule.device_settle if fmt.codec.feeds_back else None,
        "PARAM": getattr(tl, _FLOATS[param]),
        "GRAD": getattr(tl, _FLOATS[grad]),
        "MASTER_BITS": fmt.master_bits,
        "DITHER": fmt.codec.dither,
        "GROUP": fmt.codec.group,
        "NUM_HYPER": len(fmt.rule.hyper),
        "TILE": TILE,
        "LANES": LANES,
        "ROW": ROW,
        "num_warps": NUM_WARPS,
        # left to itself, NVIDIA's assembler aims at so few registers here that it spills, or makes the same constants again and again;
        # 12 warps of 16 elements a thread keep a processor busy
        **({"maxnreg": 168} if device.PTX.value and (units is not None or len(fmt.rule.states) < 2) else {}),
        **_triton.LAUNCH,
    }


class _Tables:
    """What the kernel looks up, built on the host and sent in one copy.

    Attributes:
        rows: int64 [segments, ROW].
        hyper: fp32 [segments, NUM_HYPER].
        blocks: int32 [programs, 3].
        of_codec: int64 [segments], or None.
        block: elements in a block.
        scratch: uint8, what the programs need that may not use wide words.
        programs: size of the grid.
    """

    def __init__(self, segments: Segments) -> None:
        param, rows, hyper = segments.params[0], segments.rows, segments.hyper
        where = param.device
        lowest = rows[:, :2].astype(np.uint8)  # the low byte of each address
        whether_narrow = None
        if lowest.tobytes().translate(None, _ON_16_BYTES):
            whether_narrow = ((lowest & 15) != 0).any(1).tobytes()
        dealt = _deal(rows[:, 3].tobytes(), whether_narrow, hyper.shape[1])
        self.block, self.programs = dealt.block, dealt.programs
        self.scratch = torch.empty(dealt.slots * TILE * (param.itemsize + segments.grad_dtype.itemsize), dtype=torch.uint8, device=where)
        sizes = dealt.sizes if segments.tables is None else [*dealt.sizes, len(rows)]
        sent, host = room(sum(sizes), where, torch.int64)

        words = host.numpy()
        table = words[: rows.size].reshape(rows.shape)
        table[:] = rows
        table[:, 7] = dealt.wide
        if segments.lr is None:
            table[:, 6] = dealt.rates_of(sent.data_ptr())
        else:
            # kept until the launch, behind which the allocator reuses memory in order
            self._lr = {id(lr): lr.detach().to(where, torch.float32) for lr in segments.lr}
            table[:, 6] = [self._lr[id(lr)].data_ptr() for lr in segments.lr]
        scalars = words[rows.size : dealt.fixed].view(np.float32)
        scalars[: hyper.size] = hyper.reshape(-1)
        end = dealt.fixed + len(dealt.tail)
        words[dealt.fixed : end] = dealt.tail
        if segments.tables is not None:
            words[end:] = list(map(Tensor.data_ptr, segments.tables))
        if host is not sent:
            sent.copy_(host, non_blocking=True)
        self.rows, of_hyper, of_blocks, *of_codec = torch.split_with_sizes(sent, sizes)
        self.hyper, self.blocks = of_hyper.view(torch.float32), of_blocks.view(torch.int32)
        self.of_codec = of_codec[0] if of_codec else None


_ON_16_BYTES = bytes(range(0, 256, 16))


class _Dealt:
    """What a page's tables have in common from step to step.

    Attributes:
        block, programs, slots: elements in a block; size of the grid; slots of scratch memory.
        sizes: words of 8 bytes of rows, scalars and blocks, each a multiple of 2.
        wide: the last column of the rows: one number for all of them, or an array.
        tail: the blocks, int64. fixed: where they begin, in words.
    """

    def __init__(self, numels: bytes, whether_narrow: bytes | None, width: int) -> None:
        blocks, self.block, self.slots = _blocks(numels, whether_narrow)
        count, self.programs = len(numels) // 8, len(blocks)
        self.sizes = [-(-nbytes // 16) * 2 for nbytes in (8 * ROW * count, 4 * width * count, blocks.nbytes)]
        self.fixed = self.sizes[0] + self.sizes[1]
        self.wide: int | np.ndarray = TILE
        if whether_narrow is not None:
            self.wide = np.where(np.frombuffer(whether_narrow, dtype=bool), NEVER, TILE)
        # one tuple, which is replaced as a whole: another thread's step may be under way
        self._rates = np.arange(count) * (4 * width) + 8 * self.sizes[0], 0
        self.tail = np.zeros(self.sizes[2], dtype=np.int64)
        self.tail.view(np.int32)[: blocks.size] = blocks.reshape(-1)

    def rates_of(self, base: int) -> np.ndarray:
        """The address of each row's learning rate in tables that begin at `base`: often the same memory as the step before."""
        rates, before = self._rates
        if base != before:
            rates = rates + (base - before)
            self._rates = rates, base
        return rates


_deal = lru_cache(maxsize=1024)(_Dealt)


def room(count: int, where: torch.device, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, Tensor]:
    """Memory for tables on a device, and on the host to copy them from, so many numbers; both are one on the CPU."""
    sent = torch.empty(count, dtype=dtype, device=where)
    return sent, sent if where.type == "cpu" else _host_room(count, dtype)


def _host_room(count: int, dtype: torch.dtype) -> Tensor:
    """Host memory to copy from: pinned, so that the copy holds nobody up, or pageable where pinning is refused."""
    try:
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(count, dtype=dtype, device="cpu")


def _blocks(numels: bytes, whether_narrow: bytes | None = None) -> tuple[np.ndarray, int, int]:
    """How segments are dealt out to programs.

    Args:
        numels: of each segment, int64.
        whether_narrow: of each segment, bool: it does not lie on 16-byte boundaries. None: all do.

    Returns:
        (int32 [programs, 3]: every block of every segment, as (segment, block within it, slot of scratch memory); elements in a block;
        slots). A block has a slot of its own where it holds a tile that may not be moved in wide words.
    """
    sizes = np.frombuffer(numels, dtype=np.int64)
    narrow_one = np.zeros(len(sizes), dtype=bool) if whether_narrow is None else np.frombuffer(whether_narrow, dtype=bool)
    block = TILE
    while block < TILE * TILES and (-(-sizes // block)).sum() > ENOUGH:
        block *= 2
    while (-(-sizes[narrow_one] // block)).sum() > 4 * ENOUGH:  # bounds the scratch memory
        block *= 2
    counts = -(-sizes // block)
    segment = np.repeat(np.arange(len(sizes)), counts)
    within = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    ragged = (within + 1 == counts[segment]) & (sizes[segment] % TILE != 0)
    narrow = ragged | narrow_one[segment]
    slot = np.where(narrow, np.cumsum(narrow) - 1, 0)
    return np.stack([segment, within, slot], 1).astype(np.int32), block, int(narrow.sum())


def on_device(where: torch.device) -> AbstractContextManager[Any]:
    """Make a device current: Triton launches on the current one, whatever the tensors say."""
    return nullcontext() if where.type == "cpu" else torch.get_device_module(where).device(where)


assert TILE % ALIGN == 0  # a tile must begin where a group does
