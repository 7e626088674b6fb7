"""The store of responses: its limits, its owners, and the ends of responses in progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import ConfigError
from inflight.openai.responses.file import ResponseFile
from inflight.openai.responses.store import KeptResponse, KeptResponses
from tests.tiers import examples

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
@settings(max_examples=examples(20, all=200), deadline=None)
def test_a_file_has_what_had_ended(
    actions: list[tuple[str, bytes, int, int]], max_number: int, max_bytes: int
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "responses.db"
        store = KeptResponses(max_number, max_bytes, ResponseFile(path))
        for action, owner, place, size in actions:
            if action == "add":
                store.add(owner, str(place), in_progress(size))
            elif action == "end":
                store.end(owner, str(place), b"y" * size, [b"z", b"z" * size])
            else:
                store.delete(owner, str(place))
        places = [(owner, str(place)) for owner in (MINE, YOURS) for place in range(6)]
        ended = {each: found for each in places if (found := store.get(*each)) and found.cancel is None}
        store.close()
        again = KeptResponses(max_number, max_bytes, ResponseFile(path))
        for each in places:
            found, wanted = again.get(*each), ended.get(each)
            assert (found and (found.response, [*found.output])) == (
                wanted and (wanted.response, [*wanted.output])
            )
        assert len(again) == len(ended)
        again.close()


def test_a_file_is_private_and_used_by_one_server(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    file = ResponseFile(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match=r"--response-store .*locked"):
        ResponseFile(path)
    file.close()
    file.close()
    other = tmp_path / "other"
    other.write_text("This is no database, but a text that is long enough." * 20)
    for broken in (other, tmp_path / "absent" / "file", tmp_path):
        with pytest.raises(ConfigError, match="--response-store"):
            ResponseFile(broken)


def test_a_file_that_cannot_be_written_leaves_responses_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = ResponseFile(tmp_path / "responses.db")
    store = KeptResponses(9, 1000, file)
    file._database.execute("DROP TABLE responses")
    for name in ("a", "b"):
        store.add(MINE, name, kept(1))
    store.close()
    assert store.get(MINE, "a") == kept(1)
    assert caplog.text.count("kept in memory only") == 1


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
