"""A step of the pipeline that fails for some rows: their requests end, and the others get their tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inflight.core.request.request import OutputOptions
from inflight.core.schedule.batch import BeamGroup
from inflight.errors import StepFailed
from inflight.sampling import sampler
from inflight.sampling.rows import Step

from .factories import Row, decode_rows, make_request, make_sampler, start_batch

VOCAB_SIZE = 6
REFUSED = 5


@pytest.fixture(autouse=True)
def refusing_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a first step that fails for requests with the presence penalty 1 at rows that prefer token 5."""
    make_steps = sampler.pipeline_steps

    def refuse(rows, indices, _):
        liked = rows.logits.argmax(dim=-1).tolist()
        refused = [int(index) for index in indices if liked[index] == REFUSED]
        return {index: StepFailed(f"row {index}") for index in refused}

    def with_refusal(*arguments):
        refusing = Step(lambda request, _: request.sampling.presence_penalty == 1.0 or None, refuse)
        return (refusing, *make_steps(*arguments))

    monkeypatch.setattr(sampler, "pipeline_steps", with_refusal)


def logits_preferring(*tokens: int) -> torch.Tensor:
    """Make rows of logits whose highest ones are these tokens'."""
    logits = torch.zeros(len(tokens), VOCAB_SIZE)
    logits[range(len(tokens)), tokens] = 9.0
    return logits


def refusable(**fields):
    return make_request(presence_penalty=1.0, **fields)


def test_other_rows_get_their_tokens():
    rows = [Row(), Row(refusable()), Row(refusable()), Row(make_request(top_k=2))]
    output = decode_rows(logits_preferring(1, REFUSED, 2, 3), rows)
    assert output.token_ids == [(1,), (), (2,), (3,)]
    assert {slot: str(error) for slot, error in output.failures.items()} == {1: "row 1"}


def test_a_failed_rows_logits_do_not_affect_others(monkeypatch):
    output = decode_rows(
        logits_preferring(REFUSED, 2), [Row(refusable(top_p=0.5)), Row(make_request(top_p=0.5))]
    )
    assert output.token_ids[1] == (2,) and list(output.failures) == [0]


def test_a_failed_row_has_no_details():
    wanting = OutputOptions(return_log_probs=True, return_generation_logits=True)
    rows = [Row(refusable(output=wanting)), Row(refusable(output=wanting))]
    logits = logits_preferring(REFUSED, 2)
    output = decode_rows(logits.clone(), rows)
    assert list(output.failures) == [0] and list(output.details) == [1]
    assert output.details[1].logits == (logits[1].numpy().tobytes(),)


@pytest.mark.parametrize(
    ("liked", "expected"),
    [
        ((1, 2, REFUSED), None),  # the row after two accepted drafts
        ((REFUSED, 2, 3), None),
        ((1, 3, REFUSED), (1, 3)),  # after a rejected draft: the row would not have been computed
        ((4, REFUSED, REFUSED), (4,)),
    ],
)
def test_a_failed_row_after_drafts_counts_if_the_drafts_are_accepted(liked, expected):
    rows = [Row(refusable(), drafts=(1, 2)), Row()]
    output = decode_rows(logits_preferring(*liked, 2), rows)
    assert output.token_ids == [expected or (), (2,)]
    assert list(output.failures) == ([] if expected else [0])


def test_a_failed_row_of_a_search_fails_the_search():
    decoder = make_sampler(3, VOCAB_SIZE)
    search = refusable(beam_width=2)
    batch, positions = start_batch([Row(search), Row(search), Row()])
    batch = replace(batch, beam_groups=(BeamGroup((0, 1), (0.0, -1.0), 4),))
    decoder.apply(batch)
    output = decoder.decode(batch, logits_preferring(1, REFUSED, 2), positions)
    assert output.token_ids == [(), (), (2,)] and list(output.failures) == [1] and len(output.beams) == 1
