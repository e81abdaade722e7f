"""Rules with one momentum, or with none, in Triton's interpreter against the eager path.

`test_momentum.py` runs this file in a process of its own, since Triton must see TRITON_INTERPRET=1 before it is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from flashoptim_hf import _triton
from flashoptim_hf.codecs import weight_split
from flashoptim_hf.codecs.base import ALIGN, get_codec
from flashoptim_hf.kernels import eager, fused
from flashoptim_hf.kernels.rule import Format, Segment, UpdateRule
from flashoptim_hf.optim import lion, sgd

SIZES = (1, 33, 512, 577)  # around a group of 32 and a tile of 512
GAP = 64
LION = {"betas": (0.9, 0.99), "weight_decay": 0.1}
SGD = {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": False, "decoupled_weight_decay": False}
CASES = [
    pytest.param(lion.RULE, LION, id="lion"),
    pytest.param(sgd.RULE, SGD, id="sgd"),
    pytest.param(sgd.RULE, {**SGD, "nesterov": True, "decoupled_weight_decay": True}, id="nesterov"),
]


@dataclass
class Page:
    planes: list[Tensor]
    params: list[Tensor]
    segments: list[Segment]
    fmt: Format

    def clone(self) -> Page:
        params = [p.clone() for p in self.params]
        segments = [replace(s, param=p) for s, p in zip(self.segments, params, strict=True)]
        return Page([p.clone() for p in self.planes], params, segments, self.fmt)


def page(
    rule: UpdateRule,
    options: dict,
    codec: str = "square",
    dtype: torch.dtype = torch.bfloat16,
    bits: int = 24,
    dither: bool = True,
    steps: int = 4,
):
    """A page after all but the last of some eager steps, and the segments of the last."""
    generator = torch.Generator().manual_seed(0)
    fmt = Format(rule, get_codec(codec, rule.states, dither), bits)
    starts, total = [], GAP
    for n in SIZES:
        starts.append(total)
        total += -(-n // ALIGN) * ALIGN + GAP
    planes = [torch.zeros(plane.entries(total), dtype=plane.dtype) for plane in fmt.codec.planes]
    if bits:
        planes.append(torch.zeros(total, dtype=weight_split.CORRECTION_DTYPE[bits]))
    params = [(torch.randn(n, generator=generator) * 0.05).to(dtype) for n in SIZES]
    scales = [torch.exp(1.5 * torch.randn(n, generator=generator)) * (torch.rand(n, generator=generator) > 0.02) for n in SIZES]
    made = Page(planes, params, [], fmt)
    for step in range(1, steps + 1):
        hyper = (1e-3, *rule.scalars(options, step))
        made.segments = [
            Segment(p, (scale * torch.randn(len(p), generator=generator)).to(dtype), start, ALIGN * i, step, hyper)
            for i, (p, scale, start) in enumerate(zip(params, scales, starts, strict=True))
        ]
        if step < steps:
            eager.update_page(planes, made.segments, fmt)
    return made


def both(start: Page) -> tuple[Page, Page]:
    fast, slow = start.clone(), start.clone()
    fused.update_page(fast.planes, fast.segments, fast.fmt)
    eager.update_page(slow.planes, slow.segments, slow.fmt)
    return fast, slow


def assert_same_weights(fast: Page, slow: Page) -> None:
    for s, t in zip(fast.segments, slow.segments, strict=True):
        a, b = s.param.float(), t.param.float()
        eps = torch.finfo(s.param.dtype).eps
        if fast.fmt.master_bits:
            cut = slice(s.start, s.start + s.param.numel())
            a, b = weight_split.join(s.param, fast.planes[-1][cut]), weight_split.join(t.param, slow.planes[-1][cut])
            eps /= 120
        assert ((a - b).abs() <= max(eps, 2.0**-22) * b.abs() + 1e-8).all()


def assert_untouched(before: Page, after: Page) -> None:
    groups = [plane.group for plane in before.fmt.codec.planes] + [1]
    for group, old, new in zip(groups, before.planes, after.planes, strict=False):
        outside = torch.ones(len(old), dtype=torch.bool)
        for s in before.segments:
            outside[s.start // group : -(-(s.start + s.param.numel()) // group)] = False
        assert torch.equal(old[outside].view(torch.uint8), new[outside].view(torch.uint8))


def test_this_process_interprets() -> None:
    assert _triton.INTERPRET


@pytest.mark.parametrize(("dtype", "bits", "dither"), [(torch.bfloat16, 24, True), (torch.float16, 32, False), (torch.float32, 0, True)])
@pytest.mark.parametrize(("rule", "options"), CASES)
def test_square_equals_eager(rule: UpdateRule, options: dict, dither: bool, dtype: torch.dtype, bits: int) -> None:
    # an even step with bf16 weights and an odd one with fp32: the dither of a pair differs in sign
    start = page(rule, options, dtype=dtype, bits=bits, dither=dither, steps=3 if bits == 0 else 4)
    fast, slow = both(start)
    assert_same_weights(fast, slow)
    assert_untouched(start, fast)
    # a scale on a rounding boundary may go either way; then its group's codes count in another unit
    same = (fast.planes[1] == slow.planes[1]).repeat_interleave(32)
    assert same.float().mean() > 0.95
    torch.testing.assert_close(fast.planes[1], slow.planes[1], rtol=2.0**-7, atol=0)
    moved = (fast.planes[0].int() - slow.planes[0].int()).abs()
    assert moved[same].max() <= 1
    assert moved[same].sum() <= 2 + 1e-3 * len(moved)
    assert moved.max() <= 2
    assert not torch.equal(fast.planes[0], start.planes[0])


@pytest.mark.parametrize("codec", ["softsign", "none"])
@pytest.mark.parametrize(("rule", "options"), CASES[:2])
def test_other_codecs_equal_eager(rule: UpdateRule, options: dict, codec: str) -> None:
    start = page(rule, options, codec)
    fast, slow = both(start)
    assert_same_weights(fast, slow)
    assert_untouched(start, fast)
    for a, b in zip(fast.planes[:-1], slow.planes[:-1], strict=True):
        if a.dtype == torch.int8:
            assert (a.int() - b.int()).abs().max() <= 1
        else:
            torch.testing.assert_close(a.float(), b.float(), rtol=2.0**-10, atol=1e-7)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 24), (torch.float32, 0)])
@pytest.mark.parametrize("decoupled", [True, False])
def test_sgd_without_momentum_equals_eager(decoupled: bool, dtype: torch.dtype, bits: int) -> None:
    options = {**SGD, "momentum": 0.0, "decoupled_weight_decay": decoupled}
    rule = sgd.RULE.serving(options)
    assert rule.states == ()
    start = page(rule, options, dtype=dtype, bits=bits)
    fast, slow = both(start)
    assert_same_weights(fast, slow)
    assert_untouched(start, fast)
    assert not torch.equal(fast.params[-1], start.params[-1])


def test_lion_where_nothing_pulls() -> None:
    """Where momentum and gradient are 0, there is no move, of no sign."""
    start = page(lion.RULE, {**LION, "weight_decay": 0.0}, dtype=torch.float32, bits=0)
    for plane in start.planes:
        plane.zero_()
    for segment in start.segments:
        segment.grad = torch.where(torch.arange(segment.param.numel()) % 2 == 0, 1.0, 0.0)
    fast = start.clone()
    fused.update_page(fast.planes, fast.segments, fast.fmt)
    for p, before in zip(fast.params, start.params, strict=True):
        assert torch.equal(p[1::2], before[1::2])
        assert (p[::2] != before[::2]).all()


@pytest.mark.parametrize("x", [0.0, 1e-30, float("inf")])
def test_extremes_equal_eager(x: float) -> None:
    """Through SGD with momentum 0, whose buffer becomes the gradient."""
    options = {**SGD, "momentum": 0.0, "weight_decay": 0.0}
    start = page(sgd.RULE, options, dtype=torch.float32, bits=0)
    for segment in start.segments:
        segment.grad = torch.where(torch.arange(segment.param.numel()) % 3 == 0, torch.tensor(x), -x / 7)
        segment.hyper = (0.0, *sgd.RULE.scalars(options, 1))
        segment.param.zero_()
    fast, slow = both(start)
    assert torch.equal(fast.planes[1].view(torch.int16), slow.planes[1].view(torch.int16))
    assert (fast.planes[0].int() - slow.planes[0].int()).abs().max() <= 1
