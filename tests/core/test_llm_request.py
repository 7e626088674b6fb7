"""The transition table, and that an illegal transition changes nothing."""

from __future__ import annotations

import itertools

import pytest

from inflight.core.llm_request import (
    TRANSITIONS,
    IllegalTransition,
    LlmRequest,
    RequestEvent,
    RequestGroup,
    RequestState,
)
from inflight.core.sampling_config import SamplingConfig

from .factories import make_request


def make_llm_request(**fields) -> LlmRequest:
    return RequestGroup(make_request(**fields), first_key=0, scope=None).sequences[0]


@pytest.mark.parametrize(("state", "event"), list(itertools.product(RequestState, RequestEvent)))
def test_every_cell_of_the_table(state, event):
    llm_request = make_llm_request()
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
    llm_request = make_llm_request(prompt=3)
    llm_request.start((2,), num_reused_tokens=0)
    llm_request.num_computed_tokens = 4
    llm_request.tokens += [7, 8]
    llm_request.pause()
    assert (llm_request.slots, llm_request.num_computed_tokens) == ((), 0)
    llm_request.start((0,), num_reused_tokens=4)
    assert llm_request.context_length == 5
    assert llm_request.in_context


def test_a_request_has_a_sequence_for_each_answer_and_one_for_all_beams():
    several = make_request(sampling=SamplingConfig(top_k=2, num_return_sequences=3))
    sequences = RequestGroup(several, first_key=7, scope=None).sequences
    assert [(one.sequence_index, one.key, one.num_slots) for one in sequences] == [
        (0, 7, 1),
        (1, 8, 1),
        (2, 9, 1),
    ]
    beams = make_request(sampling=SamplingConfig(beam_width=3, num_return_sequences=2))
    (search,) = RequestGroup(beams, first_key=0, scope=None).sequences
    assert search.num_slots == 3
