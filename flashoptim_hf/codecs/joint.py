"""`joint`: both moments in one 16-bit code, with its states dealt out to them as each group needs, and rounding errors of m fed back.

Like `log`, this codec stores r = sqrt(v) on a logarithmic lattice and m as u = m / r̂, a multiple of the *decoded* r̂. Three things differ.

*Allotment.* An element has 65536 states: L values of r and a 0, times M = 2 n + 1 values of u. An error of r̂ stays for 1 / (1 - beta2)
steps and one of m̂ for 1 / (1 - beta1), so that r deserves more of them, the more the wider the group spreads. n, from 43 to 96, follows
from the octaves R that the group's r spans, R(n) = 5 (64 / n)^4, and L = floor(65536 / M) - 1: 338 to 752 levels. n changes only when R no
longer fits, or would fit with 10 % to spare. Where u of a group was large in the step before, n is 140 and L 232: a code of u must not be
worth more than a few hundredths of a learning rate.

*Lattice.* r̂ = 2^(a step) with a whole number a: the lattice does not move with the group's extremes, and `top`, the a of its upper end, is
a multiple of 16. Three numbers in 5 bytes then describe a group, which may be as small as 32 for 2.156 bytes per parameter.

*Feedback.* m is rounded to nearest, and `encode` returns what that lost. Momentum spends itself: an error e of m moves a weight by
-lr e beta1 / (1 - beta1) / sqrt(v) in the steps to come. `UpdateRule.settle` moves the weight by the opposite at once, so that errors do
not add up, and a small momentum that rounding keeps from decaying does not move the weight either.

Error of one encode, with r̂ and m̂ what decodes: |log2(r̂ / r)| <= step for r within 24 octaves of the group's largest, half of that with
`dither=False`, and |m̂ - m| <= r̂ umax max(1 / 2n, 2^-8) (1 + 2^-7). Elements farther below are raised to that limit. Range as in `log`.

Sources: block-wise 8-bit states, arXiv 2110.02861, section 2; why low-bit EMAs need unbiased rounding, arXiv 2505.00347, section 4.
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
from .log import CODE_DITHER, LN2, MAX_HI, MAX_OCTAVES, MIN_UMAX, bf16_scale

GROUP = 32
FEWEST, MOST = 43, 96
"""Limits of n: 43 serves 24 octaves, and a half of umax / 43 is the most that rounding takes from u; beyond 96, errors of r would rule."""
WIDTH_AT_64 = 5.0
"""Octaves of r that a group with n = 64 spans; with other n, (64 / n)^4 times as many."""
KEEP = 1.1 ** (-1 / 4)
"""n is kept down to this share of what would do: a range of up to 1.1 times what is needed."""
FINE = 140
"""n of groups whose u is large. With 232 levels of r they still span 24 octaves."""
FINE_ENTRIES, FINE_ZERO, FINE_OCTAVES = 128, 120, 0.18162
"""Entries of the plane `levels` from 128 on stand for `FINE`, and a range of r of (entry - 120) 0.18162 octaves; others are n."""
LARGE, STILL_LARGE = 0.03**2, 0.5**2
"""u is large where a code of it, umax / n, would be more than 0.03, and stays so down to half of that; both are squared here."""
BIAS_STEPS = 1000.0
"""AdamW's bias corrections make u larger than the step it stands for, by about the root of (t + 1000) / t at step t. So codes may be."""
ANCHOR = 16
STEP_GRID = 2.0**-18

