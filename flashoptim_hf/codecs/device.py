"""Arithmetic that Triton functions of codecs and rules share: special functions in one instruction, bytes to floats and back, dither.

Every function has two forms. The PTX form is what NVIDIA hardware does best and is not reachable through Triton's own operations; the plain
form says the same in Triton's operations, for other hardware and for Triton's interpreter.
"""

from __future__ import annotations

import torch

from .._triton import INTERPRET, jit, tl

PTX = tl.constexpr(not INTERPRET and torch.version.hip is None and getattr(torch.version, "xpu", None) is None)
"""Whether this torch drives NVIDIA GPUs, or none, when kernels are compiled for them ahead of time."""

# fp32 numbers from 2^23 to 2^24 are the integers: adding 2^23 (1.5 * 2^23 where the sum may be negative) leaves the rounded integer in the
# low bits, without the slow conversion pipe
MAGIC = tl.constexpr(8388608.0)
SIGNED_MAGIC = tl.constexpr(12582912.0)

# prmt takes one byte for each digit of its selector, the lowest last: 0 to 3 from its first operand, 4 to 7 from its second, with 8 added
# for eight copies of that byte's top bit
_BYTES = tl.constexpr("".join(f"prmt.b32 ${i}, $4, 0x4B, 0x455{i};" for i in range(4)))
_SIGNED_BYTES = tl.constexpr(
    "{ .reg .b32 x; xor.b32 x, $4, 0x80808080;" + "".join(f"prmt.b32 ${i}, x, 0x47, 0x45{i}5;" for i in range(4)) + "}"
)
# lop3 takes any function of three words: its last operand is what the function makes of 0xF0, 0xCC and 0xAA, here not (a or b)
_LATTICE = tl.constexpr(
    "{ .reg .b32 z; and.b32 z, $4, 0x7F7F7F7F; add.u32 z, z, 0x7F7F7F7F; lop3.b32 z, z, $4, $4, 0x03;"
    + "".join(f"prmt.b32 ${i}, $4, z, 0x{d}{i}{d}{d};" for i, d in enumerate("CDEF"))
    + "}"
)

# two fp32 numbers to one word of two bf16 numbers; these as fp32; and their exponents with the upper half of the mantissa's range
_BF16 = tl.constexpr(
    "cvt.rn.bf16x2.f32 $0, $6, $5; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xFFFF0000;"
    "lop3.b32 $3, $1, $7, 0x400000, 0xEA; lop3.b32 $4, $2, $8, 0x400000, 0xEA;"
)

# $0 is nothing: an instruction has to have a result
_STORE_16, _STORE_32 = (
    tl.constexpr(f"{{ .reg .pred q; setp.ne.u32 q, $3, 0; @q st.global.b{bits} [$1], $2; mov.b32 $0, 0; }}") for bits in (16, 32)
)

# four neighbours in a row, of which the first is given; a shift of 64 bits, whose upper half brings in the exponent of 1
_FRACTIONS = tl.constexpr(
    "{ .reg .b32 x; mov.b32 x, $4;" + "add.u32 x, x, $8;".join(f"shf.r.wrap.b32 ${i}, x, 0x7F, 9;" for i in range(4)) + "}"
)


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
def sqrt_abs(x):  # type: ignore[no-untyped-def]
    """Square root of |x| to 2^-22."""
    if PTX:
        text: tl.constexpr = "{ .reg .f32 x; abs.f32 x, $1; sqrt.approx.ftz.f32 $0, x; }"
        result = tl.inline_asm_elementwise(text, "=f,f", [x], tl.float32, True, 1)
    else:
        result = tl.sqrt(tl.abs(x))
    return result


@jit
def rsqrt(x):  # type: ignore[no-untyped-def]
    """1 / sqrt(x) to 2^-22."""
    return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1) if PTX else tl.rsqrt(x)


