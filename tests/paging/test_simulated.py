"""The simulated device itself: order, poison, counting, deadlock, time, failures."""

import collections

import pytest
import torch

from flashoptim_hf.errors import HostMemoryError, UnsupportedError
from flashoptim_hf.paging.simulated import POLICIES, DeadlockError, Operation, SimulatedBackend, SimulatedEvent
from flashoptim_hf.paging.simulated_model import InjectedError, Speeds


def log_of(seed, policy=None, waits=True):
    """One page in, one kernel, one page out, twice; returns the order in which things ran."""
    backend, ran = SimulatedBackend(seed, policy), []
    host, device = torch.zeros(4), backend.device_empty(16).view(torch.float32)
    start = backend.record("compute")
    backend.wait("in", start)
    for step in range(2):
        backend._queue("in", _op(ran, f"in{step}"))
        ready = backend.record("in")
        if waits:
            backend.wait("compute", ready)
        backend.launch(lambda step=step: ran.append(f"kernel{step}"))
        done = backend.record("compute")
        if waits:
            backend.wait("out", done)
        backend._queue("out", _op(ran, f"out{step}"))
    backend.wait_host(None)
    assert host.shape == device.shape
    return ran


def _op(ran, name):
    return Operation(run=lambda: ran.append(name))


def test_every_order_respects_streams_and_events():
    seen = set()
    for seed in range(300):
        ran = log_of(seed)
        seen.add(tuple(ran))
        assert len(ran) == 6
        for step in range(2):
            assert ran.index(f"in{step}") < ran.index(f"kernel{step}") < ran.index(f"out{step}")
        for name in ("in", "kernel", "out"):
            assert ran.index(f"{name}0") < ran.index(f"{name}1")
    # in0 is first and out1 last; five interleavings of what is between are legal
    assert len(seen) == 5


def test_without_events_every_interleaving_occurs():
    seen = collections.Counter(tuple(log_of(seed, waits=False)) for seed in range(3000))
    assert len(seen) >= 80, "of the 90 interleavings of three streams with two entries"


def test_the_same_seed_gives_the_same_order():
    assert [log_of(seed) for seed in range(40)] == [log_of(seed) for seed in range(40)]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_drawn_and_runs(policy):
    assert policy in {SimulatedBackend(seed).policy for seed in range(100)}
    assert sorted(log_of(0, policy)) == ["in0", "in1", "kernel0", "kernel1", "out0", "out1"]


def test_late_streams_run_only_as_far_as_somebody_waits():
    backend, ran = SimulatedBackend(0, "everything late"), []
    events = []
    for number in range(3):
        backend._queue("out", _op(ran, number))
        events.append(backend.record("out"))
    backend.launch(lambda: ran.append("kernel"))
    assert ran == []
    backend.end_step()
    assert ran == ["kernel"]
    backend.wait_host(events[1])
    assert ran == ["kernel", 0, 1]
    assert not events[2].done


def test_stale_content_is_poisoned():
    backend = SimulatedBackend(0, "everything late")
    host, device = torch.arange(4.0), backend.device_empty(16).view(torch.float32)
    assert device.isnan().all()
    backend.wait("in", backend.record("compute"))
    backend.copy("in", device, host)
    backend.wait_host(None)
    assert torch.equal(device, torch.arange(4.0))
    assert (host.view(torch.uint8) == 0xA5).all()
    backend.copy("out", host, device)
    backend.wait_host(None)
    assert torch.equal(host, torch.arange(4.0))
    assert device.isnan().all()


def test_content_that_is_kept_is_not_poisoned():
    backend = SimulatedBackend(0, "everything late")
    host, device = torch.arange(4.0), backend.device_home(16).view(torch.float32)
    backend.copy("in", device, host, keep=True)
    backend.wait_host(None)
    assert torch.equal(host, torch.arange(4.0))
    device.mul_(2)
    backend.copy("out", host, device, keep=True)
    backend.wait_host(None)
    assert torch.equal(host, device)


def test_a_new_buffer_still_has_its_earlier_owner():
    """A copy that does not wait for the compute stream is overwritten."""
    backend = SimulatedBackend(0, "compute late")
    device = backend.device_empty(16).view(torch.float32)
    backend.copy("in", device, torch.arange(4.0))
    backend.wait_host(None)
    assert device.isnan().all()


def test_bytes_and_memory_are_counted():
    backend = SimulatedBackend(0)
    a, b = backend.device_empty(1000), backend.device_home(24)
    assert (backend.memory.now, backend.memory.peak) == (1024, 1024)
    view = a[:10]
    backend.copy("in", view, torch.zeros(10, dtype=torch.uint8))
    backend.copy("out", torch.zeros(24, dtype=torch.uint8), b)
    assert (backend.step_bytes.bytes_in, backend.step_bytes.bytes_out) == (10, 24)
    backend.end_step()
    assert (backend.last_step.bytes_in, backend.step_bytes.bytes_in) == (10, 0)
    backend.copy("in", view, torch.zeros(10, dtype=torch.uint8))
    assert (backend.total.bytes_in, backend.total.bytes_out) == (20, 24)
    backend.wait_host(None)
    del a, b
    assert backend.memory.now == 1000, "the view keeps its buffer"
    del view
    assert (backend.memory.now, backend.memory.peak) == (0, 1024)


def test_a_kernel_error_surfaces_once_and_later():
    backend, ran = SimulatedBackend(0, "compute early, copies late"), []

    def fail():
        raise ZeroDivisionError("inside the kernel")

    backend.launch(fail)
    backend.launch(lambda: ran.append("next"))
    with pytest.raises(ZeroDivisionError, match="inside the kernel"):
        backend.end_step()
    assert ran == ["next"]
    backend.end_step()


