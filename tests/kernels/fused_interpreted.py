"""The fused kernel in Triton's interpreter, against the eager path.

`test_fused.py` runs this file in a process of its own, since Triton must see TRITON_INTERPRET=1 before it is imported.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashoptim_hf import _triton
from flashoptim_hf._triton import jit, tl
from flashoptim_hf.codecs import device, weight_split
from flashoptim_hf.codecs.base import ALIGN, get_codec, weyl
from flashoptim_hf.codecs.log import CODE_DITHER, MCODE_DITHER, log_decode, log_units
from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.kernels import eager, fused
from flashoptim_hf.kernels.rule import Format, Segment, Segments
from flashoptim_hf.optim.adamw import RULE

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# around one group and one tile; one element, many tiles and one more
SIZES = (1, 31, 63, 64, 65, 511, 512, 577, 1000, 4097)
GAP = 64


@dataclass
class Page:
    """A page with parameters of the given sizes, one gap of ALIGN elements before each."""

    planes: list[Tensor]
    params: list[Tensor]
    grads: list[Tensor]
    fmt: Format
    segments: list[Segment]

    def clone(self) -> Page:
        params = [p.clone() for p in self.params]
        segments = [replace(s, param=p) for s, p in zip(self.segments, params, strict=True)]
        return Page([p.clone() for p in self.planes], params, self.grads, self.fmt, segments)


def hyper(step: int, lr: Any = 1e-3, eps: float = 1e-8, weight_decay: float = 0.01) -> tuple[Any, ...]:
    return (lr, *RULE.scalars({"betas": (0.9, 0.999), "eps": eps, "weight_decay": weight_decay}, step))


def page(
    sizes: tuple[int, ...] = SIZES,
    dtype: torch.dtype = BF16,
    bits: int = 24,
    grad: torch.dtype | None = None,
    codec: str = "log",
    dither: bool = True,
    seed: int = 0,
    warm: int = 3,
    spread: float = 1.5,
) -> Page:
    """A page whose states come from `warm` eager steps with gradients of lognormal scale, some of them zero."""
    gen = torch.Generator().manual_seed(seed)
    fmt = Format(RULE, get_codec(codec, RULE.states, dither), bits)
    starts = [GAP + start for start in itertools.accumulate((-(-n // ALIGN) * ALIGN + GAP for n in sizes), initial=0)]
    specs = [(plane.dtype, plane.entries(starts[-1])) for plane in fmt.codec.planes]
    if bits:
        specs.append((weight_split.CORRECTION_DTYPE[bits], starts[-1]))
    planes = [torch.zeros(n, dtype=plane_dtype) for plane_dtype, n in specs]
    scales = [torch.exp(spread * torch.randn(n, generator=gen)) * 1e-2 * (torch.rand(n, generator=gen) > 0.02) for n in sizes]
    weights = [torch.randn(n, generator=gen) * 0.05 for n in sizes]
    if bits:
        params, corrections = zip(*(weight_split.split(w, dtype, bits) for w in weights), strict=True)
        for start, c in zip(starts, corrections, strict=False):
            planes[-1][start : start + len(c)] = c
    else:
        params = [w.to(dtype) for w in weights]
    made = Page(planes, list(params), [], fmt, [])
    for step in range(1, warm + 2):
        made.grads = [(scale * torch.randn(len(scale), generator=gen)).to(grad or dtype) for scale in scales]
        made.segments = [
            Segment(p, g, start, ALIGN * i, step, hyper(step))
            for i, (p, g, start) in enumerate(zip(made.params, made.grads, starts, strict=False))
        ]
        if step <= warm:
            eager.update_page(made.planes, made.segments, made.fmt)
    # what no segment covers is junk, and must neither be read into a group nor written; what a last group lacks is 0, and stays so
    for plane, outside, missing in zip(made.planes, uncovered(made), uncovered(made, whole_groups=False), strict=True):
        plane.view(torch.uint8).view(len(plane), -1)[outside] = 0x5A
        assert (plane[missing & ~outside] == 0).all()
    return made


def uncovered(p: Page, whole_groups: bool = True) -> list[Tensor]:
    """For each plane, which of its entries belong to no element of any segment, nor to the last group of one if `whole_groups`."""
    masks = []
    for group, plane in zip([*(plane.group for plane in p.fmt.codec.planes), 1], p.planes, strict=False):
        outside = torch.ones(len(plane), dtype=torch.bool)
        for s in p.segments:
            numel = -(-s.param.numel() // p.fmt.codec.group) * p.fmt.codec.group if whole_groups else s.param.numel()
            outside[s.start // group : -(-(s.start + numel) // group)] = False
        masks.append(outside)
    return masks


def both(start: Page, **options: Any) -> tuple[Page, Page]:
    """The page after one step of each path."""
    fast, slow = start.clone(), start.clone()
    fused.update_page(fast.planes, fast.segments, fast.fmt, **options)
    eager.update_page(slow.planes, slow.segments, slow.fmt, **options)
    return fast, slow


def masters(p: Page) -> list[Tensor]:
    if not p.fmt.master_bits:
        return [param.float() for param in p.params]
    return [weight_split.join(s.param, p.planes[-1][s.start : s.start + s.param.numel()]) for s in p.segments]


def assert_same_weights(fast: Page, slow: Page, start: Page) -> None:
    """The step of each weight is right to 1e-5 of itself, plus what the master's format holds."""
    eps = {FP32: 2.0**-23, BF16: 2.0**-8, FP16: 2.0**-11}[start.params[0].dtype]
    eps *= {0: 1.0, 24: 1 / 120, 32: 1 / 32000}[start.fmt.master_bits]
    eps = max(eps, 2.0**-22)
    for a, b, before in zip(masters(fast), masters(slow), masters(start), strict=True):
        limit = 1e-5 * (b - before).abs() + eps * b.abs() + 1e-9
        assert ((a - b).abs() <= limit).all(), ((a - b).abs() / limit).max()


