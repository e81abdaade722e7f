"""CPU step: seconds of whole optimizer steps on a CPU, ours and other packages', in turns in one process.

    flashoptim-hf bench cpu-step --params 32e6 --json cpu_step.json

One set of tensors that stand for a model, gradients set once, and `optimizer.step()` timed. Ours looks at every gradient for NaN and
infinity first, as it does by default; the case that ends in `nonfinite=off` does not. Ratios are taken within one round, and then their
median.

adamw/log/WEIGHTS           Ours, compiled: fp32 weights, or bf16 weights with 24- or 32-bit masters.
adamw/log/WEIGHTS/eager     Ours in plain torch, the first step only.
adamw/log/WEIGHTS/1thread   With one thread; `speedup_of_second_core` is its time over that with two threads.
adamw/fp32                  torch's AdamW.
adamw/8bit/fp32             The peers' 8-bit AdamW on fp32 weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any

import torch
import typer

from ..errors import ConfigurationError
from ..optim.adamw import FlashAdamW
from . import adamw_peers
from .report import JsonOption, Panel, PlotOption, Report, Row, check_outputs, cpu_name, draw, show, table
from .timing import Turn, add_load, add_ratio, label, round_robin, shapes

PARTS = (8, 4, 4, 4, 4, 4, 2, 2)
"""Proportions of the tensors: an embedding, and the linear layers of a block."""
MULTIPLE = 4096
"""What sizes are multiples of: torchao quantizes only multiples of its block."""
WEIGHTS: dict[str, dict[str, Any]] = {
    "bf16+24": {"dtype": torch.bfloat16, "master_bits": 24},
    "bf16+32": {"dtype": torch.bfloat16, "master_bits": 32},
    "fp32": {"dtype": torch.float32, "master_bits": None},
}
HEADLINE = "adamw/log/bf16+24"
TORCH_CASE, PEER_CASE = "adamw/fp32", "adamw/8bit/fp32"
FUSED = (TORCH_CASE, "torch_fused")
SLOW = ("bitsandbytes", "torchao")
SLOW_REPEATS, EAGER_REPEATS = 3, 1
MOST_SECONDS = 15.0
"""Time for the steps of one subject; at least one is taken."""
RATIO = "ratio_to_torch_fused_fp32"

Key = tuple[str, str]
"""(case, subject)"""


def run(
    params: Annotated[float, typer.Option(help="Parameters, all tensors together.")] = 32e6,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each subject; slow ones get fewer.")] = 9,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0: as many as torch takes.")] = 0,
    peers: Annotated[bool, typer.Option(help="Time other packages' 8-bit AdamW too, where installed.")] = True,
    json_file: JsonOption = None,
    plot_file: PlotOption = None,
) -> None:
    """Seconds per optimizer step on the CPU, side by side with torch's fused AdamW and other 8-bit optimizers.

    Prints medians with 20th and 80th percentile, and ratios. Run it on a machine that does nothing else.
    """
    check_outputs(json_file, plot_file)
    if not MULTIPLE * len(PARTS) <= params < 2**40:
        raise ConfigurationError(f"--params {params:g} must be at least {MULTIPLE * len(PARTS)}, for example 32e6.")
    report, missing = measure(int(params), repeats, threads or torch.get_num_threads(), peers=peers)
    lines = [label(row) for row in report.rows if row.metric in ("seconds", RATIO)]
    rest = [label(row) for row in report.rows if row.metric not in ("seconds", RATIO)]
    show(
        table(lines, title(params) + ": median (20th to 80th percentile)", across="metric", digits=3),
        table(rest, "Ratios, and how busy the machine was before", across="metric", digits=3),
    )
    if missing:
        show(f"Peers that are not installed and were left out: {', '.join(missing)}.")
    if json_file is not None:
        report.write_json(json_file)
    if plot_file is not None:
        draw([Panel(title(params), "seconds", [row for row in report.rows if row.metric == "seconds"])], plot_file)


def title(params: float) -> str:
    """The heading of the first table."""
    return f"Seconds per step, {params / 1e6:g}M parameters in {len(PARTS)} tensors"


def measure(params: int, repeats: int, threads: int, *, peers: bool = True) -> tuple[Report, list[str]]:
    """Time everything; the report, and the peers' packages that are missing.

    Args:
        params: elements of all tensors together, roughly.
        repeats: rounds.
        threads: threads of every subject, except in the cases that say otherwise.
        peers: whether bitsandbytes and torchao run too.
    """
    report = Report("cpu-step", f"{cpu_name()}, {threads} threads")
    add_load(report)
    subjects, missing = adamw_peers.available(SLOW if peers else ())
    before = torch.get_num_threads()
    try:
        turns = build(Tensors(params), repeats, threads, subjects)
        round_robin(list(turns.values()))
    finally:
        torch.set_num_threads(before)
    fill(report, turns, threads)
    return report, missing


class Tensors:
    """Initial weights and gradients. Gradients are only read by a step, so that all subjects of one dtype share them.

    Args:
        params: elements of all tensors together, roughly; see `shapes`.
    """

    def __init__(self, params: int) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = shapes(params, PARTS, MULTIPLE)
        self._weights = [torch.randn(size, generator=generator) * 0.02 for size in sizes]
        grads = [torch.randn(size, generator=generator) * 1e-3 for size in sizes]
        self._grads = {torch.float32: grads, torch.bfloat16: [grad.bfloat16() for grad in grads]}

    def parameters(self, dtype: torch.dtype) -> list[torch.nn.Parameter]:
        """New parameters of that dtype, with gradients."""
        made = [torch.nn.Parameter(weight.to(dtype, copy=True)) for weight in self._weights]
        for param, grad in zip(made, self._grads[dtype], strict=True):
            param.grad = grad
        return made


def build(tensors: Tensors, repeats: int, threads: int, peers: list[str]) -> dict[Key, Turn]:
    """Every subject with its own parameters and optimizer."""
    turns: dict[Key, Turn] = {}

    def ours(case: str, weights: str, count: int, with_threads: int = threads, **options: Any) -> None:
        made = tensors.parameters(WEIGHTS[weights]["dtype"])
        optimizer = FlashAdamW(made, master_bits=WEIGHTS[weights]["master_bits"], **{"kernel": "cpu", **options})
        warm_up = options.get("kernel") != "eager"  # so slow that making state does not show
        turns[case, "ours"] = Turn(optimizer.step, count, around=_threads(with_threads), warm_up=warm_up, most_seconds=MOST_SECONDS)

    def peer(case: str, subject: str, count: int) -> None:
        optimizer = adamw_peers.PEERS[subject](tensors.parameters(torch.float32))
        around = _threads(threads, adamw_peers.stance(subject, torch.device("cpu")))
        turns[case, subject] = Turn(optimizer.step, count, around=around, most_seconds=MOST_SECONDS)

    peer(*FUSED, repeats)
    for name in WEIGHTS:
        ours(f"adamw/log/{name}", name, repeats)
    peer(TORCH_CASE, "torch_foreach", repeats)
    ours(f"{HEADLINE}/nonfinite=off", "bf16+24", repeats, nonfinite="off")
    for count in _thread_counts(threads):
        ours(f"{HEADLINE}/{count}thread", "bf16+24", repeats, with_threads=count)
    for subject in peers:
        peer(PEER_CASE, subject, min(repeats, SLOW_REPEATS))
    ours(f"{HEADLINE}/eager", "bf16+24", EAGER_REPEATS, kernel="eager")
    return turns


def _thread_counts(threads: int) -> list[int]:
    """Thread counts to run besides `threads`, so that one and two are there; none where there is no second core."""
    return [count for count in (1, 2) if count != threads] if cores() > 1 else []


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads(count: int, inner: Callable[[], AbstractContextManager[object]] = nullcontext) -> Callable[[], AbstractContextManager[object]]:
    """A context with that many threads of torch, which our compiled path takes too."""

    @contextmanager
    def around() -> Iterator[None]:
        torch.set_num_threads(count)
        with inner():
            yield

    return around


def fill(report: Report, turns: dict[Key, Turn], threads: int) -> None:
    """The rows: seconds of all, then what they are to each other."""
    for (case, subject), turn in turns.items():
        report.rows.append(Row.timing(case, subject, "seconds", turn.seconds, "s"))
    for (case, subject), turn in turns.items():
        if (case, subject) != FUSED:
            add_ratio(report, case, subject, RATIO, turn, turns[FUSED])
    for case in (f"adamw/log/{name}" for name in WEIGHTS):
        for peer in SLOW:
            if (PEER_CASE, peer) in turns:
                add_ratio(report, case, "ours", f"speedup_over_{peer}", turns[PEER_CASE, peer], turns[case, "ours"])
    by_count = {count: turns.get((f"{HEADLINE}/{count}thread", "ours")) for count in (1, 2)} | {threads: turns[HEADLINE, "ours"]}
    one, two = by_count[1], by_count[2]
    if one is not None and two is not None:
        add_ratio(report, HEADLINE, "ours", "speedup_of_second_core", one, two)
