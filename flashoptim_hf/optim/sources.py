"""Whose optimizer state is it? Recognised by the names of its entries and options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..codecs.base import State
from ..errors import CheckpointError
from . import foreign

FORMAT_KEY = "flashoptim_format"
FORMAT = 1
DTYPE_KEY = "weight_dtype"
"""dtype of a group's weights when it was saved; of several, the names with "+" between; "mixed" where it is not known."""

STATES = {
    "adamw": (State("exp_avg", signed=True), State("exp_avg_sq", signed=False)),
    "lion": (State("exp_avg", signed=True),),
    "sgd": (State("momentum_buffer", signed=True),),
}

_NAMES = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD"}


class Source(NamedTuple):
    """Who wrote a state: `package` ("flashoptim_hf", "torch", "bitsandbytes", "flashoptim", "torchao"), `algorithm` (a file name here)."""

    package: str
    algorithm: str

    def __str__(self) -> str:
        name = _NAMES[self.algorithm]
        return f"{self.package} {'Flash' if self.package.startswith('flashoptim') else ''}{name}"


def weight_dtypes(params: Iterable[Tensor]) -> str:
    """What stands under `DTYPE_KEY` for a group with these parameters."""
    return "+".join(sorted({str(param.dtype).removeprefix("torch.") for param in params})) or "mixed"


def corrected_dtype(group: Mapping[str, Any]) -> str | None:
    """Name of the dtype of those weights of a saved group that have corrections; None where the group does not tell."""
    names = set(str(group.get(DTYPE_KEY, "mixed")).split("+")) - {"float32"}
    return names.pop() if len(names) == 1 and "mixed" not in names else None


def check_form(state_dict: Any) -> None:
    """Refuse what is no optimizer's state dict, or one of a newer version of this package.

    Raises:
        CheckpointError: says what it is instead.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        keys = ", ".join(map(str, list(state_dict)[:5])) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise CheckpointError(f"this is no optimizer's state dict, which has 'state' and 'param_groups', but {keys or 'empty'}.")
    for group in state_dict["param_groups"]:
        version = group.get(FORMAT_KEY, FORMAT) if isinstance(group, Mapping) else None
        if not isinstance(version, int) or not isinstance(group.get("params"), list | tuple):
            raise CheckpointError("a parameter group of this state has no list of parameters, or no number as its format: it is damaged.")
        if version > FORMAT:
            raise CheckpointError(
                f"this state has format {version}, and this version reads formats up to {FORMAT}. Install a newer flashoptim-hf."
            )


def recognise(state_dict: Mapping[str, Any]) -> Source | None:
    """Which package and which algorithm wrote a state dict; `str()` of it is a name for people. None: none that is known here.

    Adam counts as AdamW: the states are the same. bitsandbytes stores Lion and SGD alike; a second beta below 1/2 is SGD's dampening.
    """
    saved = list(state_dict.get("param_groups", []))
    entries = [foreign.unnested(values) for values in state_dict.get("state", {}).values() if isinstance(values, Mapping)]
    keys = {key for values in entries for key in values}
    if not saved:
        return None
    group = saved[0]
    if any(FORMAT_KEY in one or "codec" in one for one in saved):
        return _named("flashoptim_hf", _by_options(group, keys))
    if "master_bytewidth" in group or any(key.endswith(foreign.QUANTIZED) for key in keys):
        return _named("flashoptim", _by_options(group, {key.partition("::")[0] for key in keys}))
    if "state1" in keys or "t_alpha" in group:
        return _named("bitsandbytes", _bitsandbytes_algorithm(group, keys))
    if any(foreign.is_torchao(value) for values in entries for value in values.values()):
        return _named("torchao", _torch_algorithm(group, keys))
    return _named("torch", _torch_algorithm(group, keys))


def _named(package: str, algorithm: str | None) -> Source | None:
    return None if algorithm is None else Source(package, algorithm)


def _by_options(group: Mapping[str, Any], keys: set[str]) -> str | None:
    """By the options that only one of the algorithms has, or else by the names of the states."""
    if "momentum" in group:
        return "sgd"
    if "betas" in group:
        return "adamw" if "eps" in group else "lion"
    return "adamw" if "exp_avg_sq" in keys else "sgd" if "momentum_buffer" in keys else "lion" if "exp_avg" in keys else None


def _bitsandbytes_algorithm(group: Mapping[str, Any], keys: set[str]) -> str | None:
    betas = group.get("betas", ())
    if len(betas) != 2 or "unorm_vec" in keys:  # AdEMAMix; LAMB and LARS
        return None
    if "state2" in keys or "t_alpha" in group:
        return "adamw"
    if group.get("eps", 0) > 0:  # RMSprop and Adagrad, which store one state too
        return None
    return "lion" if betas[1] >= 0.5 else "sgd"


def _torch_algorithm(group: Mapping[str, Any], keys: set[str]) -> str | None:
    radam = "decoupled_weight_decay" in group and "amsgrad" not in group  # it stores the same states for other arithmetic
    if "betas" in group and not radam:
        if {"exp_avg", "exp_avg_sq"} <= keys <= {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"} or (not keys and "amsgrad" in group):
            return "adamw"
        if {"exp_avg"} <= keys <= {"step", "exp_avg"}:
            return "lion"
    if "dampening" in group and keys <= {"step", "momentum_buffer"}:  # Muon has a momentum_buffer, and no dampening
        return "sgd"
    return None


def unknown(state_dict: Mapping[str, Any]) -> str:
    """The sentence about a state that nobody here can read."""
    return (
        f"this optimizer state has the entries {entries_of(state_dict)}, which is no format known here. Known are "
        "AdamW, Lion or SGD of flashoptim_hf, torch, bitsandbytes (8 or 32 bits) or flashoptim, or AdamW of torchao."
    )


def entries_of(state_dict: Mapping[str, Any]) -> str:
    """For messages: what the state keeps for a parameter."""
    keys = {key for values in state_dict.get("state", {}).values() if isinstance(values, Mapping) for key in foreign.unnested(values)}
    return ", ".join(sorted(map(str, keys))) or "none"
