"""Parameter groups of other packages: their options under this package's names, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from .foreign import MASTER_BYTES
from .options import STORAGE
from .sources import DTYPE_KEY, FORMAT_KEY, Source

UNCOUNTED_KEY = "steps_since_conversion"
"""In a group: its step counts begin at a conversion, since the package before did not count."""

_HOW = ("foreach", "capturable", "differentiable", "fused")
"""Options of torch that say how, not what."""
_TORCH = {"adamw": ("amsgrad", "maximize", "decoupled_weight_decay"), "lion": ("maximize",), "sgd": ("maximize",)}
_BITSANDBYTES = ("alpha", "t_alpha", "t_beta3")


def incoming(source: Source, saved: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """A group of another package with this package's options; unknown ones are kept. Sentences about what changes go to `notes`.

    Raises:
        CheckpointError: an option that makes it another algorithm.
    """
    group = {key: value for key, value in saved.items() if key not in _HOW}
    for name, needs in (("amsgrad", "the largest second moment so far"), ("maximize", "steps up instead of down")):
        if group.get(name):
            raise CheckpointError(f"this state of {source} was made with {name}=True ({needs}), which does not exist here.")
    if source.algorithm == "adamw" and group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
        _note(
            notes,
            f"It is Adam's, which adds weight_decay={group['weight_decay']} to the gradient; here it is taken off the weights (AdamW).",
        )
    if isinstance(group.get("lr"), Tensor):
        group["lr"] = float(group["lr"])
    if source.package in ("torch", "torchao"):
        for name in _TORCH[source.algorithm]:
            group.pop(name, None)
    if source.package == "bitsandbytes":
        for name in _BITSANDBYTES:
            group.pop(name, None)
        if source.algorithm != "adamw":
            group.pop("eps", None)
        if source.algorithm == "sgd":
            # the second number is SGD's dampening, which bitsandbytes' kernels do not read
            group |= {"momentum": group.pop("betas")[0], "dampening": 0.0, "nesterov": False, "decoupled_weight_decay": False}
    if source.package == "flashoptim":
        group.pop("quantize", None)
        bits = {number: name for name, number in MASTER_BYTES.items()}
        group["master_bits"] = bits.get(group.pop("master_bytewidth", 0), 24)
    else:
        group["master_bits"] = None
    if "betas" in group:
        group["betas"] = tuple(group["betas"])
    return group


def outgoing(algorithm: str, target: str, saved: Mapping[str, Any], wide: bool, notes: list[str]) -> dict[str, Any]:
    """A group of this package with the target's options; unknown ones are kept.

    Args:
        wide: some correction of the group has 16 bits.

    Raises:
        CheckpointError: an option that the target does not have and that changes the result.
    """
    group = {key: value for key, value in saved.items() if key not in (*STORAGE, FORMAT_KEY, DTYPE_KEY, UNCOUNTED_KEY)}
    group["lr"] = float(group["lr"])
    if algorithm == "sgd":
        if group.pop("decoupled_weight_decay", False) and group["weight_decay"]:
            _note(notes, f"decoupled_weight_decay=True is no part of {target}'s state: choose one with decoupled decay (SGDW) there.")
        nesterov, dampening = group.pop("nesterov", False), group.pop("dampening", 0.0)
        if target == "bitsandbytes":
            if nesterov or dampening:
                raise CheckpointError(f"nesterov={nesterov} and dampening={dampening}: bitsandbytes' SGD has neither. Use sgd (torch).")
            group |= {"betas": (group.pop("momentum"), 0.0), "eps": 0.0}
        elif target == "sgd":
            group |= {"nesterov": nesterov, "dampening": dampening}
        else:
            group["dampening"] = dampening
            if nesterov:
                _note(notes, "nesterov=True is no part of flashoptim's state: pass it to the constructor there.")
    if target in ("adamw_torch", "sgd"):
        group |= {"maximize": False, "foreach": None, "differentiable": False, "fused": None}
        if algorithm == "adamw":
            group |= {"amsgrad": False, "capturable": False, "decoupled_weight_decay": True}
    elif target == "bitsandbytes":
        group |= {"alpha": 0.0, "t_alpha": None, "t_beta3": None} if algorithm == "adamw" else {"eps": 0.0}
    else:
        bits = saved.get("master_bits")
        width = (4 if wide else 3) if bits == "auto" else MASTER_BYTES[bits]
        group |= {"initial_lr": group.get("initial_lr", group["lr"]), "master_bytewidth": width, "quantize": True}
    return group


def _note(notes: list[str], sentence: str) -> None:
    if sentence not in notes:
        notes.append(sentence)
