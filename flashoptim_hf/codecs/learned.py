"""`learned`: `joint`, with codes of r on a curve of each parameter's own, learned while it trains.

`joint` spreads the codes of a group evenly over the octaves between its ends. Most elements lie near the middle, and most of what an update
loses is lost there, so that a curve that puts more codes where more is lost does better with the same bytes. It is common to all groups of
a parameter, since each of them has its ends from `joint`: place p of code c, in steps of the group's lattice with L codes, is

    p(c) = 1 + (L - 1) F((c - 1) / (L - 1)),    F: [0, 1] -> [0, 1] increasing, linear between 17 knots at s = k / 16

*Learning.* After steps 1, 2, 4, 8, ... and every `INTERVAL` (the option `learn_interval`) it is counted how much u^2 lies where between the
ends: an error of log2 r by a given amount changes an update by as much of u. The distortion of a quantizer with D(s) codes at place s is
the integral of u^2 / D^2, least for D proportional to the cube root of u^2 (Panter and Dite 1951; Bennett 1948). A quarter of the codes
is spread evenly all the same: no code is more than 4 steps wide, whatever comes until the next look. Counts are whole numbers, so that
their order does not matter and two runs, and all processes of DDP, have the same curve. Of a large parameter `SAMPLE` groups or a few more
are looked at, spread over all of it.

*Two curves* are kept for each parameter: of the codes as they are, and of the next encode. What is stored is decoded by the former and
encoded by the latter in the same step that it would be rounded in anyway, so that a new curve costs no rounding of its own.

Error of one encode: as `joint`, with the gap between two codes, at most 4 steps, instead of a step. 68 bytes for each parameter besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._triton import jit, tl
from . import device
from .base import Plane, grouped
from .joint import GROUP, JointCodec, describe, lattice, read_word, write_word
from .log import CODE_DITHER, LN2

KNOTS = 16
"""Parts of the curve, which is linear in each. One AVX-512 register holds their ends."""
BINS = 64
SAMPLE = 128
"""Groups of a parameter that are looked at, or nearly twice as many, where it has no more."""
INTERVAL = 100
EVEN = 0.25
"""Share of the codes that is spread evenly."""
UNIT, LARGEST = 2.0**20, 2.0**10
"""Weights are u^2 in these units, as whole numbers, and u^2 counts up to this."""
SMOOTH = (1, 2, 3, 2, 1)

_GROUP, _KNOTS, _LN2 = (tl.constexpr(value) for value in (GROUP, KNOTS, LN2))
_ELEMENT, _TIME = (tl.constexpr(value) for value in CODE_DITHER)


def due(step: Any, interval: Any = INTERVAL) -> Any:
    """Whether the state after step `step`, counted from 1, is looked at: numbers, or arrays of int64."""
    return (step > 0) & ((step & (step - 1) == 0) | (step % interval == 0))


def stride(numel: int) -> int:
    """Each how many-th group of a parameter of `numel` elements is looked at."""
    return max(1, numel // GROUP // SAMPLE)


def straight(where: torch.device | str = "cpu") -> Tensor:
    """The curve of one who knows nothing: codes are places, as in `joint`. fp16 (KNOTS + 1,), made on `where`, so that nothing waits."""
    return torch.arange(KNOTS + 1, dtype=torch.float16, device=where) / KNOTS


def curves(table: Tensor, groups: int, which: int, where: torch.device) -> Tensor:
    """One of the two curves of each group, fp32 (groups, KNOTS + 1), on `where`; a table of zeros is a straight one.

    Args:
        table: flat, of one parameter, or of several, (groups, entries).
        which: 0 the stored codes', 1 the next encode's.
    """
    found = table.reshape(-1, 2, KNOTS + 1)[:, which].to(where).float().expand(groups, -1)
    return torch.where(found[:, -1:] > 0, found, straight(where))


def places(code: Tensor, levels: Tensor, curve: Tensor) -> Tensor:
    """Where on the lattice codes lie, in steps, fp32 (groups, G); those of code 0 mean nothing."""
    at = (code - 1) * (KNOTS / (levels - 1))
    knot = torch.floor(at).clamp(0, KNOTS - 1)
    left, right = (curve.gather(1, knot.long() + side) for side in (0, 1))
    return 1 + (levels - 1) * (left + (at - knot) * (right - left))


def codes_below(x: Tensor, levels: Tensor, curve: Tensor) -> Tensor:
    """The largest code whose place is not above x, but for rounding, and at most the last but one."""
    y = (x - 1) / (levels - 1)
    knot = torch.searchsorted(curve[:, 1:-1].contiguous(), y.contiguous(), right=True)
    left, right = (curve.gather(1, knot + side) for side in (0, 1))
    return torch.floor(1 + (levels - 1) / KNOTS * (knot + (y - left) / (right - left))).clamp_min(1).minimum(levels - 1)


def fitted(seen: Tensor) -> Tensor:
    """Counts, int64 (parameters, BINS), to the curves that lose least, fp16 (parameters, KNOTS + 1). Waits for nothing."""
    padded = torch.cat([seen[:, :1], seen[:, :1], seen, seen[:, -1:], seen[:, -1:]], 1)
    smooth = torch.stack([weight * padded[:, i : i + BINS] for i, weight in enumerate(SMOOTH)]).sum(0)
    density = smooth.double() ** (1 / 3)
    density = density / density.sum(1, keepdim=True).clamp_min(1e-300)
    # whole numbers again: sums of floating-point numbers depend on their order
    codes = torch.round(((1 - EVEN) * density + EVEN / BINS) * 2**40).long()
    ends = torch.nn.functional.pad(codes.cumsum(1), (1, 0)).double()
    wanted = ends[:, -1:] * (torch.arange(KNOTS + 1, device=seen.device) / KNOTS).double()
    part = torch.searchsorted(ends[:, 1:-1].contiguous(), wanted, right=True)
    knots = (part + (wanted - ends.gather(1, part)) / codes.gather(1, part)) / BINS
    knots[:, 0], knots[:, -1] = 0, 1
    return knots.half()


@jit
def _two_knots(curve, first):  # type: ignore[no-untyped-def]
    """Knots `first` and the next, fp32, of a curve; one of zeros is straight."""
    left, right = tl.load(curve + first).to(tl.float32), tl.load(curve + first + 1).to(tl.float32)
    known, even = tl.load(curve + _KNOTS) > 0, first.to(tl.float32) * (1 / _KNOTS)
    return tl.where(known, left, even), tl.where(known, right, even + 1 / _KNOTS)


@jit
def _lines(curve, part):  # type: ignore[no-untyped-def]
    """A curve's parts as lines, (value at s = 0, slope in s * KNOTS): what is between two knots then takes one multiply-add."""
    left, right = _two_knots(curve, part)
    return left - part.to(tl.float32) * (right - left), right - left


