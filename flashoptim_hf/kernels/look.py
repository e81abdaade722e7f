"""A look at all gradients of a step in one launch: is there a NaN, an infinity, or a number too large to be squared?

The magnitudes of floats are ordered as their bits are, with infinity above all numbers and NaN above infinity. So a look is a maximum over
integers, the same for every dtype but for the width of a word and the limit, and it runs at the speed of memory.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from .. import _triton
from .._triton import jit, tl
from .fused import on_device, room
from .rule import DTYPE_CODE, LIMIT

NUM_WARPS = 4
TILE = 16 * 32 * NUM_WARPS
"""Elements that a program reads at a time: 16 for each thread, so that a 16-bit gradient is two 128-bit words for it."""
TILES = 4
"""Tiles in a block, unless there are so many blocks that each is made longer."""
ENOUGH = 4096
"""Programs that fill any GPU, several times over."""
WIDE = 16
"""Bytes: where the widest words may begin."""
HEAD = 2
"""Words of 8 bytes before the spans in the table: the flag is in the first."""

_EXPONENT = round(math.log2(LIMIT))
# (bytes of a word, bits of the magnitude, the smallest magnitude that counts as infinite), by `DTYPE_CODE`
_WORDS = {
    torch.bfloat16: (2, 0x7FFF, (127 + _EXPONENT) << 7),
    torch.float16: (2, 0x7FFF, 0x7C00),  # infinity: no number is that large
    torch.float32: (4, 0x7FFFFFFF, (127 + _EXPONENT) << 23),
}
_BY_CODE = {DTYPE_CODE[dtype]: word for dtype, word in _WORDS.items()}


@jit(do_not_specialize=["blocks_at", "block"])
def look_kernel(  # type: ignore[no-untyped-def]
    table_ptr,  # fp32: the flag, 0 before, which becomes 1 where an element is not below the limit; behind it, at 16 bytes,
    #             int64 [spans, 2]: address, elements; an address is a multiple of the word
    blocks_at,  # where the next begins, in words of 8 bytes: int32 [programs, 2]: span, block within it
    block,  # elements in a block
    WORD: tl.constexpr,
    NBYTES: tl.constexpr,
    MAGNITUDE: tl.constexpr,
    INFINITE: tl.constexpr,  # the smallest magnitude that counts as infinite, as bits
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    HEAD: tl.constexpr,  # words before the spans
):
    """Look at one block of one span."""
    words = table_ptr.to(tl.pointer_type(tl.int64))
    entry = (words + blocks_at).to(tl.pointer_type(tl.int32)) + 2 * tl.program_id(0)
    span = words + HEAD + 2 * tl.load(entry).to(tl.int64)
    begin = tl.load(entry + 1).to(tl.int64) * block
    address = tl.load(span) + begin * NBYTES
    left = tl.minimum(tl.load(span + 1) - begin, block).to(tl.int32)
    # what lies before the first 16-byte boundary is read narrowly, and so is what is left of the last tile
    lead = tl.minimum(((WIDE - address % WIDE) % WIDE // NBYTES).to(tl.int32), left)
    ends = address.to(tl.pointer_type(WORD))
    body = tl.multiple_of((address + lead.to(tl.int64) * NBYTES).to(tl.pointer_type(WORD)), WIDE)
    lane = tl.arange(0, TILE)
    full = (left - lead) // TILE * TILE
    worst = tl.zeros([TILE], dtype=tl.int32)
    for at in range(0, full, TILE):
        worst = tl.maximum(worst, tl.load(body + at + lane).to(tl.int32) & MAGNITUDE)
    tail = lead + full + lane
    worst = tl.maximum(worst, tl.load(ends + tail, mask=tail < left, other=0).to(tl.int32) & MAGNITUDE)
    edge = tl.arange(0, WIDE)
    head = tl.load(ends + edge, mask=edge < lead, other=0).to(tl.int32) & MAGNITUDE
    # whoever finds something writes the same
    if tl.maximum(tl.max(worst, axis=0), tl.max(head, axis=0)) >= INFINITE:
        tl.store(table_ptr, 1.0)


def too_large(addresses: np.ndarray, numels: np.ndarray, codes: int | np.ndarray, where: torch.device) -> Tensor:
    """Whether any gradient holds NaN, infinity or a magnitude of at least `rule.LIMIT`. One launch per dtype; waits for nothing.

    Args:
        addresses, numels: int64, of contiguous gradients on `where`, whose memory stays theirs until the launch is queued; at least one is
            not empty.
        codes: of their dtypes, as in `DTYPE_CODE`: an array, or one for all.
        where: the device.

    Returns:
        fp32, 0-dim, on `where`: 1 or 0.
    """
    _triton.require()
    dealt = _deal(numels.tobytes(), codes if isinstance(codes, int) else codes.tobytes())
    sent, host = room(2 * len(dealt.table), where, torch.float32)
    words = host.numpy().view(np.int64)
    words[:] = dealt.table
    words[HEAD : dealt.ends : 2] = addresses
    if host is not sent:
        sent.copy_(host, non_blocking=True)
    with on_device(where):
        for code, programs, start, block in dealt.launches:
            look_kernel[(programs,)](sent, start, block, **specialize(code))
    return sent[0]


class _Dealt:
    """What the tables of looks at the same spans have in common.

    Attributes:
        table: int64: the flag, which is 0 and comes with the table, so that nothing has to be launched to make it so; address (left open)
            and elements of each span; and the blocks.
        ends: where the spans end in it.
        launches: of each dtype (its code, programs, where its blocks begin, elements in a block).
    """

    def __init__(self, numels: bytes, codes: int | bytes) -> None:
        sizes = np.frombuffer(numels, dtype=np.int64)
        if isinstance(codes, int):
            parts = [(codes, *_blocks(sizes))]
        else:
            of = np.frombuffer(codes, dtype=np.int64)
            parts = [(int(code), *_blocks(np.where(of == code, sizes, 0))) for code in np.unique(of)]
        self.ends = HEAD + 2 * len(sizes)
        starts = list(accumulate((len(blocks) for _, blocks, _ in parts), initial=self.ends))
        self.table = np.zeros(starts[-1], dtype=np.int64)
        self.table[HEAD + 1 : self.ends : 2] = sizes
        self.launches = []
        for (code, blocks, block), start in zip(parts, starts, strict=False):
            self.table[start : start + len(blocks)] = blocks
            if len(blocks):
                self.launches.append((code, len(blocks), start, block))


_deal = lru_cache(maxsize=64)(_Dealt)


@lru_cache(maxsize=8)
def specialize(code: int) -> dict[str, object]:
    """Everything that the kernel is compiled for besides the types of its pointers, for gradients of the dtype of this code."""
    nbytes, magnitude, limit = _BY_CODE[code]
    return {
        "WORD": tl.int16 if nbytes == 2 else tl.int32,
        "NBYTES": nbytes,
        "MAGNITUDE": magnitude,
        "INFINITE": limit,
        "TILE": TILE,
        "WIDE": WIDE,
        "HEAD": HEAD,
        "num_warps": NUM_WARPS,
        **_triton.LAUNCH,
    }


def _blocks(sizes: np.ndarray) -> tuple[np.ndarray, int]:
    """How spans are dealt out to programs.

    Args:
        sizes: int64, the elements of each span.

    Returns:
        int64 [programs]: every block of every span, as int32 (span, block within it) in one word; elements in a block.
    """
    block = TILE * TILES
    # less than one block of each span is not full, so this ends
    while (-(-sizes // block)).sum() > ENOUGH + np.count_nonzero(sizes):
        block *= 2
    counts = -(-sizes // block)
    span = np.repeat(np.arange(len(sizes)), counts)
    within = np.arange(len(span)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([span, within], 1).astype(np.int32).view(np.int64).reshape(-1), block
