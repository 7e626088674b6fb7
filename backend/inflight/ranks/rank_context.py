"""One rank among the others: joins them, gets the job, and loads the model in lockstep with them.

Runs on the thread that loads the model; later the loop uses `RankContext.ranks`. The creator of the context passes
`on_loss`, which is called on the heartbeat's thread if a rank is lost. The ranks wait inside MPI until all have
joined. No error can be raised in there, so a process that still waits after two minutes ends with a stack trace,
and the others end with it.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import msgspec

from inflight.config import Parameters
from inflight.errors import ConfigError, Unavailable
from inflight.ranks.failure_detector import NEVER
from inflight.ranks.heartbeat import Heartbeat
from inflight.ranks.job import Briefing, Job
from inflight.ranks.lockstep import Lockstep
from inflight.ranks.ranked_store import FollowersBlockStore, LeadersBlockStore
from inflight.ranks.rendezvous import gather_hosts, meet
from inflight.ranks.topology import Host

if TYPE_CHECKING:
    from inflight.core.ports import BlockStore
    from inflight.ranks.mpi import MpiWorld

_TOGETHER_S = 120.0
_LOADING_TIMEOUT_S = 120.0
_STDERR = 2


def join() -> MpiWorld:
    """Join MPI, as the first call on every rank; `lead`, `refuse` or `attend` must follow.

    Raises ConfigError if this process has joined and left before.
    """
    from inflight.ranks.mpi import MpiWorld  # loads MPI, which a single rank does not need

    MpiWorld.check_not_left()
    faulthandler.dump_traceback_later(_TOGETHER_S, exit=True, file=_STDERR)
    return MpiWorld()


def lead(world: MpiWorld, job: Job, on_loss: Callable[[Unavailable], None]) -> RankContext:
    """On rank 0: send the job to the others. Raises the same ConfigError on all ranks, after leaving the world."""
    world.broadcast(msgspec.json.encode(Briefing(job)))
    return _take_place(world, job, on_loss)


def refuse(world: MpiWorld, why: str) -> None:
    """On rank 0, if there is no job: send the reason to the other ranks, which then end."""
    world.broadcast(msgspec.json.encode(Briefing(refusal=why)))
    world.leave()
    faulthandler.cancel_dump_traceback_later()


def attend(world: MpiWorld, on_loss: Callable[[Unavailable], None]) -> tuple[Job, RankContext]:
    """On the other ranks: get the job. Raises the same ConfigError on all ranks, after leaving the world."""
    briefing = msgspec.json.decode(world.broadcast(), type=Briefing)
    if briefing.job is None:
        world.leave()
        faulthandler.cancel_dump_traceback_later()
        raise ConfigError(briefing.refusal)
    return briefing.job, _take_place(world, briefing.job, on_loss)


def _take_place(world: MpiWorld, job: Job, on_loss: Callable[[Unavailable], None]) -> RankContext:
    try:
        return RankContext(world, job.parameters, on_loss)
    except ConfigError:
        world.leave()
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()


class RankContext:
    """This rank among the others, with a heartbeat until `leave`. Created on all ranks at the same time.

    Attributes:
        world: The world of all ranks.
        mapping: This rank's position in the model's parallelism.
        hosts: The hosts, by rank.
        leader_addresses: Addresses of rank 0, one for each connection of this rank.
        agreement: Runs further steps of loading on all ranks.
        ranks: The interface to the ranks that the loop uses.
    """

    def __init__(
        self, world: MpiWorld, parameters: Parameters, on_loss: Callable[[Unavailable], None]
    ) -> None:
        """Raises ConfigError on all ranks if their number is wrong or they cannot connect."""
        self.world = world
        self.mapping = world.mapping(
            parameters.tensor_parallel_size,
            parameters.pipeline_parallel_size,
            parameters.moe_expert_parallel_size,
        )
        self.agreement = Agreement(world)
        self.hosts: Sequence[Host] = gather_hosts(world)
        with self.agreement.step():
            peers = meet(world, self.hosts)
        self.leader_addresses = [peer.leader_address for peer in peers]
        timeout_s = parameters.rank_timeout_ms / 1000
        loading_timeout_s = max(timeout_s, _LOADING_TIMEOUT_S)
        self._heartbeat = Heartbeat(peers, world.size, timeout_s, on_loss, loading_timeout_s)
        self.ranks = Lockstep(world, self._heartbeat)
        self._has_left = False

    def has_loaded(self) -> None:
        """Record that all ranks have loaded the model: from now on a rank is lost after `rank_timeout_ms` of
        silence."""
        self._heartbeat.has_loaded()

    def report_failure(self, iteration: int) -> None:
        """Report to rank 0 that this rank's forward pass raised in `iteration`."""
        self._heartbeat.report_failure(iteration)

    def share_block_store(
        self, make_store: Callable[[Callable[[], None]], BlockStore], notify: Callable[[], None]
    ) -> BlockStore:
        """Return the store of KV blocks for this rank's loop.

        Called on all ranks at the same time. Raises the same ConfigError on all ranks if one of them cannot make
        its store.

        Args:
            make_store: Returns the store of this rank's part; its argument is a function that the store calls, on
                any thread, when a load has ended.
            notify: Function that wakes this rank's loop.
        """
        with ExitStack() as undo:
            with self.agreement.step():
                if self.ranks.is_leader:
                    shared = leaders = LeadersBlockStore(make_store(notify), self.world.size, notify)
                    self._heartbeat.on_loaded = leaders.hear
                else:
                    shared = FollowersBlockStore(make_store, self._heartbeat.report_load)
                undo.callback(shared.close)
            undo.pop_all()
        return shared

    def report_dead_loop(self) -> None:
        """Report this rank as lost, as its loop is dead and the others would wait for it."""
        self._heartbeat.report_failure(NEVER)

    def leave(self) -> None:
        """Leave normally, on every rank at the same time; no MPI call may follow. Idempotent."""
        if self._has_left:
            return
        self._has_left = True
        self.world.leave()
        self._heartbeat.close()


