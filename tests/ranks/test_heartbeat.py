"""Heartbeats and wakes between ranks, handwritten peers, and processes that are killed or stopped."""

from __future__ import annotations

import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inflight.errors import Unavailable
from inflight.ranks.heartbeat import Heartbeat
from tests.ranks.peers import BEAT, FAILED, GOODBYE, WAKE, make_peer, message, read_messages
from tests.ranks.thread_world import PATIENCE_S

ROOT = Path(__file__).parents[2]


class Losses:
    """An `on_loss` that records its arguments and its thread."""

    def __init__(self) -> None:
        self._told: queue.Queue[tuple[Unavailable, str]] = queue.Queue()

    def __call__(self, error: Unavailable) -> None:
        self._told.put((error, threading.current_thread().name))

    def take(self) -> str:
        error, thread = self._told.get(timeout=PATIENCE_S)
        assert thread == "heartbeat"
        return str(error)

    def is_empty(self) -> bool:
        return self._told.empty()


@pytest.fixture
def losses() -> Losses:
    return Losses()


class Clock:
    """A heartbeat's clock: it stands still, or each look at it advances it by a step.

    Attributes:
        jump_s: Seconds to add at once.
        step_s: Seconds to add at each look.
        stepped_s: The sum of all steps.
    """

    def __init__(self) -> None:
        self.jump_s = self.step_s = self.stepped_s = 0.0

    def __call__(self) -> float:
        self.stepped_s += self.step_s
        return self.jump_s + self.stepped_s


Make = Callable[..., Heartbeat]


@pytest.fixture
def make_heartbeat(losses) -> Iterator[Make]:
    """Make a heartbeat of one of three ranks over the given connections.

    By default its timeout is endless.
    """
    made = []

    def make(connections: dict[int, socket.socket], timeout_s: float = 600.0, **more) -> Heartbeat:
        peers = [make_peer(rank, connection) for rank, connection in connections.items()]
        iteration = more.pop("iteration", 0)
        heartbeat = Heartbeat(peers, 3, timeout_s, more.pop("on_loss", losses), **more)
        heartbeat.iteration = iteration
        made.append(heartbeat)
        return heartbeat

    yield make
    for heartbeat in made:
        heartbeat.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    far.settimeout(PATIENCE_S)
    yield near, far
    far.close()


def trio(make_heartbeat: Make, **more) -> list[Heartbeat]:
    """The heartbeats of three ranks."""
    first, second = socket.socketpair(), socket.socketpair()
    return [
        make_heartbeat({1: first[0], 2: second[0]}, **more),
        make_heartbeat({0: first[1]}, **more),
        make_heartbeat({0: second[1]}, **more),
    ]


# -------------------------------------------------------------------- wakes


