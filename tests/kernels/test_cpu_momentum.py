"""The compiled CPU path of Lion and SGD against the eager one, for each instruction set that this processor has."""

from __future__ import annotations

import pytest
import torch

from flashoptim_hf.codecs import weight_split
from flashoptim_hf.codecs.base import get_codec
from flashoptim_hf.errors import UnsupportedError
from flashoptim_hf.kernels import cpu, eager
from flashoptim_hf.kernels.rule import Format, Segment, UpdateRule
from flashoptim_hf.optim import lion, sgd

LIBRARY = cpu.library("_cpu_momentum")
ISAS = range(LIBRARY.flashoptim_isa() + 1) if LIBRARY else []
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the compiled library was not built: no C compiler")

SIZES = [1, 31, 32, 33, 64, 1000, 8192 + 1]  # around a group of 32, and around a task of 256 groups
SGD = {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1, "nesterov": False, "decoupled_weight_decay": False}
RULES = [
    pytest.param(lion.RULE, {"betas": (0.9, 0.99), "weight_decay": 0.1}, id="lion"),
    pytest.param(sgd.RULE, SGD, id="sgd"),
    pytest.param(sgd.RULE, {**SGD, "dampening": 0.0, "nesterov": True, "decoupled_weight_decay": True}, id="nesterov"),
]
WEIGHTS = [
    (torch.float32, 0, torch.float32),
    (torch.float32, 0, torch.bfloat16),
    (torch.bfloat16, 24, torch.bfloat16),
    (torch.bfloat16, 32, torch.float32),
    (torch.bfloat16, 0, torch.bfloat16),
    (torch.float16, 24, torch.float16),
    (torch.float16, 32, torch.float32),
]