def test_waiting_for_what_never_comes_is_an_error_that_names_it():
    backend = SimulatedBackend(0)
    backend.wait("in", SimulatedEvent("out", 77))
    ready = backend.record("in")
    with pytest.raises(DeadlockError, match=rf"in#{ready.number} waits for out#77, but nothing is queued on the stream 'out'"):
        backend.wait_host(ready)


def test_waiting_in_a_circle_is_an_error_that_names_it():
    backend = SimulatedBackend(0)
    later = SimulatedEvent("out", 5)
    backend.wait("in", later)
    first = backend.record("in")
    backend.wait("out", first)
    with pytest.raises(DeadlockError, match=rf"in#{first.number} waits for out#5 waits for in#{first.number}"):
        backend.wait_host(first)
    with pytest.raises(DeadlockError):
        backend.wait_host(None)


# ---------------------------------------------------------------------- time


def test_streams_have_clocks_and_waits_take_until_the_event():
    for seed in range(30):
        speeds = Speeds(link_in=100.0, link_out=50.0, copy_latency=1.0, memory=10.0, launch_latency=2.0, call=0.0)
        backend = SimulatedBackend(seed, speeds=speeds)
        host, device = torch.zeros(100, dtype=torch.uint8), backend.device_home(100)
        begin = backend.record("in")
        backend.copy("in", device, host)
        arrived = backend.record("in")
        backend.wait("compute", arrived)
        backend.launch(lambda: None, nbytes=100)
        computed = backend.record("compute")
        backend.work(3.0)
        backend.wait("out", computed)
        backend.copy("out", host, device)
        home = backend.record("out")
        backend.wait_host(home)
        times = [event.time for event in (begin, arrived, computed, home)]
        # 1 + 100 / 100; then 2 + 2 * 100 / 10; then 1 + 100 / 50, beside the work of 3
        assert times == [0.0, 2.0, 24.0, 27.0]
        assert backend.elapsed(begin, arrived) == 2.0
        assert backend.host_time == 27.0
        backend.wait_host(None)
        assert backend.host_time == 27.0


def test_kernels_over_the_link_take_the_link_s_time_and_count_its_bytes():
    backend = SimulatedBackend(0, speeds=Speeds(link_in=100.0, link_out=50.0, launch_latency=0.0, call=0.0))
    backend.launch(lambda: None, nbytes=100, linked=True)
    backend.end_step()
    assert backend.record("compute").time <= 2.0
    backend.wait_host(None)
    assert backend.host_time == 2.0
    assert (backend.last_step.bytes_in, backend.last_step.bytes_out) == (100, 100)


def test_an_event_that_is_not_reached_has_no_time():
    backend = SimulatedBackend(0, "everything late")
    first = backend.record("out")
    backend.copy("out", torch.zeros(4), torch.zeros(4))
    second = backend.record("out")
    assert backend.elapsed(first, second) is None
    backend.wait_host(second)
    assert backend.elapsed(first, second) > 0


# ---------------------------------------------------------------------- failures


def test_failures_come_when_they_were_asked_for():
    backend = SimulatedBackend(0)
    backend.fail("copy", at=2, times=2)
    outcomes = []
    for _ in range(5):
        try:
            backend.copy("in", torch.zeros(4), torch.zeros(4))
            outcomes.append("ran")
        except InjectedError as error:
            outcomes.append(str(error))
    assert outcomes == ["ran", *["simulated device: copy failed, as asked for"] * 2, "ran", "ran"]


def test_a_failure_can_wait_for_a_step():
    backend = SimulatedBackend(0)
    backend.fail("allocate", step=2)
    for step in range(4):
        if step == 2:
            with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
                backend.device_empty(10)
        backend.device_empty(10)
        backend.end_step()


def test_launches_and_host_memory_fail_too():
    backend = SimulatedBackend(0)
    backend.fail("launch")
    backend.fail("host")
    with pytest.raises(InjectedError, match="launch failed"):
        backend.launch(lambda: None)
    with pytest.raises(HostMemoryError, match="host failed, as asked for"):
        backend.host_empty(10)
    assert backend.host_empty(10).numel() == 10


def test_pinning_that_fails_leaves_memory_that_kernels_do_not_reach():
    backend = SimulatedBackend(0, pin=True)
    backend.fail("pin")
    with pytest.warns(RuntimeWarning, match=r"pageable.*pin failed, as asked for.*ulimit -l is"):
        buffer = backend.host_empty(100)
    assert backend.pinned is False
    with pytest.raises(UnsupportedError, match="zero_copy"):
        backend.reach(buffer)


def test_kernels_reach_host_memory_of_the_backend_only():
    backend = SimulatedBackend(0)
    buffer = backend.host_empty(100)
    assert backend.reach(buffer[10:20]).data_ptr() == buffer.data_ptr() + 10
    with pytest.raises(UnsupportedError, match="zero_copy"):
        backend.reach(torch.zeros(100))


def test_a_device_of_limited_size_runs_out_of_memory():
    backend = SimulatedBackend(0, capacity=1000)
    assert SimulatedBackend(0).device_memory() is None
    a = backend.device_home(600)
    assert backend.device_memory() == (400, 1000)
    with pytest.raises(torch.OutOfMemoryError, match="500 B asked for, 400 B free"):
        backend.device_home(500)
    del a
    assert backend.device_home(1000).numel() == 1000
