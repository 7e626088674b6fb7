"""Logits post-processors: their arguments, the effect of their changes, and their errors."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor

from inflight.core.request.request import OutputOptions, Request
from inflight.core.schedule.batch import (
    BeamGroup,
    BeamMove,
    ContextChunk,
    ModelOutput,
    ScheduledBatch,
    SlotStart,
)
from inflight.errors import ConfigError, StepFailed
from inflight.sampling import LogitsPostProcessors, reference
from inflight.sampling.logits_post_processors import takes_client_id
from tests.sampling.factories import Row, decode_rows, make_request, make_sampler, start_batch

VOCAB_SIZE = 12
INFINITY = float("inf")


def named(name: str = "p", request_id: int = 1, client_id: int = 0, **fields: Any) -> Request:
    """A request that names a post-processor."""
    request = make_request(**fields)
    return replace(request, request_id=request_id, client_id=client_id, logits_post_processor_name=name)


def some_logits(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def run(
    logits: Tensor, rows: Sequence[Row], batched: Callable | None = None, **functions: Callable
) -> ModelOutput:
    processors = LogitsPostProcessors(functions, batched)
    return decode_rows(logits, rows, make_sampler(len(rows), VOCAB_SIZE, processors=processors))


def only(*allowed: int) -> Callable:
    """Make a post-processor that bans all but some tokens, like TensorRT-LLM's example."""

    def process(req_id, logits, ids, stream_ptr, client_id):
        mask = torch.full_like(logits, -INFINITY)
        mask[:, :, list(allowed)] = 0
        logits += mask

    return process


def error_of(output: ModelOutput, slot: int = 0) -> str:
    assert type(output.failures[slot]) is StepFailed and not output.token_ids[slot]
    return str(output.failures[slot])


# ---------------------------------------------------------------------- arguments


def test_a_post_processor_gets_id_logits_tokens_stream_and_client_id() -> None:
    """The batch also has rows of requests with other post-processors and without one."""
    calls = []

    def note(req_id, logits, ids, stream_ptr, client_id):
        calls.append((req_id, logits.clone(), ids, stream_ptr, client_id))

    rows = [
        Row(make_request([5])),
        Row(named("note", 7, 3, prompt=[1, 2]), (3,)),
        Row(make_request([5], presence_penalty=1.0)),
        Row(named("note", 2**64 - 1, prompt=[4])),
    ]
    logits = some_logits(4)
    output = run(logits.clone(), rows, note=note)
    assert [(req_id, ids, stream, client) for req_id, _, ids, stream, client in calls] == [
        (7, [[1, 2, 3]], 0, 3),
        (2**64 - 1, [[4]], 0, None),
    ]
    for (_, given, *_), row in zip(calls, (1, 3), strict=True):
        assert torch.equal(given, logits[row][None, None])
    assert all(type(token) is int for token in calls[0][2][0])
    assert [tokens[0] for tokens in output.token_ids] == [
        reference.next_token(values.tolist(), row.request, row.tokens) for values, row in zip(logits, rows)
    ]


def test_a_processor_with_four_parameters_gets_no_client_id() -> None:
    calls = []
    run(some_logits(1), [Row(named(client_id=4))], p=lambda *four: None)
    run(some_logits(1), [Row(named(client_id=4))], p=lambda a, b, c, d: calls.append((a, d)))
    run(some_logits(1), [Row(named("batched", client_id=4))], lambda a, b, c, d: calls.append((a, d)))
    assert calls == [(1, 0), ([1], 0)]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a, b, c, d, e: None, True),
        (lambda a, b, c, d, e=None: None, True),
        (lambda a, b, c, d: None, False),
        (lambda *rest: None, True),
        (lambda a, b, c, d, *, verbose=False: None, False),
        (max, True),  # does not say
    ],
)
def test_the_client_id_is_given_to_functions_of_five_arguments(function: Callable, expected: bool) -> None:
    assert takes_client_id("p", function) == expected


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda a, b, c: None, "takes .a, b, c., expected .request id,"),
        (lambda a, b, c, d, e, f: None, "takes .*, expected"),
        (lambda a, b, c, d, *, must: None, "takes .*, expected"),
        (3, "is 3, expected a function"),
    ],
)
def test_an_object_that_is_not_callable_is_refused_at_load(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"'p' {message}"):
        LogitsPostProcessors({"p": function})
    with pytest.raises(ConfigError, match=f"'batched' {message}"):
        LogitsPostProcessors({}, function)


