"""The beginning that all ranks have in common: join MPI, hear the job from rank 0, take a place among the ranks.

On the thread that loads the model. A rank that never comes is waited for inside of MPI, where nothing can be
raised: whoever still waits after two minutes ends, with a stack trace, and so ends the others.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable

import msgspec

from inflight.errors import ConfigError, Unavailable
from inflight.ranks.job import Briefing, Job
from inflight.ranks.mpi import MpiWorld
from inflight.ranks.rank_context import RankContext

_TOGETHER_S = 120.0
_STDERR = 2


def join() -> MpiWorld:
    """First of all, on every rank; `lead`, `refuse` or `attend` has to follow."""
    faulthandler.dump_traceback_later(_TOGETHER_S, exit=True, file=_STDERR)
    return MpiWorld()


def lead(world: MpiWorld, job: Job, on_loss: Callable[[Unavailable], None]) -> RankContext:
    """Rank 0's. Raises ConfigError, as on all ranks; the world has been left then."""
    world.broadcast(msgspec.json.encode(Briefing(job)))
    return _take_place(world, job, on_loss)


def refuse(world: MpiWorld, why: str) -> None:
    """Rank 0's, where there is nothing to do: the others end."""
    world.broadcast(msgspec.json.encode(Briefing(refusal=why)))
    world.leave()
    faulthandler.cancel_dump_traceback_later()


def attend(world: MpiWorld, on_loss: Callable[[Unavailable], None]) -> tuple[Job, RankContext]:
    """The other ranks'. Raises ConfigError, as on all ranks; the world has been left then."""
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
