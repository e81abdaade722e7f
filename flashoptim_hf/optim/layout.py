"""Which parameter is stored in which pool: made when a parameter is first stepped, changed when the parameter changes.

A pool holds the parameters that share a device, a dtype and a format, so that one kernel serves a whole page. Parameters enter a pool
when they first have a gradient, not at construction: FSDP2 and `model.to(...)` replace or convert them in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..codecs.base import Plane, get_codec
from ..codecs.weight_split import CORRECTION_DTYPE, copy_correction
from ..errors import UnsupportedError
from ..kernels.rule import Format, UpdateRule
from ..paging.engine import Engine
from ..paging.files import OffloadFiles
from ..paging.host_limits import host_memory, local_ranks, refuse_if_short
from ..paging.residency import BURST, IN_FLIGHT, FixedSet, pages_ahead
from ..paging.store import Block, StateStore
from ..paging.streams import backend_for
from .options import budget, check_param

CORRECTION = "correction"
STEP = "step"


class PoolKey(NamedTuple):
    """What the parameters of one pool have in common."""

    device: torch.device
    dtype: torch.dtype
    codec: str
    master_bits: int
    dither: bool
    stateful: bool


@dataclass
class Pool:
    """Parameters of one format on one device, and the store of their planes."""

    key: PoolKey
    fmt: Format
    store: StateStore

    @property
    def planes(self) -> tuple[Plane, ...]:
        return self.store.planes


class Record:
    """One parameter's state: where its planes are, and how many steps it has made.

    Attributes:
        pool, block: where the planes are.
        shape: of the local parameter.
        views: what `state` shows: the planes, code planes in the parameter's shape, and the step count.
        counter, place: the step count is `counter[place]`, an int64 array that parameters made together share.
        mixed: the step count at which a table's stored codes and its next encode may have last had different curves.
    """

    def __init__(self, pool: Pool, block: Block, shape: torch.Size, counter: np.ndarray, place: int) -> None:
        self.pool, self.block, self.shape = pool, block, shape
        self.counter, self.place = counter, place
        self.mixed = 0
        self.views: dict[str, Tensor] = {STEP: torch.from_numpy(counter)[place]}

    @property
    def step(self) -> int:
        return int(self.counter[self.place])

    def set_step(self, step: int) -> None:
        self.counter[self.place] = self.mixed = step


PLAIN = (torch.Tensor, torch.nn.Parameter)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: a DTensor's shard, any other tensor itself."""
    if type(tensor) in PLAIN:  # the usual case, without looking for an attribute that is not there
        return tensor
    shard = getattr(tensor, "_local_tensor", None)
    return tensor if shard is None else shard


def pool_key(param: Tensor, group: dict[str, Any], rule: UpdateRule, promoted: bool = False) -> PoolKey:
    """The pool a parameter belongs to now. fp32 weights carry no correction, whatever `master_bits` says.

    `promoted` says what "auto" means for this parameter: 32 instead of 24.
    """
    param = local(param)
    bits = group["master_bits"] if param.dtype != torch.float32 else None
    if bits == "auto":
        bits = 32 if promoted else 24
    return PoolKey(param.device, param.dtype, group["codec"], bits or 0, group["dither"], rule.keeps_states(group))


