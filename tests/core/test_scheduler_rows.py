"""A failed row ends its own request only; all other requests get the same results as without the failure."""

from __future__ import annotations

from types import ModuleType

import pytest

from inflight.core import outcomes
from inflight.core.request import results
from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.llm_request import LlmRequest
from inflight.core.request.request import ExternalDraft, OutputOptions
from inflight.core.request.response import Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason, StopSignal
from inflight.core.schedule.batch import ModelOutput, TokenDetails
from inflight.core.scheduler import Scheduler
from inflight.errors import InvalidArgument, StepFailed
from inflight.testing.simulation.integrity import check_integrity

from .factories import Driver, make_request, make_scheduler

TWO_BEAMS = SamplingConfig(beam_width=2)
MESSAGE = "the request could not be processed: ValueError: no such token"


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch):
    """A context that makes a module's function raise for some request's sequences."""

    def apply(
        module: ModuleType,
        function: str,
        request_id: int,
        error: Exception | None = None,
        sequences: tuple[int, ...] = (),
    ):
        original = getattr(module, function)

        def raising(llm_request: LlmRequest, *arguments):
            if llm_request.request_id == request_id and (
                not sequences or llm_request.sequence_index in sequences
            ):
                raise error or ValueError("no such token")
            return original(llm_request, *arguments)

        monkeypatch.setattr(module, function, raising)

    return apply


def errors(responses: list[Response]) -> dict[int, str]:
    return {response.request_id: str(response.error) for response in responses if response.error is not None}


def run_to_the_end(driver: Driver) -> list[Response]:
    responses = []
    while driver.scheduler.num_active:
        responses += driver.step()[1]
    assert driver.scheduler.kv_cache.pool.num_held == driver.scheduler.kv_cache.num_reserved == 0
    return responses


@pytest.mark.parametrize("steps", [0, 1])
def test_a_row_with_invalid_tokens_ends_its_request(poison, steps):
    driver = Driver(make_scheduler())
    driver.accept(*(make_request(number, new=4) for number in (1, 2, 3)))
    for _ in range(steps):
        driver.step()
    poison(outcomes, "append_tokens", 2)
    _, (failed,) = driver.step()
    assert failed.is_final and type(failed.error) is StepFailed and errors([failed]) == {2: MESSAGE}
    finals = run_to_the_end(driver)
    assert [(final.request_id, final.result.num_output_tokens) for final in finals] == [(1, (4,)), (3, (4,))]


def test_an_invalid_argument_found_in_a_row_keeps_its_error_class(poison):
    driver = Driver(make_scheduler())
    driver.accept(make_request(1), make_request(2))
    poison(outcomes, "append_tokens", 1, InvalidArgument("draft_input_ids is wrong"))
    _, (failed,) = driver.step()
    assert type(failed.error) is InvalidArgument and errors([failed]) == {1: "draft_input_ids is wrong"}
    assert [final.request_id for final in run_to_the_end(driver)] == [2]


def test_an_invalid_context_output_ends_its_request(poison):
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.accept(make_request(1, output=OutputOptions(return_prompt_log_probs=True)), make_request(2, new=1))
    poison(outcomes, "keep_context", 1)
    batch = scheduler.schedule()
    responses = scheduler.update(batch, ModelOutput(0, [(7,), (7,)], context={0: None}))
    assert errors(responses) == {1: MESSAGE} and [response.request_id for response in responses] == [1, 2]
    check_integrity(scheduler)


def test_invalid_candidates_end_their_search():
    """The candidates name row 5 of a search that has one row."""
    scheduler = make_scheduler(max_num_sequences=8)
    Driver(scheduler).accept(
        make_request(1, sampling=TWO_BEAMS),
        make_request(2, new=1),
        make_request(3, sampling=TWO_BEAMS, new=1),
    )
    batch = scheduler.schedule()
    wrong = BeamCandidates((5, 5), (), ())
    right = BeamCandidates((0, 0), (7, 8), (-1.0, -2.0))
    responses = scheduler.update(batch, ModelOutput(0, [(), (7,), ()], beams=[wrong, right]))
    assert sorted(response.request_id for response in responses) == [1, 2, 3]
    assert list(errors(responses)) == [1]
    check_integrity(scheduler)
    assert scheduler.num_active == scheduler.kv_cache.pool.num_held == 0


