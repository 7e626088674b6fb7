"""The fake device compared with its definition, on handwritten batches."""

from __future__ import annotations

import math
from array import array

import pytest

from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import (
    AdapterLoad,
    BeamGroup,
    BeamMove,
    ContextChunk,
    EngineLimits,
    ModelOutput,
    ScheduledBatch,
    SlotStart,
)
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.fake_model import (
    PLAIN,
    Conditions,
    expected_beam_steps,
    expected_log_probs,
    expected_logits,
    expected_tokens,
    log_softmax,
)
from inflight.testing.small_inputs import make_adapter, make_table

VOCAB_SIZE = 31
ADAPTER, TABLE = make_adapter(rank=10), make_table()
PROMPT = (3, 1, 4, 1, 5)
EVERYTHING = OutputOptions(
    return_log_probs=True,
    num_top_log_probs=3,
    return_prompt_log_probs=True,
    return_context_logits=True,
    return_generation_logits=True,
)


def make_engine(attend_to_all: bool = True) -> FakeEngine:
    return FakeEngine(
        EngineLimits(VOCAB_SIZE, 64, 4, 12, 4, num_adapter_pages=4), attend_to_all=attend_to_all
    )


def make_request(**fields) -> Request:
    return Request(1, PROMPT, 8, **fields)


def run(engine: FakeEngine, **fields) -> ModelOutput:
    batch = ScheduledBatch(0, **fields)
    return engine.decode(batch, engine.forward(batch))


def start(
    engine: FakeEngine,
    request: Request,
    drafts: tuple[int, ...] = (),
    load: AdapterLoad | None = None,
    **fields,
) -> ModelOutput:
    """Make a batch with the whole prompt and drafts in slot 0 and blocks 0 to 3, and its adapter loaded."""
    chunk = ContextChunk(0, 0, PROMPT + drafts, True, len(drafts), wants_context=request.output.wants_context)
    token_ids = PROMPT if request.looks_back else ()
    index, adapter = fields.pop("sequence_index", 0), load.pages[0] if load else -1
    starts = (SlotStart(0, request, index, token_ids, adapter),)
    loads = (load,) if load else ()
    blocks = ((0, (0, 1, 2, 3)),)
    return run(engine, starts=starts, adapter_loads=loads, new_blocks=blocks, context=(chunk,), **fields)


@pytest.mark.parametrize("attend_to_all", [True, False])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(top_k=3, random_seed=4),
        SamplingConfig(repetition_penalty=1.5),
        SamplingConfig(top_p=0.5, no_repeat_ngram_size=2),
    ],
)
def test_tokens_are_those_of_the_definition(sampling, attend_to_all):
    engine, request = make_engine(attend_to_all), make_request(sampling=sampling)
    tokens = list(start(engine, request, sequence_index=2).token_ids[0])
    while len(tokens) < 6:
        tokens += run(engine, generation_slots=(0,)).token_ids[0]
    assert tokens == expected_tokens(PROMPT, 6, VOCAB_SIZE, sampling, attend_to_all, sequence_index=2)
    assert sampling.greedy or tokens != expected_tokens(PROMPT, 6, VOCAB_SIZE, sampling, attend_to_all)


@pytest.mark.parametrize(
    "conditions",
    [
        Conditions(PrefixIdentity(cache_salt_id=1)),
        Conditions(PrefixIdentity(extra_ids=(0, 0, 7, 0, 0))),
        Conditions(adapter=ADAPTER.digest),
        Conditions(prompt_table=TABLE.digest),
    ],
)
def test_another_identity_gives_other_tokens(conditions):
    """A block that is wrongly shared across identities, adapters or tables must give wrong tokens."""
    table = TABLE if conditions.prompt_table else None
    request = make_request(identity=conditions.identity, prompt_table=table, output=EVERYTHING)
    engine = make_engine()
    output = start(engine, request, load=AdapterLoad(ADAPTER, (3, 1)) if conditions.adapter else None)
    tokens = list(output.token_ids[0])
    while len(tokens) < 6:
        tokens += run(engine, generation_slots=(0,)).token_ids[0]
    assert tokens == expected_tokens(PROMPT, 6, VOCAB_SIZE, conditions=conditions)
    assert tokens != expected_tokens(PROMPT, 6, VOCAB_SIZE)
    logits = [
        expected_logits(PROMPT[:1], (*PROMPT[1:], 0), VOCAB_SIZE, conditions=which)
        for which in (conditions, PLAIN)
    ]
    assert output.context[0].logits == b"".join(values.tobytes() for values in logits[0])
    assert [one == other for one, other in zip(*logits)] == [conditions.identity.extra_ids != ()] * 2 + [
        False
    ] * 3


def test_an_adapter_that_is_overwritten_gives_other_tokens():
    for pages in ((3, 1), (1, 0), (3,)):
        engine = make_engine()
        start(engine, make_request(), load=AdapterLoad(ADAPTER, (3, 1)))
        other = make_adapter(2, rank=8 * len(pages))
        tokens = [
            *run(engine, generation_slots=(0,)).token_ids[0],
            *run(engine, adapter_loads=(AdapterLoad(other, pages),), generation_slots=(0,)).token_ids[0],
            *run(engine, generation_slots=(0,)).token_ids[0],
        ]
        alone = expected_tokens(PROMPT, 4, VOCAB_SIZE, conditions=Conditions(adapter=ADAPTER.digest))[1:]
        assert tokens[0] == alone[0] and tokens != alone


