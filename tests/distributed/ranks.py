"""Run by `test_ranks.py`: two forked ranks go through every check here, and write down what became of each.

python -m tests.distributed.ranks FOLDER
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils import logging

from flashoptim_hf import FlashAdamW
from flashoptim_hf.bench.reshard_ranks import spawn
from flashoptim_hf.errors import UnsupportedError
from flashoptim_hf.optim import sharded
from tests.distributed import resume

CHECKS: dict[str, Callable[[Path], None]] = {}


def check(work: Callable[[Path], None]) -> Callable[[Path], None]:
    """Register a check under its name with blanks."""
    CHECKS[work.__name__.replace("_", " ")] = work
    return work


for mode_name, mode in resume.MODES_OF_RANKS.items():
    for case_name, case in resume.CASES.items():
        CHECKS[f"resume {mode_name} {case_name}"] = lambda folder, mode=mode, case=case: resume.check_resume(mode, case, folder)


def same_everywhere(value: torch.Tensor) -> None:
    first = value.detach().clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, value)


@check
def prepared_models_are_ddp(folder: Path) -> None:  # noqa: ARG001
    run = resume.Accelerate(resume.CASES["adamw fp32"], seed=0)
    assert type(run.model) is DistributedDataParallel
    assert run.accelerator.num_processes == 2


@check
def ddp_keeps_ranks_identical(folder: Path) -> None:
    for case in ("adamw learned", "adamw 24-bit masters"):
        ddp_keeps_identical(resume.CASES[case], folder)


def ddp_keeps_identical(case: resume.Case, folder: Path) -> None:
    run = resume.Ddp(case, seed=dist.get_rank())  # DDP broadcasts rank 0's weights
    losses = torch.tensor([run.step(number) for number in range(5)])
    run.save(folder)
    gathered = [torch.empty_like(losses) for _ in range(2)]
    dist.all_gather(gathered, losses)
    assert not torch.equal(*gathered)  # each rank has data of its own
    for p in run.model.parameters():
        same_everywhere(p)
        for name, value in run.optimizer.state[p].items():
            same_everywhere(value.view(torch.uint8) if name != "step" else value)
    assert sorted(path.name for path in folder.iterdir()) == ["all.pt"]


@check
def a_state_with_curves_goes_on_with_joint_where_it_is_sharded(folder: Path) -> None:  # noqa: ARG001
    """Saved by one process right after a look, when its two curves differ, and loaded into shards whose groups begin elsewhere."""
    plain = resume.Plain(resume.Case(FlashAdamW, {"codec": "learned", "learn_interval": 3}, torch.float32), seed=0)
    for number in range(3):
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(number))
        plain.model(x).square().mean().backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    curve = next(iter(plain.optimizer.state.values()))["exp_avg_sq_curve"].view(2, -1)
    assert not torch.equal(curve[0], curve[1])
    run = resume.Fsdp2(resume.Case(FlashAdamW, {"codec": "joint"}, torch.float32), seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        run.optimizer.load_state_dict(plain.optimizer.state_dict())
    for p, q in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        found, whole = run.optimizer.decoded_state(p), plain.optimizer.decoded_state(q)
        rows = -(-p.shape[0] // 2)
        for name in ("exp_avg", "exp_avg_sq"):
            mine = whole[name][dist.get_rank() * rows :][:rows]
            assert found[name].shape == mine.shape
            assert float((found[name] - mine).norm()) <= 0.05 * float(mine.norm()), (name, p.shape)


@check
def sharded_ranks_are_one_process(folder: Path) -> None:  # noqa: ARG001
    """The same batch on both ranks: bit for bit with fp32 states, and within the effect of other group borders with codes."""
    for codec, bound in (("none", 0.0), ("log", 2e-3)):
        case = resume.Case(FlashAdamW, {"codec": codec}, torch.float32)
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(3))
        weights = []
        for mode in (resume.Plain, resume.Fsdp2):
            run = mode(case, seed=0)
            for _ in range(10):
                run.model(x).square().mean().backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
            for p, values in run.optimizer.state.items():
                part = p._local_tensor if isinstance(p, DTensor) else p
                assert values["exp_avg"].numel() == part.numel()
                assert type(values["exp_avg"]) is torch.Tensor
            weights.append([p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in run.model.parameters()])
        for one, two in zip(*weights, strict=True):
            assert float((one - two).abs().max()) <= bound, (codec, one.shape)


@check
def some_ranks_hold_nothing_of_small_parameters(folder: Path) -> None:
    run = resume.Fsdp2(resume.CASES["adamw paged"], seed=0)
    never = get_optimizer_state_dict(run.model, run.optimizer)
    assert {tuple(group) for group in [sorted(g) for g in never["param_groups"]]}
    before = {name for name, values in never["state"].items() if values}
    run.step(0)
    stepped = get_optimizer_state_dict(run.model, run.optimizer)
    keys = [None, None]
    dist.all_gather_object(keys, {name: sorted(values) for name, values in stepped["state"].items()})
    assert keys[0] == keys[1]  # entries exist on the rank with nothing too, so that collectives match
    assert before <= set(keys[0])
    sizes = [p._local_tensor.numel() for p in run.model.parameters()]
    assert (0 in sizes) == (dist.get_rank() == 1)
    report = run.optimizer.memory_report()
    assert report.num_params == sum(sizes)
    assert run.optimizer.planned_bytes()[0] == report.host_bytes
    run.save(folder)
    run.load(folder)
    run.step(1)


@check
def a_state_that_was_never_stepped_is_empty(folder: Path) -> None:  # noqa: ARG001
    run = resume.Fsdp2(resume.CASES["adamw fp32"], seed=0)
    saved = run.optimizer.state_dict()
    assert saved["state"] == {}
    assert saved["param_groups"][0]["lr"] == 1e-2
    run.optimizer.load_state_dict(saved)
    run.step(0)


@check
def an_empty_group_keeps_its_options(folder: Path) -> None:
    def make() -> tuple[nn.Module, FlashAdamW]:
        torch.manual_seed(0)
        model = nn.Linear(7, 5)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        groups = [{"params": list(model.parameters()), "weight_decay": 0.1, "lr": 3e-3}, {"params": [], "weight_decay": 0.0, "lr": 2e-3}]
        return model, FlashAdamW(groups)

    def step(model: nn.Module, optimizer: FlashAdamW) -> None:
        model(torch.ones(2, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    step(model, optimizer)
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=str(folder / "dcp"))
    again, fresh = make()
    with torch.no_grad():
        for p, q in zip(again.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    template = {"optim": get_optimizer_state_dict(again, fresh)}
    dcp.load(template, checkpoint_id=str(folder / "dcp"))
    set_optimizer_state_dict(again, fresh, template["optim"])
    assert [(group["weight_decay"], group["lr"]) for group in fresh.param_groups] == [(0.1, 3e-3), (0.0, 2e-3)]
    step(model, optimizer)
    step(again, fresh)
    for p, q in zip(again.parameters(), model.parameters(), strict=True):
        assert resume.raw(p) == resume.raw(q)


def released_case(**options: Any) -> resume.Case:
    return resume.Case(FlashAdamW, {"paged": True, "page_bytes": 1024, "simulate": 3, **options})


@check
def gradient_release_under_fsdp2_is_step_alone(folder: Path) -> None:  # noqa: ARG001
    """Hooks fire when a gradient has been reduced: the same bits, and nothing is left for `step`."""
    for mode in (resume.Fsdp2, resume.AccelerateFsdp2):
        runs = []
        for released in (False, True):
            run = mode(released_case(gradient_release=released), seed=0)
            losses = [run.step(number) for number in range(3)]
            x = torch.ones(8, 7, dtype=torch.bfloat16)
            run.backward(run.model(x).float().square().mean())
            left = [p.grad is not None for p in run.model.parameters()]
            assert not any(left) if released else all(left)
            run.optimizer.step()
            runs.append((losses, run.everything()))
        assert runs[0] == runs[1]


@check
def gradient_release_counts_alike_on_all_ranks(folder: Path) -> None:  # noqa: ARG001
    """One bad gradient on one rank: parameters are stepped by their shards, and counts, which a checkpoint holds once, agree."""
    run = resume.Fsdp2(released_case(gradient_release=True), seed=0)
    first = next(iter(run.model.parameters()))
    for number in range(4):
        run.step(number)
        if number == 1:
            spoil = dist.get_rank() == 1
            x = torch.ones(8, 7, dtype=torch.bfloat16)
            loss = run.model(x).float().square().mean()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                (loss * (float("nan") if spoil else 1.0)).backward()
                run.optimizer.step()
            run.optimizer.zero_grad()
    steps = torch.tensor([int(values["step"]) for values in run.optimizer.state.values()])
    same_everywhere(steps)
    assert int(run.optimizer.state[first]["step"]) == 4, "the mean over ranks is NaN on all"
    skipped = torch.tensor(run.optimizer.memory_report().skipped_steps)
    same_everywhere(skipped)
    assert skipped == 1


@check
def gradient_release_skips_a_shard_and_counts_the_parameter(folder: Path) -> None:  # noqa: ARG001
    """A gradient whose bad element lies in one rank's shard: that rank leaves it out, the other does not, and both count it."""
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 64), init_device_mesh("cpu", (2,)), [Shard(0)]))
    optimizer = FlashAdamW([weight], gradient_release=True)
    for number in range(3):
        grad = torch.full((8, 64), 0.5)
        if number == 1:
            grad[7, 3] = float("inf")
        before = weight._local_tensor.clone()
        weight.grad = distribute_tensor(grad, weight.device_mesh, [Shard(0)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            optimizer.step()
        assert torch.equal(before, weight._local_tensor) == (number == 1 and dist.get_rank() == 1)
        assert weight.grad is None
    assert int(optimizer.state[weight]["step"]) == 3
    assert optimizer.memory_report().skipped_steps == 1


def refused(sentence: str, work: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(sentence)):
        work()


@check
def fsdp1_is_refused(folder: Path) -> None:  # noqa: ARG001
    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(nn.Linear(8, 8), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        refused("Use FSDP2: fsdp_version: 2", lambda model=model: FlashAdamW(model.parameters()))
    # the optimizer came first: before its first step
    inner = nn.Linear(8, 8)
    optimizer = FlashAdamW(inner.parameters())
    model = FullyShardedDataParallel(inner, use_orig_params=True, device_id=torch.device("cpu"))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    refused("Use FSDP2: fsdp_version: 2", optimizer.step)


@check
def tensor_parallel_is_refused(folder: Path) -> None:  # noqa: ARG001
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), init_device_mesh("cpu", (2,)), [Shard(1)]))
    refused("Shard(dim=1)", lambda: FlashAdamW([weight]))