def assert_same_log_states(fast: Page, slow: Page) -> None:
    """Constants to a grid, codes to one step and nearly all of them equal, mcodes to one step where they mean the same."""
    mcode, code, hi, step, umax = fast.planes[:5]
    mcode_, code_, hi_, step_, umax_ = slow.planes[:5]
    assert (hi - hi_).abs().max() <= 2.0**-16
    assert (step - step_).abs().max() <= 2.0**-22
    moved = code.int() - code_.int()
    assert moved.abs().max() <= 1
    assert (moved != 0).sum() <= 3 + 1e-3 * len(moved)
    assert ((code == 0) == (code_ == 0)).all()
    groups = (moved.view(-1, 64) == 0).all(1) & (umax == umax_) & (hi == hi_) & (step == step_)
    assert groups.float().mean() > 0.9
    drift = (mcode.int() - mcode_.int()).view(-1, 64)[groups]
    assert drift.abs().max() <= 1
    assert (drift != 0).sum() <= 3 + 2e-3 * drift.numel()
    # Elsewhere each is within its bound of the same moments: r̂ umax / 127, and a step of the lattice
    numel = len(mcode)
    m, v = fast.fmt.codec.decode(fast.planes[:5], numel)
    m_, v_ = slow.fmt.codec.decode(slow.planes[:5], numel)
    scale = torch.maximum(umax.float(), umax_.float()).repeat_interleave(64) / 127 * torch.maximum(v, v_).sqrt()
    assert ((m - m_).abs() <= 2.1 * scale + 1e-30).all()


def assert_untouched(before: Page, after: Page) -> None:
    """Everything in the planes outside the segments keeps every bit, the places that a last group lacks too."""
    for outside, old, new in zip(uncovered(before, whole_groups=False), before.planes, after.planes, strict=True):
        assert outside.any()
        assert torch.equal(old[outside].view(torch.uint8), new[outside].view(torch.uint8))


def test_this_process_interprets() -> None:
    assert _triton.INTERPRET


CASES = [
    pytest.param(dtype, bits, grad, id=f"{dtype}+{bits}/{grad}".replace("torch.", ""))
    for dtype, bits, grad in [
        (BF16, 24, BF16),
        (BF16, 32, BF16),
        (BF16, 0, BF16),
        (BF16, 24, FP32),
        (FP16, 24, FP16),
        (FP16, 32, FP32),
        (FP32, 0, FP32),
        (FP32, 0, BF16),
    ]
]