def test_a_failed_sequence_ends_its_request_with_one_error(poison):
    driver = Driver(make_scheduler(max_num_sequences=8))
    driver.accept(
        make_request(1, sampling=SamplingConfig(top_k=2, num_return_sequences=3)), make_request(2, new=6)
    )
    driver.step()
    driver.step()
    poison(outcomes, "append_tokens", 1, sequences=(1,))
    _, (failed,) = driver.step()
    assert failed.is_final and errors([failed]) == {1: MESSAGE}
    assert [final.request_id for final in run_to_the_end(driver)] == [2]


def test_a_failed_request_is_answered_when_its_last_batch_is_back(poison):
    scheduler = make_scheduler()
    Driver(scheduler).accept(make_request(1), make_request(2))
    first, second = scheduler.schedule(), scheduler.schedule()
    poison(outcomes, "append_tokens", 1)
    assert scheduler.update(first, ModelOutput(0, [(7,), (7,)])) == []
    (failed,) = scheduler.update(second, ModelOutput(1, [(7,), (7,)]))
    assert failed.is_final and errors([failed]) == {1: MESSAGE}
    check_integrity(scheduler)
    assert scheduler.num_active == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_a_response_that_cannot_be_made_becomes_an_error(poison, streaming):
    driver = Driver(make_scheduler())
    driver.accept(make_request(1, new=2, streaming=streaming), make_request(2, new=2))
    driver.step()
    poison(results, "make_result", 1)
    _, responses = driver.step()
    assert errors(responses) == {1: MESSAGE} and [response.is_final for response in responses] == [True, True]
    assert driver.scheduler.num_active == driver.scheduler.kv_cache.pool.num_held == 0


def test_a_stop_whose_response_cannot_be_made_becomes_an_error(poison):
    driver = Driver(make_scheduler())
    driver.accept(make_request(1), make_request(2))
    poison(results, "make_result", 1)
    responses = driver.accept(stop=(1, 2))
    assert errors(responses) == {1: MESSAGE} and [response.is_final for response in responses] == [True, True]


def test_a_request_whose_validation_raises_is_refused_alone(monkeypatch):
    driver = Driver(make_scheduler())
    original = Scheduler._rules

    def raising(self, request, *others):
        if request.request_id == 1:
            raise ValueError("no such token")
        return original(self, request, *others)

    monkeypatch.setattr(Scheduler, "_rules", raising)
    (refused,) = driver.accept(make_request(1), make_request(2))
    assert refused.is_final and errors([refused]) == {1: MESSAGE}
    assert driver.scheduler.num_active == 1


def test_normalized_log_probs_are_returned_and_the_models_own_are_summed():
    scheduler = make_scheduler()
    Driver(scheduler).accept(make_request(1, new=1, output=OutputOptions(return_log_probs=True)))
    batch = scheduler.schedule()
    details = {0: TokenDetails(log_probs=(-1.0,), drawn_log_probs=(-0.25,))}
    (response,) = scheduler.update(batch, ModelOutput(0, [(7,)], details=details))
    assert response.result.log_probs == ((-0.25,),) and response.result.model_log_probs == ((-1.0,),)
    assert response.result.cum_log_probs == (-1.0,)


def test_missing_details_do_not_affect_other_requests():
    """If the device returns no details for one row and too few for another, requests get those that there are."""
    scheduler = make_scheduler()
    Driver(scheduler).accept(
        *(make_request(number, new=1, output=OutputOptions(return_log_probs=True)) for number in (1, 2, 3))
    )
    batch = scheduler.schedule()
    details = {0: TokenDetails(log_probs=(-1.0,)), 2: TokenDetails()}
    responses = scheduler.update(batch, ModelOutput(0, [(7,)] * 3, details=details))
    assert [response.result.log_probs for response in responses] == [((-1.0,),), ((),), ((),)]
    assert [response.result.finish_reasons for response in responses] == [(FinishReason.LENGTH,)] * 3


