"""The order in which slots are given away, and which pages stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashoptim_hf.paging.residency import FixedSet, LeastRecentlyUsed, Ring, pages_ahead


def ring_of(count):
    ring = Ring()
    for _ in range(count):
        ring.grow()
    return ring


def test_slots_are_given_in_turn():
    ring = ring_of(3)
    first = [ring.take(page) for page in "abc"]
    assert sorted(first) == [0, 1, 2]
    assert not ring.has_free
    for page in "bca":
        ring.release(page)
    assert [ring.take(page) for page in "xyz"] == [first[1], first[2], first[0]]


def test_the_latest_page_fetched_ahead_goes_first():
    ring = ring_of(3)
    for page in "abc":
        ring.take(page)
    ring.claim("c")
    assert list(ring.in_use()) == ["c"]
    assert ring.victim() == "b"
    ring.claim("a")
    ring.claim("b")
    assert ring.victim() is None
    assert list(ring.held()) == ["a", "b", "c"]


@given(st.lists(st.tuples(st.sampled_from("trc"), st.integers(0, 5)), max_size=60), st.integers(1, 4))
def test_no_slot_has_two_pages(actions, count):
    """Against a plain list of who holds what."""
    ring, holders = ring_of(count), {}
    for action, page in actions:
        if action == "t" and page not in holders and len(holders) < count:
            assert ring.has_free
            holders[page] = ring.take(page)
        elif action == "r" and page in holders:
            ring.release(page)
            del holders[page]
        elif action == "c" and page in holders:
            ring.claim(page)
        assert len(set(holders.values())) == len(holders)
        assert {p: ring.slot_of(p) for p in range(6) if ring.slot_of(p) is not None} == holders
        assert ring.has_free == (len(holders) < count)
        assert (ring.victim() in holders) or ring.victim() is None


# ---------------------------------------------------------------------- which pages stay


def fixed(budget, sizes, device_sizes=None):
    policy = FixedSet(budget)
    policy.offer(sizes, device_sizes or sizes)
    return policy


def chosen(policy, sizes):
    return [page for page in sizes if policy.admits(page)]


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(0, 3000))
def test_a_fixed_set_fills_its_budget_and_never_exceeds_it(sizes, budget):
    sizes = dict(enumerate(sizes))
    policy = fixed(budget, sizes)
    stays = chosen(policy, sizes)
    taken = sum(sizes[page] for page in stays)
    assert taken <= budget
    assert all(sizes[page] > budget - taken for page in sizes if page not in stays), "there is room for another page"
    assert all(not policy.victims(page) for page in sizes), "what stays never leaves for another"


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.floats(0, 1), st.lists(st.integers(1, 100), max_size=10), st.data())
def test_pages_that_stay_stay_when_others_come_and_go(sizes, share, more, data):
    sizes = dict(enumerate(sizes))
    policy = fixed(share or 0, sizes)
    before = chosen(policy, sizes)
    gone = data.draw(st.sets(st.sampled_from(sorted(sizes))))
    after = {page: size for page, size in sizes.items() if page not in gone} | {100 + i: size for i, size in enumerate(more)}
    policy.offer(after, after)
    limit = share * sum(after.values())
    kept, room = [page for page in before if page in after], limit
    for page in kept:
        if after[page] <= room:
            assert policy.admits(page)
            room -= after[page]
    assert sum(after[page] for page in chosen(policy, after)) <= limit


def test_pages_that_stay_are_spread_evenly():
    sizes = dict.fromkeys(range(40), 10)
    for budget, most in ((0.5, 1), (0.25, 3), (0.1, 9)):
        stays = chosen(fixed(budget, sizes), sizes)
        assert len(stays) == 40 * budget
        gaps = [b - a - 1 for a, b in zip([-1, *stays], [*stays, 40], strict=True)]
        assert max(gaps) <= most + 1


@pytest.mark.parametrize(("free", "expected"), [(None, 10), (1000, 9), (1032, 10), (100, 0), (0, 0), (700, 6)])
def test_auto_is_decided_once_by_what_is_free(free, expected):
    """Sizes on the device count, with their padding, and a sixteenth of the device's 1600 bytes stays free."""
    sizes, device_sizes = dict.fromkeys(range(10), 80), dict.fromkeys(range(10), 93)
    policy = fixed("auto", sizes, device_sizes)
    assert policy.unsettled
    assert chosen(policy, sizes) == []
    policy.settle(free, 1600)
    assert not policy.unsettled
    assert len(chosen(policy, sizes)) == expected
    policy.settle(10**9, 10**9)
    assert len(chosen(policy, sizes)) == expected


@given(st.lists(st.integers(1, 20), min_size=2, max_size=12), st.integers(0, 200), st.integers(2, 4))
def test_a_cyclic_scan_never_finds_a_page_that_was_used_least_recently(sizes, limit, rounds):
    sizes = dict(enumerate(sizes))
    policy, here, hits = LeastRecentlyUsed(limit), {}, 0
    policy.offer(sizes, sizes)
    for _ in range(rounds):
        for page, size in sizes.items():
            if page in here:
                policy.touched(page)
                hits += 1
            elif policy.admits(page):
                for victim in policy.victims(page):
                    policy.left(victim)
                    del here[victim]
                here[page] = size
                policy.entered(page, size)
            assert sum(here.values()) <= limit
    if limit >= sum(sizes.values()):
        assert hits == (rounds - 1) * len(sizes)
    elif max(sizes.values()) <= limit:
        assert hits == 0


@pytest.mark.parametrize(("page_bytes", "ahead"), [(2**25, 1), (2**23, 1), (2**22, 2), (2**21, 4), (2**20, 8), (1024, 8), (0, 8)])
def test_small_pages_are_fetched_further_ahead(page_bytes, ahead):
    assert pages_ahead(page_bytes) == ahead
