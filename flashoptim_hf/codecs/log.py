"""`log`: logarithmic companding of the second moment, with the first moment stored relative to it.

m and v are not rounded apart. r = sqrt(v) is stored on a logarithmic lattice between the group's smallest and largest value, and m as
u = m / r̂, a multiple of the *decoded* r̂. The error of m is then an error of the update itself, and where v̂ is 0 so is m̂, so that the
update can never become m / eps. 2.156 bytes per parameter: two codes, and per 64 elements two fp32 numbers and one bf16 number.

Error of one encode, with r̂ and m̂ what decodes: |log2(r̂ / r)| <= step for r >= 2^lo and |m̂ - m| <= r̂ umax / 127; half of each when
rounding to nearest. Elements more than 24 octaves below the largest of their group are raised to that limit.

Range: v from fp32's smallest number to its largest (an infinite v is stored as 3.4e38), |m| up to 3.3e38. NaN has no defined result. v is
an fp32 number as in every AdamW: at beta2 = 0.999, (1 - beta2) g^2 is subnormal for gradients below 3e-18 and 0 below 8e-22.

The constants lie on coarse grids, so that encoding what was decoded finds them again bit for bit in spite of the rounding of exp2, log2
and three multiplications. Rounding to nearest, every code and constant then survives a round trip, unless v is subnormal. With dither a
group's largest element may be rounded down, and the next encode fits the constants to what is there.

Sources: block-wise 8-bit states, arXiv 2110.02861, section 2; companding of both moments, arXiv 2602.23349, section 3; why low-bit EMAs
need unbiased rounding, arXiv 2505.00347, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._triton import jit, tl
from ..errors import ConfigurationError
from . import device
from .base import Codec, Plane, State, grouped, store, weyl

GROUP = 64
MAX_OCTAVES = 24.0
MIN_STEP = 2.0**-8
LN2 = math.log(2.0)

# fp32 holds log2 r to 2^-18 and (hi - lo) / 254 to 2^-25, where they are largest; both grids are four times as wide or more. A step off by
# the width of its grid moves the lowest code by 254 * 2^-22 octaves, a 64th of the smallest step.
HI_GRID = 2.0**-16
STEP_GRID = 2.0**-22
MAX_HI = 64 - 2.0**-10  # the square of 2^64 would overflow
MIN_UMAX = 2.0**-100  # 127 / umax must not overflow

# Weyl sequences, one for each plane. The step multipliers are the golden ratio and sqrt(2) - 1 in units of 2^-32, so that the dither of one
# element is a low-discrepancy sequence over time; the element multipliers decorrelate neighbours.
CODE_DITHER = (2654435761, 2654435769)
MCODE_DITHER = (2246822519, 1779033703)

# the same for device functions, which read only such globals
_GROUP, _MAX_OCTAVES, _MIN_STEP, _LN2 = (tl.constexpr(value) for value in (GROUP, MAX_OCTAVES, MIN_STEP, LN2))
_STEP_GRID, _MAX_HI, _MIN_UMAX = (tl.constexpr(value) for value in (STEP_GRID, MAX_HI, MIN_UMAX))
_MAX_UMAX = tl.constexpr(torch.finfo(torch.bfloat16).max)
_LOG2_E = tl.constexpr(1 / LN2)
_LEAST_BETA = tl.constexpr(2.0**-40)
_SMALLEST = tl.constexpr(2.0**-126)
_SHRINK = tl.constexpr(1 - 2.0**-15)


def group_constants(log_r: Tensor) -> tuple[Tensor, Tensor]:
    """log2 r, fp32 (groups, G), -inf where r = 0, to (hi, step), fp32 (groups,), on their grids.

    hi is rounded to nearest, which moves the largest code by at most a 512th. step is rounded up so that `lo` keeps a code, except that
    values within a quarter of the grid above a grid point are taken for it.
    """
    hi = log_r.amax(1)
    hi = torch.where(hi == -math.inf, 0, torch.round(hi / HI_GRID) * HI_GRID).clamp_max(MAX_HI)
    lo = torch.where(log_r == -math.inf, math.inf, log_r).amin(1).minimum(hi).maximum(hi - MAX_OCTAVES)
    step = torch.ceil((hi - lo) * (1 / (254 * STEP_GRID)) - 0.25) * STEP_GRID
    return hi, step.clamp_min(MIN_STEP)


def bf16_scale(largest: Tensor, up: bool) -> Tensor:
    """Largest |u| of each group, fp32 (groups,), to bf16: rounded up, or to nearest; at least `MIN_UMAX`, and finite.

    To nearest (ties up), the largest element is at most half a code above 127, so its code is 127 and a round trip finds the constant
    again. With dither that clipping would be a bias, so the constant is rounded up. There, values within 15 fp32 ulps above a bf16 number
    go down to it, which is what the rounding of a decoded group needs.
    """
    largest = largest.clamp(MIN_UMAX, torch.finfo(torch.bfloat16).max)
    bits = largest.view(torch.int32) + (0xFFF0 if up else 0x8000)
    return (bits & -0x10000).view(torch.float32).to(torch.bfloat16)


@jit
def log_units(hyper, BETAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the device forms need for a rule that takes its states as sums, None for others; see `Codec.device_units`.

    v is then counted in units of 1 - beta2, by moving log2 of it. Stored exponents stay exact: what is on their grid is added to them, and
    the remainder, which would be rounded away alike for all groups, goes where a code is multiplied.
    """
    units = None
    if BETAS is not None:
        beta1, rest1, beta2, rest2 = BETAS(hyper)
        beta2 = tl.maximum(beta2, _LEAST_BETA)
        octaves = device.log2(rest2)
        # log2 is right to 2^-22, which near 1 would be a thousandth of 1 - beta2
        series = rest2 * (rest2 * (rest2 * (-_LOG2_E / 3) - _LOG2_E / 2) - _LOG2_E)
        decay = tl.where(rest2 < 0.0078125, series, device.log2(beta2))
        coarse = (octaves + 384.0) - 384.0  # on the grid of 2 hi, which fp32 has between 256 and 512
        fine = octaves - coarse
        scale = beta1 * (1 / 127) * device.sqrt(rest2 * device.reciprocal(rest1 * rest1 * beta2))
        units = scale, coarse, fine, (decay - fine) * (0.5 / 64), octaves * 0.5, rest1
    return units


