"""The options of every optimizer: what values they take, and what they mean. Checked once, at construction."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..codecs.base import State, codecs_for, known_codecs
from ..errors import ConfigurationError
from ..paging.plan import parse_bytes
from ..paging.residency import Budget, parse_budget

PLACEMENT = (
    "paged",
    "page_bytes",
    "device_budget_bytes",
    "transport",
    "offload_dir",
    "offload_keep",
    "gradient_release",
    "kernel",
    "simulate",
    "nonfinite",
)
"""Options that say where and how, not what: the same for all groups, and never part of a checkpoint."""

STORAGE = ("codec", "master_bits", "dither", "learn_interval")
"""Options that say how numbers are stored. A checkpoint carries them; loading keeps the optimizer's own and converts."""

SMALLEST_PAGE = 1024
"""Bytes in which 64 elements fit with every codec and correction."""

CHOICES = {
    "transport": ("staged", "zero_copy", "resident"),
    "nonfinite": ("skip", "raise", "off"),
    "kernel": ("auto", "fused", "cpu", "eager"),
}

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_defaults(options: dict[str, Any]) -> None:
    """Check the options that hold for the whole optimizer, and normalise sizes to bytes, in place.

    Raises:
        ConfigurationError: names the option, its value and what is allowed.
    """
    for name, choices in CHOICES.items():
        if options[name] not in choices:
            raise ConfigurationError(f"{name}={options[name]!r} is not known; choose one of {', '.join(map(repr, choices))}.")
    for name in ("paged", "gradient_release", "dither", "offload_keep"):
        if not isinstance(options[name], bool):
            raise ConfigurationError(f"{name}={options[name]!r} must be True or False.")
    for name, parse in (("page_bytes", parse_bytes), ("device_budget_bytes", parse_budget)):
        try:
            options[name] = parse(options[name])
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}: {error}") from None
    if options["page_bytes"] < SMALLEST_PAGE:
        raise ConfigurationError(f"page_bytes={options['page_bytes']} must be at least {SMALLEST_PAGE}; '32MiB' is usual.")
    if options["transport"] == "resident" and options["device_budget_bytes"] not in (0, 1.0):
        raise ConfigurationError(
            "transport='resident' keeps all state on the device, and "
            f"device_budget_bytes={options['device_budget_bytes']!r} does not; leave one of them out."
        )
    _check_offload(options)
    simulate = options["simulate"]
    if simulate is not None and (isinstance(simulate, bool) or not isinstance(simulate, int)):
        raise ConfigurationError(f"simulate={simulate!r} must be None or the integer seed of the simulated device.")


def _check_offload(options: dict[str, Any]) -> None:
    """Check where files of state may be, and make the folder's name text."""
    folder = options["offload_dir"]
    if folder is None:
        return
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ConfigurationError(f"offload_dir={folder!r} must be the name of a folder, or None to keep paged state in RAM.")
    options["offload_dir"] = os.fspath(folder)
    if not options["paged"]:
        raise ConfigurationError(f"offload_dir={folder!r} is for paged state, and paged=False; pass paged=True (flashoptim_paged_...).")
    if options["transport"] == "zero_copy":
        raise ConfigurationError(
            f"transport='zero_copy' lets kernels work on page-locked RAM, and offload_dir={folder!r} puts state into files: use "
            "transport='staged', or leave offload_dir out."
        )


def budget(options: dict[str, Any]) -> Budget:
    """What of paged state stays on the device, as `paging.residency` takes it."""
    return 1.0 if options["transport"] == "resident" else options["device_budget_bytes"]


def check_group(group: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Check the options of one parameter group.

    Raises:
        ConfigurationError: names the option, its value and what is allowed.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ConfigurationError(f"lr is a tensor of shape {tuple(lr.shape)}; it must hold one number.")
    elif not (lr >= 0 and math.isfinite(lr)):
        raise ConfigurationError(f"lr={lr!r} must be a finite number, at least 0.")
    if not group["weight_decay"] >= 0:
        raise ConfigurationError(f"weight_decay={group['weight_decay']!r} must be at least 0.")
    if group["codec"] not in known_codecs():
        raise ConfigurationError(f"codec={group['codec']!r} is not known; choose one of {', '.join(map(repr, known_codecs()))}.")
    if group["master_bits"] not in (24, 32, None, "auto"):
        raise ConfigurationError(
            f"master_bits={group['master_bits']!r} is not known; choose 24 (8-bit correction), 32 (16-bit correction), "
            "'auto' (24, and 32 where 24 swallows updates) or None (no correction)."
        )
    for name in PLACEMENT:
        if group.get(name, defaults[name]) != defaults[name]:
            raise ConfigurationError(
                f"{name}={group[name]!r} in a parameter group: this option holds for the whole optimizer ({name}={defaults[name]!r}). "
                "Only lr, weight_decay, the algorithm's own options, codec, master_bits, dither and learn_interval can differ between "
                "groups."
            )


def check_codec(codec: str, states: Sequence[State], owner: str) -> None:
    """Check that a known codec can hold an algorithm's states.

    Raises:
        ConfigurationError: names the codec, the states, and the codecs that can hold them.
    """
    able = codecs_for(states)
    if codec not in able:
        names = ", ".join(state.name for state in states)
        raise ConfigurationError(
            f"codec={codec!r} cannot store the states of {owner} ({names}); choose one of {', '.join(map(repr, able))}."
        )


def check_param(param: Tensor, name: str) -> None:
    """Check that a parameter can be stepped.

    Raises:
        ConfigurationError: names the parameter, its dtype or layout, and the way out.
    """
    if param.dtype not in WEIGHT_DTYPES:
        raise ConfigurationError(
            f"parameter {name} of shape {tuple(param.shape)} has dtype {param.dtype}; bfloat16, float16 and float32 are supported. "
            "Convert it (model.float()), or leave it out of the optimizer."
        )
    if param.layout != torch.strided:
        raise ConfigurationError(f"parameter {name} has layout {param.layout}; only dense (strided) parameters are supported.")
    if any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True)):
        raise ConfigurationError(
            f"parameter {name} of shape {tuple(param.shape)} is an expanded tensor (strides {param.stride()}): several elements share "
            "memory and cannot be updated one by one. Pass a parameter of its own, for example nn.Parameter(tensor.contiguous())."
        )
