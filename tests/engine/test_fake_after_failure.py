"""The fake engine continues after an exception, too: every sequence has the same tokens as alone."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.config import SchedulingConfig
from inflight.core.request.request import ExternalDraft, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import ContextChunk, EngineLimits, ScheduledBatch, SlotStart
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.fake_model import expected_beams, expected_tokens
from tests.engine.failing import Fault, Saboteur, serve_through_faults

VOCAB_SIZE = 40
LIMITS = EngineLimits(VOCAB_SIZE, 128, max_num_sequences=8, num_blocks=60, tokens_per_block=4)
CONFIG = SchedulingConfig(max_num_tokens=16, enable_chunked_context=True, max_beam_width=3)
SAMPLED = SamplingConfig(temperature=0.9, top_p=0.8, random_seed=3)
LOOKING_BACK = SamplingConfig(repetition_penalty=1.3)
DETAILS = OutputOptions(return_log_probs=True, return_context_logits=True)

# function, whether it raises after its work, number of calls before that
STAGES = [
    ("_forward", False, 0),
    ("_apply", False, 0),
    ("_move", True, 0),
    ("_apply", True, 0),
    ("_run_chunk", True, 0),
    ("_run_token", False, 3),
    ("_run_token", True, 5),
    ("_forward", True, 0),
    ("_decode", False, 0),
    ("_choose", True, 0),
    ("_choose", True, 1),
    ("_details", True, 0),
    ("_candidates", True, 0),
    ("_context_details", True, 0),
    ("_decode", True, 0),
]


def make_requests() -> list[Request]:
    """Return requests of every kind for which the engine keeps state; some prompts share a prefix."""
    kinds: list[dict[str, Any]] = [
        {"output": DETAILS},
        {"sampling": SAMPLED, "streaming": True},
        {"sampling": SamplingConfig(beam_width=3, repetition_penalty=1.3)},
        {"sampling": LOOKING_BACK},
        {"draft": ExternalDraft((1, 2, 3)), "sampling": LOOKING_BACK},
        {"sampling": SamplingConfig(beam_width=2)},
    ]
    return [
        Request(number, (*range(9), *range(number, 2 * number + 3)), 14, **kind)
        for number, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(("name", "after", "skipped_calls"), STAGES)
@pytest.mark.parametrize("period", [3, 7])
def test_tokens_are_those_of_a_request_alone(
    name: str, after: bool, skipped_calls: int, period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(LIMITS)
    saboteur = Saboteur(monkeypatch, engine, name, after, skipped_calls)
    requests = make_requests()
    served = serve_through_faults(engine, CONFIG, requests, saboteur, period)
    assert saboteur.num_faults > 0, "nothing failed"
    for request in requests:
        length = request.prompt_length
        tokens = [list(ids) for ids in served[request.request_id, 0].output_token_ids]
        found = [ids if request.streaming else ids[length:] for ids in tokens]
        if request.sampling.uses_beams:
            expected = [list(beam.token_ids) for beam in expected_beams(request, VOCAB_SIZE)]
        else:
            expected = [expected_tokens(request.input_token_ids, 14, VOCAB_SIZE, request.sampling)]
        assert found == expected


def test_a_batch_that_continues_a_failed_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(LIMITS)
    saboteur = Saboteur(monkeypatch, engine, "_forward", after=False)
    start, chunk = SlotStart(0, Request(1, (1, 2), 5)), ContextChunk(0, 0, (1, 2), True)
    batch = ScheduledBatch(0, starts=(start,), new_blocks=((0, (0,)),), context=(chunk,))
    engine.decode(batch, engine.forward(batch))
    carries_on = ScheduledBatch(1, generation_slots=(0,))
    saboteur.arm()
    with pytest.raises(Fault):
        engine.forward(carries_on)
    with pytest.raises(KeyError):
        engine.forward(carries_on)
    engine.forward(batch)  # restarts slots that were not released