@jit
def log_decode(planes, first, limit, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`LogCodec.decode` for one tile; see `Codec.device_decode`."""
    mcode_ptr, code_ptr, hi_ptr, step_ptr, umax_ptr, units = planes
    hi = device.load_groups(hi_ptr, first, limit, ROWS, _GROUP)
    step = device.load_groups(step_ptr, first, limit, ROWS, _GROUP)
    umax = device.load_groups(umax_ptr, first, limit, ROWS, _GROUP).to(tl.float32)
    code = device.load(code_ptr, first, limit, ROWS, _GROUP)
    mcode = device.load(mcode_ptr, first, limit, ROWS, _GROUP)
    # a step of 0, as in planes that were never written, times the -inf of code 0 would be NaN
    step = tl.maximum(step, _MIN_STEP)
    if units is None:
        r = device.exp2(device.lattice(code, -255 / 64) * (step * 64.0) + hi)
        states = device.int8_times(mcode, 1.0) * (umax * (1 / 127)) * r, r * r
    else:
        scale, coarse, _, decay, _, _ = units
        r = device.exp2(device.lattice(code, decay * device.reciprocal(step) - 255 / 64) * (step * 64.0) + (hi - 0.5 * coarse))
        states = device.int8_times(mcode, umax) * r, tl.fma(r, r, -_SMALLEST), scale  # type: ignore[assignment]
    return states


@jit
def log_encode(planes, values, first, limit, index, time, DITHER: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`LogCodec.encode` for one tile; see `Codec.device_encode`."""
    mcode_ptr, code_ptr, hi_ptr, step_ptr, umax_ptr, units = planes
    m, v = values
    if units is None:
        v = v - _SMALLEST
        coarse, fine, half, rest1 = 0.0, 0.0, 0.0, 1.0
    else:
        _, coarse, fine, _, half, rest1 = units
    # NaN where v is 0, and hence below 0 now: maximum and minimum pass over it, and at the end it becomes code 0
    log_v = device.log2(v)
    top = tl.max(log_v, 1, keep_dims=True) * 0.5 + half
    bottom = tl.min(log_v, 1, keep_dims=True) * 0.5 + half
    # fp32 between 128 and 256 has the grid of hi: adding and subtracting 192 rounds to it. In units, what decodes next must be finite, too.
    hi = tl.minimum(tl.maximum((top + 192.0) - 192.0, -63.0), _MAX_HI + 0.5 * coarse)
    hi = tl.where(top == top, hi, 0.0)
    lo = tl.maximum(tl.minimum(bottom, hi), hi - _MAX_OCTAVES)
    step = tl.maximum(tl.ceil((hi - lo) * (1 / (254 * _STEP_GRID)) - 0.25) * _STEP_GRID, _MIN_STEP)

    # c / 255, which is not below that of code 1 unless v is 0: the margin is twice the error of the quotient. A clamp to [0, 1] costs
    # nothing, and makes NaN 0.
    per_step = device.reciprocal(step) * (0.5 / 255)
    below = tl.maximum(log_v - (2.0 * hi - coarse), step * (-508.0 * (1 - 2.0**-21)) - fine, propagate_nan=tl.PropagateNan.ALL)
    y = tl.minimum(tl.maximum(below * per_step + (fine * per_step + 1.0), 0.0), 1.0)
    if DITHER:
        # floor(c + 1 - theta) with theta = d + k d (1 - d) rounds up where x is above theta, which is where d is below x - k x (1 - x), but
        # for terms in k^2. theta is kept 2^-16 away from 0 and 1, so that codes 255 and 0 never round to 256 and -1. D = 1 + d.
        k = step * (_LN2 * _SHRINK)
        D = device.dither(index, time, 2654435761, 2654435769, ROWS, _GROUP)
        half_minus_theta = (1.5 * _SHRINK + 2.0 * k) - D * (D * -k + (_SHRINK + 3.0 * k))
        b = (y * 255.0 + half_minus_theta) + device.SIGNED_MAGIC
    else:
        b = y * 255.0 + device.SIGNED_MAGIC
    u = m * device.exp2((b - (device.SIGNED_MAGIC + 255.0)) * -step - hi)
    umax = tl.max(tl.abs(u), 1, keep_dims=True) * rest1
    umax = tl.minimum(tl.maximum(umax, _MIN_UMAX), _MAX_UMAX)
    bits = (umax.to(tl.int32, bitcast=True) + (0xFFF0 if DITHER else 0x8000)) & -65536
    inverse = device.reciprocal(bits.to(tl.float32, bitcast=True) * (1 / 127)) * rest1
    if DITHER:
        # an element that umax was rounded below would reach 128 with the largest dither
        D = device.dither(index, time, 2246822519, 1779033703, ROWS, _GROUP)
        mb = device.floor_magic(u * (inverse * (1 - 2.0**-18)) + D)
    else:
        mb = tl.minimum(tl.maximum(u * inverse, -127.0), 127.0) + device.SIGNED_MAGIC
    code = b.to(tl.int32, bitcast=True).to(tl.uint8)
    mcode = mb.to(tl.int32, bitcast=True).to(tl.int8)
    device.store(code_ptr, code, first, limit, ROWS, _GROUP)
    device.store(mcode_ptr, mcode, first, limit, ROWS, _GROUP)
    device.store_groups(hi_ptr, hi, first, limit, ROWS, _GROUP)
    device.store_groups(step_ptr, step, first, limit, ROWS, _GROUP)
    device.store_groups(umax_ptr, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), first, limit, ROWS, _GROUP)


