"""Statistics of a saved state: range, zeros, and the error that one more encode would make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..codecs.base import ALIGN, Codec, get_codec
from . import convert, foreign
from .layout import STEP

MOST = 1 << 20
"""Elements of a tensor that are looked at, from its beginning."""


class Statistics(NamedTuple):
    """One state of one parameter.

    Attributes:
        state, shape, step: which; the step is 0 where the package does not count.
        smallest, largest: magnitudes, of those that are not zero.
        zeros: share of elements that are zero.
        error: root mean square of what one encode rounds away, relative to that of the values; of a second moment, of its root. 0 for
            fp32; None where the codes are another package's own.
    """

    state: str
    shape: tuple[int, ...]
    step: int
    smallest: float
    largest: float
    zeros: float
    error: float | None


def of_state(state_dict: Mapping[str, Any], algorithm: str, key: Any, group: Mapping[str, Any]) -> list[Statistics]:
    """The statistics of one parameter's states.

    Raises:
        CheckpointError: the state is damaged.
    """
    values = foreign.unnested(state_dict["state"][key])
    coded = any(foreign.is_torchao(v) or getattr(v, "dtype", None) == torch.uint8 for v in values.values())
    mine, _ = convert.to_ours({"state": {key: values}, "param_groups": [{**group, "params": [key]}]})
    own, found = mine["param_groups"][0], mine["state"][key]
    decoded, planes = convert.decode(algorithm, found, own)
    if not decoded:
        return []
    codec = get_codec(own["codec"], convert.STATES[algorithm], own.get("dither", True))
    theirs = coded and own["codec"] == "none"  # codes that were decoded on the way here
    errors = [None] * len(decoded) if theirs else encode_errors(codec, [planes[plane.name] for plane in codec.parts])
    rows = []
    for one, value, error in zip(codec.states, decoded, errors, strict=True):
        size = value.flatten()[:MOST].abs()
        there = size[size > 0]
        low, high = (float(there.min()), float(there.max())) if there.numel() else (0.0, 0.0)
        zeros = 1 - there.numel() / size.numel() if size.numel() else 0.0
        rows.append(Statistics(one.name, tuple(value.shape), int(found[STEP]), low, high, zeros, error))
    return rows


def encode_errors(codec: Codec, planes: list[Tensor]) -> list[float | None]:
    """For each state, the error of one encode, estimated from how far apart the codes beside the stored ones are.

    An element between two codes a gap apart is wrong by gap / sqrt(12) in the root mean square when it is rounded to nearest, and by
    gap / sqrt(6) when dither takes either code with the probabilities that keep the mean.
    """
    count = min(planes[0].numel(), MOST) // ALIGN * ALIGN or planes[0].numel()
    flat = [plane.reshape(-1)[: spec.entries(count)] for spec, plane in zip(codec.parts, planes, strict=True)]
    exact = codec.decode(flat, count)
    expected = codec.expected_errors(flat, count)
    if expected is not None:
        sizes = [value if one.signed else value.sqrt() for one, value in zip(codec.states, exact, strict=True)]
        return [float(error.norm() / size.norm()) if size.any() else 0.0 for error, size in zip(expected, sizes, strict=True)]
    rounds = codec.dither and codec.name not in ("softsign", "none")
    errors: list[float | None] = []
    for number, one in enumerate(codec.states):
        where = next(i for i, plane in enumerate(codec.planes) if plane.name == one.name)
        if flat[where].is_floating_point() or not count:
            errors.append(0.0)
            continue
        codes = flat[where].int()
        low, high = (-127, 127) if one.signed else (1, 255)
        beside = []
        for move in (-1, 1):
            moved = torch.where((codes == 0) & (not one.signed), codes, (codes + move).clamp(low, high))
            value = codec.decode([moved.to(plane.dtype) if i == where else plane for i, plane in enumerate(flat)], count)[number]
            beside.append(value if one.signed else value.sqrt())
        value = exact[number] if one.signed else exact[number].sqrt()
        gap = (beside[1] - beside[0]).abs() / 2
        size = float(value.double().square().mean().sqrt())
        errors.append(float(gap.double().square().mean().sqrt()) / math.sqrt(6 if rounds else 12) / size if size else 0.0)
    return errors
