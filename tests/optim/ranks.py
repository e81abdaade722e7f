"""Run by `test_ranks.py` in two processes: one gradient on one rank is not finite, and the ranks must go on together."""

from __future__ import annotations

import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from flashoptim_hf.optim.adamw import FlashAdamW


def build(mode: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 5))
    if mode == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def train(mode: str, steps: list[int], spoiled: int | None) -> tuple[list[torch.Tensor], FlashAdamW]:
    model = build(mode)
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, paged=True)
    for step in steps:
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(8, 7)).square().mean().backward()
        if step == spoiled and dist.get_rank() == 1:
            last = next(iter(model.parameters())).grad
            getattr(last, "_local_tensor", last).view(-1)[3] = float("nan")
        if mode == "ddp" and step == spoiled:
            # what a reduction makes of it
            for p in model.parameters():
                dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    return weights, optimizer


def main(mode: str) -> None:
    dist.init_process_group("gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        spoiled, optimizer = train(mode, [0, 1, 2, 3], spoiled=1)
    clean, _ = train(mode, [0, 2, 3], spoiled=None)
    assert optimizer.memory_report().skipped_steps == 1, optimizer.memory_report()
    assert all(torch.equal(a, b) for a, b in zip(spoiled, clean, strict=True))
    for weight in spoiled:
        first = weight.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, weight)
    # state is that of the local shard
    for param, values in optimizer.state.items():
        local = getattr(param, "_local_tensor", param)
        assert values["exp_avg"].shape == local.shape
    print(f"rank {dist.get_rank()} agrees", flush=True)
    leave()


def leave() -> None:
    """End the process once all ranks are done, without the teardown of gloo's threads, which can abort a process that has succeeded."""
    dist.barrier()
    time.sleep(1)  # until the others have left the barrier too
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
