"""Run by `test_convert_ranks.py` in two processes: states of others into sharded parameters."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import leave
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flashoptim_hf.errors import CheckpointError
from flashoptim_hf.optim.adamw import FlashAdamW
from flashoptim_hf.optim.convert import from_ours


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 641), nn.ReLU(), nn.Linear(641, 5))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def check(optimizer: FlashAdamW, states: dict[int, dict[str, torch.Tensor]], exact: bool) -> None:
    """`states`: sharded tensors, by the parameter's number."""
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        found = optimizer.decoded_state(p)
        for name in ("exp_avg", "exp_avg_sq"):
            shard = states[i][name].to_local()
            assert found[name].shape == shard.shape
            if exact:
                assert torch.equal(found[name], shard), name
            else:
                assert (found[name] - shard).norm() <= 0.03 * shard.norm(), name


def main() -> None:
    dist.init_process_group("gloo")
    model = build()
    other = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(8, 7)).square().mean().backward()
        other.step()
        other.zero_grad()
    sharded = other.state_dict()
    whole = {
        "state": {
            i: {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in values.items()} for i, values in sharded["state"].items()
        },
        "param_groups": sharded["param_groups"],
    }
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for saved in (sharded, whole):
            for codec in ("none", "log"):
                optimizer = FlashAdamW(model.parameters(), codec=codec, paged=True)
                optimizer.load_state_dict(saved)
                assert optimizer.param_groups[0]["lr"] == 1e-2
                check(optimizer, sharded["state"], exact=codec == "none")
    assert sum("one of torch AdamW" in str(one.message) for one in said) == 4

    # a whole 8-bit state, as one process has it, is cut as the parameters are
    alone = [nn.Parameter(p.full_tensor()) for p in model.parameters()]
    single = FlashAdamW(alone, codec="none")
    warnings.simplefilter("ignore")
    single.load_state_dict(whole)
    small, _ = from_ours(single.state_dict(), "bitsandbytes")
    assert small["state"][0]["__bnb_optimizer_quant_state__"]["state1"].dtype == torch.uint8
    optimizer.load_state_dict(small)
    check(optimizer, sharded["state"], exact=False)

    # and a sharded state of ours is refused by what needs whole tensors
    with pytest.raises(CheckpointError, match="full_state_dict=True"):
        from_ours(optimizer.state_dict(), "adamw_torch")
    print(f"rank {dist.get_rank()} agrees", flush=True)
    leave()


if __name__ == "__main__":
    main()
