"""Bytes of optimizer state: ours from the codec's planes and the pager's own arithmetic, exact; those of others from what they allocate."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..codecs.base import ALIGN, Codec, Plane, get_codec
from ..codecs.weight_split import CORRECTION_DTYPE
from ..errors import ConfigurationError
from ..kernels.rule import UpdateRule
from ..optim.options import budget
from ..paging import plan
from ..paging.residency import BURST, IN_FLIGHT, FixedSet, pages_ahead, parse_budget
from ..paging.store import BOUNDARY
from .setup import PREFIX

CORRECTION = "correction"
PageId = tuple[int, int]
"""A pool's number, and a page's in it."""
SMALLEST_8BIT = 4096
"""bitsandbytes stores states of smaller tensors in fp32 (`min_8bit_size`)."""
SMALLEST_PAGED = 100_000
"""bitsandbytes keeps states of smaller tensors on the device, paged or not."""


@dataclass(frozen=True)
class Trainable:
    """One trained tensor on one process: its name, local shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class StatePlan:
    """Optimizer state of one process, in bytes.

    Attributes:
        planes: what each plane uses, by its name.
        device: GPU memory for planes that live there, or for pages that stay.
        staging: GPU memory for pages in flight.
        host: host memory, with alignment and what pinning rounds up.
        unified: part of `host` that a driver moves to the GPU and back as it sees fit.
        transient: GPU memory that a step needs beside it for a moment: (least, most).
        travels: bytes that move to the GPU at each step, and as many back.
        pages: how many pages there are.
        remark: what else is to be known.
    """

    planes: Mapping[str, int] = field(default_factory=dict)
    device: int = 0
    staging: int = 0
    host: int = 0
    unified: int = 0
    transient: tuple[int, int] = (0, 0)
    travels: int = 0
    pages: int = 0
    remark: str = ""

    @property
    def used(self) -> int:
        """All planes, without alignment."""
        return sum(self.planes.values())


def rule_of(optimizer: str) -> UpdateRule:
    """The update rule of one of our optimizers.

    Raises:
        ConfigurationError: there is none of that name.
    """
    stem = optimizer.removeprefix(PREFIX).removeprefix("paged_")
    try:
        rule: UpdateRule = importlib.import_module(f"..optim.{stem}", __package__).RULE
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"optimizer {optimizer!r} is not known; flashoptim_paged_adamw is one.") from error
    return rule


def ours(
    trained: Sequence[Trainable],
    rule: UpdateRule,
    options: Mapping[str, Any],
    *,
    pinned: bool = True,
    gpu: bool = True,
) -> StatePlan:
    """State of our optimizers.

    Args:
        trained: tensors of this process, in the optimizer's order.
        rule: the algorithm.
        options: all of them, as in the optimizer's `defaults`.
        pinned: host memory is pinned, and so rounded up to powers of two, unless there is no GPU.
        gpu: weights are on a GPU. False: they are in host memory, where the optimizer then works.
    """
    options = {**options, "device_budget_bytes": parse_budget(options["device_budget_bytes"])}
    paged, pinned = options["paged"] and gpu, pinned and gpu
    planes_used: dict[str, int] = {}
    device = host = tables = 0
    sizes: dict[PageId, int] = {}
    slots: dict[PageId, int] = {}
    by_dtype: dict[torch.dtype, list[int]] = {}
    for tensor in trained:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.numel)
    for number, (dtype, numels) in enumerate(by_dtype.items()):
        planes = planes_of(rule, options, dtype)
        layouts = [(plane.dtype.itemsize, plane.group) for plane in planes]
        for plane in planes:
            planes_used[plane.name] = planes_used.get(plane.name, 0) + sum(plane.nbytes(numel) for numel in numels)
        at_home = plan.host_bytes(numels, layouts, ALIGN, pinned=pinned and paged)
        host, device = (host + at_home, device) if paged or not gpu else (host, device + at_home)
        for table in codec_of(rule, options).tables:
            planes_used[table.name] = planes_used.get(table.name, 0) + table.nbytes(0) * len(numels)
            tables += table.nbytes(0) * len(numels)
        for place, (nbytes, slot) in enumerate(_pages(numels, layouts, plan.parse_bytes(options["page_bytes"]), pinned and paged)):
            sizes[number, place], slots[number, place] = nbytes, slot
    host, device = (host, device + tables) if gpu else (host + tables, device)
    if not paged:
        return StatePlan(planes_used, device=device, host=host, pages=len(sizes))
    return _staged(StatePlan(planes_used, device=device, host=host, pages=len(sizes)), options, sizes, slots)