BANNING = {
    "bad_words": ((5,),),
    "sampling": SamplingConfig(min_length=2, no_repeat_ngram_size=3),
    "end_ids": (9,),
}


@pytest.mark.parametrize("steps", [0, 2])
def test_a_row_with_every_token_banned_ends_its_request(steps):
    """The row fails in its context, or after two tokens."""
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.accept(make_request(1, new=5, **BANNING), make_request(2, new=5))
    for _ in range(steps):
        driver.step()
    batch = scheduler.schedule()
    (failed,) = scheduler.update(batch, ModelOutput(batch.iteration, [(), (7,)]))
    assert failed.is_final and type(failed.error) is InvalidArgument
    assert errors([failed]) == {
        1: "min_length and bad_words_list and no_repeat_ngram_size must leave a token that may come next, "
        f"got every token banned after {steps} generated"
    }
    check_integrity(scheduler)
    (final,) = run_to_the_end(driver)
    assert (final.request_id, final.result.num_output_tokens) == (2, (5,))


@pytest.mark.parametrize("accepted", [0, 2])
def test_drafts_before_a_row_with_every_token_banned_are_accepted(accepted):
    """Accepted tokens count, and the row after them reports that every token is banned."""
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    draft = ExternalDraft((20, 21, 22))
    driver.accept(make_request(1, new=6, streaming=True, draft=draft, **BANNING), make_request(2))
    batch = scheduler.schedule()
    responses = scheduler.update(batch, ModelOutput(batch.iteration, [(20, 21, 22)[:accepted], (7,)]))
    check_integrity(scheduler)
    if accepted:
        assert not errors(responses) and responses[0].result.output_token_ids == ((20, 21),)
        batch = scheduler.schedule()
        responses = scheduler.update(batch, ModelOutput(batch.iteration, [(), (7,)]))
    assert list(errors(responses)) == [1]
    assert errors(responses)[1].endswith(f"after {accepted} generated")
    assert [final.request_id for final in run_to_the_end(driver)] == [2]


def test_a_row_in_flight_after_one_with_every_token_banned_is_dropped():
    """A device that overlaps iterations has continued from an arbitrary token, and its tokens are dropped."""
    scheduler = make_scheduler(overlaps_iterations=True)
    driver = Driver(scheduler)
    driver.accept(make_request(1, bad_words=((5,),)), make_request(2, new=3))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert not scheduler.update(first, ModelOutput(first.iteration, [(), (7,)]))
    (failed,) = scheduler.update(second, ModelOutput(second.iteration, [(8,), (7,)]))
    assert errors([failed]).keys() == {1}
    assert [final.request_id for final in run_to_the_end(driver)] == [2]


@pytest.mark.parametrize("has_ended_beam", [False, True])
def test_a_search_without_allowed_beams_fails_unless_one_has_finished(has_ended_beam):
    scheduler = make_scheduler(max_num_sequences=8)
    Driver(scheduler).accept(make_request(1, sampling=TWO_BEAMS, end_ids=(9,), bad_words=((5,),)))
    batch = scheduler.schedule()
    never = -float("inf")
    found = BeamCandidates(
        (0, 0, 0, 0), (9, 6, 7, 8), (-1.0 if has_ended_beam else never, never, never, never)
    )
    (final,) = scheduler.update(batch, ModelOutput(0, [()], beams=[found]))
    assert final.is_final and (final.error is None) == has_ended_beam
    if not has_ended_beam:
        assert errors([final])[1].startswith("bad_words_list must leave a token")
    check_integrity(scheduler)
    assert scheduler.num_active == scheduler.kv_cache.pool.num_held == 0


# ---------------------------------------------------------------------- failed rows


BROKEN = StepFailed("its code raised")


