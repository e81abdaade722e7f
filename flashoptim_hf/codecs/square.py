"""`square`: one signed state (the momentum of Lion or of SGD) on a square-law lattice: 1.0625 bytes per parameter.

    x̂ = scale code |code| / 127^2                    code int8 in [-127, 127], scale the largest |x| of 32 elements in bf16

Codes are close together near zero, where the sign of Lion's update is decided, and far apart near the group's largest value, which is what
few elements are near: the error of x grows with the square root of |x|. Decoding takes products only, encoding one square root.

Rounding, with z = 127^2 |x| / scale and a dither e in [-1/2, 1/2]:

    |code| = min(round(sqrt(max(z + e^2 - 1/4, 0)) + e), 127)

Between the lattice points k^2 and (k + 1)^2 that rounds up where z > k^2 + (1/2 - e) (2 k + 1): unbiased in x for uniform e, and to the
nearest x̂ for e = 0. Zero stays zero, and a number on the lattice stays where it is.

Dither below code 64 only (|x| up to a quarter of the scale); above, to nearest. A momentum that decays by a share d of itself at each step
would get stuck between codes k and k + 1 if rounded to nearest with k < 1 / d. Codes from 64 on are fine enough for decay of a 64th or
more; slower ones move on with the scale, which large elements make. Noise is largest at large codes, and it is left out there.

e comes in pairs: at each odd step it is the negative of what it was the step before, so that the second rounding of a pair tends to take
back what the first added. A plain Weyl sequence can fall into step with a momentum that decays by a fixed fraction of a code at each step.

Error of one encode: |x̂ - x| <= scale (2 sqrt(z) + 1) / 127^2, half of it where rounding is to nearest. The scale is rounded to nearest,
so that the largest element always has code 127 and every code and scale survives a round trip. It is at least 2^-100 = 7.9e-31, and an
infinite x is stored as 3.4e38; NaN has no defined result.

Sources: block-wise 8-bit states, arXiv 2110.02861, section 2; companding of optimizer states, arXiv 2602.23349, section 3. Square-law
companding of the momentum is this project's own choice; docs/codecs.md has what it was measured against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._triton import jit, tl
from ..errors import ConfigurationError
from . import device
from .base import Codec, Plane, State, grouped, store, weyl
from .log import MIN_UMAX, bf16_scale

GROUP = 32
LARGEST_CODE = 127
SQUARE = float(LARGEST_CODE**2)
DITHER_BELOW = 64.0
"""Codes from here on are rounded to nearest."""
DITHER = (2654435761, 2654435769)
"""Weyl sequence: multipliers of the element and of the pair of steps."""

# the same for device functions, which read only such globals
_GROUP, _LARGEST, _SQUARE, _MIN_SCALE = (tl.constexpr(value) for value in (GROUP, float(LARGEST_CODE), SQUARE, MIN_UMAX))
_MAX_SCALE = tl.constexpr(torch.finfo(torch.bfloat16).max)
_ELEMENT, _TIME = (tl.constexpr(value) for value in DITHER)
_DITHER_BELOW = tl.constexpr(DITHER_BELOW**2)


@jit
def square_decode(planes, first, limit, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`SquareCodec.decode` for one tile; see `Codec.device_decode`."""
    code = device.int8_times(device.load(planes[0], first, limit, ROWS, _GROUP), 1.0)
    scale = device.load_groups(planes[1], first, limit, ROWS, _GROUP).to(tl.float32) * (1 / _SQUARE)
    return (code * tl.abs(code) * scale,)


@jit
def square_encode(planes, values, first, limit, index, step, DITHER: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`SquareCodec.encode` for one tile; see `Codec.device_encode`."""
    x = values[0]
    size = tl.abs(x)
    largest = tl.minimum(tl.maximum(tl.max(size, 1, keep_dims=True), _MIN_SCALE), _MAX_SCALE)
    bits = (largest.to(tl.int32, bitcast=True) + 0x8000) & -65536
    inverse = device.reciprocal(bits.to(tl.float32, bitcast=True) * (1 / _SQUARE))
    z = size * inverse
    if DITHER:
        # the fraction of the sequence in the mantissa of 1: 1 + d, of which e = ±(d - 1/2)
        start = index.to(tl.uint32) * _ELEMENT + (step >> 1).to(tl.uint32) * _TIME
        w = start + device.offsets(ROWS, _GROUP).to(tl.uint32) * _ELEMENT
        sign = 1.0 - 2.0 * (step & 1).to(tl.float32)
        e = ((w >> 9) | 0x3F800000).to(tl.float32, bitcast=True) * sign - 1.5 * sign
        e = tl.where(z < _DITHER_BELOW, e, 0.0)
        y = device.sqrt(tl.maximum(z + (e * e - 0.25), 0.0)) + e
    else:
        y = device.sqrt(tl.maximum(z - 0.25, 0.0))
    # x's sign goes to y, and the sum leaves the nearest integer in the low bits
    y = tl.minimum(y, _LARGEST).to(tl.int32, bitcast=True) ^ (x.to(tl.int32, bitcast=True) & -2147483648)
    code = (y.to(tl.float32, bitcast=True) + device.SIGNED_MAGIC).to(tl.int32, bitcast=True).to(tl.int8)
    device.store(planes[0], code, first, limit, ROWS, _GROUP)
    device.store_groups(planes[1], (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), first, limit, ROWS, _GROUP)


class SquareCodec(Codec):
    """One signed state. See the module's docstring for format, bounds and sources.

    Raises:
        ConfigurationError: the states are not one signed state.
    """

    name = "square"
    group = GROUP
    dithers = True
    device_decode = staticmethod(square_decode)
    device_encode = staticmethod(square_encode)

    def __init__(self, states: Sequence[State], dither: bool = True) -> None:
        super().__init__(states, dither)
        if [state.signed for state in self.states] != [True]:
            names = ", ".join(state.name for state in self.states)
            raise ConfigurationError(f"codec='square' stores one momentum, of Lion or SGD; it cannot hold ({names}). Use codec='log'.")

    @property
    def planes(self) -> tuple[Plane, ...]:
        (state,) = self.states
        return Plane(state.name, torch.int8), Plane(f"{state.name}_max", torch.bfloat16, self.group)

    def decode(self, planes: Sequence[Tensor], numel: int) -> tuple[Tensor, ...]:
        code = grouped(planes[0], self.group).float()
        x = code * code.abs() * (planes[1].float() / SQUARE)[:, None]
        return (x.flatten()[:numel],)

    def encode(self, values: Sequence[Tensor], planes: Sequence[Tensor], *, index: int = 0, step: int = 0) -> None:
        x = grouped(values[0], self.group)
        size = x.abs()
        scale = bf16_scale(size.amax(1), up=False)
        z = size * (SQUARE / scale.float())[:, None]
        e: Tensor | float = 0.0
        if self.dither:
            e = weyl(x.numel(), index, step >> 1, DITHER, x.device).view(x.shape) - 0.5
            e = torch.where(z < DITHER_BELOW**2, -e if step & 1 else e, 0)
        y = (z + (e * e - 0.25)).clamp_min(0).sqrt() + e
        store(planes, (torch.round(y).clamp_max(LARGEST_CODE) * x.sign(), scale))


CODEC = SquareCodec
