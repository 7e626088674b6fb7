"""The results of a run with drafted tokens, shared by the benchmarks of drafting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inflight.core.request.response import SequenceResult


@dataclass(frozen=True, slots=True)
class DraftedRun:
    """Results of the requests of a run, whose time its owner measures.

    Attributes:
        results: The result of each request, with its `PerfMetrics`.
        num_iterations: Number of forward passes.
    """

    results: tuple[SequenceResult, ...]
    num_iterations: int

    @property
    def tokens(self) -> list[Any]:
        """The tokens of all requests."""
        return [result.output_token_ids for result in self.results]

    def total(self, count: str) -> int:
        """Return the sum of a field of `PerfMetrics` over all requests."""
        metrics = [result.perf_metrics for result in self.results if result.perf_metrics is not None]
        return sum(getattr(each, count) for each in metrics)

    def row(self, plain: DraftedRun) -> dict[str, Any]:
        """Return fields of a row of results: iterations, drafts, and whether the tokens are those of `plain`."""
        drafted, accepted = self.total("num_draft_tokens"), self.total("num_accepted_draft_tokens")
        return {
            "iterations": self.num_iterations,
            "drafted": drafted,
            "accepted": accepted,
            "accepted_rate": round(accepted / max(1, drafted), 2),
            "same_tokens": self.tokens == plain.tokens,
        }
