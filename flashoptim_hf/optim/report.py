"""`memory_report()`: how many bytes of what lie where, and what the last step moved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ..codecs.base import ALIGN
from ..paging import plan
from ..paging.engine import Engine
from ..paging.traffic import hidden_share
from .layout import CORRECTION, STEP, Layout, PoolKey, local, pool_key


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of optimizer state, counted, not estimated.

    Attributes:
        planes: bytes in use of each plane, by its name in `state`.
        moment_bytes: sum of the planes without the corrections.
        correction_bytes: the corrections that complete 16-bit weights to master weights.
        state_bytes: all planes.
        host_bytes: host memory and files allocated for planes, with alignment and spare room.
        host_pinned_bytes, host_pageable_bytes, host_file_bytes: its parts.
        bounce_bytes: pinned host memory through which pages travel between files and the device, beyond `host_bytes`.
        device_bytes: device memory allocated for planes, resident pages and staging; None where there is no device.
        staging_bytes: device memory for pages in flight.
        resident_bytes: paged state that stays on the device.
        pinned: whether the host memory is pinned; None where no state is in host memory for a device.
        pages: number of pages.
        page_in_bytes, page_out_bytes: bytes that the last step moved to and from the device.
        page_hits: pages that the last step found on the device.
        evictions: pages that had to leave the device although they were to stay, ever.
        transfer_seconds: time that the copies of a step took, of the last one that could be read without waiting; None where nothing
            was measured.
        waited_seconds: for how long of it kernels stood still.
        hidden_share: share of the transfer time during which they did not.
        launches: kernel launches of the last step.
        num_params: elements that have state on this process.
        quantized_share: share of these elements whose states are stored in fewer than four bytes each.
        skipped_steps: steps left out because a gradient was not finite.
    """

    planes: dict[str, int]
    moment_bytes: int
    correction_bytes: int
    state_bytes: int
    host_bytes: int
    host_pinned_bytes: int
    host_pageable_bytes: int
    host_file_bytes: int
    bounce_bytes: int
    device_bytes: int | None
    staging_bytes: int
    resident_bytes: int
    pinned: bool | None
    pages: int
    page_in_bytes: int
    page_out_bytes: int
    page_hits: int
    evictions: int
    transfer_seconds: float | None
    waited_seconds: float | None
    hidden_share: float | None
    launches: int
    num_params: int
    quantized_share: float
    skipped_steps: int

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and dictionaries."""
        return asdict(self)


def build_report(layout: Layout, skipped_steps: int) -> MemoryReport:
    """Count what the layout holds now."""
    planes: dict[str, int] = {}
    num_params = quantized = 0
    for record in layout.records.values():
        for name, view in record.views.items():
            if name != STEP:
                planes[name] = planes.get(name, 0) + view.numel() * view.itemsize
        num_params += record.block.numel
        if record.pool.fmt.codec.name != "none":
            quantized += record.block.numel

    host = device = 0
    has_device = False
    pinned: bool | None = None
    for pool in layout.pools.values():
        backend, store = layout.engine(pool.key.device).backend, pool.store
        has_device = has_device or backend.stages
        if store.paged or not backend.stages:
            host += store.allocated_bytes
        else:
            device += store.allocated_bytes
        if store.paged and backend.stages and backend.pinned is not None:
            pinned = backend.pinned and pinned is not False
    tables = 0  # in ordinary host memory
    for record in layout.records.values():
        if record.block.table is not None:
            at_home = not layout.engine(record.pool.key.device).backend.stages
            nbytes = record.block.table.nbytes
            tables, device = (tables + nbytes, device) if at_home else (tables, device + nbytes)
    engines = list(layout.engines.values())
    stores = [pool.store for pool in layout.pools.values()]
    timed = _times(engines)
    total = sum(planes.values())
    correction = planes.get(CORRECTION, 0)
    return MemoryReport(
        planes=planes,
        moment_bytes=total - correction,
        correction_bytes=correction,
        state_bytes=total,
        host_bytes=host + tables,
        host_pinned_bytes=sum(store.bytes_of("pinned") for store in stores),
        host_pageable_bytes=sum(store.bytes_of("pageable") for store in stores) + tables,
        host_file_bytes=sum(store.bytes_of("file") for store in stores),
        bounce_bytes=sum(engine.bounce_bytes for engine in engines),
        device_bytes=device + sum(engine.device_bytes for engine in engines) if has_device else None,
        staging_bytes=sum(engine.staging_bytes for engine in engines),
        resident_bytes=sum(engine.resident_bytes for engine in engines),
        pinned=pinned,
        pages=sum(len(pool.store.pages) for pool in layout.pools.values()),
        page_in_bytes=sum(engine.traffic.bytes_in for engine in engines),
        page_out_bytes=sum(engine.traffic.bytes_out for engine in engines),
        page_hits=sum(engine.traffic.hits for engine in engines),
        evictions=sum(engine.traffic.evictions for engine in engines),
        transfer_seconds=timed[0] if timed else None,
        waited_seconds=timed[1] if timed else None,
        hidden_share=hidden_share(*timed) if timed else None,
        launches=sum(engine.traffic.launches for engine in engines),
        num_params=num_params,
        quantized_share=quantized / num_params if num_params else 0.0,
        skipped_steps=skipped_steps,
    )


def planned_bytes(layout: Layout, params: Iterable[tuple[Tensor, dict[str, Any]]]) -> tuple[int, int]:
    """Memory that (parameter, group) pairs will take as `Layout.ensure` will place them, with alignment and what pinning rounds up.

    Returns:
        bytes on the host (files too) and on the device, without staging.
    """
    wanted: dict[PoolKey, list[Tensor]] = {}
    groups = dict(params)
    for param, group in groups.items():
        wanted.setdefault(pool_key(param, group, layout.rule, param in layout.promoted), []).append(param)
    owners = {param: id(group) for param, group in groups.items()}
    host = device = 0
    for key, members in wanted.items():
        backend, paged = layout.engine(key.device).backend, layout.options["paged"]
        pinned = paged and backend.stages and backend.pins and layout.files is None
        requests = [[local(param).numel() for param in request] for request in layout.requests(members, owners)]
        extents = [extent for numels in requests for extent in plan.extents(numels, ALIGN, pinned=pinned)]
        taken = sum(plane.nbytes(extent.capacity) for extent in extents for plane in layout.pool(key).planes)
        tables = len(members) * sum(table.nbytes(0) for table in layout.pool(key).fmt.codec.tables)
        host, device = (host + taken, device) if paged or not backend.stages else (host, device + taken)
        host, device = (host, device + tables) if backend.stages else (host + tables, device)
    return host, device


def _times(engines: list[Engine]) -> tuple[float, float] | None:
    """(transfer, waited) seconds of the last step that could be read, over all engines; None where none has measured anything."""
    for engine in engines:
        engine.stopwatch.read()
    sums = [engine.stopwatch.seconds for engine in engines if engine.stopwatch.seconds is not None]
    return (sum(transfer for transfer, _ in sums), sum(waited for _, waited in sums)) if sums else None
