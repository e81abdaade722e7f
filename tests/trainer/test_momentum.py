"""Lion and SGD by name: what reaches the optimizer from `TrainingArguments` and `optim_args`, and whole runs beside other optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Trainer
from transformers.training_args import OptimizerNames

from flashoptim_hf import FlashLion, FlashSGD
from flashoptim_hf.errors import ConfigurationError

CLASSES = {"flashoptim_lion": FlashLion, "flashoptim_paged_lion": FlashLion, "flashoptim_sgd": FlashSGD, "flashoptim_paged_sgd": FlashSGD}
MakeTrainer = Callable[..., Trainer]


@pytest.mark.parametrize("name", CLASSES)
def test_the_name_gives_the_class(name: str, make_trainer: MakeTrainer) -> None:
    assert OptimizerNames(name) == name
    optimizer = make_trainer(optim=name).create_optimizer()
    assert type(optimizer) is CLASSES[name]
    assert optimizer.defaults["paged"] is ("paged" in name)
    assert optimizer.defaults["codec"] == "square"


def test_lion_takes_its_values_where_transformers_lion_does(make_trainer: MakeTrainer, said: list[str]) -> None:
    made = make_trainer(optim="flashoptim_paged_lion", learning_rate=3e-5, adam_beta1=0.8, adam_beta2=0.98, weight_decay=0.3)
    decay, rest = made.create_optimizer().param_groups
    assert decay["betas"] == rest["betas"] == (0.8, 0.98)
    assert decay["lr"] == rest["lr"] == 3e-5
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert "eps" not in decay
    assert said == []


def test_sgd_takes_the_learning_rate_and_the_decay(make_trainer: MakeTrainer) -> None:
    made = make_trainer(optim="flashoptim_sgd", learning_rate=0.2, weight_decay=0.3, adam_beta1=0.5)
    decay, rest = made.create_optimizer().param_groups
    assert decay["lr"] == rest["lr"] == 0.2
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert decay["momentum"] == 0.0


def test_optim_args_of_sgd(make_trainer: MakeTrainer, said: list[str]) -> None:
    text = "momentum=0.9, nesterov=true, decoupled_weight_decay=yes, codec=softsign, master_bits=none"
    defaults = make_trainer(optim="flashoptim_paged_sgd", optim_args=text).create_optimizer().defaults
    assert [defaults[name] for name in ("momentum", "nesterov", "decoupled_weight_decay", "codec", "master_bits")] == [
        0.9,
        True,
        True,
        "softsign",
        None,
    ]
    assert said == []


def test_optim_args_of_lion_win_over_the_arguments(make_trainer: MakeTrainer, said: list[str]) -> None:
    made = make_trainer(optim="flashoptim_lion", optim_args="betas=(0.95,0.98),dither=false")
    defaults = made.create_optimizer().defaults
    assert defaults["betas"] == (0.95, 0.98)
    assert defaults["dither"] is False
    assert made.args.adam_beta2 == 0.98
    assert len(said) == 2


@pytest.mark.parametrize("cls", [FlashLion, FlashSGD])
def test_every_option_is_an_optim_args_key(cls: type, make_args: Callable[..., Any]) -> None:
    defaults = cls([torch.nn.Parameter(torch.zeros(2))]).defaults
    assert list(defaults) == list(inspect.signature(cls).parameters)[1:]
    name = "flashoptim_lion" if cls is FlashLion else "flashoptim_sgd"
    text = ",".join(f"{key}={value}" for key, value in defaults.items())
    found, kwargs = Trainer.get_optimizer_cls_and_kwargs(make_args(optim=name, optim_args=text))
    assert (found, kwargs) == (cls, defaults)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("flashoptim_lion", "eps=1e-8", "no option 'eps'"),
        ("flashoptim_sgd", "betas=(0.9,0.99)", "no option 'betas'"),
        ("flashoptim_sgd", "nesterov=maybe", "nesterov=maybe"),
    ],
)
def test_options_of_other_algorithms_are_mistakes(name: str, text: str, message: str, make_trainer: MakeTrainer) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(optim=name, optim_args=text)


def test_a_codec_that_cannot_hold_the_state_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ConfigurationError, match=r"codec='log' cannot store the states of FlashLion.*'square'"):
        make_trainer(optim="flashoptim_lion", optim_args="codec=log").create_optimizer()


def losses(make_trainer: MakeTrainer, optim: str, **changes: Any) -> torch.Tensor:
    made = make_trainer(optim=optim, max_steps=15, weight_decay=0.1, **changes)
    made.train()
    return torch.tensor([entry["loss"] for entry in made.state.log_history if "loss" in entry])


def test_training_with_sgd_equals_transformers_sgd_closely(make_trainer: MakeTrainer) -> None:
    options = {"learning_rate": 0.3, "optim_args": "momentum=0.9"}
    reference = losses(make_trainer, "sgd", **options)
    assert reference[-1] < reference[0] - 0.2
    paged = losses(make_trainer, "flashoptim_paged_sgd", **options)
    assert (paged - reference).abs().max() < 0.005
    assert torch.equal(paged, losses(make_trainer, "flashoptim_sgd", **options))
    assert (losses(make_trainer, "flashoptim_sgd", learning_rate=0.3) - reference).abs().max() > 0.1  # without momentum it shows


def test_training_with_lion_equals_lion_with_fp32_states_closely(make_trainer: MakeTrainer) -> None:
    options = {"learning_rate": 3e-3, "adam_beta2": 0.99}
    reference = losses(make_trainer, "flashoptim_lion", optim_args="codec=none", **options)
    assert reference[-1] < reference[0] - 0.2
    paged = losses(make_trainer, "flashoptim_paged_lion", **options)
    assert (paged - reference).abs().max() < 0.03
    assert torch.equal(paged, losses(make_trainer, "flashoptim_lion", **options))
