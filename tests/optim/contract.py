"""What the tests of the algorithms besides AdamW share: parts of the contract that depend on the rule and its states."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flashoptim_hf.optim.base import FlashOptimizer

# name -> options: state in plain memory, paged on the host alone, and paged through the simulated device with pages of a few groups
PLACEMENTS: dict[str, dict[str, Any]] = {
    "resident": {},
    "paged": {"paged": True},
    "simulated": {"paged": True, "page_bytes": 4096, "simulate": 3},
}
# (dtype of the weights, master_bits, kernel): the eager path, and the one that "auto" takes
WEIGHTS = [(torch.float32, 24, "eager"), (torch.bfloat16, 24, "auto"), (torch.bfloat16, 32, "eager"), (torch.float16, 24, "auto")]
SHAPES = ((33, 65), (7,), (1,))

Make = Callable[..., FlashOptimizer]


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params: Sequence[Tensor], seed: int) -> None:
    """Gradients around a mean, whose elements differ in scale by two orders of magnitude."""
    for i, p in enumerate(params):
        fixed, moving = torch.Generator().manual_seed(i), torch.Generator().manual_seed(1000 * seed + i)
        spread = torch.exp(torch.randn(p.shape, generator=fixed)) * 1e-2
        p.grad = ((torch.randn(p.shape, generator=moving) + 0.5 * torch.randn(p.shape, generator=fixed)) * spread).to(p.dtype)


def run(optimizer: FlashOptimizer, params: Sequence[Tensor], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def moved(weights: Sequence[Tensor], reference: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """Error of the total update of all weights, relative to the update."""
    off = sum((w.detach().double() - r.double()).square().sum() for w, r in zip(weights, reference, strict=True))
    way = sum((r.double() - s.double()).square().sum() for r, s in zip(reference, start, strict=True))
    return float((off / way).sqrt())


def masters(optimizer: FlashOptimizer, params: Sequence[Tensor]) -> list[Tensor]:
    return [optimizer.decoded_state(p)["master_weight"] for p in params]


def check_resumes(make: Make, as_bits: Callable[[Any], Any], dtype: torch.dtype) -> None:
    """Save, load into a fresh optimizer, and go on: bit for bit the uninterrupted run."""
    through, first = parameters(dtype), parameters(dtype)
    whole, half = make(through), make(first)
    run(whole, through, range(6))
    run(half, first, range(3))
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    second = [nn.Parameter(p.detach().clone()) for p in first]
    resumed = make(second)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert as_bits(resumed.state_dict()["state"]) == as_bits(half.state_dict()["state"])
    run(resumed, second, range(3, 6))
    assert as_bits(list(second)) == as_bits(list(through))
    assert as_bits(resumed.state_dict()) == as_bits(whole.state_dict())


def check_placements_agree(make: Make, as_bits: Callable[[Any], Any], dtype: torch.dtype) -> None:
    """State in pages, through an adversarial device too, changes no bit."""
    results = []
    for placement in PLACEMENTS.values():
        params = parameters(dtype)
        optimizer = make(params, **placement)
        run(optimizer, params, range(4))
        results.append(as_bits([list(params), optimizer.state_dict()["state"]]))
    assert results[0] == results[1] == results[2]


def check_skips(make: Make, as_bits: Callable[[Any], Any]) -> None:
    """A NaN in one gradient: nothing of the step remains."""
    params = parameters(torch.bfloat16)
    optimizer = make(params)
    run(optimizer, params, range(2))
    before = as_bits([list(params), optimizer.state_dict()])
    set_gradients(params, 2)
    params[1].grad[3] = float("nan")  # type: ignore[index]
    optimizer.step()
    assert as_bits([list(params), optimizer.state_dict()]) == before
    assert optimizer.memory_report().skipped_steps == 1
    run(optimizer, params, range(3, 4))
    assert as_bits(list(params)) != before[0]


def check_late_groups(make: Make, as_bits: Callable[[Any], Any], options: dict[str, Any]) -> None:
    """A group that is added later has its own options, and leaves the state of the others as it is."""
    params, alone = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, single = make(params[:2]), make([alone[2]], **options)
    run(optimizer, params[:2], range(2))
    before = as_bits(optimizer.state_dict()["state"])
    optimizer.add_param_group({"params": [params[2]], **options})
    assert as_bits(optimizer.state_dict()["state"]) == before
    run(optimizer, params, range(2, 4))
    for step in range(2, 4):
        set_gradients(params, step)
        alone[2].grad = params[2].grad
        single.step()
    assert as_bits(params[2]) == as_bits(alone[2])
    assert [int(optimizer.state[p]["step"]) for p in params] == [4, 4, 2]
