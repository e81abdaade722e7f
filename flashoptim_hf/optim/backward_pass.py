"""One backward pass and the `step()` behind it: each page is updated when the last of its gradients has come, and they are freed.

What a page waits for: the parameters that had a gradient in the pass before. One that comes late is updated by a second visit of its page.
A page that waits longer than memory allows (gradients came in another order than its parameters lie in) is visited early, for those that
are there. So the gradients that are alive at one time are about those of a page and of the largest parameters, whatever the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..kernels import select
from ..paging.engine import Engine
from ..paging.store import Page
from . import sharded
from .finite import Guard, known_at_once, mesh_groups
from .gradients import Spans
from .health import Health
from .layout import Layout
from .work import NUMEL, PageWork, StepPlan

NOT_FINITE = (
    "a gradient held NaN or infinity during backward: its page of parameters was left out of this step, and so were pages that share a "
    "parameter with it; others may have been updated before. Further steps with such gradients are counted in "
    "memory_report().skipped_steps and not reported one by one. If they go on, lower the learning rate or look at the data."
)

Flag = Tensor | bool | None
"""Whether gradients are not all finite: known, known to the device alone (1 or 0), not looked at."""


class Schedule:
    """What stays the same from pass to pass while the same parameters train, and what one pass learns from the one before.

    Attributes:
        works, devices: what there is to do on each page, and where.
        members: for each page, the numbers of its parameters.
        pages_of: for each parameter, the places of its pages in `works`.
        order: pages as they became complete in the last pass; at first as they were allocated.
        expected: for each parameter, whether it had a gradient in the last pass; at first all have.
        limit: bytes of gradients above which a page is visited before it is complete. In order, the parameter before, the one that
            arrives and a page of small ones are alive together.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.works: list[PageWork] = []
        self.devices: list[torch.device] = []
        for device, works in plan.pages.items():
            self.works += works
            self.devices += [device] * len(works)
        self.members = [list(dict.fromkeys(work.list)) for work in self.works]
        self.pages_of: list[list[int]] = [[] for _ in plan.params]
        for place, members in enumerate(self.members):
            for number in members:
                self.pages_of[number].append(place)
        self.order = list(range(len(self.works)))
        self.expected = np.ones(len(plan.params), dtype=bool)
        sizes = [record.block.numel * record.pool.key.dtype.itemsize for record in plan.records]
        pages = [int(work.rows[:, NUMEL].sum()) * work.pool.key.dtype.itemsize for work in self.works]
        self.limit = 2 * max(sizes, default=0) + max(pages, default=0)

    def learn(self, order: list[int], arrived: np.ndarray) -> None:
        """A pass is over: pages became complete in this order, and these parameters had a gradient."""
        first = dict.fromkeys(order)
        self.order = [*first, *(place for place in self.order if place not in first)]
        self.expected = arrived.copy()


