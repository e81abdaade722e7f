"""Arithmetic that Triton functions of codecs and rules share: special functions in one instruction, bytes to floats and back, dither.

Every function has two forms. The PTX form is what NVIDIA hardware does best and is not reachable through Triton's own operations; the plain
form says the same in Triton's operations, for other hardware and for Triton's interpreter.
"""

from __future__ import annotations

import torch

from .._triton import INTERPRET, jit, tl

PTX = tl.constexpr(not INTERPRET and torch.version.hip is None and getattr(torch.version, "xpu", None) is None)

# fp32 numbers from 2^23 to 2^24 are the integers: adding 2^23 (1.5 * 2^23 where the sum may be negative) leaves the rounded integer in the
# low bits, without the slow conversion pipe
MAGIC = tl.constexpr(8388608.0)
SIGNED_MAGIC = tl.constexpr(12582912.0)


@jit
def exp2(x):  # type: ignore[no-untyped-def]
    """2^x to 2^-22, 0 below 2^-126; in one instruction, since the subnormal results that Triton's own form scales for are never needed."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1) if PTX else tl.exp2(x)


@jit
def log2(x):  # type: ignore[no-untyped-def]
    """log2 x to 2^-22, -inf where x is 0 or subnormal; in one instruction, Triton's own form calls a library."""
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1) if PTX else tl.log2(x)


@jit
def sqrt(x):  # type: ignore[no-untyped-def]
    """Square root to 2^-22."""
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1) if PTX else tl.sqrt(x)


@jit
def reciprocal(x):  # type: ignore[no-untyped-def]
    """1 / x to 2^-23."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1) if PTX else 1.0 / x


@jit
def uint8_to_float(x):  # type: ignore[no-untyped-def]
    """uint8 tile to fp32, exactly: the byte becomes the low mantissa bits of 2^23."""
    return (x.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - MAGIC


@jit
def int8_to_float(x):  # type: ignore[no-untyped-def]
    """int8 tile to fp32, exactly: with the sign bit flipped it is a uint8 that is 128 too large."""
    return ((x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (MAGIC + 128.0)


@jit
def floor_magic(x):  # type: ignore[no-untyped-def]
    """For 0 < x < 256: floor(x) - 128 as an integer in the low bits of the result, an addition rounded down."""
    if PTX:
        result = tl.inline_asm_elementwise("add.rm.f32 $0, $1, 0f4B3FFF80;", "=f,f", [x], tl.float32, True, 1)
    else:
        result = tl.floor(x) + (SIGNED_MAGIC - 128.0)
    return result


@jit
def dither(index, step, ELEMENT: tl.constexpr, TIME: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """128 + d, fp32 [ROWS, GROUP], with d the dither of `base.weyl` in its upper 16 bits.

    Sixteen bits, since they can be moved below the exponent of 128 as they are; the rest of the sequence could move one rounding in 65536.
    """
    start = index.to(tl.uint32) * ELEMENT + step.to(tl.uint32) * TIME
    w = start + offsets(ROWS, GROUP).to(tl.uint32) * ELEMENT
    return ((w >> 16) | 0x43000000).to(tl.float32, bitcast=True)


@jit
def offsets(ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Positions within a tile, int32 [ROWS, GROUP]."""
    return tl.arange(0, ROWS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@jit
def load(plane, first, limit, FULL: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """One entry per element of the tile that begins at element `first`, [ROWS, GROUP]; 0 for elements from `limit` on, unless FULL."""
    at = offsets(ROWS, GROUP)
    return tl.load(plane + first + at) if FULL else tl.load(plane + first + at, mask=at < limit, other=0)


@jit
def store(plane, value, first, limit, FULL: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write one entry per element, those from `limit` on excepted, unless FULL."""
    at = offsets(ROWS, GROUP)
    if FULL:
        tl.store(plane + first + at, value)
    else:
        tl.store(plane + first + at, value, mask=at < limit)


@jit
def load_groups(plane, first, limit, FULL: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """One entry per group of the tile, [ROWS, 1]; 0 for groups that begin at `limit` or later, unless FULL."""
    row = tl.arange(0, ROWS)[:, None]
    at = plane + first // GROUP + row
    return tl.load(at) if FULL else tl.load(at, mask=row * GROUP < limit, other=0)


@jit
def store_groups(plane, value, first, limit, FULL: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write one entry per group, those that begin at `limit` or later excepted, unless FULL."""
    row = tl.arange(0, ROWS)[:, None]
    if FULL:
        tl.store(plane + first // GROUP + row, value)
    else:
        tl.store(plane + first // GROUP + row, value, mask=row * GROUP < limit)
