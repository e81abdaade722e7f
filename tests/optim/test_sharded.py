"""State saved from some ranks and loaded on others, through `torch.distributed.checkpoint`: sharded, whole, and flattened.

The ranks are those of `flashoptim-hf bench reshard`, which find out; here it is judged. The same cut: every bit, also of what follows.
Another cut: exact where groups lie as before, else each value within one code of what it was.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from flashoptim_hf.bench import reshard, reshard_ranks
from flashoptim_hf.errors import UnsupportedError
from flashoptim_hf.optim import sharded
from flashoptim_hf.optim.adamw import FlashAdamW

CASES = ("2-2", "2-1", "2-1f", "2-3", "2-4", "1-2", "4-2")
# Rows of 64, 16 or 8 elements in multiples of a group keep their groups; so does what lies in one group wherever it is cut.
KEEPS_GROUPS = {"square", "one_row", "lora_a_r8", "lora_b_r8", "lora_a_r16", "lora_b_r16"}
EVERYWHERE = {("1-2", "odd"), ("1-2", "vector"), ("2-2", "odd"), ("2-2", "vector")}


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {}
    for result in reshard.measure(CASES):
        target = "1f" if (result["to"], result["kind"]) == (1, "sharded") else str(result["to"])
        results.setdefault(f"{result['from']}-{target}", []).append(result)
    return results


@pytest.mark.parametrize("case", CASES)
def test_reshard(case: str, found: dict[str, list[dict[str, Any]]]) -> None:
    results = found[case]
    assert {(result["way"], result["name"]) for result in results} == {
        (way, name) for way in reshard_ranks.WAYS for name in reshard_ranks.SHAPES
    }
    for result in results:
        assert result["master"], result
        assert result["v_steps"] <= 1.001, result
        assert result["m_steps"] <= 1.001, result
        if result["name"] in KEEPS_GROUPS or (case, result["name"]) in EVERYWHERE:
            assert result["exact"], result
        if case == "2-2":
            assert result["continues"] is True
    # what is stored anew is said, and nothing else is
    for way in reshard_ranks.WAYS:
        here = [result for result in results if result["way"] == way]
        assert here[0]["told"] == any(not result["exact"] for result in here)


def test_what_is_judged_can_differ(found: dict[str, list[dict[str, Any]]]) -> None:
    """(5, 7) and (33,) on fewer or more ranks: groups do move, and the differences are not all 0."""
    for case in ("2-1", "2-3", "2-4", "4-2"):
        moved = [result for result in found[case] if result["name"] not in KEEPS_GROUPS]
        assert any(not result["exact"] and result["codes"] > 0 and result["v_steps"] > 0 for result in moved)


def stepped(count: int = 2) -> FlashAdamW:
    params = [nn.Parameter(torch.ones(40, dtype=torch.bfloat16)) for _ in range(count)]
    optimizer = FlashAdamW(params)
    for p in params:
        p.grad = torch.randn(40).bfloat16()
    optimizer.step()
    return optimizer


BREAKAGES = {
    "a constant is lost on the way out": (
        "outgoing",
        lambda values: {**values, "exp_avg_max": values["exp_avg_max"] * 2},
        "exp_avg_max came",
    ),
    "a plane of another dtype": (
        "outgoing",
        lambda values: {**values, "exp_avg": values["exp_avg"].short()},
        "exp_avg came back different",
    ),
    "what cannot be saved": ("incoming", lambda _: 1 / 0, "cannot be saved and loaded: ZeroDivisionError"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_self_check_at_the_first_step_finds(breakage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs where there are several ranks, whatever they do with their parameters."""
    name, spoil, sentence = BREAKAGES[breakage]
    original = getattr(sharded, name)
    if name == "outgoing":
        monkeypatch.setattr(sharded, name, lambda param, codec, values: spoil(original(param, codec, values)))
    else:
        monkeypatch.setattr(sharded, name, lambda *_: spoil(None))
    stepped()  # one process alone is not checked
    monkeypatch.setattr(sharded, "several_ranks", lambda: True)
    with pytest.raises(UnsupportedError, match=rf"shape \(40,\) .*not sharded.*{sentence}.*Train with DDP"):
        stepped()


def test_the_self_check_passes_and_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = sharded.self_check
    monkeypatch.setattr(sharded, "self_check", lambda records: (calls.append(len(records)), original(records)))
    monkeypatch.setattr(sharded, "several_ranks", lambda: True)
    optimizer = stepped()
    optimizer.step()
    assert calls == [2]


def test_a_placement_that_cannot_be_described_is_refused() -> None:
    class Cut:
        """A DTensor's parts that the check reads."""

        shape = (8, 8)
        placements = (Shard(1),)
        _local_tensor = torch.ones(8, 4)

    with pytest.raises(UnsupportedError, match=r"shape \(8, 8\).*Shard\(dim=1\).*Use fully_shard"):
        sharded.check(Cut())  # type: ignore[arg-type]


@pytest.mark.parametrize("paged", [False, True])
def test_a_parameter_without_elements(paged: bool) -> None:
    """What a rank holds of a parameter with fewer rows than ranks: nothing to do, and an entry in the state all the same."""
    params = [nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.empty(0, 5, dtype=torch.bfloat16))]
    optimizer = FlashAdamW(params, paged=paged)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = optimizer.state_dict()
    assert [values["exp_avg"].shape for values in saved["state"].values()] == [(0,), (3,), (0, 5)]
    fresh = FlashAdamW([nn.Parameter(p.detach().clone()) for p in params], paged=paged)
    fresh.load_state_dict(saved)
    assert [int(values["step"]) for values in fresh.state_dict()["state"].values()] == [1, 1, 1]
    assert optimizer.memory_report().num_params == 3
    assert optimizer.planned_bytes()[0] == optimizer.memory_report().host_bytes
    alone = FlashAdamW(params[:1], paged=paged)
    alone.step()
    assert alone.memory_report().state_bytes == 0


def test_parameters_on_a_device_that_is_not_served_are_named() -> None:
    param = nn.Parameter(torch.ones(3, device="meta"))
    param.grad = torch.ones(3, device="meta")
    with pytest.raises(UnsupportedError, match=r"parameters on meta are not served.*Move the model"):
        FlashAdamW([param]).step()
