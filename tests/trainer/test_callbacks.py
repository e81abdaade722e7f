"""Telemetry: which numbers appear where, that they are true, and that nothing stops a training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from transformers import Trainer, TrainerCallback

from flashoptim_hf import FlashAdamW, FlashOptimCallback
from flashoptim_hf.trainer.callbacks import telemetry

MakeTrainer = Callable[..., Trainer]

HOST = {"optim_state_bytes", "optim_host_bytes", "optim_page_in_bytes", "optim_page_out_bytes", "optim_skipped_steps"}
DEVICE = {"optim_device_bytes", "optim_staging_bytes", "optim_resident_bytes"}


def keys_of(entry: dict[str, Any]) -> set[str]:
    return {key for key in entry if key.startswith("optim_")}


class Reporter(TrainerCallback):
    """What wandb or TensorBoard would get: a copy of each log."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        self.seen.append(dict(logs))


class Stripper(TrainerCallback):
    """Takes everything out of the logs, as some users' callbacks do."""

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        logs.clear()


def test_numbers_are_in_the_logs_and_reach_reporters(make_trainer: MakeTrainer) -> None:
    reporter = Reporter()
    made = make_trainer(callbacks=[reporter])
    result = made.train()

    *steps, summary = made.state.log_history
    assert len(steps) == 3
    for entry in (*steps, summary):
        assert keys_of(entry) == HOST
        assert all(type(entry[key]) is int for key in HOST)
    assert json.loads(json.dumps(steps)) == steps
    assert [keys_of(entry) for entry in reporter.seen] == [HOST] * 4
    assert keys_of(result.metrics) == HOST  # so train_results.json has them too


