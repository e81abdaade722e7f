"""Which backend serves what, and the order of calls that the real one makes, on a recording stand-in for `torch.cuda`."""

import contextlib

import pytest
import torch

from flashoptim_hf.codecs.base import Plane
from flashoptim_hf.errors import ConfigurationError, UnsupportedError
from flashoptim_hf.paging import streams
from flashoptim_hf.paging.engine import Engine
from flashoptim_hf.paging.simulated import SimulatedBackend
from flashoptim_hf.paging.store import StateStore
from flashoptim_hf.paging.streams import AcceleratorBackend, HostBackend, backend_for

PLANES = (Plane("code", torch.int8), Plane("value", torch.float32), Plane("scale", torch.bfloat16, 64))
GROUP_BYTES = 64 * (1 + 4) + 2


class FakeDeviceModule:
    """What `torch.cuda` and `torch.xpu` share, carried out at once on the CPU. Records every call, and which device was current."""

    def __init__(self, count=2):
        self.calls, self.now, self.on_stream = [], 0, None
        self.reached, self.emptied, self.free = False, 0, (5, 7)
        self.streams_made = []
        module = self

        class Stream:
            def __init__(self, device):
                self.device = device
                module.streams_made.append(self)

            def wait_event(self, event):
                module.calls.append(("wait", self, event))

            def synchronize(self):
                module.calls.append(("synchronize", self))

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def query(self):
                return module.reached

            def elapsed_time(self, other):
                return module.calls.index(("record", other.stream, other)) - module.calls.index(("record", self.stream, self))

            def record(self, stream):
                self.stream = stream
                module.calls.append(("record", stream, self))

            def synchronize(self):
                module.calls.append(("synchronize", self))

        self.Stream, self.Event = Stream, Event
        self.current = {torch.device("cuda", index): Stream(torch.device("cuda", index)) for index in range(count)}
        self.streams_made.clear()

    def current_device(self):
        return self.now

    def current_stream(self, device=None):
        return self.current[torch.device("cuda", self.now) if device is None else device]

    def empty_cache(self):
        self.emptied += 1

    def mem_get_info(self, device):
        assert device == torch.device("cuda", 1)
        return self.free

    @contextlib.contextmanager
    def device(self, device):
        before, self.now = self.now, torch.device(device).index
        yield
        self.now = before

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.on_stream = self.on_stream, stream
        with self.device(stream.device):
            yield
        self.on_stream = before


@pytest.fixture
def fake(monkeypatch):
    """Every tensor lies on the CPU, whatever device is asked for; the module keeps what was asked."""
    module = FakeDeviceModule()
    plain_empty, plain_copy = torch.empty, torch.Tensor.copy_

    def empty(*size, device=None, pin_memory=False, **kwargs):
        if device is not None and torch.device(device).type != "cpu":
            module.calls.append(("device memory", torch.device(device), size[0]))
        if pin_memory:
            module.calls.append(("pinned memory", module.now, size[0]))
        return plain_empty(*size, **kwargs)

    def copy_(self, src, non_blocking=False):
        if module.on_stream is not None:
            module.calls.append(("copy", module.on_stream, non_blocking))
        return plain_copy(self, src)

    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: module.calls.append(("kept for", stream)))
    streams._copy_streams.cache_clear()
    yield module
    streams._copy_streams.cache_clear()


def world_on(backend, prefetch=1):
    store = StateStore(PLANES, backend=backend, paged=True, page_bytes=GROUP_BYTES)
    generator = torch.Generator().manual_seed(0)
    (block,) = store.allocate([64 * 6 + 5])
    block.view(1).normal_(generator=generator)
    return store, block, Engine(backend, prefetch=prefetch)


def update(_, planes):
    def kernel():
        for view in planes:
            view.mul_(3).add_(1)

    return kernel


def steps(store, engine):
    engine.run(store.pages, update)
    engine.run(store.pages[::-1], update)
    engine.synchronize()


# ---------------------------------------------------------------------- the choice


def test_the_cpu_is_served_on_the_host():
    backend = backend_for(torch.device("cpu"))
    assert isinstance(backend, HostBackend)
    assert (backend.name, backend.stages, backend.pinned, backend.device) == ("host", False, None, torch.device("cpu"))


def test_a_seed_asks_for_the_simulated_device():
    backend = backend_for(torch.device("cpu"), simulate=0)
    assert isinstance(backend, SimulatedBackend)
    assert (backend.name, backend.stages, backend.pinned) == ("simulated", True, None)
    with pytest.raises(ConfigurationError, match="simulate=3 needs parameters on the CPU, but they are on cuda:0"):
        backend_for(torch.device("cuda", 0), simulate=3)


