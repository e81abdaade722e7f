"""`flashoptim-hf inspect`: what is in a saved optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def run(
    checkpoint: Annotated[Path, typer.Argument(help="An optimizer.pt, or a checkpoint folder of Trainer or Accelerate.")],
    tensors: Annotated[int, typer.Option(min=0, help="Tensors to show.")] = 20,
) -> None:
    """Show what a saved optimizer state holds: format, codec, steps, bytes, statistics of each tensor, and whether it is complete."""
    from rich.console import Console
    from rich.table import Table

    from .optim import convert, files
    from .paging.plan import format_bytes

    console = Console(width=140, highlight=False)
    file = files.locate(checkpoint)
    state = files.read(file)
    found = convert.recognise(state)
    console.print(f"{file}, {format_bytes(file.stat().st_size)}", soft_wrap=True)
    if checkpoint.is_dir() and files.companions(file):
        others = ", ".join(path.name for path in files.companions(file))
        console.print(f"beside:   {others}; name one of them to look into it", soft_wrap=True)
    console.print(f"complete: {completeness(checkpoint)}", soft_wrap=True)
    console.print(f"format:   {found or convert.unknown(state)}" + format_version(state), soft_wrap=True)
    for number, group in enumerate(state["param_groups"]):
        options = ", ".join(f"{name}={plain(value)}" for name, value in group.items() if name not in ("params", "param_names"))
        console.print(f"group {number}:  {len(group['params'])} parameters; {options}", soft_wrap=True)
    steps = sorted({int(values["step"]) for values in state["state"].values() if isinstance(values, Mapping) and "step" in values})
    shown = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}" if steps else "not counted"
    console.print(f"steps:    {shown}")

    planes = Table("plane", "bytes", "", title="bytes of each plane", title_justify="left")
    for name, count in files.plane_bytes(state).items():
        planes.add_row(name, f"{count:,}", format_bytes(count))
    console.print(planes)
    if found is not None and tensors:
        console.print(tensor_table(state, found.algorithm, tensors))


def completeness(path: Path) -> str:
    """Whether a checkpoint folder is whole, or what is wrong with it."""
    from .trainer import complete

    if not path.is_dir():
        return "a file alone; a folder's mark would tell"
    fault = complete.defect(path)
    if fault is not None:
        return f"no: {fault}"
    return (
        "yes, marked, and every file is as it was saved"
        if (path / complete.MARK).is_file()
        else "not marked; no file is missing or cut off"
    )


def format_version(state: Mapping[str, Any]) -> str:
    """Version, codecs and master bits, for states of this package."""
    groups = [group for group in state["param_groups"] if "codec" in group]
    if not groups:
        return ""
    codecs = ", ".join(dict.fromkeys(str(group["codec"]) for group in groups))
    bits = ", ".join(dict.fromkeys(str(group.get("master_bits")) for group in groups))
    dtypes = ", ".join(dict.fromkeys(str(group.get("weight_dtype", "unknown")) for group in groups))
    return f", format {groups[0].get('flashoptim_format', 1)}; codec {codecs}; master_bits {bits}; weights {dtypes}"


def plain(value: Any) -> str:
    """An option's value in few characters."""
    return f"{value:.6g}" if isinstance(value, float) else str(value.item() if hasattr(value, "item") else value)


def tensor_table(state: dict[str, Any], algorithm: str, limit: int) -> Any:
    """One line for each state of the first parameters."""
    from rich.table import Table

    from .optim.statistics import of_state

    table = Table(title="states, from up to 1,048,576 elements of each tensor", title_justify="left")
    for column in ("parameter", "shape", "step", "state", "smallest", "largest", "zeros", "error of one encode"):
        table.add_column(column, justify="left" if column in ("parameter", "shape", "state") else "right", overflow="fold")
    count = 0
    for group in state["param_groups"]:
        names = group.get("param_names") or [str(key) for key in group["params"]]
        for name, key in zip(names, group["params"], strict=True):
            if not state["state"].get(key):
                continue
            count += 1
            if count > limit:
                continue
            for row in of_state(state, algorithm, key, group):
                error = "" if row.error is None else f"{row.error:.2%}"
                place = (name, "x".join(map(str, row.shape)), str(row.step), row.state)
                table.add_row(*place, f"{row.smallest:.3g}", f"{row.largest:.3g}", f"{row.zeros:.2%}", error)
    if count > limit:
        table.caption = f"and {count - limit} more parameters (--tensors)"
    return table
