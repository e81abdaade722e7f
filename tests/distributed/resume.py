"""One training, cut in the middle and gone on with from what was saved, in every way of training: what `test_resume.py` and `ranks.py` run.

A case is an optimizer with its options; a mode says how the model is wrapped, and how state is saved and loaded. Every case runs in every
mode.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flashoptim_hf import FlashAdamW, FlashLion, FlashSGD
from flashoptim_hf.errors import UnsupportedError


class Case(NamedTuple):
    """An optimizer class, its options, and the dtype of the weights."""

    optimizer: Any
    options: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16


# A way of stepping that needs no other loop than the one below is one more line here.
CASES = {
    "adamw fp32": Case(FlashAdamW, {}, torch.float32),
    "adamw 24-bit masters": Case(FlashAdamW, {}),
    "adamw 32-bit masters": Case(FlashAdamW, {"master_bits": 32}),
    "adamw auto": Case(FlashAdamW, {"master_bits": "auto"}),
    "adamw fp16": Case(FlashAdamW, {}, torch.float16),
    "adamw softsign": Case(FlashAdamW, {"codec": "softsign"}),
    # the step that is saved is one that curves are learned from
    "adamw learned": Case(FlashAdamW, {"codec": "learned", "learn_interval": 3}),
    "adamw learned simulated device": Case(FlashAdamW, {"codec": "learned", "paged": True, "page_bytes": 1024, "simulate": 3}),
    "adamw none": Case(FlashAdamW, {"codec": "none"}),
    "adamw paged": Case(FlashAdamW, {"paged": True, "page_bytes": 1024}),
    "adamw simulated device": Case(FlashAdamW, {"paged": True, "page_bytes": 1024, "simulate": 3}),
    "lion": Case(FlashLion, {}),
    "lion paged": Case(FlashLion, {"paged": True}, torch.float32),
    "sgd momentum": Case(FlashSGD, {"momentum": 0.9, "nesterov": True}),
    "sgd momentum paged": Case(FlashSGD, {"momentum": 0.9, "paged": True}),
    "sgd": Case(FlashSGD, {}),
    "adamw gradient release": Case(FlashAdamW, {"gradient_release": True, "paged": True, "page_bytes": 1024}),
    "adamw gradient release simulated device": Case(
        FlashAdamW, {"gradient_release": True, "paged": True, "page_bytes": 1024, "simulate": 3, "device_budget_bytes": 0.5}
    ),
}
HALF, STEPS = 3, 7


class Plain:
    """One process, torch alone: a file that `weights_only=True` reads."""

    def __init__(self, case: Case, seed: int) -> None:
        # two of its parameters have one row, so that under FSDP2 one rank has nothing of them; 33 and 5 rows divide unevenly
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5), nn.Tanh(), nn.Linear(5, 1)).to(case.dtype)
        self.dtype = case.dtype
        self.model = self.wrap(model)
        self.optimizer = case.optimizer(self.model.parameters(), lr=1e-2, weight_decay=0.1, **case.options)
        self.ready()

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def ready(self) -> None:
        """The optimizer has been made."""

    def step(self, number: int) -> float:
        """One step on data of this step and this rank; returns the loss."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(10 * number + rank)).to(self.dtype)
        loss = (self.model(x) - x.sum(1, keepdim=True)).float().square().mean()
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def save(self, folder: Path) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / "all.pt")

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / "all.pt", weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def flash(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def everything(self) -> dict[str, Any]:
        """Weights, codes, constants, corrections, step counts and master weights, as bytes, of this rank."""
        optimizer = self.flash()
        optimizer.synchronize()
        found: dict[str, Any] = {}
        for i, p in enumerate(self.model.parameters()):
            masters = optimizer.decoded_state(p)["master_weight"]
            found[f"{i}"] = {"weight": raw(p), "master": raw(masters), **{name: raw(v) for name, v in optimizer.state[p].items()}}
        return found


class Ddp(Plain):
    """`DistributedDataParallel`; only rank 0 saves."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def save(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            super().save(folder)
        dist.barrier()


class Fsdp2(Plain):
    """`fully_shard` on every layer, and `torch.distributed.checkpoint`."""

    def wrap(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (*(layer for layer in model if isinstance(layer, nn.Linear)), model):
            fully_shard(layer, mesh=mesh)
        return model

    def save(self, folder: Path) -> None:
        weights, state = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(folder / "dcp"))

    def load(self, folder: Path) -> None:
        weights, state = get_state_dict(self.model, self.optimizer)
        saved = {"model": weights, "optimizer": state}
        dcp.load(saved, checkpoint_id=str(folder / "dcp"))
        set_state_dict(self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])


class Accelerate(Plain):
    """`Accelerator.prepare`, `save_state` and `load_state`; DDP where there are several ranks."""

    def ready(self) -> None:
        self.accelerator = fresh_accelerator()
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder / "accelerate"))

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder / "accelerate"))


class AccelerateFsdp2(Accelerate):
    """Accelerate's own FSDP2: it swaps the parameters of an optimizer that exists, and saves through `torch.distributed.checkpoint`.

    It offers that on accelerators only, so it is told that there is one; what it calls from there on works on a CPU too.
    """

    state_dict_type = "SHARDED_STATE_DICT"

    def ready(self) -> None:
        self.accelerator = fresh_accelerator()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False, state_dict_type=self.state_dict_type
        )
        state = self.accelerator.state
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        state.distributed_type = DistributedType.FSDP  # preparing sets it back
        assert all(isinstance(p, DTensor) for p in self.model.parameters())


class AccelerateFsdp2Full(AccelerateFsdp2):
    """The same, with one file that rank 0 writes."""

    state_dict_type = "FULL_STATE_DICT"


MODES_OF_ONE = {"plain": Plain, "accelerate": Accelerate}
MODES_OF_RANKS = {
    "ddp": Ddp,
    "fsdp2": Fsdp2,
    "accelerate": Accelerate,
    "accelerate fsdp2": AccelerateFsdp2,
    "accelerate fsdp2 full": AccelerateFsdp2Full,
}


def fresh_accelerator() -> Accelerator:
    """An `Accelerator` on the CPU that knows nothing of earlier ones."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()
    return Accelerator(cpu=True)


def raw(value: Tensor) -> bytes:
    """The bytes of a tensor's local part."""
    value = getattr(value.detach(), "_local_tensor", value.detach())
    return value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def refused(mode: type[Plain], case: Case) -> bool:
    """Whether this way of training excludes the case: hooks see gradients before DDP averages them, and curves are of whole parameters."""
    if case.options.get("codec") == "learned" and issubclass(mode, Fsdp2 | AccelerateFsdp2):
        return True
    several = dist.is_initialized() and dist.get_world_size() > 1
    return bool(case.options.get("gradient_release")) and several and mode in (Ddp, Accelerate)


def check_refused(mode: type[Plain], case: Case) -> None:
    """The first backward, or the first step at the latest, raises on every rank, and no weight has changed."""
    if case.options.get("codec") == "learned":
        with pytest.raises(UnsupportedError, match=r"codec='learned'.*FSDP2.*codec='joint'"):
            mode(case, seed=0).step(0)
        dist.barrier()
        return
    run = mode(case, seed=0)
    before = [raw(p) for p in run.model.parameters()]
    with pytest.raises(UnsupportedError, match=r"DDP.*FSDP2"):
        run.step(0)
    assert [raw(p) for p in run.model.parameters()] == before
    dist.barrier()


def check_resume(mode: type[Plain], case: Case, folder: Path) -> None:
    """Seven steps without a break are three, saving, loading into fresh objects with other weights, and four more: in every bit."""
    if refused(mode, case):
        check_refused(mode, case)
        return
    whole = mode(case, seed=0)
    losses = [whole.step(number) for number in range(STEPS)]
    expected = whole.everything()
    first = mode(case, seed=0)
    assert [first.step(number) for number in range(HALF)] == losses[:HALF]
    first.save(folder)
    second = mode(case, seed=1)
    second.load(folder)
    assert [second.step(number) for number in range(HALF, STEPS)] == losses[HALF:]
    found = second.everything()
    assert found.keys() == expected.keys()
    for i, entry in expected.items():
        assert entry.keys() == found[i].keys()
        different = [name for name in entry if entry[name] != found[i][name]]
        assert not different, f"parameter {i}: {different}"


def check_prepare_with_state(case: Case) -> None:
    """`Accelerator.prepare` takes the state out and in again; a training that goes on after it is as if nothing had happened."""
    whole = Plain(case, seed=0)
    losses = [whole.step(number) for number in range(STEPS)]
    run = Plain(case, seed=0)
    assert [run.step(number) for number in range(HALF)] == losses[:HALF]
    accelerator = fresh_accelerator()
    run.model, run.optimizer = accelerator.prepare(run.model, run.optimizer)
    assert [run.step(number) for number in range(HALF, STEPS)] == losses[HALF:]
    assert run.everything() == whole.everything()


def folders(base: Path) -> Iterator[Path]:
    """Fresh empty folders, the same ones on every rank."""
    number = 0
    while True:
        folder = base / str(number)
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        if dist.is_initialized():
            dist.barrier()
        yield folder
        number += 1
