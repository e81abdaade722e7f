"""A 16-bit weight and an 8- or 16-bit correction that together are a 24- or 32-bit master weight.

    c = clamp(round(L (w - p) / h), -L, L)        ŵ = p + (c / L) h        h = ulp(p) / 2,  L = 127 (int8) or 32767 (int16)

with p the weight rounded to nearest even, so |ŵ - w| <= ulp(p) / 508 for int8 and 2^-16 ulp(p) for int16, up to the rounding of ŵ to
fp32. Here ulp(p) is the spacing of the low-precision format above |p|.

`join` never leaves the interval of numbers that round to p, whatever the correction: a weight that somebody else has written is respected,
and a step of size zero changes nothing. Two cases need care: an odd p and a correction of exactly h (a tie, which would round away), and a
power of two, below which the spacing halves.

Source: weight splitting, arXiv 2602.23349, section 3 (`error_bits` there).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._triton import INTERPRET, jit, tl
from . import device

# explicit mantissa bits, exponent bias, and the mask of the exponent field after shifting the mantissa out
_LAYOUT = {torch.bfloat16: (7, 127, 0xFF), torch.float16: (10, 15, 0x1F)}

CORRECTION_DTYPE = {24: torch.int8, 32: torch.int16}
"""dtype of the correction for each `master_bits`."""


def copy_correction(target: Tensor, source: Tensor) -> None:
    """Copy corrections into `target`, in place; to another width they are scaled, which from 8 to 16 bits is exact within 2^-16 ulp."""
    if target.dtype == source.dtype:
        target.copy_(source)
    else:
        ratio = torch.iinfo(target.dtype).max / torch.iinfo(source.dtype).max
        target.copy_(torch.round(source.double() * ratio))


def _half_ulp(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(half a unit in the last place, is the mantissa odd, is |p| a power of two with a finer format below it)."""
    mantissa_bits, bias, mask = _LAYOUT[p.dtype]
    bits = p.view(torch.int16).to(torch.int32)
    exponent = (bits >> mantissa_bits) & mask
    half = torch.exp2((exponent.clamp_min(1) - (bias + mantissa_bits + 1)).float())
    bottom = ((bits & ((1 << mantissa_bits) - 1)) == 0) & (exponent > 1)
    return half, (bits & 1) == 1, bottom


def split(w: Tensor, dtype: torch.dtype, bits: int) -> tuple[Tensor, Tensor]:
    """fp32 master weights (n,) to (weights in `dtype`, bf16 or fp16; corrections, int8 for bits=24 and int16 for bits=32).

    The correction of a weight that is not finite in `dtype` is 0.
    """
    p = w.to(dtype)
    half, _, _ = _half_ulp(p)
    # L x for x = (w - p) / h in [-1, 1], as (L + 1) x - x: rounded in one product, an int16 correction near L / 2 would be off by one, and
    # a step of size zero would move it
    x = ((w - p.float()) / half).clamp(-1, 1)
    scaled = x * (torch.iinfo(CORRECTION_DTYPE[bits]).max + 1)
    whole = torch.round(scaled)
    c = whole + torch.round((scaled - whole) - x)
    return p, torch.where(torch.isfinite(p), c, 0).to(CORRECTION_DTYPE[bits])


def join(p: Tensor, c: Tensor) -> Tensor:
    """Weights (n,) in bf16 or fp16 and their corrections (n,) in int8 or int16 to fp32 master weights that round to p."""
    half, odd, bottom = _half_ulp(p)
    limit = torch.iinfo(c.dtype).max
    w = p.float()
    c = c.float()
    # p + (c / L) h = p + c u + (c / L) u with u = h / (L + 1), rounded once: what the first sum loses is carried into the second
    unit = half / (limit + 1)
    moved = w + c * unit
    moved = moved + ((c * unit - (moved - w)) + (c / limit) * unit)

    reach = torch.where(bottom & (torch.signbit(c) != torch.signbit(w)), half * 0.5, half)
    gap = ((w.view(torch.int32) & 0x7F800000).view(torch.float32) * 2.0**-23).clamp_min(2.0**-149)  # fp32's own ulp of p
    reach = torch.where(odd, half - gap, reach)
    moved = torch.where(c > 0, moved.minimum(w + reach), moved.maximum(w - reach))
    return torch.where(torch.isfinite(w) & (c != 0), moved, w)


_BITS_BY_HAND = tl.constexpr(INTERPRET)
_UNIT = tl.constexpr(129 * 2.0**-22)  # of an 8-bit correction in the device forms for bf16, relative to 2^e
_PLACE = tl.constexpr(2.0**-23 / (129 * 2.0**-22))  # fp32's unit in the last place, in such units


