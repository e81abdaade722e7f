"""What a state dict holds, and how it goes in and out.

    state[i]         "step": int64, 0-dim
                     one tensor per code plane in the parameter's (local) shape, named as in `torch.optim` ("exp_avg", "exp_avg_sq")
                     one tensor per constant plane, one entry per group ("exp_avg_sq_max", ...)
                     a codec's table, where it has one ("exp_avg_sq_curve")
                     "correction": int8 or int16 in the parameter's shape, for 16-bit weights
    param_groups[j]  the group's options, and "flashoptim_format": the version of this format

Only tensors and plain numbers: it loads with `weights_only=True`, without this package. Where the state lay, and which kernel made it,
is not in it. Saving copies the planes as they are: at most one extra copy of the quantized state, on the host, and no decoded tensor.

docs/checkpoint-format.md is the page about it; states of other packages become this format in `convert.py`.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..codecs.base import Codec, State, get_codec
from ..codecs.weight_split import CORRECTION_DTYPE, copy_correction
from ..errors import CheckpointError, ConfigurationError
from . import convert, sharded
from .layout import CORRECTION, STEP, PoolKey, Record, codec_views, encode_whole, local, pool_key
from .options import PLACEMENT, STORAGE, check_group
from .sources import DTYPE_KEY, FORMAT, FORMAT_KEY, check_form, corrected_dtype, weight_dtypes

if TYPE_CHECKING:
    from .base import FlashOptimizer


def save(optimizer: FlashOptimizer, base_state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A snapshot: every tensor a copy of its own on the CPU. `base_state_dict` is torch's own `state_dict`, which runs the hooks."""
    optimizer.synchronize()
    store_as_groups_say(optimizer)
    saved = base_state_dict()
    owners = {id(record.views): (param, record) for param, record in optimizer._layout.records.items()}
    for key, values in saved["state"].items():
        if isinstance(values, dict):
            # a copy also cuts each tensor out of the pool it is a view of: torch.save would write the whole pool
            saved["state"][key] = copied(values)
            if id(values) in owners:
                param, record = owners[id(values)]
                saved["state"][key] = sharded.outgoing(param, record.pool.fmt.codec, saved["state"][key])
    for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        group.update(copied({name: value for name, value in group.items() if name != "params"}))  # a learning rate may be a tensor
        group[FORMAT_KEY] = FORMAT
        # what a correction means depends on the weight's dtype, which no file with the state alone would tell
        group[DTYPE_KEY] = weight_dtypes(own["params"])
    return saved


def store_as_groups_say(optimizer: FlashOptimizer) -> None:
    """Store anew what was not stepped since its group's codec was changed: a saved group says how its states are to be read."""
    layout = optimizer._layout
    changed = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            record = layout.records.get(param)
            if record is not None and optimizer.state.get(param) is record.views:
                key = pool_key(param, group, optimizer.rule, param in layout.promoted)
                if (key.codec, key.stateful) != (record.pool.key.codec, record.pool.key.stateful):
                    changed.append((param, group))
    for param in layout.ensure(changed):
        optimizer.state[param] = layout.records[param].views
    if changed:
        optimizer._plan = None  # which holds on to pages that were replaced
        layout.offer()


@torch.no_grad()
def copied(values: Any) -> Any:
    """The values of a dictionary with every tensor a copy of its own on the CPU, which shares memory with no other; a copy of all else."""
    if not isinstance(values, Mapping):
        return deepcopy(values)  # under another key than a parameter, which is the user's
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value) if isinstance(value, Tensor) else deepcopy(value)
        for name, value in values.items()
    }


