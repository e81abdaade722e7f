"""Pages that stay: the bits of the host for every order, traffic to the byte, and home that can be trusted whenever it is asked for."""

import contextlib
import random
import warnings

import pytest
import torch

from flashoptim_hf.errors import DeviceMemoryError, UnsupportedError
from flashoptim_hf.paging.files import OffloadFiles
from flashoptim_hf.paging.residency import FixedSet, LeastRecentlyUsed
from flashoptim_hf.paging.simulated import SimulatedBackend
from flashoptim_hf.paging.simulated_model import InjectedError
from flashoptim_hf.paging.store import StateStore
from flashoptim_hf.paging.streams import HostBackend
from tests.paging.world import PLANES, World

EQUAL = [128] * 8
"""Eight pages of one size: every budget that is a multiple of an eighth is used to the byte."""


@pytest.fixture(scope="module")
def expected():
    return World(HostBackend()).train()


def total(world):
    return sum(page.nbytes for page in world.store.pages)


def step(world):
    world.engine.run(world.store.pages, world.update)


def content(world):
    world.engine.synchronize()
    return world.content()


def after_steps(count, numels=EQUAL):
    world = World(HostBackend(), numels)
    for _ in range(count):
        step(world)
    return world.content()


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("budget", [0, 0.3, 0.6, 1.0, "auto", 700])
def test_every_budget_and_transport_gives_the_bits_of_the_host(budget, zero_copy, expected):
    for seed in range(40):
        world = World(SimulatedBackend(seed), residency=FixedSet(budget), zero_copy=zero_copy)
        assert torch.equal(world.train(), expected), f"seed {seed}"


@pytest.mark.parametrize("limit", [400, 900, 10**6])
def test_least_recently_used_gives_the_bits_of_the_host(limit, expected):
    for seed in range(40):
        assert torch.equal(World(SimulatedBackend(seed), residency=LeastRecentlyUsed(limit)).train(), expected), f"seed {seed}"


def test_a_kernel_in_place_is_waited_for():
    """Zero copy has no copies to wait for, but saving and freeing still wait for the kernels."""

    def right(seed, careless):
        world = World(SimulatedBackend(seed), zero_copy=True)
        if careless:
            world.backend.wait_host = lambda _: None
        # kernels run late here, and `end_step` would run them
        pages = world.store.pages
        for page in pages:
            world.engine.finish(page, world.update(page, world.engine.begin(page)))
        world.engine.synchronize()
        return torch.equal(world.content(), after_steps(1, numels=[100, 300, 0, 64, 7, 193]))

    assert all(right(seed, False) for seed in range(40))
    assert not all(right(seed, True) for seed in range(40))


def test_freed_memory_is_not_used_in_place_any_more():
    """`free` waits for kernels that work on home, so whoever gets the memory next keeps what he writes there."""
    for seed in range(30):
        world = World(SimulatedBackend(seed), EQUAL, zero_copy=True)
        for page in world.store.pages:
            world.engine.finish(page, world.update(page, world.engine.begin(page)))
        memory = [view for page in world.store.pages for view in page.views]
        for block in world.blocks:
            world.store.free(block)
        for view in memory:
            view.zero_()
        world.backend.wait_host(None)
        assert not any(view.any() for view in memory), f"seed {seed}"


# ---------------------------------------------------------------------- bytes


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.75, 1.0])
def test_a_step_moves_twice_what_does_not_stay(share, zero_copy):
    backend = SimulatedBackend(7)
    world = World(backend, EQUAL, residency=FixedSet(float(share) or 0), zero_copy=zero_copy)
    state = total(world)
    for number in range(5):
        step(world)
        resident = world.engine.resident_bytes
        assert resident == share * state
        moved = (backend.last_step.bytes_in, backend.last_step.bytes_out)
        assert moved == (world.engine.traffic.bytes_in, world.engine.traffic.bytes_out)
        if number:
            assert sum(moved) == 2 * (state - resident)
            assert world.engine.traffic.hits == share * len(EQUAL)
        else:
            # they come once
            assert moved == (state, state - resident)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.95])