@pytest.mark.parametrize("name", ["", "batched", 3])
def test_reserved_and_empty_names_are_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="named"):
        LogitsPostProcessors({name: only(1)})


def test_names_list_the_processors_and_batched() -> None:
    assert LogitsPostProcessors().names == ()
    assert LogitsPostProcessors({"b": only(1), "a": only(2)}, lambda *five: None).names == (
        "b",
        "a",
        "batched",
    )


# ---------------------------------------------------------------------- effects


@pytest.mark.parametrize("returns", [False, True])
def test_a_processor_of_transformers_equals_the_control_of_that_name(returns: bool) -> None:
    """Each of several tokens equals that of a request with the control."""
    processor = NoRepeatNGramLogitsProcessor(2)

    def process(req_id, logits, ids, stream_ptr, client_id):
        changed = processor(torch.tensor(ids), logits[0].clone())[None]
        if returns:
            return changed
        logits.copy_(changed)
        return None

    sampler = make_sampler(2, 4, processors=LogitsPostProcessors({"p": process}))
    requests = [named(prompt=[1, 2]), make_request([1, 2], no_repeat_ngram_size=2)]
    batch, positions = start_batch([Row(request) for request in requests])
    sequences: list[list[int]] = [[], []]
    for step in range(12):
        sampler.apply(batch)
        logits = torch.randn(1, 4, generator=torch.Generator().manual_seed(step)).repeat(2, 1)
        output = sampler.decode(batch, logits, positions)
        for sequence, tokens in zip(sequences, output.token_ids, strict=True):
            sequence += tokens
        batch = ScheduledBatch(step + 1, generation_slots=(0, 1))
        positions = positions + 1
    assert sequences[0] == sequences[1] and len(sequences[0]) >= 10


def test_no_later_control_allows_a_token_that_a_processor_banned() -> None:
    controls = {
        "bias": [1e9] * VOCAB_SIZE,
        "repetition_penalty": 0.01,
        "presence_penalty": -100.0,
        "logit_bias_ids": (5,),
        "logit_bias_values": (1e20,),
        "prompt": [5, 5],
    }
    output = run(some_logits(2), [Row(named(**controls)), Row(named(**controls, top_k=5))], p=only(3, 4))
    assert set(sum(output.token_ids, ())) <= {3, 4}


def test_later_controls_see_the_processors_changes() -> None:
    """The post-processor allows two tokens, and the request's own ban leaves one of them."""
    output = run(some_logits(1), [Row(named(bad_words=[(3,)]))], p=only(3, 4))
    assert output.token_ids == [(4,)]


def test_a_row_whose_tokens_are_all_banned_has_no_token() -> None:
    request = named()
    output = run(some_logits(2), [Row(request), Row()], p=only())
    assert output.token_ids[0] == () and output.token_ids[1] and not output.failures
    assert request.banning_tensors == ["logits_post_processor_name"]


def test_log_probabilities_and_logits_are_the_models_own() -> None:
    wanted = OutputOptions(return_log_probs=True, num_top_log_probs=2, return_generation_logits=True)
    logits = some_logits(1)
    output = run(logits.clone(), [Row(named(output=wanted))], p=only(3))
    assert output.token_ids == [(3,)]
    details = output.details[0]
    assert details.logits == (logits[0].numpy().tobytes(),)
    assert details.log_probs == pytest.approx([float(logits[0].log_softmax(-1)[3])], abs=1e-5)
    assert details.top_log_probs[0].token_ids == tuple(logits[0].topk(2).indices.tolist())


# ---------------------------------------------------------------------- batched


