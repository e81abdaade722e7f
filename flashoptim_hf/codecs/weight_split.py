"""A 16-bit weight and an 8- or 16-bit correction that together are a 24- or 32-bit master weight.

    c = clamp(round(L (w - p) / h), -L, L)        ŵ = p + (c / L) h        h = ulp(p) / 2,  L = 127 (int8) or 32767 (int16)

with p the weight rounded to nearest even, so |ŵ - w| <= ulp(p) / 508 for int8 and 2^-16 ulp(p) for int16. Here ulp(p) is the spacing of
the low-precision format above |p|.

`join` never leaves the interval of numbers that round to p, whatever the correction: a weight that somebody else has written is respected,
and a step of size zero changes nothing. Two cases need care: an odd p and a correction of exactly h (a tie, which would round away), and a
power of two, below which the spacing halves.

Source: weight splitting, arXiv 2602.23349, section 3 (`error_bits` there).
"""

from __future__ import annotations

import torch
from torch import Tensor

# explicit mantissa bits, exponent bias, and the mask of the exponent field after shifting the mantissa out
_LAYOUT = {torch.bfloat16: (7, 127, 0xFF), torch.float16: (10, 15, 0x1F)}

CORRECTION_DTYPE = {24: torch.int8, 32: torch.int16}
"""dtype of the correction for each `master_bits`."""


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
    c = c.float().clamp_min(-limit)
    # p + (c / L) h = p + c u + (c / L) u with u = h / (L + 1), rounded once: what the first sum loses is carried into the second
    unit = half / (limit + 1)
    moved = w + c * unit
    moved = moved + ((c * unit - (moved - w)) + (c / limit) * unit)

    reach = torch.where(bottom & (torch.signbit(c) != torch.signbit(w)), half * 0.5, half)
    gap = ((w.view(torch.int32) & 0x7F800000).view(torch.float32) * 2.0**-23).clamp_min(2.0**-149)  # fp32's own ulp of p
    reach = torch.where(odd, half - gap, reach)
    moved = torch.where(c > 0, moved.minimum(w + reach), moved.maximum(w - reach))
    return torch.where(torch.isfinite(w) & (c != 0), moved, w)
