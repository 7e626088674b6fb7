"""A run of any simulation on the machine: its report, and the search for the fewest faults with which it fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

MOST_FAULTS = 8
ALL_FAULTS = range(MOST_FAULTS)
PATH = "/run/engine.sock"  # of the engine's endpoint


@dataclass(frozen=True)
class RunReport:
    """Counts of a run of a simulated server: its requests, faults and time.

    Attributes:
        num_requests: Requests that were submitted; for supervision, processes that were started.
        endings: How many ended, by finish reason or code of the error; for supervision, how it ended.
        faults: How many faults there were, by kind.
        simulated_s: Simulated seconds.
        num_switches: How often a simulated thread was run.
        trace: A digest of what happened and when, equal for equal seeds.
        work: Counts of what the parts of a whole server have done: requests answered with tokens by kind of front
            end, ranks, guides compiled, adapters read, KV blocks loaded, and starts of the server.
    """

    num_requests: int
    endings: Counter[str]
    faults: Counter[str]
    simulated_s: float
    num_switches: int
    trace: int
    work: Counter[str] = field(default_factory=Counter[str])


class SimulatedRun(ABC):
    """One run of a simulation.

    Args:
        seed: Chooses everything.
        kept_faults: Numbers of the faults that are caused, in the order in which the seed chooses them; the others
            are left out.

    Attributes:
        faults: How many faults there were, by kind.
    """

    faults: Counter[str]

    @abstractmethod
    def __init__(self, seed: int, kept_faults: Collection[int] = ALL_FAULTS) -> None: ...

    @abstractmethod
    def run(self) -> RunReport:
        """Run to the end, and check all promises; raises AssertionError if one was broken."""

    @classmethod
    def fewest_faults(cls, seed: int) -> str:
        """Return which of its faults a failing seed needs: if one of these is left out, the seed does not fail.

        A run in which a fault is left out may differ in more than this fault, as later random choices differ.
        """
        for count in range(MOST_FAULTS + 1):
            if cls._failing(seed, range(count)) is not None:
                break
        else:
            return "no more: it is not deterministic"
        kept = [*range(count)]
        for number in range(count):
            fewer = [each for each in kept if each != number]
            if cls._failing(seed, fewer) is not None:
                kept = fewer
        run = cls._failing(seed, kept)
        assert run is not None, "it failed before"
        kinds = ", ".join(f"{count} {kind}" for kind, count in run.faults.items())
        return f"with {len(kept)} of its faults ({kinds or 'none'})"

    @classmethod
    def _failing(cls, seed: int, kept_faults: Collection[int]) -> SimulatedRun | None:
        """Return the run with these faults if it fails."""
        run = cls(seed, kept_faults)
        try:
            run.run()
        except Exception:  # any failure of a run, also one of the code that it runs
            return run
        return None