class Page:
    """Segments of the given sizes with room between them, and the buffers that a step changes."""

    def __init__(self, rule: UpdateRule, options: dict, weights: tuple, dither: bool = True) -> None:
        dtype, bits, self.grad_dtype = weights
        generator = torch.Generator().manual_seed(0)
        self.options = options
        self.fmt = Format(rule, get_codec("square", rule.states, dither), bits)
        self.starts, total = [], 0
        for size in SIZES:
            self.starts.append(total)
            total += -(-size // 64) * 64 + 64  # 64 elements that belong to nobody
        self.planes = [torch.zeros(plane.entries(total), dtype=plane.dtype) for plane in self.fmt.codec.planes]
        if bits:
            self.planes.append(torch.zeros(total, dtype=weight_split.CORRECTION_DTYPE[bits]))
        self.params = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
        self.step = 0

    def segments(self) -> list[Segment]:
        self.step += 1
        generator = torch.Generator().manual_seed(self.step)
        hyper = (1e-3, *self.fmt.rule.scalars(self.options, self.step))
        made = []
        for param, start in zip(self.params, self.starts, strict=True):
            spread = torch.exp2(torch.linspace(-8, 3, param.numel()))
            grad = (torch.randn(param.numel(), generator=generator) * spread).to(self.grad_dtype)
            made.append(Segment(param, grad, start=start, index=128, step=self.step, hyper=hyper))
        return made

    def master(self, i: int) -> torch.Tensor:
        cut = slice(self.starts[i], self.starts[i] + SIZES[i])
        return weight_split.join(self.params[i], self.planes[2][cut]) if self.fmt.master_bits else self.params[i].float()

    def copy_from(self, other: Page) -> None:
        for mine, theirs in zip(self.planes + self.params, other.planes + other.params, strict=True):
            mine.copy_(theirs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dither", [True, False])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_equals_eager(rule, options, weights, dither, isa):
    """From the same state, each step gives the same weights to fp32 rounding and the same codes but for rare neighbours."""
    ours, theirs = (Page(rule, options, weights, dither) for _ in range(2))
    dtype, bits, _ = weights
    for _ in range(3):
        ours.copy_from(theirs)
        before = [theirs.master(i) for i in range(len(SIZES))]
        cpu.update_page(ours.planes, ours.segments(), ours.fmt, isa=isa)
        eager.update_page(theirs.planes, theirs.segments(), theirs.fmt)
        same = (ours.planes[1] == theirs.planes[1]).repeat_interleave(32)
        assert same.float().mean() > 0.95
        torch.testing.assert_close(ours.planes[1], theirs.planes[1], rtol=2.0**-7, atol=0)
        moved = (ours.planes[0].int() - theirs.planes[0].int()).abs()
        assert moved[same].max() <= 1
        assert moved[same].sum() <= 2 + 1e-3 * len(moved)
        assert moved.max() <= 2
        eps = torch.finfo(dtype).eps * {0: 1.0, 24: 1 / 254, 32: 1 / 65534}[bits]
        for i, old in enumerate(before):
            p, q = ours.master(i), theirs.master(i)
            assert ((p - q).abs() <= max(eps, 4e-7) * 1.01 * q.abs() + 2e-7).all()
            assert SIZES[i] == 1 or not torch.equal(q, old) or bits == 0  # 16-bit weights may swallow a step


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rule", "options"), RULES[:2])
def test_only_the_segments_are_touched(rule, options, isa):
    page = Page(rule, options, (torch.bfloat16, 24, torch.bfloat16))
    for plane in page.planes:
        plane.view(torch.uint8).fill_(7)
    before = [plane.clone() for plane in page.planes]
    cpu.update_page(page.planes, page.segments(), page.fmt, isa=isa)
    for plane, old, width in zip(page.planes, before, (1, 32, 1), strict=True):
        inside = torch.zeros(len(plane), dtype=torch.bool)
        for start, size in zip(page.starts, SIZES, strict=True):
            inside[start // width : -(-(start + size) // width)] = True
        assert torch.equal(plane[~inside], old[~inside])
        assert not torch.equal(plane[inside], old[inside])


@pytest.mark.parametrize(("rule", "options"), RULES[:2])
def test_threads_do_not_change_bits(rule, options):
    results = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        page = Page(rule, options, (torch.bfloat16, 24, torch.float32))
        torch.set_num_threads(threads)
        try:
            for _ in range(3):
                cpu.update_page(page.planes, page.segments(), page.fmt)
        finally:
            torch.set_num_threads(before)
        results.append(page.planes + page.params)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("rule", "options"), RULES[:2])
def test_scale_and_skip(rule, options):
    a, b = (Page(rule, options, (torch.float32, 0, torch.float32)) for _ in range(2))
    cpu.update_page(a.planes, a.segments(), a.fmt, inv_scale=torch.tensor(0.25))
    eager.update_page(b.planes, b.segments(), b.fmt, inv_scale=torch.tensor(0.25))
    assert torch.equal(a.planes[1], b.planes[1])
    for p, q in zip(a.params, b.params, strict=True):
        torch.testing.assert_close(p, q, rtol=4e-7, atol=2e-8)
    before = [x.clone() for x in a.planes + a.params]
    cpu.update_page(a.planes, a.segments(), a.fmt, skip=torch.tensor(1.0))
    assert all(torch.equal(x, y) for x, y in zip(a.planes + a.params, before, strict=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-30, 3.3e38, float("inf")])
def test_extremes_equal_eager(value, isa):
    """Through SGD with momentum 0, whose buffer becomes the gradient."""
    options = {**SGD, "momentum": 0.0, "weight_decay": 0.0}
    pages = [Page(sgd.RULE, options, (torch.float32, 0, torch.float32)) for _ in range(2)]
    for page, update in zip(pages, (lambda *a: cpu.update_page(*a, isa=isa), eager.update_page), strict=True):
        segments = page.segments()
        for segment in segments:
            segment.grad = torch.where(torch.arange(segment.param.numel()) % 3 == 0, torch.tensor(value), -value / 7)
            segment.hyper = (0.0, *segment.hyper[1:])
        update(page.planes, segments, page.fmt)
    assert torch.equal(pages[0].planes[1].view(torch.int16), pages[1].planes[1].view(torch.int16))
    assert (pages[0].planes[0].int() - pages[1].planes[0].int()).abs().max() <= 1


def test_what_it_serves():
    for rule in (lion.RULE, sgd.RULE):
        assert cpu.supports(Format(rule, get_codec("square", rule.states), 24))
        assert not cpu.supports(Format(rule, get_codec("softsign", rule.states), 24))
        with pytest.raises(UnsupportedError, match=f"no {rule.name} with codec='softsign', only .*sgd with codec='square'"):
            cpu.update_page([], [], Format(rule, get_codec("softsign", rule.states), 24))
    plain = sgd.RULE.serving({"momentum": 0.0})
    assert not cpu.supports(Format(plain, get_codec("square", plain.states), 24))
    assert len(lion.RULE.hyper) == 6  # as LION_WIDTH and SGD_WIDTH in momentum.c
    assert len(sgd.RULE.hyper) == 7


@pytest.mark.skipif(LIBRARY is None, reason="the compiled library was not built: no C compiler")
def test_one_library_does_not_need_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is optional when the package is installed, so that one may be there alone."""
    library = cpu.library
    monkeypatch.setattr(cpu, "library", lambda name="_cpu_adamw": library(name) if name == "_cpu_momentum" else None)
    cpu.best_isa.cache_clear()
    try:
        param = torch.nn.Parameter(torch.ones(100))
        param.grad = torch.ones(100)
        lion.FlashLion([param], lr=0.5, kernel="cpu").step()
        assert torch.equal(param.detach(), torch.full((100,), 0.5))
    finally:
        cpu.best_isa.cache_clear()