@pytest.mark.parametrize(("dtype", "bits", "grad"), CASES)
@pytest.mark.parametrize("dither", [True, False], ids=["dither", "nearest"])
def test_log_equals_eager(dtype: torch.dtype, bits: int, grad: torch.dtype, dither: bool) -> None:
    start = page(dtype=dtype, bits=bits, grad=grad, dither=dither)
    fast, slow = both(start)
    assert_same_weights(fast, slow, start)
    assert_same_log_states(fast, slow)
    assert_untouched(start, fast)


def blocks_of(*segments: tuple[int, bool]) -> tuple[np.ndarray, int, int]:
    """`fused._blocks` of (elements, whether aligned) of each segment."""
    sizes, aligned = zip(*segments, strict=True)
    return fused._blocks(np.array(sizes, dtype=np.int64).tobytes(), (~np.array(aligned, dtype=bool)).tobytes())


def test_blocks_of_several_tiles_equal_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    start = page((3 * fused.TILE - 1, 4 * fused.TILE, 4 * fused.TILE + 1), warm=1)
    monkeypatch.setattr(fused, "ENOUGH", 6)
    fused._deal.cache_clear()
    assert blocks_of(*((len(p), True) for p in start.params))[1] == 4 * fused.TILE
    fast, slow = both(start)
    assert_same_weights(fast, slow, start)
    assert_same_log_states(fast, slow)
    assert_untouched(start, fast)


@pytest.mark.parametrize(("dtype", "bits"), [(BF16, 24), (FP32, 0)])
def test_softsign_equals_eager(dtype: torch.dtype, bits: int) -> None:
    start = page(dtype=dtype, bits=bits, codec="softsign")
    fast, slow = both(start)
    assert_same_weights(fast, slow, start)
    assert_untouched(start, fast)
    for a, b in zip(fast.planes[:2], slow.planes[:2], strict=True):
        moved = (a.int() - b.int()).abs()
        assert moved.max() <= 1
        assert (moved > 0).float().mean() < 1e-3
    # m has code 0 wherever v has
    assert (fast.planes[0][fast.planes[1] == 0] == 0).all()
    for a, b in zip(fast.planes[2:4], slow.planes[2:4], strict=True):
        assert ((a.float() - b.float()).abs() <= 2.0**-10 * b.float()).all()


