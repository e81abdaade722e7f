"""A model of many small tensors and a few large ones: bytes, pages, and what a step allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashoptim_hf import FlashAdamW
from flashoptim_hf.kernels import cpu
from flashoptim_hf.optim import layout
from flashoptim_hf.paging.streams import HostBackend

SMALL, LARGE = [576] * 300, [1_000_000] * 3
PAGE_BYTES = 1 << 20


class Allocations(TorchDispatchMode):
    """The largest tensor that any operation makes, in bytes; views are not made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(made, Tensor) and not func.is_view and func._schema.name[-1] != "_":
                self.largest = max(self.largest, made.numel() * made.itemsize)
        return out


def params() -> list[Tensor]:
    gen = torch.Generator().manual_seed(0)
    made = [(torch.randn(numel, generator=gen) * 0.02).bfloat16().requires_grad_() for numel in SMALL + LARGE]
    for p in made:
        p.grad = (torch.randn(p.numel(), generator=gen) * 1e-3).bfloat16()
    return made


@pytest.mark.parametrize("paged", [True, False])
def test_state_takes_two_bytes_and_scales_in_few_pages(paged: bool) -> None:
    ours = params()
    optimizer = FlashAdamW(ours, lr=1e-3, paged=paged, page_bytes=PAGE_BYTES)
    optimizer.step()
    report = optimizer.memory_report()
    assert report.moment_bytes / report.num_params == pytest.approx(2 + 10 / 64, rel=1e-3)
    assert report.host_bytes < 1.01 * report.state_bytes
    # one launch for each page, however many tensors share it
    assert report.launches == report.pages == -(-report.host_bytes // PAGE_BYTES)
    assert report.pages < 15 < len(ours)


@pytest.mark.parametrize("kernel", ["cpu", "eager"])
def test_a_step_makes_no_fp32_copy_of_a_large_parameter(kernel: str) -> None:
    """Neither of a weight nor of a moment: what a step needs beside the state is bounded by a page, or less."""
    if kernel == "cpu" and cpu.library() is None:
        pytest.skip("the compiled CPU path is not built")
    optimizer = FlashAdamW(params(), lr=1e-3, kernel=kernel)
    optimizer.step()
    with Allocations() as seen:
        optimizer.step()
    assert seen.largest < LARGE[0] * 4


def test_what_the_last_test_looks_for_would_be_found() -> None:
    large = params()[-1]
    with Allocations() as seen:
        large.detach().float()
    assert seen.largest == LARGE[0] * 4


def test_parameters_of_two_devices_have_streams_and_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept by device is made for the device of the tensors, not for the first one."""
    asked: list[torch.device] = []

    def backend_for(device: torch.device, simulate: int | None) -> Any:  # noqa: ARG001
        asked.append(device)
        return HostBackend(device)

    monkeypatch.setattr(layout, "backend_for", backend_for)
    pools = FlashAdamW(params())._layout
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    engines = [pools.engine(device) for device in (first, second, first)]
    assert asked == [first, second]
    assert engines[0] is engines[2] is not engines[1]
    assert [engine.backend.device for engine in engines] == [first, second, first]
