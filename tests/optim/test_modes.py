"""Ways of distributing that are refused, and where: FSDP1 for real (`ranks.py`), here by what it and DeepSpeed leave on parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn

from flashoptim_hf.errors import UnsupportedError
from flashoptim_hf.optim import modes
from flashoptim_hf.optim.adamw import FlashAdamW

MARKS = {"_is_flat_param": "fsdp_version: 2", "_fsdp_flattened": "fsdp_version: 2", "ds_id": "DeepSpeed is not supported.*fsdp_version: 2"}


@pytest.mark.parametrize("mark", MARKS)
def test_a_marked_parameter_is_refused_at_construction(mark: str) -> None:
    param = nn.Parameter(torch.ones(8))
    setattr(param, mark, True)
    with pytest.raises(UnsupportedError, match=MARKS[mark]):
        FlashAdamW([param])
    optimizer = FlashAdamW([nn.Parameter(torch.ones(8))])
    with pytest.raises(UnsupportedError):
        optimizer.add_param_group({"params": [param]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("mark", MARKS)
def test_a_parameter_that_is_marked_later_is_refused_before_the_first_step(mark: str) -> None:
    param = nn.Parameter(torch.ones(8))
    optimizer = FlashAdamW([param])
    setattr(param, mark, True)
    param.grad = torch.ones(8)
    with pytest.raises(UnsupportedError, match=MARKS[mark]):
        optimizer.step()
    assert not optimizer.state
    assert bool((param == 1).all())


STATES: dict[str, tuple[dict[str, Any], str | None]] = {
    "none": ({}, None),
    "one process": ({"distributed_type": DistributedType.NO}, None),
    "ddp": ({"distributed_type": DistributedType.MULTI_GPU}, None),
    "deepspeed": ({"distributed_type": DistributedType.DEEPSPEED}, "DeepSpeed"),
    "fsdp1": ({"distributed_type": DistributedType.FSDP, "fsdp_plugin": SimpleNamespace(fsdp_version=1)}, "FSDP1"),
    "fsdp2": ({"distributed_type": DistributedType.FSDP, "fsdp_plugin": SimpleNamespace(fsdp_version=2)}, None),
}


@pytest.mark.parametrize(("state", "refused"), STATES.values(), ids=list(STATES))
def test_what_accelerate_was_told(state: dict[str, Any], refused: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceleratorState, "_shared_state", state)
    if refused is None:
        modes.check_accelerate()
        FlashAdamW([nn.Parameter(torch.ones(8))])
    else:
        with pytest.raises(UnsupportedError, match=f"{refused}.* not supported"):
            FlashAdamW([nn.Parameter(torch.ones(8))])


def test_accelerate_is_asked_again_at_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    param = nn.Parameter(torch.ones(8))
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    optimizer = FlashAdamW([param])
    monkeypatch.setattr(AcceleratorState, "_shared_state", {"distributed_type": DistributedType.DEEPSPEED})
    param.grad = torch.ones(8)
    with pytest.raises(UnsupportedError, match="DeepSpeed"):
        optimizer.step()
