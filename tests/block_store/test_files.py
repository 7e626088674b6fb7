"""Saved KV blocks in files: restarts, damage, sizes, ages, and two processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from inflight.block_store import BlockFiles
from inflight.block_store.files import is_in_use
from inflight.errors import ConfigError

IDENTITY, OTHER = "0" * 32, "1" * 32
BYTES = 1000
FILE_BYTES = BYTES + 16


def digest_of(number: int) -> bytes:
    return blake2b(bytes([number]), digest_size=16).digest()


def content_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BYTES, dtype=np.uint8)


class Clock:
    now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


def files_in(
    folder: Path,
    identity: str = IDENTITY,
    num_files: int = 100,
    clock=None,
    age_s: float = 1e6,
    wall_clock=None,
):
    clock = clock or Clock()
    return BlockFiles(
        folder, identity, BYTES, num_files * FILE_BYTES, age_s, wall_clock or clock, monotonic_s=clock
    )


def read(files: BlockFiles, number: int) -> bool:
    """Read a block; whether it was there. Its content is checked."""
    found = np.zeros(BYTES, dtype=np.uint8)
    is_read = files.read(digest_of(number), found)
    assert not is_read or (found == content_of(number)).all()
    return is_read


def path_of(folder: Path, number: int) -> Path:
    name = digest_of(number).hex()
    return folder / IDENTITY / name[:2] / name


def save(files: BlockFiles, *numbers: int) -> list[bytes]:
    return [removed for number in numbers for removed in files.write(digest_of(number), content_of(number))]


def test_blocks_are_found_again_after_a_restart(tmp_path):
    first = files_in(tmp_path / "made" / "here")
    assert save(first, 1, 2) == []
    first.close()
    second = files_in(tmp_path / "made" / "here")
    assert set(second.keys()) == {digest_of(1), digest_of(2)}
    assert read(second, 1) and read(second, 2) and not read(second, 3)


def test_only_the_owner_may_read_blocks(tmp_path):
    save(files_in(tmp_path / "kv"), 1)
    for path in (tmp_path / "kv", *(tmp_path / "kv").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize("place", [0, BYTES // 2, BYTES - 1, BYTES, FILE_BYTES - 1])
def test_a_flipped_bit_makes_a_block_a_miss_and_removes_it(tmp_path, place):
    files = files_in(tmp_path)
    save(files, 1, 2)
    data = bytearray(path_of(tmp_path, 1).read_bytes())
    data[place] ^= 4
    path_of(tmp_path, 1).write_bytes(data)
    assert not read(files, 1) and not path_of(tmp_path, 1).exists()
    assert digest_of(1) not in files and read(files, 2)


@pytest.mark.parametrize("size", [0, 1, BYTES, FILE_BYTES - 1, FILE_BYTES + 1])
def test_files_of_another_size_are_misses_and_removed(tmp_path, size):
    first = files_in(tmp_path)
    save(first, 1, 2)
    first.close()
    with path_of(tmp_path, 1).open("rb+") as file:
        file.truncate(size)
    second = files_in(tmp_path)
    if size > FILE_BYTES:
        assert read(second, 1), "what follows the digest is not read"
    else:
        assert not read(second, 1) and not path_of(tmp_path, 1).exists()
    assert read(second, 2)


def test_contents_of_two_sizes_share_the_room(tmp_path):
    files = files_in(tmp_path, num_files=3)
    large = np.arange(2 * BYTES, dtype=np.uint8)
    save(files, 1, 2)
    assert files.write(digest_of(9), large) == [digest_of(1)]
    assert files.write(digest_of(8), large) == [digest_of(2), digest_of(9)]
    assert files.write(digest_of(9), large) == [digest_of(8)]
    found = np.zeros(2 * BYTES, dtype=np.uint8)
    assert files.read(digest_of(9), found) and (found == large).all()


def test_a_file_cut_short_while_the_server_runs_is_a_miss(tmp_path):
    files = files_in(tmp_path)
    save(files, 1)
    os.truncate(path_of(tmp_path, 1), BYTES)
    assert not read(files, 1)


def test_a_block_under_the_name_of_another_one_is_a_miss(tmp_path):
    files = files_in(tmp_path)
    save(files, 1, 2)
    os.replace(path_of(tmp_path, 1), path_of(tmp_path, 2))
    assert not read(files, 2)


def test_an_unfinished_file_of_a_killed_process_is_removed(tmp_path):
    first = files_in(tmp_path)
    save(first, 1)
    first.close()
    unfinished = path_of(tmp_path, 1).with_name(path_of(tmp_path, 2).name + ".new")
    unfinished.write_bytes(b"half")
    assert files_in(tmp_path).keys() == (digest_of(1),) and not unfinished.exists()


@pytest.mark.parametrize("place", ["", "3f"])
def test_what_others_have_put_into_the_folder_is_left_alone(tmp_path, place):
    first = files_in(tmp_path)
    save(first, 1)
    first.close()
    folder = tmp_path / IDENTITY / place
    names = ["a.new", f"{'3f' * 16}.new", "3f" * 16, "notes"]
    for name in names:
        (folder / name).mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "nowhere")
    second = files_in(tmp_path)
    assert second.keys() == (digest_of(1),) and all((folder / name).is_dir() for name in names)


def test_a_folder_that_is_removed_under_a_server_is_made_and_locked_again(tmp_path, caplog):
    files = files_in(tmp_path)
    save(files, 1)
    shutil.rmtree(tmp_path / IDENTITY)
    assert not read(files, 1)
    save(files, 2, 3)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{tmp_path / IDENTITY} was removed while this server saves KV blocks in it: its blocks are lost, and "
        "further ones are saved in a new folder of that name"
    )
    assert read(files, 2) and read(files, 3)
    with pytest.raises(ConfigError, match="another server uses the blocks"):
        files_in(tmp_path)


def test_the_log_says_if_another_server_has_taken_the_removed_folder(tmp_path, caplog):
    files = files_in(tmp_path)
    shutil.rmtree(tmp_path / IDENTITY)
    other = files_in(tmp_path)
    save(files, 1, 2)
    (record,) = caplog.records
    assert record.getMessage().endswith(", which another server uses for the same model meanwhile")
    files.close()
    other.close()


def test_blocks_of_another_identity_are_not_found(tmp_path):
    save(files_in(tmp_path, OTHER), 1)
    assert not read(files_in(tmp_path), 1)


def test_the_least_recently_used_block_makes_room(tmp_path):
    files = files_in(tmp_path, num_files=3)
    save(files, 1, 2, 3)
    assert read(files, 1)
    assert save(files, 4) == [digest_of(2)] and not path_of(tmp_path, 2).exists()
    assert set(files.keys()) == {digest_of(1), digest_of(3), digest_of(4)}


def test_the_order_of_use_survives_a_restart(tmp_path):
    first = files_in(tmp_path, num_files=3)
    save(first, 1, 2, 3)
    for seconds, number in enumerate((2, 3, 1)):
        os.utime(path_of(tmp_path, number), (1e9 + seconds, 1e9 + seconds))
    first.close()
    second = files_in(tmp_path, num_files=2)
    assert set(second.keys()) == {digest_of(3), digest_of(1)}
    assert save(second, 4) == [digest_of(3)]


def test_blocks_that_were_not_used_for_a_while_are_removed(tmp_path):
    clock = Clock()
    files = files_in(tmp_path, clock=clock, age_s=100)
    save(files, 1, 2)
    clock.now_s += 60
    assert read(files, 1)
    clock.now_s += 60
    assert save(files, 3) == [digest_of(2)]
    assert read(files, 1)


def test_another_process_may_not_use_the_same_blocks(tmp_path):
    files = files_in(tmp_path)
    with pytest.raises(ConfigError, match="another server uses the blocks of this model there"):
        files_in(tmp_path)
    files_in(tmp_path, OTHER).close()  # another model may use the folder
    files.close()
    files_in(tmp_path).close()


def test_a_process_that_uses_blocks_is_found_by_its_label(tmp_path):
    assert not is_in_use(tmp_path / "missing", "mine") and not (tmp_path / "missing").exists()
    files = BlockFiles(tmp_path, IDENTITY, BYTES, 100 * FILE_BYTES, 1e6, label="mine")
    assert is_in_use(tmp_path, "mine") and not is_in_use(tmp_path, "other")
    shutil.rmtree(tmp_path / IDENTITY)
    save(files, 1)
    assert is_in_use(tmp_path, "mine"), "the folder was locked again"
    files.close()
    assert not is_in_use(tmp_path, "mine")
    files_in(tmp_path).close()
    assert not is_in_use(tmp_path, "mine"), "another process has been here meanwhile"


def test_blocks_of_models_that_nobody_uses_make_room_at_the_start(tmp_path):
    old = files_in(tmp_path, OTHER)
    save(old, 1, 2)
    files_in(tmp_path, num_files=2).close()
    assert (tmp_path / OTHER).exists()
    files_in(tmp_path, num_files=1).close()
    assert (tmp_path / OTHER).exists(), "its server still runs"
    old.close()
    files_in(tmp_path, num_files=1).close()
    assert not (tmp_path / OTHER).exists()


def test_ranks_share_the_room_and_spare_the_files_of_each_other(tmp_path):
    unused, parts = "2" * 32, (IDENTITY, OTHER)
    abandoned = files_in(tmp_path, unused)
    save(abandoned, 1, 2)
    abandoned.close()
    files = [BlockFiles(tmp_path, part, BYTES, 4 * FILE_BYTES, 1e6, Clock(), num_ranks=2) for part in parts]
    assert [save(each, 1, 2) for each in files] == [[], []]
    assert [save(each, 3) for each in files] == [[digest_of(1)], [digest_of(1)]], "each has half of the room"
    for each in files:
        each.close()
    again = [BlockFiles(tmp_path, part, BYTES, 4 * FILE_BYTES, 1e6, Clock(), num_ranks=2) for part in parts]
    assert (tmp_path / unused).exists(), "not before all ranks have locked their files"
    for each in again:
        each.make_room()
        assert set(each.keys()) == {digest_of(2), digest_of(3)}
    assert not (tmp_path / unused).exists()


def test_a_limit_below_one_block_of_each_rank_is_refused(tmp_path):
    with pytest.raises(ConfigError) as error:
        BlockFiles(tmp_path, IDENTITY, BYTES, 2 * FILE_BYTES - 1, 1e6, num_ranks=2)
    assert str(error.value) == (
        f"kv_cache_disk_bytes is {2 * FILE_BYTES - 1}, expected at least {2 * FILE_BYTES}, the size of one file "
        "of each of 2 ranks"
    )


def test_a_full_disk_is_an_error_of_the_write_and_leaves_nothing_behind(tmp_path, monkeypatch):
    files = files_in(tmp_path)
    save(files, 1)

    def full(file, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "write", full)
        save(files, 2)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        ["lock", path_of(tmp_path, 1).name]
    )
    assert save(files, 2) == [] and read(files, 2)


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_cache_dir is '.*/file', which cannot be used: "):
        files_in(tmp_path / "file")


def test_a_limit_below_one_block_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=f"kv_cache_disk_bytes is 0, expected at least {FILE_BYTES}"):
        files_in(tmp_path, num_files=0)


def test_a_folder_that_is_removed_while_the_server_runs_is_made_again(tmp_path):
    files = files_in(tmp_path / "kv")
    save(files, 1)
    shutil.rmtree(tmp_path / "kv")
    assert not read(files, 1)
    assert save(files, 2) == [] and read(files, 2)


def test_a_start_that_fails_leaves_the_folder_unlocked(tmp_path, monkeypatch):
    def fails(*_):
        raise PermissionError(13, "Permission denied")

    with (
        monkeypatch.context() as patch,
        pytest.raises(ConfigError, match="cannot be used: Permission denied"),
    ):
        patch.setattr(BlockFiles, "_scan", fails)
        files_in(tmp_path)
    files_in(tmp_path).close()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(ConfigError, match=r"kv_cache_dir is '.*', which cannot be used: No locks available"):
        files_in(tmp_path)


def test_files_that_another_server_removes_meanwhile_do_not_prevent_the_start(tmp_path, monkeypatch):
    other = files_in(tmp_path, OTHER)
    save(other, 1, 2)
    (tmp_path / OTHER / "00").mkdir(exist_ok=True)
    (tmp_path / OTHER / "00" / "gone").symlink_to(
        tmp_path / "nowhere"
    )  # as if removed since the folder was read
    files_in(tmp_path, num_files=1).close()
    other.close()

    def fails(*_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        open_file = os.open
        patch.setattr(
            os, "open", lambda path, *rest: fails() if OTHER in str(path) else open_file(path, *rest)
        )
        files_in(tmp_path, num_files=1).close()
    assert (tmp_path / OTHER).exists(), "it belongs to another user"


def test_other_things_in_the_folder_stay_and_do_not_prevent_the_start(tmp_path):
    first = files_in(tmp_path)
    save(first, 1)
    first.close()
    folder = path_of(tmp_path, 1).parent
    (folder / "notes").mkdir()
    (folder / ("f" * 32)).symlink_to(tmp_path / "nowhere")
    (tmp_path / "lost+found").mkdir()
    assert files_in(tmp_path).keys() == (digest_of(1),)
    assert (folder / "notes").exists()


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
def test_a_clock_that_is_set_while_the_server_runs_changes_no_age(tmp_path, jump_s):
    clock, wall_clock = Clock(), Clock()
    files = files_in(tmp_path, clock=clock, wall_clock=wall_clock, age_s=100)
    save(files, 1)
    wall_clock.now_s += jump_s
    assert save(files, 2) == [] and read(files, 2)
    clock.now_s += 60
    assert read(files, 2)
    clock.now_s += 60
    assert save(files, 3) == [digest_of(1)]


def age(folder: Path, number: int, seconds: float) -> None:
    """Make a file as old as this for a server whose clock is `Clock`."""
    os.utime(path_of(folder, number), (Clock.now_s - seconds, Clock.now_s - seconds))


def test_a_file_from_the_future_counts_as_used_at_the_start(tmp_path):
    first = files_in(tmp_path)
    save(first, 1, 2, 3)
    first.close()
    age(tmp_path, 1, -1e9)
    age(tmp_path, 2, 50)
    age(tmp_path, 3, 101)
    clock = Clock()
    second = files_in(tmp_path, clock=clock, age_s=100)
    assert set(second.keys()) == {digest_of(1), digest_of(2)}
    assert path_of(tmp_path, 1).stat().st_mtime == Clock.now_s, "the next start would call it new again"
    clock.now_s += 60
    assert save(second, 4) == [digest_of(2)], "a file from the future keeps no older one"
    clock.now_s += 60
    assert save(second, 5) == [digest_of(1)]


def test_files_expire_without_a_write(tmp_path):
    clock = Clock()
    files = files_in(tmp_path, clock=clock, age_s=100)
    assert files.seconds_to_expiry() is None
    save(files, 1)
    clock.now_s += 60
    save(files, 2)
    assert files.seconds_to_expiry() == 40 and files.expire() == []
    clock.now_s += 40
    assert files.seconds_to_expiry() == 0 and files.expire() == [digest_of(1)]
    assert not path_of(tmp_path, 1).exists() and files.seconds_to_expiry() == 60


def test_models_that_nobody_uses_expire_at_the_start(tmp_path):
    identities = OTHER, "2" * 32
    for identity in identities:
        old = files_in(tmp_path, identity)
        save(old, 1)
        old.close()
    for path in (tmp_path / OTHER, *(tmp_path / OTHER).rglob("*")):
        os.utime(path, (Clock.now_s - 200, Clock.now_s - 200))
    files_in(tmp_path, age_s=1000).close()
    assert all((tmp_path / identity).exists() for identity in identities)
    files_in(tmp_path, age_s=100).close()
    assert not (tmp_path / OTHER).exists() and (tmp_path / identities[1]).exists()


def test_the_model_whose_blocks_were_used_last_stays(tmp_path):
    identities = OTHER, "2" * 32
    for used, identity in enumerate(identities):
        each = files_in(tmp_path, identity)
        save(each, 1)
        each.close()
        for path in (tmp_path / identity, *(tmp_path / identity).rglob("*")):
            os.utime(path, (Clock.now_s - 100 + used, Clock.now_s - 100 + used))
    block = next((tmp_path / OTHER).glob("*/*"))
    os.utime(block, (Clock.now_s - 1, Clock.now_s - 1))  # by a server that ran longer
    files_in(tmp_path, num_files=1).close()
    assert (tmp_path / OTHER).exists() and not (tmp_path / identities[1]).exists()


def test_a_block_that_is_used_in_the_cache_is_not_removed(tmp_path):
    clock = Clock()
    files = files_in(tmp_path, num_files=3, clock=clock, age_s=100)
    save(files, 1, 2, 3)
    clock.now_s += 90
    files.use(digest_of(1))
    assert save(files, 4) == [digest_of(2)], "block 1 was used later"
    clock.now_s += 90
    assert files.expire() == [digest_of(3)]
    files.use(digest_of(2))
    assert digest_of(2) not in files and files.stats().num_blocks == 2


def test_the_time_of_a_used_file_is_renewed_at_most_once_a_minute(tmp_path):
    clock = Clock()
    files = files_in(tmp_path, clock=clock)
    save(files, 1)
    for age_s, is_renewed in ((30, False), (60, True), (90, False), (119, False), (120, True)):
        os.utime(path_of(tmp_path, 1), (5, 5))
        clock.now_s = Clock.now_s + age_s
        files.use(digest_of(1))
        assert (path_of(tmp_path, 1).stat().st_mtime > 5) == is_renewed, age_s
