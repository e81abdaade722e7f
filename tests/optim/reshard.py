"""Run by `test_sharded.py` under torchrun: save optimizer state from this many ranks, or load what others have saved.

reshard.py save|load FOLDER sharded|plain
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flashoptim_hf.optim.adamw import FlashAdamW

SHAPES = {
    "square": (64, 64),
    "odd": (5, 7),
    "vector": (33,),
    "one_row": (1, 5),
    "lora_a": (8, 192),
    "lora_b": (192, 8),
    "lora_b16": (192, 16),
}
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator).bfloat16()))


def build(kind: str) -> tuple[Model, FlashAdamW]:
    model = Model()
    if kind == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, FlashAdamW(model.parameters(), lr=1e-3, paged=True, page_bytes=4096)


def train(model: Model, optimizer: FlashAdamW, steps: range) -> None:
    for step in steps:
        for i, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(1000 * step + i)
            grad = (torch.randn(p.shape, generator=generator) * torch.linspace(0.1, 3, p.numel()).view(p.shape)).to(p.dtype)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        optimizer.step()


def whole(param: Tensor, part: Tensor) -> Tensor:
    """The full tensor of which `part` is this rank's shard."""
    if not isinstance(param, DTensor):
        return part.clone()
    return DTensor.from_local(part, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()).full_tensor()


def decoded(model: Model, optimizer: FlashAdamW) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, p in model.named_parameters():
        values = {**optimizer.decoded_state(p), "m_code": optimizer.state[p]["exp_avg"], "v_code": optimizer.state[p]["exp_avg_sq"]}
        found[name] = {key: whole(p, value) for key, value in values.items()}
    return found


def save(folder: Path, kind: str) -> None:
    model, optimizer = build(kind)
    assert get_optimizer_state_dict(*build(kind)) is not None  # never stepped
    train(model, optimizer, range(5))
    sharded = get_optimizer_state_dict(model, optimizer)
    full = get_optimizer_state_dict(model, optimizer, options=FULL)
    weights = {name: whole(p, p._local_tensor if isinstance(p, DTensor) else p.detach()) for name, p in model.named_parameters()}
    dcp.save({"optim": sharded}, checkpoint_id=str(folder / "dcp"))
    before = decoded(model, optimizer)
    train(model, optimizer, range(5, 8))
    after = decoded(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(
            {"full": full, "weights": weights, "before": before, "after": after, "ranks": dist.get_world_size()}, folder / "whole.pt"
        )


def load(folder: Path, kind: str) -> None:
    saved = torch.load(folder / "whole.pt", weights_only=True)
    for way in ("dcp", "full", "flat"):
        model, optimizer = build(kind)
        with torch.no_grad():
            for name, p in model.named_parameters():
                value = saved["weights"][name]
                p.copy_(distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value)
        if way == "full":
            set_optimizer_state_dict(model, optimizer, saved["full"], options=FULL)
        else:
            template = {"optim": get_optimizer_state_dict(model, optimizer)}
            dcp.load(template, checkpoint_id=str(folder / "dcp"))
            if way == "flat":
                # in and out once more in the flattened form
                set_optimizer_state_dict(model, optimizer, template["optim"])
                options = StateDictOptions(flatten_optimizer_state_dict=True)
                flattened = get_optimizer_state_dict(model, optimizer, options=options)
                model2, optimizer = build(kind)
                with torch.no_grad():
                    for p, q in zip(model2.parameters(), model.parameters(), strict=True):
                        p.copy_(q)
                model = model2
                set_optimizer_state_dict(model, optimizer, flattened, options=options)
            else:
                set_optimizer_state_dict(model, optimizer, template["optim"])
        now = decoded(model, optimizer)
        same_cut = saved["ranks"] == dist.get_world_size()
        for name in SHAPES:
            old, new = saved["before"][name], now[name]
            codes = max(int((old[key].int() - new[key].int()).abs().max()) for key in ("m_code", "v_code"))
            exact = all(torch.equal(old[key], new[key]) for key in old)
            v, w = old["exp_avg_sq"], new["exp_avg_sq"]
            octaves = float((w[v > 0] / v[v > 0]).log2().abs().max() / 2) if bool((v > 0).any()) else 0.0
            assert torch.equal(old["master_weight"], new["master_weight"]), (way, name)
            if dist.get_rank() == 0:
                print(
                    f"RESULT {way} {saved['ranks']}->{dist.get_world_size()} {name} codes={codes} octaves={octaves:.4f} exact={exact}",
                    flush=True,
                )
            assert exact or not same_cut, (way, name)
            assert octaves <= 24 / 254 * 1.01, (way, name)
        if same_cut:
            train(model, optimizer, range(5, 8))
            for name, values in decoded(model, optimizer).items():
                assert all(torch.equal(values[key], saved["after"][name][key]) for key in values), (way, name)


def leave() -> None:
    """End the process once all ranks are done, without the teardown of gloo's threads, which can abort a process that has succeeded."""
    dist.barrier()
    time.sleep(1)  # until the others have left the barrier too
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
    leave()