@jit
def reciprocal(x):  # type: ignore[no-untyped-def]
    """1 / x to 2^-23."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1) if PTX else 1.0 / x


@jit
def uint8_to_float(x):  # type: ignore[no-untyped-def]
    """uint8 tile to fp32, exactly: each byte becomes the low mantissa bits of 2^23."""
    if PTX:
        result = tl.inline_asm_elementwise(_BYTES, "=&f,=&f,=&f,=&f,r", [x], tl.float32, True, 4)
    else:
        result = (x.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    return result - MAGIC


@jit
def int8_times(x, scale):  # type: ignore[no-untyped-def]
    """int8 tile times `scale`, fp32 of at most 15 significant bits: exactly.

    With the sign bit flipped, x is the byte 128 + x, which as the middle of the mantissa of 2^15 makes 2^15 + 128 + x = 257 * 128 + x. That
    product and 257 * 128 * scale, of 24 bits, are exact in one multiply-add.
    """
    if PTX:
        shifted = tl.inline_asm_elementwise(_SIGNED_BYTES, "=&f,=&f,=&f,=&f,r", [x], tl.float32, True, 4)
        result = tl.fma(shifted, scale, scale * -32896.0)
    else:
        result = x.to(tl.float32) * scale
    return result


@jit
def lattice(x, top):  # type: ignore[no-untyped-def]
    """uint8 tile to x / 64 + top, fp32, rounded once, and 0 to -inf.

    Four bytes at a time: the sum carries into the top bit of each byte that is not 0. Inverted and spread over the other three bytes of an
    fp32 number, that bit makes x the subnormal x 2^-133, which times 2^127 is x / 64; and 0 about -2^127, whose product overflows.
    """
    if PTX:
        result = tl.fma(tl.inline_asm_elementwise(_LATTICE, "=&f,=&f,=&f,=&f,r", [x], tl.float32, True, 4), 2.0**127, top)
    else:
        result = tl.where(x == 0, float("-inf"), x.to(tl.float32) * (1 / 64) + top)
    return result


@jit
def floor_magic(x):  # type: ignore[no-untyped-def]
    """For |x| < 2^20: SIGNED_MAGIC + floor(x) - 1, an addition rounded down."""
    if PTX:
        result = tl.inline_asm_elementwise("add.rm.f32 $0, $1, 0f4B3FFFFF;", "=f,f", [x], tl.float32, True, 1)
    else:
        result = tl.floor(x) + (SIGNED_MAGIC - 1.0)
    return result


@jit
def floor_product_magic(a, b):  # type: ignore[no-untyped-def]
    """For |a b| < 2^20: SIGNED_MAGIC + floor(a b) - 1, a multiply-add rounded down. No rounding comes before that."""
    if PTX:
        result = tl.inline_asm_elementwise("fma.rm.f32 $0, $1, $2, 0f4B3FFFFF;", "=f,f,f", [a, b], tl.float32, True, 1)
    else:
        result = tl.floor(a * b) + (SIGNED_MAGIC - 1.0)
    return result


@jit
def saturating_fma(a, b, c):  # type: ignore[no-untyped-def]
    """a b + c, brought to [0, 1]; 0 where it is NaN."""
    if PTX:
        result = tl.inline_asm_elementwise("fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], tl.float32, True, 1)
    else:
        result = tl.minimum(tl.maximum(a * b + c, 0.0), 1.0)
    return result


@jit
def lanes():  # type: ignore[no-untyped-def]
    """Numbers of the 32 entries of a table that a warp holds, int32: what is computed from them entry by entry is one, too.

    In PTX each thread has one entry in a register, so that this is a scalar which is not the same in all threads. Only `pick` may read
    other threads' entries; Triton itself passes such a scalar on as it is. Else a table is a tensor of shape [32].
    """
    return tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [0], tl.int32, True, 1) if PTX else tl.arange(0, 32)


@jit
def pick(table, index):  # type: ignore[no-untyped-def]
    """Entries of an fp32 table that the warp holds (see `lanes`), by the low five bits of an int32 tile; the others are not looked at.

    All threads of a warp have to be in the same place, as they are wherever no branch depends on what a thread holds. It costs one
    instruction, where a load from memory takes one for the address, one for the load and, from fp16, one to convert.
    """
    if PTX:
        result = tl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=f,f,r", [table, index], tl.float32, True, 1)
    else:
        flat = tl.reshape(index & 31, (index.shape[0] * index.shape[1],))
        result = tl.reshape(tl.gather(table, flat, 0), index.shape)
    return result


@jit
def append_sign(index, x):  # type: ignore[no-untyped-def]
    """2 index, and 1 more where the sign of x is set: where x < 0 or is -0. int32; one shift of 64 bits."""
    if PTX:
        result = tl.inline_asm_elementwise("shf.l.wrap.b32 $0, $1, $2, 1;", "=r,f,r", [x, index], tl.int32, True, 1)
    else:
        result = (index << 1) | ((x.to(tl.int32, bitcast=True) >> 31) & 1)
    return result


@jit
def widen(x):  # type: ignore[no-untyped-def]
    """A tile to fp32. bf16 numbers are the upper halves of fp32 numbers; Triton's own conversion takes two instructions for some."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@jit
