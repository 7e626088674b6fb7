"""A whole server whose engine has several ranks: lockstep, heartbeats and the detection of lost ranks.

Every rank is a process with the real loop, scheduler, lockstep and heartbeat, and a fake engine that computes the
same tokens on all ranks. MPI is replaced by a broadcast that, like MPI's, waits forever for a rank that has
ended.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import greenlet

from inflight.build import FollowingRank, build_engine, start_following
from inflight.config import Parameters
from inflight.errors import Unavailable
from inflight.ranks.heartbeat import Heartbeat
from inflight.ranks.lockstep import Lockstep
from inflight.ranks.rank_context import Agreement, RankContext
from inflight.ranks.rendezvous import Peer

from .run import ALL_FAULTS, PATH, RunReport
from .scheduler import Fiber, Machine, Process, Waiters
from .sockets import Socket
from .whole_server import WholeServer

if TYPE_CHECKING:
    from inflight.ranks.mpi import MpiWorld  # loads MPI, which no simulation needs

_TIMEOUT_S = 12.0  # of silence, after which a rank is lost
_ENDED_S = 7.0  # until all ranks have ended after the connections of one ended: five to answer requests
_NOTICED_S = 4 * _TIMEOUT_S  # until all ranks have ended in order, or because a loop is dead


class _Broadcasts:
    """Messages on their way from rank 0 to the others; rank 0 waits if one of them has too many to read."""

    def __init__(self, machine: Machine, size: int) -> None:
        self.size = size
        self.most_waiting = machine.rng.randint(1, 3)
        self.waiting: list[deque[bytes]] = [deque() for _ in range(size)]
        self.changed = Waiters(machine)
        self.num_left = 0
        self.num_agreed = 0


class _StepsOfAll:
    """The part of `ranks.rank_context.Agreement` that the start of an engine uses, for one rank: no rank fails."""

    def __init__(self, broadcasts: _Broadcasts) -> None:
        self._broadcasts = broadcasts
        self._num_steps = 0

    @contextmanager
    def step(self) -> Generator[None]:
        """Run a step, and wait until all ranks have."""
        shared = self._broadcasts
        yield
        self._num_steps += 1
        shared.num_agreed += 1
        shared.changed.wake()
        while shared.num_agreed < shared.size * self._num_steps:
            shared.changed.wait()


class _World:
    """The part of `ranks.mpi.MpiWorld` that lockstep uses, for one rank."""

    def __init__(self, broadcasts: _Broadcasts, rank: int, agreement: _StepsOfAll) -> None:
        self.rank, self.size = rank, broadcasts.size
        self.agreement = agreement
        self._broadcasts = broadcasts

    def broadcast(self, message: bytes = b"") -> bytes:
        """Send a message as rank 0, or wait for rank 0's; return it."""
        shared = self._broadcasts
        if self.rank == 0:
            while max(map(len, shared.waiting[1:])) >= shared.most_waiting:
                shared.changed.wait()
            for waiting in shared.waiting[1:]:
                waiting.append(message)
        else:
            while not shared.waiting[self.rank]:
                shared.changed.wait()
            message = shared.waiting[self.rank].popleft()
        shared.changed.wake()
        return message

    def broadcast_buffer(self, buffer: memoryview) -> None:
        """Fill the buffers of all ranks with the bytes of rank 0's."""
        message = self.broadcast(bytes(buffer))
        if self.rank:
            buffer[:] = message

    def leave(self) -> None:
        """Wait until all ranks leave."""
        shared = self._broadcasts
        shared.num_left += 1
        shared.changed.wake()
        while shared.num_left < shared.size:
            shared.changed.wait()


