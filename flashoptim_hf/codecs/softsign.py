"""`softsign`: the FlashOptim format, two codes and, per 32 elements, two fp16 scales: 2.125 bytes per parameter for AdamW.

With n the value divided by the largest magnitude of its group, and r = sqrt(v):

    signed state         code = floor(127 (2 n / (1 + |n|)) + 1/2)    int8        m̂ = scale y / (2 - |y|),  y = code / 127
    nonnegative state    code = floor(255 n + 1/2),  n of r           uint8       v̂ = (scale code / 255)^2

n is relative to the fp32 maximum, `scale` is that maximum rounded to nearest in fp16. Codes and scales are those that flashoptim 0.1.4
stores, bit for bit, with these deviations, each where its format leaves the range in which it works:

1. A maximum that fp16 rounds to infinity (65520 and more) is stored as 65504; n is then relative to 65504 and ends at +-1.
2. A maximum above zero that fp16 rounds to zero (2^-25 = 3.0e-8 and less) is stored as 2^-24, and n is relative to that, so that codes as
   small as 2^-24 / 510 of r survive instead of none.
3. Where v has code 0, m decodes to 0 and is stored as code 0, since the update would be m / eps. The group's scale does not change by that.

Limits of the format that remain: a scale below 2^-14 = 6.1e-5 is subnormal in fp16, and wrong by up to 2^-25 (a quarter of itself at
1e-7); r below 1/510 of its group's maximum is 0. Rounding is always to nearest, as the format demands. `log` has none of these limits.

Source: companding of both moments, arXiv 2602.23349, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._triton import jit, tl
from ..errors import ConfigurationError
from . import device
from .base import Codec, Plane, State, grouped, store

GROUP = 32
LARGEST = 65504.0
SMALLEST = 2.0**-24

_GROUP, _LARGEST, _SMALLEST = (tl.constexpr(value) for value in (GROUP, LARGEST, SMALLEST))


@jit
def softsign_decode(planes, first, limit, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`SoftsignCodec.decode` for one tile; see `Codec.device_decode`."""
    y = device.int8_times(device.load(planes[0], first, limit, ROWS, _GROUP), 1.0) * (1 / 127)
    scale = device.load_groups(planes[len(planes) // 2], first, limit, ROWS, _GROUP).to(tl.float32)
    m = y * device.reciprocal(2.0 - tl.abs(y)) * scale
    if len(planes) == 2:
        values = (m,)
    else:
        code = device.uint8_to_float(device.load(planes[1], first, limit, ROWS, _GROUP))
        r = code * (device.load_groups(planes[3], first, limit, ROWS, _GROUP).to(tl.float32) * (1 / 255))
        values = (tl.where(code > 0, m, 0.0), r * r)  # type: ignore[assignment]
    return values


@jit
def softsign_encode(planes, values, first, limit, index, step, DITHER: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """`SoftsignCodec.encode` for one tile; see `Codec.device_encode`."""
    n, scale = _normalize_device(values[0])
    mcode = tl.floor(2.0 * n * device.reciprocal(1.0 + tl.abs(n)) * 127.0 + 0.5)
    device.store_groups(planes[len(planes) // 2], scale, first, limit, ROWS, _GROUP)
    if len(planes) == 4:
        n, scale = _normalize_device(device.sqrt(values[1]))
        code = tl.floor(n * 255.0 + 0.5)
        mcode = tl.where(code > 0, mcode, 0.0)
        device.store(planes[1], code.to(tl.uint8), first, limit, ROWS, _GROUP)
        device.store_groups(planes[3], scale, first, limit, ROWS, _GROUP)
    device.store(planes[0], mcode.to(tl.int8), first, limit, ROWS, _GROUP)


@jit
def _normalize_device(x):  # type: ignore[no-untyped-def]
    """`_normalize` for one tile."""
    largest = tl.max(tl.abs(x), 1, keep_dims=True)
    # what rounds to infinity in fp16 begins halfway above its largest number, what rounds to 0 ends halfway to its smallest
    saturated = tl.where(largest >= 65520.0, _LARGEST, tl.where((largest > 0) & (largest <= _SMALLEST / 2), _SMALLEST, largest))
    n = x * device.reciprocal(tl.where(saturated > 0, saturated, 1.0))
    return tl.minimum(tl.maximum(n, -1.0), 1.0), saturated.to(tl.float16)


class SoftsignCodec(Codec):
    """One signed state (Lion, SGD), or a first and a second moment (AdamW). See the module's docstring for format and deviations.

    Args:
        dither: accepted so that all codecs are made alike, and without effect: the format rounds to nearest.

    Raises:
        ConfigurationError: the states are neither one signed state, nor a signed one followed by one that is never negative.
    """

    name = "softsign"
    group = GROUP
    device_decode = staticmethod(softsign_decode)
    device_encode = staticmethod(softsign_encode)

    def __init__(self, states: Sequence[State], dither: bool = True) -> None:
        super().__init__(states, dither)
        if [state.signed for state in self.states] not in ([True], [True, False]):
            held = ", ".join(f"{state.name}: {'signed' if state.signed else 'not negative'}" for state in self.states)
            raise ConfigurationError(
                f"codec='softsign' stores one signed state, or one signed and one that is never negative; it cannot hold ({held}). "
                "Use codec='none'."
            )

    @property
    def planes(self) -> tuple[Plane, ...]:
        codes = tuple(Plane(state.name, torch.int8 if state.signed else torch.uint8) for state in self.states)
        return (*codes, *(Plane(f"{state.name}_scale", torch.float16, self.group) for state in self.states))

    def decode(self, planes: Sequence[Tensor], numel: int) -> tuple[Tensor, ...]:
        count = len(self.states)
        codes = [grouped(plane, self.group).float() for plane in planes[:count]]
        scales = [plane.float()[:, None] for plane in planes[count:]]
        y = codes[0] / 127
        values = [y / (2 - y.abs()) * scales[0]]
        if count == 2:
            r = codes[1] / 255 * scales[1]
            values = [torch.where(codes[1] > 0, values[0], 0), r * r]
        return tuple(value.flatten()[:numel] for value in values)

    def encode(self, values: Sequence[Tensor], planes: Sequence[Tensor], *, index: int = 0, step: int = 0) -> None:  # noqa: ARG002
        m = grouped(values[0], self.group)
        n, scale = _normalize(m)
        mcode = torch.floor(2 * n / (1 + n.abs()) * 127 + 0.5)
        if len(values) == 1:
            store(planes, (mcode, scale))
            return
        n, root_scale = _normalize(grouped(values[1], self.group).sqrt())
        code = torch.floor(n * 255 + 0.5)
        store(planes, (torch.where(code > 0, mcode, 0), code, scale, root_scale))


def _normalize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Groups (groups, G), fp32, to (x relative to the largest magnitude of its group, in [-1, 1]; scales (groups,), fp16)."""
    largest = x.abs().amax(1)
    scale = largest.half()
    saturated = torch.where(scale.isinf(), LARGEST, largest)
    saturated = torch.where((scale == 0) & (largest > 0), SMALLEST, saturated)
    scale = torch.where(saturated == largest, scale, saturated.half())
    # an all-zero group is divided by something that is not zero
    divisor = torch.where(saturated > 0, saturated, 1)
    return (x / divisor[:, None]).clamp(-1, 1), scale


CODEC = SoftsignCodec