@pytest.mark.parametrize("kind", ["meta", "mps", "hpu"])
def test_other_devices_are_refused_in_a_sentence(kind):
    with pytest.raises(UnsupportedError, match=rf"parameters on {kind} are not served.*cpu, cuda .* xpu"):
        backend_for(torch.device(kind))


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_accelerators_are_served_by_one_class(kind):
    backend = backend_for(torch.device(kind, 1))
    assert isinstance(backend, AcceleratorBackend)
    assert (backend.name, backend.stages) == (kind, True)


def test_importing_makes_no_streams_and_needs_no_accelerator():
    assert streams._copy_streams.cache_info().currsize == 0 or torch.accelerator.is_available()


def test_nothing_is_pinned_on_the_host(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda _: pytest.fail("there is no device to pin for"))
    store, _, engine = world_on(HostBackend())
    steps(store, engine)
    assert store.backend.pinned is None


# ---------------------------------------------------------------------- the real one


def test_streams_are_made_once_for_each_device(fake):
    backends = [backend_for(torch.device("cuda", index)) for index in (0, 1, 1, 0)]
    assert [stream.device.index for stream in fake.streams_made] == [0, 0, 1, 1]
    assert backends[0]._copy_streams is backends[3]._copy_streams
    assert backends[0]._copy_streams is not backends[1]._copy_streams
    for backend in backends:
        for _ in range(3):
            steps(*world_on(backend)[::2])
    assert len(fake.streams_made) == 4


def test_no_index_means_the_current_device(fake):
    fake.now = 1
    assert backend_for(torch.device("cuda")).device == torch.device("cuda", 1)