class LogCodec(Codec):
    """AdamW's two moments, coupled. See the module's docstring for format, bounds and sources.

    Raises:
        ConfigurationError: the states are not one signed state followed by one that is never negative.
    """

    name = "log"
    group = GROUP
    dithers = True
    device_decode = staticmethod(log_decode)
    device_encode = staticmethod(log_encode)
    device_units = staticmethod(log_units)

    def __init__(self, states: Sequence[State], dither: bool = True) -> None:
        super().__init__(states, dither)
        if [state.signed for state in self.states] != [True, False]:
            names = ", ".join(state.name for state in self.states)
            raise ConfigurationError(
                f"codec='log' stores a first and a second moment together; it cannot hold ({names}). Use codec='softsign'."
            )

    @property
    def planes(self) -> tuple[Plane, ...]:
        m, v = (state.name for state in self.states)
        return (
            Plane(m, torch.int8),
            Plane(v, torch.uint8),
            Plane(f"{v}_max", torch.float32, self.group),
            Plane(f"{v}_step", torch.float32, self.group),
            Plane(f"{m}_max", torch.bfloat16, self.group),
        )

    def decode(self, planes: Sequence[Tensor], numel: int) -> tuple[Tensor, ...]:
        mcode, code, hi, step, umax = planes
        code = grouped(code, self.group).float()
        r = torch.where(code > 0, torch.exp2(hi[:, None] - (255 - code) * step[:, None]), 0)
        m = grouped(mcode, self.group).float() * (umax.float() / 127)[:, None] * r
        return m.flatten()[:numel], (r * r).flatten()[:numel]

    def encode(self, values: Sequence[Tensor], planes: Sequence[Tensor], *, index: int = 0, step: int = 0) -> None:
        m, v = (grouped(value, self.group) for value in values)
        nonzero = v > 0
        log_r = torch.log2(v) * 0.5
        hi, scale = group_constants(log_r)

        c = 255 - (hi[:, None] - log_r) / scale[:, None]
        code = self._round(c, scale[:, None], CODE_DITHER, index, step).clamp(1, 255)
        code = torch.where(nonzero, code, 0)
        # m relative to what r will decode to, not to what it is: the same expression as in `decode`
        r = torch.exp2(hi[:, None] - (255 - code) * scale[:, None])
        u = torch.where(nonzero, m / r, 0)
        umax = bf16_scale(u.abs().amax(1), up=self.dither)
        mcode = self._round(u * (127 / umax.float())[:, None], None, MCODE_DITHER, index, step).clamp(-127, 127)
        store(planes, (mcode, code, hi, scale, umax))

    def _round(self, x: Tensor, scale: Tensor | None, multipliers: tuple[int, int], index: int, step: int) -> Tensor:
        """Round to an integer: to nearest, or up with the probability that keeps the decoded value right on average.

        `scale` is the lattice step in octaves of r; the mean is kept in v, so the threshold is (2^(2 scale x) - 1) / (2^(2 scale) - 1) for
        the fractional part x, of which the quadratic used here is within 2e-4. Without `scale` the lattice is linear.
        """
        if not self.dither:
            return torch.round(x)
        d = weyl(x.numel(), index, step, multipliers, x.device).view(x.shape)
        if scale is None:
            return torch.floor(x + d)
        below = torch.floor(x)
        x = x - below
        return below + (d < x - LN2 * scale * x * (1 - x))


CODEC = LogCodec