def _staged(state: StatePlan, options: Mapping[str, Any], sizes: dict[PageId, int], slots: dict[PageId, int]) -> StatePlan:
    """With what stays on the device, what travels, and the slots that it travels through."""
    chosen: FixedSet[PageId] = FixedSet(budget(dict(options)))
    chosen.offer(sizes, slots)
    stay = [page for page in sizes if chosen.admits(page)]
    travel = [page for page in sizes if not chosen.admits(page)]
    staging = 0
    if travel and options["transport"] != "zero_copy":
        in_flight = BURST if options["gradient_release"] else IN_FLIGHT
        count = min(len(travel), pages_ahead(plan.parse_bytes(options["page_bytes"]), in_flight) + 2)
        staging = count * max(slots[page] for page in travel)
    remark = ""
    if options["device_budget_bytes"] == "auto":
        remark = "device_budget_bytes=auto: pages stay in what is free after the first step; counted as if none did"
    return replace(
        state,
        device=state.device + sum(slots[page] for page in stay),
        staging=staging,
        travels=sum(sizes[page] for page in travel),
        remark=remark,
    )


def codec_of(rule: UpdateRule, options: Mapping[str, Any]) -> Codec:
    """The codec that stores the rule's states."""
    return get_codec(options["codec"], rule.states if rule.keeps_states(dict(options)) else (), options["dither"])


def planes_of(rule: UpdateRule, options: Mapping[str, Any], dtype: torch.dtype) -> tuple[Plane, ...]:
    """The planes of tensors of one dtype, as `optim/layout.py` makes them; master_bits="auto" counts as 24, with which it begins."""
    planes = codec_of(rule, options).planes
    bits = options["master_bits"] if dtype != torch.float32 else None
    if bits:
        planes = (*planes, Plane(CORRECTION, CORRECTION_DTYPE[24 if bits == "auto" else bits]))
    return planes


def _pages(numels: Sequence[int], layouts: Sequence[plan.Layout], page_bytes: int, pinned: bool) -> list[tuple[int, int]]:
    """Bytes of each page, and those that it takes in a slot."""
    per_page = plan.round_page(plan.page_elements(page_bytes, layouts, ALIGN), layouts, BOUNDARY, ALIGN)
    found = []
    for extent in plan.extents(numels, ALIGN, pinned=pinned):
        for start, stop in plan.cut(extent.used, per_page):
            sizes = [plan.plane_bytes(stop - start, layout) for layout in layouts]
            found.append((sum(sizes), plan.place(sizes, BOUNDARY)[1]))
    return found


def peer(name: str, trained: Sequence[Trainable], *, offload: bool = False) -> StatePlan:
    """State of another optimizer, as it allocates it.

    adamw_torch: two states in the weight's dtype and a 4-byte step count; without `fused`, a temporary as large as one state.
    adamw_8bit, paged_adamw_8bit (bitsandbytes, arXiv 2110.02861): two codes and two fp32 maxima per 256 elements; fp32 below 4096
    elements; two tables of 1 KiB. Paged: the codes of tensors from 100,000 elements on are in unified memory.
    adafactor (arXiv 1804.04235, section 3; transformers' one, without a first moment): fp32 means over rows and over columns of matrices,
    all of vectors; a step works on fp32 copies of one tensor at a time.

    Raises:
        ConfigurationError: a name that is not planned.
    """
    if name == "adamw_torch":
        moments = sum(tensor.nbytes for tensor in trained)
        state = StatePlan({"exp_avg": moments, "exp_avg_sq": moments, "step": 4 * len(trained)}, transient=(0, moments))
        if any(tensor.dtype != torch.float32 for tensor in trained):
            state = replace(state, remark="moments in 16 bits and no masters, as torch does for 16-bit weights")
    elif name in ("adamw_8bit", "paged_adamw_8bit"):
        state = _blockwise(trained, paged=name.startswith("paged"))
    elif name == "adafactor":
        matrices = [tensor for tensor in trained if len(tensor.shape) > 1]
        lines = sum(tensor.numel // tensor.shape[-1] + tensor.numel // tensor.shape[-2] for tensor in matrices if tensor.numel)
        vectors = sum(tensor.numel for tensor in trained if len(tensor.shape) < 2)
        most = max((tensor.numel for tensor in trained), default=0)
        state = StatePlan(
            {"exp_avg_sq_row, _col": 4 * lines, "exp_avg_sq": 4 * vectors, "RMS": 4 * len(trained)}, transient=(4 * most, 16 * most)
        )
    else:
        raise ConfigurationError(f"optimizer {name!r} is not planned.")
    if offload:
        return replace(state, host=state.used, unified=0, transient=(0, 0))
    return replace(state, device=state.used - state.unified, host=state.unified)


def _blockwise(trained: Sequence[Trainable], paged: bool) -> StatePlan:
    large = [tensor.numel for tensor in trained if tensor.numel >= SMALLEST_8BIT]
    small = sum(tensor.numel for tensor in trained if tensor.numel < SMALLEST_8BIT)
    planes = {
        "state1, state2": 2 * sum(large) + 8 * small,
        "absmax1, absmax2": 8 * sum(-(-numel // 256) for numel in large),
        "qmap1, qmap2": 2048 if large else 0,
    }
    if not paged:
        return StatePlan(planes)
    unified = 2 * sum(numel for numel in large if numel >= SMALLEST_PAGED)
    # every tensor that cannot stay comes and goes: unified memory keeps what was used last, which a cyclic scan never finds again
    remark = "travels only when the GPU is full; then at the driver's choice, up to all of it at each step"
    return StatePlan(planes, unified=unified, remark=remark)
