"""`HealthCallback`: numbers in the logs, and one warning with advice for each cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import flashoptim_hf
from flashoptim_hf import HealthCallback
from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.optim.health import Finding
from flashoptim_hf.trainer import health

from .conftest import tiny_model

MakeTrainer = Callable[..., Trainer]
CAUSES = ("swallowed", "saturated", "codec_error")
KEYS = {f"optim_health_{cause}{end}" for cause in CAUSES for end in ("", "_worst")} | {"optim_health_skipped"}


def health_of(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key.startswith("optim_health")}


class Reporter(TrainerCallback):
    """What wandb or TensorBoard would get."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        self.seen.append(dict(logs))


class Spoil(TrainerCallback):
    """Puts a NaN into a gradient before some steps."""

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        if state.global_step in self.steps:
            next(model.parameters()).grad.view(-1)[0] = float("nan")


PLACED = {
    "paged": {},
    "resident": {"optim": "flashoptim_adamw"},
    "simulated": {"optim_args": "simulate=3,page_bytes=16KiB"},
    "released": {"optim_args": "gradient_release=true", "max_grad_norm": 0},
    "lion": {"optim": "flashoptim_paged_lion"},
    "sgd": {"optim": "flashoptim_sgd", "optim_args": "momentum=0.9", "learning_rate": 0.5},
    "accumulated": {"gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("placed", PLACED)
def test_a_healthy_run_has_numbers_and_no_warnings(placed: str, make_trainer: MakeTrainer, said: list[str]) -> None:
    reporter = Reporter()
    made = make_trainer(callbacks=[HealthCallback(every=2), reporter], max_steps=6, **PLACED[placed])
    made.train()
    logs = [entry for entry in made.state.log_history if "loss" in entry]
    # steps 1, 3 and 5 are looked at, and each is read a step later
    assert [set(health_of(entry)) for entry in logs] == [set(), KEYS, set(), KEYS, set(), KEYS]
    assert [set(health_of(entry)) for entry in reporter.seen[:6]] == [set(), KEYS, set(), KEYS, set(), KEYS]
    last = health_of(logs[-1])
    assert last["optim_health_skipped"] == 0
    assert 0 <= last["optim_health_codec_error"] <= last["optim_health_codec_error_worst"] < health.CODEC_ERROR
    assert not [line for line in said if "optimizer states" in line or "Updates" in line or "skipped" in line]


def bf16_model() -> torch.nn.Module:
    return tiny_model().bfloat16()


ILL: dict[str, tuple[str, dict[str, Any], str]] = {
    "24 bits": ("swallowed", {"learning_rate": 1e-8}, "master_bits=32"),
    "32 bits": ("swallowed", {"learning_rate": 1e-11, "optim_args": "master_bits=32"}, "learning rate is too small"),
    "no correction": ("swallowed", {"learning_rate": 1e-7, "optim_args": "master_bits=none"}, "master_bits=24"),
    "saturated": ("saturated", {"optim_args": "codec=softsign"}, r'codec="log"'),
    "codec error": ("codec_error", {"optim_args": "codec=softsign"}, r'codec="log"'),
}


@pytest.mark.parametrize("name", ILL)
def test_each_cause_is_said_once_with_a_name_and_advice(name: str, make_trainer: MakeTrainer, said: list[str]) -> None:
    cause, options, advice = ILL[name]
    made = make_trainer(bf16_model(), callbacks=[HealthCallback(every=1)], max_steps=8, lr_scheduler_type="constant", **options)
    made.train()
    worst = max(entry.get(f"optim_health_{cause}_worst", 0) for entry in made.state.log_history)
    assert worst > {"swallowed": health.SWALLOWED, "saturated": health.SATURATED, "codec_error": health.CODEC_ERROR}[cause]
    about = {"swallowed": "too small to move", "saturated": "cut off", "codec_error": "Rounding the optimizer states"}[cause]
    lines = [line for line in said if about in line]
    assert len(lines) == 1, said
    assert advice in lines[0]
    assert "transformer." in lines[0]  # a tensor's name
    assert "%" in lines[0]


def test_skipped_steps_are_said_once(make_trainer: MakeTrainer, said: list[str]) -> None:
    spoil = Spoil({2, 3, 4, 8, 9, 10})
    made = make_trainer(callbacks=[spoil, HealthCallback(every=5)], max_steps=16)
    made.train()
    shares = [entry["optim_health_skipped"] for entry in made.state.log_history if "optim_health_skipped" in entry]
    assert shares[0] == 0
    assert sum(share > 0 for share in shares) == 2
    assert len([line for line in said if "steps were skipped" in line]) == 1


def test_few_skipped_steps_are_not_worth_a_warning(make_trainer: MakeTrainer, said: list[str]) -> None:
    made = make_trainer(callbacks=[Spoil({2}), HealthCallback(every=5)], max_steps=9)
    made.train()
    assert any(entry.get("optim_health_skipped", 0) > 0 for entry in made.state.log_history)
    assert not [line for line in said if "steps were skipped" in line]


def test_where_the_step_to_look_at_is_skipped_the_next_one_is(make_trainer: MakeTrainer) -> None:
    made = make_trainer(callbacks=[Spoil({4}), HealthCallback(every=4)], max_steps=8)
    made.train()
    steps = [entry["step"] for entry in made.state.log_history if health_of(entry) and "loss" in entry]
    assert steps == [2, 7]


def test_other_optimizers_are_left_alone(make_trainer: MakeTrainer) -> None:
    made = make_trainer(callbacks=[HealthCallback(every=1)], optim="adamw_torch")
    made.train()
    assert not any(health_of(entry) for entry in made.state.log_history)


def test_weights_are_the_same_with_and_without_it(make_trainer: MakeTrainer) -> None:
    models = []
    for callbacks in (None, [HealthCallback(every=1)]):
        made = make_trainer(callbacks=callbacks, max_steps=4, optim_args="simulate=1,page_bytes=16KiB")
        made.train()
        models.append(made.model)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)


def test_evaluation_metrics_are_left_alone(make_trainer: MakeTrainer) -> None:
    made = make_trainer(callbacks=[HealthCallback(every=1)], eval_strategy="steps", eval_steps=1, max_steps=4)
    made.train()
    assert not any(health_of(entry) for entry in made.state.log_history if "eval_loss" in entry)
    assert any(health_of(entry) for entry in made.state.log_history if "loss" in entry)
    assert not health_of(made.evaluate())


@pytest.mark.parametrize("bad", [{"every": 0}, {"groups": 0}, {"every": -3}])
def test_numbers_below_one_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        HealthCallback(**bad)


def test_numbers_are_means_over_elements_and_the_worst_tensor() -> None:
    a, b = torch.ones(1), torch.ones(1)
    findings = [Finding(a, 24, "log", 300, 0.1, 0.0, 0.01), Finding(b, 24, "log", 100, 0.5, 0.2, 0.03)]
    found = health.numbers(findings)
    assert set(found) == KEYS - {"optim_health_skipped"}
    assert found["optim_health_swallowed"] == pytest.approx(0.2)
    assert found["optim_health_swallowed_worst"] == 0.5
    assert found["optim_health_codec_error"] == pytest.approx(0.015)
    assert health.numbers([]) == {}


def test_many_tensors_are_not_all_named() -> None:
    tensors = [torch.ones(2, i) for i in range(6)]
    found = [Finding(t, 24, "log", 1, 1.0, 0, 0) for t in tensors]
    assert health._named(found, {id(tensors[0]): "a.b"}) == "a.b, a tensor of shape (2, 1), a tensor of shape (2, 2) and 3 more"


def test_it_is_public() -> None:
    assert flashoptim_hf.HealthCallback is HealthCallback
    assert "HealthCallback" in dir(flashoptim_hf)
