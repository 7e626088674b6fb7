"""The store of responses: its limits, its owners, and the ends of responses in progress."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.openai.responses.store import KeptResponse, KeptResponses

MINE, YOURS = b"mine", b"yours"


def kept(size: int, items: Sequence[bytes] = ()) -> KeptResponse:
    return KeptResponse(b"x" * size, items)


def in_progress(size: int) -> KeptResponse:
    return KeptResponse(b"x" * size, (), cancel=lambda: None)


actions = st.lists(
    st.tuples(
        st.sampled_from(["add", "end", "delete"]),
        st.sampled_from([MINE, YOURS]),
        st.integers(0, 5),
        st.integers(0, 60),
    )
)


@given(actions, st.integers(0, 4), st.integers(0, 100))
def test_the_limits_are_kept(
    actions: list[tuple[str, bytes, int, int]], max_number: int, max_bytes: int
) -> None:
    store = KeptResponses(max_number, max_bytes)
    for number, (action, owner, place, size) in enumerate(actions):
        if action == "add":
            store.add(owner, f"new{number}", in_progress(size))
            store.add(owner, str(place), in_progress(size))
        elif action == "end":
            store.end(owner, str(place), b"y" * size, [b"z" * size])
        else:
            store.delete(owner, str(place))
            assert store.get(owner, str(place)) is None
        names = [*map(str, range(6)), *(f"new{each}" for each in range(number + 1))]
        found = [store.get(each, name) for each in (MINE, YOURS) for name in names]
        assert sum(each.num_bytes for each in found if each) == store.num_bytes <= max_bytes
        assert sum(each is not None for each in found) == len(store) <= max_number


def test_the_oldest_is_dropped_first() -> None:
    store = KeptResponses(2, 1000)
    for name in ("a", "b", "c"):
        store.add(MINE, name, kept(1))
    assert [store.get(MINE, name) is not None for name in ("a", "b", "c")] == [False, True, True]


def test_a_response_that_is_too_large_is_not_kept_alone() -> None:
    store = KeptResponses(2, 10)
    store.add(MINE, "a", kept(4, (b"x" * 7,)))
    assert store.get(MINE, "a") is None and (len(store), store.num_bytes) == (0, 0)


def test_an_owner_sees_only_its_own() -> None:
    store = KeptResponses(9, 1000)
    store.add(MINE, "a", kept(1))
    assert store.get(YOURS, "a") is None and store.delete(YOURS, "a") is None
    assert store.get(MINE, "a") == kept(1)


@pytest.mark.parametrize("was_deleted", [False, True])
def test_only_a_response_that_is_still_kept_gets_its_end(was_deleted: bool) -> None:
    store = KeptResponses(9, 1000)
    store.add(MINE, "a", in_progress(3))
    if was_deleted:
        store.delete(MINE, "a")
    store.end(MINE, "a", b"end", [b"item"])
    found = store.get(MINE, "a")
    if was_deleted:
        assert found is None and store.num_bytes == 0
    else:
        assert found == KeptResponse(b"end", (), (b"item",)) and store.num_bytes == 7
