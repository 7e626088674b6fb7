"""The transition table, and that an illegal transition changes nothing."""

from __future__ import annotations

import itertools

import pytest

from inflight.core.kv.block_keys import CacheRules
from inflight.core.request import llm_request as llm_request_module
from inflight.core.request.llm_request import (
    TRANSITIONS,
    IllegalTransition,
    RequestEvent,
    RequestGroup,
    RequestState,
)
from inflight.core.request.request import ExternalDraft, OutputOptions
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason

from .factories import make_request, make_sequence, make_sequences


@pytest.mark.parametrize(("state", "event"), list(itertools.product(RequestState, RequestEvent)))
def test_only_transitions_in_the_table_are_allowed(state, event):
    llm_request = make_sequence()
    llm_request.state = state
    if (state, event) in TRANSITIONS:
        llm_request.apply(event)
        assert llm_request.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=event.name):
            llm_request.apply(event)
        assert llm_request.state is state


def test_no_transition_leaves_finished():
    assert not any(state is RequestState.FINISHED for state, _ in TRANSITIONS)


def test_a_paused_request_recomputes_all_tokens():
    llm_request = make_sequence(prompt=3)
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
    sequences = RequestGroup(several, first_key=7, rules=CacheRules(None), now_ns=0).sequences
    assert [(one.sequence_index, one.key, one.num_slots) for one in sequences] == [
        (0, 7, 1),
        (1, 8, 1),
        (2, 9, 1),
    ]
    beams = make_request(sampling=SamplingConfig(beam_width=3, num_return_sequences=2))
    (search,) = RequestGroup(beams, first_key=0, rules=CacheRules(None), now_ns=0).sequences
    assert search.num_slots == 3


def test_the_transition_table_equals_the_one_in_the_docstring():
    """Each row has the event and the next states from WAITING, RUNNING, PAUSED and FINISHED."""
    rows = {
        line.split()[0]: line.split()[1:]
        for line in (llm_request_module.__doc__ or "").splitlines()
        if line.strip().startswith(tuple(event.name for event in RequestEvent))
    }
    assert rows == {
        event.name: [
            TRANSITIONS[state, event].name if (state, event) in TRANSITIONS else "-" for state in RequestState
        ]
        for event in RequestEvent
    }


def test_a_restarted_request_keeps_only_its_tokens():
    llm_request = make_sequence(prompt=3)
    llm_request.start((2,), num_reused_tokens=0)
    llm_request.tokens += [7, 8]
    llm_request.num_computed_tokens, llm_request.is_void = 4, True
    llm_request.restart()
    assert llm_request.state is RequestState.PAUSED and llm_request.tokens[3:] == [7, 8]
    assert (llm_request.slots, llm_request.num_computed_tokens, llm_request.is_void) == ((), 0, False)


def test_a_search_restarts_from_its_prompt():
    llm_request = make_sequence(prompt=3, sampling=SamplingConfig(beam_width=2))
    search = llm_request.beams
    llm_request.start((0, 1), num_reused_tokens=0)
    llm_request.tokens += [7, 8]
    llm_request.num_streamed_tokens = 2
    llm_request.restart()
    assert llm_request.tokens == [10, 11, 12] and llm_request.beams is not search
    assert llm_request.num_streamed_tokens == 2, "what was said is not said again"


def test_the_phase_follows_from_the_known_tokens_left_to_compute():
    llm_request = make_sequence(prompt=6)
    llm_request.start((0,), num_reused_tokens=4)
    assert (llm_request.next_position, llm_request.in_context) == (4, True)
    llm_request.num_scheduled_tokens = 2
    assert (llm_request.next_position, llm_request.in_context) == (6, False)


def test_a_draft_is_scheduled_once():
    llm_request = make_sequence(draft=ExternalDraft((5, 6)))
    assert llm_request.draft_length == 2 and llm_request.needs_host
    llm_request.has_draft = False
    assert llm_request.draft_length == 0


def test_an_ended_request_keeps_its_slots_until_its_last_batch_is_back():
    llm_request = make_sequence()
    llm_request.start((3,), num_reused_tokens=0)
    llm_request.is_void = True
    llm_request.finish(FinishReason.CANCELLED)
    assert (llm_request.slots, llm_request.is_void) == ((3,), False)


def test_context_outputs_are_passed_on_to_a_waiting_sibling():
    first, second, third = make_sequences(
        output=OutputOptions(return_context_logits=True),
        sampling=SamplingConfig(top_k=2, num_return_sequences=3),
    )
    group = first.group
    assert [one.gives_context for one in (first, second, third)] == [True, False, False]
    for one in (first, second):
        one.start((one.key,), 0)
    first.finish(FinishReason.STOP_WORDS)
    assert group.pass_context_on() is third
    assert [one.gives_context for one in (first, second, third)] == [False, False, True]
    group.num_context_rows = group.request.prompt_length
    assert not third.gives_context, "all of them are there"
    assert group.pass_context_on() is None and third.leads