@pytest.mark.parametrize("num_right", range(4))
def test_drafts_are_accepted_up_to_the_first_wrong_token(num_right):
    sampling = SamplingConfig(top_k=5, repetition_penalty=1.5)
    expected = expected_tokens(PROMPT, 8, VOCAB_SIZE, sampling)
    drafts = [*expected[:num_right], *((token + 1) % VOCAB_SIZE for token in expected[num_right:3])]
    engine = make_engine()
    tokens = list(start(engine, make_request(sampling=sampling), tuple(drafts)).token_ids[0])
    assert len(tokens) == num_right + 1
    while len(tokens) < 8:
        tokens += run(engine, generation_slots=(0,)).token_ids[0]
    assert tokens == expected


def test_details_agree_with_one_another():
    engine, request = make_engine(), make_request(output=EVERYTHING)
    guess = tuple(expected_tokens(PROMPT, 2, VOCAB_SIZE))
    output = start(engine, request, guess)
    tokens, details = output.token_ids[0], output.details[0]
    assert len(tokens) == len(details.log_probs) == len(details.top_log_probs) == len(details.logits) == 3
    assert list(details.log_probs) == expected_log_probs(PROMPT, tokens, VOCAB_SIZE)
    for token, log_prob, top, data in zip(
        tokens, details.log_probs, details.top_log_probs, details.logits, strict=True
    ):
        logits = array("f", data)
        assert max(range(VOCAB_SIZE), key=logits.__getitem__) == token, "greedy is the likeliest"
        assert sorted(logits)[-2] < max(logits), "and without a tie"
        assert log_softmax(logits)[token] == log_prob
        assert sum(map(math.exp, log_softmax(logits))) == pytest.approx(1.0)
        assert (top.token_ids[0], top.log_probs[0]) == (token, log_prob)
        assert list(top.log_probs) == sorted(log_softmax(logits), reverse=True)[:3]


def test_context_outputs_have_the_prompts_rows():
    engine, request = make_engine(), make_request(output=EVERYTHING)
    context = start(engine, request, (1, 2)).context[0]
    logits = expected_logits(PROMPT[:1], (*PROMPT[1:], 0), VOCAB_SIZE)
    assert context.logits == b"".join(values.tobytes() for values in logits)
    assert list(context.log_probs) == expected_log_probs(PROMPT[:1], PROMPT[1:], VOCAB_SIZE)


def test_a_chunk_in_the_middle_has_the_log_prob_of_the_next_token():
    engine, request = make_engine(), make_request(output=EVERYTHING)
    chunk = ContextChunk(0, 0, PROMPT[:4], is_last=False, wants_context=True)
    starts = (SlotStart(0, request, 0, PROMPT),)
    output = run(engine, starts=starts, new_blocks=((0, (0,)),), context=(chunk,))
    assert output.token_ids == [] and len(output.context[0].log_probs) == 4


def test_outputs_that_are_not_requested_are_empty():
    output = start(make_engine(), make_request())
    assert output.details == {} and output.context == {} and output.beams == []


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_beams_move_all_at_once_and_write_into_copies(penalty):
    """Two steps of a search whose beams swap their places."""
    sampling = SamplingConfig(beam_width=2, repetition_penalty=penalty)
    request = make_request(sampling=sampling, output=OutputOptions(return_log_probs=True))
    engine = make_engine()
    output = start(engine, request, beam_groups=(BeamGroup((0,), (0.0,), 4),))
    first = output.beams[0]
    assert output.token_ids == [()] and first.rows == (0, 0, 0, 0)
    assert [(token,) for token in first.token_ids[:2]] == [
        beam.token_ids for beam in expected_beam_steps(request, VOCAB_SIZE)[0]
    ]
    group = BeamGroup((0, 1), first.scores[:2], 4)
    output = run(
        engine,
        block_copies=((1, 4),),
        moves=(BeamMove(0, 0, first.token_ids[0]), BeamMove(1, 0, first.token_ids[1])),
        replaced_blocks=((1, 1, 4),),
        generation_slots=(0, 1),
        beam_groups=(group,),
    )
    straight = output.beams[0]
    crossed = run(
        engine,
        block_copies=((1, 5), (4, 6)),
        moves=(BeamMove(0, 1, 7), BeamMove(1, 0, 8)),
        replaced_blocks=((1, 1, 5), (0, 1, 6)),
        generation_slots=(0, 1),
        beam_groups=(group,),
    ).beams[0]
    paths = [(*PROMPT, first.token_ids[1], 7), (*PROMPT, first.token_ids[0], 8)]
    for row, token, log_prob in zip(crossed.rows, crossed.token_ids, crossed.log_probs, strict=True):
        assert expected_log_probs(paths[row], (token,), VOCAB_SIZE) == [log_prob]
    assert straight != crossed
    if penalty == 1.0:
        assert all(
            score == group.scores[row] + log_prob
            for row, score, log_prob in zip(crossed.rows, crossed.scores, crossed.log_probs)
        )


def test_a_diversity_rate_changes_only_the_rank():
    request = make_request(sampling=SamplingConfig(beam_width=2, beam_search_diversity_rate=100.0))
    plain = make_request(sampling=SamplingConfig(beam_width=2))
    ranked = []
    for each in (request, plain):
        engine = make_engine()
        start(engine, each)
        beams = run(
            engine,
            block_copies=((1, 4),),
            moves=(BeamMove(0, 0, 7), BeamMove(1, 0, 8)),
            replaced_blocks=((1, 1, 4),),
            generation_slots=(0, 1),
            beam_groups=(BeamGroup((0, 1), (-1.0, -9.0), 4),),
        ).beams[0]
        ranked.append((beams.rows, beams.scores[0] < -9.0))
    assert ranked == [((1, 1, 1, 1), True), ((0, 0, 0, 0), False)]