def test_each_wake_ends_one_wait_on_every_other_rank(make_heartbeat, losses):
    leader, *others = trio(make_heartbeat)
    woken: queue.Queue[int] = queue.Queue()

    def sleep(rank: int) -> None:
        for _ in range(2):
            others[rank].wait()
            woken.put(rank)

    threads = [threading.Thread(target=sleep, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    leader.wake()
    assert sorted(woken.get(timeout=PATIENCE_S) for _ in range(2)) == [0, 1]
    assert all(thread.is_alive() for thread in threads)
    leader.wake()
    assert sorted(woken.get(timeout=PATIENCE_S) for _ in range(2)) == [0, 1]
    assert losses.is_empty()


def test_an_early_wake_is_kept(make_heartbeat):
    leader, first, second = trio(make_heartbeat)
    leader.wake()
    leader.wake()
    for heartbeat in (first, first, second, second):
        heartbeat.wait()


def test_a_peer_that_does_not_read_delays_no_other_and_loses_no_wake(make_heartbeat, pair):
    near, far = pair
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    # What the peer has not read is sent with the next beat.
    leader = make_heartbeat({1: near}, timeout_s=0.5, loading_timeout_s=600.0)
    wakes = 5_000
    for _ in range(wakes):
        leader.wake()
    received = b""
    while received.count(message(WAKE)) < wakes:
        part = far.recv(1 << 16)
        assert part, "the connection ended"
        received += part
    far.sendall(message(GOODBYE))


# -------------------------------------------------------------------- loads


def test_ends_of_loads_reach_rank_0_once_and_in_order(make_heartbeat, losses):
    leader, first, second = trio(make_heartbeat)
    heard: queue.Queue[int] = queue.Queue()
    leader.on_loaded = heard.put
    numbers = [0, 1, 7 << 24, (1 << 64) - 1]
    for number in numbers:
        first.report_load(number)
    assert [heard.get(timeout=PATIENCE_S) for _ in numbers] == numbers
    second.report_load(5)
    assert heard.get(timeout=PATIENCE_S) == 5 and heard.empty() and losses.is_empty()


# -------------------------------------------------------------------- goodbyes


def test_after_a_goodbye_no_rank_is_lost_or_woken(make_heartbeat, losses):
    leader, first, second = trio(make_heartbeat)
    leader.wake()
    leader.close()
    for heartbeat in (first, second):
        heartbeat.wait()  # the wake came before
        with pytest.raises(Unavailable, match="rank 0 of 3 has left"):
            heartbeat.wait()
        heartbeat.check()
    assert losses.is_empty()


def test_a_rank_that_left_is_not_lost_and_cannot_be_woken(make_heartbeat, losses, pair, monkeypatch):
    near, far = pair
    unwatched: queue.Queue[socket.socket] = queue.Queue()

    class Selector(selectors.DefaultSelector):
        def unregister(self, fileobj):
            unwatched.put(fileobj)
            return super().unregister(fileobj)

    monkeypatch.setattr(selectors, "DefaultSelector", Selector)
    clock = Clock()
    leader = make_heartbeat({2: near}, timeout_s=0.1, clock=clock)
    far.sendall(message(BEAT) + message(GOODBYE))
    far.close()
    assert unwatched.get(timeout=PATIENCE_S) is near, "its closed connection is not looked at any more"
    with pytest.raises(Unavailable, match="rank 2 of 3 has left"):
        leader.wake()
    clock.step_s = 0.005
    deadline = time.monotonic() + PATIENCE_S
    while clock.stepped_s < 0.3:  # three timeouts
        assert time.monotonic() < deadline
        time.sleep(0.01)
    leader.close()
    assert losses.is_empty()


# -------------------------------------------------------------------- losses


def test_a_connection_that_ends_without_a_goodbye_is_a_loss(make_heartbeat, losses, pair):
    near, far = pair
    leader = make_heartbeat({2: near})
    far.sendall(message(BEAT))
    far.close()
    lost = "rank 2 of 3 (ant, pid 102) is lost: its process has ended"
    assert losses.take() == lost
    for call in (leader.check, leader.wake):
        with pytest.raises(Unavailable) as raised:
            call()
        assert str(raised.value) == lost
    leader.close()
    assert losses.is_empty()


def test_a_sleeper_learns_that_rank_0_is_lost(make_heartbeat, losses, pair):
    near, far = pair
    sleeper = make_heartbeat({0: near})
    threading.Timer(0.1, far.close).start()
    with pytest.raises(Unavailable, match=r"rank 0 of 3 .* is lost: its process has ended"):
        sleeper.wait()
    losses.take()


def test_a_lost_rank_is_reported_by_all_other_ranks(make_heartbeat):
    told = [Losses(), Losses()]
    first, second = socket.socketpair(), socket.socketpair()
    make_heartbeat({1: first[0], 2: second[0]}, on_loss=told[0])
    survivor = make_heartbeat({0: second[1]}, on_loss=told[1])
    first[1].close()
    assert "rank 1 of 3" in told[0].take()
    with pytest.raises(Unavailable, match=r"rank 0 of 3 .* is lost"):
        survivor.wait()
    assert "rank 0 of 3" in told[1].take()


def test_a_silent_rank_is_lost(make_heartbeat, losses, pair):
    near, far = pair
    clock = Clock()
    heartbeat = make_heartbeat({1: near}, timeout_s=0.1, clock=clock)
    far.sendall(message(BEAT) + message(WAKE))
    heartbeat.wait()  # both have been read
    clock.step_s = 0.005
    assert losses.take() == "rank 1 of 3 (ant, pid 101) is lost: it has been silent for 0.1 s"
    kinds = {kind for kind, _ in read_messages(far)}
    assert kinds == {BEAT}, "whoever has lost a rank says no goodbye"


def test_the_timeout_is_longer_while_the_ranks_load(make_heartbeat, losses, pair):
    near, far = pair
    heartbeat = make_heartbeat({1: near}, timeout_s=0.2, loading_timeout_s=600.0)
    far.sendall(message(BEAT))
    for _ in range(15):  # of three timeouts
        assert far.recv(len(message(BEAT))) == message(BEAT)
    assert losses.is_empty()
    heartbeat.has_loaded()
    assert "silent" in losses.take()


def test_the_end_of_a_process_is_a_loss_while_the_ranks_load(make_heartbeat, losses, pair):
    near, far = pair
    make_heartbeat({1: near}, timeout_s=0.2, loading_timeout_s=600.0)
    far.close()
    assert losses.take().endswith("its process has ended")


def test_after_a_stop_a_process_gives_its_peers_another_timeout(make_heartbeat, losses, pair):
    near, far = pair
    clock = Clock()
    heartbeat = make_heartbeat({1: near}, timeout_s=0.1, clock=clock)
    far.sendall(message(BEAT) + message(WAKE))
    heartbeat.wait()  # both have been read
    clock.jump_s, clock.step_s = 1000.0, 0.005
    assert "silent for 0.1 s" in losses.take(), "silence of 1000 s was the process's own"


def test_a_rank_that_failed_alone_is_lost(make_heartbeat, losses, pair):
    """It beats at each look at the clock."""
    near, far = pair
    clock = Clock()

    def look() -> float:
        far.sendall(message(BEAT, 18))
        return clock()

    clock.step_s = 0.005
    far.sendall(message(FAILED, 17))
    make_heartbeat({1: near}, timeout_s=0.1, iteration=17, clock=look)
    said = losses.take()
    assert said.endswith("is lost: it failed alone in iteration 17: the others wait for it")


@pytest.mark.parametrize("failing", [0, 1])
def test_failures_reach_rank_0_with_the_progress_of_all_ranks(make_heartbeat, failing):
    """Rank 0 or 1 fails in iteration 4, which all ranks pass, and in iteration 9, in which rank 2 hangs."""
    told = Losses()
    first, second = socket.socketpair(), socket.socketpair()
    timeouts = {"timeout_s": 2.0, "loading_timeout_s": 600.0}  # a rank may be silent, but not stay behind
    heartbeats = [
        make_heartbeat({1: first[0], 2: second[0]}, on_loss=told, iteration=10, **timeouts),
        make_heartbeat({0: first[1]}, on_loss=Losses(), iteration=10, **timeouts),
        make_heartbeat({0: second[1]}, on_loss=Losses(), iteration=9, **timeouts),
    ]
    heartbeats[failing].report_failure(4)
    heartbeats[failing].report_failure(9)
    said = told.take()
    assert said.startswith(f"rank {failing} of 3 ")
    assert "failed alone in iteration 9" in said


def test_an_on_loss_that_raises_does_not_end_the_heartbeat(make_heartbeat, pair, caplog):
    near, far = pair

    def fail(error: Unavailable) -> None:
        raise RuntimeError("not today")

    sleeper = make_heartbeat({0: near}, on_loss=fail)
    far.close()
    with pytest.raises(Unavailable, match="is lost"):
        sleeper.wait()
    sleeper.close()
    assert "not today" in caplog.text


# -------------------------------------------------------------------- processes


class Program:
    """`tests.ranks.heartbeat_program` in a process of its own; its output shows its progress."""

    def __init__(self, rank: int, peer_of: int, timeout_s: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            arguments = [str(peer_of), str(port), str(timeout_s)]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.ranks.heartbeat_program", *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            listening.settimeout(PATIENCE_S)
            self.connection = listening.accept()[0]
        assert self.process.stdout.readline() == "waiting\n"
        self.peer = make_peer(rank, self.connection, self.process.pid)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def start_program() -> Iterator[Callable[..., Program]]:
    started = []

    def start(rank: int, peer_of: int, timeout_s: float = 600.0) -> Program:
        started.append(Program(rank, peer_of, timeout_s))
        return started[-1]

    yield start
    for program in started:
        program.end()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_process_is_lost(start_program, losses, rank):
    """Rank 0 detects the loss of rank 2, the others that of rank 0."""
    program = start_program(rank, peer_of=0 if rank else 1)
    heartbeat = Heartbeat([program.peer], 3, 600.0, losses)
    program.process.kill()
    assert (
        f"rank {rank} of 3 (ant, pid {program.process.pid}) is lost: its process has ended" == losses.take()
    )
    heartbeat.close()


def test_a_stopped_process_is_lost_and_ends_when_it_resumes(start_program, losses):
    timeout_s = 2.0
    stopped, bystander = (start_program(rank, 0, timeout_s) for rank in (1, 2))
    heartbeat = Heartbeat([stopped.peer, bystander.peer], 3, timeout_s, losses)
    heartbeat.wake()
    assert [program.process.stdout.readline() for program in (stopped, bystander)] == ["woken\n"] * 2
    os.kill(stopped.process.pid, signal.SIGSTOP)
    said = losses.take()
    assert said.startswith(f"rank 1 of 3 (ant, pid {stopped.process.pid}) is lost: it has been silent for ")
    os.kill(stopped.process.pid, signal.SIGCONT)
    for program in (stopped, bystander):
        assert "rank 0 of 3" in program.process.stdout.readline()
        assert program.process.wait(PATIENCE_S) == 0
    heartbeat.close()


def test_a_short_stop_is_forgiven(start_program, losses):
    program = start_program(1, peer_of=0, timeout_s=20.0)
    heartbeat = Heartbeat([program.peer], 3, 20.0, losses)
    os.kill(program.process.pid, signal.SIGSTOP)
    heartbeat.wake()
    time.sleep(1.0)
    os.kill(program.process.pid, signal.SIGCONT)
    assert program.process.stdout.readline() == "woken\n"
    heartbeat.check()
    heartbeat.close()
    assert "rank 0 of 3 has left" in program.process.stdout.readline()
    assert losses.is_empty()