class RankedServer(WholeServer):
    """One run of a server whose engine has two or three ranks."""

    def __init__(self, seed: int, kept_faults: Collection[int] = ALL_FAULTS) -> None:
        super().__init__(seed, kept_faults)
        self.limits = replace(self.limits, overlaps_iterations=False)  # as `ranks.rank_engine` does
        self._size = self.rng.randint(2, 3)
        self._ranks: list[Process] = []
        self._mains: list[Fiber] = []
        self._failures: dict[int, Exception | None] = {}  # of the devices, by iteration

    # ---------------------------------------------------------------- processes

    def _run_engine(self, process: Process) -> None:
        """Start a process for each further rank; rank 0 serves."""
        machine = self.machine
        shared = _Broadcasts(machine, self._size)
        self._ranks = [process, *(self._start_follower(f"rank {rank}") for rank in range(1, self._size))]
        self._engine_process = process
        pairs = [self.network.pair(self._ranks[0], each) for each in self._ranks[1:]]
        peers = [[_peer(rank, one) for rank, (one, _) in enumerate(pairs, 1)]]
        peers += [[_peer(0, other)] for _, other in pairs]
        self._mains, self._devices = [], []
        self._failures = {}
        for rank, process in enumerate(self._ranks):
            run = self._be_leader if rank == 0 else self._be_follower
            world = _World(shared, rank, _StepsOfAll(shared))
            main = partial(run, process, world, peers[rank])
            self._mains.append(machine.spawn(process, main, "main"))

    def _start_follower(self, name: str) -> Process:
        return self.machine.start_process(name)

    def _be_leader(self, process: Process, world: _World, peers: list[Peer]) -> None:
        self.machine.sleep(self.rng.random() * 2)

        def on_loss(error: Unavailable) -> None:
            if process is self._engine_process and self._engine is not None:
                self._engine.fail(error)
                self._engine = None
            self._end_after_loss(process)

        context = self._context(world, peers, on_loss)
        engine = build_engine(self._parameters(), "", PATH, rank_context=context, load=self._load)
        self._serve_with(engine, process)

    def _be_follower(self, process: Process, world: _World, peers: list[Peer]) -> None:
        self.machine.sleep(self.rng.random() * 2)
        context = self._context(world, peers, lambda error: self._end_at_once(process))
        rank: FollowingRank = start_following(self._parameters(), "", context, self._load)
        if not rank.wait():
            while True:  # the heartbeat ends this process
                self.machine.sleep(1.0)

    def _parameters(self) -> Parameters:
        return replace(super()._parameters(), tensor_parallel_size=self._size)

    def _context(
        self, world: _World, peers: list[Peer], on_loss: Callable[[Unavailable], None]
    ) -> RankContext:
        """Return a rank's context without a meeting of the ranks: their connections exist."""
        context = object.__new__(RankContext)
        context._heartbeat = Heartbeat(peers, world.size, _TIMEOUT_S, on_loss)
        context.ranks = Lockstep(cast("MpiWorld", world), context._heartbeat)
        context.world = cast("MpiWorld", world)
        context.agreement = cast(Agreement, world.agreement)
        context._has_left = False
        return context

    def _step_failure(self, iteration: int) -> Exception | None:
        """Return the same for all ranks: a batch fails on all of them, or on none (`ranks.rank_engine`)."""
        if iteration not in self._failures:
            self._failures[iteration] = super()._step_failure(iteration)
        return self._failures[iteration]

    def _count_work(self) -> Counter[str]:
        return super()._count_work() + Counter({"ranks": self._size - 1})

    def _end_after_loss(self, process: Process) -> None:
        """End rank 0 after another rank was lost, and all requests are answered."""
        self._end_at_once(process)

    def _end_at_once(self, process: Process) -> None:
        self._kill(process)
        raise greenlet.GreenletExit

    # ---------------------------------------------------------------- faults

    def _kill_engine(self) -> None:
        ranks = self._ranks
        self._kill(self.rng.choice(ranks))
        self._replace_lost_ranks(ranks, _ENDED_S)

    def _stop_engine(self) -> None:
        """Stop a rank; if the others consider it lost, they end, and it ends too when it resumes."""
        self.machine.sleep(_TIMEOUT_S / 4)  # a rank that never sent a heartbeat is not missed
        ranks = self._ranks
        seconds = self._stop_process(self.rng.choice(ranks))
        if seconds > 2 * _TIMEOUT_S or not all(each.is_alive for each in ranks):
            self._replace_lost_ranks(ranks, _ENDED_S)

    def _end_loop(self) -> None:
        if self._engine is None:
            return
        ranks, device = self._ranks, self._let_loop_die()
        if not self.machine.wait_until(lambda: device.has_died, 30.0):  # there was no iteration
            self._kill(ranks[0])
        self._replace_lost_ranks(ranks, _NOTICED_S)

    def _replace_lost_ranks(self, ranks: Sequence[Process], longest_s: float) -> None:
        """Check that all ranks end at most `longest_s` after one of them is lost, and start new ones."""
        if ranks is self._ranks:
            self._engine = None
        have_ended = self.machine.wait_until(lambda: not any(each.is_alive for each in ranks), longest_s)
        assert have_ended, "ranks go on although one is lost"
        self._replace_engine()

    def _close_engine(self) -> None:
        super()._close_engine()
        have_ended = self.machine.wait_until(lambda: all(each.has_ended for each in self._mains), _NOTICED_S)
        assert have_ended, "a rank does not end with rank 0"
        batches = [device.batches for device in self._devices]
        assert all(each == batches[0] for each in batches), "the ranks computed different batches"
        outputs = [device.outputs for device in self._devices]
        assert all(each == outputs[0] for each in outputs), "the ranks chose different tokens"
        for process in self._ranks:
            if process is not self.machine.process:
                self._kill(process)  # a process ends with its main thread

    def _check_threads(self) -> None:
        """Do nothing: the threads ended with their processes."""


def _peer(rank: int, connection: Socket) -> Peer:
    host: Any = SimpleNamespace(name="machine", pid=rank)
    end: Any = connection
    return Peer(rank, host, end, "")


def run(seed: int) -> RunReport:
    """Run a server with several ranks; raises AssertionError if a promise was broken."""
    return RankedServer(seed).run()