_GROUP, _FEWEST, _MOST, _ANCHOR, _STEP_GRID = (tl.constexpr(value) for value in (GROUP, FEWEST, MOST, ANCHOR, STEP_GRID))
_WIDTH, _KEEP, _LOG_WIDTH = (tl.constexpr(value) for value in (WIDTH_AT_64 * 64**4, KEEP, math.log2(WIDTH_AT_64)))
_FINE, _FINE_ENTRIES, _FINE_ZERO = (tl.constexpr(float(value)) for value in (FINE, FINE_ENTRIES, FINE_ZERO))
_FINE_OCTAVES = tl.constexpr(FINE_OCTAVES)
_LARGE, _STILL_LARGE, _BIAS_STEPS = (tl.constexpr(value) for value in (LARGE, STILL_LARGE, BIAS_STEPS))
_MAX_OCTAVES, _MAX_HI, _MIN_UMAX, _LN2 = (tl.constexpr(value) for value in (MAX_OCTAVES, MAX_HI, MIN_UMAX, LN2))
_MAX_UMAX = tl.constexpr(torch.finfo(torch.bfloat16).max)
_SMALLEST = tl.constexpr(2.0**-126)
_ELEMENT, _TIME = (tl.constexpr(value) for value in CODE_DITHER)


def lattice(entry: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entries of the plane `levels`, fp32 of any shape, to (n, L, step): codes of u on either side of 0, codes of r besides that of 0, and
    octaves between two of these.

    step lies on a grid, so that every path has the same: what is rounded to it is never near a tie.
    """
    fine = entry >= FINE_ENTRIES
    n = torch.where(fine, FINE, entry.clamp_min(FEWEST))
    levels = torch.floor(65536 / (2 * n + 1)) - 1
    octaves = torch.where(fine, (entry - FINE_ZERO) * FINE_OCTAVES, (WIDTH_AT_64 * 64**4) / (n * n * n * n))
    # one step for rounding the ends, ANCHOR for those of `top`
    width = octaves / (levels - (ANCHOR + 1))
    return n, levels, torch.floor(width / STEP_GRID + 0.5) * STEP_GRID


def allot(octaves: Tensor, before: Tensor, umax: Tensor, time: int) -> Tensor:
    """The entry for groups that span so many octaves, given the entry (0: none) and umax of the step before; all fp32, of one shape.

    umax of the step before, since this step's depends on the lattice; where u grows, it takes more than one step to become large.
    """
    enough = (64 * torch.exp2((math.log2(WIDTH_AT_64) - torch.log2(octaves)) / 4)).clamp_max(MOST + 0.5)
    keep = (before >= FEWEST) & (before <= enough) & (before >= enough * KEEP)
    n = torch.where(keep, before, torch.floor(enough).clamp_min(FEWEST))

    fine = before >= FINE_ENTRIES
    limit = n * n * (LARGE * (time + BIAS_STEPS)) * torch.where(fine, STILL_LARGE, 1)
    needed = torch.ceil(octaves * (1 / FINE_OCTAVES)).clamp(FINE_ENTRIES - FINE_ZERO, 255 - FINE_ZERO) + FINE_ZERO
    keep = fine & (before >= needed) & (before - FINE_ZERO <= (needed - FINE_ZERO) * 1.1)
    return torch.where(umax * umax * time > limit, torch.where(keep, before, needed), n)


@jit
def _lattice(entry):  # type: ignore[no-untyped-def]
    """`lattice` for one tile."""
    fine = entry >= _FINE_ENTRIES
    n = tl.where(fine, _FINE, tl.maximum(entry, _FEWEST))
    levels = tl.floor(65536.0 * device.reciprocal(2.0 * n + 1.0)) - 1.0
    octaves = tl.where(fine, (entry - _FINE_ZERO) * _FINE_OCTAVES, device.reciprocal(n * n * n * n) * _WIDTH)
    width = octaves * device.reciprocal(levels - (_ANCHOR + 1.0))
    return n, levels, tl.floor(width * (1 / _STEP_GRID) + 0.5) * _STEP_GRID


@jit
def _allot(octaves, before, umax, time):  # type: ignore[no-untyped-def]
    """`allot` for one tile."""
    enough = tl.minimum(device.exp2(device.log2(octaves) * -0.25 + (6.0 + _LOG_WIDTH / 4)), _MOST + 0.5)
    keep = (before >= _FEWEST) & (before <= enough) & (before >= enough * _KEEP)
    n = tl.where(keep, before, tl.maximum(tl.floor(enough), _FEWEST))

    fine = before >= _FINE_ENTRIES
    t = time.to(tl.float32)
    limit = n * n * (_LARGE * (t + _BIAS_STEPS)) * tl.where(fine, _STILL_LARGE, 1.0)
    needed = tl.ceil(octaves * (1 / _FINE_OCTAVES))
    needed = tl.minimum(tl.maximum(needed + _FINE_ZERO, _FINE_ENTRIES), 255.0)
    keep = fine & (before >= needed) & (before - _FINE_ZERO <= (needed - _FINE_ZERO) * 1.1)
    return tl.where(umax * umax * t > limit, tl.where(keep, before, needed), n)


@jit
def floor(x):  # type: ignore[no-untyped-def]
    """floor(x) for |x| < 2^20, with two additions instead of the slow conversion pipe."""
    return device.floor_magic(x) - (device.SIGNED_MAGIC - 1.0)


@jit
def read_word(planes, first, limit, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """What one tile stores: (code of r, u, the lattice's lower end in steps, octaves in a step, number of codes)."""
    low_ptr, high_ptr, top_ptr, levels_ptr, umax_ptr = planes[:5]
    top = device.load_groups(top_ptr, first, limit, ROWS, _GROUP).to(tl.float32)
    entry = device.load_groups(levels_ptr, first, limit, ROWS, _GROUP).to(tl.float32)
    umax = device.load_groups(umax_ptr, first, limit, ROWS, _GROUP).to(tl.float32)
    low = device.uint8_to_float(device.load(low_ptr, first, limit, ROWS, _GROUP))
    high = device.uint8_to_float(device.load(high_ptr, first, limit, ROWS, _GROUP))
    n, levels, step = _lattice(entry)
    word = high * 256.0 + low
    share = device.reciprocal(2.0 * n + 1.0)
    code = floor(word * share + 0.5 * share)
    u = (word - code * (2.0 * n + 1.0) - n) * (umax * device.reciprocal(n))
    return code, u, top * _ANCHOR - levels, step, levels


@jit
def joint_decode(planes, first, limit, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`JointCodec.decode` for one tile; see `Codec.device_decode`."""
    code, u, base, step, _ = read_word(planes, first, limit, ROWS)
    r = tl.where(code > 0, device.exp2((code + base) * step), 0.0)
    return u * r, r * r


@jit
def describe(planes, v, first, limit, time, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """How one tile is going to be stored: (v is not 0, log2 of r, the lattice's lower end in steps, last place, top, entry, n, number of
    codes, octaves in a step, steps in an octave). Places are from 1 to the last."""
    nonzero = v >= _SMALLEST
    log_r = device.log2(tl.maximum(v, _SMALLEST)) * 0.5
    hi = tl.minimum(tl.max(tl.where(nonzero, log_r, float("-inf")), 1, keep_dims=True), _MAX_HI)
    hi = tl.where(hi > float("-inf"), hi, 0.0)
    lo = tl.min(tl.where(nonzero, log_r, float("inf")), 1, keep_dims=True)
    octaves = hi - tl.maximum(tl.minimum(lo, hi), hi - _MAX_OCTAVES)
    before = device.load_groups(planes[3], first, limit, ROWS, _GROUP).to(tl.float32)
    umax = device.load_groups(planes[4], first, limit, ROWS, _GROUP).to(tl.float32)
    entry = _allot(octaves, before, umax, time)
    n, levels, step = _lattice(entry)
    per_step = device.reciprocal(step)
    top = tl.ceil(hi * per_step * (1 / _ANCHOR))
    base = top * _ANCHOR - levels
    last = tl.minimum(levels, tl.floor(per_step * _MAX_HI) - base)
    return nonzero, log_r, base, last, top, entry, n, levels, step, per_step


@jit
def write_word(planes, m, nonzero, code, log_r, top, entry, n, first, limit, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store one tile, given its codes of r and log2 of what these mean; returns what rounding takes from m."""
    low_ptr, high_ptr, top_ptr, levels_ptr, umax_ptr = planes[:5]
    u = tl.where(nonzero, m * device.exp2(-log_r), 0.0)
    umax = tl.max(tl.abs(u), 1, keep_dims=True)
    umax = tl.minimum(tl.maximum(umax, _MIN_UMAX), _MAX_UMAX)
    bits = (umax.to(tl.int32, bitcast=True) + 0x8000) & -65536
    umax = bits.to(tl.float32, bitcast=True)
    ucode = tl.minimum(tl.maximum(u * (n * device.reciprocal(umax)), -n), n)
    ucode = (ucode + device.SIGNED_MAGIC) - device.SIGNED_MAGIC
    lost = tl.where(nonzero, m - ucode * (umax * device.reciprocal(n)) * device.exp2(log_r), 0.0)

    word = tl.where(nonzero, code * (2.0 * n + 1.0) + (ucode + n), 0.0)
    word = (word + device.MAGIC).to(tl.int32, bitcast=True)
    device.store(low_ptr, word.to(tl.uint8), first, limit, ROWS, _GROUP)
    device.store(high_ptr, (word >> 8).to(tl.uint8), first, limit, ROWS, _GROUP)
    device.store_groups(top_ptr, top.to(tl.float16), first, limit, ROWS, _GROUP)
    device.store_groups(levels_ptr, entry.to(tl.int32).to(tl.uint8), first, limit, ROWS, _GROUP)
    device.store_groups(umax_ptr, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), first, limit, ROWS, _GROUP)
    return lost


@jit
def joint_encode(planes, values, first, limit, index, time, DITHER: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`JointCodec.encode` for one tile; see `Codec.device_encode`."""
    m, v = values
    nonzero, log_r, base, last, top, entry, n, _, step, per_step = describe(planes, v, first, limit, time, ROWS)
    x = tl.minimum(tl.maximum(log_r * per_step - base, 1.0), last)
    if DITHER:
        below = floor(x)
        x -= below
        d = device.dither(index, time, _ELEMENT, _TIME, ROWS, _GROUP) - 1.0
        code = tl.minimum(below + tl.where(d < x - step * _LN2 * (x * (1.0 - x)), 1.0, 0.0), last)
    else:
        code = floor(x + 0.5)
    return write_word(planes, m, nonzero, code, (code + base) * step, top, entry, n, first, limit, ROWS)


class JointCodec(Codec):
    """AdamW's two moments. See the module's docstring for format, bounds and sources.

    Raises:
        ConfigurationError: the states are not one signed state followed by one that is never negative.
    """

    name = "joint"
    group = GROUP
    dithers = True
    feeds_back = True
    device_decode = staticmethod(joint_decode)
    device_encode = staticmethod(joint_encode)

    def __init__(self, states: Sequence[State], dither: bool = True) -> None:
        super().__init__(states, dither)
        if [state.signed for state in self.states] != [True, False]:
            names = ", ".join(state.name for state in self.states)
            raise ConfigurationError(
                f"codec={self.name!r} stores a first and a second moment together; it cannot hold ({names}). Use codec='softsign'."
            )

    @property
    def planes(self) -> tuple[Plane, ...]:
        m, v = (state.name for state in self.states)
        return (
            Plane(m, torch.uint8),
            Plane(v, torch.uint8),
            Plane(f"{v}_top", torch.float16, self.group),
            Plane(f"{v}_levels", torch.uint8, self.group),
            Plane(f"{m}_max", torch.bfloat16, self.group),
        )

    def decode(self, planes: Sequence[Tensor], numel: int) -> tuple[Tensor, ...]:
        word = grouped(planes[1], self.group).float() * 256 + grouped(planes[0], self.group)
        top, entry, umax = (plane.float()[:, None] for plane in planes[2:5])
        n, levels, step = lattice(entry)
        code = torch.floor((word + 0.5) / (2 * n + 1))
        place = self._place(code, levels, planes[5:])
        r = torch.where(code > 0, torch.exp2((place + (top * ANCHOR - levels)) * step), 0)
        m = (word - code * (2 * n + 1) - n) * (umax / n) * r
        return m.flatten()[:numel], (r * r).flatten()[:numel]

    def encode(self, values: Sequence[Tensor], planes: Sequence[Tensor], *, index: int = 0, step: int = 0) -> Tensor:
        m, v = (grouped(value, self.group) for value in values)
        nonzero = v > 0
        log_r = torch.where(nonzero, torch.log2(v) * 0.5, -math.inf)
        hi = log_r.amax(1, keepdim=True).clamp_max(MAX_HI)
        hi = torch.where(hi == -math.inf, 0, hi)
        lo = torch.where(nonzero, log_r, math.inf).amin(1, keepdim=True)
        octaves = hi - lo.minimum(hi).maximum(hi - MAX_OCTAVES)
        before, umax = (plane.float()[:, None] for plane in planes[3:5])
        entry = allot(octaves, before, umax, step)
        n, levels, width = lattice(entry)
        top = torch.ceil(hi / width / ANCHOR)
        base = top * ANCHOR - levels
        last = levels.minimum(torch.floor(MAX_HI / width) - base)
        dither = weyl(m.numel(), index, step, CODE_DITHER, m.device).view(m.shape) if self.dither else None
        # m relative to what r will decode to, not to what it is: the same expression as in `decode`
        code, place = self._rounded((log_r / width - base).clamp_min(1).minimum(last), width, levels, last, dither, planes[5:])
        r = torch.exp2((place + base) * width)
        u = torch.where(nonzero, m / r, 0)
        umax = bf16_scale(u.abs().amax(1), up=False)
        scale = umax.float()[:, None]
        ucode = torch.round((u * (n / scale)).maximum(-n).minimum(n))
        word = torch.where(nonzero, code * (2 * n + 1) + (ucode + n), 0).int()
        store(planes[:5], (word & 255, word >> 8, top, entry, umax))
        lost = torch.where(nonzero, m - ucode * (scale / n) * r, 0)
        return lost.flatten()[: values[0].numel()]

    def expected_errors(self, planes: Sequence[Tensor], numel: int) -> tuple[Tensor, ...]:
        _, v = self.decode(planes, numel)
        entry, umax = (plane.float().repeat_interleave(self.group)[:numel] for plane in planes[3:5])
        (n, _, width), r = lattice(entry), v.sqrt()
        dithered = 6 if self.dither else 12
        return umax / n * r / math.sqrt(12), r * (width * LN2 / math.sqrt(dithered))

    def _place(self, code: Tensor, levels: Tensor, tables: Sequence[Tensor]) -> Tensor:  # noqa: ARG002
        """Where on the lattice a code of r lies, in steps: at itself."""
        return code

    def _rounded(
        self,
        x: Tensor,
        width: Tensor,
        levels: Tensor,  # noqa: ARG002
        last: Tensor,
        dither: Tensor | None,
        tables: Sequence[Tensor],  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Places of r to (codes, their places): the nearest, or up with the probability that keeps v right on average, as in `log`.

        Args:
            x: places, fp32 (groups, G), from 1 to `last`.
            width, levels, last: octaves in a step, number of codes, the last place below `MAX_HI`; fp32 (groups, 1).
            dither: in [0, 1), shape of x, or None: to nearest.
        """
        if dither is None:
            code = torch.floor(x + 0.5).minimum(last)
        else:
            below = torch.floor(x)
            x = x - below
            code = (below + (dither < x - LN2 * width * x * (1 - x))).minimum(last)
        return code, code


CODEC = JointCodec