class Layout:
    """Pools, engines and records of one optimizer."""

    def __init__(self, rule: UpdateRule, options: dict[str, Any]) -> None:
        self.rule = rule
        self.options = options
        self.pools: dict[PoolKey, Pool] = {}
        self.engines: dict[torch.device, Engine] = {}
        self.records: dict[Tensor, Record] = {}
        self.promoted: set[Tensor] = set()
        folder = options["offload_dir"]
        self.files = None if folder is None else OffloadFiles(folder, keep=options["offload_keep"])

    def engine(self, device: torch.device) -> Engine:
        """The engine of a device, made once."""
        if device not in self.engines:
            self.engines[device] = Engine(
                backend_for(device, self.options["simulate"]),
                prefetch=pages_ahead(self.options["page_bytes"], BURST if self.options["gradient_release"] else IN_FLIGHT),
                residency=FixedSet(budget(self.options)),
                zero_copy=self.options["transport"] == "zero_copy",
            )
        return self.engines[device]

    def offer(self) -> None:
        """Tell every engine which pages there are. Call when state was made or freed, before the next update."""
        for device, engine in self.engines.items():
            engine.offer([page for pool in self.pools.values() if pool.key.device == device for page in pool.store.pages])

    def pool(self, key: PoolKey) -> Pool:
        """The pool of a key, made once."""
        if key not in self.pools:
            rule = self.rule if key.stateful else replace(self.rule, states=())
            codec = get_codec(key.codec, rule.states, key.dither)
            planes = codec.planes
            if key.master_bits:
                planes = (*planes, Plane(CORRECTION, CORRECTION_DTYPE[key.master_bits]))
            store = StateStore(
                planes,
                backend=self.engine(key.device).backend,
                paged=self.options["paged"],
                page_bytes=self.options["page_bytes"],
                files=self.files,
            )
            self.pools[key] = Pool(key, Format(rule, codec, key.master_bits), store)
        return self.pools[key]

    def ensure(self, params: Iterable[tuple[Tensor, dict[str, Any]]]) -> list[Tensor]:
        """Give every (parameter, group) a record in the right pool; returns the parameters whose record is new or has moved.

        A parameter whose dtype, device or codec changed keeps its step count and every plane that the new pool has too.

        Raises:
            ConfigurationError: a parameter has become something that cannot be stepped. Nothing has changed.
            HostMemoryError, OffloadError: see `check_host`.
        """
        wanted: dict[PoolKey, list[Tensor]] = {}
        groups: dict[Tensor, int] = {}
        for param, group in params:
            key = pool_key(param, group, self.rule, param in self.promoted)
            record = self.records.get(param)
            if record is None or record.pool.key != key:
                check_param(local(param), "(as it is now, since the optimizer was made)")
                wanted.setdefault(key, []).append(param)
                groups[param] = id(group)
        changed: list[Tensor] = []
        if any(param in self.records for members in wanted.values() for param in members):
            self.synchronize()  # what moves is read at home, where write-backs may still be under way
        self.check_host(wanted)
        # all memory first: where some of it cannot be had, nothing has changed
        made: list[tuple[Pool, list[Tensor], list[Block]]] = []
        try:
            for key, members in wanted.items():
                pool = self.pool(key)
                for request in self.requests(members, groups):
                    blocks = pool.store.allocate([local(p).numel() for p in request])
                    made.append((pool, request, blocks))
                    for table in pool.fmt.codec.fresh_tables():
                        for block, row in zip(blocks, table.to(key.device).repeat(len(blocks), 1), strict=True):
                            block.table = row
        except BaseException:
            for pool, _, blocks in made:
                for block in blocks:
                    pool.store.free(block)
            raise
        for pool, request, blocks in made:
            counter = np.zeros(len(request), dtype=np.int64)
            for place, (param, block) in enumerate(zip(request, blocks, strict=True)):
                self._enter(param, Record(pool, block, local(param).shape, counter, place))
                changed.append(param)
        return changed

    def check_shape(self, param: Tensor) -> None:
        """Refuse a parameter that was resized since its state was made. Raises `UnsupportedError`."""
        record = self.records.get(param)
        if record is not None and record.shape != local(param).shape:
            raise UnsupportedError(
                f"a parameter had shape {tuple(record.shape)} when its state was made and has {tuple(local(param).shape)} now. "
                "Resize the model (for example its embeddings) before the optimizer is made."
            )

    def requests(self, members: list[Tensor], groups: Mapping[Tensor, int]) -> list[list[Tensor]]:
        """In which requests the memory for parameters of one pool is asked for: all in one, in order.

        With gradient release in the order in which backward reaches them, the last one first, so that a page becomes complete early; and
        a request for each group, since groups (say, weights and biases) run through the whole model.
        """
        if not self.options["gradient_release"]:
            return [members]
        parts: dict[int, list[Tensor]] = {}
        for param in reversed(members):
            parts.setdefault(groups[param], []).append(param)
        return list(parts.values())

    def wanted(self, param_groups: Iterable[dict[str, Any]]) -> dict[PoolKey, list[Tensor]]:
        """The parameters that require a gradient and have no record yet, by the pool that they will be in."""
        found: dict[PoolKey, list[Tensor]] = {}
        for group in param_groups:
            for param in group["params"]:
                if param.requires_grad and param not in self.records and local(param).device.type != "meta":
                    found.setdefault(pool_key(param, group, self.rule), []).append(param)
        return found

    def abandoned(self, param_groups: Iterable[dict[str, Any]], state: Mapping[Tensor, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters with a record that are in no group any more, and those whose entry in `state` was taken out or emptied by hand.

        The latter is a wish to start anew.
        """
        if not self.records:
            return [], []
        present = {param for group in param_groups for param in group["params"]}
        orphans = [param for param in self.records if param not in present]
        emptied = [
            param
            for param, record in self.records.items()
            if param in present and (state.get(param) is not record.views or STEP not in record.views)
        ]
        return orphans, emptied

    def check_host(self, wanted: dict[PoolKey, list[Tensor]], *, together: bool = False) -> None:
        """Raise where there is no host memory, or no room on the disk, for state that is going to be made.

        Args:
            wanted: parameters by the pool they will be in.
            together: no process of this host has made its state yet.

        Raises:
            HostMemoryError: says what is needed and what is available. Nothing has been allocated.
            OffloadError: the same of the disk.
        """
        asked = [(self.pool(key).store, [local(p).numel() for p in members]) for key, members in wanted.items()]
        needed = sum(store.host_bytes(numels) for store, numels in asked)
        if needed:
            refuse_if_short(needed, ranks=local_ranks(), memory=host_memory(), together=together)
        if self.files is not None and asked:
            self.files.check(sum(store.file_bytes(numels) for store, numels in asked), ranks=local_ranks() if together else 1)

    def _enter(self, param: Tensor, record: Record) -> None:
        old = self.records.get(param)
        pool, block = record.pool, record.block
        block.owner = param
        for i, plane in enumerate(pool.planes):
            view = block.view(i)
            record.views[plane.name] = view.view(record.shape) if plane.group == 1 else view
        if block.table is not None:
            record.views[pool.fmt.codec.tables[0].name] = block.table
        if old is not None:
            before, after = old.pool.fmt.codec, pool.fmt.codec
            for name in (record.views.keys() & old.views.keys()) - {STEP, CORRECTION}:
                if before.name == after.name and record.views[name].dtype == old.views[name].dtype:
                    record.views[name].copy_(old.views[name])
            if before.name != after.name and before.states and after.states:
                encode_whole(record, before.decode(codec_views(old), old.block.numel), old.step)
            if CORRECTION in record.views and CORRECTION in old.views and pool.key.dtype == old.pool.key.dtype:
                copy_correction(record.views[CORRECTION], old.views[CORRECTION])
            record.set_step(old.step)
            old.pool.store.free(old.block)
        self.records[param] = record

    def drop(self, param: Tensor) -> None:
        """Forget a parameter and free its part of the planes."""
        record = self.records.pop(param)
        self.promoted.discard(param)
        record.pool.store.free(record.block)

    def evict(self, nbytes: int | None) -> int:
        """Take resident pages off their devices until `nbytes` are given back (None: all); returns the bytes."""
        freed = 0
        for engine in self.engines.values():
            if nbytes is None or freed < nbytes:
                freed += engine.evict(None if nbytes is None else nbytes - freed)
        return freed

    def synchronize(self) -> None:
        """Wait until the home copies of all planes are current."""
        for engine in self.engines.values():
            engine.synchronize()


def codec_views(record: Record) -> list[Tensor]:
    """The record's planes without the correction, flat, in the codec's order, then its tables."""
    codec = record.pool.fmt.codec
    return [*(record.block.view(i) for i in range(len(codec.planes))), *(record.views[table.name] for table in codec.tables)]


def encode_whole(record: Record, values: Sequence[Tensor], step: int) -> None:
    """Encode all of a parameter's states, fp32 (numel,), into its planes, with tables as they are before the first step."""
    codec, views = record.pool.fmt.codec, codec_views(record)
    for table, fresh in zip(views[len(codec.planes) :], codec.fresh_tables(), strict=True):
        table.copy_(fresh)
    codec.encode([value.to(views[0].device) for value in values], views, step=step)
