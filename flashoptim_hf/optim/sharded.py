"""State of sharded parameters in a form that can be gathered and cut anew: `torch.distributed.checkpoint` sees DTensors only.

Pages and kernels know the local shard, whose groups run from its first element. What leaves in a state dict has global meaning:

    code planes, corrections   the parameter's shape, mesh and placement; int16 corrections as pairs of int8, one dimension more, since
                               neither NCCL nor gloo gathers int16
    group constants            (rows, row / q), sharded with the rows: one number for each run of q = gcd(row, group) elements, which lies
                               in one row and in one group wherever rows are cut

A row is an entry of dimension 0. Where rows are multiples of the group, runs are groups and nothing is repeated. On the way in, runs are
put together to groups again: exact where the borders of groups are where they were, else decoded once and encoded within the codec's bound.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..codecs.base import Codec
from ..errors import UnsupportedError
from . import modes
from .layout import CORRECTION, STEP, Record, local

_RUNS_AT_ONCE = 1 << 16
_SAMPLE = 4096


def is_sharded(param: Tensor) -> bool:
    """Whether a parameter is a DTensor."""
    return local(param) is not param


def several_ranks() -> bool:
    """Whether this process is one of several of a `torch.distributed` job, whatever it does with its parameters."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def check(param: Tensor) -> None:
    """Refuse a sharding that a state dict could not describe, before the first step.

    Raises:
        UnsupportedError: the parameter is cut along another dimension than 0, or is FSDP1's or DeepSpeed's.
    """
    modes.check_param(param)
    if is_sharded(param):
        for placement in param.placements:  # type: ignore[attr-defined]
            if not (placement.is_replicate() or (type(placement).__name__ == "Shard" and placement.dim == 0)):
                raise UnsupportedError(
                    f"a parameter of shape {tuple(param.shape)} has the placement {placement!r}; parameters sharded on dimension 0 (FSDP2, "
                    "fully_shard) are supported. Use fully_shard without tensor parallelism."
                )


def _rows(shape: torch.Size) -> tuple[int, int]:
    """(rows, elements of a row) of a tensor; a scalar is one row."""
    rows = shape[0] if len(shape) else 1
    return rows, math.prod(shape[1:])


def _run(row: int, group: int) -> int:
    return math.gcd(row, group) if row else group


def outgoing(param: Tensor, codec: Codec, values: Mapping[str, Any]) -> dict[str, Any]:
    """A record's values (local, constants one per group) in the form above; those of a parameter that is not sharded stay as they are.

    In a job of one process with `torch.distributed` initialised, constants of plain parameters take the form of runs too, so that a larger
    job can load them.
    """
    lonely = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() == 1
    if not is_sharded(param) and not lonely:
        return dict(values)
    groups = {plane.name: plane.group for plane in codec.planes if plane.group > 1}
    whole = {STEP, *(table.name for table in codec.tables)}
    return {name: value if name in whole else _out(param, value, groups.get(name)) for name, value in values.items()}


def _out(param: Tensor, value: Tensor, group: int | None) -> Tensor:
    shape, stride = param.shape, param.stride()
    if value.dtype == torch.int16:
        value = value.reshape(-1).view(torch.int8).view(*value.shape, 2)
        shape, stride = torch.Size((*shape, 2)), (*(2 * step for step in stride), 1)
    if group is not None:
        (rows, row), (local_rows, _) = _rows(param.shape), _rows(local(param).shape)
        run = _run(row, group)
        per_row = row // run
        value = value[(torch.arange(local_rows * per_row, device=value.device) * run) // group].view(local_rows, per_row)
        shape, stride = torch.Size((rows, per_row)), (per_row, 1)
    if not is_sharded(param):
        return value
    from torch.distributed.tensor import DTensor

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=tuple(stride))