class BackwardPass:
    """The state of one pass. Step counts and scalars of the plan are those of this step already.

    Attributes:
        arrived: for each parameter, whether its gradient has come.
        left: for each parameter, how many of its pages are still to be updated with this gradient.
        held: bytes of gradients that have come and wait.
        updated: whether any page was updated.
        skipped: whether a page is known to have been left out.
    """

    def __init__(self, schedule: Schedule, layout: Layout, guard: Guard, health: Health, kernel: str) -> None:
        self.schedule, self.plan = schedule, schedule.plan
        self._layout, self._guard, self._health, self._kernel = layout, guard, health, kernel
        count = len(self.plan.params)
        self.plan.flat.expect()
        self.arrived = np.zeros(count, dtype=bool)
        self.left = [len(pages) for pages in schedule.pages_of]
        self.held = 0
        self.updated = self.skipped = False
        self._missing = [int(schedule.expected[members].sum()) for members in schedule.members]
        self._ready: dict[int, list[int]] = {}
        self._todo: dict[torch.device, dict[int, None]] = {device: {} for device in self.plan.pages}
        for place in schedule.order:
            self._todo[schedule.devices[place]][place] = None
        self._begun: dict[torch.device, int] = {}
        self._order: list[int] = []
        self._flags: list[Flag] = [None] * count
        # a parameter is counted when its last page is launched; `certain` leaves out launches that the device may have skipped
        self._moved, self._certain, self._counted = (np.zeros(count, dtype=bool) for _ in range(3))
        self._launches: list[tuple[list[int], Tensor]] = []

    def _engines(self) -> Iterator[tuple[torch.device, Engine]]:
        return ((device, self._layout.engine(device)) for device in self.plan.pages)

    def reserve(self) -> None:
        """Take the device memory that all pages need.

        Raises:
            DeviceMemoryError: there is none. Nothing has changed.
        """
        for device, engine in self._engines():
            engine.reserve([work.page for work in self.plan.pages[device]])

    # ------------------------------------------------------------------ gradients

    def arrive(self, number: int, grad: Tensor) -> None:
        """A parameter's gradient (local, not to change any more) is there: update what has become complete.

        Raises:
            FloatingPointError: policy "raise", and a gradient that is not finite. Its page waits as it was.
            UnsupportedError: the gradient is sparse.
        """
        if grad.layout is not torch.strided:
            raise UnsupportedError(
                f"a gradient of shape {tuple(grad.shape)} has layout {grad.layout}; sparse gradients are not supported. "
                "Use nn.Embedding(..., sparse=False)."
            )
        self._take(number, grad)
        self.arrived[number] = True
        pages = self.schedule.pages_of[number]
        for place in pages:
            self._ready.setdefault(place, []).append(number)
            self._missing[place] -= bool(self.schedule.expected[number])
        if not pages:
            self._leave_empty(number)
        for place in pages:
            if self._missing[place] <= 0:
                self._update(place)
        while self.held > self.schedule.limit and self._ready:
            self._update(next(iter(self._ready)))
        if not self._order and pages:
            self._begin_first(self.schedule.devices[pages[0]])

    def retake(self, number: int, grad: Tensor) -> None:
        """The gradient of a parameter that waits was replaced by another one."""
        self.held -= self.plan.flat.grads[number].nbytes
        self._take(number, grad)

    def _take(self, number: int, grad: Tensor) -> None:
        self.plan.flat.take_one(number, grad)
        self.held += self.plan.flat.grads[number].nbytes

    def drop(self, number: int) -> None:
        """The gradient of a parameter that waits was taken back: pages that have not used it go without."""
        for place in self.schedule.pages_of[number]:
            waiting = self._ready.get(place, [])
            if number in waiting:
                waiting.remove(number)
                if not waiting:
                    del self._ready[place]
        self._let_go(number)

    def finish(self) -> None:
        """Update what has come and waits."""
        for place in list(self._ready):
            self._update(place)

    def abandon(self) -> None:
        """Forget what waits. What was updated stays so."""
        for number in {number for waiting in self._ready.values() for number in waiting}:
            self.drop(number)

    def end(self) -> None:
        """The user's own work goes on after this."""
        for device, engine in self._engines():
            try:
                self._send_back_begun(device)
            finally:
                engine.end_step()

    # ------------------------------------------------------------------ pages

    def _begin_first(self, device: torch.device) -> None:
        """Nothing has been updated yet: fetch the page that is due first when the first of its gradients has come."""
        place = next(iter(self._todo[device]), None)
        if place in self._ready and device not in self._begun:
            self._layout.engine(device).begin(self.schedule.works[place].page)
            self._begun[device] = place

    def _send_back_begun(self, device: torch.device) -> None:
        """Another page is complete first: the one that was begun goes back as it is, since slots may be few."""
        place = self._begun.pop(device, None)
        if place is not None:
            engine, page = self._layout.engine(device), self.schedule.works[place].page
            engine.begin(page)  # where it was not sent back in between, this changes nothing
            engine.finish(page, lambda: None)

    def _ahead(self, device: torch.device, place: int) -> list[Page]:
        """Pages to fetch behind this one. The one after them, if it is in a file, is read ahead."""
        engine = self._layout.engine(device)
        found: list[Page] = []
        for other in self._todo[device]:
            page = self.schedule.works[other].page
            if other == place or not engine.has_to_come(page):
                continue
            if len(found) == engine.prefetch:
                page.read_ahead()
                break
            found.append(page)
        return found

    def _update(self, place: int) -> None:
        """Update one page for the parameters that are ready in it, or leave it out if a gradient is not finite."""
        numbers, device = self._ready[place], self.schedule.devices[place]
        engine, work = self._layout.engine(device), self.schedule.works[place]
        flag = self._flag(numbers, device)
        if self._begun.get(device) == place and flag is not True:
            del self._begun[device]
        self._send_back_begun(device)
        if flag is True:
            self.skipped = True
            self._leave(place, numbers)
            return
        if len(numbers) < len(self.schedule.members[place]):
            work = self.plan.part(work, numbers)
        views = engine.begin(work.page, self._ahead(device, place))
        segments, flat = self.plan.segments(work), self.plan.flat
        kernel, skip = select.kernel_for(device, self._kernel), flag if isinstance(flag, Tensor) else None
        strided = [number for number in numbers if number in flat.strided]

        update: Callable[[], None] = partial(kernel, views, segments, work.pool.fmt, skip=skip)
        update = self._health.around(update, work, views, segments, engine.backend, skip=skip)

        def launch() -> None:
            update()
            for number in strided:
                flat.write_back_one(number)

        # before the launch: after a failure in it, a page that may have been updated is not updated again
        self._moved[numbers] = self.updated = True
        if skip is None:
            self._certain[numbers] = True
        else:
            self._launches.append((numbers, skip))
        gone = self._leave(place, numbers)
        engine.finish(work.page, launch)
        for grad in gone:
            engine.backend.used(grad)

    def _leave(self, place: int, numbers: list[int]) -> list[Tensor]:
        """The page is done with these parameters; returns the gradients that nobody needs any more."""
        del self._ready[place]
        self._todo[self.schedule.devices[place]].pop(place, None)
        self._order.append(place)
        gone = []
        for number in numbers:
            self.left[number] -= 1
            if not self.left[number]:
                gone.append(self.plan.flat.grads[number])
                self._let_go(number)
                self.plan.params[number].grad = None
        return gone

    def _leave_empty(self, number: int) -> None:
        """A parameter without elements here is stepped by being counted; where other ranks hold some, they say whether it was."""
        self._moved[number] = self._certain[number] = self._guard.policy == "off" or not sharded.is_sharded(self.plan.params[number])
        self._let_go(number)
        self.plan.params[number].grad = None

    def _let_go(self, number: int) -> None:
        self.held -= self.plan.flat.grads[number].nbytes
        self.plan.flat.let_go(number)
        if self._moved[number] and not self._counted[number]:
            self._count(number, 1)

    def _count(self, number: int, by: int) -> None:
        record = self.plan.records[number]
        record.counter[record.place] += by
        self._counted[number] = by > 0

    # ------------------------------------------------------------------ gradients that are not finite

    def _flag(self, numbers: list[int], device: torch.device) -> Flag:
        """Whether the page must be left out. A parameter keeps what was found at its first page, so that it moves as a whole or not."""
        if self._guard.policy == "off":
            return None
        new = [number for number in numbers if self._flags[number] is None]
        found = {id(flag): flag for flag in (self._flags[number] for number in numbers) if flag is not None}
        found |= {id(flag): flag for flag in self._guard.look(Spans([self.plan.flat.grads[number] for number in new])).values()}
        flags = list(found.values())
        flag: Flag
        if known_at_once(device) or self._guard.policy == "raise":
            flag = any(bool(value) for value in flags)
        else:
            tensors = [value for value in flags if isinstance(value, Tensor)]
            flag = tensors[0] if len(tensors) == 1 else torch.stack(tensors).amax() if tensors else False
        if flag is True and self._guard.policy == "raise":
            raise FloatingPointError(
                "a gradient holds NaN, infinity or a number above 4e18. Pages that were complete before have been updated already; this "
                "one has not. optimizer.zero_grad() drops what waits. With nonfinite='skip' such pages are left out."
            )
        for number in new:
            self._flags[number] = flag
        return flag

    def conclude(self) -> bool:
        """Agree with other ranks on what was stepped, and set the step counts right, at once or when the device has said what it skipped.

        Returns:
            whether something is known to have been left out.
        """
        self.schedule.learn(self._order, self.arrived)
        split = any(sharded.is_sharded(param) for param in self.plan.params)
        if self._guard.policy == "off" or not (self._launches or split):
            return self.skipped
        device = next(iter(self.plan.pages), torch.device("cpu"))
        marks = self._marks(device)
        if split:
            for group in mesh_groups(self.plan.params):
                torch.distributed.all_reduce(marks, torch.distributed.ReduceOp.MAX, group=group)
        read = self._layout.engine(device).backend.read_later(marks)
        outcome = self._outcome(read)
        if known_at_once(device):
            return outcome()
        self._guard.postpone(outcome)
        return False

    def _marks(self, device: torch.device) -> Tensor:
        """fp32: for each parameter 1 if a page of it was updated, and at the end 1 if a page was left out; on `device`."""
        marks = torch.tensor([*self._certain.tolist(), self.skipped], dtype=torch.float32, device=device)
        if self._launches:
            flags = torch.stack([flag.to(device, non_blocking=True) for _, flag in self._launches])
            owners = torch.tensor([number for numbers, _ in self._launches for number in numbers], device=device)
            places = torch.tensor([place for place, (numbers, _) in enumerate(self._launches) for _ in numbers], device=device)
            marks.scatter_reduce_(0, owners, (flags[places] == 0).float(), "amax")
            marks[-1] = torch.maximum(marks[-1], flags.amax())
        return marks

    def _outcome(self, read: Callable[[], Tensor]) -> Callable[[], bool]:
        def outcome() -> bool:
            *stepped, skipped = (read() > 0).tolist()
            for number in np.flatnonzero(self.arrived & (np.array(stepped, dtype=bool) != self._counted)).tolist():
                self._count(number, 1 if stepped[number] else -1)
            return bool(skipped)

        return outcome