@torch.no_grad()
def load(optimizer: FlashOptimizer, state_dict: dict[str, Any]) -> None:
    """Check everything, then replace options and state. See `FlashOptimizer.load_state_dict`.

    Raises:
        CheckpointError: names the parameter, both shapes or both formats.
        HostMemoryError: there is no host memory for the state. Nothing has been changed in either case.
    """
    state_dict = copy(state_dict)
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        result = before(optimizer, state_dict)
        if result is not None:
            state_dict = result

    check_form(state_dict)
    state_dict, message = convert.for_loading(optimizer, state_dict)
    saved_groups = deepcopy(state_dict["param_groups"])
    matched = _match(optimizer, saved_groups)
    groups = [_merged(optimizer, number, saved) for number, saved in enumerate(saved_groups)]
    incoming: dict[Tensor, _Incoming] = {}
    extra: dict[Any, Any] = {}
    for key, values in state_dict["state"].items():
        if key in matched and values:
            param, name, saved_group = matched[key]
            incoming[param] = _Incoming(optimizer, param, name, values, saved_group)
        elif key not in matched:
            if isinstance(key, int):  # the number of a parameter; an algorithm's common state has a name
                raise CheckpointError(f"the state has an entry for parameter {key}, which is in none of its groups: it is damaged.")
            extra[key] = deepcopy(values)  # the file may be mapped, and be overwritten later
    _check_memory(optimizer, incoming, groups)

    for group, merged in zip(optimizer.param_groups, groups, strict=True):
        group.update(merged)
    _replace_state(optimizer, incoming, message)
    optimizer.state.update(extra)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def adopt(optimizer: FlashOptimizer, values: Mapping[Any, Any]) -> None:
    """Copy the state of the optimizer's own parameters, as `__getstate__` left it, into fresh planes. What is the user's goes along."""
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    incoming = {
        param: _Incoming(optimizer, param, "parameter", state, groups[param])
        for param, state in values.items()
        if param in groups and state
    }
    _replace_state(optimizer, incoming)
    optimizer.state.update({key: value for key, value in values.items() if not isinstance(key, Tensor)})


class _Incoming:
    """The saved state of one parameter, checked against the parameter at construction; `write` puts it into a record.

    Raises:
        CheckpointError: it does not belong to this parameter, or to this algorithm.
    """

    def __init__(self, optimizer: FlashOptimizer, param: Tensor, name: str, values: Mapping[str, Any], group: Mapping[str, Any]) -> None:
        self.values = values
        self.param = param
        shape = local(param).shape
        try:
            self.codec: Codec = get_codec(group.get("codec", "?"), _states(optimizer, group), group.get("dither", True))
        except ConfigurationError as error:
            raise CheckpointError(
                f"this state was not written by {type(optimizer).__name__}: {name} has the entries {sorted(values)} and its group names "
                f"no codec that is known here ({error})"
            ) from None
        self.moved = False
        self.foreign = corrected_dtype(group) not in (None, str(param.dtype).removeprefix("torch."))
        odd = [
            key for key in (STEP, CORRECTION, *(plane.name for plane in self.codec.parts)) if key in values and not _is_entry(key, values)
        ]
        if odd:
            raise CheckpointError(f"the state of {name} has {', '.join(odd)} in a form that no version writes: it is damaged.")
        if STEP in values:
            self.values, self.moved = sharded.incoming(param, self.codec, values, int(values[STEP]))
            values = self.values
        missing = [plane.name for plane in self.codec.parts if plane.name not in values] + ([] if STEP in values else [STEP])
        if missing:
            raise CheckpointError(
                f"the state of {name} lacks {', '.join(missing)} (it has {', '.join(sorted(values))}): it belongs to another algorithm or "
                f"is damaged. {type(optimizer).__name__} with codec={self.codec.name!r} needs all of them."
            )
        for plane in self.codec.parts:
            saved = values[plane.name]
            fits = saved.shape == shape if plane.group == 1 else saved.numel() == plane.entries(shape.numel())
            if not fits or saved.dtype != plane.dtype:
                raise CheckpointError(
                    f"{name} has shape {tuple(shape)}, and its saved state {plane.name!r} has shape {tuple(saved.shape)} and dtype "
                    f"{saved.dtype} (expected {plane.dtype}). Was the model changed, for example another LoRA rank, other target modules "
                    "or a resized vocabulary?"
                )
        flaw = self.codec.flaw([values[plane.name] for plane in self.codec.parts])
        if flaw is not None:
            raise CheckpointError(f"the state of {name} is damaged: {flaw}.")
        correction = values.get(CORRECTION)
        if correction is not None and (correction.shape != shape or correction.dtype not in CORRECTION_DTYPE.values()):
            raise CheckpointError(
                f"{name} has shape {tuple(shape)}, and its saved correction has shape {tuple(correction.shape)}, {correction.dtype}."
            )

    @property
    def is_wide(self) -> bool:
        """Whether its corrections have 16 bits."""
        return CORRECTION in self.values and self.values[CORRECTION].dtype == CORRECTION_DTYPE[32]

    def write(self, record: Record) -> bool:
        """Copy into the record's planes; True where the states had to be decoded and encoded again."""
        target = record.pool.fmt.codec
        sources = [self.values[plane.name].reshape(-1) for plane in self.codec.parts]
        step = int(self.values[STEP])
        same = target.name == self.codec.name
        if same:
            for view, source in zip(codec_views(record), sources, strict=True):
                view.copy_(source)
        else:
            # decoded where the file lies (the CPU), one parameter at a time
            decoded = self.codec.decode([source.cpu() for source in sources], record.block.numel)
            encode_whole(record, decoded, step)
        if CORRECTION in record.views and CORRECTION in self.values and not self.foreign:
            copy_correction(record.views[CORRECTION], self.values[CORRECTION])
        record.set_step(step)
        return not same


