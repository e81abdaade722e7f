"""The order in which slots are given away."""

from hypothesis import given
from hypothesis import strategies as st

from flashoptim_hf.paging.residency import Ring


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