def test_least_recently_used_moves_everything_below_a_full_budget(share):
    backend = SimulatedBackend(1)
    world = World(backend, EQUAL)
    state = total(world)
    for residency, expected in ((LeastRecentlyUsed(int(share * state)), 2 * state), (FixedSet(share), None)):
        world = World(SimulatedBackend(1), EQUAL, residency=residency)
        for _ in range(4):
            step(world)
        traffic = world.engine.traffic
        moved = traffic.bytes_in + traffic.bytes_out
        assert moved == (expected or 2 * (state - world.engine.resident_bytes))
        assert (traffic.hits == 0) == isinstance(residency, LeastRecentlyUsed)


def test_with_room_for_everything_both_policies_move_nothing():
    state = total(World(HostBackend(), EQUAL))
    for residency in (LeastRecentlyUsed(state), FixedSet(state), FixedSet(1.0)):
        world = World(SimulatedBackend(1), EQUAL, residency=residency)
        for _ in range(3):
            step(world)
        assert world.engine.traffic.bytes_in == world.engine.traffic.bytes_out == 0
        assert world.engine.resident_bytes == state


@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.75, 1.0])
def test_device_memory_never_exceeds_residents_and_staging(share):
    """Creation, the first step, saving, loading and later steps: what stays, and slots."""
    backend = SimulatedBackend(2)
    world = World(backend, [128] * 24, residency=FixedSet(float(share) or 0))
    assert backend.memory.peak == 0
    slot = world.store.pages[0].slot_bytes
    for number in range(4):
        step(world)
        steady = world.engine.device_bytes
        assert backend.memory.now == steady
        before = backend.memory.peak
        world.engine.synchronize()
        if number == 2:
            for page in world.store.pages:
                page.views[0].zero_()
        assert backend.memory.peak == before, "saving and loading take no device memory"
    assert steady == world.engine.staging_bytes + share * 24 * slot
    assert world.engine.staging_bytes == (3 * slot if share < 1 else 0)
    assert backend.memory.peak <= steady + slot


