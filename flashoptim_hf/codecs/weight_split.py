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
    limit = torch.iinfo(CORRECTION_DTYPE[bits]).max
    c = torch.round((w - p.float()) / half * limit).clamp(-limit, limit)
    return p, torch.where(torch.isfinite(p), c, 0).to(CORRECTION_DTYPE[bits])


def join(p: Tensor, c: Tensor) -> Tensor:
    """Weights (n,) in bf16 or fp16 and their corrections (n,) in int8 or int16 to fp32 master weights that round to p."""
    half, odd, bottom = _half_ulp(p)
    limit = torch.iinfo(c.dtype).max
    w = p.float()
    offset = (c.float().clamp_min(-limit) / limit) * half
    inward = torch.signbit(offset) != torch.signbit(w)
    reach = torch.where(bottom & inward, half * 0.5, half)
    # one fp32 ulp of p short of the tie: 23 - mantissa bits lie between the two formats
    reach = torch.where(odd, half - half * 2.0 ** -(22 - _LAYOUT[p.dtype][0]), reach)
    return torch.where(torch.isfinite(w), w + offset.clamp(-reach, reach), w)
