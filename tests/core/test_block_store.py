"""KV blocks outside of the cache: what is saved, who waits for a load, and what a load leaves behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.config import SchedulingConfig
from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.kv.block_store import LoadResult, StoreUpdate
from inflight.core.kv.kv_events import block_hash
from inflight.core.kv.retention import Retention, RetentionConfig, TokenRangeRetention
from inflight.core.kv.state_snapshots import StateSnapshots
from inflight.core.request.request import IterationInput
from inflight.core.request.stop import StopSignal
from inflight.core.scheduler import Scheduler
from inflight.errors import StepFailed
from inflight.testing.simulation.integrity import check_integrity
from tests.core.factories import Driver, make_limits, make_request

SIZE = 4
SECOND = 10**9
LONG = tuple(range(10, 10 + 3 * SIZE + 1))  # three full blocks that can be found, and a token


class Server(Driver):
    """A scheduler with a block store that the test plays."""

    def __init__(
        self, saved: tuple[bytes, ...] = (), config: SchedulingConfig | None = None, **limits
    ) -> None:
        config = config or SchedulingConfig(max_num_tokens=64, enable_chunked_context=True)
        super().__init__(Scheduler(replace(config, has_block_store=True), make_limits(**limits)))
        self.update(saved=saved)

    def update(self, **news) -> None:
        self.scheduler.accept(IterationInput(self.iteration, 0, blocks=StoreUpdate(**news)))
        self.iteration += 1
        check_integrity(self.scheduler)

    def run(self, request) -> list[bytes]:
        """Run a request to its end; return the digests of the blocks that are saved."""
        self.accept(request)
        digests: list[bytes] = []
        while self.scheduler.num_active:
            self.step(token=7)
            digests += [piece.key for piece in self.scheduler.take_store_commands().saves]
        return digests

    def why(self, request_id: int = 1) -> str:
        return next(each.why for each in self.scheduler.state().waiting if each.request_id == request_id)

    def expiry_ns(self) -> int:
        """When the first retention of the cached blocks expires."""
        first = self.scheduler.kv_cache.pool._expiries.first_key()
        assert first is not None, "no retention has a duration"
        return first[0]

    @property
    def saved(self):
        assert self.scheduler.kv_cache.saved is not None
        return self.scheduler.kv_cache.saved


def saved_digests(**fields) -> tuple[bytes, ...]:
    """The digests of the blocks of `LONG`."""
    digests = Server().run(make_request(prompt=LONG, new=1, **fields))
    assert len(digests) == 3
    return tuple(digests)


def test_every_full_block_is_saved_once_when_it_is_published():
    server = Server()
    first = server.run(make_request(1, LONG, new=5))
    assert len(first) == 4 == len(set(first))  # 13 + 4 tokens have keys and values
    assert server.run(make_request(2, LONG, new=5)) == []
    server.update(saved=tuple(first))
    assert server.saved.num_saved == 4 and len(server.saved) == 4


def test_a_block_that_could_not_be_saved_is_saved_when_it_is_computed_again():
    server = Server(num_blocks=8)
    first = server.run(make_request(1, LONG, new=1))
    server.update(dropped=tuple(first))
    server.run(make_request(2, tuple(range(100, 129)), new=1))  # evicts everything
    assert server.run(make_request(3, LONG, new=1)) == first


def test_nothing_is_saved_without_a_store_or_for_a_request_that_shares_nothing():
    plain = Driver(Scheduler(SchedulingConfig(), make_limits()))
    plain.accept(make_request(prompt=LONG))
    plain.step()
    assert not plain.scheduler.take_store_commands()


def test_blocks_of_low_priority_are_not_saved():
    config = SchedulingConfig(max_num_tokens=64, secondary_offload_min_priority=40)
    low = Server(config=config)
    assert low.run(make_request(prompt=LONG, new=1)) == []
    kept = RetentionConfig((), Retention(20))
    assert Server(config=config).run(make_request(prompt=LONG, new=5, retention=kept)) == []
    saved = Server().run(make_request(prompt=LONG, new=9, retention=kept))
    assert len(saved) == 4, "the fifth block begins with a generated token"


def test_a_request_waits_for_its_blocks_without_a_slot_and_then_finds_them():
    server = Server(saved_digests())
    server.accept(make_request(prompt=LONG))
    assert server.step()[0] is None and server.scheduler.can_only_wait
    (load,) = server.scheduler.take_store_commands().loads
    assert [piece.key for piece in load.pieces] == list(saved_digests())
    assert server.why() == "waits for KV: the next blocks of its prompt are being read from the block store"
    assert not server.scheduler.running_sequences
    server.update(loads=(LoadResult(load.load_id, 3),))
    batch, _ = server.step()
    assert batch is not None and batch.new_blocks[0][1][:3] == tuple(piece.index for piece in load.pieces)
    assert batch.context[0].start == 3 * SIZE
    assert (server.saved.num_loaded, server.saved.num_unread) == (3, 0)
    assert server.scheduler.take_store_commands().saves == (), "they are saved already"


def test_others_run_while_a_request_waits_for_its_blocks():
    server = Server(saved_digests())
    server.accept(make_request(1, LONG), make_request(2, tuple(range(200, 210))))
    batch, _ = server.step()
    assert batch is not None and [start.request.request_id for start in batch.starts] == [2]
    assert not server.scheduler.can_only_wait or server.scheduler.schedule() is not None


def test_a_request_starts_although_many_others_wait_for_their_blocks():
    prompts = [tuple(range(n, n + SIZE + 1)) for n in range(100)]
    digests = Server(num_blocks=1000)
    saved = [digests.run(make_request(n, prompt, new=1))[0] for n, prompt in enumerate(prompts)]
    server = Server(tuple(saved), num_blocks=1000)
    server.accept(
        *(make_request(n, prompt) for n, prompt in enumerate(prompts)), make_request(100, (900, 901))
    )
    batch, _ = server.step()
    assert batch is not None
    assert [start.request.request_id for start in batch.starts] == [100]
    assert len(server.saved.loads) == 100
    assert "waits for KV" in server.why(0)


def test_requests_with_the_same_prefix_wait_for_one_load():
    server = Server(saved_digests())
    server.accept(make_request(1, LONG), make_request(2, (*LONG, 7)))
    server.step()
    (load,) = server.scheduler.take_store_commands().loads
    server.update(loads=(LoadResult(load.load_id, 3),))
    batch, _ = server.step()
    assert batch is not None and [chunk.start for chunk in batch.context] == [12, 12]
    assert not server.scheduler.take_store_commands().loads


def test_what_a_load_could_not_read_is_computed_and_not_tried_again():
    digests = saved_digests()
    server = Server(digests)
    server.accept(make_request(prompt=LONG))
    server.step()
    (load,) = server.scheduler.take_store_commands().loads
    server.update(loads=(LoadResult(load.load_id, 1),))  # the store does not know yet why
    batch, _ = server.step()
    assert batch is not None and batch.context[0].start == SIZE
    assert (server.saved.num_loaded, server.saved.num_unread) == (1, 2)
    assert not server.scheduler.take_store_commands().loads


def test_only_blocks_behind_the_cached_prefix_are_loaded():
    server = Server()
    server.run(make_request(1, LONG[: 2 * SIZE], new=1))
    digests = saved_digests()
    server.update(saved=digests)
    server.accept(make_request(2, LONG))
    server.step()
    (load,) = server.scheduler.take_store_commands().loads
    assert [piece.key for piece in load.pieces] == [digests[2]]


def test_a_load_takes_no_blocks_that_the_request_could_not_have():
    server = Server(saved_digests(), num_blocks=6)
    server.accept(make_request(1, tuple(range(300, 308)), new=8))
    server.step()
    server.accept(make_request(2, LONG, new=3))
    server.step()
    assert not server.scheduler.take_store_commands().loads
    assert server.why(2) == "needs 4 blocks, 2 free"
    while server.scheduler.running_sequences:
        server.step()
    server.step()
    assert len(server.scheduler.take_store_commands().loads) == 1


def test_a_load_does_not_overwrite_a_block_that_the_next_batch_copies_from():
    server = Server(saved_digests(), num_blocks=9)
    server.run(make_request(5, (500, 501, 502, 503, 1), new=1))
    server.run(make_request(6, tuple(range(600, 600 + 6 * SIZE + 1)), new=1))
    server.accept(make_request(1, (500, 501, 999), new=1), make_request(2, LONG, new=1))
    batch = server.scheduler.schedule()
    (load,) = server.scheduler.take_store_commands().loads
    assert batch is not None and len(load.pieces) == 3
    ((source, target),) = batch.block_copies
    assert not {source, target} & {piece.index for piece in load.pieces}


def test_a_load_does_not_overwrite_a_snapshot_that_the_next_batch_starts_from():
    states = StateSnapshots(2)
    for digest in (b"a", b"b"):
        states.begin_load(digest)
        states.end_load(digest, is_loaded=True)
    states.start(1, {})
    used = states.use(b"b", key=1)
    assert states.begin_load(b"c", {0, 1}) is None
    assert states.begin_load(b"c", {used}) == 1 - used and b"b" in states


def test_a_load_does_not_evict_the_prefix_that_it_continues():
    server = Server(num_blocks=6)
    server.run(make_request(5, LONG[: SIZE + 1], new=1))
    server.run(make_request(6, tuple(range(600, 600 + 4 * SIZE + 1)), new=1))
    server.update(saved=saved_digests())
    server.accept(make_request(2, LONG, new=1))
    server.step()
    (load,) = server.scheduler.take_store_commands().loads
    server.update(loads=(LoadResult(load.load_id, len(load.pieces)),))
    batch, _ = server.step()
    assert batch is not None and batch.context[0].start == 3 * SIZE


def test_a_request_that_ends_while_its_blocks_are_loaded_leaves_them_in_the_cache():
    server = Server(saved_digests())
    server.accept(make_request(1, LONG))
    server.step()
    (load,) = server.scheduler.take_store_commands().loads
    server.accept(stop=(StopSignal(1),))
    assert server.scheduler.num_active == 0 and server.scheduler.kv_cache.pool.num_held == 3
    server.update(loads=(LoadResult(load.load_id, 3),))
    assert server.scheduler.kv_cache.pool.num_cached == 3
    server.accept(make_request(2, LONG))
    batch, _ = server.step()
    assert batch is not None and batch.context[0].start == 12


def test_blocks_are_not_loaded_if_the_operator_wants_it_so():
    config = SchedulingConfig(max_num_tokens=64, kv_cache_onboard_blocks=False)
    server = Server(saved_digests(), config=config)
    server.accept(make_request(1, LONG))
    batch, _ = server.step()
    assert batch is not None and batch.context[0].start == 0


def test_blocks_of_another_salt_are_not_loaded():
    server = Server(saved_digests())
    server.accept(make_request(1, LONG, identity=PrefixIdentity(cache_salt_id=5)))
    batch, _ = server.step()
    assert batch is not None and not server.scheduler.take_store_commands().loads


def test_blocks_of_a_faulty_request_are_dropped_from_the_store():
    server = Server()
    server.accept(make_request(1, LONG, new=9))
    server.step()
    digests = tuple(piece.key for piece in server.scheduler.take_store_commands().saves)
    server.update(saved=digests)
    batch = server.scheduler.schedule()
    assert batch is not None and len(digests) == 3
    server.scheduler.fail(batch, StepFailed("broken"))
    assert set(server.scheduler.take_store_commands().drops) == set(digests)
    server.accept(make_request(2, LONG))
    batch = server.scheduler.schedule()
    assert batch is not None and batch.context[0].start == 0


def test_a_load_survives_a_failure_of_the_scheduler():
    server = Server(saved_digests(), num_blocks=8)
    server.accept(make_request(1, LONG), make_request(2, tuple(range(200, 204)), new=2))
    server.scheduler.schedule()
    (load,) = server.scheduler.take_store_commands().loads
    server.scheduler.recover(StepFailed("a defect"), num_in_flight=0)
    check_integrity(server.scheduler)
    for _ in range(10):
        batch, _ = server.step()
        given = {block for _, blocks in batch.new_blocks for block in blocks} if batch else set()
        assert not given & {piece.index for piece in load.pieces}, (
            "the load would overwrite a sequence's block"
        )
    server.update(loads=(LoadResult(load.load_id, 3),))
    server.accept(make_request(3, LONG))
    batch, _ = server.step()
    assert batch is not None and 12 in {chunk.start for chunk in batch.context}


CONFIG_WITH_EVENTS = SchedulingConfig(max_num_tokens=64, kv_event_buffer_size=100)


def test_blocks_that_an_earlier_server_saved_are_stored_when_they_are_loaded():
    first = Server(config=CONFIG_WITH_EVENTS)
    first.run(make_request(prompt=LONG, new=1))
    computed = [event for event in first.scheduler.take_kv_events() if event.stored]
    server = Server(saved_digests(), config=CONFIG_WITH_EVENTS)
    server.accept(make_request(prompt=LONG))
    server.step()
    (load,) = server.scheduler.take_store_commands().loads
    server.scheduler.take_kv_events()
    server.update(loads=(LoadResult(load.load_id, 3),))
    (loaded,) = server.scheduler.take_kv_events()
    assert (loaded.stored, loaded.parent_hash) == (computed[0].stored, None)


def test_saved_blocks_go_to_level_1_when_they_are_evicted_and_come_back():
    server = Server(config=CONFIG_WITH_EVENTS, num_blocks=8)
    digests = server.run(make_request(1, LONG, new=1))
    server.update(saved=tuple(digests[:2]))
    server.scheduler.take_kv_events()
    server.run(make_request(2, tuple(range(100, 129)), new=1))  # evicts everything
    events = server.scheduler.take_kv_events()
    hashes = [block_hash(digest) for digest in digests]
    assert [event.removed for event in events if event.removed] == [(hashes[2],)]
    levels = {event.updated: event.levels for event in events if event.updated is not None}
    assert levels == {hashes[0]: (0, 1), hashes[1]: (0, 1)}
    server.accept(make_request(3, LONG, new=1))
    server.step()
    (load,) = server.scheduler.take_store_commands().loads
    server.scheduler.take_kv_events()
    server.update(loads=(LoadResult(load.load_id, 2),), dropped=(digests[1],))
    back = server.scheduler.take_kv_events()
    assert [(event.updated, event.levels) for event in back if event.updated is not None] == [
        (hashes[0], (1, 0))
    ]
    assert sum(event.removed.count(hashes[1]) for event in back) == 1


def test_a_saved_block_that_is_lost_is_removed():
    server = Server(config=CONFIG_WITH_EVENTS, num_blocks=8)
    digests = server.run(make_request(1, LONG, new=1))
    server.update(saved=tuple(digests))
    server.run(make_request(2, tuple(range(100, 129)), new=1))
    server.scheduler.take_kv_events()
    server.update(dropped=tuple(digests))
    (event,) = server.scheduler.take_kv_events()
    assert sorted(event.removed) == sorted(map(block_hash, digests))


@pytest.mark.parametrize("has_idle_iteration", [False, True])
def test_durations_of_loaded_blocks_begin_when_their_load_ends(has_idle_iteration: bool):
    """An idle iteration of rank 0, which other ranks and replays do not have, makes no difference."""
    kept = RetentionConfig((TokenRangeRetention(0, None, Retention(90, duration_ms=1000)),))
    server = Server(saved_digests())
    server.accept(make_request(prompt=LONG, retention=kept))
    server.step()
    (load,) = server.scheduler.take_store_commands().loads
    server.accept(stop=(1,))
    server.step()
    if has_idle_iteration:
        server.accept(now_ns=5 * SECOND)
        server.step()
    ended = StoreUpdate(loads=(LoadResult(load.load_id, 3),))
    server.scheduler.accept(IterationInput(server.iteration, 10 * SECOND, blocks=ended))
    assert server.expiry_ns() == 11 * SECOND


def test_blocks_that_are_found_in_the_cache_are_told_to_the_store():
    digests = saved_digests()
    server = Server()
    server.run(make_request(1, LONG, new=1))
    server.run(make_request(2, LONG, new=1))
    assert not server.scheduler.take_store_commands().uses, "they are not saved yet"
    server.update(saved=digests)
    server.accept(make_request(3, LONG))
    server.step()
    assert server.scheduler.take_store_commands().uses == digests[::-1], "the first block is the most useful"
    server.step()
    assert not server.scheduler.take_store_commands()


def test_a_saved_block_that_is_computed_again_is_told_to_the_store():
    config = SchedulingConfig(max_num_tokens=64, kv_cache_onboard_blocks=False)
    server = Server(saved_digests(), config)
    server.accept(make_request(1, LONG))
    server.step()
    commands = server.scheduler.take_store_commands()
    assert commands.saves == () and set(commands.uses) == set(saved_digests())


def test_a_snapshot_from_which_a_sequence_starts_is_told_to_the_store():
    server = Server(num_state_snapshots=4)
    saved = tuple(server.run(make_request(1, LONG, new=1)))
    assert len(saved) == 4
    server.update(saved=saved)
    server.accept(make_request(2, LONG))
    server.step()
    assert set(server.scheduler.take_store_commands().uses) == set(saved)


def test_no_use_is_told_of_a_block_that_must_not_be_loaded_again():
    digests = saved_digests()
    server = Server()
    server.run(make_request(1, LONG, new=1))
    server.update(saved=digests)
    server.accept(make_request(2, LONG))
    server.step()
    server.saved.drop(digests[0])
    commands = server.scheduler.take_store_commands()
    assert commands.drops == digests[:1] and commands.uses == digests[:0:-1]
