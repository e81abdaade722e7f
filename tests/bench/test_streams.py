"""Gradient streams: the file's rules, and the synthetic ones against their definition."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

from flashoptim_hf.bench.streams import SYNTHETIC, Problem, drifting, from_file, synthetic
from flashoptim_hf.errors import ConfigurationError


def test_file_gives_fp32_problems_in_order_of_names(tmp_path):
    grads = {"b": torch.randn(3, 5).bfloat16(), "a": torch.randn(2, 4)}
    save_file(grads, tmp_path / "g.safetensors")
    first, second = from_file(tmp_path / "g.safetensors")
    assert (first.case, second.case) == ("a", "b")
    assert second.grads.dtype == torch.float32
    assert torch.equal(second.grads, grads["b"].float())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "holds no tensors"),
        ({"w": torch.zeros(4)}, r"'w' .*\(4,\)"),
        ({"w": torch.zeros(2, 2, dtype=torch.int32)}, "'w' is torch.int32"),
        ({"w": torch.zeros(0, 2)}, r"\(0, 2\)"),
        ({"ok": torch.ones(1, 1), "w": torch.tensor([[1.0, math.nan]])}, "'w' has entries that are not finite"),
    ],
)
def test_file_that_cannot_be_used_says_why(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "g.safetensors")
    with pytest.raises(ConfigurationError, match=message):
        from_file(tmp_path / "g.safetensors")


def test_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "g.safetensors").write_text("not a safetensors file")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        from_file(tmp_path / "g.safetensors")


def test_scaling_covers_eps_and_shows_in_the_name():
    problem = Problem("w", torch.ones(1, 2))
    scaled, bare = problem.scaled(1e-8), problem.scaled(1e4, zero_eps=True)
    assert (scaled.case, scaled.eps) == ("scale=1e-08/w", 1e-8 * 1e-8)
    assert (bare.case, bare.eps) == ("scale=10000,eps=0/w", 0.0)
    assert torch.equal(bare.grads, torch.full((1, 2), 1e4))


def test_drifting_is_noise_around_a_mean_at_lognormal_scales():
    steps, elements = 400, 2048
    grads = drifting(1.5, 1.0, seed=1, steps=steps, elements=elements).double()
    envelope = torch.tensor([1e-3 * (1 + 0.5 * math.sin(t / 30)) for t in range(1, steps + 1)], dtype=torch.float64)
    unit = grads / envelope[:, None]
    # Between two drifts of the mean only z varies, and its deviation is the element's scale
    scale = unit[:49].std(dim=0)
    assert scale.log().std().item() == pytest.approx(1.5, rel=0.05)
    assert scale.log().mean().item() == pytest.approx(0.0, abs=0.1)
    mean = unit[:49].mean(dim=0) / scale
    assert mean.std().item() == pytest.approx(math.sqrt(0.3**2 + 1 / 49), rel=0.05)
    later = unit[49:99].mean(dim=0) / scale
    noise_free = torch.corrcoef(torch.stack([mean, later]))[0, 1] * mean.std() * later.std() / 0.3**2
    assert noise_free.item() == pytest.approx(0.7, abs=0.1), "the mean keeps 0.7 of itself when it drifts"


def test_sparse_stream_keeps_one_entry_in_twenty():
    grads = drifting(*SYNTHETIC["sparse"], seed=0, steps=200, elements=1024)
    assert (grads != 0).float().mean().item() == pytest.approx(0.05, rel=0.05)


def test_synthetic_streams_depend_on_the_seed_alone():
    again = synthetic([3, 4], steps=3, elements=8)
    problems = synthetic([3, 4], steps=3, elements=8)
    assert [p.case for p in problems][:3] == [
        "synthetic/lognormal_0.5/seed=3",
        "synthetic/lognormal_0.5/seed=4",
        "synthetic/lognormal_1.5/seed=3",
    ]
    assert len(problems) == 2 * len(SYNTHETIC)
    assert all(torch.equal(a.grads, b.grads) for a, b in zip(problems, again, strict=True))
    assert not torch.equal(problems[0].grads, problems[1].grads)
