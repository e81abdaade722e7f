"""How far one encode may be off, looked for over as many groups as asked: `python -m tests.codecs.bounds --examples 1000000`.

An example is one group of values of its own kind: magnitudes from fp32's smallest subnormal number to its largest, of one size or spread
over up to 60 octaves, with zeros, outliers, repeated values, and whatever the planes held before. What is printed is the largest error that
was found, as a share of the bound in `docs/numerics.md`: a bound holds if that is at most 1, and says something if it is close to 1.

Values that decode are compared in fp64, with codes and constants read by formulas that are written out here once more.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from flashoptim_hf.codecs import weight_split
from flashoptim_hf.codecs.base import Codec, State, get_codec
from flashoptim_hf.codecs.joint import lattice

MOMENTS = (State("exp_avg", signed=True), State("exp_avg_sq", signed=False))
BATCH = 1 << 13
"""Groups that are made and checked at once."""

FP32 = 2.0**-20
"""What the products and quotients of fp32 may add, relative to the value."""
TINY = 2.0**-147
"""What they may add where numbers are subnormal."""
LOG = 2.0**-16
"""Octaves that log2, exp2 and the grid of `hi` may add."""

Ratios = dict[str, float]
"""What was looked at -> the largest error as a share of its bound."""


def pick(generator: torch.Generator, values: list[float], count: int) -> Tensor:
    """One of the values for each group, fp64 (count, 1)."""
    return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (count, 1), generator=generator)]


def examples(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` groups of a first and a second moment, fp32 (count, size)."""
    shape = (count, size)
    centre = torch.rand(count, 1, generator=generator, dtype=torch.float64) * 138 - 75
    spread = pick(generator, [0, 1e-3, 0.5, 3, 12, 30, 60], count)
    exponent = centre + spread * (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5)
    repeated = torch.rand(count, 1, generator=generator) < 0.1
    exponent = torch.where(repeated, exponent[:, :1], exponent)
    outlier = torch.rand(shape, generator=generator) < pick(generator, [0, 0, 0.02], count)
    exponent = torch.where(outlier, exponent + 20, exponent).clamp(-75, 63.99)
    r = torch.exp2(exponent)
    r = torch.where(torch.rand(shape, generator=generator) < pick(generator, [0, 0, 0.1, 0.5, 0.97, 1], count), 0, r)
    u = torch.randn(shape, generator=generator, dtype=torch.float64) * pick(generator, [0, 1e-3, 1, 1, 7, 1e4], count)
    u = torch.where(torch.rand(shape, generator=generator) < pick(generator, [0, 0, 0.5], count), 0, u)
    return (u * r).clamp(-3e38, 3e38).float(), (r * r).float()


