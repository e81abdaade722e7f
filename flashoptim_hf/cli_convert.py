"""`flashoptim-hf convert`: a saved optimizer state as another optimizer loads it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import CheckpointError, ConfigurationError

TO = ("adamw_torch", "sgd", "bitsandbytes", "flashoptim", "flashoptim_hf")
CODECS = {"adamw": "log", "lion": "square", "sgd": "square"}
"""What each of our optimizers stores if it is told nothing."""


def run(
    source: Annotated[Path, typer.Argument(help="An optimizer.pt, or a checkpoint folder of Trainer or Accelerate.")],
    target: Annotated[Path, typer.Argument(help="Where the result goes: a file or a folder, as SOURCE is. It must not exist.")],
    to: Annotated[str, typer.Option(help=f"Who shall load it: {', '.join(TO)}.")],
    codec: Annotated[
        str | None, typer.Option(help="With --to flashoptim_hf: how states are stored. Default log, for Lion and SGD square.")
    ] = None,
    bits: Annotated[int, typer.Option(help="With --to bitsandbytes: 8 or 32.")] = 8,
    weight_dtype: Annotated[
        str | None, typer.Option(help="With --to flashoptim: bfloat16, float16 or float32, where neither the state nor a model file tells.")
    ] = None,
) -> None:
    """Convert a saved optimizer state to and from torch, bitsandbytes, flashoptim and torchao."""
    from .optim import files

    if to not in TO:
        raise ConfigurationError(f"--to {to!r} is not known; choose one of {', '.join(TO)}.")
    if codec is not None and to != "flashoptim_hf":
        raise ConfigurationError(f"--codec {codec} goes with --to flashoptim_hf; {to} has a format of its own.")
    if target.exists():
        raise CheckpointError(f"{target} exists already, and nothing is overwritten. Choose another name.")
    file = files.locate(source)
    results: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    for one in (file, *(files.companions(file) if source.is_dir() else ())):
        said, results[one.name] = convert_state(files.read(one), to, codec, bits, weight_dtype, one.parent)
        lines += said if one is file else [f"{one.name}: {line}" for line in said]
    if source.is_dir():
        _write_folder(source, target, results)
    else:
        files.write(results[file.name], target)
    for line in lines:
        typer.echo(line)
    typer.echo(f"written to {target}")


def convert_state(
    state: dict[str, Any], to: str, codec: str | None, bits: int, weight_dtype: str | None, folder: Path
) -> tuple[list[str], dict[str, Any]]:
    """Lines to print, and the state dict. `folder`: where model files may tell the dtype of weights.

    Raises:
        CheckpointError, ConfigurationError: it cannot be converted, or an option is wrong.
    """
    import torch

    from .codecs.base import get_codec
    from .optim import convert, files

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if weight_dtype is not None and weight_dtype not in dtypes:
        raise ConfigurationError(f"--weight-dtype {weight_dtype!r} is not known; choose {', '.join(dtypes)}.")
    found = convert.recognise(state)
    if found is None:
        raise CheckpointError(convert.unknown(state))
    if to == "flashoptim_hf":
        if found.package == "flashoptim_hf" and codec is None:
            raise ConfigurationError(f"this is a state of {found} already; --codec stores it with another codec.")
        name = codec or CODECS[found.algorithm]
        get_codec(name, convert.STATES[found.algorithm])
        result, notes = convert.to_ours(state, [(name, True)] * len(state["param_groups"]))
        return [f"{found} -> {convert.recognise(result)}, codec={name!r}", *notes], result
    mine, notes = convert.to_ours(state)
    dtype = dtypes[weight_dtype] if weight_dtype else files.weight_dtypes(folder) if to == "flashoptim" else None
    result, more = convert.from_ours(mine, to, bits=bits, weight_dtype=dtype)
    return [f"{found} -> {convert.recognise(result) or to}", *notes, *more], result


def _write_folder(source: Path, target: Path, states: dict[str, dict[str, Any]]) -> None:
    """A copy of a checkpoint with other optimizer states (name of the file -> state dict), whole or not at all.

    Raises:
        CheckpointError: the source's mark does not fit its files, or the copy cannot be written.
    """
    from .optim import files
    from .trainer import complete

    mark = complete.read_mark(source)
    fault = complete.defect(source) if mark is not None else None
    if fault is not None:
        raise CheckpointError(f"{source} is not whole, so it is not converted: {fault}")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, part, ignore=lambda folder, _: [*states, complete.MARK] if Path(folder) == source else [])
        for name, state in states.items():
            files.write(state, part / name)
        if mark is not None:
            steps = [int(values["step"]) for state in states.values() for values in state["state"].values() if "step" in values]
            complete.seal(part, mark["step"], max(steps, default=None))
        os.replace(part, target)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
