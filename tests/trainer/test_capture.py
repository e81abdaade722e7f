"""Gradients captured from a run: what is kept, and that the bench reads it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashoptim_hf import GradientCapture
from flashoptim_hf.bench.streams import from_file
from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.trainer.capture import choose, middle, write


def spied(optimizer: torch.optim.Optimizer, seen: list[dict[str, torch.Tensor]], names: dict[torch.Tensor, str]) -> torch.optim.Optimizer:
    """An optimizer that notes the gradients that each of its steps sees."""
    step = optimizer.step

    def noting(*args, **kwargs):
        seen.append({names[p]: p.grad.clone() for group in optimizer.param_groups for p in group["params"] if p.grad is not None})
        return step(*args, **kwargs)

    optimizer.step = noting
    return optimizer


@pytest.mark.parametrize("optim", ["flashoptim_paged_adamw", "adamw_torch"])
def test_what_is_captured_is_what_the_optimizer_sees(make_trainer, tmp_path, optim):
    file = tmp_path / "new" / "g.safetensors"
    capture = GradientCapture(file, tensors=["*c_attn.weight", "transformer.ln_f.bias"], steps=[2, 3, 5], elements=100)
    trainer = make_trainer(callbacks=[capture], optim=optim, max_steps=6, gradient_accumulation_steps=2, max_grad_norm=0.1)
    seen: list[dict[str, torch.Tensor]] = []
    trainer.create_optimizer()
    spied(trainer.optimizer, seen, {p: name for name, p in trainer.model.named_parameters()})
    trainer.train()
    assert capture.kept == 3
    assert capture.left_out == 0
    kept = load_file(file)
    assert {name: tuple(rows.shape) for name, rows in kept.items()} == {
        "transformer.h.0.attn.c_attn.weight": (3, 100),
        "transformer.ln_f.bias": (3, 16),
    }
    for name, rows in kept.items():
        for row, step in zip(rows, (2, 3, 5), strict=True):
            assert torch.equal(row, middle(seen[step - 1][name], 100))
    assert not capture.part.exists()
    assert [problem.case for problem in from_file(file)] == sorted(kept)


def test_steps_without_finite_gradients_are_left_out(make_trainer, tmp_path):
    class Poison(GradientCapture):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 1:
                next(iter(self._params.values())).grad.view(-1)[:] = float("nan")
            super().on_pre_optimizer_step(args, state, control, **kwargs)

    capture = Poison(tmp_path / "g.safetensors", tensors="*wte*")
    make_trainer(callbacks=[capture], max_steps=3).train()
    assert (capture.kept, capture.left_out) == (2, 1)
    (rows,) = load_file(tmp_path / "g.safetensors").values()
    assert rows.isfinite().all()
    assert len(rows) == 2


def test_a_run_without_gradients_writes_nothing_and_says_so(make_trainer, tmp_path, caplog):
    capture = GradientCapture(tmp_path / "g.safetensors", steps=[100])
    with caplog.at_level("WARNING"):
        make_trainer(callbacks=[capture]).train()
    assert not list(tmp_path.glob("g.safetensors*"))


def test_names_are_chosen_by_pattern_or_by_kind():
    sizes = {f"model.layers.{i}.{kind}.weight": 100 + i for i in range(30) for kind in ("q", "v")} | {"embed": 5000, "norm": 3}
    assert choose(sizes, ["embed", "*.7.q.*"]) == ["model.layers.7.q.weight", "embed"]
    assert choose(sizes, None) == ["model.layers.29.q.weight", "model.layers.29.v.weight", "embed", "norm"]
    assert choose(sizes, None, most=1) == ["embed"]
    with pytest.raises(ConfigurationError, match=r"'nope' fits none of the 62 trained parameters"):
        choose(sizes, ["embed", "nope"])
    with pytest.raises(ConfigurationError, match="no parameters"):
        choose({}, None)


@pytest.mark.parametrize("wrong", [{"elements": 0}, {"steps": []}, {"steps": [0, 1]}, {"steps": range(0)}, {"steps": range(9, -1, -1)}])
def test_sizes_and_steps_begin_at_one(wrong, tmp_path):
    with pytest.raises(ConfigurationError, match="must be 1 or more"):
        GradientCapture(tmp_path / "g", **wrong)


def test_all_steps_there_may_ever_be_are_no_list(tmp_path):
    assert 10**12 in GradientCapture(tmp_path / "g", steps=range(1, 2**62)).steps


def test_a_wrong_name_stops_the_run_before_its_first_step(make_trainer, tmp_path):
    trainer = make_trainer(callbacks=[GradientCapture(tmp_path / "g", tensors=["lora"])])
    with pytest.raises(ConfigurationError, match="'lora'"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_middle_of_a_tensor():
    assert middle(torch.arange(10).view(2, 5).bfloat16(), 4).tolist() == [3.0, 4.0, 5.0, 6.0]
    assert middle(torch.arange(3), 4).tolist() == [0.0, 1.0, 2.0]


def test_rows_become_the_file_that_safetensors_would_write(tmp_path):
    tensors = {"b": torch.randn(4, 3), "a": torch.randn(4, 5)}
    rows = tmp_path / "rows"
    rows.write_bytes(b"".join(tensors[name][i].numpy().tobytes() for i in range(4) for name in tensors))
    write(rows, tmp_path / "made", {"b": 3, "a": 5}, 4)
    save_file(tensors, tmp_path / "theirs")
    made, theirs = load_file(tmp_path / "made"), load_file(tmp_path / "theirs")
    assert all(torch.equal(made[name], theirs[name]) for name in tensors)
    length = int.from_bytes((tmp_path / "made").read_bytes()[:8], "little")
    assert length % 8 == 0
    assert set(json.loads((tmp_path / "made").read_bytes()[8 : 8 + length])) == {"a", "b"}
