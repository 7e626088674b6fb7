"""Failures of iterations: decide which fail in a scenario, and check which requests end because of them.

If a request was alone in a failed iteration, and no failed batch was in flight before that one, the request
must end with the iteration's error. Other requests must go on. There are two exceptions. If the device reports
itself as unusable, all requests in the batch must end. If the device reports failures of single rows, the
requests of these rows must end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import ceil, log2

from inflight.core.request.llm_request import LlmRequest, RequestState
from inflight.core.schedule.batch import ModelOutput, ScheduledBatch
from inflight.errors import InflightError, StepFailed, Unavailable
from inflight.testing.fake_engine import FakeLogits

from .scenario import Scenario

PLANNED_FAILURE = StepFailed("planned")
NO_USE = Unavailable("the device is lost")
FAILED_ROW = StepFailed("the row")


@dataclass
class BatchInFlight:
    """A batch on its way through the device.

    Attributes:
        rows: The sequences with rows in it.
        started: The sequences that it starts, with or without rows.
        planned_error: The error planned by the scenario.
        is_behind_failure: Whether an earlier batch in flight has failed or may fail; it has not come back yet.
        is_spoiled: Whether it has rows of sequences that such a batch contains, or whose adapters that batch
            loads, so that it may fail too.
        logits: The result of a pipeline's forward pass, if it did not fail.
        outcome: Its output or error; None if not known yet.
        void: Keys of sequences whose rows in this batch do not count, because an earlier batch with the same
            sequences, or with their adapters, failed while this one was in flight.
    """

    batch: ScheduledBatch
    rows: tuple[LlmRequest, ...]
    started: tuple[LlmRequest, ...] = ()
    planned_error: InflightError | None = None
    is_behind_failure: bool = False
    is_spoiled: bool = False
    logits: FakeLogits | None = None
    outcome: ModelOutput | InflightError | None = None
    void: set[int] = field(default_factory=set[int])

    @property
    def has_failed(self) -> bool:
        """Whether the iteration comes back as an error."""
        return isinstance(self.outcome, InflightError)

    @property
    def may_fail(self) -> bool:
        """Whether the iteration has failed, or may still fail because its outcome is not known yet."""
        return self.has_failed or (
            self.outcome is None and (self.is_spoiled or self.planned_error is not None)
        )

    def names(self, sequences: Iterable[LlmRequest]) -> bool:
        """Whether the batch has a row of one of these sequences, starts one, or loads the adapter of one."""
        return any(one in self.rows or one in self.started or self.loads(one) for one in sequences)

    def loads(self, llm_request: LlmRequest) -> bool:
        """Tell if the batch loads a sequence's adapter."""
        adapter = llm_request.group.adapter
        return adapter is not None and any(load.adapter == adapter for load in self.batch.adapter_loads)

    def live(self) -> list[LlmRequest]:
        """Return the sequences whose rows count: those that are neither finished nor void."""
        return [r for r in self.rows if r.key not in self.void and r.state is not RequestState.FINISHED]


class Blame:
    """The failed iterations of one scenario.

    Attributes:
        convicted: Requests that must end with an error because an iteration or a row failed.
        num_failed: Iterations that came back as an error.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.convicted: set[int] = set()
        self.num_failed = 0
        self._scenario = scenario
        self._num_by_chance = 0
        self._culprits: set[int] = set()
        self._most_suspects = 1

    def take_off(self, flight: BatchInFlight, ahead: Iterable[BatchInFlight]) -> None:
        """Record a batch before it runs, and plan its failure; `ahead` are the batches in flight before it."""
        breakdowns, batch = self._scenario.breakdowns, flight.batch
        failed = [each for each in ahead if each.may_fail]
        flight.is_behind_failure = bool(failed)
        flight.is_spoiled = any(each.names(flight.rows) for each in failed)
        culprits = {
            row.request_id
            for row in flight.rows
            if row.next_position > breakdowns.faulty.get(row.request_id, row.next_position)
        }
        if batch.iteration in breakdowns.unusable:
            flight.planned_error = NO_USE
        elif culprits or batch.iteration in breakdowns.transient:
            flight.planned_error = PLANNED_FAILURE
            self._culprits |= culprits
            self._num_by_chance += not culprits

    def failed(self, flight: BatchInFlight, behind: Iterable[BatchInFlight]) -> set[int]:
        """Record that a batch failed, with `behind` in flight after it; return the requests that must end."""
        self.num_failed += 1
        lost = {row.key for row in (*flight.rows, *flight.started)}
        for other in behind:
            lost -= {row.key for row in other.started}  # paused before it had a row, and started again
            other.void |= lost
            other.void |= {row.key for row in other.rows if flight.loads(row)}
        live = flight.live()
        requests = {row.request_id for row in live}
        self._most_suspects = max(self._most_suspects, len(requests))
        was_alone = len(live) == len(flight.rows) and len(requests) == 1
        if not (was_alone or isinstance(flight.outcome, Unavailable)):
            return set()
        self.convicted |= requests
        return requests

    def fail_rows(self, flight: BatchInFlight) -> list[LlmRequest]:
        """Add the scenario's planned failures of single rows to the output of a batch.

        Returns the sequences that still get the device's output. If a request has a failed row, these are its
        sequences before that row.
        """
        batch, output = flight.batch, flight.outcome
        assert isinstance(output, ModelOutput)
        sampled, failing = batch.sampled_slots(), self._scenario.breakdowns.failing_rows
        failures: dict[int, InflightError] = {}
        ended: set[int] = set()
        served: list[LlmRequest] = []
        for row in flight.live():
            slots = [slot for slot in row.slots if slot in sampled]
            if slots and row.num_generated >= failing.get(row.request_id, 1 << 62):
                failures[slots[batch.iteration % len(slots)]] = FAILED_ROW
                ended.add(row.request_id)
            elif row.request_id not in ended:
                served.append(row)
        if failures:
            self.convicted |= ended
            tokens = [() if slot in failures else new for slot, new in zip(sampled, output.token_ids)]
            flight.outcome = replace(output, token_ids=tokens, failures=failures)
        return served

    def check(self) -> None:
        """Check at the end that faulty requests did not make more iterations fail than necessary."""
        halvings = ceil(log2(self._most_suspects))
        planned = self._num_by_chance + len(self._scenario.breakdowns.unusable)
        most = planned + len(self._culprits) * (2 * halvings + 2)
        # After a failed batch another one is in flight already, and perhaps one that continues from that one.
        assert self.num_failed <= most * (2 * self._scenario.depth - 1), (
            f"{self.num_failed} iterations failed for {len(self._culprits)} faulty requests"
        )
