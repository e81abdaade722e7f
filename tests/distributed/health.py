"""Run by `test_health.py`: two forked ranks train with `HealthCallback` under DDP and FSDP2, and write down what became of each check.

python -m tests.distributed.health FOLDER
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from flashoptim_hf import HealthCallback
from flashoptim_hf.bench.reshard_ranks import spawn
from tests.distributed.resume import raw

CAUSES = ("swallowed", "saturated", "codec_error")
KEYS = {f"optim_health_{cause}{end}" for cause in CAUSES for end in ("", "_worst")} | {"optim_health_skipped"}
SKIPPED = {"optim_health_skipped"}
LOOKS = (2, 4, 6, 8, 10)  # where `every=2` has numbers
STEPS = 10


class Rows(nn.Module):
    """A bf16 matrix of 16 rows, of which the first half are small and the others as given, and a vector of one row.

    Sharded over two ranks, the second has the others and nothing of the vector. Without a correction, a weight of 100 swallows a step of
    1e-3.
    """

    def __init__(self, others: float, matrix: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.row = nn.Parameter(0.01 * torch.randn(1, 64, dtype=torch.bfloat16))
        if matrix:
            self.matrix = nn.Parameter(torch.cat([0.01 * torch.randn(8, 64), others * torch.ones(8, 64)]).bfloat16())

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:  # noqa: ARG002  (the Trainer asks for labels)
        weight = self.row + self.matrix if hasattr(self, "matrix") else self.row
        return {"loss": (x.bfloat16() @ weight.T).float().square().mean()}


class Spoil(TrainerCallback):
    """Puts a NaN into the local part of a gradient before every other step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        grad = next(model.parameters()).grad
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        if state.global_step % 2 and local.numel():
            local.view(-1)[0] = float("nan")


