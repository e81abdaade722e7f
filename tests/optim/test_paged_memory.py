"""What saving, loading, accumulation and refused pinning do to paged state: nothing is doubled, decoded, lost or moved."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flashoptim_hf.optim import layout
from flashoptim_hf.optim.adamw import FlashAdamW
from flashoptim_hf.paging.simulated import SimulatedBackend

PAGED: dict[str, Any] = {"paged": True, "page_bytes": 4096, "simulate": 2, "device_budget_bytes": 0.5}


class Allocations(TorchDispatchMode):
    """Bytes of every tensor that torch makes, and the largest floating one."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.floating = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() and result.untyped_storage().data_ptr() not in before:
            self.nbytes += result.numel() * result.itemsize
            if result.is_floating_point():
                self.floating = max(self.floating, result.numel() * result.itemsize)
        return result


def trained(**options: Any) -> tuple[FlashAdamW, list[nn.Parameter]]:
    params = [nn.Parameter(torch.randn(64, 100, generator=torch.Generator().manual_seed(i)).bfloat16()) for i in range(4)]
    optimizer = FlashAdamW(params, **options)
    for step in range(2):
        for param in params:
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.step()
    return optimizer, params


@pytest.mark.parametrize("files", [False, True])
def test_saving_and_loading_hold_one_more_copy_and_decode_nothing(tmp_path: Any, files: bool) -> None:
    optimizer, params = trained(**PAGED, **({"offload_dir": str(tmp_path)} if files else {}))
    report = optimizer.memory_report()
    constants = max(size for name, size in report.planes.items() if name.endswith(("_max", "_step")))
    with Allocations() as saving:
        state = optimizer.state_dict()
    assert report.state_bytes <= saving.nbytes < 1.02 * report.state_bytes
    assert saving.floating <= constants / len(params)
    device = optimizer._layout.engine(torch.device("cpu")).backend
    assert isinstance(device, SimulatedBackend)
    peak = device.memory.peak
    with Allocations() as loading:
        optimizer.load_state_dict(state)
    # its new planes
    assert loading.nbytes < 1.1 * report.host_bytes
    assert device.memory.peak == peak
    after = optimizer.memory_report()
    assert (after.host_bytes, after.host_file_bytes, after.pages) == (report.host_bytes, report.host_file_bytes, report.pages)


@pytest.mark.parametrize("options", [PAGED, {"paged": True}, {}])
def test_gradients_of_micro_batches_are_summed(options: dict[str, Any], as_bits: Any) -> None:
    """One batch of four or four of one: the same norm, the same weights. The gradients are such that their sums are exact."""
    results = []
    for micro in (1, 4):
        optimizer, params = trained(**options)
        optimizer.zero_grad()
        parts = torch.randint(-8, 8, (4, *params[0].shape), generator=torch.Generator().manual_seed(5)).bfloat16()
        for batch in parts.split(4 // micro):
            sum((param * batch.sum(0)).sum() for param in params).backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 1e9)
        optimizer.step()
        results.append(as_bits([norm, list(params), optimizer.state_dict()["state"]]))
    assert results[0] == results[1]


@pytest.mark.parametrize("message", ["CUDA error: out of memory", "operation not supported"])
def test_refused_pinning_is_one_warning_and_a_run_that_saves_and_resumes(
    monkeypatch: pytest.MonkeyPatch, message: str, as_bits: Any
) -> None:
    def refuse(_self: SimulatedBackend, _nbytes: int) -> Tensor:
        raise RuntimeError(message)

    monkeypatch.setattr(SimulatedBackend, "_pin", refuse)
    monkeypatch.setattr(layout, "backend_for", lambda _device, seed: SimulatedBackend(seed, pin=True))
    expected = as_bits(trained()[0].state_dict()["state"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer, params = trained(**PAGED)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file, weights_only=True))
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        file.seek(0)
        optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert as_bits(optimizer.state_dict()["state"]) == expected
    pinning = [str(warning.message) for warning in caught if "stays pageable" in str(warning.message)]
    assert len(pinning) == 1
    assert message in pinning[0]
    report = optimizer.memory_report()
    assert report.pinned is False
    assert report.host_pageable_bytes == report.host_bytes > 0
    assert params[0] in optimizer.state