def junk(codec: Codec, count: int, generator: torch.Generator) -> list[Tensor]:
    """Planes with contents of any kind: zeros in one group of two."""
    planes = []
    fresh = torch.rand(count, generator=generator) < 0.5
    for plane in codec.planes:
        entries = plane.entries(count * codec.group)
        if plane.dtype.is_floating_point:
            values = torch.exp2(torch.randn(entries, generator=generator) * 4).to(plane.dtype)
        else:
            info = torch.iinfo(plane.dtype)
            values = torch.randint(info.min, info.max + 1, (entries,), generator=generator).to(plane.dtype)
        planes.append(torch.where(fresh.repeat_interleave(entries // count), 0, values))
    return planes


def bent(codec: Codec, generator: torch.Generator) -> list[Tensor]:
    """Tables of any kind: for `learned` two curves with parts up to 4 times as steep as a straight one, and 40 times as flat."""
    tables = []
    for table in codec.tables:
        steep = torch.exp2(torch.rand(2, table.count // 2 - 1, generator=generator, dtype=torch.float64) * 4)
        ends = torch.nn.functional.pad((steep / steep.sum(1, keepdim=True)).cumsum(1), (1, 0))
        tables.append(ends.clamp_max(1).to(table.dtype).flatten())
    return tables


def share(error: Tensor, bound: Tensor, also: Tensor | float) -> float:
    """The largest error as a share of its bound, where `also` is forgiven; infinite where a bound of 0 is broken, or something is NaN."""
    over = error - also
    ratio = torch.where(over <= 0, 0, torch.where(bound > 0, over / bound, math.inf))
    return math.inf if bool(error.isnan().any()) else ratio.max().item()


def logarithmic(v: Tensor, log_r_hat: Tensor, v_hat: Tensor, width: Tensor) -> float:
    """|log2(r̂ / r)| as a share of `width`. Farther than 24 octaves below the group's largest, r may be raised, but not beyond that limit.

    v̂ is 0 where v is, and nowhere else.
    """
    log_r = v.log2() / 2
    limit = log_r.amax(1, keepdim=True) - 24
    error = torch.maximum(log_r - log_r_hat, log_r_hat - log_r.maximum(limit))
    worst = share(error.where(v > 0, 0), width.expand_as(v), LOG)
    # v̂ is the square of r̂, which the formulas here have not rounded
    same = torch.where(v > 0, (v_hat - torch.exp2(2 * log_r_hat)).abs() <= FP32 * v_hat + TINY + 2.0**-14 * v_hat, v_hat == 0)
    return worst if bool(same.all()) and bool((v_hat[v > 0] > 0).all()) else math.inf


def check_log(codec: Codec, planes: list[Tensor], values: list[Tensor], decoded: list[Tensor]) -> Ratios:
    half = 1.0 if codec.dither else 0.5
    code = planes[1].view(-1, 64).double()
    hi, width, umax = (plane.double()[:, None] for plane in planes[2:])
    log_r = hi - (255 - code) * width
    r, (m, v), (m_hat, v_hat) = torch.where(code > 0, torch.exp2(log_r), 0), values, decoded
    return {
        "r": logarithmic(v, log_r, v_hat, half * width),
        "m": share((m_hat - m).abs().where(v > 0, m_hat.abs()), half * r * umax / 127, FP32 * m.abs() + TINY),
    }


def check_joint(codec: Codec, planes: list[Tensor], values: list[Tensor], decoded: list[Tensor]) -> Ratios:
    half = 1.0 if codec.dither else 0.5
    top, entry, umax = (plane.double()[:, None] for plane in planes[2:])
    n, levels, width = (x.double() for x in lattice(entry.float()))
    word = (planes[1].int() * 256 + planes[0]).view(-1, 32).double()
    log_r = (torch.floor(word / (2 * n + 1)) + 16 * top - levels) * width
    (m, v), (m_hat, v_hat) = values, decoded
    bound = torch.exp2(log_r) * umax * (1 / (2 * n)).clamp_min(2.0**-8) * (1 + 2.0**-7)
    # the last code is below 2^64, whose square would be infinite: within a step of it, r is rounded down
    width = torch.where(v.log2() / 2 > 64 - 2.0**-10 - width, width, half * width)
    return {
        "r": logarithmic(v, log_r, v_hat, width),
        "m": share((m_hat - m).abs().where(v > 0, m_hat.abs()), bound.where(v > 0, 0), FP32 * m.abs() + TINY),
    }


def check_learned(codec: Codec, planes: list[Tensor], values: list[Tensor], decoded: list[Tensor]) -> Ratios:
    top, entry, umax = (plane.double()[:, None] for plane in planes[2:5])
    knots = planes[5].double()[17:]
    n, levels, width = (x.double() for x in lattice(entry.float()))
    word = (planes[1].int() * 256 + planes[0]).view(-1, 32).double()

    def place(code: Tensor) -> Tensor:
        at = (code - 1).clamp_min(0).minimum(levels - 1) * 16 / (levels - 1)
        part = at.floor().clamp_max(15).long()
        return 1 + (levels - 1) * (knots[part] + (at - part) * (knots[part + 1] - knots[part]))

    code = torch.floor(word / (2 * n + 1))
    log_r = (place(code) + 16 * top - levels) * width
    gap = width * torch.maximum(place(code + 1) - place(code), place(code) - place(code - 1))
    (m, v), (m_hat, v_hat) = values, decoded
    bound = torch.exp2(log_r) * umax * (1 / (2 * n)).clamp_min(2.0**-8) * (1 + 2.0**-7)
    high = v.log2() / 2 > 64 - 2.0**-10 - gap - width
    return {
        "r": logarithmic(v, log_r, v_hat, torch.where(high, gap + width, gap if codec.dither else gap / 2)),
        "m": share((m_hat - m).abs().where(v > 0, m_hat.abs()), bound.where(v > 0, 0), FP32 * m.abs() + TINY),
    }


def half_float(largest: Tensor) -> Tensor:
    """How far a group's largest value may be from its scale: half an ulp of fp16, what is beyond 65504, and 2^-24 where fp16 has 0."""
    rounding = (largest * 2.0**-11).clamp_min(2.0**-25)
    return torch.where(largest > 65504, largest - 65504, torch.where(largest < 2.0**-24, 2.0**-24, rounding))


def check_softsign(codec: Codec, planes: list[Tensor], values: list[Tensor], decoded: list[Tensor]) -> Ratios:  # noqa: ARG001
    m, m_hat = values[0], decoded[0]
    largest = m.abs().amax(1, keepdim=True)
    n = (m.abs() / largest.clamp(2.0**-24, 65504)).clamp_max(1)
    bound = largest.clamp_max(65504) * (1 + n + 2.0**-7) ** 2 / 508 + half_float(largest)
    bound = torch.where(largest > 0, bound, 0)
    if len(values) == 1:
        return {"m": share((m_hat - m).abs(), bound, FP32 * m.abs())}
    r, r_hat = values[1].sqrt(), decoded[1].sqrt()
    top = r.amax(1, keepdim=True)
    ratios = {"r": share((r_hat - r).abs(), torch.where(top > 0, top.clamp(2.0**-24, 65504) / 510 + half_float(top), 0), FP32 * r)}
    kept = r_hat > 0
    return ratios | {"m": share((m_hat - m).abs().where(kept, m_hat.abs()), bound.where(kept, 0), FP32 * m.abs())}


def check_square(codec: Codec, planes: list[Tensor], values: list[Tensor], decoded: list[Tensor]) -> Ratios:
    (x,), (x_hat,) = values, decoded
    scale = planes[1].double()[:, None]
    z = 127**2 * x.abs() / scale
    half = torch.where(z < 64**2, 1.0, 0.5) if codec.dither else 0.5
    return {"m": share((x_hat - x).abs(), half * scale * (2 * z.sqrt() + 1) / 127**2, FP32 * x.abs())}


def check_none(codec: Codec, planes: list[Tensor], values: list[Tensor], decoded: list[Tensor]) -> Ratios:  # noqa: ARG001
    return {"all": max(share((a - b).abs(), torch.zeros_like(a), 0.0) for a, b in zip(values, decoded, strict=True))}


Check = Callable[[Codec, list[Tensor], list[Tensor], list[Tensor]], Ratios]
CASES: dict[str, tuple[str, int, bool, Check]] = {
    "log": ("log", 2, True, check_log),
    "log, nearest": ("log", 2, False, check_log),
    "joint": ("joint", 2, True, check_joint),
    "joint, nearest": ("joint", 2, False, check_joint),
    "learned": ("learned", 2, True, check_learned),
    "learned, nearest": ("learned", 2, False, check_learned),
    "softsign": ("softsign", 2, True, check_softsign),
    "softsign, one momentum": ("softsign", 1, True, check_softsign),
    "square": ("square", 1, True, check_square),
    "square, nearest": ("square", 1, False, check_square),
    "none": ("none", 2, True, check_none),
}
"""Name to codec, number of states, dither, and what is checked."""


def batch(name: str, count: int, seed: int) -> Ratios:
    """`count` groups of one case."""
    codec_name, states, dither, check = CASES[name]
    codec = get_codec(codec_name, MOMENTS[:states], dither)
    generator = torch.Generator().manual_seed(seed)
    values = examples(count, codec.group, generator)[:states]
    planes = junk(codec, count, generator)
    index = 64 * int(torch.randint(2**34, (1,), generator=generator))
    step = int(torch.randint(2**31, (1,), generator=generator)) >> int(torch.randint(31, (1,), generator=generator))
    planes += bent(codec, generator)
    codec.encode([value.flatten() for value in values], planes, index=index, step=step)
    for table in planes[len(codec.planes) :]:
        table.copy_(table[len(table) // 2 :].repeat(2))  # what was encoded by the second curve is decoded by it
    decoded = codec.decode(planes, count * codec.group)
    wide = [[x.double().view(count, -1) for x in xs] for xs in (values, decoded)]
    return check(codec, planes, *wide)


def weights(count: int, seed: int) -> Ratios:
    """`count` times 64 weights of any bits, split and joined."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (64 * count,), generator=generator).to(torch.int32)
    ratios = {}
    for dtype, mantissa, least in ((torch.bfloat16, 7, -126), (torch.float16, 10, -14)):
        w = bits.view(torch.float32)
        w = (
            w
            if dtype == torch.bfloat16
            else torch.where(w.abs() < 1e30, (w.double().log2() / 8).clamp(-20, 16).exp2().float() * w.sign(), w)
        )
        w = w[w.to(dtype).isfinite()]
        ulp = torch.exp2(((w.to(dtype).double().abs().frexp()[1] - 1).clamp_min(least) - mantissa).double())
        for master in (24, 32):
            joined = weight_split.join(*weight_split.split(w, dtype, master)).double()
            bound = ulp / 508 if master == 24 else ulp * 2.0**-16
            # the master weight is an fp32 number itself: half of an fp32 ulp
            ratios[f"{str(dtype)[6:]}, {master} bits"] = share((joined - w.double()).abs(), bound, w.double().abs() * 2.0**-24 + 2.0**-150)
    return ratios


def search(name: str, count: int, first_seed: int = 0, size: int = BATCH) -> Ratios:
    """`count` groups of one case, in batches."""
    worst: Ratios = {}
    for k, begin in enumerate(range(0, count, size)):
        number = min(size, count - begin)
        found = weights(number, first_seed + k) if name == "weights" else batch(name, number, first_seed + k)
        worst = {what: max(ratio, worst.get(what, 0.0)) for what, ratio in found.items()}
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", default="", help=f"with semicolons between; default all: {'; '.join([*CASES, 'weights'])}")
    args = parser.parse_args()
    broken = 0
    for name in [case.strip() for case in args.cases.split(";") if case.strip()] or [*CASES, "weights"]:
        begin = time.perf_counter()
        ratios = search(name, args.examples, args.seed)
        broken += sum(ratio > 1 for ratio in ratios.values())
        text = ", ".join(f"{what} {ratio:.4f}" for what, ratio in ratios.items())
        print(
            f"{name}: {args.examples} groups, largest error as a share of its bound: {text} ({time.perf_counter() - begin:.0f} s)",
            flush=True,
        )
    print(f"{broken} bounds are broken" if broken else "no bound is broken")
    return min(broken, 1)


if __name__ == "__main__":
    raise SystemExit(main())
