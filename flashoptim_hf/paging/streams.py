"""Copies, streams and events. This file, and nothing else in the package, names a device API."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import ConfigurationError, HostMemoryError, UnsupportedError
from .host_limits import locked_text
from .plan import format_bytes

OUT_OF_MEMORY = torch.OutOfMemoryError
"""What a device's allocator raises when it has no more."""

Event = Any
"""A point in a stream, as a backend's `record` gives it; opaque to everything but that backend."""

Stream = Literal["in", "out", "compute"]
"""Copies to the device, copies from it, and the user's own work with the kernels. Each runs in order, none waits for another."""


class Backend(ABC):
    """Memory, copies and kernel launches on one device.

    Args:
        device: where kernels run.
        pin: whether host memory is to be page-locked. If that is refused, once is enough: one warning, and pageable memory from then on.

    Attributes:
        name: for reports.
        stages: whether pages travel to device memory. False: kernels work on home memory.
        pins: whether the next `host_empty` tries to pin.
        pinned: True when host memory is pinned, False when that was refused, None when it was not tried (so far).
    """

    name: str
    stages: ClassVar[bool]

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self.device = device
        self.pins = pin
        self.pinned: bool | None = None

    def host_empty(self, nbytes: int) -> Tensor:
        """Uninitialised host memory, uint8 of shape (nbytes,), pinned when possible.

        Raises:
            HostMemoryError: there is not even pageable memory.
        """
        if self.pins and nbytes:
            try:
                buffer = self._pin(nbytes)
            except RuntimeError as error:
                self._stop_pinning(nbytes, error)
            else:
                self.pinned = True
                return buffer
        try:
            return self._pageable(nbytes)
        except (RuntimeError, MemoryError) as error:
            raise HostMemoryError(
                f"{format_bytes(nbytes)} of host memory for optimizer state cannot be had ({_first_line(error)}). Free host memory, "
                "train fewer parameters (for example LoRA adapters only), or shard the state over more processes (FSDP2)."
            ) from error

    def _pin(self, nbytes: int) -> Tensor:
        """Pinned memory of that size, or the RuntimeError that says why there is none."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def _pageable(self, nbytes: int) -> Tensor:
        """Ordinary memory of that size, or the RuntimeError or MemoryError that says why there is none."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def _stop_pinning(self, nbytes: int, error: RuntimeError) -> None:
        self.pins = self.pinned = False
        warnings.warn(
            f"host memory for paged optimizer state stays pageable: pinning {format_bytes(nbytes)} failed ({_first_line(error)}). "
            f"Training is right but copies are slower. Usual causes: the limit on locked memory ({locked_text()}), a container's memory "
            "limit, WSL.",
            RuntimeWarning,
            stacklevel=3,
        )

    def trim(self) -> None:  # noqa: B027 (most backends keep nothing)
        """Give pinned memory that is no longer in use back to the system, where the allocator would keep it."""

    def trim_device(self) -> None:  # noqa: B027 (most backends keep nothing)
        """Give device memory that is no longer in use back to the device, where the allocator would keep it. May wait for the device."""

    def device_memory(self) -> tuple[int, int] | None:
        """(bytes that are free on the device, all its bytes); None where there is no limit to know."""
        return None

    def reach(self, home: Tensor) -> Tensor:  # noqa: ARG002
        """The same host memory as a tensor that kernels on the device can read and write in place.

        Raises:
            UnsupportedError: the device cannot reach it.
        """
        raise UnsupportedError(f"transport='zero_copy' is not served on {self.device}; use transport='staged'.")

    @abstractmethod
    def device_empty(self, nbytes: int) -> Tensor:
        """Uninitialised device memory, uint8 of shape (nbytes,).

        Work on the compute stream may use it at once; other streams must wait for an event recorded there after this call.
        """

    def device_home(self, nbytes: int) -> Tensor:
        """Uninitialised device memory, uint8 of shape (nbytes,), that only the compute stream will ever use."""
        return self.device_empty(nbytes)

    @abstractmethod
    def copy(self, stream: Stream, dst: Tensor, src: Tensor, *, keep: bool = False) -> None:
        """Queue a copy on the stream "in" (host to device) or "out" (device to host); shapes and dtypes agree.

        `keep` says that `src` remains valid. Without it, its content counts as gone until something else is written there.
        """

    def host_copy(self, dst: Tensor, src: Tensor) -> None:
        """Copy between two places in host memory, at once."""
        dst.copy_(src)

    def leave_stale(self, home: Tensor) -> None:  # noqa: B027 (for a device that looks for mistakes)
        """Home memory was copied elsewhere and is not to be read again before it is written."""

    @abstractmethod
    def launch(self, fn: Callable[[], None], *, nbytes: int = 0, linked: bool = False) -> None:
        """Run `fn`, which starts kernels, on the compute stream: the stream of the user's own work on this device.

        `nbytes` of state are read and written, over the link to the host where `linked`: for a device that only models time.
        """

    def used(self, tensor: Tensor) -> None:  # noqa: B027 (most backends run everything at once)
        """What is queued on the compute stream uses this memory: it is not given away before, whichever stream it was allocated on."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """An event that is reached when everything queued on the stream so far is done."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event | None) -> None:
        """What is queued on the stream from now on waits for the event. None: nothing to wait for."""

    @abstractmethod
    def wait_host(self, event: Event | None) -> None:
        """The host waits for the event, or for everything that is queued when it is None."""

    def elapsed(self, start: Event, stop: Event) -> float | None:  # noqa: ARG002
        """Seconds between two events of one stream; None where they are not both reached yet, or there are no clocks."""
        return None

    def read_later(self, value: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Copy a small tensor to the host behind the work queued so far, without waiting.

        Args:
            into: what an earlier call's function gave, and nobody needs any more, for a tensor of the same shape and dtype: the copy goes
                there.

        Returns:
            a function that waits for this copy alone and gives the copy.
        """
        host = into
        if host is None:
            host = self.host_empty(value.numel() * value.itemsize).view(value.dtype).view(value.shape)
        self.wait("out", self.record("compute"))
        self.copy("out", host, value, keep=True)
        event = self.record("out")
        source = [value]  # keeps the memory from being given away while the copy is under way

        def read() -> Tensor:
            self.wait_host(event)
            source.clear()
            return host

        return read

    @abstractmethod
    def end_step(self) -> None:
        """The user's own work goes on after this call. Copies may stay in flight, and nothing waits on a real device."""


class HostBackend(Backend):
    """The CPU: kernels work on home memory, nothing is copied, everything is done when the call returns."""

    name = "host"
    stages = False

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device or torch.device("cpu"), pin=False)

    def device_empty(self, nbytes: int) -> Tensor:
        return self.host_empty(nbytes)

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, *, keep: bool = False) -> None:  # noqa: ARG002
        dst.copy_(src)

    def launch(self, fn: Callable[[], None], *, nbytes: int = 0, linked: bool = False) -> None:  # noqa: ARG002
        fn()

    def record(self, stream: Stream) -> Event:  # noqa: ARG002
        return None

    def wait(self, stream: Stream, event: Event | None) -> None:
        pass

    def wait_host(self, event: Event | None) -> None:
        pass

    def end_step(self) -> None:
        pass