def incoming(param: Tensor, codec: Codec, values: Mapping[str, Any], step: int) -> tuple[dict[str, Any], bool]:
    """Saved values in any of the forms above, sharded, whole or of one process, as the local values that a record holds.

    Returns:
        the values, and whether group borders had moved, so that they were encoded anew. What does not fit is passed on as it is.
    """
    groups = {plane.name: plane.group for plane in codec.planes if plane.group > 1}
    found: dict[str, Any] = {}
    whole = {STEP, *(table.name for table in codec.tables)}
    for name, value in values.items():
        if name in whole or not isinstance(value, Tensor):
            found[name] = value
            continue
        value = _in(param, value, groups.get(name))
        pairs = name == CORRECTION and value.dtype == torch.int8 and value.shape[-1:] == (2,) and value.dim() == param.dim() + 1
        found[name] = joined(value) if pairs else value
    runs = [name for name in groups if isinstance(found.get(name), Tensor) and found[name].dim() == 2]
    _, row = _rows(param.shape)
    numel = local(param).numel()
    codes = [found.get(plane.name) for plane in codec.planes if plane.group == 1]
    if not runs or len(runs) < len(groups) or any(not isinstance(code, Tensor) or code.numel() != numel for code in codes):
        return found, False  # no runs; or a part is missing or of another size, which the caller names
    tables = [(found.get(table.name), table) for table in codec.tables]
    if any(not isinstance(value, Tensor) or (value.dtype, value.numel()) != (table.dtype, table.count) for value, table in tables):
        return found, False
    if codec.flaw([found[plane.name] for plane in codec.parts]) is not None:
        return found, False
    exact = True
    grouped = dict(found)
    for name in runs:
        group, run = groups[name], _run(row, groups[name])
        flat = found[name].reshape(-1)
        if flat.numel() != numel // run:
            return found, False  # another shape: the caller names it
        first = flat[(torch.arange(-(-numel // group), device="cpu") * group) // run]
        exact = exact and torch.equal(_bits(first.repeat_interleave(group // run)[: flat.numel()]), _bits(flat))
        grouped[name] = first
    return (grouped, False) if exact else (_encode_anew(codec, found, row, numel, step), True)


def joined(pairs: Tensor) -> Tensor:
    """int16 corrections from their pairs of int8, one dimension less."""
    return pairs.contiguous().view(-1).view(torch.int16).view(pairs.shape[:-1])


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


def _in(param: Tensor, value: Tensor, group: int | None) -> Tensor:
    """The local part of one saved tensor; constants that come one per group of the whole parameter are spread to runs where needed."""
    shard = getattr(value, "_local_tensor", None)
    if shard is not None:
        return shard.detach().cpu()
    value = value.detach().cpu()
    if not is_sharded(param):
        return value
    if group is not None and value.dim() == 1:
        rows, row = _rows(param.shape)
        run = _run(row, group)
        if value.numel() != -(-param.numel() // group):
            return value
        value = value[(torch.arange(rows * (row // run), device="cpu") * run) // group].view(rows, row // run)
    if value.shape == local(param).shape and group is None and value.shape != param.shape:
        return value
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    shape, offset = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    return value[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def decoded(param: Tensor, codec: Codec, values: Mapping[str, Any]) -> list[Tensor]:
    """fp32 states in the shape of a parameter that is not sharded, from whole values whose constants come in runs."""
    found = {name: value.detach().cpu() for name, value in values.items() if isinstance(value, Tensor)}
    return [value.view(param.shape) for value in _decode_runs(codec, found, _rows(param.shape)[1], param.numel())]


def _decode_runs(codec: Codec, found: Mapping[str, Any], row: int, numel: int) -> list[Tensor]:
    """Decode every element with the constants of its run: one flat fp32 tensor for each state."""
    run = min(_run(row, plane.group) for plane in codec.planes if plane.group > 1)
    parts: list[list[Tensor]] = []
    for start in range(0, numel // run, _RUNS_AT_ONCE):
        stop = min(start + _RUNS_AT_ONCE, numel // run)
        planes = []
        for plane in codec.planes:
            flat = found[plane.name].reshape(-1)
            if plane.group == 1:
                # a run as a group of its own, with zeros behind it
                padded = torch.zeros(stop - start, codec.group, dtype=plane.dtype, device="cpu")
                padded[:, :run] = flat[start * run : stop * run].view(-1, run)
                planes.append(padded.view(-1))
            else:
                planes.append(flat[(torch.arange(start, stop, device="cpu") * run) // _run(row, plane.group)])
        planes += [found[table.name].cpu() for table in codec.tables]
        decoded = codec.decode(planes, (stop - start) * codec.group)
        parts.append([value.view(stop - start, codec.group)[:, :run].reshape(-1) for value in decoded])
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _encode_anew(codec: Codec, found: dict[str, Any], row: int, numel: int, step: int) -> dict[str, Any]:
    """Decode every element, and encode in the groups of this shard."""
    values = _decode_runs(codec, found, row, numel)
    planes = [torch.zeros(plane.entries(numel), dtype=plane.dtype, device="cpu") for plane in codec.parts]
    codec.encode(values, planes, step=step)
    shapes = {plane.name: found[plane.name].shape for plane in codec.planes if plane.group == 1}
    encoded = {p.name: v.view(shapes[p.name]) if p.group == 1 else v for p, v in zip(codec.parts, planes, strict=True)}
    return {**found, **encoded}


def self_check(records: Mapping[Tensor, Record]) -> None:
    """Take every parameter's state out and in again, in memory: what cannot be saved shows now and not after hours.

    Of each pool, the state of the smallest sharded parameter is gathered too, so that all ranks must call this together.

    Raises:
        UnsupportedError: names the parameter's shape, how it is sharded, and the plane that came back different or could not be saved.
    """
    smallest = {record.pool.key: param for param, record in sorted(records.items(), key=lambda item: -item[0].numel())}
    for param, record in records.items():
        codec = record.pool.fmt.codec
        placements = getattr(param, "placements", "not sharded")
        who = f"the optimizer state of a parameter of shape {tuple(param.shape)} (local {tuple(record.shape)}, {placements})"
        advice = "Train with DDP on one machine or in a single process until this is mended, and please report it with this sentence."
        try:
            # a file's format, with a part of each tensor: no copy of a large state is made to find out
            sample = {name: view.reshape(-1)[:_SAMPLE].cpu().clone() for name, view in record.views.items()}
            file = io.BytesIO()
            torch.save(sample, file)
            file.seek(0)
            read = torch.load(file, weights_only=True)
            out = outgoing(param, codec, record.views)
            if smallest[record.pool.key] is param and is_sharded(param):
                _gather(out)
            again, moved = incoming(param, codec, out, record.step)
        except Exception as error:
            raise UnsupportedError(f"{who} cannot be saved and loaded: {type(error).__name__}: {error}. {advice}") from error
        for name, view in record.views.items():
            same = torch.equal(_bits(again[name].reshape(-1).cpu()), _bits(view.reshape(-1).cpu())) if name != STEP else True
            if moved or not same or not torch.equal(_bits(read[name]), _bits(sample[name])):
                raise UnsupportedError(f"{who} does not survive saving and loading: {name} came back different. {advice}")


def _gather(values: Mapping[str, Any]) -> None:
    """Gather what is sharded, as a full state dict would: not every backend knows every dtype."""
    for value in values.values():
        if is_sharded(value):
            value.to(value.device_mesh.device_type).full_tensor()
