"""Optimizer states of other packages to this one's format and back: functions on state dicts, which change nothing they are given.

What is exact: fp32 states (`torch`, bitsandbytes in 32 bits) to and from codec "none"; `flashoptim` to and from codec "softsign", codes,
scales and corrections bit for bit. Everything else is decoded once and encoded once, within the two codecs' bounds. Hyper-parameters are
renamed where the packages disagree, and what is not known stays in its group. docs/conversion.md has the table, measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..codecs.base import Codec, State, get_codec
from ..codecs.weight_split import copy_correction
from ..errors import CheckpointError, ConfigurationError
from . import foreign, groups, sharded
from .layout import CORRECTION, STEP
from .sources import DTYPE_KEY, FORMAT, FORMAT_KEY, STATES, Source, check_form, corrected_dtype, entries_of, recognise, unknown

if TYPE_CHECKING:
    from .base import FlashOptimizer

TARGETS = ("adamw_torch", "sgd", "bitsandbytes", "flashoptim")
"""What `from_ours` writes; the first two are transformers' names of torch's own optimizers."""

WeightDtype = torch.dtype | Mapping[torch.Size, torch.dtype] | None


def _states(algorithm: str, group: Mapping[str, Any]) -> tuple[State, ...]:
    return () if algorithm == "sgd" and group.get("momentum", 0) == 0 else STATES[algorithm]


# ---------------------------------------------------------------------- in


def to_ours(state_dict: Mapping[str, Any], storage: Sequence[tuple[str, bool]] | None = None) -> tuple[dict[str, Any], list[str]]:
    """A state dict of another package in this package's format.

    Args:
        state_dict: what `recognise` knows.
        storage: for each group, the codec and whether it dithers, in which states are stored at once, parameter by parameter. None: the
            form that loses nothing, "softsign" for quantized states of flashoptim, else "none" (fp32).

    Returns:
        the state dict, and sentences about what could not be taken over.

    Raises:
        CheckpointError: not a known state, damaged, or with options that mean another algorithm (amsgrad, maximize).
    """
    check_form(state_dict)
    source = recognise(state_dict)
    if source is None:
        raise CheckpointError(unknown(state_dict))
    if source.package == "flashoptim_hf":
        return (dict(state_dict) if storage is None else _stored_anew(source.algorithm, state_dict, storage)), []
    notes: list[str] = []
    state: dict[Any, Any] = {}
    mapped = []
    for number, saved in enumerate(state_dict["param_groups"]):
        group = groups.incoming(source, saved, notes)
        entries = {key: foreign.unnested(state_dict["state"][key]) for key in saved["params"] if state_dict["state"].get(key)}
        states = _states(source.algorithm, group)
        whole = source.package == "flashoptim" and all(s.name + foreign.QUANTIZED in v for v in entries.values() for s in states)
        codec, dither = ("softsign" if whole and states else "none", True) if storage is None else storage[number]
        dtypes = set()
        for key, values in entries.items():
            state[key], dtype = _read(source, values, states, codec, dither, saved)
            dtypes.add(dtype)
        if any(STEP not in values for values in entries.values()):
            group[groups.UNCOUNTED_KEY] = True
        known = str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 and None not in dtypes else "mixed"
        mapped.append({**group, "codec": codec, "dither": dither, FORMAT_KEY: FORMAT, DTYPE_KEY: known})
    return {"state": state, "param_groups": mapped}, notes


def _read(
    source: Source, values: dict[str, Any], states: tuple[State, ...], codec_name: str, dither: bool, group: Mapping[str, Any]
) -> tuple[dict[str, Any], torch.dtype | None]:
    """One parameter: its values in this package's format, and its weight's dtype where the state tells."""
    if STEP in values:
        step = int(values[STEP])
    elif source.algorithm == "adamw":
        raise CheckpointError(f"a state of {source} has no step count (it has {', '.join(sorted(values))}): the file is damaged.")
    else:
        step = 1  # Lion and SGD do not count; it only must not be the first
    found: dict[str, Any] = {STEP: torch.tensor(step, dtype=torch.int64)}
    correction, dtype = foreign.read_error_bits(values, group.get("master_bytewidth"))
    if correction is not None:
        found[CORRECTION] = correction
    codec = get_codec(codec_name, states, dither)
    if codec_name == "softsign" and states and all(state.name + foreign.QUANTIZED in values for state in states):
        pairs = [foreign.read_softsign(values, state.name) for state in states]
        entries = [pair[i] for i in range(2) for pair in pairs]
        return {**found, **{plane.name: entry for plane, entry in zip(codec.parts, entries, strict=True)}}, dtype
    decoded = [_decoded(source, values, state, number) for number, state in enumerate(states, 1)]
    if len(decoded) == 2 and any(foreign.is_torchao(v) or getattr(v, "dtype", None) == torch.uint8 for v in values.values()):
        # rounded apart, v can be 0 where m is not, and the next update would be m / eps
        decoded[0] = torch.where(decoded[1] > 0, decoded[0], 0)
    return {**found, **_encoded(codec, decoded, step)}, dtype


def _encoded(codec: Codec, decoded: Sequence[Tensor], step: int) -> dict[str, Tensor]:
    """fp32 states as a codec's planes, by their names."""
    if codec.name == "none":
        return {plane.name: value for plane, value in zip(codec.parts, decoded, strict=True)}
    shape = decoded[0].shape
    planes = [torch.zeros(plane.entries(shape.numel()), dtype=plane.dtype) for plane in codec.parts]
    codec.encode([value.flatten() for value in decoded], planes, step=step)
    return {plane.name: value.view(shape) if plane.group == 1 else value for plane, value in zip(codec.parts, planes, strict=True)}


