"""A plan as a table, as plain numbers for JSON, and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import UnsupportedError
from ..paging.plan import format_bytes
from .advice import Change, sentence
from .assumptions import CONTEXT, FRAGMENTATION, PROCESS
from .memory import FAILS, FITS, TIGHT, Plan, paging_pays
from .setup import Line, Setup, Span

COLOURS = {FITS: "green", TIGHT: "yellow", FAILS: "red"}


def show(found: Plan, others: Sequence[tuple[str, Plan]], changes: Sequence[Change], console: Console) -> None:
    """Print the plan: parts, phases, other optimizers, traffic, verdict, and what to change."""
    console.print(headline(found), soft_wrap=True)
    parts = Table("part", "GPU", "host", "", title="of each process", title_justify="left")
    for line in found.lines:
        parts.add_row(line.name, _cell(line.device), _cell(line.host), line.note)
    console.print(parts)
    phases = Table("phase", "GPU", "host", "", title="the most at once, of each process", title_justify="left")
    for line in found.phases:
        phases.add_row(line.name, _cell(line.device), _cell(line.host), line.note)
    console.print(phases)
    console.print(_beside(found, others))
    for sentence_ in remarks(found):
        console.print(sentence_, soft_wrap=True)
    console.print()
    for sentence_, word in verdicts(found):
        console.print(sentence_, style=COLOURS.get(word, ""), soft_wrap=True)
    if changes:
        console.print("\nWhat to change, in this order, each on top of those before:", soft_wrap=True)
        for number, change in enumerate(changes, 1):
            console.print(f"{number}. {sentence(change)}", soft_wrap=True, markup=False)
        if not changes[-1].plan.fits:
            console.print("Even so it does not fit by the upper bounds: a smaller model, or more memory.", soft_wrap=True)


def headline(found: Plan) -> str:
    """What is planned, in a line."""
    setup, shape = found.setup, found.shape
    way = "full fine-tuning" if setup.full else f"{'QLoRA' if setup.load_in_4bit else 'LoRA'} r={setup.lora_r}"
    ranks = "" if setup.ranks == 1 else f", {setup.ranks} GPUs ({'FSDP2' if setup.fsdp else 'DDP'}{', offloaded' if setup.offload else ''})"
    size = f"{setup.batch} x {setup.seq_len} tokens" + (f" x {setup.accumulation}" if setup.accumulation > 1 else "")
    checkpointing = "" if setup.checkpointing else "out"
    return (
        f"{shape.source}: {shape.num_params:,} parameters, {way}, {size}, with{checkpointing} gradient checkpointing, "
        f"optim={setup.optimizer}{ranks}"
    )


def remarks(found: Plan) -> list[str]:
    """Sentences about paging and about what the counting cannot see."""
    said = [paging_pays(found)]
    experts = sum(w.nbytes for w in found.shape.weights if not w.linear and len(w.shape) == 3)
    if found.setup.load_in_4bit and experts:
        said.append(
            f"{format_bytes(experts)} of expert weights are no linear layers: bitsandbytes leaves them in 16 bits, PEFT without adapters."
        )
    if found.setup.fsdp and found.setup.load_in_4bit:
        said.append(
            "FSDP2 leaves the constants of 4-bit weights whole. Load the model on the host (device_map={'': 'cpu'}): without a device map "
            f"transformers puts all {format_bytes(found.weights.whole)} on every GPU before they are cut."
        )
    return [text for text in said if text]


def verdicts(found: Plan) -> list[tuple[str, str]]:
    """(sentence, word) for GPU and host, as far as their sizes were given."""
    said = []
    gpu, ram = found.setup.gpu_bytes, found.setup.ram_bytes
    if gpu is not None and found.device_verdict is not None:
        each = "each GPU" if found.setup.ranks > 1 else "GPU"
        said.append((f"{each}: {found.device} of {format_bytes(gpu)}: {found.device_verdict}", found.device_verdict))
    if ram is not None and found.host_verdict is not None:
        said.append((f"host: {found.host_total} of {format_bytes(ram)}: {found.host_verdict}", found.host_verdict))
    return said or [("No verdict: give --gpu and --ram.", "")]


def to_dict(found: Plan, others: Sequence[tuple[str, Plan]], changes: Sequence[Change]) -> dict[str, Any]:
    """Plain numbers: bytes, each as [low, high], equal where the count is exact."""
    return {
        "plan": headline(found),
        "source": found.shape.source,
        "num_params": found.shape.num_params,
        "setup": _setup(found.setup),
        "bytes": {line.name: _line(line) for line in found.lines},
        "phases": {line.name: _line(line) for line in found.phases},
        "peak": {"device": _pair(found.device), "host": _pair(found.host), "host_of_all_processes": _pair(found.host_total)},
        "state": asdict(found.state),
        "traffic": asdict(found.traffic),
        "paging": {"saved_device_bytes": found.saved, "verdict": paging_pays(found)},
        "beside": {name: _other(plan) for name, plan in others},
        "verdict": {"device": found.device_verdict, "host": found.host_verdict, "fits": found.fits},
        "changes": [
            {"what": c.what, "device": _pair(c.plan.device), "host": _pair(c.plan.host_total), "fits": c.plan.fits} for c in changes
        ],
        "assumed": {"context": _pair(CONTEXT), "fragmentation_percent": list(FRAGMENTATION), "process": _pair(PROCESS)},
    }


def draw(found: Plan, others: Sequence[tuple[str, Plan]], file: Path) -> None:
    """Draw the GPU memory of a step with each optimizer: weights, state, and what passes, against what there is.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("--plot needs matplotlib: pip install matplotlib") from error
    gib = 2**30
    plans = [(found.setup.optimizer, found), *others]
    figure = Figure(figsize=(9, 0.7 * len(plans) + 1.8), layout="constrained")
    axes = figure.subplots()
    for row, (_, plan) in enumerate(plans):
        static = (0 if plan.setup.offload else plan.weights.base + plan.weights.trained_bytes) / gib
        state = (plan.state.device + plan.state.staging) / gib
        low, high = plan.device.low / gib, plan.device.high / gib
        widths = {"weights": static, "state": state, "all else, at least": low - static - state, "all else, at most": high - low}
        left = 0.0
        for (label, width), colour in zip(widths.items(), ("#4c72b0", "#dd8452", "#8c8c8c", "#d0d0d0"), strict=True):
            axes.barh(row, width, left=left, color=colour, label=label if row == 0 else None)
            left += width
        axes.text(left, row, f" {low:.1f} to {high:.1f}", va="center", fontsize=8)
    if found.setup.gpu_bytes is not None:
        axes.axvline(found.setup.gpu_bytes / gib, color="#c44e52", linestyle="--", label="GPU")
    axes.set_yticks(range(len(plans)), [name for name, _ in plans])
    axes.invert_yaxis()
    axes.set_xlabel("GiB on the GPU, the most at once")
    axes.margins(x=0.15)
    axes.set_title(headline(found).replace(": ", "\n", 1), fontsize=8)
    figure.legend(fontsize=8, loc="outside lower center", ncols=5, frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def _beside(found: Plan, others: Sequence[tuple[str, Plan]]) -> Table:
    table = Table("optimizer", "state", "bytes/param", "GPU, most", "host, most", "", title="beside other optimizers", title_justify="left")
    for name, plan in [(found.setup.optimizer, found), *others]:
        count = sum(tensor.numel for tensor in plan.weights.trained)
        word = plan.device_verdict or ""
        note = ", ".join(part for part in (f"[{COLOURS[word]}]{word}[/]" if word else "", plan.state.remark) if part)
        table.add_row(name, format_bytes(plan.state.used), f"{plan.state.used / max(count, 1):.3f}", str(plan.device), str(plan.host), note)
    return table


def _cell(span: Span) -> str:
    return str(span) if span.high else ""


def _pair(span: Span) -> list[int]:
    return [span.low, span.high]


def _line(line: Line) -> dict[str, Any]:
    return {"device": _pair(line.device), "host": _pair(line.host), "note": line.note}


def _change(change: Change) -> dict[str, Any]:
    then = change.plan
    return {"what": change.what, "device": _pair(then.device), "host": _pair(then.host_total), "fits": then.fits}


def _other(plan: Plan) -> dict[str, Any]:
    peak = {"device": _pair(plan.device), "host": _pair(plan.host)}
    return {"state": asdict(plan.state), **peak, "verdict": plan.device_verdict}


def _setup(setup: Setup) -> dict[str, Any]:
    values = asdict(setup) | {"dtype": str(setup.dtype).removeprefix("torch."), "options": dict(setup.options)}
    values["options"] = {key: value for key, value in values["options"].items() if isinstance(value, (int, float, str, bool, type(None)))}
    return values
