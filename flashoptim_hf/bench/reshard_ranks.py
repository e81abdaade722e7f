"""The ranks of `bench reshard`, and of the tests of sharded state: some save optimizer state, others load it.

    python -m flashoptim_hf.bench.reshard_ranks FOLDER 2-1 2-4 ...

`2-4`: two ranks save, four load. More than one rank are FSDP2 (`fully_shard`), 1 is a plain model in one process, and 1f one process with
`fully_shard`. It finds out and does not judge: for each parameter and each way of loading it prints a line of JSON after `RESULT`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # `fully_shard` and `step` load it anyway; here once, before the processes fork
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import ConfigurationError
from ..optim.adamw import FlashAdamW

SHAPES = {
    "square": (64, 64),
    "odd": (5, 7),
    "vector": (33,),
    "one_row": (1, 5),
    "lora_a_r8": (8, 192),
    "lora_b_r8": (192, 8),
    "lora_a_r16": (16, 192),
    "lora_b_r16": (192, 16),
}
WAYS = ("dcp", "full", "flat")
"""DCP's sharded form, the whole state on each rank, and the flattened form."""

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


MASTER_BITS = {"lora_a_r16": 32, "lora_b_r16": 32, "odd": 32}
"""Shapes whose corrections take two bytes; the others take one."""


class Model(nn.Module):
    """A bf16 parameter of each shape."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator).bfloat16()))


def build(kind: str) -> tuple[Model, FlashAdamW]:
    """A fresh model, sharded over all ranks or plain, and its optimizer with small pages."""
    model = Model()
    if kind == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    groups = [{"params": [p], "master_bits": MASTER_BITS.get(name, 24)} for name, p in model.named_parameters()]
    return model, FlashAdamW(groups, lr=1e-3, paged=True, page_bytes=4096)


def train(model: Model, optimizer: FlashAdamW, steps: range) -> None:
    """Steps with made-up gradients that do not depend on the number of ranks."""
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
    full: Tensor = DTensor.from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    ).full_tensor()
    return full


def decoded(model: Model, optimizer: FlashAdamW) -> dict[str, dict[str, Tensor]]:
    """What the optimizer knows of each parameter, gathered from all ranks: decoded, in codes, and what a code is worth at each element."""
    found = {}
    for name, p in model.named_parameters():
        values, state = optimizer.decoded_state(p), optimizer.state[p]
        values |= {"m_code": state["exp_avg"], "v_code": state["exp_avg_sq"]}
        # of the codec `log`: octaves of sqrt(v), and a share of the decoded sqrt(v)
        values["v_step"] = _spread(state["exp_avg_sq_step"], state["exp_avg"])
        values["m_step"] = _spread(state["exp_avg_max"].float(), state["exp_avg"]) / 127 * values["exp_avg_sq"].sqrt()
        found[name] = {key: whole(p, value) for key, value in values.items()}
    return found


def _spread(constants: Tensor, like: Tensor) -> Tensor:
    """A group's constant at each of its elements."""
    return constants.repeat_interleave(64)[: like.numel()].view(like.shape)


def save(folder: Path, kind: str) -> None:
    """Five steps, save in each way; three more steps for comparison. `whole.pt` holds what was there."""
    model, optimizer = build(kind)
    never = get_optimizer_state_dict(*build(kind))  # of an optimizer that was never stepped
    assert never is not None
    train(model, optimizer, range(5))
    sharded = get_optimizer_state_dict(model, optimizer)
    full = get_optimizer_state_dict(model, optimizer, options=_FULL)
    weights = {name: whole(p, p._local_tensor if isinstance(p, DTensor) else p.detach()) for name, p in model.named_parameters()}
    dcp.save({"optim": sharded}, checkpoint_id=str(folder / "dcp"))
    before = decoded(model, optimizer)
    train(model, optimizer, range(5, 8))
    after = decoded(model, optimizer)
    if dist.get_rank() == 0:
        saved = {"full": full, "weights": weights, "before": before, "after": after, "ranks": dist.get_world_size()}
        torch.save(saved, folder / "whole.pt")


