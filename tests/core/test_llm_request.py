"""The transition table, and that an illegal transition changes nothing."""

from __future__ import annotations

import itertools

import pytest

from inflight.core.llm_request import TRANSITIONS, IllegalTransition, LlmRequest, RequestEvent, RequestState
from inflight.core.stop import FinishReason

from .factories import make_request


@pytest.mark.parametrize(("state", "event"), list(itertools.product(RequestState, RequestEvent)))
def test_every_cell_of_the_table(state, event):
    llm_request = LlmRequest(make_request())
    llm_request.state = state
    if (state, event) in TRANSITIONS:
        llm_request.apply(event)
        assert llm_request.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=event.name):
            llm_request.apply(event)
        assert llm_request.state is state


def test_nothing_leaves_finished():
    assert not any(state is RequestState.FINISHED for state, _ in TRANSITIONS)


def test_a_paused_request_computes_everything_again():
    llm_request = LlmRequest(make_request(prompt=3))
    llm_request.start(slot=2, num_reused_tokens=0)
    llm_request.num_computed_tokens = 4
    llm_request.tokens += [7, 8]
    llm_request.pause()
    assert (llm_request.slot, llm_request.num_computed_tokens) == (-1, 0)
    llm_request.start(slot=0, num_reused_tokens=4)
    assert llm_request.context_length == 5
    assert llm_request.in_context


def test_an_error_does_not_replace_the_reason_it_ended_for():
    llm_request = LlmRequest(make_request())
    llm_request.finish(FinishReason.CANCELLED)
    llm_request.fail(RuntimeError("late"))
    assert llm_request.finish_reason is FinishReason.CANCELLED
    assert llm_request.error is None