@jit
def learned_tables(curves):  # type: ignore[no-untyped-def]
    """`Codec.device_tables`: what `_place` and `_at` look up, in tables of 32 that the warp holds.

    Returns:
        (lines of the stored codes' curve, of the next encode's, search tree and lines of the latter's inverse).
    """
    lane = device.lanes()
    coming = curves + (_KNOTS + 1)
    # `floor_magic` leaves a part's number less 1. Behind the last part, its line goes on, so that nothing need be clamped
    part = tl.minimum((lane + 1) & 31, _KNOTS - 1)
    # The digits of lane + 1/2 behind the first: of 16 + k, k; of a node of the tree, below 16, the knot in the middle of what it divides
    number = ((lane.to(tl.float32) + 0.5).to(tl.int32, bitcast=True) >> 19) & (_KNOTS - 1)
    left, right = _two_knots(coming, number)
    slope = device.reciprocal(right - left)
    tree = tl.where(lane < _KNOTS, left, number.to(tl.float32) - left * slope)
    start, rise = _lines(curves, part)
    # code 0, which alone lies in part -1, decodes to 2^-inf = 0 without being asked for
    return (tl.where(lane == 30, float("-inf"), start), rise), _lines(coming, part), (tree, slope)


@jit
def _place(at, lines):  # type: ignore[no-untyped-def]
    """F(at / KNOTS) for one tile."""
    part = device.floor_magic(at).to(tl.int32, bitcast=True)
    return device.pick(lines[0], part) + at * device.pick(lines[1], part)