def fail_slot(scheduler: Scheduler, batch, slot: int, token: int = 7, **output) -> list[Response]:
    """The device's output for a batch in which one row has failed; the others get a token."""
    tokens = [() if each == slot else (token,) for each in batch.sampled_slots()]
    responses = scheduler.update(batch, ModelOutput(0, tokens, failures={slot: BROKEN}, **output))
    check_integrity(scheduler)
    return responses


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_that_has_failed_ends_its_request_and_no_other(steps, streaming):
    """The row fails in its context, or after two tokens."""
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.accept(make_request(1, new=5, streaming=streaming), make_request(2, new=5))
    for _ in range(steps):
        driver.step()
    (failed,) = fail_slot(scheduler, scheduler.schedule(), 0)
    assert (failed.request_id, failed.is_final, failed.error) == (1, True, BROKEN)
    (final,) = run_to_the_end(driver)
    assert final.request_id == 2 and final.result.num_output_tokens == (5,)
    assert scheduler.kv_cache.pool.num_held == scheduler.kv_cache.num_reserved == 0


def test_a_failed_row_of_drafts_ends_its_request():
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.accept(make_request(1, new=6, draft=ExternalDraft((20, 21, 22))), make_request(2))
    (failed,) = fail_slot(scheduler, scheduler.schedule(), 0)
    assert errors([failed]) == {1: "its code raised"}
    assert [final.request_id for final in run_to_the_end(driver)] == [2]


def test_a_failed_row_of_one_sequence_ends_the_request():
    """The whole request ends when its other rows in flight are back."""
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.accept(
        make_request(1, new=6, sampling=SamplingConfig(num_return_sequences=3)), make_request(2, new=6)
    )
    driver.step()
    batch = scheduler.schedule()
    assert len(batch.sampled_slots()) == 4
    (failed,) = fail_slot(scheduler, batch, batch.sampled_slots()[0])
    assert errors([failed]) == {1: "its code raised"}
    assert [final.request_id for final in run_to_the_end(driver)] == [2]


@pytest.mark.parametrize("beam", [None, 0, 1])
def test_a_failed_row_of_a_search_ends_the_search(beam):
    """The row fails in its context, where the search has one row, or is either of two beams."""
    scheduler = make_scheduler(max_num_sequences=8)
    driver = Driver(scheduler)
    driver.accept(make_request(1, sampling=TWO_BEAMS), make_request(2))
    found = BeamCandidates((0, 0, 0, 0), (5, 6, 7, 8), (-1.0, -2.0, -3.0, -4.0))
    batch = scheduler.schedule()
    if beam is not None:
        scheduler.update(batch, ModelOutput(0, [(), (7,)], beams=[found]))
        batch = scheduler.schedule()
    ((group,), slots) = batch.beam_groups, set(batch.sampled_slots())
    tokens = [() if slot in group.slots else (7,) for slot in batch.sampled_slots()]
    failures = {group.slots[beam or 0]: BROKEN}
    (failed,) = scheduler.update(
        batch, ModelOutput(0, tokens, beams=[BeamCandidates((), (), ())], failures=failures)
    )
    assert errors([failed]) == {1: "its code raised"} and len(slots) > 1
    check_integrity(scheduler)
    assert [final.request_id for final in run_to_the_end(driver)] == [2]


def test_a_row_that_has_failed_after_its_sequence_ended_is_no_error():
    """One sequence of two is stopped while its row is in flight and fails; the other sequence runs to its
    end."""
    scheduler = make_scheduler(num_micro_batches=2)
    driver = Driver(scheduler)
    driver.accept(make_request(1, new=3, sampling=SamplingConfig(num_return_sequences=2)))
    driver.step()
    batch = scheduler.schedule()
    driver.accept(stop=(StopSignal(1, sequence_index=1),))
    sibling = batch.sampled_slots()[0]
    assert not errors(fail_slot(scheduler, batch, sibling))
    finals = run_to_the_end(driver)
    assert not errors(finals) and finals[-1].is_final