@check
def what_cannot_be_saved_fails_at_the_first_step(folder: Path) -> None:  # noqa: ARG001
    original = sharded.incoming
    for mode in (resume.Ddp, resume.Fsdp2):
        run = mode(resume.CASES["adamw fp32"], seed=0)
        sharded.incoming = lambda *_: {}["exp_avg"]
        try:
            refused("cannot be saved and loaded", lambda run=run: run.step(0))
        finally:
            sharded.incoming = original
        mode(resume.CASES["adamw fp32"], seed=0).step(0)


@check
def what_cannot_be_gathered_fails_at_the_first_step(folder: Path) -> None:  # noqa: ARG001
    def spoiled(param: DTensor, *rest: Any) -> dict[str, Any]:
        values = original(param, *rest)
        part = values["correction"]._local_tensor.reshape(-1).view(torch.int16).view(param._local_tensor.shape)
        values["correction"] = DTensor.from_local(part, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())
        return values

    original = sharded.outgoing
    sharded.outgoing = spoiled
    try:
        refused("cannot be saved and loaded", lambda: resume.Fsdp2(resume.CASES["adamw 32-bit masters"], seed=0).step(0))
    finally:
        sharded.outgoing = original


@check
def the_trainer_under_ddp(folder: Path) -> None:
    """Resumed equals uninterrupted; ranks stay identical; rank 0 alone saves; memory of the machine is said once."""
    said: list[str] = []
    logger = logging.get_logger("flashoptim_hf.trainer.processes")
    logger.warning = said.append  # type: ignore[method-assign]

    def trained(name: str, **options: Any) -> Trainer:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.1)).bfloat16()
        rows = [(torch.arange(16) * (1 + start % 3) + start) % 64 for start in range(32)]
        args = TrainingArguments(
            output_dir=str(folder / name),
            optim="flashoptim_paged_adamw",
            use_cpu=True,
            report_to="none",
            per_device_train_batch_size=2,
            max_steps=6,
            save_steps=3,
            logging_steps=1,
            learning_rate=1e-2,
            disable_tqdm=True,
        )
        trainer = Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
        trainer.train(**options)
        return trainer

    def losses(trainer: Trainer) -> list[float]:
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    whole = trained("whole")
    assert dist.get_world_size() == whole.args.world_size == 2
    for p in whole.model.parameters():
        same_everywhere(p)
    files = {path.name for path in (folder / "whole" / "checkpoint-3").iterdir()}
    assert {"optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"} <= files
    assert sum(name.startswith("optimizer") for name in files) == 1
    resumed = trained("resumed", resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    assert losses(resumed)[-3:] == losses(whole)[-3:]
    for p, q in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert resume.raw(p) == resume.raw(q)
    lines = [line for line in said if "in each of 2 processes on this machine" in line]
    assert len(lines) == (2 if dist.get_rank() == 0 else 0), said
    host = whole.optimizer.optimizer.memory_report().host_bytes
    assert all(f"{2 * host:,} bytes in all" in line for line in lines)


def rank(folder: Path, port: int) -> None:
    """All checks, one after another; a traceback for each that failed goes into this rank's file."""
    number = str(dist.get_rank())
    os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    outcome: dict[str, str] = {}
    places = resume.folders(folder / "work")
    for name, work in CHECKS.items():
        try:
            work(next(places))
            outcome[name] = "ok"
        except (Exception, pytest.fail.Exception):  # the latter is no Exception
            outcome[name] = traceback.format_exc()
        (folder / f"rank{number}.json").write_text(json.dumps(outcome))


def main(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(2, rank, folder, port)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
