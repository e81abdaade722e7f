"""GPU bench: one script for one GPU, correctness first, every section with a time of its own, results saved as they come.

    flashoptim-hf bench gpu --json gpu.json            on a GPU, 8 minutes at most
    flashoptim-hf bench gpu --dry-run                  every section on the CPU, tiny: whether the script runs

kernels    The fused kernel against the readable path: codes, constants, master weights; NaN, `found_inf`, `grad_scale`, lr on the device.
paths      Paged state against resident state over 20 steps: all bits.
resident   Time and bandwidth of a step against a copy on the device, beside torch, flashoptim, bitsandbytes and torchao.
paged      Time of a step against copies to and from the host, beside bitsandbytes' paged optimizers.
qlora      Whole QLoRA steps of a random model of 7B shapes with each optimizer.
full       Whole full fine-tuning steps of a random model of 8B shapes under a cap of 24 GB.

Times are by the device's own events after a warm-up, medians with percentiles; `host_ms_*` is how long Python takes to queue one step while
the device is idle.
Peers that are not installed are left out by name. The exit status says whether all that was checked is right, and no section failed.
"""

from __future__ import annotations

import faulthandler
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from ..errors import ConfigurationError, FlashOptimError
from . import gpu_kernels, gpu_models, gpu_steps
from .fidelity import items
from .gpu_machine import Machine, OutOfTime
from .report import JsonOption, Row, check_outputs, show, table

SECTIONS: dict[str, tuple[Callable[[Machine], None], float]] = {
    "kernels": (gpu_kernels.compare, 0.28),
    "paths": (gpu_kernels.paths, 0.10),
    "resident": (gpu_steps.resident, 0.20),
    "paged": (gpu_steps.paged, 0.12),
    "qlora": (gpu_models.qlora, 0.14),
    "full": (gpu_models.full, 0.16),
}
"""Section to its function and its share of the time; what a section leaves over goes to those after it."""
GRACE_SECONDS = 45.0
"""After the time is over, a step that hangs ends the program this much later; the report is on the disk."""


class GpuBenchError(FlashOptimError):
    """Something that the GPU bench checks is wrong, or a section failed."""


def run(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Every section on the CPU, with a simulated device and tiny shapes.")] = False,
    minutes: Annotated[float, typer.Option(help="Time for everything.")] = 8.0,
    sections: Annotated[str, typer.Option(help="Sections, with commas between, or 'all'.")] = "all",
    json_file: JsonOption = None,
) -> None:
    """Correctness and speed on one GPU, in a few minutes: kernels, paging, whole QLoRA and full fine-tuning steps.

    Prints a table for each section as it ends. The JSON is written after every result, so that it is of use even if the run is cut short.
    """
    check_outputs(json_file, None)
    names = list(SECTIONS) if sections == "all" else items(sections)
    unknown = [name for name in names if name not in SECTIONS]
    if unknown or not names or not minutes > 0:
        raise ConfigurationError(
            f"--sections {sections!r}, --minutes {minutes:g}: give names from {', '.join(SECTIONS)}, or 'all', and a positive time."
        )
    machine = Machine(minutes, dry=dry_run, json_file=json_file)
    if not dry_run:
        faulthandler.dump_traceback_later(60 * minutes + GRACE_SECONDS, exit=True)
    try:
        measure(machine, names)
    finally:
        faulthandler.cancel_dump_traceback_later()
    show(*machine.report.notes)
    if machine.failures:
        raise GpuBenchError(f"{len(machine.failures)} of the checks and sections failed:\n" + "\n".join(machine.failures))


def measure(machine: Machine, names: Sequence[str]) -> None:
    """Run sections, show the rows of each, and go on after one that fails."""
    machine.save()
    shares = [SECTIONS[name][1] for name in names]
    for number, name in enumerate(names):
        machine.limit_section(machine.whole_left() * shares[number] / sum(shares[number:]))
        first = len(machine.report.rows)
        try:
            SECTIONS[name][0](machine)
        except OutOfTime as reason:
            machine.note(f"section {name}: {reason}")
        except Exception as error:
            traceback.print_exc()
            machine.fail(f"section {name} ended with {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
        machine.free()
        machine.add(f"section/{name}", "bench", "seconds_left", machine.whole_left(), "s")
        show(table([_line(row) for row in machine.report.rows[first:]], name, digits=3))


def _line(row: Row) -> Row:
    """The row as a line of its own: what differs from row to row is in one field."""
    return replace(row, case=f"{row.case}: {row.subject}: {row.metric}", subject="value")
