"""The simulated device itself: order, poison, counting, deadlock."""

import collections

import pytest
import torch

from flashoptim_hf.paging.simulated import POLICIES, DeadlockError, Operation, SimulatedBackend, SimulatedEvent


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