def _is_entry(name: str, values: Mapping[str, Any]) -> bool:
    value = values[name]
    return isinstance(value, Tensor) and (name != STEP or value.numel() == 1)


def _states(optimizer: FlashOptimizer, group: Mapping[str, Any]) -> tuple[State, ...]:
    """The states that a saved group keeps; options that it lacks, as another optimizer's groups may, are this optimizer's own."""
    return optimizer.rule.serving({**optimizer.defaults, **group}).states


def _names(optimizer: FlashOptimizer) -> list[list[str]]:
    """For messages: the name of each parameter, or its place in its group."""
    return [
        group.get("param_names") or [f"parameter {i} of group {j}" for i in range(len(group["params"]))]
        for j, group in enumerate(optimizer.param_groups)
    ]


def _match(optimizer: FlashOptimizer, saved_groups: list[dict[str, Any]]) -> dict[Any, tuple[Tensor, str, dict[str, Any]]]:
    """Saved parameter id -> (parameter, its name, saved group): by name where both sides know names, else by position."""
    groups = optimizer.param_groups
    if len(groups) != len(saved_groups):
        raise CheckpointError(f"the state has {len(saved_groups)} parameter groups, and this optimizer has {len(groups)}.")
    names = _names(optimizer)
    matched: dict[Any, tuple[Tensor, str, dict[str, Any]]] = {}
    for j, (group, saved, own) in enumerate(zip(groups, saved_groups, names, strict=True)):
        theirs = saved.get("param_names")
        if theirs and "param_names" in group and set(theirs) != set(own):
            raise CheckpointError(
                f"group {j} of the state and of this optimizer differ in their parameters. Only in the state: "
                f"{_few(set(theirs) - set(own))}; only here: {_few(set(own) - set(theirs))}."
            )
        if len(group["params"]) != len(saved["params"]):
            shapes = _few([f"{name} {tuple(p.shape)}" for name, p in zip(own, group["params"], strict=True)])
            raise CheckpointError(
                f"group {j} of the state has {len(saved['params'])} parameters, and this optimizer's has {len(group['params'])}: {shapes}. "
                "Was the model changed, for example other LoRA target modules or other frozen layers?"
            )
        known = theirs and "param_names" in group and len(set(own)) == len(own)  # names that repeat say nothing
        order = {name: i for i, name in enumerate(own)} if known else None
        for i, key in enumerate(saved["params"]):
            k = order[theirs[i]] if order and theirs else i
            matched[key] = (group["params"][k], own[k], saved)
    return matched