def trained(folder: Path, callbacks: Sequence[Any], *, sharded: bool = False, model: nn.Module | None = None) -> tuple[Trainer, list[str]]:
    """A run of `STEPS` steps on both ranks, and the warnings of this one."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    args = TrainingArguments(
        output_dir=str(folder),
        optim="flashoptim_paged_adamw",
        optim_args="master_bits=none",
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=2,
        max_steps=STEPS,
        save_strategy="no",
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        disable_tqdm=True,
        log_level="error",  # of transformers; what this package says is collected below
    )
    generator = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(64, generator=generator), "labels": torch.tensor(0)} for _ in range(32)]
    trainer = Trainer(Rows(others=0.01) if model is None else model, args, train_dataset=rows, callbacks=[*callbacks])
    if sharded:
        # Accelerate has FSDP2 on accelerators only, so it is told that there is one; what it calls from there on works on a CPU too.
        state = trainer.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False)
        state.distributed_type, trainer.is_fsdp_enabled = DistributedType.FSDP, True
    said: list[str] = []
    logging.get_logger("flashoptim_hf.trainer.health").warning = said.append  # type: ignore[method-assign]
    trainer.train()
    assert trainer.args.world_size == dist.get_world_size() == 2
    assert all(isinstance(p, DTensor) for p in trainer.model.parameters()) == sharded
    return trainer, said


def on_rank(number: int, *callbacks: Any) -> Sequence[Any]:
    return callbacks if dist.get_rank() == number else ()


def numbers(trainer: Trainer) -> dict[int, dict[str, float]]:
    """What the logs of this rank have: step to numbers."""
    found = {}
    for entry in trainer.state.log_history:
        health = {key: value for key, value in entry.items() if key.startswith("optim_health")}
        if "loss" in entry and health:
            found[entry["step"]] = health
    return found


def of_both(value: Any) -> list[Any]:
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, value)
    return gathered


def weights(trainer: Trainer) -> list[bytes]:
    return [raw(p) for p in trainer.model.parameters()]


def ddp_ranks_have_the_same_numbers(folder: Path) -> None:
    trainer, said = trained(folder, [HealthCallback(every=2)])
    one, two = of_both(numbers(trainer))
    assert one == two
    assert {step: set(found) for step, found in one.items()} == dict.fromkeys(LOOKS, KEYS)
    assert one[10]["optim_health_codec_error"] > 0
    assert said == []
    without, _ = trained(folder, [])
    assert numbers(without) == {}
    assert weights(trainer) == weights(without)


def of_ddp_ranks_the_one_that_logs_warns(folder: Path) -> None:
    trainer, said = trained(folder, [HealthCallback(every=1)], model=Rows(others=100.0))
    one, two = of_both(said)
    assert len(one) == 1, one
    assert one[0].startswith("Updates are too small to move the weights of matrix: ")
    assert two == []
    assert max(found["optim_health_swallowed_worst"] for found in numbers(trainer).values()) > 0.9


def of_ddp_ranks_one_may_be_without_it(folder: Path) -> None:
    """Nothing waits for the other: a look, its reading and a warning are of one rank alone, and change nothing."""
    without, _ = trained(folder, [], model=Rows(others=100.0))
    for number in range(2):
        trainer, said = trained(folder, on_rank(number, HealthCallback(every=1)), model=Rows(others=100.0))
        assert bool(numbers(trainer)) == (dist.get_rank() == number)
        assert len(said) == (dist.get_rank() == number == 0)
        assert weights(trainer) == weights(without)


def assert_one_says_what_was_skipped(trainer: Any, said: list[str]) -> None:
    """The first rank alone, and the share that was skipped is the same on both."""
    one, two = of_both(said)
    assert [re.match(r"3 of the last \d steps were skipped", line) is not None for line in one] == [True], one
    assert two == []
    shares = of_both([found["optim_health_skipped"] for found in numbers(trainer).values()])
    assert shares[0] == shares[1]
    assert max(shares[0]) >= 0.4


def of_ddp_ranks_the_one_that_logs_says_what_was_skipped(folder: Path) -> None:
    assert_one_says_what_was_skipped(*trained(folder, [Spoil(), HealthCallback(every=6)]))


def fsdp2_ranks_have_the_numbers_of_their_parts(folder: Path) -> None:
    trainer, said = trained(folder, [HealthCallback(every=2)], sharded=True)
    one, two = of_both(numbers(trainer))
    assert {step: set(found) for step, found in one.items()} == {step: set(found) for step, found in two.items()}
    assert {step: set(found) for step, found in one.items()} == dict.fromkeys(LOOKS, KEYS)
    assert all(one[step]["optim_health_codec_error"] != two[step]["optim_health_codec_error"] for step in one)
    assert said == []
    without, _ = trained(folder, [], sharded=True)
    assert weights(trainer) == weights(without)


def of_fsdp2_ranks_the_one_that_finds_something_warns(folder: Path) -> None:
    """The second rank alone holds what is ill, and nobody else could say so."""
    trainer, said = trained(folder, [HealthCallback(every=1)], sharded=True, model=Rows(others=100.0))
    one, two = of_both(said)
    assert one == []
    assert len(two) == 1, two
    assert two[0].startswith("Rank 1 of 2: Updates are too small to move the weights of matrix: ")
    assert [found[2]["optim_health_swallowed_worst"] > 0.9 for found in of_both(numbers(trainer))] == [False, True]


def an_fsdp2_rank_may_hold_nothing(folder: Path) -> None:
    trainer, said = trained(folder, [HealthCallback(every=2)], sharded=True, model=Rows(others=0.01, matrix=False))
    one, two = of_both(numbers(trainer))
    assert {step: set(found) for step, found in one.items()} == dict.fromkeys(LOOKS, KEYS)
    assert {step: set(found) for step, found in two.items()} == dict.fromkeys(one, SKIPPED)
    assert said == []


def fsdp2_ranks_skip_together_and_one_says_so(folder: Path) -> None:
    assert_one_says_what_was_skipped(*trained(folder, [*on_rank(0, Spoil()), HealthCallback(every=6)], sharded=True))


CHECKS: Sequence[Callable[[Path], None]] = (
    ddp_ranks_have_the_same_numbers,
    of_ddp_ranks_the_one_that_logs_warns,
    of_ddp_ranks_one_may_be_without_it,
    of_ddp_ranks_the_one_that_logs_says_what_was_skipped,
    fsdp2_ranks_have_the_numbers_of_their_parts,
    of_fsdp2_ranks_the_one_that_finds_something_warns,
    an_fsdp2_rank_may_hold_nothing,
    fsdp2_ranks_skip_together_and_one_says_so,
)


def rank(folder: Path, port: int) -> None:
    """All checks, one after another; a traceback for each that failed goes into this rank's file."""
    number = str(dist.get_rank())
    os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    outcome: dict[str, str] = {}
    for work in CHECKS:
        name = work.__name__.replace("_", " ")
        try:
            work(folder / "work")
            outcome[name] = "ok"
        except Exception:
            outcome[name] = traceback.format_exc()
        (folder / f"rank{number}.json").write_text(json.dumps(outcome))


def main(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(2, rank, folder, port)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
