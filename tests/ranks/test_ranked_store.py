"""The stores of several ranks: when a load has ended, and with how many blocks."""

from __future__ import annotations

import pytest

from inflight.core.kv.block_store import BlockLoad, LoadResult, SavedPiece, StoreCommands, StoreUpdate
from inflight.ranks.ranked_store import FollowersBlockStore, LeadersBlockStore

A, B, C = (bytes([number]) * 16 for number in range(3))
LOAD = BlockLoad(3, (SavedPiece(A, 1), SavedPiece(B, 2), SavedPiece(C, 0, is_state=True)))


class PlayedStore:
    """A store whose updates the test gives."""

    def __init__(self) -> None:
        self.news = StoreUpdate()
        self.commands: list[StoreCommands] = []
        self.is_closed = False

    def carry_out(self, commands: StoreCommands) -> None:
        self.commands.append(commands)

    def update(self) -> StoreUpdate:
        news, self.news = self.news, StoreUpdate()
        return news

    def computed(self, num_tokens: int, seconds: float) -> None:
        raise AssertionError("no rank decides by its own time whether loading pays")

    def close(self) -> None:
        self.is_closed = True


class Ranks:
    """The stores of rank 0 and of other ranks; `num_wakes` counts how often rank 0's loop is woken."""

    def __init__(self, num_others: int = 1) -> None:
        self.num_wakes = 0
        self.own, self.others = PlayedStore(), [PlayedStore() for _ in range(num_others)]
        self.leader = LeadersBlockStore(self.own, 1 + num_others, self._wake)
        self.followers = [FollowersBlockStore(self._make(store), self.leader.hear) for store in self.others]

    def _wake(self) -> None:
        self.num_wakes += 1

    def _make(self, store: PlayedStore):
        def make(on_end):
            store.on_end = on_end
            return store

        return make

    def command(self, commands: StoreCommands) -> None:
        for store in (self.leader, *self.followers):
            store.carry_out(commands)

    def end_own(self, num_pieces: int, **news: tuple[bytes, ...]) -> None:
        self.own.news = StoreUpdate(loads=(LoadResult(LOAD.load_id, num_pieces),), **news)

    def end(self, rank: int, num_pieces: int) -> None:
        """End the load on a rank other than 0, on a thread of its store."""
        store = self.others[rank - 1]
        store.news = StoreUpdate(loads=(LoadResult(LOAD.load_id, num_pieces),))
        store.on_end()


@pytest.mark.parametrize("own_is_first", [True, False])
def test_a_load_has_ended_when_it_has_ended_on_all_ranks(own_is_first: bool) -> None:
    ranks = Ranks(num_others=2)
    ranks.command(StoreCommands(loads=(LOAD,)))
    if own_is_first:
        ranks.end_own(3)
        assert ranks.leader.update() == StoreUpdate()
    ranks.end(2, 3)
    assert ranks.leader.update() == StoreUpdate() and ranks.num_wakes == 1
    ranks.end(1, 3)
    if not own_is_first:
        assert ranks.leader.update() == StoreUpdate()
        ranks.end_own(3)
    assert ranks.leader.update() == StoreUpdate(loads=(LoadResult(3, 3),))
    assert ranks.leader.update() == StoreUpdate() and ranks.num_wakes == 2


@pytest.mark.parametrize(("own", "other"), [(1, 3), (3, 1), (1, 2)])
def test_as_many_blocks_are_loaded_as_every_rank_could_read(own: int, other: int) -> None:
    ranks = Ranks()
    ranks.command(StoreCommands(loads=(LOAD,)))
    ranks.end(1, other)
    ranks.end_own(own)
    assert ranks.leader.update() == StoreUpdate(dropped=(B, C), loads=(LoadResult(3, 1),))


def test_another_rank_may_end_a_load_before_rank_0_has_begun_it() -> None:
    ranks = Ranks()
    ranks.followers[0].carry_out(StoreCommands(loads=(LOAD,)))
    ranks.end(1, 2)
    assert ranks.leader.update() == StoreUpdate()
    ranks.leader.carry_out(StoreCommands(loads=(LOAD,)))
    ranks.end_own(3)
    assert ranks.leader.update() == StoreUpdate(dropped=(C,), loads=(LoadResult(3, 2),))


def test_only_rank_0_says_what_was_saved_and_dropped() -> None:
    ranks = Ranks()
    commands = StoreCommands(saves=LOAD.pieces[:1], drops=(B,))
    ranks.others[0].news = StoreUpdate(saved=(C,), dropped=(A,))
    ranks.command(commands)
    assert ranks.own.commands == ranks.others[0].commands == [commands]
    assert ranks.others[0].news == StoreUpdate(), "what another rank has saved is not kept"
    ranks.own.news = StoreUpdate(saved=(A,), dropped=(B,))
    assert ranks.leader.update() == StoreUpdate(saved=(A,), dropped=(B,))
    assert ranks.followers[0].update() == StoreUpdate()


def test_ranks_measure_no_times_and_close_their_own_stores() -> None:
    ranks = Ranks()
    for store in (ranks.leader, *ranks.followers):
        store.computed(100, 1.0)
        store.close()
    assert ranks.own.is_closed and ranks.others[0].is_closed


def test_large_numbers_arrive() -> None:
    ranks = Ranks()
    pieces = tuple(SavedPiece(number.to_bytes(16, "big"), number) for number in range(70_000))
    load = BlockLoad(2**33, pieces)
    ranks.command(StoreCommands(loads=(load,)))
    ranks.others[0].news = StoreUpdate(loads=(LoadResult(load.load_id, 66_000),))
    ranks.others[0].on_end()
    ranks.own.news = StoreUpdate(loads=(LoadResult(load.load_id, 70_000),))
    assert ranks.leader.update().loads == (LoadResult(load.load_id, 66_000),)