def test_auto_takes_what_is_free_after_the_first_step_less_a_reserve():
    pages = 12
    world = World(SimulatedBackend(0), [128] * pages)
    slot, nbytes = world.store.pages[0].slot_bytes, world.store.pages[0].nbytes
    capacity = 16 * slot
    backend = SimulatedBackend(0, capacity=capacity)
    activations = backend.device_home(5 * slot)
    world = World(backend, [128] * pages, residency=FixedSet("auto"))
    step(world)
    assert world.engine.resident_bytes == 0
    free, _ = backend.device_memory()
    step(world)
    assert world.engine.resident_bytes == (free - capacity // 16) // slot * nbytes > 0
    step(world)
    assert world.engine.traffic.bytes_in == total(world) - world.engine.resident_bytes
    assert activations.numel()


def test_slots_that_nobody_needs_any_more_go_before_pages_come():
    backend = SimulatedBackend(0)
    world = World(backend, EQUAL, residency=FixedSet("auto"))
    step(world)
    assert world.engine.staging_bytes == backend.memory.now == 3 * world.store.pages[0].slot_bytes
    step(world)
    assert world.engine.staging_bytes == 0
    assert backend.memory.now == backend.memory.peak == len(EQUAL) * world.store.pages[0].slot_bytes


# ---------------------------------------------------------------------- home


def test_home_is_current_after_synchronize_and_pages_stay():
    for seed in range(30):
        world = World(SimulatedBackend(seed), EQUAL, residency=FixedSet(0.5))
        for _ in range(2):
            step(world)
        assert torch.equal(content(world), after_steps(2))
        resident = world.engine.resident_bytes
        assert resident == total(world) // 2
        world.engine.synchronize()  # again, with nothing to do
        step(world)
        assert world.engine.traffic.bytes_in == total(world) - resident, "saving does not send pages away"
        assert torch.equal(content(world), after_steps(3))


def test_what_is_written_home_counts():
    """A load, a reset: pages that stay are fetched anew, and only after home was written."""
    for seed in range(30):
        worlds = [World(HostBackend(), EQUAL), World(SimulatedBackend(seed), EQUAL, residency=FixedSet(0.75))]
        for world in worlds:
            step(world)
            world.engine.synchronize()
            for block in world.blocks[::3]:
                block.view(0).fill_(3)
                block.view(1).normal_(generator=torch.Generator().manual_seed(1))
            # looking at home must not make the engine forget that it was written
            world.engine.synchronize()
            step(world)
            step(world)
        assert torch.equal(content(worlds[0]), content(worlds[1]))
        assert worlds[1].engine.traffic.bytes_in == total(worlds[1]) // 4


def test_eviction_at_any_moment_changes_no_bit():
    for seed in range(60):
        rng = random.Random(seed)
        world = World(SimulatedBackend(seed), EQUAL, residency=FixedSet(rng.choice([0.25, 0.6, 1.0])), zero_copy=rng.random() < 0.3)
        for _ in range(5):
            for number, page in enumerate(world.store.pages):
                views = world.engine.begin(page, world.store.pages[number + 1 : number + 2])
                if rng.random() < 0.2:
                    world.engine.evict(rng.choice([None, 1, 1000]))
                world.engine.finish(page, world.update(page, views))
                del views  # it would keep the page's memory
                if rng.random() < 0.1:
                    world.engine.evict(rng.choice([None, 1, 1000]))
            world.engine.end_step()
            if rng.random() < 0.5:
                freed = world.engine.evict(rng.choice([None, 1, 1000]))
                assert (freed > 0) >= (world.engine.traffic.evictions == 0)
            if rng.random() < 0.3:
                world.engine.trim()
                world.backend.wait_host(None)  # what was queued for the memory before it was given back
                assert world.engine.device_bytes == world.backend.memory.now == 0
            if rng.random() < 0.3:
                world.engine.synchronize()
        assert torch.equal(content(world), after_steps(5)), f"seed {seed}"


def test_evicted_memory_is_free_at_once_and_taken_again_when_there_is_room():
    capacity = 10**6
    backend = SimulatedBackend(3, capacity=capacity)
    world = World(backend, EQUAL, residency=FixedSet(1.0))
    step(world)
    whole, before = world.engine.resident_bytes, backend.memory.now
    one = world.store.pages[0]
    assert world.engine.evict(1) == one.slot_bytes
    assert backend.memory.now == before - one.slot_bytes
    assert world.engine.resident_bytes == whole - one.nbytes
    assert world.engine.evict() == before - one.slot_bytes
    assert backend.memory.now == 0
    assert world.engine.evict() == 0
    # somebody takes almost everything: pages travel, and none comes back
    other = backend.device_home(capacity - 4 * one.slot_bytes)
    step(world)
    assert world.engine.resident_bytes == 0
    assert world.engine.traffic.bytes_out == whole
    del other
    step(world)
    step(world)
    assert world.engine.resident_bytes == whole
    assert world.engine.traffic.bytes_in == world.engine.traffic.bytes_out == 0
    assert torch.equal(content(world), after_steps(4))


def test_freed_state_takes_its_device_memory_with_it():
    backend = SimulatedBackend(0, "everything late")
    world = World(backend, EQUAL, residency=FixedSet(1.0))
    step(world)
    world.engine.synchronize()
    for block in [world.blocks.pop() for _ in range(3)]:
        world.store.free(block)
    world.engine.offer(world.store.pages)
    step(world)
    assert world.engine.resident_bytes == total(world)
    assert backend.memory.now == world.engine.device_bytes


@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_smaller_share_sends_pages_home(zero_copy):
    """In the step itself, so that copies in and kernels in place wait for what is on its way home."""
    for seed in range(30):
        world = World(SimulatedBackend(seed), EQUAL, residency=FixedSet(1.0), zero_copy=zero_copy)
        step(world)
        world.engine._residents.policy.budget = 0.5
        world.engine.offer([])
        world.engine.offer(world.store.pages)
        step(world)
        step(world)
        assert world.engine.resident_bytes == total(world) // 2
        assert torch.equal(content(world), after_steps(3)), f"seed {seed}"


def test_offering_the_same_pages_again_disturbs_nothing():
    """Which parameters have gradients may change at each step: slots are kept, and nobody waits."""
    backend = SimulatedBackend(0)
    world = World(backend, EQUAL, residency=FixedSet(0.25))
    step(world)
    slots, waits, plain = list(world.engine._staging.slots), [], backend.wait_host
    backend.wait_host = lambda event: (waits.append(event), plain(event))
    for _ in range(3):
        world.engine.offer(world.store.pages)
        step(world)
    assert world.engine._staging.slots == slots
    assert waits == []


# ---------------------------------------------------------------------- too little memory


@pytest.mark.parametrize("share", [0, 0.5, 1.0])
@pytest.mark.parametrize("slots", [1, 2, 3, 4, 6, 8, 20])
def test_less_memory_means_fewer_pages_and_slots_and_the_same_bits(slots, share):
    slot = World(SimulatedBackend(0), EQUAL).store.pages[0].slot_bytes
    for seed in range(8):
        backend = SimulatedBackend(seed, capacity=slots * slot)
        world = World(backend, EQUAL, residency=FixedSet(float(share) or 0), prefetch=2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                step(world)
        assert backend.memory.peak <= slots * slot
        assert len(caught) == (slots < share * len(EQUAL))
        assert torch.equal(content(world), after_steps(3))


def test_no_memory_for_a_single_page_is_a_clear_error_and_a_retry_works():
    backend = SimulatedBackend(0)
    world = World(backend, EQUAL)
    step(world)
    world.engine.trim()
    backend.capacity = world.store.pages[0].slot_bytes - 1
    with pytest.raises(DeviceMemoryError, match=r"out of memory\..*room for one page.*smaller page_bytes"):
        step(world)
    assert torch.equal(content(world), after_steps(1))
    backend.capacity = None
    step(world)
    assert torch.equal(content(world), after_steps(2))


@pytest.mark.parametrize("share", [0, 0.5, 1.0])
@pytest.mark.parametrize("at", range(1, 9))
def test_running_out_of_memory_at_any_allocation_costs_only_speed(at, share):
    for seed in range(6):
        backend = SimulatedBackend(seed)
        backend.fail("allocate", at=at, step=1)
        world = World(backend, EQUAL, residency=FixedSet(float(share) or 0))
        for number in range(4):
            if number in (1, 2):
                world.engine.trim()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    step(world)
                except DeviceMemoryError:
                    step(world)
        assert torch.equal(content(world), after_steps(4)), f"seed {seed}"


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("what", ["copy", "launch"])
@pytest.mark.parametrize("at", [1, 2, 3, 7, 12, 13, 14, 20, 25, 31, 40])
def test_a_failure_anywhere_leaves_every_page_updated_once_or_not_at_all(what, at, zero_copy):
    for seed in range(6):
        backend = SimulatedBackend(seed)
        world, ran = World(backend, EQUAL, residency=FixedSet(0.5), zero_copy=zero_copy), []
        plain = world.update

        def update(page, planes, world=world, ran=ran, plain=plain):
            kernel, number = plain(page, planes), world.store.pages.index(page)
            return lambda: (ran.append(number), kernel())

        world.update = update
        backend.fail(what, at=at)
        for attempt in range(4):
            with contextlib.suppress(InjectedError):
                step(world)
                if attempt % 2:
                    world.engine.synchronize()
                if attempt == 2:
                    world.engine.evict()
        got = content(world)
        reference = World(HostBackend(), EQUAL)
        for number in ran:
            reference.engine.run([reference.store.pages[number]], reference.update)
        assert torch.equal(got, reference.content()), f"seed {seed}"


# ---------------------------------------------------------------------- in place


def test_zero_copy_needs_memory_that_the_device_can_reach(tmp_path):
    backend = SimulatedBackend(0)
    store = StateStore(PLANES, backend=backend, paged=True, page_bytes=4096, files=OffloadFiles(tmp_path))
    store.allocate([100])
    world = World(backend, [], zero_copy=True)
    with pytest.raises(UnsupportedError, match=r"zero_copy.*page-locked.*staged"):
        world.engine.offer(store.pages)
    assert store.bytes_of("file") == store.allocated_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.bin"))


def test_zero_copy_takes_no_device_memory():
    backend = SimulatedBackend(0)
    world = World(backend, EQUAL, zero_copy=True)
    for _ in range(2):
        step(world)
    assert backend.memory.peak == world.engine.device_bytes == 0
    assert world.engine.traffic.bytes_in == world.engine.traffic.bytes_out == total(world)
