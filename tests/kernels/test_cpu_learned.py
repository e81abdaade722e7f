"""The compiled CPU path with `learned` states against the eager one: what `joint` shares with it, on curves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashoptim_hf import FlashAdamW
from flashoptim_hf.bench import subjects
from flashoptim_hf.bench.streams import Problem, drifting
from flashoptim_hf.codecs.base import get_codec
from flashoptim_hf.codecs.joint import lattice
from flashoptim_hf.codecs.learned import BINS, KNOTS, fitted, places, straight
from flashoptim_hf.kernels import cpu, eager
from flashoptim_hf.kernels.rule import Format, Segment
from flashoptim_hf.optim.adamw import RULE
from tests.kernels.test_cpu import CASES, ISAS, LIBRARY, VARIANTS, Page, assert_only_segments_change, assert_threads_change_no_bits
from tests.kernels.test_cpu_joint import assert_same_weights, gradients

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the compiled library was not built: no C compiler")

GROUP = 32


def fmt(bits: int = 0, dither: bool = True) -> Format:
    return Format(RULE, get_codec("learned", RULE.states, dither), bits)


def peaked(where: int) -> Tensor:
    """The curve of a parameter with nearly all of its u^2 in one place: as bent as curves become. fp16 (KNOTS + 1,)."""
    seen = torch.ones(1, BINS, dtype=torch.int64)
    seen[0, where] = 10**9
    return fitted(seen)[0]


CURVES = {
    "straight": straight().repeat(2),
    "zeros": torch.zeros(2 * (KNOTS + 1), dtype=torch.float16),
    "bent": torch.cat([peaked(40), peaked(40)]),
    "changing": torch.cat([peaked(60), peaked(3)]),
    "first": torch.cat([straight(), peaked(0)]),
}


class CurvedPage(Page):
    """A page whose parameters have tables, each its own."""

    def __init__(self, fmt: Format, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        super().__init__(fmt, dtype, grad_dtype)
        names = list(CURVES)
        self.tables = [CURVES[names[i % len(names)]].clone() for i in range(len(self.params))]

    def segments(self) -> list[Segment]:
        return [replace(segment, table=table) for segment, table in zip(super().segments(), self.tables, strict=True)]

    def copy_from(self, other: CurvedPage) -> None:
        super().copy_from(other)
        for mine, theirs in zip(self.tables, other.tables, strict=True):
            mine.copy_(theirs)

    def advance(self) -> None:
        """What happens between two steps: each parameter learns from its own codes."""
        for param, start, table in zip(self.params, self.starts, self.tables, strict=True):
            cut = slice(start, start + param.numel())
            groups = slice(start // GROUP, -(-cut.stop // GROUP))
            parts = [*(plane[cut] for plane in self.planes[:2]), *(plane[groups] for plane in self.planes[2:5]), table]
            self.fmt.codec.advance(parts, self.step)

    def curves(self, which: int) -> Tensor:
        """One of the two curves of each group's parameter; straight where a group has none. fp32 (groups, KNOTS + 1)."""
        found = straight().float().repeat(len(self.planes[3]), 1)
        for param, start, table in zip(self.params, self.starts, self.tables, strict=True):
            curve = table.view(2, KNOTS + 1)[which].float()
            found[start // GROUP : -(-(start + param.numel()) // GROUP)] = curve if curve[-1] > 0 else straight().float()
        return found


def codes(planes: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Codes of r and of u, fp32 (groups, GROUP)."""
    n, _, _ = lattice(planes[3].float()[:, None])
    word = planes[1].view(-1, GROUP).float() * 256 + planes[0].view(-1, GROUP)
    code = torch.floor((word + 0.5) / (2 * n + 1))
    return code, word - code * (2 * n + 1) - n


def log_r(planes: list[Tensor], curve: Tensor) -> Tensor:
    """What codes of r decode to, by the curve of each group, fp32 (groups, GROUP)."""
    _, levels, width = lattice(planes[3].float()[:, None])
    return (places(codes(planes)[0], levels, curve) + (planes[2].float()[:, None] * 16 - levels)) * width


def assert_same_states(mine: list[Tensor], theirs: list[Tensor], next_curves: Tensor, share: float = 1e-3) -> None:
    """Constants of nearly all groups are equal, and there the codes are to one, all but a share of them to none."""
    same = torch.stack([a == b for a, b in zip(mine[2:5], theirs[2:5], strict=True)]).all(0)
    assert same.float().mean() > 0.97
    (code, ucode), (code_, ucode_) = codes(mine), codes(theirs)
    assert torch.equal(code == 0, code_ == 0)
    difference = (code - code_)[same].abs()
    assert difference.max() <= 1
    assert (difference != 0).float().mean() < share
    difference = (ucode - ucode_)[same[:, None] & (code == code_)].abs()  # in the same units where codes of r are equal
    assert difference.max() <= 1
    assert (difference != 0).float().mean() < share
    # elsewhere each is within a gap, 4 steps at most, of the same r
    width = torch.maximum(*(lattice(planes[3].float()[:, None])[2] for planes in (mine, theirs)))
    apart = (log_r(mine, next_curves) - log_r(theirs, next_curves)).abs()
    assert (apart <= 8.1 * width + 1e-5)[code_ > 0].all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("grad_dtype", "dither"), VARIANTS)
@pytest.mark.parametrize(("dtype", "bits"), CASES)
def test_equals_eager(isa, dither, grad_dtype, dtype, bits):
    """From the same state, each step gives the same weights and codes but for rare neighbours, on given curves and on learned ones."""
    ours, theirs = (CurvedPage(fmt(bits, dither), dtype, grad_dtype) for _ in range(2))
    for _ in range(3):
        ours.copy_from(theirs)
        before = [table.clone() for table in ours.tables]
        cpu.update_page(ours.planes, ours.segments(), ours.fmt, isa=isa)
        eager.update_page(theirs.planes, theirs.segments(), theirs.fmt)
        assert_same_states(ours.planes, theirs.planes, theirs.curves(1))
        assert_same_weights(ours, theirs, dtype, bits)
        assert all(torch.equal(a, b) for a, b in zip(ours.tables, before, strict=True))
        theirs.advance()
    assert len(torch.stack(theirs.tables).unique(dim=0)) == len(theirs.tables)  # what was learned differs


@pytest.mark.parametrize("isa", ISAS)
def test_only_the_segments_are_touched(isa):
    assert_only_segments_change(fmt(24), isa, CurvedPage)


@pytest.mark.parametrize("isa", ISAS)
def test_threads_do_not_change_bits(isa):
    assert_threads_change_no_bits(fmt(24), isa, CurvedPage)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 24), (torch.float32, 0)])
@pytest.mark.parametrize("dither", [True, False])
def test_a_cut_changes_no_bits(dither, dtype, bits, isa):
    """A parameter in one segment, and cut as pages cut it: where a tile begins must not show in any code or weight."""
    n, form, generator = 64 * 50 + 19, fmt(bits, dither), torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.linspace(-6, 3, n))
    grads = [(torch.randn(n, generator=generator) * spread * 1e-2).to(dtype) for _ in range(3)]
    table, start = CURVES["changing"], torch.randn(n, generator=generator).to(dtype)
    ends = []
    for cuts in ([0], [0, 64, 192, 64 * 17, 64 * 33]):
        planes = [torch.zeros(plane.entries(n), dtype=plane.dtype) for plane in form.codec.planes] + [torch.zeros(n, dtype=torch.int8)]
        p = start.clone()
        for step, grad in enumerate(grads, 1):
            hyper = (1e-3, *RULE.scalars({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, step))
            ranges = zip(cuts, [*cuts[1:], n], strict=True)
            segments = [Segment(p[a:b], grad[a:b], start=a, index=a, step=step, hyper=hyper, table=table) for a, b in ranges]
            cpu.update_page(planes if bits else planes[:-1], segments, form, isa=isa)
        ends.append([*planes, p])
    for whole, cut in zip(*ends, strict=True):
        assert torch.equal(whole.view(torch.uint8), cut.view(torch.uint8))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("curve", ["straight", "changing", "first"])
@pytest.mark.parametrize("kind", ["zeros", "sparse", "wide", "tiny", "huge", "spikes"])
def test_unusual_gradients_equal_eager(kind, curve, isa):
    """Groups with zeros, at both ends of what a lattice holds, and on all of it, so that codes lie on every piece of a curve."""
    n, form, table = 16 * 64 + 17, fmt(), CURVES[curve].clone()
    ours, theirs = ([torch.zeros(plane.entries(n), dtype=plane.dtype) for plane in form.codec.planes] for _ in range(2))
    padded = [torch.zeros(-(-n // GROUP) * GROUP, dtype=torch.uint8) for _ in range(4)]
    p, q = torch.linspace(-2, 2, n), torch.linspace(-2, 2, n)
    generator = torch.Generator().manual_seed(1)
    begin = 5000 if kind == "spikes" else 1
    for step in range(begin, begin + 4):
        grad = gradients(kind, n, generator)
        hyper = (1e-3, *RULE.scalars({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, step))
        for mine, reference in zip([*ours, p], [*theirs, q], strict=True):
            mine.copy_(reference)
        cpu.update_page(ours, [Segment(p, grad, start=0, index=0, step=step, hyper=hyper, table=table)], form, isa=isa)
        eager.update_page(theirs, [Segment(q, grad, start=0, index=0, step=step, hyper=hyper, table=table)], form)
        for full, plane in zip(padded, [*ours[:2], *theirs[:2]], strict=True):
            full[:n] = plane
        next_curves = table[KNOTS + 1 :].float().expand(len(theirs[3]), -1)
        assert_same_states([*padded[:2], *ours[2:]], [*padded[2:], *theirs[2:]], next_curves, share=4e-3)
        assert ((p - q).abs() <= 4e-7 * q.abs() + 2e-8).float().mean() > 0.99
        assert ((p - q).abs() <= 1e-4).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("curve", ["bent", "changing", "first"])
def test_the_largest_second_moments_stay_finite_and_equal_eager(curve, isa):
    """Just below v = 2^128: the next code up would decode to infinity where a group's last place is not its last code's."""
    n, form, table, generator = 4096, fmt(), CURVES[curve].clone(), torch.Generator().manual_seed(0)
    ours, theirs = ([torch.zeros(plane.entries(n), dtype=plane.dtype) for plane in form.codec.planes] for _ in range(2))
    below = torch.rand(n, generator=generator) * torch.where(torch.rand(n, generator=generator) < 0.5, 0.1, 20.0)
    grad = torch.exp2(63.99 - below) * torch.randn(n, generator=generator).sign()
    hyper = (1e-3, *RULE.scalars({"betas": (0.0, 0.0), "eps": 1e-8, "weight_decay": 0.0}, 1))
    segment = Segment(torch.zeros(n), grad, start=0, index=0, step=1, hyper=hyper, table=table)
    cpu.update_page(ours, [segment], form, isa=isa)
    eager.update_page(theirs, [segment], form)
    assert_same_states(ours, theirs, table[KNOTS + 1 :].float().expand(n // GROUP, -1), share=4e-3)
    assert (ours[2].float() * 16 * lattice(ours[3].float())[2] > 64).any()  # some lattices do reach beyond
    m, v = form.codec.decode([*ours, form.codec.settled(table[None])[0]], n)
    assert torch.isfinite(m).all()
    assert torch.isfinite(v).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_straight_curve_is_joint(isa):
    """Places are then codes, to fp32 rounding."""
    joint = Format(RULE, get_codec("joint", RULE.states), 0)
    curved, plain = CurvedPage(fmt(), torch.float32, torch.float32), Page(joint, torch.float32, torch.float32)
    curved.tables = [CURVES["straight"]] * len(curved.params)
    for _ in range(3):
        curved_before = [plane.clone() for plane in curved.planes]
        cpu.update_page(curved.planes, curved.segments(), curved.fmt, isa=isa)
        cpu.update_page(plain.planes, plain.segments(), plain.fmt, isa=isa)
        assert not torch.equal(curved.planes[0], curved_before[0])
        assert_same_states(curved.planes, plain.planes, curved.curves(1))
        plain.copy_from(curved)


def test_a_whole_run_learns_as_the_eager_path_does_and_pages_do_not_show():
    problem = Problem("stream", drifting(0.5, 1.0, 0, 60, 4096 + 32))
    exact = subjects.ALGORITHMS["adamw"].exact(problem)[-1]
    ends = []
    for options in ({"kernel": "eager"}, {"kernel": "cpu"}, {"kernel": "cpu", "paged": True, "page_bytes": 2048}):
        weight = torch.nn.Parameter(torch.zeros(problem.grads.shape[1]))
        optimizer = FlashAdamW([weight], lr=problem.lr, weight_decay=0.0, codec="learned", **options)
        for grad in problem.grads:
            weight.grad = grad.clone()
            optimizer.step()
        ends.append((weight.detach(), optimizer.state[weight]["exp_avg_sq_curve"].clone()))
    theirs, mine = (float((end.double() - exact).norm() / exact.norm()) for end, _ in ends[:2])
    assert mine == pytest.approx(theirs, rel=0.03)
    assert not torch.equal(ends[1][1][: KNOTS + 1], straight())
    assert all(torch.equal(a, b) for a, b in zip(ends[1], ends[2], strict=True))