@jit
def _at(y, inverse):  # type: ignore[no-untyped-def]
    """KNOTS times the inverse of F at y, for one tile: four comparisons, of which each appends a digit to the number of the part."""
    index = tl.full(y.shape, 1, tl.int32)
    for _ in tl.static_range(4):
        index = device.append_sign(index, device.pick(inverse[0], index) - y)
    return device.pick(inverse[0], index) + y * device.pick(inverse[1], index)


@jit
def learned_decode(planes, first, limit, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`LearnedCodec.decode` for one tile; see `Codec.device_decode`."""
    code, u, base, step, levels = read_word(planes, first, limit, ROWS)
    per_code = _KNOTS * device.reciprocal(levels - 1.0)
    y = _place(code * per_code - per_code, planes[5][0])
    r = device.exp2(y * ((levels - 1.0) * step) + (base + 1.0) * step)
    return u * r, r * r


@jit
def learned_encode(planes, values, first, limit, index, time, DITHER: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`LearnedCodec.encode` for one tile; see `Codec.device_encode`.

    Codes are counted from 0, and places are in units of the lattice's length. One that lies on the last code, or beyond by rounding, keeps
    it, since there the next code's place is beyond `last`.
    """
    m, v = values
    _, lines, inverse = planes[5]
    nonzero, log_r, base, last, top, entry, n, levels, step, per_step = describe(planes, v, first, limit, time, ROWS)
    spaces = levels - 1.0
    per_space = device.reciprocal(spaces)
    per_code = _KNOTS * per_space
    end = (last - 1.0) * per_space
    y = tl.minimum(device.saturating_fma(log_r, per_step * per_space, -(base + 1.0) * per_space), end)
    below = device.floor_product_magic(_at(y, inverse), spaces * (1 / _KNOTS)) - (device.SIGNED_MAGIC - 1.0)
    at = below * per_code
    low, high = _place(at, lines), _place(at + per_code, lines)
    share = device.saturating_fma(y - low, device.reciprocal(high - low), 0.0)
    if DITHER:
        # share (1 - (1 - share) (high - low) c) as in `_rounded`, with (high - low) share = y - low, and with 1 more on both sides
        bend = spaces * step * _LN2
        up = device.dither(index, time, _ELEMENT, _TIME, ROWS, _GROUP) < share * (1.0 + (y - low) * bend) + (1.0 - (y - low) * bend)
    else:
        up = share >= 0.5
    # the margin is for rounding: it lets the last code be reached, and is a 100,000th of an octave
    up = up & (high <= end + 2.0**-21)
    log_r = tl.where(up, high, low) * (spaces * step) + (base + 1.0) * step
    return write_word(planes, m, nonzero, below + tl.where(up, 2.0, 1.0), log_r, top, entry, n, first, limit, ROWS)


class LearnedCodec(JointCodec):
    """AdamW's two moments. See the module's docstring for format, bounds and sources.

    Raises:
        ConfigurationError: the states are not one signed state followed by one that is never negative.
    """

    name = "learned"
    device_decode = staticmethod(learned_decode)
    device_encode = staticmethod(learned_encode)
    device_tables = staticmethod(learned_tables)

    @property
    def tables(self) -> tuple[Plane, ...]:
        return (Plane(f"{self.states[1].name}_curve", torch.float16, 0, 2 * (KNOTS + 1)),)

    def fresh_tables(self) -> tuple[Tensor, ...]:
        return (straight().repeat(2),)

    def encode(self, values: Sequence[Tensor], planes: Sequence[Tensor], *, index: int = 0, step: int = 0) -> Tensor:
        table = planes[5].view(-1, KNOTS + 1)
        table.copy_(torch.where(table[:, -1:] > 0, table, straight(table.device)))
        return super().encode(values, planes, index=index, step=step)

    def flaw(self, parts: Sequence[Tensor]) -> str | None:
        for curve in parts[5].float().cpu().view(2, -1):
            if not (curve[0] == 0 and curve[-1] == 1 and (curve.diff() > 0).all()):  # so that NaN is a flaw
                return f"{self.tables[0].name} is no curve that rises from 0 to 1"
        return None

    def expected_errors(self, planes: Sequence[Tensor], numel: int) -> tuple[Tensor, ...]:
        of_m, of_r = super().expected_errors(planes, numel)
        word = grouped(planes[1], self.group).float() * 256 + grouped(planes[0], self.group)
        n, levels, _ = lattice(planes[3].float()[:, None])
        code = torch.floor((word + 0.5) / (2 * n + 1)).clamp_min(1).minimum(levels - 1)
        curve = curves(planes[5], len(word), 0, word.device)
        return of_m, of_r * (places(code + 1, levels, curve) - places(code, levels, curve)).flatten()[:numel]

    def observe(self, planes: Sequence[Tensor], at: Tensor, owners: Tensor, tables: Tensor, seen: Tensor) -> None:
        """Count where codes that have just been encoded lie.

        Args:
            planes: of a page.
            at: the groups that are looked at, by their number in the page, int64 (groups,).
            owners: for each of them, its parameter's row in `tables` and `seen`.
            tables: of all parameters, (parameters, entries).
            seen: int64 (parameters, BINS); is added to.
        """
        word = planes[1].view(-1, self.group)[at].float() * 256 + planes[0].view(-1, self.group)[at]
        entry, umax = (plane[at].float()[:, None] for plane in planes[3:5])
        n, levels, _ = lattice(entry)
        code = torch.floor((word + 0.5) / (2 * n + 1))
        u = (word - code * (2 * n + 1) - n) * (umax / n)
        weight = torch.where(code > 0, torch.round((u * u).clamp_max(LARGEST) * UNIT), 0).long()
        y = (places(code, levels, curves(tables[owners], len(at), 1, at.device)) - 1) / (levels - 1)
        part = (y * BINS).long().clamp(0, BINS - 1)
        seen.view(-1).index_add_(0, (owners[:, None] * BINS + part).view(-1), weight.view(-1))

    def learn(self, tables: Tensor, seen: Tensor) -> Tensor:
        """Tables (parameters, entries) whose next encode has the curves that fit what was seen; as they are where nothing was."""
        now = self.settled(tables)[:, KNOTS + 1 :]
        return torch.cat([now, torch.where(seen.sum(1, keepdim=True) > 0, fitted(seen), now)], 1)

    def advance(self, parts: Sequence[Tensor], step: int) -> None:
        planes, tables = [grouped(plane, self.group).view(-1) for plane in parts[:2]] + list(parts[2:5]), parts[5].view(1, -1)
        seen = torch.zeros(1, BINS, dtype=torch.int64, device=tables.device)
        if due(step):
            at = torch.arange(0, len(parts[2]), stride(len(parts[0])), device=tables.device)
            self.observe(planes, at, torch.zeros_like(at), tables, seen)
        tables.copy_(self.learn(tables, seen))

    def settled(self, tables: Tensor) -> Tensor:
        """Tables (parameters, entries) by which that decodes which these have encoded."""
        return curves(tables, len(tables), 1, tables.device).half().repeat(1, 2)

    def _place(self, code: Tensor, levels: Tensor, tables: Sequence[Tensor]) -> Tensor:
        return places(code, levels, curves(tables[0], len(code), 0, code.device))

    def _rounded(
        self, x: Tensor, width: Tensor, levels: Tensor, last: Tensor, dither: Tensor | None, tables: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        curve = curves(tables[0], len(x), 1, x.device)
        below = codes_below(x, levels, curve)
        low, high = places(below, levels, curve), places(below + 1, levels, curve)
        share = ((x - low) / (high - low)).clamp(0, 1)
        up = share >= 0.5 if dither is None else dither < share - LN2 * width * (high - low) * share * (1 - share)
        up = up & (high <= last)
        return below + up, torch.where(up, high, low)


CODEC = LearnedCodec
