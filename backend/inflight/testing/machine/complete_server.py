"""A whole server with all its parts at the same time: every kind of front end, several ranks, guides, adapters,
saved blocks and the launcher.

The parts are those of the other simulations of a whole server, whose classes check their own parts here as well.
Half of the seeds have all parts, most of these also the launcher. The others have some of the parts.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from inflight.config import Parameters, SchedulingConfig
from inflight.core.request.guide import Guide

from .endpoint_front_ends import EndpointFrontEnds
from .front_ends import FrontEnds
from .guided_server import ServerWithGuides
from .launched_server import LaunchedServer
from .openai_server import OpenAiFrontEnds, with_letters
from .ranked_server import RankedServer
from .run import ALL_FAULTS, RunReport, SimulatedRun
from .scheduler import Process
from .server_programs import Triton
from .triton_server import TritonFrontEnds
from .whole_server import WholeServer

_KINDS = (EndpointFrontEnds, TritonFrontEnds, OpenAiFrontEnds)
_NUM_BEGINNINGS, _LONGEST = 3, 30  # of prompts
_GUARD_S = 10.0  # until a guard has ended a server
_COMPLETE, _LAUNCHED = 0.5, 0.7  # probabilities: that a server has all parts, and of these also the launcher


@dataclass(frozen=True)
class ServerParts:
    """The parts that the server of a seed has.

    Attributes:
        kinds: Its kinds of front ends.
        has_ranks: Whether its engine has several ranks.
        has_launcher: Whether the launcher starts its processes, instead of the operator.
        has_guides: Whether requests have guides.
        has_adapters: Whether requests have adapters.
        saves_blocks: Whether KV blocks are saved in host memory and files.
    """

    kinds: tuple[type[FrontEnds], ...]
    has_ranks: bool
    has_launcher: bool
    has_guides: bool
    has_adapters: bool
    saves_blocks: bool

    @classmethod
    def of(cls, seed: int) -> ServerParts:
        """Return the parts that a seed chooses."""
        rng = random.Random(f"parts {seed}")
        if rng.random() < _COMPLETE:
            return cls(_KINDS, True, rng.random() < _LAUNCHED, True, True, True)
        kinds = tuple(rng.sample(_KINDS, rng.randint(1, len(_KINDS))))
        return cls(kinds, *(rng.random() < 0.5 for _ in range(5)))


class _ServerWithParts(WholeServer):
    """Gives a server the parts of its seed."""

    def __init__(self, seed: int, kept_faults: Collection[int] = ALL_FAULTS) -> None:
        self._parts = ServerParts.of(seed)
        super().__init__(seed, kept_faults)
        self._beginnings = [
            super(_ServerWithParts, self).draw_prompt(_LONGEST) for _ in range(_NUM_BEGINNINGS)
        ]

    def _make_kinds(self) -> Sequence[FrontEnds]:
        return [kind(self) for kind in self._parts.kinds]

    def _adapt(self, config: SchedulingConfig) -> SchedulingConfig:
        """Return settings with which blocks can be saved, if they are."""
        return replace(config, enable_kv_cache_reuse=config.enable_kv_cache_reuse or self._parts.saves_blocks)

    def _has_adapters(self) -> bool:
        return self._parts.has_adapters

    def _saves_blocks(self) -> bool:
        return self._parts.saves_blocks

    def _replace_engine(self) -> None:
        """Start another engine, and front ends whose clients find the blocks that the one before has saved."""
        super()._replace_engine()
        if self.rng.random() < 0.5:
            self._start_front_end()

    def draw_prompt(self, longest: int) -> list[int]:
        """Draw a prompt, which often begins as others do, so that their KV blocks are found again."""
        drawn = super().draw_prompt(longest)
        if self.rng.random() < 0.7:
            beginning = self.rng.choice(self._beginnings)[: len(drawn)]
            drawn = beginning + drawn[len(beginning) :]
        return drawn

    def draw_guide(self) -> Guide | None:
        return super().draw_guide() if self._parts.has_guides else None

    def _parameters(self) -> Parameters:
        return with_letters(super()._parameters())


class _ServerWithOneRank(_ServerWithParts, ServerWithGuides):
    """A server with an engine of one rank."""


class _ServerWithRanks(_ServerWithParts, RankedServer, ServerWithGuides):
    """A server with an engine of several ranks."""


class _ServerWithLauncher(_ServerWithParts, LaunchedServer, ServerWithGuides):
    """A server with an engine of one rank, and with its launcher."""


class _ServerWithRanksAndLauncher(_ServerWithParts, LaunchedServer, RankedServer, ServerWithGuides):
    """A server with an engine of several ranks, and with its launcher."""

    def _replace_lost_ranks(self, ranks: Sequence[Process], longest_s: float) -> None:
        super()._replace_lost_ranks(ranks, longest_s + _GUARD_S)

    # With several ranks any of them may be lost, as without a launcher.

    def _kill_engine(self) -> None:
        RankedServer._kill_engine(self)

    def _end_loop(self) -> None:
        RankedServer._end_loop(self)

    def _reloadable(self, triton: Triton) -> list[str]:
        """Return the models of front ends: an engine with ranks is loaded only once (`triton.leader`)."""
        return super()._reloadable(triton)[1:]


_CLASSES: dict[tuple[bool, bool], type[_ServerWithParts]] = {
    (False, False): _ServerWithOneRank,
    (True, False): _ServerWithRanks,
    (False, True): _ServerWithLauncher,
    (True, True): _ServerWithRanksAndLauncher,
}
"""The classes of servers: with or without several ranks, with or without a launcher."""


class CompleteServer(SimulatedRun):
    """One run of a server with all parts, or with some of them."""

    def __init__(self, seed: int, kept_faults: Collection[int] = ALL_FAULTS) -> None:
        parts = ServerParts.of(seed)
        self._server = _CLASSES[parts.has_ranks, parts.has_launcher](seed, kept_faults)
        self.faults = self._server.faults

    def run(self) -> RunReport:
        """Run to the end, and check all promises."""
        return self._server.run()


def run(seed: int) -> RunReport:
    """Run a server with all its parts; raises AssertionError if a promise was broken."""
    return CompleteServer(seed).run()
