"""Models, links and runs for the paging bench: the real engine on the simulated device, scaled.

A run has as many pages as the real one, up to a limit, and each page has 8192 elements instead of some ten million. Bandwidths are divided
by the same number, latencies are not, so every time is that of the real machine. Of models with more pages than the limit a part is run,
and half of that part, each with its part of forward and backward; times grow linearly with the number of pages, and are continued so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from torch import Tensor

from ..codecs.base import ALIGN, Plane, get_codec
from ..codecs.weight_split import CORRECTION_DTYPE
from ..optim.adamw import RULE
from ..optim.layout import CORRECTION
from ..paging import plan
from ..paging.engine import Engine
from ..paging.residency import FixedSet, LeastRecentlyUsed, Residency, pages_ahead
from ..paging.simulated import SimulatedBackend
from ..paging.simulated_model import Speeds
from ..paging.store import BOUNDARY, Page, StateStore
from ..paging.traffic import hidden_share

PAGE_BYTES = 32 * 2**20
SMALL_PAGE = 8192
"""Elements of a page that is run."""
STEPS = 4
TOKENS = 8192
"""Tokens of a step."""
FLOPS = 120e12
"""What the device computes in a second in forward and backward: two fifths of an A100's peak in bf16."""
RANK = 16

Way = Literal["ours", "release", "no_overlap", "least_recently_used", "resident"]
"""A fixed set stays; the same, updated during backward; one slot, so that nothing overlaps; what unified memory does; all stays."""


@dataclass(frozen=True)
class Shape:
    """A decoder: all its parameters, and what its linear layers look like."""

    params: int
    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int

    @property
    def lora(self) -> int:
        """Parameters of adapters of rank `RANK` on all linear layers."""
        attention = 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.keys)
        return RANK * self.layers * (attention + 3 * (self.hidden + self.inner))


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "1b": Shape(1_235_814_400, 16, 2048, 8192, 2048, 512),
        "3b": Shape(3_212_749_824, 28, 3072, 8192, 3072, 1024),
        "8b": Shape(8_030_261_248, 32, 4096, 14336, 4096, 1024),
        "14b": Shape(14_768_307_200, 40, 5120, 17408, 5120, 1024),
        "32b": Shape(32_762_123_264, 64, 5120, 25600, 8192, 1024),
        "70b": Shape(70_553_706_496, 80, 8192, 28672, 8192, 1024),
    }
)
"""Llama 3 (1B, 3B, 8B, 70B) and Qwen3 (14B, 32B), from their published configurations."""

