"""Weight splitting, proved over all bit patterns where they can be listed, and against an fp64 oracle where they cannot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashoptim_hf.codecs.weight_split import CORRECTION_DTYPE, join, split

DTYPES = [torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
widths = pytest.mark.parametrize("bits", [24, 32])

MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
SMALLEST_EXPONENT = {torch.bfloat16: -126, torch.float16: -14}

# every int8; for int16 both ends, the middle of each half (where the rounding of the products is closest to a tie), zero, and some others
CORRECTIONS = {
    24: list(range(-128, 128)),
    32: [c * s for s in (-1, 1) for c in (*range(12), *range(16368, 16401, 2), 16383, 16385, *range(32756, 32768), 100, 9999, 25001)]
    + [-32768],
}


def patterns(dtype: torch.dtype) -> Tensor:
    """All finite values of a 16-bit format."""
    p = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    return p[torch.isfinite(p)]


def ulp(p: Tensor) -> Tensor:
    """The spacing of p's format above |p|, fp64, from the definition."""
    _, exponent = torch.frexp(p.double())
    exponent = torch.where(p == 0, -(2**30), exponent - 1).clamp_min(SMALLEST_EXPONENT[p.dtype])
    return torch.ldexp(torch.ones_like(p, dtype=torch.float64), exponent - MANTISSA[p.dtype])


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = torch.int16 if a.element_size() == 2 else torch.int32
    return torch.equal(a.view(integer), b.view(integer))


@dtypes
@widths
def test_every_weight_survives_every_correction(dtype: torch.dtype, bits: int) -> None:
    """For all finite p: `join` rounds to p whatever the correction, and what it gives is a fixed point of split and join.

    So a weight that was written from outside, beside a correction that belongs to another weight, is kept, and so is a master weight by a
    step of size zero.
    """
    p = patterns(dtype)
    for value in CORRECTIONS[bits]:
        c = torch.full_like(p, value, dtype=CORRECTION_DTYPE[bits])
        w = join(p, c)
        assert torch.equal(w.to(dtype), p), value
        p2, c2 = split(w, dtype, bits)
        assert torch.equal(p2, p), value
        assert same_bits(join(p2, c2), w), value
        if value == 0:
            assert same_bits(w, p.float())
            assert same_bits(p2, p)
            assert not c2.any()


@dtypes
@widths
def test_split_gives_a_correction_back(dtype: torch.dtype, bits: int) -> None:
    """A correction that `split` made is found again, bit for bit."""
    p = patterns(dtype)
    p = p[p != 0]
    for value in CORRECTIONS[bits]:
        _, made = split(join(p, torch.full_like(p, value, dtype=CORRECTION_DTYPE[bits])), dtype, bits)
        p2, again = split(join(p, made), dtype, bits)
        assert same_bits(p2, p), value
        assert torch.equal(again, made), value


def test_every_int16_correction() -> None:
    """All 2^16 corrections for weights of each kind: ordinary, odd and even, powers of two, subnormal, largest."""
    c = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype, chosen in (
        (torch.bfloat16, [1.0, -1.0, 1.0078125, 3.3895e38, -(2.0**-126), 2.0**-133, 0.0, 1.5, -1e-38, 2.0**40]),
        (torch.float16, [1.0, -1.0, 1.0009765625, 65504.0, -(2.0**-14), 2.0**-24, 0.0, 2.0**-15, 3e-5, 6e-5, 257 * 2.0**-24, 1.6e-5]),
    ):
        for value in chosen:
            p = torch.tensor(value).to(dtype).expand(len(c)).contiguous()
            w = join(p, c)
            assert torch.equal(w.to(dtype), p), value
            order = torch.arange(2**16) - 2**15
            assert (w[order % 2**16].diff() >= 0).all(), "monotone in the correction"
            p2, c2 = split(w, dtype, 32)
            assert torch.equal(p2, p), value
            assert same_bits(join(p2, c2), w), value


def dense(dtype: torch.dtype) -> Tensor:
    """fp32 numbers that lie densely in the intervals around weights of each exponent: all 2^16 patterns of the low half for bf16.

    Both signs; the mantissas of p are zero (a power of two), one, a middle one, and all ones.
    """
    if dtype == torch.bfloat16:
        exponents = torch.tensor([0, 1, 2, 9, 64, 126, 127, 128, 200, 253, 254], dtype=torch.int64)
        mantissas = torch.tensor([0, 1, 0x55, 0x7F], dtype=torch.int64)
        high = (exponents[:, None] << 7 | mantissas).flatten()
        positive = (high[:, None] << 16 | torch.arange(2**16)).flatten().to(torch.int32).view(torch.float32)
    else:
        p = torch.tensor(
            [(e << 10) | m for e in (0, 1, 2, 10, 15, 16, 29, 30) for m in (0, 1, 0x80, 0x155, 0x3FF)], dtype=torch.int16
        ).view(dtype)
        offset = torch.arange(-(2**13), 2**13 + 1, dtype=torch.float64) / 2**13
        positive = (p.double()[:, None] + ulp(p)[:, None] * offset).abs().float().flatten()
    w = torch.cat((positive, -positive))
    return w[w.to(dtype).isfinite()]


