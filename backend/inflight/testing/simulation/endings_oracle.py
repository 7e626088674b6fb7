"""Oracle of how many sequences one iteration may end because of stops, deadlines and adapter events."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from inflight.config import SchedulingConfig
from inflight.core.request.llm_request import LlmRequest, RequestState
from inflight.core.scheduler import Scheduler

from .queue_oracle import sequences_of


class EndingsOracle:
    """Oracle of the sequences that one scheduler ends.

    Attributes:
        num_divided: Number of iterations that left some sequences to end for the next one.
    """

    def __init__(self, scheduler: Scheduler, config: SchedulingConfig) -> None:
        self.num_divided = 0
        self._scheduler = scheduler
        self._most = config.sequences_per_iteration

    @contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Check that `accept` ends a bounded number of sequences, among them the first pending one."""
        before = [sequence for sequence in sequences_of(self._scheduler) if not _has_ended(sequence)]
        pending = self._scheduler._to_end._queue
        first = pending[0] if pending else None
        yield
        ended = Counter(sequence.request_id for sequence in before if _has_ended(sequence))
        if len(ended) > 1:
            assert ended.total() <= self._most, "an iteration ended more sequences than it may"
        if self._scheduler._to_end:
            self.num_divided += 1
            # A request that ended by itself meanwhile is skipped, but counts as ended here.
            assert first is None or pending[0] is not first, (
                "an iteration did not end the first request of the queue"
            )


def _has_ended(sequence: LlmRequest) -> bool:
    return sequence.state is RequestState.FINISHED
