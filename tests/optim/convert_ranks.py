"""Run by `test_convert_ranks.py` in two processes: states of others into sharded parameters."""

from __future__ import annotations

import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import leave
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

from flashoptim_hf.cli import app
from flashoptim_hf.codecs.base import get_codec
from flashoptim_hf.errors import CheckpointError
from flashoptim_hf.optim import sharded
from flashoptim_hf.optim.adamw import FlashAdamW
from flashoptim_hf.optim.convert import from_ours
from flashoptim_hf.optim.foreign import read_error_bits


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


def check_gathered(codec: str) -> None:
    """A whole state of 16-bit weights, gathered as for FSDP2's FULL_STATE_DICT, goes into files of others and is looked into."""
    model = build().bfloat16()
    optimizer = FlashAdamW(model.parameters(), lr=1e-3, codec=codec, master_bits=32)
    for step in range(3):
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(8, 7).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_optimizer_state_dict(model, optimizer, options=whole)
    expected = {}
    for name, p in model.named_parameters():
        local = {**optimizer.decoded_state(p), "correction": sharded.outgoing(p, get_codec("none", ()), optimizer.state[p])["correction"]}
        like = {"device_mesh": p.device_mesh, "placements": p.placements, "run_check": False, "shape": p.shape, "stride": p.stride()}
        expected[name] = {
            state: value.full_tensor() if hasattr(value, "full_tensor") else DTensor.from_local(value, **like).full_tensor()
            for state, value in local.items()
        }
    if dist.get_rank():
        return
    theirs, _ = from_ours(full, "adamw_torch")
    flash, _ = from_ours(full, "flashoptim")
    assert set(theirs["state"]) == set(expected)
    for name, values in expected.items():
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(theirs["state"][name][state], values[state]), (codec, name, state)
        found, dtype = read_error_bits(flash["state"][name], flash["param_groups"][0]["master_bytewidth"])
        assert (found.dtype, dtype) == (torch.int16, torch.bfloat16)
        assert found.any()
        assert torch.equal(found, values["correction"].contiguous().view(torch.int16).squeeze(-1)), name
    with tempfile.TemporaryDirectory() as folder:
        torch.save(full, f"{folder}/optimizer.bin")
        said = CliRunner().invoke(app, ["inspect", folder])
        assert said.exit_code == 0, said.output
        assert "641x7" in said.output
        done = CliRunner().invoke(app, ["convert", f"{folder}/optimizer.bin", f"{folder}/out.bin", "--to", "bitsandbytes", "--bits", "32"])
        assert done.exit_code == 0, done.output
        assert torch.equal(
            torch.load(f"{folder}/out.bin")["state"]["0.weight"]["__bnb_optimizer_quant_state__"]["state1"], expected["0.weight"]["exp_avg"]
        )


def main() -> None:
    dist.init_process_group("gloo")
    for codec in ("log", "softsign", "none"):
        check_gathered(codec)
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