@jit
def round_to(w, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 tile to bf16, fp16 or fp32, to nearest even. Triton's interpreter would cut a bf16 off, so there the bits are rounded."""
    if _BITS_BY_HAND and tl.bfloat16 == DTYPE:
        bits = w.to(tl.int32, bitcast=True)
        rounded = tl.where(w == w, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        p = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        p = w.to(DTYPE)
    return p


@jit
def device_split(w, DTYPE: tl.constexpr, BITS: tl.constexpr, exponents=0x7F800000):  # type: ignore[no-untyped-def]
    """`split` for one tile: (p in DTYPE, correction of BITS - 16 bits). `exponents` is that number, or one that is hidden.

    With bf16 and 8 bits the unit is that of `device_join`, so that a correction may differ by one where it is far from 0; weights that
    are subnormal get 0, and those that are not finite any.
    """
    if tl.bfloat16 == DTYPE and BITS == 24:
        if device.PTX:
            p, pf, magic = device.round_to_bf16(w, exponents)
        else:
            p = round_to(w, DTYPE)
            bits = p.to(tl.int16, bitcast=True).to(tl.int32) << 16
            pf = bits.to(tl.float32, bitcast=True)
            magic = ((bits & exponents) | 0x400000).to(tl.float32, bitcast=True)
        # a unit is 258 units in the last place of 2^e: the sum with 1.5 * 2^e, rounded, has in its low byte how many there are
        c = tl.fma(w - pf, _PLACE, magic)
        correction = c.to(tl.int32, bitcast=True).to(tl.int8)
    else:
        p = round_to(w, DTYPE)
        pf = p.to(tl.float32)
        _, twice_inverse = _power(pf, DTYPE)
        x = (w - pf) * twice_inverse * (1024.0 if tl.float16 == DTYPE else 128.0)
        x = tl.minimum(tl.maximum(x, -1.0), 1.0)
        scaled = x * (128.0 if BITS == 24 else 32768.0)
        whole = (scaled + device.SIGNED_MAGIC) - device.SIGNED_MAGIC
        c = whole + (((scaled - whole) - x + device.SIGNED_MAGIC) - device.SIGNED_MAGIC)
        c = tl.where(tl.abs(pf) < float("inf"), c, 0.0)
        correction = c.to(tl.int8 if BITS == 24 else tl.int16)
    return p, correction


@jit
def device_join(p, c):  # type: ignore[no-untyped-def]
    """`join` for one tile; with bf16 and 8 bits, within two units in the last place of fp32 of it, and NaN for an infinite p.

    There c / 127 is taken as 129 c / 16384, which is a 16384th less: p plus that is exact in fp32, and it never reaches the half where an
    odd p would round away. Subnormal weights are taken as they are.
    """
    if p.dtype == tl.bfloat16 and c.dtype == tl.int8:
        bits = p.to(tl.int16, bitcast=True).to(tl.int32) << 16
        power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        w = device.int8_times(c, _UNIT) * power + bits.to(tl.float32, bitcast=True)
        # The integers of one sign are ordered as the floats are, and 2^15 below p ends what rounds to it: half a unit, or a quarter below a
        # power of two. Shifted up by as much, since -0.0 has no integer below it.
        bits = tl.maximum(w.to(tl.int32, bitcast=True) + 0x8000, bits) - 0x8000
        joined = bits.to(tl.float32, bitcast=True)
    else:
        joined = _join_exactly(p, c)
    return joined


@jit
def _join_exactly(p, c):  # type: ignore[no-untyped-def]
    w = p.to(tl.float32)
    power, _ = _power(w, p.dtype)
    half = power * (1 / 2048 if p.dtype == tl.float16 else 1 / 256)
    own = p.to(tl.int16, bitcast=True)
    smallest = 0x0800 if p.dtype == tl.float16 else 0x0100
    fraction = 0x03FF if p.dtype == tl.float16 else 0x007F
    bottom = ((own & fraction) == 0) & ((own & 0x7FFF) >= smallest)
    cf = c.to(tl.float32)
    limit = 127.0 if c.dtype == tl.int8 else 32767.0
    cf = tl.maximum(cf, -limit)
    unit = half * (1 / 128 if c.dtype == tl.int8 else 1 / 32768)
    moved = w + cf * unit
    moved = moved + ((cf * unit - (moved - w)) + (cf * (1 / limit)) * unit)
    inward = (cf < 0) != (w.to(tl.int32, bitcast=True) < 0)
    reach = tl.where(bottom & inward, half * 0.5, half)
    gap = tl.maximum((w.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 2.0**-23, 2.0**-149)
    reach = tl.where((own & 1) == 1, half - gap, reach)
    moved = tl.where(cf > 0, tl.minimum(moved, w + reach), tl.maximum(moved, w - reach))
    return tl.where((tl.abs(w) < float("inf")) & (cf != 0), moved, w)


@jit
def _power(p, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """2^e of fp32 numbers that came from DTYPE, not below that of its smallest normal number, and 2 / 2^e, which is finite."""
    bits = tl.maximum(p.to(tl.int32, bitcast=True) & 0x7F800000, 0x38800000 if tl.float16 == DTYPE else 0x00800000)
    return bits.to(tl.float32, bitcast=True), (0x7F800000 - bits).to(tl.float32, bitcast=True)