@pytest.mark.parametrize("returns", ["nothing", "lists", "some"])
def test_the_batched_processor_gets_all_its_rows_in_one_call(returns: str) -> None:
    calls = []

    def process(req_ids, logits, ids, stream_ptr, client_ids):
        calls.append((req_ids, [list(each.shape) for each in logits], ids, stream_ptr, client_ids))
        changed = [torch.full_like(each, -INFINITY) for each in logits]
        for each, req_id in zip(changed, req_ids):
            each[:, :, req_id] = 1.0
        if returns == "lists":
            return changed
        for each, other in list(zip(logits, changed))[1 if returns == "some" else 0 :]:
            each.copy_(other)
        return (changed[0], *[None] * (len(logits) - 1)) if returns == "some" else None

    rows = [
        Row(named("batched", 4, prompt=[1])),
        Row(named("p", 9)),
        Row(named("batched", 6, 2, prompt=[2]), (3,)),
        Row(),
    ]
    output = run(some_logits(4), rows, process, p=only(8))
    shape = [1, 1, VOCAB_SIZE]
    assert calls == [([4, 6], [shape, shape], [[[1]], [[2, 3]]], 0, [None, 2])]
    assert output.token_ids[:3] == [(4,), (8,), (6,)]


def test_a_batched_processor_that_raises_fails_exactly_its_requests() -> None:
    def process(req_ids, logits, ids, stream_ptr, client_ids):
        raise KeyError("who")

    rows = [Row(named("batched")), Row(named("p")), Row(named("batched", 2)), Row()]
    output = run(some_logits(4), rows, process, p=only(8))
    assert error_of(output, 0) == error_of(output, 2)
    assert error_of(output) == (
        "the logits post-processor 'batched' raised KeyError: 'who'; the faulty one of this call's 2 requests "
        "is unknown, so all of them end"
    )
    assert output.token_ids[1] == (8,) and output.token_ids[3] and sorted(output.failures) == [0, 2]
    assert error_of(run(some_logits(1), rows[:1], process)).endswith("raised KeyError: 'who'")


@pytest.mark.parametrize("returned", [3, [], [None] * 3, torch.zeros(2)])
def test_a_batched_processor_that_returns_no_list_fails_its_requests(returned: Any) -> None:
    output = run(some_logits(2), [Row(named("batched")), Row(named("batched"))], lambda *five: returned)
    assert "expected None or a list of 2 tensors" in error_of(output, 0)
    assert "expected None or a list of 2 tensors" in error_of(output, 1)


def test_a_batched_processor_that_returns_one_wrong_shape_fails_one_request() -> None:
    output = run(
        some_logits(2),
        [Row(named("batched")), Row(named("batched"))],
        lambda ids, logits, *rest: [logits[0], torch.zeros(1)],
    )
    assert output.token_ids[0] and list(output.failures) == [1]
    assert error_of(output, 1) == (
        "the logits post-processor 'batched' returned a tensor [1], expected None or a tensor [1, 1, 12]"
    )


# ---------------------------------------------------------------------- errors


def raising(error: BaseException) -> Callable:
    def process(req_id, logits, ids, stream_ptr, client_id):
        logits.fill_(float("nan"))
        raise error

    return process


class WithoutText(BaseException):
    def __str__(self) -> str:
        raise RuntimeError


def resizing(req_id, logits, ids, stream_ptr, client_id):
    logits.resize_(1, 1, 3)


def replacing(req_id, logits, ids, stream_ptr, client_id):
    logits.set_(torch.zeros_like(logits))


def setting(value: float) -> Callable:
    def process(req_id, logits, ids, stream_ptr, client_id):
        logits[:, :, 2] = value

    return process


