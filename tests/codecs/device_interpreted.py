"""The plain forms of `codecs/device.py` and of weight splitting in Triton's interpreter, over all inputs where there are few.

`test_device.py` runs this file in a process of its own, since Triton must see TRITON_INTERPRET=1 before it is imported.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashoptim_hf._triton import INTERPRET, jit, tl
from flashoptim_hf.codecs import device, weight_split
from flashoptim_hf.codecs.base import weyl
from flashoptim_hf.codecs.log import CODE_DITHER, MCODE_DITHER

ROWS = 1 << 13


@jit
def _map(function: tl.constexpr, x_ptr, y_ptr, out_ptr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = function(x), or function(x, y) where y is given."""
    x = device.load(x_ptr, 0, ROWS * 64, ROWS, 64)
    out = function(x) if y_ptr is None else function(x, device.load(y_ptr, 0, ROWS * 64, ROWS, 64))
    device.store(out_ptr, out, 0, ROWS * 64, ROWS, 64)


@jit
def _split(w_ptr, p_ptr, c_ptr, DTYPE: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    p, c = weight_split.device_split(device.load(w_ptr, 0, ROWS * 64, ROWS, 64), DTYPE, BITS)
    device.store(p_ptr, p, 0, ROWS * 64, ROWS, 64)
    device.store(c_ptr, c, 0, ROWS * 64, ROWS, 64)


@jit
def _dither(out_ptr, index_ptr, step_ptr, ELEMENT: tl.constexpr, TIME: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    value = device.dither(tl.load(index_ptr), tl.load(step_ptr), ELEMENT, TIME, ROWS, 64)
    device.store(out_ptr, value, 0, ROWS * 64, ROWS, 64)


@jit
def _saturate(a, b):  # type: ignore[no-untyped-def]
    return device.saturating_fma(a, b, 0.25)


@jit
def _append_sign(x, index):  # type: ignore[no-untyped-def]
    return device.append_sign(index, x)


def apply(function: object, x: Tensor, y: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    _map[(1,)](function, x, y, out, ROWS=x.numel() // 64)
    return out


def every(dtype: torch.dtype) -> Tensor:
    """All values of an 8- or 16-bit type."""
    bits = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
    return bits.to({1: torch.uint8, 2: torch.int16}[dtype.itemsize]).view(dtype)


def test_this_process_interprets() -> None:
    assert INTERPRET
    assert not device.PTX


def test_bytes_become_floats_exactly() -> None:
    codes = every(torch.uint8)
    assert torch.equal(apply(device.uint8_to_float, codes), codes.float())
    codes = every(torch.int8)
    for scale in (1.0, 129 * 2.0**-22):
        expected = (codes.double() * scale).float()
        assert torch.equal(apply(device.int8_times, codes, torch.full((256,), scale)), expected)


@pytest.mark.parametrize("top", [-255 / 64, -3.9843, 0.25])
def test_lattice_counts_from_the_top_and_knows_zero(top: float) -> None:
    codes, top = every(torch.uint8), torch.full((256,), top)
    expected = (codes.double() / 64 + top).float()
    expected[0] = -float("inf")
    assert torch.equal(apply(device.lattice, codes, top), expected)


def test_what_is_hidden_or_widened_stays_as_it_is() -> None:
    exponents, blocks = torch.full((64,), 0x7F800000), torch.full((64,), 4096)
    assert torch.equal(apply(device.hidden, exponents, blocks, dtype=torch.int32), exponents.int())
    x = every(torch.bfloat16)
    assert torch.equal(apply(device.widen, x).view(torch.int32), x.float().view(torch.int32))
    x = every(torch.float16)
    x = torch.where(x.isnan(), 1, x)
    assert torch.equal(apply(device.widen, x), x.float())


def test_the_root_of_a_magnitude() -> None:
    x = torch.linspace(-2, 2, 64)
    torch.testing.assert_close(apply(device.sqrt_abs, x), x.abs().sqrt(), rtol=2.0**-22, atol=0)


def test_floor_magic_leaves_the_floor_in_the_low_byte() -> None:
    x = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 255 - 126
    x[:255] = torch.arange(-126, 129.0)
    x[255:510] = torch.arange(-126, 129.0).nextafter(torch.tensor(-1e9))
    low = apply(device.floor_magic, x).view(torch.int32).to(torch.int8)
    assert torch.equal(low, (torch.floor(x) - 1).to(torch.int8))


def test_a_product_is_rounded_down() -> None:
    gen = torch.Generator().manual_seed(0)
    a, b = torch.rand(4096, generator=gen) * 16, torch.rand(4096, generator=gen) * 47
    a[:64], b[:64] = torch.arange(64.0), 0.5
    low = apply(device.floor_product_magic, a, b).view(torch.int32).to(torch.int8)
    assert torch.equal(low, (torch.floor(a * b) - 1).to(torch.int32).to(torch.int8))


def test_a_sum_is_brought_between_0_and_1() -> None:
    x = torch.linspace(-2, 2, 4096)
    assert torch.equal(apply(_saturate, x, torch.full_like(x, 2.0)), (2 * x + 0.25).clamp(0, 1))


def test_signs_are_appended() -> None:
    x = torch.linspace(-2, 2, 4096)
    x[:2] = torch.tensor([0.0, -0.0])
    index = torch.arange(4096, dtype=torch.int32)
    assert torch.equal(apply(_append_sign, x, index, dtype=torch.int32), 2 * index + torch.signbit(x).int())


@pytest.mark.parametrize("multipliers", [CODE_DITHER, MCODE_DITHER])
@pytest.mark.parametrize(("index", "step"), [(0, 0), (64, 1), (2**31 - 64, 7), (2**40 + 64, 2**31 - 1)])
def test_dither_is_that_of_the_eager_path(multipliers: tuple[int, int], index: int, step: int) -> None:
    out = torch.empty(4096)
    _dither[(1,)](out, torch.tensor(index), torch.tensor(step), ELEMENT=multipliers[0], TIME=multipliers[1], ROWS=64)
    expected = weyl(4096, index, step, multipliers, torch.device("cpu"))
    assert (out >= 1).all()
    assert (out < 2).all()
    # 23 bits of the 24, cut off
    assert torch.equal((out - 1) * 2.0**23, torch.floor(expected * 2.0**23))


def test_bf16_is_rounded_to_nearest_even() -> None:
    gen = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=gen, dtype=torch.int64).to(torch.int32)
    bits[: 1 << 15] = (bits[: 1 << 15] & -0x10000) | 0x8000  # ties
    w = bits.view(torch.float32)
    w = torch.where(w.isnan(), 1.0, w)
    p, c = torch.empty(len(w), dtype=torch.bfloat16), torch.empty(len(w), dtype=torch.int8)
    _split[(1,)](w, p, c, DTYPE=tl.bfloat16, BITS=24, ROWS=len(w) // 64)
    assert torch.equal(p.view(torch.int16), w.bfloat16().view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("c", [-127, -126, -65, -64, -63, -1, 0, 1, 63, 64, 65, 126, 127])
def test_join_stays_with_what_rounds_to_the_weight(dtype: torch.dtype, c: int) -> None:
    """All weights with the corrections that are most likely to go wrong; joined, they are the eager path's to two ulps of fp32."""
    p = every(dtype)
    p = torch.where(torch.isfinite(p), p, 1.0)
    # the fast form of bf16 takes subnormal weights as they are
    subnormal = p.float().abs() < torch.finfo(dtype).smallest_normal
    p = torch.where(subnormal & (p != 0), 1.0, p) if dtype == torch.bfloat16 else p
    corrections = torch.full((len(p),), c, dtype=torch.int8)
    w = apply(weight_split.device_join, p, corrections)
    assert torch.equal(w.to(dtype), p)
    expected = weight_split.join(p, corrections)
    assert ((w - expected).abs() <= 2.0**-22 * p.float().abs() + 2.0**-126).all()

    again, moved = torch.empty(len(w), dtype=dtype), torch.empty(len(w), dtype=torch.int8)
    _split[(1,)](w, again, moved, DTYPE={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype], BITS=24, ROWS=len(w) // 64)
    assert torch.equal(again, p)
    # a correction that reached too far below a power of two is cut back once; all others stay
    usual = (p.view(torch.int16) & (0x7F if dtype == torch.bfloat16 else 0x3FF)) != 0
    assert torch.equal(moved[usual], corrections[usual])
    w = apply(weight_split.device_join, p, moved)
    _split[(1,)](w, again, corrections, DTYPE={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype], BITS=24, ROWS=len(w) // 64)
    assert torch.equal(corrections, moved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_correction_is_the_eager_one_bit_for_bit(dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(0)
    w = torch.randn(1 << 16, generator=gen) * torch.exp(3 * torch.randn(1 << 16, generator=gen))
    w[:4096] = 2.0 ** torch.randint(-13, 13, (4096,), generator=gen) * (1 - 2.0**-14 * torch.rand(4096, generator=gen))
    w = w.clamp(-60000, 60000)
    p, c = torch.empty(len(w), dtype=dtype), torch.empty(len(w), dtype=torch.int16)
    _split[(1,)](w, p, c, DTYPE={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype], BITS=32, ROWS=len(w) // 64)
    expected_p, expected_c = weight_split.split(w, dtype, 32)
    assert torch.equal(p, expected_p)
    assert torch.equal(c, expected_c)
    torch.testing.assert_close(apply(weight_split.device_join, p, c), weight_split.join(p, c), rtol=2.0**-23, atol=0)
