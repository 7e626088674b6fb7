"""A run of any simulation on the machine: its report, and the search for the fewest faults with which it fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass

MOST_FAULTS = 8


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
    """

    num_requests: int
    endings: Counter[str]
    faults: Counter[str]
    simulated_s: float
    num_switches: int
    trace: int


class SimulatedRun(ABC):
    """One run of a simulation.

    Args:
        seed: Chooses everything.
        most_faults: Only the first so many faults are caused; None: all.

    Attributes:
        faults: How many faults there were, by kind.
    """

    faults: Counter[str]

    @abstractmethod
    def __init__(self, seed: int, most_faults: int | None = None) -> None: ...

    @abstractmethod
    def run(self) -> RunReport:
        """Run to the end, and check all promises; raises AssertionError if one was broken."""

    @classmethod
    def fewest_faults(cls, seed: int) -> str:
        """Return how few of its faults a failing seed needs: the shortest prefix of them with which it fails."""
        for most_faults in range(MOST_FAULTS + 1):
            run = cls(seed, most_faults)
            try:
                run.run()
            except Exception:  # any failure of a run, also one of the code that it runs
                kinds = ", ".join(f"{count} {kind}" for kind, count in run.faults.items())
                return f"with its first {most_faults} faults ({kinds or 'none'})"
        return "no more: it is not deterministic"