def _few(names: Any, limit: int = 5) -> str:
    names = sorted(names) if isinstance(names, set) else list(names)
    return (", ".join(names[:limit]) or "none") + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _merged(optimizer: FlashOptimizer, number: int, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options after loading: every saved one except where and how this optimizer stores its state.

    Raises:
        CheckpointError: names the group and an option with a value that cannot be.
    """
    own = optimizer.param_groups[number]
    # names are kept too: those of a state that was matched by position might be wrong here, and would be saved as if they were right
    kept = {name for name in STORAGE if name in own} | {"params", "param_names", FORMAT_KEY, DTYPE_KEY, *PLACEMENT}
    taken = {name: value for name, value in saved.items() if name not in kept}
    for name, value in taken.items():
        if isinstance(value, Tensor) and isinstance(own.get(name), Tensor):
            taken[name] = value.to(own[name].device)  # a learning rate stays where a compiled step reads it
    group = {**own, **taken}
    try:
        check_group(group, optimizer.defaults)
        optimizer.check_group(group)
    except (ConfigurationError, TypeError, ValueError) as error:
        raise CheckpointError(f"group {number} of the state cannot be taken over: {error}") from error
    return group


def _check_memory(optimizer: FlashOptimizer, incoming: dict[Tensor, _Incoming], groups: list[dict[str, Any]]) -> None:
    """Look whether the host has memory for what is going to be made. Raises `HostMemoryError`."""
    wanted: dict[PoolKey, list[Tensor]] = {}
    for group in groups:
        for param in group["params"]:
            if param in incoming and param not in optimizer._layout.records:
                key = pool_key(param, group, optimizer.rule, incoming[param].is_wide)
                wanted.setdefault(key, []).append(param)
    optimizer._layout.check_host(wanted)


def _replace_state(optimizer: FlashOptimizer, incoming: dict[Tensor, _Incoming], message: str | None = None) -> None:
    """Put the checked states into fresh records, and say what was not bit for bit; `message`: what converting them said already."""
    optimizer.synchronize()
    layout = optimizer._layout
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    for param in list(layout.records):
        if param not in incoming:
            layout.drop(param)
    optimizer.state = defaultdict(dict)
    layout.promoted.clear()
    for param, entry in incoming.items():
        if groups[param]["master_bits"] == "auto" and entry.is_wide:
            layout.promoted.add(param)
    layout.ensure((param, groups[param]) for param in incoming)
    recoded = [entry for param, entry in incoming.items() if entry.write(layout.records[param])]
    for param in incoming:
        optimizer.state[param] = layout.records[param].views
    lost = [
        param
        for param, entry in incoming.items()
        if (CORRECTION in entry.values) != (CORRECTION in layout.records[param].views) or (entry.foreign and CORRECTION in entry.values)
    ]
    notes: list[str] = []
    if recoded and message is None:
        notes.append(
            f"the state of {len(recoded)} parameters was stored with codec={recoded[0].codec.name!r} and has been stored anew with "
            f"{layout.records[recoded[0].param].pool.key.codec!r}; each value is within that codec's error."
        )
    cut_anew = [entry for entry in incoming.values() if entry.moved]
    if cut_anew:
        notes.append(
            f"{len(cut_anew)} parameters are sharded in another way than when their state was saved, and their groups begin elsewhere: "
            "their states were decoded and stored anew once; each value is within the codec's error."
        )
    scaled = [entry for param, entry in incoming.items() if _scaled(entry, layout.records[param])]
    if scaled:
        notes.append(
            f"the corrections of {len(scaled)} parameters were stored in another width (master_bits) and have been scaled: their master "
            "weights are within the precision of the smaller one."
        )
    if lost:
        notes.append(
            f"{len(lost)} parameters have a correction to 24- or 32-bit master weights only in the state or only here (another weight "
            "dtype or master_bits): their master weights start from the weights as they are now."
        )
    if message is not None:
        notes = [" ".join([message, *notes])]
    for note in notes:
        warnings.warn(note, stacklevel=5)


def _scaled(entry: _Incoming, record: Record) -> bool:
    """Whether a correction was taken over in another width than it was saved in."""
    saved, now = entry.values.get(CORRECTION), record.views.get(CORRECTION)
    return saved is not None and now is not None and not entry.foreign and saved.dtype != now.dtype
