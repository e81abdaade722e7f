"""What a damaged, foreign or oversized state leaves behind: a `CheckpointError` that says why, and an optimizer as it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flashoptim_hf.errors import CheckpointError, HostMemoryError
from flashoptim_hf.optim import layout
from flashoptim_hf.optim.adamw import FlashAdamW
from flashoptim_hf.optim.lion import FlashLion
from flashoptim_hf.optim.sgd import FlashSGD

MAKERS: dict[str, Callable[..., Any]] = {"adamw": FlashAdamW, "lion": FlashLion, "sgd": lambda p, **o: FlashSGD(p, momentum=0.9, **o)}
ODD = (None, 3, "x", [1], torch.zeros(3, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int8))


def stepped(make: Callable[..., Any] = FlashAdamW, seed: int = 0, **options: Any) -> Any:
    """Two steps over parameters of mixed dtypes in two groups."""
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.ones(33, 5).bfloat16()), nn.Parameter(torch.ones(70)), nn.Parameter(torch.tensor(1.5).half())]
    optimizer = make([{"params": params[:2], "lr": 1e-2}, {"params": params[2:]}], **options)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_entries_that_nobody_writes(make, as_bits) -> None:
    saved = stepped(make).state_dict()
    target = stepped(make, seed=1)
    before = as_bits([target.state_dict(), target.param_groups])
    for key, values in saved["state"].items():
        for name in values:
            for value in ODD:
                spoiled = copy.deepcopy(saved)
                spoiled["state"][key][name] = value
                with pytest.raises(CheckpointError, match=name):
                    target.load_state_dict(spoiled)
                assert as_bits([target.state_dict(), target.param_groups]) == before, (key, name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -1.0), ("lr", "x"), ("betas", (0.9,)), ("betas", None), ("eps", [1]), ("weight_decay", -1), ("weight_decay", "x")],
)
def test_options_that_cannot_be(name, value, as_bits) -> None:
    saved = stepped().state_dict()
    saved["param_groups"][1][name] = value
    target = stepped(seed=1)
    before = as_bits([target.state_dict(), target.param_groups])
    with pytest.raises(CheckpointError, match=r"group 1 of the state cannot be taken over"):
        target.load_state_dict(saved)
    assert as_bits([target.state_dict(), target.param_groups]) == before


def _surplus(saved: dict[str, Any]) -> None:
    saved["state"][7] = saved["state"][0]


SHAPES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no groups": (lambda saved: saved.pop("param_groups"), "no optimizer's state dict.*but state"),
    "a model's": (lambda saved: saved.update(weight=saved.pop("state")), "no optimizer's state dict"),
    "no parameters": (lambda saved: saved["param_groups"][0].pop("params"), "no list of parameters"),
    "format of another kind": (lambda saved: saved["param_groups"][0].update(flashoptim_format="new"), "no number as its format"),
    "newer format": (
        lambda saved: saved["param_groups"][1].update(flashoptim_format=2),
        "format 2, and this version reads formats up to 1",
    ),
    "an entry too many": (_surplus, "entry for parameter 7, which is in none of its groups"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_what_is_no_state_dict_of_this_optimizer(case, as_bits) -> None:
    spoil, message = SHAPES[case]
    target = stepped(seed=1)
    before = as_bits(target.state_dict())
    saved = stepped().state_dict()
    spoil(saved)
    with pytest.raises(CheckpointError, match=message):
        target.load_state_dict(saved)
    assert as_bits(target.state_dict()) == before


def test_a_hook_may_unpack_the_state_first(as_bits) -> None:
    source, target = stepped(), stepped(seed=1)
    target.register_load_state_dict_pre_hook(lambda _, saved: saved["optimizer"])
    target.load_state_dict({"optimizer": source.state_dict(), "epoch": 3})
    assert as_bits(target.state_dict()) == as_bits(source.state_dict())


def test_without_host_memory_nothing_is_changed(monkeypatch: pytest.MonkeyPatch, as_bits) -> None:
    source = stepped()
    params = [nn.Parameter(p.detach().clone()) for group in source.param_groups for p in group["params"]]
    target = FlashAdamW([{"params": params[:2]}, {"params": params[2:]}], paged=True)
    params[0].grad = torch.ones_like(params[0])
    target.step()
    before = as_bits([target.state_dict(), target.param_groups])

    def refuse(*_: Any, **__: Any) -> None:
        raise HostMemoryError("none left")

    monkeypatch.setattr(layout, "refuse_if_short", refuse)
    with pytest.raises(HostMemoryError):
        target.load_state_dict(source.state_dict())
    assert as_bits([target.state_dict(), target.param_groups]) == before


def test_a_learning_rate_in_a_tensor_is_part_of_the_snapshot() -> None:
    optimizer = stepped(lr=torch.tensor(1e-2))
    rate = optimizer.param_groups[1]["lr"]
    snapshot = optimizer.state_dict()
    rate.fill_(5.0)
    assert float(snapshot["param_groups"][1]["lr"]) == pytest.approx(1e-2)
    optimizer.load_state_dict(snapshot)
    optimizer.param_groups[1]["lr"].fill_(7.0)
    assert float(snapshot["param_groups"][1]["lr"]) == pytest.approx(1e-2)


@pytest.mark.parametrize("paged", [False, True])
def test_pickled_and_deep_copied_optimizers_are_as_large_as_their_state(paged, as_bits) -> None:
    params = [nn.Parameter(torch.ones(64, 10)) for _ in range(60)]
    optimizer = FlashAdamW(params, paged=paged)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    blob = pickle.dumps(optimizer)
    weights = sum(p.numel() * 4 for p in params)
    assert len(blob) < weights + optimizer.memory_report().state_bytes + 4000 * len(params)  # a view would bring the whole pool along
    for other in (pickle.loads(blob), copy.deepcopy(optimizer)):
        assert as_bits(other.state_dict()) == as_bits(optimizer.state_dict())
        assert other.defaults == optimizer.defaults


def test_corrections_of_a_mixed_group_belong_to_its_only_16_bit_dtype(as_bits) -> None:
    """As a norm in fp32 beside bf16 matrices: after a change to fp16 the corrections mean nothing."""
    params = [nn.Parameter(torch.randn(40, 5).bfloat16()), nn.Parameter(torch.randn(40))]
    optimizer = FlashAdamW(params, lr=1e-4)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["weight_dtype"] == "bfloat16+float32"
    assert saved["state"][0]["correction"].any()
    half = [nn.Parameter(params[0].detach().half()), nn.Parameter(params[1].detach().clone())]
    target = FlashAdamW(half)
    with pytest.warns(UserWarning, match="1 parameters have a correction.*start from the weights as they are"):
        target.load_state_dict(saved)
    assert torch.equal(target.decoded_state(half[0])["master_weight"], half[0].float())
    same = FlashAdamW([nn.Parameter(p.detach().clone()) for p in params])
    same.load_state_dict(saved)
    assert as_bits(same.state_dict()) == as_bits(saved)


def test_an_optimizer_without_names_does_not_take_over_those_of_a_state() -> None:
    """It was matched by position; saved under the names of a state in another order, it would be matched wrongly next time."""
    named = FlashAdamW([(name, nn.Parameter(torch.ones(3))) for name in ("a", "b")])
    plain = FlashAdamW([nn.Parameter(torch.ones(3)) for _ in range(2)])
    plain.load_state_dict(named.state_dict())
    assert "param_names" not in plain.state_dict()["param_groups"][0]
    plain.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    named.load_state_dict(FlashAdamW([nn.Parameter(torch.ones(3)) for _ in range(2)]).state_dict())
    assert named.param_groups[0]["param_names"] == ["a", "b"]
