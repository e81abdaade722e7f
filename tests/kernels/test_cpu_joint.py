"""The compiled CPU path with `joint` states against the eager one: states, and weights that errors are fed back to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashoptim_hf.codecs import weight_split
from flashoptim_hf.codecs.base import get_codec
from flashoptim_hf.codecs.joint import FINE_ENTRIES, lattice
from flashoptim_hf.kernels import cpu, eager
from flashoptim_hf.kernels.rule import Format, Segment
from flashoptim_hf.optim.adamw import RULE
from tests.kernels.test_cpu import (
    CASES,
    ISAS,
    LIBRARY,
    VARIANTS,
    Page,
    assert_only_segments_change,
    assert_threads_change_no_bits,
)

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the compiled library was not built: no C compiler")


def fmt(bits: int = 0, dither: bool = True) -> Format:
    return Format(RULE, get_codec("joint", RULE.states, dither), bits)


def assert_same_states(mine: list[Tensor], theirs: list[Tensor]) -> None:
    """Constants of nearly all groups are equal, and there the codes are to one step, nearly all of them to none."""
    same = torch.stack([a == b for a, b in zip(mine[2:5], theirs[2:5], strict=True)]).all(0)
    assert same.float().mean() > 0.97
    chosen = same.repeat_interleave(32)
    n, _, width = (x.repeat_interleave(32) for x in lattice(theirs[3].float()))
    a, b = ((planes[1].int() * 256 + planes[0].int())[chosen] for planes in (mine, theirs))
    span = (2 * n + 1).int()[chosen]
    assert torch.equal(a == 0, b == 0)
    code = a // span - b // span
    assert code.abs().max() <= 1
    assert (code != 0).float().mean() < 2e-3
    ucode = (a % span - b % span)[code == 0]
    assert ucode.abs().max() <= 1
    assert (ucode != 0).float().mean() < 2e-3
    # elsewhere, and where a code differs, each is within its bound of the same moments
    codec, total = fmt().codec, len(chosen)
    (m, v), (m_, v_) = codec.decode(mine[:5], total), codec.decode(theirs[:5], total)
    assert torch.equal(v > 0, v_ > 0)
    known = v_ > 0
    assert ((v[known].log2() - v_[known].log2()).abs() <= 4 * width[known] + 1e-5).all()
    umax = torch.maximum(mine[4].float(), theirs[4].float()).repeat_interleave(32)
    assert ((m - m_).abs() <= 1.03 * umax / 43 * torch.maximum(v, v_).sqrt() + 1e-30).all()


def assert_same_weights(ours: Page, theirs: Page, dtype: torch.dtype, bits: int) -> None:
    """To fp32 rounding, and one unit of the correction, or of the weight where it has none; codes of u apart, a little more."""
    for p, q, start in zip(ours.params, theirs.params, ours.starts, strict=True):
        if bits:
            cut = slice(start, start + p.numel())
            p, q = weight_split.join(p, ours.planes[5][cut]), weight_split.join(q, theirs.planes[5][cut])
            unit = torch.finfo(dtype).eps * q.abs() / (254 if bits == 24 else 65534) + 2.0**-24 / 127
            near = (p - q).abs() <= unit * 1.01 + 4e-7 * q.abs() + 2e-9
        else:
            near = (p.float() - q.float()).abs() <= (4e-7 if dtype == torch.float32 else torch.finfo(dtype).eps) * q.float().abs() + 2e-9
        assert near.float().mean() > 1 - 4e-3
        assert ((p.float() - q.float()).abs() <= 2e-4 + torch.finfo(dtype).eps * q.float().abs()).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("grad_dtype", "dither"), VARIANTS)
@pytest.mark.parametrize(("dtype", "bits"), CASES)
def test_equals_eager(isa, dither, grad_dtype, dtype, bits):
    """From the same state, each step gives the same weights and codes but for rare neighbours, where lattices change too."""
    ours, theirs = (Page(fmt(bits, dither), dtype, grad_dtype) for _ in range(2))
    for _ in range(3):
        ours.copy_from(theirs)
        cpu.update_page(ours.planes, ours.segments(), ours.fmt, isa=isa)
        eager.update_page(theirs.planes, theirs.segments(), theirs.fmt)
        assert_same_states(ours.planes, theirs.planes)
        assert_same_weights(ours, theirs, dtype, bits)
    entries = theirs.planes[3][theirs.planes[3] > 0]
    assert len(entries.unique()) > 5  # groups of several lattices were compared


@pytest.mark.parametrize("isa", ISAS)
def test_only_the_segments_are_touched(isa):
    assert_only_segments_change(fmt(24), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_threads_do_not_change_bits(isa):
    assert_threads_change_no_bits(fmt(24), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_every_weight_survives_a_zero_step(isa):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    form = fmt(24)
    planes = [torch.zeros(plane.entries(every.numel()), dtype=plane.dtype) for plane in form.codec.planes]
    p, c = every.clone(), torch.full((every.numel(),), -63, dtype=torch.int8)
    expected_p, expected_c = weight_split.split(weight_split.join(p, c), torch.bfloat16, 24)
    hyper = (0.0, *RULE.scalars({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}, 1))
    cpu.update_page([*planes, c], [Segment(p, torch.zeros_like(p), start=0, index=0, step=1, hyper=hyper)], form, isa=isa)
    same, normal = torch.isfinite(every), every.float().abs() > 1e-30
    assert torch.equal(p[same], expected_p[same])
    assert torch.equal(c[same & normal], expected_c[same & normal])


def gradients(kind: str, n: int, generator: torch.Generator) -> Tensor:
    noise = torch.randn(n, generator=generator)
    if kind == "sparse":
        return noise * (torch.rand(n, generator=generator) < 0.1)
    if kind == "wide":
        return noise * torch.exp2(torch.linspace(-45, 20, n)[torch.randperm(n, generator=generator)])
    if kind == "spikes":  # u far above what the steps before it would let one expect, so that groups become fine
        return noise * torch.where(torch.rand(n, generator=generator) < 0.02, 1e3, 1e-3)
    return {"zeros": torch.zeros(n), "tiny": noise * 1e-17, "huge": noise.sign() * 2.0**61}[kind]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.999), 1e-8), ((0.9, 0.999), 0.0), ((0.0, 0.5), 1e-8)])
@pytest.mark.parametrize("kind", ["zeros", "sparse", "wide", "tiny", "huge", "spikes"])
def test_unusual_gradients_equal_eager(kind, betas, eps, isa):
    """Groups with zeros, with more octaves than a group can hold, with very small and very large second moments, and with spikes."""
    n, form = 16 * 64 + 17, fmt()
    ours, theirs = ([torch.zeros(plane.entries(n), dtype=plane.dtype) for plane in form.codec.planes] for _ in range(2))
    p, q = torch.linspace(-2, 2, n), torch.linspace(-2, 2, n)
    generator = torch.Generator().manual_seed(1)
    begin = 5000 if kind == "spikes" else 1  # at first a large u is what bias corrections make of any gradient
    for step in range(begin, begin + 4):
        grad = gradients(kind, n, generator)
        hyper = (1e-3, *RULE.scalars({"betas": betas, "eps": eps, "weight_decay": 0.1}, step))
        for mine, reference in zip(ours, theirs, strict=True):
            mine.copy_(reference)
        p.copy_(q)
        cpu.update_page(ours, [Segment(p, grad, start=0, index=0, step=step, hyper=hyper)], form, isa=isa)
        eager.update_page(theirs, [Segment(q, grad, start=0, index=0, step=step, hyper=hyper)], form)
        assert all(bool(torch.isfinite(plane.float()).all()) for plane in ours)
        word, reference = (planes[1].int() * 256 + planes[0].int() for planes in (ours, theirs))
        assert torch.equal(word == 0, reference == 0)
        same = torch.stack([a == b for a, b in zip(ours[2:5], theirs[2:5], strict=True)]).all(0)
        assert same.float().mean() > 0.95
        chosen = same.repeat_interleave(32)[:n]
        assert (word != reference)[chosen].float().mean() < 5e-3
        assert ((p - q).abs() <= 4e-7 * q.abs() + 2e-8).float().mean() > 0.99
        assert ((p - q).abs() <= 1e-4).all()
    if kind == "spikes" and betas[0] == 0.9:
        assert (theirs[3] >= FINE_ENTRIES).any()


@pytest.mark.parametrize("isa", ISAS)
def test_no_nan_becomes_a_number(isa):
    for dtype, bits in ((torch.bfloat16, 24), (torch.bfloat16, 0), (torch.float32, 0)):
        p, form = torch.ones(256, dtype=dtype), fmt(bits)
        planes = [torch.zeros(plane.entries(256), dtype=plane.dtype) for plane in form.codec.planes] + [torch.zeros(256, dtype=torch.int8)]
        hyper = (1e-3, *RULE.scalars({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}, 1))
        segment = Segment(p, torch.full((256,), float("nan")), start=0, index=0, step=1, hyper=hyper)
        cpu.update_page(planes if bits else planes[:-1], [segment], form, isa=isa)
        assert p.isnan().all()


@pytest.mark.parametrize("isa", ISAS)
def test_twenty_steps_stay_as_near_to_fp32_as_the_eager_path(isa):
    """Without the comparison at each step: distances of the weights from those that fp32 states give."""
    n, ends = 4096, []
    for update in ("cpu", "eager", "fp32"):
        codec = get_codec("none" if update == "fp32" else "joint", RULE.states)
        form = Format(RULE, codec, 0)
        planes = [torch.zeros(plane.entries(n), dtype=plane.dtype) for plane in codec.planes]
        generator, p = torch.Generator().manual_seed(0), torch.zeros(n)
        scale = torch.exp2(torch.randn(n, generator=generator))
        for step in range(1, 21):
            grad = (0.3 + torch.randn(n, generator=generator)) * scale * 1e-3
            hyper = (1e-3, *RULE.scalars({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}, step))
            segment = Segment(p, grad, start=0, index=0, step=step, hyper=hyper)
            if update == "cpu":
                cpu.update_page(planes, [segment], form, isa=isa)
            else:
                eager.update_page(planes, [segment], form)
        ends.append(p)
    mine, theirs = (float((end - ends[2]).norm() / ends[2].norm()) for end in ends[:2])
    assert mine == pytest.approx(theirs, rel=0.03)
    assert mine < 0.02