@dtypes
def test_the_master_weight_is_within_its_bound(dtype: torch.dtype) -> None:
    """ulp(p) / 508 with 8 bits and 2^-16 ulp(p) with 16. The result being fp32 adds half an fp32 ulp at one exponent, 2^-16, of fp16 alone.

    16 bits are worse than 8 only just below a power of two of bf16, where fp32 is finer than a 32-bit master weight and 8 bits can be
    right by luck, and then by one fp32 ulp; and below 2^-120, where the product with the correction is subnormal.
    """
    w = dense(dtype)
    errors = {}
    for bits, bound in ((24, 1 / 508), (32, 2.0**-16)):
        p, c = split(w, dtype, bits)
        assert torch.equal(p, w.to(dtype))
        errors[bits] = (join(p, c).double() - w.double()).abs()
        rounding = torch.where((dtype == torch.float16) & (w.abs().frexp()[1] == -15), 2.0**-40, 0)
        assert (errors[bits] <= ulp(p) * bound + rounding).all(), bits
    worse = (errors[32] > errors[24]) & (w.abs() > 2.0**-120)
    assert (errors[32] <= 2.0**-17 * ulp(p))[worse].all()
    assert (p.float().frexp()[0].abs() == 0.5)[worse].all()
    assert (w.abs() < p.float().abs())[worse].all()
    if dtype == torch.float16:
        assert not worse.any()


@dtypes
@widths
def test_the_bound_is_not_far_off(dtype: torch.dtype, bits: int) -> None:
    """The control: without the correction the same measure finds errors of half an ulp, and with it the bound is nearly reached."""
    w = dense(dtype)
    p, c = split(w, dtype, bits)
    bare = (p.double() - w.double()).abs() / ulp(p)
    assert bare.max() == 0.5
    if bits == 24:
        assert ((join(p, c).double() - w.double()).abs() / ulp(p)).max() > 0.9 / 508


@dtypes
@widths
def test_join_is_monotone_across_weights(dtype: torch.dtype, bits: int) -> None:
    """A larger master weight never reads as a smaller one, across binades and zero too."""
    w = dense(dtype).sort().values
    assert (join(*split(w, dtype, bits)).diff() >= 0).all()


@dtypes
@widths
def test_representable_weights_stay_exact(dtype: torch.dtype, bits: int) -> None:
    p = patterns(dtype)
    q, c = split(p.float(), dtype, bits)
    assert same_bits(q, p)
    assert not c.any()
    assert same_bits(join(q, c), p.float())


@dtypes
@widths
def test_what_is_not_finite_has_no_correction(dtype: torch.dtype, bits: int) -> None:
    w = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38])
    p, c = split(w, dtype, bits)
    assert not c.any()
    assert p[[0, 1, 3, 4]].tolist() == [float("inf"), -float("inf")] * 2
    assert p[2].isnan()
    # and a stale correction beside one is ignored
    joined = join(p, torch.full_like(c, 77))
    assert joined[[0, 1, 3, 4]].tolist() == p[[0, 1, 3, 4]].tolist()
    assert joined[2].isnan()


@dtypes
@widths
def test_largest_finite_weight(dtype: torch.dtype, bits: int) -> None:
    """Just below the number that rounds to infinity the master weight is still finite and close."""
    largest = torch.tensor([torch.finfo(dtype).max])
    tie = largest + ulp(largest.to(dtype)).float() / 2
    w = torch.cat((torch.nextafter(tie, largest), -torch.nextafter(tie, largest)))
    p, c = split(w, dtype, bits)
    assert p.isfinite().all()
    assert ((join(p, c) - w).abs().double() <= ulp(p) / 508).all()
    assert not split(tie, dtype, bits)[0].isfinite().any()


@dtypes
@widths
def test_small_steps_add_up(dtype: torch.dtype, bits: int) -> None:
    """Steps of a tenth of an ulp: the bare weight never moves, the master weight arrives."""
    p, c = split(torch.full((16,), 1.0), dtype, bits)
    start, step = p.clone(), 0.1 * ulp(p)[0].item()
    bare = start.clone()
    for _ in range(100):
        p, c = split(join(p, c) + step, dtype, bits)
        bare = (bare.float() + step).to(dtype)
    assert torch.equal(bare, start)
    assert (join(p, c) - 1 - 100 * step).abs().max() < step * (3 if bits == 24 else 0.1)


def test_correction_dtypes() -> None:
    assert {24: torch.int8, 32: torch.int16} == CORRECTION_DTYPE
    for bits, dtype in CORRECTION_DTYPE.items():
        assert split(torch.ones(3), torch.bfloat16, bits)[1].dtype == dtype