def _stored_anew(algorithm: str, state_dict: Mapping[str, Any], storage: Sequence[tuple[str, bool]]) -> dict[str, Any]:
    """A state of this package with other codecs; corrections and step counts stay."""
    state = dict(state_dict["state"])
    mapped = []
    for saved, (name, dither) in zip(state_dict["param_groups"], storage, strict=True):
        mapped.append({**saved, "codec": name, "dither": dither})
        codec = get_codec(name, _states(algorithm, saved), dither)
        for key in saved["params"]:
            values = state.get(key)
            if values and name != saved["codec"]:
                decoded, _ = decode(algorithm, values, saved)
                kept = {own: values[own] for own in (STEP, CORRECTION) if own in values}
                state[key] = {**kept, **_encoded(codec, decoded, int(values[STEP]))}
    return {**state_dict, "state": state, "param_groups": mapped}


def _decoded(source: Source, values: Mapping[str, Any], state: State, number: int) -> Tensor:
    """One state, fp32 in the parameter's shape; a DTensor stays one."""
    name = f"state{number}" if source.package == "bitsandbytes" else state.name
    quantized = name + foreign.QUANTIZED in values
    if not quantized and not isinstance(values.get(name), Tensor):
        raise CheckpointError(
            f"a state of {source} lacks {name} (it has {', '.join(sorted(values))}): the file is damaged, or of another algorithm."
        )
    if source.package == "bitsandbytes":
        return foreign.read_bitsandbytes(values, number)
    if quantized:
        codes, scales = foreign.read_softsign(values, name)
        decoded: Tensor = get_codec("softsign", [State(name, True)]).decode([codes.flatten(), scales], codes.numel())[0]
        if not state.signed:
            decoded = (codes.flatten().float() / 255 * scales.float().repeat_interleave(32)[: codes.numel()]) ** 2
        return decoded.view(codes.shape)
    value = values[name]
    if foreign.is_torchao(value):
        foreign.check_plain(value, name)
        value = value.dequantize()
    return value.detach().float().cpu() if not hasattr(value, "_local_tensor") else value.detach().float()


# ---------------------------------------------------------------------- out