class AcceleratorBackend(Backend):
    """CUDA, ROCm or XPU, through the functions that `torch.cuda` and `torch.xpu` have in common.

    The copy streams of a device are made once and shared by all backends on it. The compute stream is whatever torch's current
    stream of this device is at the time of the call, which need not be the current device.

    Args:
        device: a device without an index means the current one.
    """

    stages = True

    def __init__(self, device: torch.device) -> None:
        self._api: Any = torch.get_device_module(device)
        index = self._api.current_device() if device.index is None else device.index
        super().__init__(torch.device(device.type, index), pin=True)
        self.name = device.type
        self._copy_streams = _copy_streams(self._api, self.device)

    def _stream(self, stream: Stream) -> Any:
        return self._api.current_stream(self.device) if stream == "compute" else self._copy_streams[stream]

    def _on_device(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._api.device(self.device)
        return context

    def _pin(self, nbytes: int) -> Tensor:
        # pinning goes through the current device's context and would make one on device 0
        with self._on_device():
            return super()._pin(nbytes)

    def trim(self) -> None:
        # torch keeps freed pinned blocks for reuse, and not every version has a public way to let them go
        release = getattr(torch.accelerator, "empty_host_cache", None)
        if release is not None:
            release()

    def trim_device(self) -> None:
        self._api.empty_cache()

    def device_memory(self) -> tuple[int, int] | None:
        # of the device, not of torch's allocator: what the model needs at its peak is kept there and counts as taken
        free, total = self._api.mem_get_info(self.device)
        return int(free), int(total)

    def reach(self, home: Tensor) -> Tensor:
        if self.device.type != "cuda":
            return super().reach(home)
        if not home.is_pinned():
            raise UnsupportedError(
                "transport='zero_copy' needs page-locked host memory for optimizer state, and "
                f"{format_bytes(home.numel() * home.itemsize)} of it could not be pinned (limit on locked memory: {locked_text()}). "
                "Use transport='staged', or lift the limit."
            )
        with self._on_device():
            alias = torch.as_tensor(_Mapped(home), device=self.device).view(home.dtype)
        # a copy would be updated instead of the state
        assert alias.data_ptr() == home.data_ptr()
        return alias

    def elapsed(self, start: Event, stop: Event) -> float | None:
        return float(start.elapsed_time(stop)) / 1e3 if start.query() and stop.query() else None

    def device_empty(self, nbytes: int) -> Tensor:
        buffer = self._device_empty(nbytes)
        # the allocator then keeps a freed buffer until the copies that use it are done
        for stream in self._copy_streams.values():
            buffer.record_stream(stream)
        return buffer

    def _device_empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, *, keep: bool = False) -> None:  # noqa: ARG002
        with self._api.stream(self._copy_streams[stream]):
            dst.copy_(src, non_blocking=True)

    def launch(self, fn: Callable[[], None], *, nbytes: int = 0, linked: bool = False) -> None:  # noqa: ARG002
        with self._on_device():
            fn()

    def used(self, tensor: Tensor) -> None:
        # where it was allocated on this stream, the allocator makes nothing of it
        tensor.record_stream(self._stream("compute"))

    def record(self, stream: Stream) -> Event:
        event = self._api.Event(enable_timing=True)
        event.record(self._stream(stream))
        return event

    def wait(self, stream: Stream, event: Event | None) -> None:
        if event is not None:
            self._stream(stream).wait_event(event)

    def wait_host(self, event: Event | None) -> None:
        if event is not None:
            event.synchronize()
        else:
            for stream in (*self._copy_streams.values(), self._stream("compute")):
                stream.synchronize()

    def end_step(self) -> None:
        pass


