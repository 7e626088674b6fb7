"""One rank's place among the ranks: who the others are, the heartbeat between them, and what keeps them in step.

Made on every rank at the same time, by the thread that loads the model; the loop uses `ranks` later. What it
means that a rank is lost, whoever made it decides (`on_loss`, on the heartbeat's thread).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inflight.config import Parameters
from inflight.core.ports import Ranks
from inflight.core.request.request import IterationInput
from inflight.errors import Unavailable
from inflight.ranks.agreement import Agreement
from inflight.ranks.failure_detector import NEVER
from inflight.ranks.heartbeat import Heartbeat
from inflight.ranks.hosts import Host, gather_hosts
from inflight.ranks.lockstep import InStep
from inflight.ranks.mpi import MpiWorld
from inflight.ranks.rendezvous import meet

_LOADING_TIMEOUT_S = 120.0


class RankContext:
    """This rank, with a heartbeat from construction to `leave`.

    Attributes:
        world: All ranks.
        mapping: This rank's part of the model.
        hosts: By rank.
        leader_addresses: Where rank 0 is reached, for each connection of this rank.
        agreement: For whatever is loaded next.
        ranks: For the loop.
    """

    def __init__(
        self, world: MpiWorld, parameters: Parameters, on_loss: Callable[[Unavailable], None]
    ) -> None:
        """Raises ConfigError on all ranks if there are not as many as needed or they do not reach each other."""
        self.world = world
        self.mapping = world.mapping(parameters.tensor_parallel_size, parameters.pipeline_parallel_size)
        self.agreement = Agreement(world)
        self.hosts: Sequence[Host] = gather_hosts(world)
        with self.agreement.step():
            peers = meet(world, self.hosts)
        self.leader_addresses = [peer.leader_address for peer in peers]
        timeout_s = parameters.rank_timeout_ms / 1000
        self._heartbeat = Heartbeat(
            peers,
            world.size,
            timeout_s,
            on_loss,
            lambda: self._iteration(),
            max(timeout_s, _LOADING_TIMEOUT_S),
        )
        self.ranks = CountedRanks(InStep(world, self._heartbeat))
        self._has_left = False

    def has_loaded(self) -> None:
        """All ranks have loaded the model: one that is silent for `rank_timeout_ms` is lost from now on."""
        self._heartbeat.has_loaded()

    def report_failure(self, iteration: int) -> None:
        """This rank's forward pass raised."""
        self._heartbeat.report_failure(iteration)

    def report_dead_loop(self) -> None:
        """This rank takes part no more, and the others would wait for it: it is lost."""
        self._heartbeat.report_failure(NEVER)

    def leave(self) -> None:
        """The orderly end, on every rank at the same time: nothing of MPI may be called afterwards. Idempotent."""
        if self._has_left:
            return
        self._has_left = True
        self.world.leave()
        self._heartbeat.close()

    def _iteration(self) -> int:
        ranks = getattr(self, "ranks", None)  # the heartbeat beats before there are any
        return ranks.iteration if ranks else 0


class CountedRanks:
    """`Ranks` that remember how far this rank's loop has come.

    Attributes:
        iteration: The first iteration that has not ended here; with several micro-batches it may be in flight.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.iteration = self._next = 0
        self._ranks = ranks

    @property
    def is_leader(self) -> bool:
        """As `Ranks`."""
        return self._ranks.is_leader

    def advance(self) -> None:
        """The loop is at the beginning of an iteration that may not be shared."""
        self.iteration = self._next

    def share(self, inputs: IterationInput, are_asleep: bool) -> None:
        """As `Ranks`."""
        self._begin(inputs.iteration)
        self._ranks.share(inputs, are_asleep)

    def follow(self, is_asleep: bool) -> IterationInput | None:
        """As `Ranks`."""
        self.advance()
        inputs = self._ranks.follow(is_asleep)
        if inputs is not None:
            self._begin(inputs.iteration)
        return inputs

    def end(self, are_asleep: bool) -> None:
        """As `Ranks`."""
        self._ranks.end(are_asleep)

    def _begin(self, iteration: int) -> None:
        self.iteration = iteration
        self._next = iteration + 1