def from_ours(
    state_dict: Mapping[str, Any], target: str, *, bits: int = 8, weight_dtype: WeightDtype = None
) -> tuple[dict[str, Any], list[str]]:
    """A state dict of this package as another optimizer loads it.

    Args:
        state_dict: in this package's format, of one process.
        target: one of `TARGETS`.
        bits: 8 (default) or 32, for bitsandbytes. Tensors of fewer than 4096 elements are fp32 there in any case.
        weight_dtype: dtype of the weights, or of those of each shape, for flashoptim; only needed where the state does not tell.

    Returns:
        the state dict, and sentences about what the target cannot hold.

    Raises:
        CheckpointError: the target is of another algorithm, or the state is sharded or damaged.
        ConfigurationError: an unknown target, or a missing `weight_dtype`.
    """
    if target == "torchao":
        raise CheckpointError(
            "torchao's states can be read, not written: they are objects of its own classes. Write adamw_torch or bitsandbytes."
        )
    if target not in TARGETS:
        raise ConfigurationError(f"target {target!r} is not known; choose one of {', '.join(TARGETS)}.")
    if bits not in (8, 32):
        raise ConfigurationError(f"bits={bits!r}: bitsandbytes stores states in 8 or 32 bits.")
    check_form(state_dict)
    source = recognise(state_dict)
    if source is None or source.package != "flashoptim_hf":
        raise CheckpointError(f"this is {source or 'no known state'}, not a state of flashoptim_hf; use to_ours first.")
    fits = {"adamw_torch": ("adamw",), "sgd": ("sgd",)}.get(target, tuple(STATES))
    if source.algorithm not in fits:
        raise CheckpointError(f"this is a state of {source}, and {target} runs another algorithm; {ways_out(source.algorithm)}.")
    notes: list[str] = []
    state: dict[Any, Any] = {}
    mapped = []
    for saved in state_dict["param_groups"]:
        states = _states(source.algorithm, saved)
        entries = {key: _whole(state_dict["state"][key], states, saved) for key in saved["params"] if state_dict["state"].get(key)}
        wide = any(getattr(values.get(CORRECTION), "dtype", None) == torch.int16 for values in entries.values())
        mapped.append(groups.outgoing(source.algorithm, target, saved, wide, notes))
        for key, values in entries.items():
            written = _write(source.algorithm, target, values, saved, bits, _weight_dtype(saved, values, target, weight_dtype), wide)
            if written:
                state[key] = written
    if target != "flashoptim" and any(CORRECTION in values for values in state_dict["state"].values() if isinstance(values, Mapping)):
        notes.append(f"{target} has no place for corrections: master weights of 16-bit parameters go on from the parameters as they are.")
    return {"state": state, "param_groups": mapped}, notes


def _whole(values: Mapping[str, Any], states: tuple[State, ...], group: Mapping[str, Any]) -> Mapping[str, Any]:
    """A parameter's values with 16-bit corrections that were gathered from several ranks, as pairs of bytes, put together."""
    correction = values.get(CORRECTION)
    if not isinstance(correction, Tensor) or correction.dtype != torch.int8 or sharded.is_sharded(correction):
        return values
    dims = values[states[0].name].dim() if states and states[0].name in values else None
    pairs = group.get("master_bits") == 32 if dims is None else correction.dim() == dims + 1
    return {**values, CORRECTION: sharded.joined(correction)} if pairs else values


def ways_out(algorithm: str) -> str:
    """For messages: what an algorithm's state can be converted to."""
    names = {"adamw": "adamw_torch, bitsandbytes", "lion": "bitsandbytes", "sgd": "sgd, bitsandbytes"}
    return f"its state can go to {names[algorithm]} or flashoptim"


def _weight_dtype(saved: Mapping[str, Any], values: Mapping[str, Any], target: str, given: WeightDtype) -> torch.dtype:
    """The dtype of a parameter's weight, which is not in its state. Only flashoptim's form depends on it."""
    if target != "flashoptim":
        return torch.float32
    names = str(saved.get(DTYPE_KEY, "mixed")).split("+")
    name = names[0] if len(names) == 1 and names != ["mixed"] else corrected_dtype(saved) if CORRECTION in values else None
    if name is not None:
        return getattr(torch, name)
    if CORRECTION not in values and saved.get("master_bits") is not None:
        return torch.float32  # every 16-bit weight of the group has a correction
    if isinstance(given, Mapping):
        shapes = [value.shape for key, value in values.items() if key != STEP and isinstance(value, Tensor) and value.shape in given]
        given = given[shapes[0]] if shapes else None
    if given is None or (CORRECTION in values and given == torch.float32):
        raise ConfigurationError(
            "flashoptim's format depends on the dtype of the weights, and this state does not tell it: say weight_dtype (--weight-dtype "
            "bfloat16, float16 or float32), or convert a checkpoint folder with its model file."
        )
    return given