class _Mapped:
    """Host memory as an array on the device: pinned memory has one address on both sides."""

    def __init__(self, home: Tensor) -> None:
        self._home = home  # the array lives as long as it is used
        nbytes = home.numel() * home.itemsize
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (home.data_ptr(), False), "version": 2}


@cache
def _copy_streams(api: Any, device: torch.device) -> dict[str, Any]:
    """The copy streams of a device, made once in a process: streams are few, and each new optimizer would take two more."""
    return {"in": api.Stream(device=device), "out": api.Stream(device=device)}


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def devices() -> list[torch.device]:
    """The accelerators of this machine that optimizer state is served on; none where there is only the CPU."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    if kind is None or kind.type not in ("cuda", "xpu"):
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def device_name(device: torch.device) -> str:
    """The name that an accelerator's maker gave it."""
    return str(torch.get_device_module(device).get_device_name(device))


def backend_for(device: torch.device, simulate: int | None = None) -> Backend:
    """The backend that serves a device.

    Args:
        device: where the parameters are.
        simulate: a seed: use a simulated device, which keeps its own memory and runs copies and kernels in an order drawn from the seed.
            For tests, with parameters on the CPU.

    Raises:
        ConfigurationError: `simulate` with parameters that are not on the CPU.
        UnsupportedError: a device type that is not served.
    """
    if simulate is not None:
        if device.type != "cpu":
            raise ConfigurationError(
                f"simulate={simulate} needs parameters on the CPU, but they are on {device}; pass simulate=None there."
            )
        from .simulated import SimulatedBackend

        return SimulatedBackend(simulate)
    if device.type == "cpu":
        return HostBackend(device)
    if device.type in ("cuda", "xpu"):
        return AcceleratorBackend(device)
    raise UnsupportedError(
        f"parameters on {device} are not served: optimizer state can be kept for the device types cpu, cuda (NVIDIA and AMD) and xpu. "
        "Move the model to one of them before the first step."
    )
