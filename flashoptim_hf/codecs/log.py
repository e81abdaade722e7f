"""`log`: logarithmic companding of the second moment, with the first moment stored relative to it.

m and v are not rounded apart. r = sqrt(v) is stored on a logarithmic lattice between the group's smallest and largest value, and m as
u = m / r̂, a multiple of the *decoded* r̂. The error of m is then an error of the update itself, and where v̂ is 0 so is m̂, so that the
update can never become m / eps. 2.156 bytes per parameter: two codes, and per 64 elements two fp32 numbers and one bf16 number.

Error of one encode, with r̂ and m̂ what decodes: |log2(r̂ / r)| <= step for r >= 2^lo and |m̂ - m| <= r̂ umax / 127; half of each when
rounding to nearest. Elements more than 24 octaves below the largest of their group are raised to that limit.

Sources: block-wise 8-bit states, arXiv 2110.02861, section 2; companding of both moments, arXiv 2602.23349, section 3; why low-bit EMAs
need unbiased rounding, arXiv 2505.00347, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ConfigurationError
from .base import Codec, Plane, State, grouped, store, weyl

GROUP = 64
MAX_OCTAVES = 24.0
MIN_STEP = 2.0**-8
LN2 = math.log(2.0)

# Weyl sequences, one for each plane. The step multipliers are the golden ratio and sqrt(2) - 1 in units of 2^-32, so that the dither of one
# element is a low-discrepancy sequence over time; the element multipliers decorrelate neighbours.
CODE_DITHER = (2654435761, 2654435769)
MCODE_DITHER = (2246822519, 1779033703)


def round_up_bf16(value: Tensor) -> Tensor:
    """fp32 >= 0 to bf16, rounded up.

    Values within 15 fp32 ulps above a bf16 number go down to it, so that the constant of a decoded group, which carries the rounding of
    three multiplications, is found again.
    """
    bits = value.view(torch.int32)
    return ((bits + 0xFFF0) & -0x10000).view(torch.float32).to(torch.bfloat16)


class LogCodec(Codec):
    """AdamW's two moments, coupled. See the module's docstring for format, bounds and sources.

    Raises:
        ConfigurationError: the states are not one signed state followed by one that is never negative.
    """

    name = "log"
    group = GROUP

    def __init__(self, states: Sequence[State], dither: bool = True) -> None:
        super().__init__(states, dither)
        if [state.signed for state in self.states] != [True, False]:
            names = ", ".join(state.name for state in self.states)
            raise ConfigurationError(f"codec='log' stores a first and a second moment together; it cannot hold ({names}). Use codec='softsign'.")

    @property
    def planes(self) -> tuple[Plane, ...]:
        m, v = (state.name for state in self.states)
        return (
            Plane(m, torch.int8),
            Plane(v, torch.uint8),
            Plane(f"{v}_max", torch.float32, GROUP),
            Plane(f"{v}_step", torch.float32, GROUP),
            Plane(f"{m}_max", torch.bfloat16, GROUP),
        )

    def decode(self, planes: Sequence[Tensor], numel: int) -> tuple[Tensor, ...]:
        mcode, code, hi, step, umax = planes
        code = grouped(code, GROUP).float()
        r = torch.where(code > 0, torch.exp2(hi[:, None] - (255 - code) * step[:, None]), 0)
        m = grouped(mcode, GROUP).float() * (umax.float() / 127)[:, None] * r
        return m.flatten()[:numel], (r * r).flatten()[:numel]

    def encode(self, values: Sequence[Tensor], planes: Sequence[Tensor], *, index: int = 0, step: int = 0) -> None:
        m, v = (grouped(value, GROUP) for value in values)
        log_r = torch.log2(v) * 0.5  # -inf where v = 0
        nonzero = v > 0
        hi = log_r.amax(1)
        hi = torch.where(torch.isfinite(hi), hi, 0)
        lo = torch.where(nonzero, log_r, math.inf).amin(1).minimum(hi).maximum(hi - MAX_OCTAVES)
        scale = ((hi - lo) / 254).clamp_min(MIN_STEP)

        c = 255 - (hi[:, None] - log_r) / scale[:, None]
        code = self._round(c, scale[:, None], CODE_DITHER, index, step).clamp(1, 255)
        code = torch.where(nonzero, code, 0)
        # m relative to what r will decode to, not to what it is: the same expression as in `decode`
        r = torch.exp2(hi[:, None] - (255 - code) * scale[:, None])
        u = torch.where(nonzero, m / r, 0)
        umax = round_up_bf16(u.abs().amax(1))
        inverse = torch.where(umax > 0, 127 / umax.float(), 0)
        mcode = self._round(u * inverse[:, None], None, MCODE_DITHER, index, step).clamp(-127, 127)
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