WRONG = [
    (raising(ValueError("no")), "raised ValueError: no"),
    (raising(SystemExit(3)), "raised SystemExit: 3"),
    (raising(torch.cuda.OutOfMemoryError("much")), "raised OutOfMemoryError: much"),
    (raising(asyncio.CancelledError()), "raised CancelledError: "),
    (raising(WithoutText()), "raised WithoutText: (its text raised RuntimeError)"),
    (raising(ValueError("x" * 3000)), f"raised ValueError: {'x' * 2000}…"),
    (
        lambda a, logits, *rest: logits > 0,
        "returned a tensor of torch.bool, expected logits: floating-point numbers",
    ),
    (lambda *five: sys, "returned a module, expected None or a tensor [1, 1, 12]"),
    (lambda *five: np.zeros((1, 1, 12)), "returned a ndarray, expected None or a tensor [1, 1, 12]"),
    (lambda a, logits, *rest: logits[0], "returned a tensor [1, 12], expected None or a tensor [1, 1, 12]"),
    (
        lambda *five: torch.zeros(1, 1, 13),
        "returned a tensor [1, 1, 13], expected None or a tensor [1, 1, 12]",
    ),
    (resizing, "left a tensor [1, 1, 3] in another place, expected [1, 1, 12] changed in place"),
    (replacing, "left a tensor [1, 1, 12] in another place, expected [1, 1, 12] changed in place"),
    (setting(float("nan")), "left a logit that is nan, expected numbers, or -inf to ban a token"),
    (setting(INFINITY), "left a logit that is inf, expected numbers, or -inf to ban a token"),
]


@pytest.mark.parametrize(("function", "message"), WRONG)
@pytest.mark.parametrize("sampling", [{}, {"top_k": 4, "presence_penalty": 1.0, "min_p": 0.1}])
def test_an_error_fails_only_its_row(
    function: Callable, message: str, sampling: dict, caplog: pytest.LogCaptureFixture
) -> None:
    logits = some_logits(4)
    rows = [Row(make_request([1])), Row(named("bad", **sampling)), Row(named("good", **sampling)), Row()]
    output = run(logits.clone(), rows, bad=function, good=only(7))
    assert error_of(output, 1) == f"the logits post-processor 'bad' {message}"
    assert list(output.failures) == [1] and output.token_ids[2] == (7,)
    logged = [record.getMessage() for record in caplog.records]
    assert logged == (
        [] if "left a logit" in message else ["the logits post-processor 'bad' failed for request 1"]
    )
    assert [output.token_ids[slot] for slot in (0, 3)] == [(int(logits[row].argmax()),) for row in (0, 3)]


def test_nan_logits_of_the_model_fail_the_batch_and_not_the_request() -> None:
    """The NaN comes from the model and not from the post-processor."""
    logits = some_logits(2)
    logits[1, 5] = float("nan")
    with pytest.raises(FloatingPointError, match="position 1 of slot 1"):
        run(logits, [Row(), Row(named())], p=raising(ValueError("nan")))


# ---------------------------------------------------------------------- drafts


def test_rows_after_drafts_are_processed_in_turn() -> None:
    calls = []

    def process(req_id, logits, ids, stream_ptr, client_id):
        calls.append(ids)
        return torch.nn.functional.one_hot(torch.tensor([[len(ids[0])]]), VOCAB_SIZE) * 1.0

    rows = [Row(named(prompt=[9, 8]), (7,), drafts=(3, 4, 11)), Row(named(prompt=[1]))]
    output = run(some_logits(5), rows, p=process)
    assert calls == [[[9, 8, 7]], [[9, 8, 7, 3]], [[9, 8, 7, 3, 4]], [[9, 8, 7, 3, 4, 11]], [[1]]]
    assert output.token_ids == [(3, 4, 5), (1,)]  # the draft 11 is rejected


