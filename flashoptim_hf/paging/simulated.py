"""A device that exists only in host memory and behaves as badly as events allow, so that a missing wait shows on a CPU.

Copies and launches are queued in three streams. Each stream runs in order; between streams only events order anything, and the seed
decides how far each one gets before somebody waits for it. Content that must not be relied on is overwritten:

- device memory when it is allocated, as seen from the host and once more on the compute stream, where an earlier owner may still write;
- a host buffer when its copy to the device runs, since it is stale until it is written back;
- a device buffer when its copy to the host runs, since the next page may be on its way.

It also keeps time, which changes nothing: each stream has a clock, copies and kernels take what `Speeds` says, and a wait takes until the
event. Whatever order the seed chooses, the times are those of a machine on which nothing is held up without need.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..errors import UnsupportedError
from .plan import format_bytes
from .simulated_model import Fault, Faults, Speeds
from .streams import OUT_OF_MEMORY, Backend, Event, Stream

STREAMS: tuple[Stream, ...] = ("in", "compute", "out")

POLICIES: dict[str, tuple[Stream, ...] | None] = {
    "random": None,
    "copies in early, the rest late": ("in",),
    "compute late": ("in", "out"),
    "copies out early, the rest late": ("out",),
    "copies in late": ("out", "compute"),
    "copies out late": ("in", "compute"),
    "compute early, copies late": ("compute",),
    "everything late": (),
}
"""Streams that run as far as they can whenever something is queued; the others run only as far as somebody waits. None: by chance."""

DEVICE_POISON = 0xFF
"""NaN in every floating dtype."""

HOST_POISON = 0xA5


class DeadlockError(RuntimeError):
    """Somebody waits for an event that cannot be reached."""


@dataclass(eq=False)
class SimulatedEvent:
    """A point in a stream; `done` once everything queued before it has run."""

    stream: Stream
    number: int
    done: bool = False
    time: float = 0.0

    def __str__(self) -> str:
        return f"{self.stream}#{self.number}"


@dataclass
class Operation:
    """One entry of a stream: wait for an event, or run something and reach an event. Queued at `queued`, it takes `seconds`."""

    run: Callable[[], None] | None = None
    waits_for: SimulatedEvent | None = None
    reaches: SimulatedEvent | None = None
    seconds: float = 0.0
    queued: float = 0.0


@dataclass
class StepBytes:
    """Bytes queued to and from the device."""

    bytes_in: int = 0
    bytes_out: int = 0


@dataclass
class DeviceMemory:
    """Bytes of simulated device memory that are allocated now, and the most there were."""

    now: int = 0
    peak: int = 0

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def give(self, nbytes: int) -> None:
        self.now -= nbytes


@dataclass
class _Queues:
    streams: dict[Stream, deque[Operation]] = field(default_factory=lambda: {name: deque() for name in STREAMS})
    events: int = 0
    clocks: dict[Stream, float] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0.0))


class SimulatedBackend(Backend):
    """The simulated device. The same seed and the same calls give the same order of execution.

    Errors raised by a kernel surface at the next `end_step` or `wait_host`, as on a real device; what is queued behind it still runs.

    Args:
        seed: picks the policy and feeds its chance.
        policy: one of `POLICIES`; None: by the seed, half of them "random".
        pin: whether host memory goes through pinning, for tests of its failure. Without it, all memory that `host_empty` gives counts as
            reachable by kernels.
        speeds: what things cost.
        capacity: bytes of device memory; None: no limit.

    Attributes:
        step_bytes, last_step, total: bytes since the last `end_step`, of the step it ended, and of all.
        memory: device memory now and at its peak.
        host_time: seconds that the host has spent queueing and waiting.
        steps: steps that have ended.
    """

    name = "simulated"
    stages = True

    def __init__(
        self,
        seed: int,
        policy: str | None = None,
        *,
        pin: bool = False,
        speeds: Speeds | None = None,
        capacity: int | None = None,
    ) -> None:
        super().__init__(torch.device("cpu"), pin=pin)
        self.speeds = speeds or Speeds()
        self.capacity = capacity
        self.host_time = 0.0
        self.steps = 0
        self._faults = Faults()
        self._reachable: set[int] = set()
        self._rng = random.Random(seed)
        self.policy = policy or self._rng.choice(["random"] * (len(POLICIES) - 1) + [name for name in POLICIES if name != "random"])
        self._eager = POLICIES[self.policy]
        self._restlessness = self._rng.choice((0.2, 0.5, 0.8, 0.95))
        self._queues = _Queues()
        self._error: Exception | None = None
        self.step_bytes, self.last_step, self.total = StepBytes(), StepBytes(), StepBytes()
        self.memory = DeviceMemory()

    def fail(self, what: Fault, *, at: int = 1, times: int = 1, step: int = 0) -> None:
        """Let calls fail on purpose.

        Args:
            what: "allocate" (device memory, as out of memory), "copy", "launch", "pin" or "host" (memory).
            at: the first call that fails, counted from 1, from now on or from the beginning of `step`.
            times: how many fail in a row.
            step: steps that must have ended before calls are counted.
        """
        self._faults.add(what, at, times, step)

    def work(self, seconds: float) -> None:
        """The user's own work on the compute stream, such as a backward pass."""
        self._queue("compute", Operation(seconds=seconds))

    # ------------------------------------------------------------------ what the engine calls

    def host_empty(self, nbytes: int) -> Tensor:
        buffer = super().host_empty(nbytes)
        if self.pinned is not False and nbytes:
            self._reachable.add(buffer.data_ptr())
        return buffer

    def _pin(self, nbytes: int) -> Tensor:
        self._faults.hit("pin", self.steps)
        return super()._pin(nbytes)

    def _pageable(self, nbytes: int) -> Tensor:
        self._faults.hit("host", self.steps)
        return super()._pageable(nbytes)

    def reach(self, home: Tensor) -> Tensor:
        if home.numel() and home.untyped_storage().data_ptr() not in self._reachable:
            raise UnsupportedError(
                "transport='zero_copy' needs page-locked host memory for optimizer state, and "
                f"{format_bytes(home.numel() * home.itemsize)} of it are pageable or in a file. Use transport='staged'."
            )
        return home.view(home.shape)

    def device_memory(self) -> tuple[int, int] | None:
        return None if self.capacity is None else (self.capacity - self.memory.now, self.capacity)

    def device_empty(self, nbytes: int) -> Tensor:
        buffer = self.device_home(nbytes)
        self._queue("compute", Operation(run=lambda: _poison(buffer, DEVICE_POISON)))
        return buffer

    def device_home(self, nbytes: int) -> Tensor:
        self._faults.hit("allocate", self.steps)
        if self.capacity is not None and self.memory.now + nbytes > self.capacity:
            raise OUT_OF_MEMORY(
                f"simulated device: out of memory, {format_bytes(nbytes)} asked for, {format_bytes(self.capacity - self.memory.now)} free"
            )
        # numpy owns the memory, since a finalizer on a tensor would not see the views that keep it alive
        array = np.full(nbytes, DEVICE_POISON, dtype=np.uint8)
        self.memory.take(nbytes)
        weakref.finalize(array, self.memory.give, nbytes)
        return torch.from_numpy(array)

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, *, keep: bool = False) -> None:
        assert dst.shape == src.shape
        assert dst.dtype == src.dtype
        self._faults.hit("copy", self.steps)
        poison = HOST_POISON if stream == "in" else DEVICE_POISON
        nbytes = src.numel() * src.itemsize
        for count in (self.step_bytes, self.total):
            if stream == "in":
                count.bytes_in += nbytes
            else:
                count.bytes_out += nbytes

        def run() -> None:
            dst.copy_(src)
            if not keep:
                _poison(src, poison)

        self._queue(stream, Operation(run=run, seconds=self.speeds.copy_seconds(nbytes, stream == "in")))

    def host_copy(self, dst: Tensor, src: Tensor) -> None:
        super().host_copy(dst, src)
        self.host_time += src.numel() * src.itemsize / self.speeds.host

    def leave_stale(self, home: Tensor) -> None:
        _poison(home, HOST_POISON)

    def launch(self, fn: Callable[[], None], *, nbytes: int = 0, linked: bool = False) -> None:
        self._faults.hit("launch", self.steps)
        if linked:
            for count in (self.step_bytes, self.total):
                count.bytes_in += nbytes
                count.bytes_out += nbytes
        self._queue("compute", Operation(run=fn, seconds=self.speeds.kernel_seconds(nbytes, linked)))

    def elapsed(self, start: Event, stop: Event) -> float | None:
        return float(stop.time - start.time) if start.done and stop.done else None

    def record(self, stream: Stream) -> Event:
        self._queues.events += 1
        event = SimulatedEvent(stream, self._queues.events)
        self._queue(stream, Operation(reaches=event))
        return event

    def wait(self, stream: Stream, event: Event | None) -> None:
        if event is not None:
            self._queue(stream, Operation(waits_for=event))

    def wait_host(self, event: Event | None) -> None:
        if event is not None:
            self._reach(event)
            self.host_time = max(self.host_time, event.time)
        else:
            while left := [stream for stream in STREAMS if self._queues.streams[stream]]:
                able = [stream for stream in left if self._runnable(stream)]
                if able:
                    self._run_head(self._rng.choice(able))
                else:
                    self._drain(left[0])  # which says what the deadlock is
            self.host_time = max(self.host_time, *self._queues.clocks.values())
        self._raise_error()

    def end_step(self) -> None:
        self._run_ahead()
        self._drain("compute")
        self.last_step, self.step_bytes = self.step_bytes, StepBytes()
        self.steps += 1
        self._raise_error()

    # ------------------------------------------------------------------ execution

    def _queue(self, stream: Stream, operation: Operation) -> None:
        self.host_time += self.speeds.call
        operation.queued = self.host_time
        self._queues.streams[stream].append(operation)
        self._run_ahead()

    def _run_ahead(self) -> None:
        """Run what the policy runs although nobody waits for it."""
        if self._eager is None:
            while self._rng.random() < self._restlessness:
                able = [name for name in STREAMS if self._runnable(name)]
                if not able:
                    break
                self._run_head(self._rng.choice(able))
        else:
            while able := [name for name in self._eager if self._runnable(name)]:
                self._run_head(able[0])

    def _runnable(self, stream: Stream) -> bool:
        queue = self._queues.streams[stream]
        return bool(queue) and (queue[0].waits_for is None or queue[0].waits_for.done)

    def _run_head(self, stream: Stream) -> None:
        operation = self._queues.streams[stream].popleft()
        clocks, event = self._queues.clocks, operation.waits_for
        start = max(clocks[stream], operation.queued, event.time if event is not None else 0.0)
        clocks[stream] = start + operation.seconds
        if operation.reaches is not None:
            operation.reaches.done, operation.reaches.time = True, clocks[stream]
        if operation.run is not None:
            try:
                operation.run()
            except Exception as error:
                self._error = self._error or error

    def _drain(self, stream: Stream) -> None:
        queue = self._queues.streams[stream]
        while queue:
            blocker = queue[0].waits_for
            if blocker is None or blocker.done:
                self._run_head(stream)
            else:
                self._reach(blocker)

    def _reach(self, event: SimulatedEvent) -> None:
        """Run exactly what has to run before the event is reached. Not recursive: chains of waits are as long as the queues."""
        chain = [event]
        while chain:
            target = chain[-1]
            if target.done:
                chain.pop()
                continue
            queue = self._queues.streams[target.stream]
            blocker = queue[0].waits_for if queue else None
            if not queue or blocker in chain:
                raise self._deadlock(chain, blocker)
            if blocker is not None and not blocker.done:
                chain.append(blocker)
            else:
                self._run_head(target.stream)

    def _deadlock(self, chain: list[SimulatedEvent], blocker: SimulatedEvent | None) -> DeadlockError:
        names = " waits for ".join(str(event) for event in (*chain, *([blocker] if blocker else [])))
        reason = "which is behind itself" if blocker else f"but nothing is queued on the stream {chain[-1].stream!r}"
        return DeadlockError(f"deadlock on the simulated device: {names}, {reason}.")

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _poison(tensor: Tensor, byte: int) -> None:
    if tensor.numel():
        tensor.view(torch.uint8).fill_(byte)