def restore(way: str, kind: str, folder: Path, saved: dict[str, Any]) -> tuple[Model, FlashAdamW]:
    """A fresh model and optimizer with the saved weights and state, loaded in one of `WAYS`."""
    model, optimizer = _with_weights(kind, saved)
    if way == "full":
        set_optimizer_state_dict(model, optimizer, saved["full"], options=_FULL)
        return model, optimizer
    template = {"optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(template, checkpoint_id=str(folder / "dcp"))
    set_optimizer_state_dict(model, optimizer, template["optim"])
    if way == "flat":
        flattened = get_optimizer_state_dict(model, optimizer, options=_FLAT)
        model, optimizer = _with_weights(kind, saved)
        set_optimizer_state_dict(model, optimizer, flattened, options=_FLAT)
    return model, optimizer


def _with_weights(kind: str, saved: dict[str, Any]) -> tuple[Model, FlashAdamW]:
    model, optimizer = build(kind)
    with torch.no_grad():
        for name, p in model.named_parameters():
            value = saved["weights"][name]
            p.copy_(distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value)
    return model, optimizer


def compare(old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Any]:
    """Differences between two of `decoded`'s entries.

    Returns:
        codes: largest difference of a code of either moment; v_steps, m_steps: of sqrt(v) and of m, in what one code is worth now; master:
        whether master weights are equal in every bit; exact: whether everything is.
    """
    v, w = old["exp_avg_sq"], new["exp_avg_sq"]
    lives = v > 0
    apart = (old["exp_avg"] - new["exp_avg"]).abs()
    return {
        "codes": max(int((old[key].int() - new[key].int()).abs().max()) for key in ("m_code", "v_code")),
        "v_steps": float(((w[lives] / v[lives]).log2().abs() / 2 / new["v_step"][lives]).max()) if bool(lives.any()) else 0.0,
        "m_steps": float((apart / new["m_step"])[apart > 0].max()) if bool(apart.any()) else 0.0,
        "master": torch.equal(old["master_weight"], new["master_weight"]),
        "exact": all(torch.equal(old[key], new[key]) for key in old),
    }


def load(folder: Path, kind: str) -> None:
    """Load in each way and print what has changed; where the number of ranks is the same, also whether three more steps agree."""
    saved = torch.load(folder / "whole.pt", weights_only=True)
    for way in WAYS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, optimizer = restore(way, kind, folder, saved)
        told = torch.tensor(float(any("groups begin elsewhere" in str(warning.message) for warning in caught)))
        dist.all_reduce(told)
        now = decoded(model, optimizer)
        later = None
        if saved["ranks"] == dist.get_world_size():
            train(model, optimizer, range(5, 8))
            later = decoded(model, optimizer)
        for name, values in now.items():
            result = {"way": way, "name": name, "from": saved["ranks"], "to": dist.get_world_size(), "kind": kind, "told": bool(told)}
            result |= compare(saved["before"][name], values)
            result["continues"] = None if later is None else compare(saved["after"][name], later[name])["exact"]
            if dist.get_rank() == 0:
                print("RESULT " + json.dumps(result), flush=True)


def spawn(ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(*arguments)` in so many processes with a gloo group, and wait. They are forks: everything is imported once.

    Raises:
        SystemExit: one of them failed; it has said why.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_rank, args=(rank, ranks, Path(folder), work, arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"ranks ended with {[process.exitcode for process in processes]}")


def _rank(rank: int, ranks: int, folder: Path, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    work(*arguments)
    leave()


def leave() -> None:
    """End the process once all ranks are done, without the teardown of gloo's threads, which can abort a process that has succeeded."""
    dist.barrier()
    time.sleep(1)  # until the others have left the barrier too
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def parse(case: str) -> tuple[tuple[int, str], tuple[int, str]]:
    """`"2-1"` as ((2, "sharded"), (1, "plain")).

    Raises:
        ConfigurationError: it is not two numbers of ranks.
    """
    sides = re.fullmatch(r"([1-9]\d*|1f)-([1-9]\d*|1f)", case.strip())
    if sides is None:
        raise ConfigurationError(f"case {case!r} must be two numbers of ranks with '-' between, for example 2-4, 2-1 or 2-1f.")
    saves, loads = ((int(side.rstrip("f")), "plain" if side == "1" else "sharded") for side in sides.groups())
    return saves, loads


def main(folder: Path, cases: list[str]) -> None:
    """Run every case; what a case saves, those after it that save alike use too."""
    for case in cases:
        (savers, saved_as), (loaders, loaded_as) = parse(case)
        place = folder / f"{savers}-{saved_as}"
        if not place.exists():
            place.mkdir(parents=True)
            spawn(savers, save, place, saved_as)
        spawn(loaders, load, place, loaded_as)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
