"""Names in transformers: what reaches the optimizer, and what stays as it was. Import orders are in test_import_orders.py."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments, trainer
from transformers.modelcard import extract_hyperparameters_from_trainer
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
from transformers.training_args import OptimizerNames

import flashoptim_hf
from flashoptim_hf import FlashAdamW, FlashOptimCallback
from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.trainer import register

PAGED = "flashoptim_paged_adamw"
NAMES = ["flashoptim_adamw", PAGED]

MakeArgs = Callable[..., TrainingArguments]
MakeTrainer = Callable[..., Trainer]

# ---------------------------------------------------------------------- the enum


def test_members_behave_like_those_of_transformers() -> None:
    for name in NAMES:
        member = OptimizerNames(name)
        assert member == name
        assert hash(member) == hash(name)
        assert member.value == name
        assert member.name == name.upper()
        assert member is OptimizerNames[name.upper()] is getattr(OptimizerNames, name.upper())
        assert member in list(OptimizerNames)
        assert isinstance(member, OptimizerNames)
        assert str(member) == f"OptimizerNames.{name.upper()}"
        assert repr(member) == f"<OptimizerNames.{name.upper()}: {name!r}>"
        assert OptimizerNames(member) is member
        assert copy.copy(member) == member
        assert copy.deepcopy({"optim": member})["optim"] is member
    assert len({member.value for member in OptimizerNames}) == len(list(OptimizerNames)) == len(OptimizerNames)


def test_a_member_pickles_as_a_plain_string() -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(OptimizerNames(PAGED), protocol))
        assert type(loaded) is str
        assert loaded == PAGED
    assert pickle.loads(pickle.dumps(OptimizerNames.SGD)) is OptimizerNames.SGD


def test_names_come_from_the_files_of_the_algorithms() -> None:
    folder = Path(flashoptim_hf.__file__).parent / "optim"
    stems = {path.stem for path in folder.glob("*.py")}
    registered = {member.value for member in OptimizerNames if member.value.startswith("flashoptim_")}
    assert set(NAMES) <= registered
    for stem in ("lion", "sgd", "base", "layout", "checkpoint"):
        assert (f"flashoptim_{stem}" in registered) == (stem in stems and stem in ("lion", "sgd"))
    assert registered == set(register.handlers()) == {name for name in _OPTIMIZER_HANDLERS if name.startswith("flashoptim_")}


def test_arguments_survive_every_way_of_writing_them_down(make_args: MakeArgs, tmp_path: Path) -> None:
    args = make_args(optim_args="betas=(0.9, 0.95), codec=log")
    assert json.loads(args.to_json_string())["optim"] == PAGED
    assert type(args.to_dict()["optim"]) is str
    assert args.to_sanitized_dict()["optim"] == PAGED
    assert dataclasses.replace(args, max_steps=5).optim is args.optim
    assert TrainingArguments(output_dir=str(tmp_path), use_cpu=True).set_optimizer(name=PAGED).optim is args.optim

    torch.save(args, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert loaded.optim == PAGED
    assert loaded.optim_args == "betas=(0.9, 0.95), codec=log"
    assert Trainer.get_optimizer_cls_and_kwargs(loaded)[0] is FlashAdamW  # the plain string is served like the member


def test_argument_parser_takes_the_name_from_flags_and_files(tmp_path: Path) -> None:
    parser = HfArgumentParser(TrainingArguments)
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "--optim", PAGED, "--optim_args", "betas=(0.9, 0.95), page_bytes=1MiB"]
    (args,) = parser.parse_args_into_dataclasses(flags)
    assert args.optim is OptimizerNames(PAGED)

    (tmp_path / "run.yaml").write_text(
        f"output_dir: {tmp_path}\nuse_cpu: true\noptim: {PAGED}\noptim_args: betas=(0.9, 0.95), page_bytes=1MiB\n"
    )
    (from_file,) = parser.parse_yaml_file(str(tmp_path / "run.yaml"))
    for one in (args, from_file):
        kwargs = Trainer.get_optimizer_cls_and_kwargs(one)[1]
        assert kwargs["betas"] == (0.9, 0.95)
        assert kwargs["page_bytes"] == "1MiB"

    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--optim", "flashoptim_none"])


# ---------------------------------------------------------------------- registering and taking it back


def test_registering_again_changes_nothing() -> None:
    before = list(OptimizerNames), dict(_OPTIMIZER_HANDLERS), list(trainer.DEFAULT_CALLBACKS), Trainer.get_optimizer_cls_and_kwargs
    flashoptim_hf.register()
    assert before == (
        list(OptimizerNames),
        dict(_OPTIMIZER_HANDLERS),
        list(trainer.DEFAULT_CALLBACKS),
        Trainer.get_optimizer_cls_and_kwargs,
    )
    assert trainer.DEFAULT_CALLBACKS.count(FlashOptimCallback) == 1


def test_unregister_takes_everything_back(make_args: MakeArgs) -> None:
    routed = Trainer.get_optimizer_cls_and_kwargs
    flashoptim_hf.unregister()
    try:
        with pytest.raises(ValueError, match="flashoptim_adamw is not a valid OptimizerNames"):
            make_args(optim="flashoptim_adamw")
        assert not [name for name in [*OptimizerNames, *_OPTIMIZER_HANDLERS] if "flashoptim" in name]
        assert not hasattr(OptimizerNames, "FLASHOPTIM_ADAMW")
        assert FlashOptimCallback not in trainer.DEFAULT_CALLBACKS
        assert Trainer.get_optimizer_cls_and_kwargs is routed.__wrapped__
        flashoptim_hf.unregister()  # nothing left to take back
    finally:
        flashoptim_hf.register()
    assert make_args(optim="flashoptim_adamw").optim == "flashoptim_adamw"
    assert FlashOptimCallback in trainer.DEFAULT_CALLBACKS


def test_a_module_that_was_loaded_unseen_is_made_up_for() -> None:
    register._remove_members(OptimizerNames)
    for name in NAMES:
        del _OPTIMIZER_HANDLERS[name]
    register._extend_trainer(trainer)
    assert [OptimizerNames(name).value for name in NAMES] == NAMES
    assert set(NAMES) <= set(_OPTIMIZER_HANDLERS)


def test_a_member_that_is_not_ours_gets_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(OptimizerNames(PAGED), register._OURS)
        patch.delitem(_OPTIMIZER_HANDLERS, PAGED)
        flashoptim_hf.register()
        assert PAGED not in _OPTIMIZER_HANDLERS
    flashoptim_hf.register()
    assert PAGED in _OPTIMIZER_HANDLERS


def test_public_names_are_lazy_and_listed() -> None:
    assert {"FlashAdamW", "FlashOptimCallback", "register", "unregister", "__version__"} <= set(dir(flashoptim_hf))
    with pytest.raises(AttributeError, match="FlashNothing"):
        _ = flashoptim_hf.FlashNothing


@pytest.mark.parametrize("optim_args", ["a==1", " ", "x"])
def test_other_optimizers_still_get_transformers_own_parser(make_args: MakeArgs, optim_args: str) -> None:
    with pytest.raises(ValueError, match="unpack"):
        Trainer.get_optimizer_cls_and_kwargs(make_args(optim="sgd", optim_args=optim_args))


def test_other_optimizers_are_served_as_before(make_args: MakeArgs) -> None:
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(make_args(optim="sgd", optim_args="momentum=0.5"))
    assert cls is torch.optim.SGD
    assert kwargs["momentum"] == 0.5


# ---------------------------------------------------------------------- what reaches the optimizer


def test_every_value_of_training_arguments_arrives(make_trainer: MakeTrainer, said: list[str]) -> None:
    made = make_trainer(learning_rate=3e-4, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6, weight_decay=0.3)
    optimizer = made.create_optimizer()
    assert type(optimizer) is FlashAdamW
    decay, rest = optimizer.param_groups
    for group in (decay, rest):
        assert group["lr"] == 3e-4
        assert group["betas"] == (0.8, 0.9)
        assert group["eps"] == 1e-6
        assert optimizer.defaults["paged"] is True
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert {id(p) for p in rest["params"]} == {id(p) for n, p in made.model.named_parameters() if "ln_" in n or "bias" in n}
    assert optimizer.defaults["weight_decay"] == 0.3
    assert said == []


def test_the_unpaged_name_is_not_paged(make_trainer: MakeTrainer) -> None:
    assert make_trainer(optim="flashoptim_adamw").create_optimizer().defaults["paged"] is False


def test_every_option_is_an_optim_args_key(make_args: MakeArgs) -> None:
    defaults = FlashAdamW([torch.nn.Parameter(torch.zeros(2))]).defaults
    text = ",".join(f"{key}={value}" for key, value in defaults.items())
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(make_args(optim="flashoptim_adamw", optim_args=text))
    assert kwargs == defaults
    assert cls([torch.nn.Parameter(torch.zeros(2))], **kwargs).defaults == defaults


def test_types_arrive(make_trainer: MakeTrainer) -> None:
    text = " master_bits = 32, page_bytes=1MiB, dither=False, betas=(0.9, 0.95), codec=none, eps=1e-6, simulate=None, "
    defaults = make_trainer(optim_args=text).create_optimizer().defaults
    assert defaults["master_bits"] == 32
    assert defaults["page_bytes"] == 2**20
    assert defaults["dither"] is False
    assert defaults["betas"] == (0.9, 0.95)
    assert defaults["codec"] == "none"
    assert defaults["eps"] == 1e-6
    assert defaults["simulate"] is None


@pytest.mark.parametrize("text", [None, "", " ", ",", "codec=log,"])
def test_empty_optim_args_are_fine(make_trainer: MakeTrainer, text: str | None) -> None:
    if text == ",":
        with pytest.raises(ConfigurationError, match="malformed"):
            make_trainer(optim_args=text)
    else:
        assert make_trainer(optim_args=text).create_optimizer().defaults["codec"] == "log"


@pytest.mark.parametrize("text", ["typo_key=1", "a==1", "dither=maybe", "codec=log,codec=none", "codec", "betas=0.9"])
def test_a_mistake_stops_the_making_of_the_trainer(make_trainer: MakeTrainer, make_args: MakeArgs, text: str) -> None:
    with pytest.raises(ConfigurationError, match="optim_args item"):
        make_trainer(optim_args=text)
    with pytest.raises(ConfigurationError, match="optim_args item"):
        Trainer.get_optimizer_cls_and_kwargs(make_args(optim_args=text))


@pytest.mark.parametrize("text", ["codec=nothing", "page_bytes=huge", "master_bits=7", "lr=-1", "nonfinite=maybe"])
def test_a_value_out_of_range_stops_the_making_of_the_optimizer(make_trainer: MakeTrainer, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text.split("=")[1]):
        make_trainer(optim_args=text).create_optimizer()


def test_optim_args_win_and_one_line_says_so(make_trainer: MakeTrainer, said: list[str]) -> None:
    made = make_trainer(optim_args="betas=(0.9,0.95),lr=1e-4,weight_decay=0.2,codec=none", adam_beta2=0.99, weight_decay=0.1)
    optimizer = made.create_optimizer()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.95)] * 2
    assert optimizer.param_groups[0]["lr"] == 1e-4
    # one line for each argument that changed (adam_beta1 is 0.9 in both), and `args` tells what is in force
    assert [line.split(" of TrainingArguments")[0].split("wins over ")[1] for line in said] == [
        "adam_beta2=0.99",
        "learning_rate=5e-05",
        "weight_decay=0.1",
    ]
    assert (made.args.learning_rate, made.args.adam_beta2, made.args.weight_decay) == (1e-4, 0.95, 0.2)


def test_optim_args_win_over_the_name(make_trainer: MakeTrainer, said: list[str]) -> None:
    assert make_trainer(optim_args="paged=false").create_optimizer().defaults["paged"] is False
    assert said == [f"optim_args sets paged=False, which wins over the name {PAGED}."]


def test_without_a_trainer_optim_args_win_too(make_args: MakeArgs, said: list[str]) -> None:
    kwargs = Trainer.get_optimizer_cls_and_kwargs(make_args(optim_args="betas=(0.9,0.95),weight_decay=0.5"))[1]
    assert kwargs["betas"] == (0.9, 0.95)
    assert kwargs["weight_decay"] == 0.5
    assert len(said) == 2


def test_a_weight_decay_that_the_groups_would_override_is_refused(make_trainer: MakeTrainer) -> None:
    made = make_trainer(optim_args="weight_decay=0.2")
    made.args.weight_decay = 0.7  # as a hyper-parameter search sets it after the Trainer was made
    with pytest.raises(ConfigurationError, match=r"weight_decay=0.2, but the Trainer sets weight_decay=0.7"):
        made.create_optimizer()


def test_a_frozen_model_is_refused_with_the_usual_cause(make_trainer: MakeTrainer) -> None:
    made = make_trainer()
    made.model.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"GPT2LMHeadModel has no trainable parameters.*is_trainable=True"):
        made.train()


def test_training_equals_adamw_torch_closely(make_trainer: MakeTrainer) -> None:
    def losses(optim: str, **changes: Any) -> list[float]:
        made = make_trainer(optim=optim, max_steps=20, learning_rate=2e-2, weight_decay=0.1, adam_beta2=0.95, **changes)
        made.train()
        return [entry["loss"] for entry in made.state.log_history if "loss" in entry]

    reference = torch.tensor(losses("adamw_torch"))
    assert reference[-1] < reference[0] - 1
    paged = torch.tensor(losses(PAGED))
    assert (paged - reference).abs().max() < 0.003
    assert torch.equal(paged, torch.tensor(losses("flashoptim_adamw")))
    for lost in ("lr=1e-2", "betas=(0.9,0.999)", "eps=1e-3", "weight_decay=0"):  # the comparison notices each argument that does not arrive
        assert (torch.tensor(losses(PAGED, optim_args=lost)) - reference).abs().max() > 0.006


def test_the_model_card_tells_what_was_in_force(make_trainer: MakeTrainer) -> None:
    made = make_trainer(optim_args="betas=(0.9,0.95),lr=1e-4,codec=none")
    told = extract_hyperparameters_from_trainer(made)
    assert told["learning_rate"] == 1e-4
    assert "betas=(0.9,0.95) and epsilon=1e-08" in told["optimizer"]
    assert "codec=none" in told["optimizer"]


def test_the_public_way_without_a_name_works(make_trainer: MakeTrainer) -> None:
    made = make_trainer(optim="adamw_torch", optimizer_cls_and_kwargs=(FlashAdamW, {"lr": 1e-3, "paged": True}))
    made.train()
    assert made.optimizer.optimizer.memory_report().num_params == sum(p.numel() for p in made.model.parameters())
