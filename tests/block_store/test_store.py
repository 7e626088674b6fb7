"""The block store: tiers, order of commands, full disks, and whether loading pays."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inflight.block_store import BlockFiles, HostBlockStore
from inflight.block_store import files as store_files
from inflight.block_store import store as store_module
from inflight.block_store.store import LoadingPays
from inflight.core.kv.block_store import BlockLoad, LoadResult, SavedPiece, StoreCommands, StoreUpdate
from inflight.core.kv.store_stats import DISK, HOST, StoreStats, TierStats

BYTES = 64
A, B, C, D = (bytes([number]) * 16 for number in range(4))


class Memory:
    """Blocks in host memory; block i is filled with i at first."""

    block_bytes = BYTES
    state_bytes = 2 * BYTES
    is_on_host = True

    def __init__(self) -> None:
        self.blocks = {number: np.full(BYTES, number, dtype=np.uint8) for number in range(20)}
        self.states = {number: np.full(2 * BYTES, 100 + number, dtype=np.uint8) for number in range(5)}

    def read(self, index: int, is_state: bool) -> np.ndarray:
        return (self.states if is_state else self.blocks)[index].copy()

    def write(self, index: int, is_state: bool, content: np.ndarray) -> None:
        (self.states if is_state else self.blocks)[index][:] = content


class Store:
    """A store over `Memory` whose updates are awaited; `stats` are the last statistics, which updates lack."""

    def __init__(
        self, folder: Path | None = None, host_blocks: int = 0, num_files: int = 100, max_age_s: float = 1e9
    ) -> None:
        self.memory = Memory()
        self.notified = threading.Semaphore(0)
        files = None
        if folder is not None:
            files = BlockFiles(folder, "0" * 32, BYTES, num_files * (BYTES + 16), max_age_s)
        self.store = HostBlockStore(self.memory, 4, self.notified.release, host_blocks * BYTES, files)
        self.stats = StoreStats()

    def update(self) -> StoreUpdate:
        update = self.store.update()
        self.stats = update.stats or self.stats
        return replace(update, stats=None)

    def save(self, **blocks: int) -> StoreUpdate:
        """Save blocks, and wait until all are saved or dropped."""
        self.store.carry_out(StoreCommands(saves=pieces(**blocks)))
        return self.drain()

    def load(self, load_id: int, **blocks: int) -> StoreUpdate:
        self.store.carry_out(StoreCommands(loads=(BlockLoad(load_id, pieces(**blocks)),)))
        assert self.notified.acquire(timeout=60)
        return self.update()

    def drain(self) -> StoreUpdate:
        """Wait until no block waits to be written."""
        end = time.monotonic() + 60
        while self.store._waiting_bytes:
            assert time.monotonic() < end
            time.sleep(0.001)
        return self.update()


KEYS = {"a": A, "b": B, "c": C, "d": D}


def pieces(**blocks: int) -> tuple[SavedPiece, ...]:
    return tuple(SavedPiece(KEYS[name], block_id) for name, block_id in blocks.items())


@pytest.fixture
def make():
    """Make stores, which are closed afterwards."""
    made: list[Store] = []

    def build(*args, **kwargs) -> Store:
        made.append(Store(*args, **kwargs))
        return made[-1]

    yield build
    for each in made:
        each.store.close()


@pytest.mark.parametrize("tier", ["host", "files"])
def test_saved_blocks_are_loaded_into_other_blocks(make, tmp_path, tier):
    store = make(tmp_path) if tier == "files" else make(host_blocks=4)
    assert store.save(a=1, b=2) == StoreUpdate(saved=(A, B))
    assert store.load(0, b=11, a=12) == StoreUpdate(loads=(LoadResult(0, 2),))
    assert [store.memory.blocks[number][0] for number in (10, 11, 12)] == [10, 2, 1]


@pytest.mark.parametrize("tier", ["host", "files"])
def test_snapshots_are_saved_and_loaded_beside_blocks(make, tmp_path, tier):
    store = make(tmp_path) if tier == "files" else make(host_blocks=4)
    state = SavedPiece(C, 3, is_state=True)
    store.store.carry_out(StoreCommands(saves=(*pieces(a=1), state)))
    assert store.drain() == StoreUpdate(saved=(A, C))
    store.store.carry_out(
        StoreCommands(loads=(BlockLoad(0, (*pieces(a=7), SavedPiece(C, 0, is_state=True))),))
    )
    assert store.notified.acquire(timeout=60)
    assert store.update() == StoreUpdate(loads=(LoadResult(0, 2),))
    assert (store.memory.blocks[7] == 1).all() and (store.memory.states[0] == 103).all()


def test_a_restart_finds_the_blocks_in_files(make, tmp_path):
    first = make(tmp_path)
    first.save(a=1, b=2)
    first.store.close()
    second = make(tmp_path)
    assert set(second.update().saved) == {A, B} and second.store.update() == StoreUpdate()
    assert second.load(7, a=5) == StoreUpdate(loads=(LoadResult(7, 1),))


def test_blocks_that_wait_are_written_before_the_end(make, tmp_path):
    first = make(tmp_path)
    first.store.carry_out(StoreCommands(saves=pieces(a=1, b=2, c=3)))
    first.store.close()
    assert set(make(tmp_path).store.update().saved) == {A, B, C}


def test_blocks_that_a_slow_disk_has_not_written_in_time_are_left(make, tmp_path, may_write, monkeypatch):
    monkeypatch.setattr(store_module, "_CLOSE_S", 0.01)
    store = make(tmp_path).store
    store.carry_out(StoreCommands(saves=pieces(a=1, b=2, c=3)))
    store.close()
    may_write.set()
    for thread in store._threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in store._threads)
    assert len(store._files.keys()) == 1


def test_the_devices_memory_is_free_after_the_end(make, tmp_path):
    one = make(tmp_path)
    memory = weakref.ref(one.memory)
    one.save(a=1)
    one.store.close()
    one.store.close()
    one.memory = None
    assert memory() is None


def test_a_block_is_saved_as_it_is_when_the_command_comes(make, tmp_path):
    store = make(tmp_path)
    store.store.carry_out(StoreCommands(saves=pieces(a=1)))
    store.memory.blocks[1][:] = 99
    store.drain()
    store.load(0, a=5)
    assert store.memory.blocks[5][0] == 1


def test_a_load_ends_at_the_first_block_that_cannot_be_read(make, tmp_path):
    store = make(tmp_path)
    store.save(a=1, c=3)
    assert store.load(0, a=11, b=12, c=13) == StoreUpdate(dropped=(B,), loads=(LoadResult(0, 1),))
    assert store.memory.blocks[13][0] == 13


@pytest.fixture
def may_write(monkeypatch):
    """An event: files are written only once it is set."""
    event = threading.Event()
    write = BlockFiles.write

    def write_later(files, key, content):
        assert event.wait(60)
        return write(files, key, content)

    monkeypatch.setattr(BlockFiles, "write", write_later)
    return event


def test_a_dropped_block_is_not_loaded_even_if_it_waits_to_be_written(make, tmp_path, may_write):
    store = make(tmp_path, host_blocks=4)
    may_write.set()
    store.save(a=1)
    may_write.clear()
    store.store.carry_out(StoreCommands(saves=pieces(b=2)))
    store.store.carry_out(StoreCommands(drops=(A, B, C)))
    may_write.set()
    assert not {A, B} & set(store.drain().saved)
    for number, name in enumerate("ab"):
        assert store.load(number, **{name: 9}).loads == (LoadResult(number, 0),)


def test_a_block_that_was_written_but_not_yet_reported_can_be_dropped(make, tmp_path):
    store = make(tmp_path).store
    store.carry_out(StoreCommands(saves=pieces(a=1)))
    while store._waiting_bytes:
        time.sleep(0.001)
    store.carry_out(StoreCommands(drops=(A,)))
    assert store.update().saved == ()


@pytest.mark.parametrize("tiers", [(DISK,), (HOST,), (HOST, DISK)])
def test_a_block_is_loaded_while_it_waits_to_be_written(make, tmp_path, may_write, monkeypatch, tiers):
    if DISK not in tiers:  # delay host memory, as `may_write` delays files
        keep = HostBlockStore._write_to_host
        monkeypatch.setattr(HostBlockStore, "_write_to_host", lambda *of: may_write.wait(60) and keep(*of))
    store = make(tmp_path if DISK in tiers else None, host_blocks=4 * (HOST in tiers))
    store.store.carry_out(StoreCommands(saves=pieces(a=1)))
    assert store.load(0, a=9).loads == (LoadResult(0, 1),)
    assert store.memory.blocks[9][0] == 1
    may_write.set()
    assert store.drain().saved == (A,)
    assert store.load(1, a=8).loads == (LoadResult(1, 1),)
    assert sum(tier.num_loaded for tier in store.stats.tiers) == store.stats.num_loaded == 2


def test_blocks_beyond_host_memory_are_dropped_unless_a_file_has_them(make, tmp_path):
    store = make(host_blocks=2)
    update = store.save(a=1, b=2, c=3)
    assert (update.saved, update.dropped) == ((A, B, C), (A,))
    both = make(tmp_path, host_blocks=2)
    assert both.save(a=1, b=2, c=3) == StoreUpdate(saved=(A, B, C))
    assert both.load(0, a=9).loads == (LoadResult(0, 1),)


def test_the_least_recently_loaded_block_leaves_host_memory(make):
    store = make(host_blocks=2)
    store.save(a=1, b=2)
    store.load(0, a=9)
    assert store.save(c=3).dropped == (B,)


def test_a_block_that_is_saved_twice_takes_host_memory_once(make):
    store = make(host_blocks=2)
    for _ in range(3):
        store.save(a=1)
    assert store.save(b=2, c=3).dropped == (A,)
    assert store.load(0, b=9, c=8).loads == (LoadResult(0, 2),)


def test_a_block_that_is_saved_again_after_a_drop_is_there(make, tmp_path, may_write):
    store = make(tmp_path)
    store.store.carry_out(StoreCommands(saves=pieces(a=1)))
    store.store.carry_out(StoreCommands(drops=(A,)))
    store.store.carry_out(StoreCommands(saves=pieces(a=2)))
    may_write.set()
    assert store.drain() == StoreUpdate(saved=(A,))
    store.load(0, a=9)
    assert store.memory.blocks[9][0] == 2


def test_whatever_a_read_raises_ends_only_the_load(make, tmp_path, monkeypatch):
    store = make(tmp_path)
    store.save(a=1)
    with monkeypatch.context() as patch:
        patch.setattr(BlockFiles, "read", lambda *_: 1 / 0)
        assert store.load(0, a=5).loads == (LoadResult(0, 0),)
    assert store.load(1, a=5).loads == (LoadResult(1, 1),)


def test_blocks_expire_while_nothing_is_saved(make, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_MIN_WAIT_S", 0.01)
    each = make(tmp_path, max_age_s=0.2)
    update = each.save(a=1, b=2)
    saved, dropped = update.saved, [*update.dropped]
    end = time.monotonic() + 60
    while len(dropped) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
        dropped += each.update().dropped
    assert set(saved) == set(dropped) == {A, B}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lock"]


def test_a_block_that_expires_in_files_stays_in_host_memory(make, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_MIN_WAIT_S", 0.01)
    each = make(tmp_path, host_blocks=1, max_age_s=0.2)
    each.save(a=1)
    end = time.monotonic() + 60
    while len(list(tmp_path.rglob("*"))) > 3:  # the model's folder, its lock, and the block's folder
        assert time.monotonic() < end
        time.sleep(0.01)
    assert each.update().dropped == () and each.load(1, a=5).loads == (LoadResult(1, 1),)


def test_blocks_that_files_have_no_room_for_are_dropped(make, tmp_path):
    store = make(tmp_path, num_files=1)
    update = store.save(a=1, b=2)
    assert (update.saved, update.dropped) == ((A, B), (A,))


def test_a_full_disk_drops_blocks_and_logs_one_line(make, tmp_path, monkeypatch, caplog):
    store = make(tmp_path)

    def full(files, key, content):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(BlockFiles, "write", full)
        assert store.save(a=1, b=2) == StoreUpdate(dropped=(A, B))
    assert [record.message for record in caplog.records] == [
        "KV blocks are not saved any more, until writing succeeds again: [Errno 28] No space left on device"
    ]
    assert store.save(c=3) == StoreUpdate(saved=(C,))


def test_a_disk_that_takes_only_small_pieces_logs_one_line(make, tmp_path, monkeypatch, caplog):
    store, write = make(tmp_path), BlockFiles.write
    state = SavedPiece(D, 0, is_state=True)

    def nearly_full(files, key, content):
        if content.size > BYTES:
            raise OSError(28, "No space left on device")
        return write(files, key, content)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(BlockFiles, "write", nearly_full)
        for block in pieces(a=1, b=2, c=3):
            store.store.carry_out(StoreCommands(saves=(block, state)))
            assert store.drain() == StoreUpdate(saved=(block.key,), dropped=(D,))
        assert len(caplog.records) == 1
    store.store.carry_out(StoreCommands(saves=(state,)))
    assert store.drain() == StoreUpdate(saved=(D,))
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(BlockFiles, "write", nearly_full)
        store.store.carry_out(StoreCommands(saves=(state,)))
        store.drain()
    assert len(caplog.records) == 2, "all sizes were written again before"


def test_blocks_are_dropped_while_memory_is_refused(make, tmp_path, monkeypatch, caplog):
    def refuse(*_: object):
        raise MemoryError

    store = make(tmp_path)
    with caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patch:
            patch.setattr(store.memory, "read", refuse)
            assert store.save(a=1) == StoreUpdate(dropped=(A,))
        with monkeypatch.context() as patch:
            patch.setattr(store_files, "_check", refuse)
            assert store.save(b=2) == StoreUpdate(dropped=(B,))
    assert [record.message for record in caplog.records] == [
        "a KV block could not be copied from the device, and is not saved",
        "KV blocks are not saved any more, until writing succeeds again: no memory",
    ]
    assert not list(tmp_path.glob("*/*/*")), "an unfinished file is left"
    assert store.save(c=3) == StoreUpdate(saved=(C,))


def test_blocks_that_wait_to_be_written_take_bounded_memory(make, tmp_path, monkeypatch, may_write):
    monkeypatch.setattr(store_module, "_MAX_QUEUED_BYTES", BYTES)
    store = make(tmp_path)
    store.store.carry_out(StoreCommands(saves=pieces(a=1, b=2, c=3)))
    assert store.update() == StoreUpdate(dropped=(B, C))
    may_write.set()
    assert store.drain() == StoreUpdate(saved=(A,))


def test_a_device_that_cannot_be_written_ends_the_load(make, tmp_path, monkeypatch, caplog):
    store = make(tmp_path)
    store.save(a=1)
    monkeypatch.setattr(store.memory, "write", lambda *_: 1 / 0)
    assert store.load(0, a=5).loads == (LoadResult(0, 0),)
    assert "could not be copied to the device" in caplog.text


# ---------------------------------------------------------------------- statistics

FILE = BYTES + 16


def test_what_each_tier_saves_loads_and_drops_is_counted(make, tmp_path):
    store = make(tmp_path, host_blocks=1)
    store.save(a=1, b=2)
    store.load(0, a=9, b=8, c=7)  # a from its file, b from host memory, c is nowhere
    assert store.stats == StoreStats(
        BYTES, 2, 2 * BYTES, 2, 2 * BYTES,
        (
            TierStats(HOST, BYTES, 1, BYTES, 2, 2 * BYTES, 1, BYTES, 1, BYTES, BYTES, BYTES),
            TierStats(DISK, 100 * FILE, 2, 2 * FILE, 2, 2 * FILE, 1, FILE, 0, 0),
        ),
    )  # fmt: skip


def test_a_block_that_could_not_be_written_again_is_not_counted_again(make, tmp_path, monkeypatch):
    store = make(tmp_path)
    store.save(a=1)

    def full(files, key, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFiles, "write", full)
    assert store.save(a=1).saved == (A,), "the file from before is still there"
    assert (store.stats.num_saved, store.stats.tier(DISK).num_saved) == (1, 1)


def test_bytes_that_others_append_to_a_file_are_counted_once(make, tmp_path):
    first = make(tmp_path)
    first.save(a=1)
    first.store.close()
    (file,) = tmp_path.glob("*/*/*")
    file.write_bytes(file.read_bytes() + b"more")
    second = make(tmp_path)
    second.update()
    assert second.load(0, a=9).loads == (LoadResult(0, 1),)
    second.store.carry_out(StoreCommands(drops=(A,)))
    second.update()
    assert (second.stats.tier(DISK).num_blocks, second.stats.tier(DISK).num_bytes) == (0, 0)


def test_tiers_that_there_are_not_have_no_statistics(make, tmp_path):
    only_host, only_files = make(host_blocks=2), make(tmp_path)
    only_host.update()
    only_files.update()
    assert only_host.stats.tiers == (TierStats(HOST, 2 * BYTES),)
    assert only_files.stats.tiers == (TierStats(DISK, 100 * FILE),)
    assert only_files.stats.tier(HOST) == TierStats(HOST)


def test_blocks_of_an_earlier_start_are_held_but_not_saved(make, tmp_path):
    first = make(tmp_path)
    first.save(a=1, b=2)
    first.store.close()
    second = make(tmp_path)
    second.update()
    assert second.stats == StoreStats(BYTES, tiers=(TierStats(DISK, 100 * FILE, 2, 2 * FILE),))


def test_a_block_that_is_saved_again_replaces_the_former_one(make, tmp_path):
    store = make(tmp_path, host_blocks=2)
    store.save(a=1)
    store.save(a=1)
    assert [(tier.num_blocks, tier.num_saved, tier.num_dropped) for tier in store.stats.tiers] == [
        (1, 2, 1)
    ] * 2


def test_a_block_that_is_read_again_is_not_saved_again(make, tmp_path):
    store = make(tmp_path)
    store.save(a=1)
    store.load(0, a=9)
    store.load(1, a=8)
    (disk,) = store.stats.tiers
    assert (disk.num_blocks, disk.num_saved, disk.num_loaded, disk.num_dropped) == (1, 1, 2, 0)


def test_snapshots_count_as_blocks_with_their_own_size(make):
    store = make(host_blocks=4)
    store.store.carry_out(StoreCommands(saves=(SavedPiece(C, 3, is_state=True),)))
    store.drain()
    assert (store.stats.num_saved, store.stats.saved_bytes) == (1, 2 * BYTES)
    assert store.stats.tier(HOST).num_bytes == 2 * BYTES


def test_a_block_that_cannot_be_written_or_read_is_not_counted(make, tmp_path, monkeypatch):
    store = make(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(BlockFiles, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        store.save(a=1)
    assert store.stats == StoreStats(BYTES, tiers=(TierStats(DISK, 100 * FILE),))
    store.save(a=1)
    monkeypatch.setattr(store.memory, "write", lambda *_: 1 / 0)
    store.load(0, a=5)
    assert (store.stats.num_saved, store.stats.num_loaded) == (1, 0)


def test_a_torn_file_and_a_block_that_must_not_be_loaded_again_are_dropped(make, tmp_path):
    store = make(tmp_path, host_blocks=0)
    store.save(a=1, b=2)
    (path,) = tmp_path.glob(f"*/*/{A.hex()}")
    path.write_bytes(path.read_bytes()[:-1])
    store.load(0, a=9)
    assert (store.stats.tier(DISK).num_blocks, store.stats.tier(DISK).num_dropped) == (1, 1)
    store.store.carry_out(StoreCommands(drops=(B,)))
    store.update()
    assert (store.stats.tier(DISK).num_blocks, store.stats.tier(DISK).num_dropped) == (0, 2)


# ---------------------------------------------------------------------- whether loading pays


def test_blocks_are_loaded_until_enough_is_measured():
    pays = LoadingPays(tokens_per_block=10)
    assert pays.ask()
    pays.loaded(15, 1000.0)
    pays.computed(1000, 1.0)
    assert pays.ask()


def test_blocks_are_computed_while_that_is_faster_and_loading_is_tried_again():
    pays = LoadingPays(tokens_per_block=10)
    pays.computed(1000, 1.0)  # 10 ms a block
    pays.loaded(100, 0.9)  # 9 ms
    assert pays.ask()
    for _ in range(20):
        pays.loaded(100, 2.0)  # 20 ms
    answers = [pays.ask() for _ in range(30)]
    assert not answers[0] and answers[-1]
    pays.loaded(100, 0.1)
    assert all(pays.ask() for _ in range(30))


@pytest.mark.parametrize(("seconds", "is_loaded"), [(0.1, True), (0.01, False)])
def test_a_few_computed_tokens_can_only_show_that_computing_is_faster(seconds: float, is_loaded: bool):
    """As after a restart, when all prompts are found in files but for their ends."""
    pays = LoadingPays(tokens_per_block=10)
    pays.loaded(100, 10.0)  # 100 ms a block
    pays.computed(5, seconds)
    assert pays.ask() == is_loaded


def test_iterations_with_few_tokens_do_not_count_beside_those_with_many():
    pays = LoadingPays(tokens_per_block=10)
    pays.loaded(100, 10.0)  # 100 ms a block
    pays.computed(1000, 5.0)  # 50 ms
    for _ in range(100):
        pays.computed(5, 1.0)
    assert not pays.ask()


def test_a_load_that_does_not_pay_ends_at_once(make, tmp_path):
    store = make(tmp_path)
    store.save(a=1)
    store.store.computed(1_000_000, 1e-3)
    store.store._pays.loaded(100, 1.0)
    assert store.load(0, a=5).loads == (LoadResult(0, 0),)
    assert store.memory.blocks[5][0] == 5


@pytest.mark.parametrize("tier", ["host", "files"])
def test_blocks_that_are_used_in_the_cache_stay_in_their_tier(make, tmp_path, tier):
    store = make(tmp_path, num_files=3) if tier == "files" else make(host_blocks=3)
    store.save(a=1, b=2, c=3)
    store.store.carry_out(StoreCommands(uses=(B, A)))
    assert store.save(d=4) == StoreUpdate(saved=(D,), dropped=(C,))


def test_the_files_of_used_blocks_are_renewed_once_although_a_write_takes_long(make, tmp_path, monkeypatch):
    store, may_write = make(tmp_path), threading.Event()
    store.save(a=1, b=2)
    write, files = BlockFiles.write, store.store._files
    monkeypatch.setattr(BlockFiles, "write", lambda *args: may_write.wait(60) and write(*args))
    renewed: list[bytes] = []
    monkeypatch.setattr(files, "use", renewed.append)
    store.store.carry_out(StoreCommands(saves=pieces(c=3)))
    for _ in range(5):
        store.store.carry_out(StoreCommands(uses=(A, B)))
    store.store.carry_out(StoreCommands(uses=(A,)))
    may_write.set()
    store.drain()
    store.store.close()
    assert renewed == [B, A]


def test_statistics_have_the_smallest_and_largest_size_of_host_memory_since_the_last(make):
    store = make(host_blocks=3)
    sizes = []
    for command in (
        StoreCommands(saves=pieces(a=1, b=2)),
        StoreCommands(saves=pieces(c=3, d=4)),
        StoreCommands(drops=(B, C)),
        StoreCommands(saves=pieces(a=1)),
    ):
        store.store.carry_out(command)
        store.drain()
        (host,) = store.stats.tiers
        sizes.append((host.least_bytes // BYTES, host.num_bytes // BYTES, host.most_bytes // BYTES))
    assert sizes == [(0, 2, 2), (2, 3, 3), (1, 1, 3), (1, 2, 2)]
    (rested,) = store.stats.at_rest().tiers
    assert rested.least_bytes == rested.num_bytes == rested.most_bytes == 2 * BYTES
