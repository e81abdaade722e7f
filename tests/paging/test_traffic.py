"""Times on the simulated machine: what overlaps, what is hidden, and that measuring waits for nothing."""

import pytest

from flashoptim_hf.paging.residency import FixedSet
from flashoptim_hf.paging.simulated import SimulatedBackend
from flashoptim_hf.paging.simulated_model import Speeds
from flashoptim_hf.paging.traffic import Stopwatch, hidden_share
from tests.paging.world import World

SLOW = Speeds(link_in=1e6, link_out=1e6, copy_latency=0, memory=1e12, launch_latency=0, call=0)
"""Copies that take long, and nothing else that takes time."""
COUNT = 32


def timed(speeds, *, slots=None, steps=2, **options):
    """(engine, seconds of the last step from its first call to the end of its last copy, bytes of all pages)."""
    backend = SimulatedBackend(4, speeds=speeds)
    world = World(backend, [128] * COUNT, **options)
    if slots is not None:
        backend.capacity = slots * world.store.pages[0].slot_bytes
    for _ in range(steps):
        start = backend.host_time
        world.engine.run(world.store.pages, world.update)
        backend.wait_host(None)
    world.engine.stopwatch.read()
    return world.engine, backend.host_time - start, sum(page.nbytes for page in world.store.pages)


def test_both_directions_overlap():
    engine, seconds, state = timed(SLOW)
    one_way = state / 1e6
    assert one_way < seconds < one_way * (1 + 3 / COUNT)
    transfer, waited = engine.stopwatch.seconds
    assert transfer == pytest.approx(2 * one_way)
    # kernels take no time here, so they wait for all that comes, and hide what goes
    assert waited == pytest.approx(one_way, rel=3 / COUNT)


def test_one_slot_serves_without_overlap():
    _, seconds, state = timed(SLOW, slots=1)
    assert seconds == pytest.approx(2 * state / 1e6, rel=1e-3)


def test_kernels_hide_copies():
    """A kernel that takes as long as two copies: only the first page is waited for."""
    page = 128 * 5 + 4 + 16
    engine, seconds, state = timed(Speeds(link_in=1e6, link_out=1e6, copy_latency=0, memory=1e6, launch_latency=0, call=0))
    transfer, waited = engine.stopwatch.seconds
    assert state == COUNT * page
    assert waited == pytest.approx(page / 1e6)
    assert seconds == pytest.approx((2 * state + 2 * page) / 1e6)
    assert hidden_share(transfer, waited) == pytest.approx(1 - 1 / (2 * COUNT))


def test_depth_hides_latency():
    """Pages that are here sooner than a kernel can start need more than one ahead."""
    page = 128 * 5 + 4 + 16
    speeds = Speeds(link_in=1e6, link_out=1e6, copy_latency=0, memory=1e12, launch_latency=0, call=0)
    latency = Speeds(**{**speeds.__dict__, "copy_latency": page / 1e6})
    # four planes a page: latencies of four copies out come between a kernel and the next use of its slot
    assert timed(latency, prefetch=0)[1] >= timed(latency, prefetch=1)[1] >= timed(latency, prefetch=4)[1]
    slow_kernels = Speeds(**{**speeds.__dict__, "launch_latency": page / 1e6})
    one, four = timed(slow_kernels, prefetch=0)[1], timed(slow_kernels, prefetch=4)[1]
    assert four < 0.75 * one


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_what_stays_is_not_waited_for(share):
    _, whole, state = timed(SLOW)
    engine, seconds, _ = timed(SLOW, residency=FixedSet(share))
    assert seconds == pytest.approx((1 - share) * whole, rel=4 / COUNT)
    assert engine.stopwatch.seconds[0] == pytest.approx(2 * (1 - share) * state / 1e6)


def test_times_do_not_depend_on_the_order_of_execution():
    times = set()
    for seed in range(20):
        backend = SimulatedBackend(seed, speeds=SLOW)
        world = World(backend, [128] * 6)
        world.engine.run(world.store.pages, world.update)
        backend.wait_host(None)
        world.engine.stopwatch.read()
        times.add((backend.host_time, *world.engine.stopwatch.seconds))
    assert len(times) == 1


def test_the_users_own_work_takes_its_time():
    backend = SimulatedBackend(0, speeds=SLOW)
    world = World(backend, [128] * 6)
    backend.work(5.0)
    world.engine.run(world.store.pages, world.update)
    backend.wait_host(None)
    assert 5.0 < backend.host_time < 5.1
    world.engine.stopwatch.read()
    assert world.engine.stopwatch.seconds[1] < 0.01, "copies in come during the work before"


def test_nothing_is_measured_before_it_is_known():
    class Backend:
        reached = -1

        def elapsed(self, start, stop):
            return float(stop - start) if stop <= self.reached else None

    backend = Backend()
    watch = Stopwatch(backend)
    watch.read()
    assert watch.seconds is None
    for step in range(6):
        watch.add("copy", 10 * step, 10 * step + 3)
        watch.add("wait", 10 * step, 10 * step + 2)
        watch.end_step()
        watch.read()
        assert watch.seconds is None
    # old steps are forgotten, the others read as far as they are known
    backend.reached = 49
    watch.read()
    assert watch.seconds == (3.0, 2.0)
    watch.end_step()
    backend.reached = 60
    watch.read()
    assert watch.seconds == (0.0, 0.0)
    assert hidden_share(*watch.seconds) is None
    assert hidden_share(2.0, 0.5) == 0.75
    assert hidden_share(2.0, 5.0) == 0.0