def test_everything_happens_on_the_parameters_device(fake):
    """The current device is 0 throughout; the state's is 1."""
    backend = backend_for(torch.device("cuda", 1))
    store, _, engine = world_on(backend)
    during = []

    def noting(page, planes):
        kernel = update(page, planes)
        return lambda: (during.append(fake.now), kernel())

    engine.run(store.pages, noting)
    engine.synchronize()
    engine.release_staging()
    assert fake.now == 0
    assert set(during) == {1}
    for call, *rest in fake.calls:
        if call == "pinned memory":
            assert rest[0] == 1
        elif call == "device memory":
            assert rest[0] == torch.device("cuda", 1)
        else:
            stream = rest[0]
            assert getattr(stream, "device", torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert {"pinned memory", "device memory", "copy", "record", "wait", "kept for", "synchronize"} == {call[0] for call in fake.calls}
    resident = StateStore(PLANES, backend=backend, paged=False, page_bytes=GROUP_BYTES)
    resident.allocate([64])
    assert fake.calls[-1][0] == "kept for"


def test_the_stream_is_the_current_one_at_the_time_of_the_call(fake):
    """A step under `torch.cuda.stream(s)` runs on s."""
    device = torch.device("cuda", 0)
    store, _, engine = world_on(backend_for(device))
    engine.run(store.pages, update)
    fake.calls.clear()
    fake.current[device] = other = fake.Stream(device)
    engine.run(store.pages, update)
    compute = {call[1] for call in fake.calls if call[0] in ("wait", "record")} - set(engine.backend._copy_streams.values())
    assert compute == {other}


def trace_of_fake(fake, engine):
    names = {stream: name for name, stream in engine.backend._copy_streams.items()}
    numbers, trace = {}, []
    for call in fake.calls:
        if call[0] == "record":
            numbers[call[2]] = len(numbers)
            trace.append(("record", names.get(call[1], "compute"), numbers[call[2]]))
        elif call[0] == "wait":
            trace.append(("wait", names.get(call[1], "compute"), numbers[call[2]]))
        elif call[0] == "copy":
            trace.append(("copy", names[call[1]]))
        elif call[0] == "launch":
            trace.append(("launch",))
        elif call[0] == "synchronize":
            trace.append(("synchronize", numbers[call[1]]))
    return trace


def trace_of_simulated(prefetch):
    backend = SimulatedBackend(0)
    numbers, trace = {}, []

    def spy(name, note):
        plain = getattr(backend, name)

        def wrapped(*args, **kwargs):
            result = plain(*args, **kwargs)
            note(result, *args)
            return result

        setattr(backend, name, wrapped)

    def recorded(event, stream):
        numbers[event] = len(numbers)
        trace.append(("record", stream, numbers[event]))

    spy("record", recorded)
    spy("wait", lambda _, stream, event: event is not None and trace.append(("wait", stream, numbers[event])))
    spy("copy", lambda _, stream, *__: trace.append(("copy", stream)))
    spy("launch", lambda *_: trace.append(("launch",)))
    spy("wait_host", lambda _, event: trace.append(("synchronize", numbers[event])))
    store, block, engine = world_on(backend, prefetch)
    steps(store, engine)
    return trace, [block.view(i) for i in range(len(PLANES))]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_waits_and_records_are_those_of_the_simulated_device(fake, prefetch):
    """What a thousand orders were tried on is call for call what a real device is given."""
    expected, bits = trace_of_simulated(prefetch)
    fake.calls.clear()
    backend = backend_for(torch.device("cuda", 0))
    plain_launch = backend.launch
    backend.launch = lambda fn, **model: (fake.calls.append(("launch",)), plain_launch(fn, **model))
    store, block, engine = world_on(backend, prefetch)
    steps(store, engine)
    assert trace_of_fake(fake, engine) == expected
    assert all(torch.equal(block.view(i), bits[i]) for i in range(len(PLANES)))
    assert all(call[2] for call in fake.calls if call[0] == "copy"), "a copy that blocks the host"
    assert sum(call[0] == "launch" for call in fake.calls) == 2 * len(store.pages)


def test_a_step_never_waits_on_the_host(fake):
    store, _, engine = world_on(backend_for(torch.device("cuda", 0)))
    for _ in range(3):
        engine.run(store.pages, update)
    assert not [call for call in fake.calls if call[0] == "synchronize"]
    engine.synchronize()
    assert len([call for call in fake.calls if call[0] == "synchronize"]) == 1


def test_slots_are_kept_from_the_allocator_while_copies_use_them(fake):
    backend = backend_for(torch.device("cuda", 0))
    fake.calls.clear()
    backend.device_empty(100)
    assert [call for call in fake.calls if call[0] == "kept for"] == [("kept for", s) for s in backend._copy_streams.values()]


def test_waiting_for_everything_waits_for_all_three_streams(fake):
    backend = backend_for(torch.device("cuda", 0))
    fake.calls.clear()
    backend.wait_host(None)
    assert {call[1] for call in fake.calls} == {*backend._copy_streams.values(), fake.current[torch.device("cuda", 0)]}


@pytest.mark.usefixtures("fake")
def test_refused_pinning_lets_torch_s_cache_go(monkeypatch):
    backend, emptied = backend_for(torch.device("cuda", 0)), []
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: emptied.append(1), raising=False)
    counted = torch.empty

    def empty(*size, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: operation not supported")
        return counted(*size, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.warns(RuntimeWarning, match="operation not supported"):
        store, _, engine = world_on(backend)
    steps(store, engine)
    assert emptied == [1]
    assert backend.pinned is False


def test_times_are_read_only_when_they_are_known(fake):
    backend = backend_for(torch.device("cuda", 1))
    first, second = backend.record("in"), backend.record("in")
    assert backend.elapsed(first, second) is None
    fake.reached = True
    assert backend.elapsed(first, second) == 1e-3
    assert not [call for call in fake.calls if call[0] == "synchronize"]


def test_memory_is_that_of_the_device(fake):
    backend = backend_for(torch.device("cuda", 1))
    assert backend.device_memory() == (5, 7)
    backend.trim_device()
    assert fake.emptied == 1


def test_kernels_reach_pinned_memory_by_its_own_address(fake, monkeypatch):
    """The array interface names the address of the host memory; the tensor made from it has to be the same memory."""
    backend = backend_for(torch.device("cuda", 1))
    home = torch.arange(6, dtype=torch.bfloat16)
    made = []

    def as_tensor(source, device):
        made.append((source.__cuda_array_interface__, device, fake.now))
        return source._home.view(torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    with pytest.raises(UnsupportedError, match=r"zero_copy.*12 B of it could not be pinned .*ulimit -l.*staged"):
        backend.reach(home)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    alias = backend.reach(home)
    assert (alias.dtype, alias.data_ptr(), alias.shape) == (home.dtype, home.data_ptr(), home.shape)
    ((interface, device, current),) = made
    assert interface == {"shape": (12,), "typestr": "|u1", "data": (home.data_ptr(), False), "version": 2}
    assert device == torch.device("cuda", 1)
    assert current == 1
    # memory that was copied would be updated instead of the state
    monkeypatch.setattr(torch, "as_tensor", lambda source, device: source._home.view(torch.uint8).clone())  # noqa: ARG005
    with pytest.raises(AssertionError):
        backend.reach(home)


@pytest.mark.usefixtures("fake")
def test_zero_copy_is_for_cuda_only():
    with pytest.raises(UnsupportedError, match="zero_copy' is not served on xpu"):
        backend_for(torch.device("xpu", 1)).reach(torch.zeros(3))