def test_numbers_equal_the_hand_count(make_trainer: MakeTrainer) -> None:
    made = make_trainer()
    made.train()
    sizes = [p.numel() for p in made.model.parameters()]
    groups = sum(-(-size // 64) for size in sizes)  # 64 elements share 10 bytes of constants, and a group never spans two parameters
    assert made.state.log_history[0]["optim_state_bytes"] == 2 * sum(sizes) + 10 * groups
    assert made.state.log_history[0]["optim_host_bytes"] >= made.state.log_history[0]["optim_state_bytes"]


def test_device_numbers_appear_with_a_device_and_traffic_is_counted(make_trainer: MakeTrainer) -> None:
    made = make_trainer(optim_args="simulate=1,page_bytes=16KiB")
    made.train()
    entry = made.state.log_history[0]
    assert keys_of(entry) == HOST | DEVICE
    assert 0 < entry["optim_staging_bytes"] <= entry["optim_device_bytes"]
    assert entry["optim_page_in_bytes"] == entry["optim_page_out_bytes"] >= entry["optim_state_bytes"]


def test_evaluation_metrics_stay_as_they_are(make_trainer: MakeTrainer) -> None:
    made = make_trainer(eval_strategy="steps", eval_steps=1)
    made.train()
    evaluations = [entry for entry in made.state.log_history if "eval_loss" in entry]
    trainings = [entry for entry in made.state.log_history if "loss" in entry]
    assert len(evaluations) == len(trainings) == 3
    assert not any(keys_of(entry) for entry in evaluations)
    assert all(keys_of(entry) == HOST for entry in trainings)
    assert not keys_of(made.evaluate())
    assert not keys_of(made.evaluate(metric_key_prefix="test"))
    assert not keys_of(made.predict(made.eval_dataset).metrics)


def test_an_evaluation_that_fails_does_not_silence_the_training_after_it(make_trainer: MakeTrainer) -> None:
    made = make_trainer()
    made.compute_metrics = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.evaluate()
    made.train()
    assert keys_of(made.state.log_history[0]) == HOST


def test_other_optimizers_are_left_alone(make_trainer: MakeTrainer) -> None:
    for changes in ({"optim": "adamw_torch"}, {"optim": "sgd", "optim_args": "momentum=0.9"}):
        made = make_trainer(**changes)
        assert FlashOptimCallback in [type(callback) for callback in made.callback_handler.callbacks]
        made.train()
        assert not any(keys_of(entry) for entry in made.state.log_history)


@pytest.mark.parametrize("given", ["optimizers", "optimizer_cls_and_kwargs"])
def test_optimizers_that_come_without_a_name_are_reported_too(make_trainer: MakeTrainer, given: str) -> None:
    model = make_trainer().model
    value = (FlashAdamW(model.parameters()), None) if given == "optimizers" else (FlashAdamW, {"paged": True})
    made = make_trainer(model, optim="adamw_torch", **{given: value})
    made.train()
    assert keys_of(made.state.log_history[0]) == HOST


def test_optim_args_are_not_read_when_the_optimizer_is_given(make_trainer: MakeTrainer) -> None:
    model = make_trainer().model
    make_trainer(model, optim_args="typo_key=1", optimizers=(torch.optim.SGD(model.parameters(), lr=1e-3), None)).train()


def test_a_callback_that_takes_keys_away_does_no_harm(make_trainer: MakeTrainer) -> None:
    made = make_trainer(callbacks=[Stripper()])
    made.callback_handler.callbacks.insert(0, Stripper())  # and one that comes before ours
    made.train()
    assert keys_of(made.state.log_history[0]) == HOST


def test_a_trainer_that_logs_in_its_own_way_does_no_harm(make_trainer: MakeTrainer) -> None:
    class Own(Trainer):
        def log(self, logs: dict[str, float], *_: Any) -> None:
            self.state.log_history.append({"step": self.state.global_step, "mine": 1.0})
            self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    reporter = Reporter()
    made = make_trainer(cls=Own, callbacks=[reporter])
    made.train()
    assert [keys_of(entry) for entry in reporter.seen] == [HOST] * 4
    assert made.state.log_history == [{"step": step, "mine": 1.0} for step in (1, 2, 3, 3)]


def test_a_second_callback_adds_nothing(make_trainer: MakeTrainer) -> None:
    made = make_trainer(callbacks=[FlashOptimCallback()])
    made.train()
    assert [keys_of(entry) for entry in made.state.log_history] == [HOST] * 4


def test_no_steps_two_trainings_and_evaluation_alone(make_trainer: MakeTrainer) -> None:
    assert "eval_loss" in make_trainer().evaluate()

    nothing = make_trainer(max_steps=-1, num_train_epochs=0)
    nothing.train()
    assert nothing.state.global_step == 0
    assert nothing.state.log_history[-1]["optim_state_bytes"] == 0

    twice = make_trainer()
    twice.train()
    first = twice.state.log_history[-1]
    twice.train()
    assert twice.state.log_history[-1]["optim_state_bytes"] == first["optim_state_bytes"]


def test_a_loss_that_is_not_a_number_is_still_logged(make_trainer: MakeTrainer) -> None:
    made = make_trainer(logging_nan_inf_filter=False)
    with torch.no_grad():
        made.model.transformer.wte.weight[:] = float("nan")
    with pytest.warns(RuntimeWarning, match="this step was skipped"):
        made.train()
    assert made.state.log_history[-1]["optim_skipped_steps"] == 3
    assert keys_of(made.state.log_history[0]) == HOST


def test_resume_goes_on_with_the_same_numbers_and_bits(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    whole = make_trainer(max_steps=4)
    whole.train()
    half = make_trainer(max_steps=4, save_strategy="steps", save_steps=2)
    half.train()
    again = make_trainer(max_steps=4, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [entry["optim_state_bytes"] for entry in again.state.log_history] == [whole.state.log_history[0]["optim_state_bytes"]] * 5
    for (name, expected), value in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(expected, value), name


def test_telemetry_looks_through_wrappers() -> None:
    parameter = torch.nn.Parameter(torch.zeros(64))
    optimizer = FlashAdamW([parameter])
    assert keys_of(telemetry(SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer)))) == HOST
    assert telemetry(SimpleNamespace(optimizer=None)) == telemetry(None) == telemetry(torch.optim.SGD([parameter])) == {}


@pytest.mark.parametrize("placement", [{}, {"paged": True}, {"paged": True, "simulate": 1}])
def test_accelerate_knows_of_a_step_that_the_scaler_skipped(placement: dict[str, Any]) -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(100))
    optimizer = FlashAdamW([weight], lr=0.1, **placement)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wrapped = AcceleratedOptimizer(optimizer, scaler=scaler)

    def step(factor: float) -> None:
        scaler.scale((weight * factor).sum()).backward()
        wrapped.step()
        wrapped.zero_grad()

    step(float("inf"))
    assert wrapped.step_was_skipped
    assert torch.equal(weight.detach(), torch.ones(100))
    assert not optimizer.state
    step(1.0)
    optimizer.synchronize()
    assert not wrapped.step_was_skipped
    assert (weight < 1).all()
    assert optimizer.state_dict()["state"][0]["step"] == 1