@pytest.mark.parametrize(("drafts", "expected"), [((3, 4), None), ((3, 5), (3, 4)), ((2, 4), (3,))])
def test_an_error_after_a_rejected_draft_is_ignored(
    drafts: tuple[int, int], expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A post-processor may raise for tokens that it has banned; this is not logged either."""

    def process(req_id, logits, ids, stream_ptr, client_id):
        if len(ids[0]) == 5:
            raise ValueError("too long")
        logits.fill_(0.0)
        logits[..., len(ids[0])] = 1.0

    output = run(some_logits(3), [Row(named(prompt=[9, 8, 7]), drafts=drafts)], p=process)
    assert output.token_ids == [expected or ()] and bool(output.failures) == (expected is None)
    assert not caplog.records


def test_rows_after_drafts_have_batched_calls_of_their_own() -> None:
    calls = []

    def process(req_ids, logits, ids, stream_ptr, client_ids):
        calls.append((req_ids, ids))
        if any(10 in tokens for beams in ids for tokens in beams):
            raise ValueError("ten")
        for each in logits:
            each[..., 3] = 100.0

    rows = [Row(named("batched", 1), drafts=(3, 10)), Row(named("batched", 2))]
    output = run(some_logits(4), rows, process)
    assert calls == [([1, 2], [[[0]], [[0]]]), ([1], [[[0, 3]]]), ([1], [[[0, 3, 10]]])]
    assert output.token_ids == [(3, 3), (3,)] and not output.failures


@pytest.mark.parametrize("threshold", [None, 0.0])
def test_drafts_with_logits_never_yield_a_banned_token(threshold: float | None) -> None:
    draft_logits = torch.zeros(2, VOCAB_SIZE)
    request = named(
        prompt=[1], drafts=(3, 4), draft_logits=draft_logits, threshold=threshold, top_k=VOCAB_SIZE
    )
    output = run(some_logits(3), [Row(request, drafts=(3, 4))], p=only(3, 5))
    assert set(output.token_ids[0]) <= {3, 5} and output.token_ids[0]


# ---------------------------------------------------------------------- beams


def test_all_beams_of_a_search_are_processed_in_one_call() -> None:
    """Moves swap two beams and copy a third, between other rows."""
    calls: list[tuple[list[int], list[list[int]]]] = []

    def process(req_id, logits, ids, stream_ptr, client_id):
        calls.append((list(logits.shape), ids))
        for beam, tokens in enumerate(ids):
            logits[0, beam, tokens[-1]] = -INFINITY

    sampler = make_sampler(4, VOCAB_SIZE, processors=LogitsPostProcessors({"p": process}))
    request, prompt = named(prompt=(1, 2), beam_width=3), (1, 2)
    start = SlotStart(0, request, 0, prompt)
    batch = ScheduledBatch(
        0,
        starts=(start,),
        context=(ContextChunk(0, 0, prompt, True),),
        beam_groups=(BeamGroup((0,), (0.0,), 6),),
    )
    sampler.apply(batch)
    output = sampler.decode(batch, some_logits(1), np.array([2]))
    assert calls.pop() == ([1, 1, VOCAB_SIZE], [[1, 2]]) and 2 not in output.beams[0].token_ids
    sequences = {0: list(prompt)}
    for step, moves in enumerate([[(0, 0, 5), (1, 0, 6), (2, 0, 7)], [(0, 1, 8), (1, 0, 9), (2, 0, 4)]]):
        sequences = {slot: [*sequences[parent], token] for slot, parent, token in moves}
        other = SlotStart(3, named(request_id=9, prompt=(3,)), 0, (3, *[0] * step))
        group = BeamGroup((0, 1, 2), (-1.0, -2.0, -3.0), 3 * VOCAB_SIZE)
        batch = ScheduledBatch(
            step + 1,
            released_slots=(3,),
            starts=(other,),
            moves=tuple(BeamMove(*move) for move in moves),
            generation_slots=(3, 0, 1, 2),
            beam_groups=(group,),
        )
        sampler.apply(batch)
        output = sampler.decode(batch, some_logits(4, step), np.array([1 + step, *[3 + step] * 3]))
        beams = list(sequences.values())
        assert calls[-2:] == [([1, 1, VOCAB_SIZE], [list(other.token_ids)]), ([1, 3, VOCAB_SIZE], beams)]
        found = output.beams[0]
        impossible = {
            (row, token) for row, token, s in zip(found.rows, found.token_ids, found.scores) if s == -INFINITY
        }
        assert impossible == {(row, tokens[-1]) for row, tokens in enumerate(beams)}


def test_only_the_search_whose_call_fails_ends() -> None:
    sampler = make_sampler(3, VOCAB_SIZE, processors=LogitsPostProcessors({"p": raising(ValueError("no"))}))
    batch, positions = start_batch([Row(named(beam_width=2)), Row()])
    batch = replace(batch, beam_groups=(BeamGroup((0,), (0.0,), 4),))
    sampler.apply(batch)
    output = sampler.decode(batch, some_logits(2), positions)
    assert (
        error_of(output, 0).endswith("raised ValueError: no")
        and output.token_ids[1]
        and len(output.beams) == 1
    )