@pytest.mark.parametrize(("dtype", "bits"), [(BF16, 24), (FP32, 0)])
def test_none_equals_eager(dtype: torch.dtype, bits: int) -> None:
    start = page(dtype=dtype, bits=bits, codec="none")
    fast, slow = both(start)
    assert_same_weights(fast, slow, start)
    assert_untouched(start, fast)
    for a, b in zip(fast.planes[:2], slow.planes[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_gradients_of_several_dtypes_share_a_page() -> None:
    start = page((100, 64, 2048, 31))
    for segment, dtype in zip(start.segments, (BF16, FP32, FP16, FP32), strict=True):
        segment.grad = segment.grad.to(dtype)
    fast, slow = both(start)
    assert_same_weights(fast, slow, start)
    assert_same_log_states(fast, slow)


def test_parameters_of_several_dtypes_are_refused() -> None:
    start = page((64, 64), dtype=FP32, bits=0)
    start.segments[1].param = start.segments[1].param.bfloat16()
    with pytest.raises(ConfigurationError, match=r"bfloat16.*float32"):
        fused.update_page(start.planes, start.segments, start.fmt)


def test_inv_scale_multiplies_the_gradients() -> None:
    start = page((65, 2048))
    scaled = start.clone()
    for segment in scaled.segments:
        segment.grad = segment.grad * 1024
    fused.update_page(scaled.planes, scaled.segments, scaled.fmt, inv_scale=torch.tensor(1 / 1024))
    fused.update_page(start.planes, start.segments, start.fmt)
    for a, b in zip(scaled.planes + scaled.params, start.planes + start.params, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int32])
def test_skip_changes_nothing_and_its_absence_does(dtype: torch.dtype) -> None:
    start = page((65, 2048))
    for flag in (1, 0):
        made = start.clone()
        fused.update_page(made.planes, made.segments, made.fmt, skip=torch.tensor(flag).to(dtype))
        same = [torch.equal(a, b) for a, b in zip(made.planes + made.params, start.planes + start.params, strict=True)]
        assert all(same) if flag else not any(same)


def test_a_learning_rate_in_a_tensor_is_the_number() -> None:
    start = page((65, 2048))
    number, tensor = start.clone(), start.clone()
    for made, lr in ((number, 0.0625), (tensor, torch.tensor(0.0625))):
        for segment in made.segments:
            segment.hyper = (lr, *segment.hyper[1:])
        fused.update_page(made.planes, made.segments, made.fmt)
    assert not torch.equal(number.params[1], start.params[1])
    for a, b in zip(number.planes + number.params, tensor.planes + tensor.params, strict=True):
        assert torch.equal(a, b)


def test_each_segment_has_its_own_numbers() -> None:
    start = page((300, 300, 2048))
    for segment, (step, lr) in zip(start.segments, ((1, 0.5), (7, 1e-3), (100, 1e-5)), strict=True):
        segment.step, segment.hyper = step, hyper(step, lr)
    fast, slow = both(start)
    assert_same_weights(fast, slow, start)
    assert_same_log_states(fast, slow)


def assert_split_is_whole(whole: Page, cut: int) -> None:
    """A page's only parameter comes out the same, bit for bit, where it is updated in two parts, the latter first."""
    start = whole.clone()
    (s,) = start.segments
    head = replace(s, param=s.param[:cut], grad=s.grad[:cut])
    tail = replace(s, param=s.param[cut:], grad=s.grad[cut:], start=s.start + cut, index=s.index + cut)
    fused.update_page(whole.planes, whole.segments, whole.fmt)
    fused.update_page(start.planes, [tail], start.fmt)
    fused.update_page(start.planes, [head], start.fmt)
    for a, b in zip(whole.planes + whole.params, start.planes + start.params, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cut", [64, 1024, 1024 + 64])
def test_a_parameter_split_over_pages_is_the_whole_bit_for_bit(cut: int) -> None:
    """The dither and the arithmetic depend on where an element is in its parameter, not in the page or tile."""
    assert_split_is_whole(page((2048 + 17,), warm=1), cut)


def test_dither_follows_index_and_step_beyond_32_bits() -> None:
    for index, step in ((2**32 + 64, 5), (3 * 2**33, 2**31 - 1)):
        start = page((2048,), seed=index % 97)
        start.segments[0].index, start.segments[0].step = index, step
        fast, slow = both(start)
        assert_same_log_states(fast, slow)
        other = start.clone()
        other.segments[0].index += 64
        fused.update_page(other.planes, other.segments, other.fmt)
        assert not torch.equal(other.planes[0], fast.planes[0])


@pytest.mark.parametrize("multipliers", [CODE_DITHER, MCODE_DITHER], ids=["code", "mcode"])
@pytest.mark.parametrize("fraction", [0, 1, 2**32 - 512, 2**32 - 1])
def test_no_dither_carries_a_code_beyond_its_end(multipliers: tuple[int, int], fraction: int) -> None:
    """Codes 255, 1, 0 and 127 with the smallest and largest dither that there are, in each place of a group."""
    step = 3
    element, time = multipliers
    for at in range(0, 64, 9):
        start = page((64,), dtype=FP32, bits=0, warm=0)
        s = start.segments[0]
        # the element whose dither is `fraction`, and the group in which it is number `at`
        i = (fraction - step * time) * pow(element, -1, 2**32) % 2**32
        s.index, s.step = i - at, step
        assert weyl(64, i - at, step, multipliers, torch.device("cpu"))[at] == (fraction >> 8) * 2.0**-24
        for gradient in (1.0, -1.0, 1e-4, 0.0):  # largest, largest, smallest, none
            s.grad = torch.logspace(-3, -1, 64)
            s.grad[at] = gradient
            fast, slow = both(start)
            place = s.start + at
            code, expected = fast.planes[1][place].item(), slow.planes[1][place].item()
            # the smallest element lies on code 1 or a trifle above, which the smallest dither takes up
            allowed = {1.0: (255,), -1.0: (255,), 1e-4: (1, 2), 0.0: (0,)}[gradient]
            assert expected in allowed
            assert code in allowed
            if code == expected:  # else m is relative to another r
                assert (fast.planes[0][place].int() - slow.planes[0][place].int()).abs() <= (gradient != 0)
            assert (fast.planes[0][place] != 0) == (gradient != 0)


def test_an_element_above_its_rounded_maximum_keeps_code_127() -> None:
    """umax may be rounded below the largest u by 15 ulps; the largest dither must not take such an element to 128, which is -128."""
    step, (element, time) = 3, MCODE_DITHER
    i = (2**32 - 1 - step * time) * pow(element, -1, 2**32) % 2**32
    start = page((64,) * 32, dtype=FP32, bits=0, warm=0)
    target = 3.15625  # a bf16 number; u = m / r is it, or a few ulps more or less
    lr, decay, beta1, _, beta2, rest, *others = hyper(step)
    for number, s in enumerate(start.segments):
        s.index, s.step = i, step
        s.hyper = (lr, decay, beta1, target * rest**0.5, beta2, rest, *others)
        s.grad = torch.full((64,), 1e-3 * 1.01**number)
    fast, _ = both(start)
    firsts = [s.start for s in start.segments]
    r = torch.exp2(fast.planes[2][[first // 64 for first in firsts]])
    m = torch.stack([s.grad[0] * s.hyper[3] for s in start.segments])
    umax = fast.planes[4].float()[[first // 64 for first in firsts]]
    assert ((m / r) > umax).any(), "no group is the case that this test is for"
    assert (fast.planes[0][firsts] == 127).all()


def test_only_what_lies_on_16_bytes_takes_the_wide_path() -> None:
    start = page((512, 512, 512), dtype=FP32, bits=0, warm=0)
    start.segments[1].grad = torch.zeros(513)[1:]
    start.segments[2].param = torch.zeros(513)[1:]
    tables = fused._Tables(Segments.of(start.segments))
    assert tables.rows.view(3, fused.ROW)[:, 7].tolist() == [fused.TILE, fused.NEVER, fused.NEVER]
    assert tables.scratch.numel() == 2 * fused.TILE * (4 + 4)


def test_tables_of_the_same_segments_lie_apart_and_know_where() -> None:
    """What they have in common is kept; where they are is not."""
    start = page((512, 1024), warm=0)
    segments = Segments.of(start.segments)
    made = [fused._Tables(segments) for _ in range(3)]
    assert len({tables.rows.data_ptr() for tables in made}) == 3
    for tables in (*made, fused._Tables(segments)):
        rows = tables.rows.view(2, fused.ROW)
        width = segments.hyper.shape[1]
        assert rows[:, 6].tolist() == [tables.hyper.data_ptr() + 4 * width * i for i in range(2)]
        assert tables.hyper.tolist()[: 2 * width] == segments.hyper.reshape(-1).tolist()
        assert rows[:, :6].tolist() == segments.rows[:, :6].tolist()


def test_tables_are_right_whenever_another_thread_makes_its_own() -> None:
    dealt = fused._Dealt(np.array([512, 1024]).tobytes(), None, 5)
    wanted, code = dealt.rates_of(1 << 20).tolist(), fused._Dealt.rates_of.__code__
    dealt.rates_of(1 << 30)

    def between(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is code:
            frame.f_trace_opcodes = True
            if event == "opcode":  # before each of them: what a thread would do that gets its turn here
                dealt.rates_of(1 << 40)
        return between

    tracer = sys.gettrace()
    sys.settrace(between)
    try:
        found = dealt.rates_of(1 << 20).tolist()
    finally:
        sys.settrace(tracer)
    assert found == wanted == dealt.rates_of(1 << 20).tolist()


def test_unaligned_segments_are_updated_all_the_same() -> None:
    """Gradients are often views into buckets: one element off a 16-byte boundary, they go through scratch memory."""
    start = page((512 + 65, 1024), dtype=FP32, bits=0)
    shifted = start.clone()
    for segment in shifted.segments:
        backing = torch.empty(segment.grad.numel() + 1)
        segment.grad = backing[1:].copy_(segment.grad)
        assert segment.grad.data_ptr() % 16
    fused.update_page(shifted.planes, shifted.segments, shifted.fmt)
    fused.update_page(start.planes, start.segments, start.fmt)
    for a, b in zip(shifted.planes + shifted.params, start.planes + start.params, strict=True):
        assert torch.equal(a, b)


def test_nothing_to_do_is_not_an_error() -> None:
    start = page((64,))
    before = start.clone()
    fused.update_page(start.planes, [], start.fmt)
    empty = replace(start.segments[0], param=start.params[0][:0], grad=start.grads[0][:0])
    fused.update_page(start.planes, [empty], start.fmt)
    for a, b in zip(before.planes + before.params, start.planes + start.params, strict=True):
        assert torch.equal(a, b)
    fused.update_page(start.planes, [empty, start.segments[0]], start.fmt)
    assert not torch.equal(before.planes[0], start.planes[0])


@pytest.mark.parametrize(("dtype", "bits"), [(BF16, 24), (BF16, 32), (FP16, 24), (FP16, 32), (BF16, 0), (FP32, 0)])
def test_a_step_with_learning_rate_0_changes_no_weight(dtype: torch.dtype, bits: int) -> None:
    """Whatever the corrections are: weights may have been written from outside."""
    start = page((4096,), dtype=dtype, bits=bits, warm=1)
    start.segments[0].hyper = hyper(2, lr=0.0)
    if bits:
        start.planes[-1].copy_(torch.randint(-127, 128, start.planes[-1].shape, generator=torch.Generator().manual_seed(1)))
        start.params[0][:64] = 2.0 ** torch.arange(-14, -14 + 30).repeat(3)[:64]
        start.params[0][64:128] = 0
    fast = start.clone()
    fused.update_page(fast.planes, fast.segments, fast.fmt)
    assert torch.equal(fast.params[0], start.params[0])
    again = fast.clone()
    fused.update_page(again.planes, again.segments, again.fmt)
    if bits:
        assert torch.equal(again.planes[-1], fast.planes[-1])


def test_zeros_stay_zero_and_gradients_may_be_any_size() -> None:
    """Elements without gradients keep v, m and update at 0; gradients from 1e-9 to 1e6 are as good as any; eps = 0 divides nothing by 0."""
    sizes = (64, 4096)
    start = page(sizes, dtype=FP32, bits=0, warm=0)
    gen = torch.Generator().manual_seed(3)
    start.segments[0].grad = torch.zeros(64)
    start.segments[1].grad = torch.randn(4096, generator=gen) * 10.0 ** torch.linspace(-9, 6, 64).repeat_interleave(64)
    start.segments[1].grad[::3] = 0
    for segment in start.segments:
        segment.hyper = hyper(1, eps=0.0, weight_decay=0.0)
    fast, slow = both(start)
    assert_same_weights(fast, slow, start)
    assert torch.equal(fast.params[0], start.params[0])
    assert_same_log_states(fast, slow)
    for plane in fast.planes[:2]:
        s = start.segments[1]
        assert (plane[s.start : s.start + 4096][::3] == 0).all()


def test_log_serves_a_rule_that_knows_no_units() -> None:
    start = page((65, 1024))
    start.fmt = replace(start.fmt, rule=replace(RULE, device_betas=None, device_sums=None))
    fast, slow = both(start)
    assert_same_weights(fast, slow, start)
    assert_same_log_states(fast, slow)


@jit
def _decoded(planes, hyper_ptr, m_ptr, v_ptr, BETAS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    hyper = (tl.load(hyper_ptr),)
    for i in tl.static_range(1, 8):
        hyper = hyper + (tl.load(hyper_ptr + i),)  # noqa: RUF005
    m, v, scale = log_decode(planes + (log_units(hyper, BETAS),), tl.program_id(0).to(tl.int64), ROWS * 64, ROWS)  # noqa: RUF005
    device.store(m_ptr, m * scale, 0, ROWS * 64, ROWS, 64)
    device.store(v_ptr, v, 0, ROWS * 64, ROWS, 64)


@pytest.mark.parametrize("beta2", [0.99, 0.999, 0.9999, 0.99999])
def test_units_lose_nothing_that_steps_would_add_up(beta2: float) -> None:
    """What decodes is off on average by less than a thousandth of 1 - beta2, or what fp32 makes of beta2, whatever the exponents are."""
    numel, gen = 1 << 16, torch.Generator().manual_seed(0)
    code, mcode = torch.randint(1, 256, (numel,), generator=gen), torch.randint(-127, 128, (numel,), generator=gen)
    hi = torch.randint(-(20 << 16), 4 << 16, (numel // 64,), generator=gen) * 2.0**-16
    step, umax = (
        torch.randint(1 << 14, 1 << 17, (numel // 64,), generator=gen) * 2.0**-22,
        torch.rand(numel // 64, generator=gen).bfloat16(),
    )
    scalars = torch.tensor((1e-3, *RULE.scalars({"betas": (0.9, beta2), "eps": 1e-8, "weight_decay": 0.0}, 9)))
    m, v = torch.empty(numel), torch.empty(numel)
    planes = (mcode.to(torch.int8), code.to(torch.uint8), hi, step, umax)
    _decoded[(1,)](planes, scalars, m, v, BETAS=RULE.device_betas, ROWS=numel // 64)
    _, _, beta1, rest1, beta, rest, *_ = scalars.double().tolist()
    r = torch.exp2(hi.double()[:, None] - (255 - code.view(-1, 64)) * step.double()[:, None])
    # what the logarithm itself is off by is the same where values are encoded
    unit = 2.0 ** float(np.log2(np.float32(rest)))
    error = v.double().view(-1, 64) / (r * r * beta / unit) - 1
    assert error.abs().max() < 4e-6
    assert error.mean().abs() < max(1e-3 * (1 - beta2), 2e-8)
    exact = mcode.view(-1, 64) * umax.double()[:, None] / 127 * r * beta1 / rest1
    assert ((m.double().view(-1, 64) - exact).abs() <= 2e-6 * exact.abs()).all()


@pytest.mark.parametrize("beta2", [0.942, 0.9855])
def test_narrow_groups_in_units_equal_eager(beta2: float) -> None:
    """With the smallest step, what log2 (1 - beta2) is off its grid is two thousandths of a code."""
    start = page((1 << 14,), dtype=FP32, bits=0, warm=0)
    start.segments[0].grad = 1e-3 * torch.exp2(0.9 * torch.rand(1 << 14, generator=torch.Generator().manual_seed(0)))
    start.segments[0].hyper = (1e-3, *RULE.scalars({"betas": (0.9, beta2), "eps": 1e-8, "weight_decay": 0.0}, 1))
    fast, slow = both(start)
    s = start.segments[0]
    assert (slow.planes[3][s.start // 64 :][: 1 << 8] == 2.0**-8).all()
    assert (fast.planes[1] != slow.planes[1]).float().mean() <= 5e-4
    assert_same_log_states(fast, slow)


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.0, 0.999), (0.9, 0.0), (0.5, 0.3), (0.999, 0.99999)])
def test_betas_equal_eager(betas: tuple[float, float]) -> None:
    start = page((577, 1024), dtype=FP32, bits=0)
    for segment in start.segments:
        segment.grad = torch.where(segment.grad == 0, 1e-3, segment.grad)
        segment.hyper = (1e-3, *RULE.scalars({"betas": betas, "eps": 1e-8, "weight_decay": 0.01}, 4))
    fast, slow = both(start)
    assert_same_weights(fast, slow, start)
    assert_same_log_states(fast, slow)


def test_second_moments_beyond_its_units_are_cut_off_and_come_back() -> None:
    """v / (1 - beta2) overflows: it is stored as the largest that does not, and decays from there."""
    start = page((512,), dtype=FP32, bits=0, warm=0)
    (s,) = start.segments
    s.grad = torch.full((512,), 2.0**60)
    s.hyper = (1e-3, *RULE.scalars({"betas": (0.9, 0.0), "eps": 1e-8, "weight_decay": 0.0}, 1))
    fused.update_page(start.planes, start.segments, start.fmt)
    before, found = start.params[0].clone(), []
    for step in (2, 3, 4):
        s.grad, s.step, s.hyper = torch.zeros(512), step, hyper(step)
        fused.update_page(start.planes, start.segments, start.fmt)
        m, v = start.fmt.codec.decode([p[s.start // g :] for p, g in zip(start.planes, (1, 1, 64, 64, 64), strict=True)], 512)
        assert m.isfinite().all()
        found.append(v)
    assert 2.0**117 < found[0].min() <= found[0].max() < 2.0**119
    torch.testing.assert_close(found[2], found[1] * 0.999, rtol=1.2e-2, atol=0)
    assert start.params[0].isfinite().all()
    assert not torch.equal(start.params[0], before)


@jit
def _plain_sgd(states, weight, grad, hyper):  # type: ignore[no-untyped-def]
    return states, weight - hyper[0] * grad.to(tl.float32)


def test_a_rule_without_states_updates_weights_alone() -> None:
    start = page((65, 1024), codec="none")
    rule = replace(RULE, states=(), device=_plain_sgd, eager=lambda states, weight, grad, hyper: (states, weight - hyper[0] * grad))
    start.fmt, start.planes = Format(rule, get_codec("none", ()), 24), start.planes[-1:]
    fast, slow = both(start)
    assert_same_weights(fast, slow, start)
    assert not torch.equal(fast.params[1], start.params[1])


def test_columns_are_the_same_as_a_list() -> None:
    start = page((65, 1024, 31))
    start.segments[1].grad = start.segments[1].grad.float()
    for lr in (1e-3, torch.tensor(1e-3)):
        for segment in start.segments:
            segment.hyper = (lr, *segment.hyper[1:])
        listed, columns = start.clone(), start.clone()
        fused.update_page(listed.planes, listed.segments, listed.fmt)
        fused.update_page(columns.planes, Segments.of(columns.segments), columns.fmt)
        for a, b in zip(listed.planes + listed.params, columns.planes + columns.params, strict=True):
            assert torch.equal(a, b)


def test_the_tables_name_every_block_once() -> None:
    """The third column is a slot of scratch memory, one for each block with a tile that is ragged or not aligned."""
    tile = fused.TILE
    table, block, slots = blocks_of((1, True), (tile, True), (tile + 1, True), (2 * tile, False))
    assert block == tile
    assert [tuple(row) for row in table] == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (2, 1, 1), (3, 0, 2), (3, 1, 3)]
    assert slots == 4
    table, block, slots = blocks_of((1, True), (tile * fused.TILES * fused.ENOUGH + 1, True))
    assert block == tile * fused.TILES
    assert len(table) == fused.ENOUGH + 2
    assert tuple(table[-1]) == (1, fused.ENOUGH, 1)
    assert slots == 2


def test_scratch_memory_is_bounded() -> None:
    """However large a parameter is that does not lie on 16 bytes."""
    table, block, slots = blocks_of((2**33, False), (2**33, True))
    assert slots <= 4 * fused.ENOUGH
    assert (np.bincount(table[:, 0]) * block == 2**33).all()


def test_offsets_past_2_to_the_31() -> None:
    """A segment that lies 2^32 elements into its page: address space, not memory, is what its planes take."""
    fmt = Format(RULE, get_codec("log", RULE.states), 24)
    groups = [*(plane.group for plane in fmt.codec.planes), 1]
    dtypes = [*(plane.dtype for plane in fmt.codec.planes), torch.int8]
    grad = torch.randn(700, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for start in (0, 2**32 + 10 * 64):
        planes = [torch.empty((start + 1024) // group, dtype=dtype) for group, dtype in zip(groups, dtypes, strict=True)]
        parts = [plane[start // group :].zero_() for group, plane in zip(groups, planes, strict=True)]
        param = torch.linspace(-1, 1, 700).bfloat16()
        fused.update_page(planes, [Segment(param, grad, start, 0, 1, hyper(1))], fmt)
        found.append([param, *parts])
    for near, far in zip(*found, strict=True):
        assert near.any()
        assert torch.equal(near, far)


def test_the_launch_is_made_on_the_device_of_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which may be another."""
    current: list[object] = []

    class Module:
        @staticmethod
        @contextmanager
        def device(where: torch.device) -> Iterator[None]:
            current.append(where)
            yield
            current.clear()

    monkeypatch.setattr(torch, "get_device_module", lambda _: Module)
    with fused.on_device(torch.device("cuda", 1)):
        assert current == [torch.device("cuda", 1)]

    launched = []
    monkeypatch.setattr(fused, "on_device", lambda where: launched.append(where) or nullcontext())
    start = page((64,))
    fused.update_page(start.planes, start.segments, start.fmt)
    assert launched == [start.params[0].device]