LINKS: Mapping[str, float] = MappingProxyType({"pcie3": 12.5e9, "pcie4": 25e9, "pcie5": 50e9, "c2c": 300e9})
"""Bytes per second in each direction, as measured programs reach them with pinned memory: x16, and NVLink-C2C."""


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        trained: parameters with optimizer state.
        planes: of their state.
        compute: seconds of forward and backward of a step.
        backward: share of these that is backward.
    """

    trained: int
    planes: tuple[Plane, ...]
    compute: float
    backward: float

    @property
    def page_elements(self) -> int:
        """Elements of a real page."""
        layouts = [(plane.dtype.itemsize, plane.group) for plane in self.planes]
        return plan.round_page(plan.page_elements(PAGE_BYTES, layouts, ALIGN), layouts, BOUNDARY, ALIGN)

    @property
    def pages(self) -> int:
        return -(-self.trained // self.page_elements)

    @property
    def state_bytes(self) -> int:
        return sum(plane.nbytes(plan.round_up(self.trained, ALIGN)) for plane in self.planes)


def full(shape: Shape) -> Job:
    """Full fine-tuning: bf16 weights with 24-bit masters. 6 operations for each parameter and token, 4 of them in backward."""
    return Job(shape.params, (*_moments(), Plane(CORRECTION, CORRECTION_DTYPE[24])), 6 * shape.params * TOKENS / FLOPS, 2 / 3)


def lora(shape: Shape) -> Job:
    """Adapters in fp32 on a frozen base, whose gradients are not made: 4 operations, 2 of them in backward."""
    return Job(shape.lora, _moments(), 4 * shape.params * TOKENS / FLOPS, 1 / 2)


def _moments() -> tuple[Plane, ...]:
    return get_codec("log", RULE.states, True).planes


@dataclass(frozen=True)
class Outcome:
    """A step in the long run, in bytes and seconds of the real model.

    Attributes:
        seconds: from the end of one step to the end of the next.
        moved: bytes to and from the device.
        state, resident, staging: bytes of all state, of what stays on the device, and for pages in flight.
        hidden: share of the transfer time in which no kernel waited for it, None where nothing was moved.
    """

    seconds: float
    moved: int
    state: int
    resident: int
    staging: int
    hidden: float | None


def simulate(job: Job, link: float, way: Way, budget: float = 0.0, most_pages: int = 96) -> Outcome:
    """Run `STEPS` steps, and look at the last one. The way "no_overlap" takes no budget.

    Args:
        job: what is trained.
        link: bytes per second in each direction.
        way: how its state is kept and moved.
        budget: share of the state that may stay on the device.
        most_pages: run at most so many pages.
    """
    if job.pages <= most_pages:
        return _run(job, link, way, budget, job.pages)
    # even numbers of pages, so that budgets are met alike
    pages = most_pages // 8 * 8
    found, half = (_run(job, link, way, budget, number) for number in (pages, pages // 2))
    each = (found.seconds - half.seconds) / (pages - pages // 2)
    return replace(found, seconds=found.seconds + each * (job.state_bytes / _page_bytes(job) - pages))


def _run(job: Job, link: float, way: Way, budget: float, pages: int) -> Outcome:
    """`simulate` with so many pages: the time is for these, bytes are those of the whole."""
    scale = job.page_elements / SMALL_PAGE
    plain = Speeds()
    speeds = replace(plain, link_in=link / scale, link_out=link / scale, memory=plain.memory / scale, host=plain.host / scale)
    backend = SimulatedBackend(0, "everything late", speeds=speeds)
    store = StateStore(job.planes, backend=backend, paged=True, page_bytes=_small_page_bytes(job))
    # a small job's last page is not full
    last = job.trained - (job.pages - 1) * job.page_elements if pages == job.pages else job.page_elements
    store.allocate([SMALL_PAGE] * (pages - 1) + [plan.round_up(max(1, round(last / scale)), ALIGN)])
    state = sum(page.nbytes for page in store.pages)
    if way == "no_overlap":
        backend.capacity = store.pages[0].slot_bytes
    residency: Residency[Page] = FixedSet(1.0 if way == "resident" else budget)
    if way == "least_recently_used":
        residency = LeastRecentlyUsed(int(budget * state))
    engine = Engine(backend, prefetch=0 if way == "no_overlap" else pages_ahead(PAGE_BYTES), residency=residency)
    engine.offer(store.pages)
    part = job.compute * state * scale / job.state_bytes if pages < job.pages else job.compute
    ends = []
    for _ in range(STEPS):
        _step(engine, store.pages, part, job.backward, release=way == "release")
        ends.append(backend.record("compute"))
    backend.wait_host(None)
    engine.stopwatch.read()
    whole = Fraction(job.state_bytes, state)
    moved = engine.traffic.bytes_in + engine.traffic.bytes_out
    return Outcome(
        seconds=ends[-1].time - ends[-2].time,
        moved=round(moved * whole),
        state=job.state_bytes,
        resident=round(engine.resident_bytes * whole),
        staging=round(engine.staging_bytes * scale),
        hidden=hidden_share(*engine.stopwatch.seconds) if engine.stopwatch.seconds else None,
    )


def _small_page_bytes(job: Job) -> int:
    return sum(plane.nbytes(SMALL_PAGE) for plane in job.planes)


def _page_bytes(job: Job) -> int:
    return sum(plane.nbytes(job.page_elements) for plane in job.planes)


def _step(engine: Engine, pages: list[Page], compute: float, backward: float, *, release: bool) -> None:
    backend = engine.backend
    assert isinstance(backend, SimulatedBackend)
    if not release:
        backend.work(compute)
        engine.run(pages, _update)
        return
    backend.work(compute * (1 - backward))
    engine.reserve(pages)
    for number, page in enumerate(pages):
        # its gradients are final after this part of backward; by then it is on its way
        views = engine.begin(page, pages[number + 1 : number + 1 + engine.prefetch])
        backend.work(compute * backward / len(pages))
        engine.finish(page, _update(page, views))
    engine.end_step()


def _update(page: Page, planes: tuple[Tensor, ...]) -> Callable[[], None]:  # noqa: ARG001
    return _nothing


def _nothing() -> None:
    """A kernel whose numbers do not matter here; the device takes the time that it would."""