def decode(algorithm: str, values: Mapping[str, Any], group: Mapping[str, Any]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """One parameter's states, fp32 in its shape, and its planes: flat constants, codes in the parameter's shape.

    Raises:
        CheckpointError: planes are missing, damaged or sharded.
    """
    states = _states(algorithm, group)
    codec = get_codec(group["codec"], states, group.get("dither", True))
    missing = [name for name in (*(plane.name for plane in codec.parts), STEP) if not isinstance(values.get(name), Tensor)]
    if missing:
        raise CheckpointError(f"a state lacks {', '.join(missing)} (it has {', '.join(map(str, values))}): it is damaged.")
    for name, value in values.items():
        foreign.check_plain(value, name)
    if not states:
        return (), {}
    shape = values[codec.planes[0].name].shape
    # constants may come in runs, the form that jobs of one process of torch.distributed save
    whole = torch.empty(shape, device="meta")
    planes, moved = sharded.incoming(whole, codec, values, int(values[STEP]))
    for plane in codec.parts:
        if planes[plane.name].dtype != plane.dtype or planes[plane.name].numel() != plane.entries(shape.numel()):
            raise CheckpointError(
                f"{plane.name} of a parameter of shape {tuple(shape)} has {planes[plane.name].numel()} entries of "
                f"{planes[plane.name].dtype}, and {plane.entries(shape.numel())} of {plane.dtype} are needed: it is damaged."
            )
    flaw = codec.flaw([planes[plane.name] for plane in codec.parts])
    if flaw is not None:
        raise CheckpointError(f"a state is damaged: {flaw}.")
    if moved:  # groups of several ranks: what they hold is known without the one more encode
        decoded = tuple(sharded.decoded(whole, codec, values))
    else:
        decoded = codec.decode([planes[plane.name].reshape(-1) for plane in codec.parts], shape.numel())
    return tuple(value.view(shape) for value in decoded), {plane.name: planes[plane.name] for plane in codec.parts}


def _write(
    algorithm: str, target: str, values: Mapping[str, Any], group: Mapping[str, Any], bits: int, dtype: torch.dtype, wide: bool
) -> dict[str, Any]:
    """One parameter as the target has it."""
    states, planes = decode(algorithm, values, group)
    step = int(values[STEP])
    names = [state.name for state in _states(algorithm, group)]
    if target in ("adamw_torch", "sgd"):
        counted = {STEP: torch.tensor(float(step))} if algorithm == "adamw" else {}
        return {**counted, **dict(zip(names, states, strict=True))}
    if target == "bitsandbytes":
        return foreign.write_bitsandbytes(states, step, bits) if states else {}
    written: dict[str, Any] = {STEP: torch.tensor(step, dtype=torch.int64)} if algorithm == "adamw" else {}
    if states:
        if group["codec"] != "softsign":
            planes = _encoded(get_codec("softsign", _states(algorithm, group)), states, step)
        for name in names:
            scales = planes[f"{name}_scale"].reshape(-1).contiguous()
            written[name + foreign.QUANTIZED] = planes[name].reshape(states[0].shape)
            written[name + foreign.SCALES] = scales.view(torch.bfloat16) if dtype == torch.bfloat16 else scales
    if CORRECTION in values:
        correction = values[CORRECTION]
        if wide and correction.dtype == torch.int8:
            correction = torch.empty(correction.shape, dtype=torch.int16)
            copy_correction(correction, values[CORRECTION])
        written[foreign.ERROR_BITS] = foreign.write_error_bits(correction, dtype)
    return written


# ---------------------------------------------------------------------- on load


class Loaded(NamedTuple):
    """What `load_state_dict` goes on with: a state dict in this package's format, and what to say about it (None: nothing)."""

    state_dict: dict[str, Any]
    message: str | None


def for_loading(optimizer: FlashOptimizer, state_dict: dict[str, Any]) -> Loaded:
    """A state dict as `optimizer` can load it, converted if another package wrote it.

    Raises:
        CheckpointError: it is the state of another algorithm; names both.
    """
    source, own = recognise(state_dict), optimizer.rule.name
    if source is None or own not in STATES:
        return Loaded(state_dict, None)
    name = type(optimizer).__name__
    if source.algorithm != own:
        raise CheckpointError(
            f"this is a state of {source} (entries: {entries_of(state_dict)}), and {name} takes states of {own}: those of two algorithms "
            f"cannot be converted into each other. Go on with {Source('flashoptim_hf', source.algorithm)}, or train without this state."
        )
    if source.package == "flashoptim_hf":
        return Loaded(state_dict, None)
    own_groups = optimizer.param_groups
    entries = [foreign.unnested(v) for v in state_dict["state"].values() if isinstance(v, Mapping)]
    rounded = any(foreign.is_torchao(v) or getattr(v, "dtype", None) == torch.uint8 for e in entries for v in e.values())
    at_once = rounded and source.package != "flashoptim" and len(own_groups) == len(state_dict["param_groups"])
    whole = at_once and not any(sharded.is_sharded(param) for group in own_groups for param in group["params"])
    converted, notes = to_ours(state_dict, [(group["codec"], group["dither"]) for group in own_groups] if whole else None)
    targets = [group["codec"] for group in own_groups]
    forms = [group["codec"] for group in converted["param_groups"]]
    exact = targets == forms and not (whole and set(targets) != {"none"})
    how = "as it was" if exact else f"decoded and stored once with codec={', '.join(map(repr, dict.fromkeys(targets)))}, within its error"
    message = f"the optimizer state is one of {source}; {name} has taken it over, {how}."
    return Loaded(converted, " ".join([message, *notes]) if entries else None)
