"""A user's request with all its responses, and the check of its answer: one end, and the tokens it gets alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.core.request.request import Request
from inflight.core.request.response import Response, SequenceResult, merge_responses
from inflight.core.request.stop import FINISH_REASON_OF_STOP, FinishReason, StopReason
from inflight.errors import InflightError
from inflight.testing.fake_model import Conditions
from inflight.testing.simulation.alone import compare_outputs, search_alone, sequence_alone
from inflight.testing.simulation.host_cache import digest_of


@dataclass
class Ticket:
    """A request of one user, and what became of it.

    Attributes:
        request: The request, with the id of the scenario.
        responses: Responses that the front end got, in order.
        refusal: The error that `submit` raised.
        stops: The reasons for which it was asked to end, with the index of a sequence or None.
        submitted_ns, answered_ns: When it was submitted, and when its last response came; 0: not yet.
    """

    request: Request
    submitted_ns: int
    responses: list[Response] = field(default_factory=list[Response])
    refusal: InflightError | None = None
    stops: list[tuple[StopReason, int | None]] = field(default_factory=list[tuple[StopReason, int | None]])
    answered_ns: int = 0

    @property
    def is_answered(self) -> bool:
        """Return whether it has its last response, or was refused."""
        return self.refusal is not None or bool(self.responses and self.responses[-1].is_final)

    @property
    def error(self) -> InflightError | None:
        """Return the error with which it ended; None: with none, or it has not ended."""
        return self.refusal or (self.responses[-1].error if self.responses else None)

    def made(self) -> tuple[tuple[int, ...], FinishReason | None]:
        """Return the tokens of its only sequence so far, and the last finish reason; None: it has no result."""
        results = [each for each in self.responses if each.result is not None]
        whole = merge_responses(results).result if results else None
        return ((), None) if whole is None else (_new_tokens(whole), whole.finish_reasons[0])


def check_ticket(ticket: Ticket, vocab_size: int) -> None:
    """Check all responses of a request that was answered."""
    responses = ticket.responses
    if ticket.refusal is not None:
        assert not responses, "a refused request got a response"
        return
    assert [each.is_final for each in responses] == [False] * (len(responses) - 1) + [True]
    assert all(each.error is None for each in responses[:-1]), "an error is not the last response"
    for index in range(ticket.request.sampling.num_sequences):
        mine = [each for each in responses if each.result is not None and each.sequence_index == index]
        if responses[-1].error is None:
            assert mine, f"sequence {index} has no result"
            last = mine[-1].result
            assert last is not None and last.is_sequence_final, f"sequence {index} has no end"
        if not mine:
            continue
        if ticket.request.sampling.uses_beams:
            _check_search(ticket, [each.result for each in mine if each.result], vocab_size)
        else:
            whole = merge_responses(mine).result
            assert whole is not None
            _check_sequence(ticket, index, whole, vocab_size)


def _check_sequence(ticket: Ticket, index: int, whole: SequenceResult, vocab_size: int) -> None:
    request = ticket.request
    alone = sequence_alone(request, index, vocab_size, _conditions(request))
    if not whole.is_sequence_final:
        tokens = _new_tokens(whole)
        assert tokens == alone.tokens[: len(tokens)], f"tokens {tokens}, alone {alone.tokens}"
        return
    reason, count = whole.finish_reasons[0], whole.num_output_tokens[0]
    if reason is not alone.reason or count < len(alone.tokens):
        assert _may_have(ticket, index, reason), f"ended for {reason.name} without a reason"
        alone = alone.stopped_after(count, reason)
    compare_outputs(request, whole, [alone], vocab_size)


def _conditions(request: Request) -> Conditions:
    return Conditions.of(request, digest_of(request.lora) if request.lora else b"")


def _new_tokens(result: SequenceResult) -> tuple[int, ...]:
    tokens, count = result.output_token_ids[0], result.num_output_tokens[0]
    return tokens[len(tokens) - count :]


def _check_search(ticket: Ticket, results: list[SequenceResult], vocab_size: int) -> None:
    request = ticket.request
    steps = search_alone(request, vocab_size, _conditions(request))
    final = results[-1]
    if not final.is_sequence_final:
        return
    if final.was_cut_short:
        assert _may_have(ticket, 0, final.finish_reasons[0]), "a search was cut short without a reason"
        return
    compare_outputs(request, final, steps[-1], vocab_size)


def _may_have(ticket: Ticket, index: int, reason: FinishReason) -> bool:
    """Whether a stop or a deadline can have ended a sequence for this reason."""
    if reason is FinishReason.TIMED_OUT and ticket.request.allotted_time_ms:
        return True
    return any(
        FINISH_REASON_OF_STOP[each] is reason and stopped in (None, index) for each, stopped in ticket.stops
    )