class _Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank's message to the others at the end of a step: a number, or its error."""

    number: int = 0
    error: str = ""


class Agreement:
    """Steps of loading: either every rank completes a step, or every rank raises the same ConfigError.

    If one rank failed alone, the others would wait in MPI for ever. So each step ends with one exchange, in
    which a rank takes part even if its step failed early. Every rank makes the same calls in the same order,
    until it fails.
    """

    def __init__(self, world: MpiWorld) -> None:
        self._world = world
        self._known: ConfigError | None = None  # the error, once every rank knows it

    @contextmanager
    def step(self) -> Generator[None, None, None]:
        """Run a step on all ranks: if it fails on any of them, ConfigError is raised on all."""
        try:
            yield
        except Exception as error:  # the others have to know of any error
            if error is self._known:
                raise
            text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            self._exchange(_Word(error=text))
        else:
            self._exchange(_Word())

    def least(self, number: int) -> int:
        """Inside of a step: return the minimum of all ranks' numbers; raises ConfigError if a step has failed."""
        return min(word.number for word in self._exchange(_Word(number)))

    def _exchange(self, word: _Word) -> list[_Word]:
        gathered = self._world.all_gather(msgspec.msgpack.encode(word))
        words = [msgspec.msgpack.decode(one, type=_Word) for one in gathered]
        if any(one.error for one in words):
            self._known = ConfigError(_summarize([one.error for one in words]))
            raise self._known
        return words


def _summarize(errors: Sequence[str]) -> str:
    """Return a text with all ranks' errors, by rank ("" for none); a common error is stated once."""
    failed = {rank: text for rank, text in enumerate(errors) if text}
    if len(failed) == len(errors) and len(set(errors)) == 1:
        return errors[0]
    return "; ".join(f"rank {rank} of {len(errors)}: {text}" for rank, text in failed.items())
