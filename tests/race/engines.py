"""Random schedules of one engine: steps at once and spread over backward, over any pages in any order, with everything that can fail.

Here copies and kernels may fail in the middle of a step: what ran is written down, and home must show just that.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashoptim_hf.errors import DeviceMemoryError, HostMemoryError
from flashoptim_hf.paging.engine import Engine
from flashoptim_hf.paging.files import OffloadFiles
from flashoptim_hf.paging.residency import FixedSet, LeastRecentlyUsed
from flashoptim_hf.paging.simulated import SimulatedBackend
from flashoptim_hf.paging.simulated_model import Faults, InjectedError
from flashoptim_hf.paging.store import Page
from flashoptim_hf.paging.streams import HostBackend
from tests.paging.world import World
from tests.race.optimizers import check_engine

OPERATIONS = ["run"] * 6 + ["some", "spread", "evict", "trim", "look", "write", "grow", "free", "staging", "budget"]
FAILURES = (InjectedError, DeviceMemoryError, HostMemoryError, torch.OutOfMemoryError)


class Race:
    """One schedule on the simulated device, and the same on the host.

    Args:
        seed: of the schedule and of the order of execution.
        files: state is there instead of in memory.
        engine: for tests with a broken one.
    """

    def __init__(self, seed: int, files: OffloadFiles | None = None, engine: type[Engine] = Engine) -> None:
        self.rng = rng = random.Random(seed)
        numels = [rng.choice([0, 7, 64, 100, 193, 300]) for _ in range(rng.randrange(1, 8))]
        shape: dict[str, Any] = {"numels": numels, "groups": rng.randrange(1, 4)}
        self.backend = SimulatedBackend(seed)
        zero_copy = files is None and rng.random() < 0.3
        limit = rng.choice([500, 2000])
        policy: Any = rng.choice([None, FixedSet(rng.choice([0.3, 0.6, 1.0, "auto", 900])), LeastRecentlyUsed(limit)])
        options = {"prefetch": rng.randrange(4), "residency": policy, "zero_copy": zero_copy, "files": files}
        self.world = World(self.backend, engine=engine, **shape, **options)
        self.reference = World(HostBackend(), **shape)
        self.ran: list[int] = []
        if rng.random() < 0.2:
            self.backend.capacity = rng.choice([2, 4, 8]) * 1024

    def play(self, length: int = 8) -> None:
        for _ in range(length):
            operation = self.rng.choice(OPERATIONS)
            faulty = self.rng.random() < 0.3
            if faulty:
                what = self.rng.choice(["copy", "copy", "launch", "allocate", "host"])
                self.backend.fail(what, at=self.rng.randrange(1, 25), times=self.rng.choice([1, 2]))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)  # no memory for one more page
                    getattr(self, operation)()
            except FAILURES:
                assert faulty or self.backend.capacity is not None
            self.backend._faults = Faults()
            self.recover()
            check_engine(self.world.engine)
        self.backend.capacity = None
        self.look()

    def recover(self) -> None:
        """A step that failed in the middle leaves pages in use until the next call."""
        if self.world.engine._failures.seen:
            self.world.engine._recover()

    # ------------------------------------------------------------------ operations

    def update(self, page: Page, planes: tuple[Tensor, ...]) -> Callable[[], None]:
        kernel, number = self.world.update(page, planes), self.world.store.pages.index(page)

        def counted() -> None:
            self.ran.append(number)
            kernel()

        return counted

    def run(self) -> None:
        self.world.engine.run(self.world.store.pages, self.update)

    def some(self) -> None:
        pages = self.world.store.pages
        self.world.engine.run(self.rng.sample(pages, self.rng.randrange(len(pages) + 1)), self.update)

    def spread(self) -> None:
        """As in backward: other work between pages, which may come in any order and with any hint, and memory may be asked for."""
        engine, pages = self.world.engine, self.world.store.pages[::-1]
        try:
            for number, page in enumerate(pages):
                ahead = pages[number + 1 : number + 1 + self.rng.randrange(3)]
                closure = self.update(page, engine.begin(page, self.rng.sample(ahead, len(ahead))))
                if self.rng.random() < 0.2:
                    engine.evict(self.rng.choice([None, 1]))
                engine.finish(page, closure)
                self.backend.work(1e-6)
        finally:
            engine.end_step()

    def evict(self) -> None:
        self.world.engine.evict(self.rng.choice([None, 1, 1000]))

    def trim(self) -> None:
        self.world.engine.trim()
        assert self.world.engine.device_bytes == 0

    def staging(self) -> None:
        self.world.engine.release_staging()

    def budget(self) -> None:
        """A step after which other pages stay."""
        policy, pages = self.world.engine._residents.policy, self.world.store.pages
        if isinstance(policy, FixedSet):
            policy.budget = self.rng.choice([0, 0.3, 0.6, 1.0, 900])
            self.world.engine.offer([])
            self.world.engine.offer(pages)
        self.run()  # in which pages leave that are used right after

    def look(self) -> None:
        """Home is current, and is what the kernels that ran have made of it."""
        self.world.engine.synchronize()
        pages = self.reference.store.pages
        for number in self.ran:
            self.reference.engine.run([pages[number]], self.reference.update)
        self.ran.clear()
        assert torch.equal(self.world.content(), self.reference.content())

    def write(self) -> None:
        """A load or a reset: what is written home counts."""
        self.look()
        block = self.rng.randrange(len(self.world.blocks))
        for world in (self.world, self.reference):
            world.blocks[block].view(0).fill_(3)
            world.blocks[block].view(1).mul_(0.5)

    def grow(self) -> None:
        if len(self.world.blocks) > 12:
            return
        self.look()
        for world in (self.world, self.reference):
            world.grow([100, 65])

    def free(self) -> None:
        if len(self.world.blocks) < 3:
            return
        self.look()  # numbers of pages change
        number = self.rng.randrange(len(self.world.blocks))
        for world in (self.world, self.reference):
            world.store.free(world.blocks.pop(number))
            world.engine.offer(world.store.pages)