def opaque(x):  # type: ignore[no-untyped-def]
    """x, of which the compiler knows nothing: it would turn sums with a loop's counter into one counter each."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, True, 1) if PTX else x


@jit
def hidden(x, block):  # type: ignore[no-untyped-def]
    """x, an int32 whose bits `block` does not have, as a number that the compiler takes for one that differs from thread to thread.

    A constant beside another constant takes an instruction wherever it is used, and so does a number that all threads share; this one
    stays in a register. `block` is a multiple of the number of threads, a power of two, so that no thread's number has bits in common.
    """
    if PTX:
        text: tl.constexpr = "{ .reg .b32 x; mov.u32 x, %tid.x; and.b32 x, x, $2; or.b32 $0, x, $1; }"
        result = tl.inline_asm_elementwise(text, "=r,r,r", [x, block], tl.int32, True, 1)
    else:
        result = x
    return result


@jit
def round_to_bf16(w, exponents):  # type: ignore[no-untyped-def]
    """fp32 tile to bf16, nearest even: (p, p as fp32, 1.5 * 2^e), with 2^e the power of two at or below |p|, and `exponents` 0x7F800000.

    PTX alone; Triton's own conversion takes the words apart that this one leaves whole.
    """
    constraints: tl.constexpr = "=&r,=&r,=&r,=&r,=&r,r,r,r,r"
    return tl.inline_asm_elementwise(_BF16, constraints, [w, exponents], (tl.bfloat16, tl.float32, tl.float32), True, 2)


@jit
def dither(index, step, ELEMENT: tl.constexpr, TIME: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 + d, fp32 [ROWS, GROUP], with d the dither of `base.weyl` in 23 of its 24 bits: all that fit below the exponent of 1."""
    start = index.to(tl.uint32) * ELEMENT + step.to(tl.uint32) * TIME
    w = start + offsets(ROWS, GROUP).to(tl.uint32) * ELEMENT
    if PTX:  # of four places in a row that a thread holds, the first
        result = tl.inline_asm_elementwise(_FRACTIONS, "=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r", [w, ELEMENT], tl.float32, True, 4)
    else:
        result = ((w >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    return result


@jit
def offsets(ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Positions within a tile, int32 [ROWS, GROUP]."""
    return tl.arange(0, ROWS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@jit
def load(plane, first, limit, ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """One entry per element of the tile that begins at element `first`, [ROWS, GROUP]; anything in groups from element `limit` on."""
    return tl.load(plane + first + offsets(ROWS, GROUP), mask=_exists(limit, ROWS, GROUP))


@jit
def store(plane, value, first, limit, ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write one entry per element, but for groups from element `limit` on."""
    tl.store(plane + first + offsets(ROWS, GROUP), value, mask=_exists(limit, ROWS, GROUP))


@jit
def load_groups(plane, first, limit, ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """One entry per group of the tile, [ROWS, 1]; anything for groups from element `limit` on."""
    at = plane + (first.to(tl.uint64) // GROUP).to(tl.int64) + tl.arange(0, ROWS)[:, None]
    return tl.load(at, mask=_exists(limit, ROWS, GROUP))


@jit
def store_groups(plane, value, first, limit, ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write one entry per group, but for those from element `limit` on."""
    at = plane + (first.to(tl.uint64) // GROUP).to(tl.int64) + tl.arange(0, ROWS)[:, None]
    exists = _exists(limit, ROWS, GROUP)
    value = value.to(plane.dtype.element_ty)
    # All threads of a group have its entry, and write it where they read it. Triton would have each written by one thread, which takes
    # exchanges between threads and addresses of its own.
    if PTX and value.dtype.primitive_bitwidth == 32:
        tl.inline_asm_elementwise(_STORE_32, "=r,l,r,r", [at, value, exists.to(tl.int32)], tl.int32, False, 1)
    elif PTX and value.dtype.primitive_bitwidth == 16:
        tl.inline_asm_elementwise(_STORE_16, "=r,l,h,r", [at, value, exists.to(tl.int32)], tl.int32, False, 1)
    else:
        tl.store(at, value, mask=exists)


@jit
def _exists(limit, ROWS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which groups begin below `limit`, [ROWS, 1]: the same for all elements of a group, so that wide words stay wide."""
    return tl.arange(0, ROWS)[:, None] * GROUP < limit
