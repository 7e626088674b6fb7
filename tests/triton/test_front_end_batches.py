"""Requests with several prompts, several sequences or stop strings have one ending."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from inflight.core.request.response import Response
from inflight.core.request.stop import FinishReason, StopReason
from inflight.errors import ConfigError, Unavailable
from inflight.serving.completion_text import TokenizerFinder
from inflight.tensors.reader import TensorReader
from inflight.tensors.spec import Vocabulary
from inflight.triton.front_end import FrontEnd
from tests.tensors.factories import make_result, text_inputs, token_inputs
from tests.triton.factories import FakeEngineClient, make_model_args, make_triton_request
from tests.triton.fake_pb_utils import TritonError
from tests.triton.letters import letter_tokenizer
from tests.triton.stage import Stage, error_of, value_of

LENGTH = FinishReason.LENGTH


@pytest.fixture
def decoupled() -> Iterator[Stage]:
    stage = Stage()
    stage.client.answers_stops = False
    yield stage
    stage.front_end.close()


@pytest.fixture
def in_one() -> Iterator[Stage]:
    stage = Stage(decoupled=False)
    stage.client.answers_stops = False
    yield stage
    stage.front_end.close()


def batch(**tensors: object) -> dict[str, np.ndarray]:
    given: dict[str, object] = {
        "input_ids": [[5, 6], [7, 8]],
        "request_output_len": np.array([4, 4], np.int32),
        "exclude_input_in_output": np.array([True, True]),
    }
    return token_inputs(**(given | tensors))


def answer(stage: Stage, engine_id: int, ids: list[int], final: bool = True, **result: object) -> None:
    made = make_result(ids, LENGTH if final else FinishReason.NOT_FINISHED, **result)
    stage.client.respond(Response(engine_id, made, is_final=final))


def ids_of(text: str) -> list[int]:
    return letter_tokenizer().encode(text)


def test_each_prompt_of_a_batch_is_a_request_with_tagged_responses(decoupled: Stage) -> None:
    sender = decoupled.take(make_triton_request(batch()))
    first, second = decoupled.client.submitted
    assert [r.input_token_ids for r in decoupled.client.submitted.values()] == [(5, 6), (7, 8)]
    answer(decoupled, second, [20])
    answer(decoupled, first, [10])
    sent = sender.wait_final()
    assert [value_of(one, "batch_index") for one in sent] == [[1], [0]]
    assert [value_of(one, "output_ids") for one in sent] == [[20], [10]]
    assert [one.is_final for one in sent] == [False, True]


def test_a_batch_has_one_response_if_not_decoupled(in_one: Stage) -> None:
    sender = in_one.take(make_triton_request(batch()))
    first, second = in_one.client.submitted
    answer(in_one, second, [20, 21])
    answer(in_one, first, [10])
    (sent,) = sender.wait_final()
    assert sent.response is not None
    assert sent.response.arrays()["output_ids"].tolist() == [[[10, -1]], [[20, 21]]]
    assert sent.response.arrays()["batch_index"].tolist() == [[0], [1]]


def test_two_requests_of_one_call_are_not_a_batch(decoupled: Stage) -> None:
    requests = [make_triton_request(), make_triton_request()]
    decoupled.front_end.execute(requests)
    for engine_id in list(decoupled.client.submitted):
        answer(decoupled, engine_id, [8])
    for request in requests:
        (sent,) = request.sender.wait_final()
        assert sent.response is not None and "batch_index" not in sent.response.arrays()


def test_an_invalid_row_refuses_the_whole_batch(decoupled: Stage) -> None:
    sender = decoupled.take(make_triton_request(batch(request_output_len=np.array([4, 0], np.int32))))
    code, message = error_of(sender.wait_final()[0])
    assert code == TritonError.INVALID_ARG
    assert message.startswith("row 1 of the batch: request_output_len must be at least 1, got 0")
    assert not decoupled.client.submitted


def test_a_stop_reaches_every_prompt_of_a_batch(decoupled: Stage) -> None:
    decoupled.client.answers_stops = True
    stopped = decoupled.take(make_triton_request(batch(), request_id="a"))
    rows = token_inputs(
        input_ids=[[0], [0]],
        request_output_len=np.zeros(2, np.int32),
        stop=np.array([False, True]),
    )
    decoupled.take(make_triton_request(rows, request_id="a"))
    sent = stopped.wait_final()
    assert [value_of(one, "finish_reason") for one in sent] == [[b"CANCELLED"]] * 2
    assert [one.is_final for one in sent] == [False, True]
    assert len(decoupled.client.stopped) == 2


def test_a_batch_is_answered_once_when_the_engine_is_lost(decoupled: Stage) -> None:
    sender = decoupled.take(make_triton_request(batch()))
    for engine_id in list(decoupled.client.submitted):
        decoupled.client.respond(Response(engine_id, error=Unavailable("gone"), is_final=True))
    assert error_of(sender.wait_final()[-1]) == (TritonError.UNAVAILABLE, "gone")
    assert len(sender.sent) == 1


def test_sequences_have_separate_tagged_responses(decoupled: Stage) -> None:
    inputs = token_inputs(num_return_sequences=2, runtime_top_k=5, exclude_input_in_output=True)
    sender = decoupled.take(make_triton_request(inputs))
    engine_id = decoupled.client.last_id
    decoupled.client.respond(Response(engine_id, make_result([9], LENGTH, sequence_index=1)))
    answer(decoupled, engine_id, [7, 8], sequence_index=0)
    sent = sender.wait_final()
    assert [value_of(one, "sequence_index") for one in sent] == [[1], [0]]
    assert [value_of(one, "output_ids") for one in sent] == [[9], [7, 8]]
    assert [one.is_final for one in sent] == [False, True]


def test_sequences_are_rows_of_one_response_if_not_decoupled(in_one: Stage) -> None:
    inputs = token_inputs(num_return_sequences=2, runtime_top_k=5, exclude_input_in_output=True)
    sender = in_one.take(make_triton_request(inputs))
    engine_id = in_one.client.last_id
    not_last = Response(engine_id, make_result([9], LENGTH, sequence_index=1))
    in_one.client.respond(not_last)
    answer(in_one, engine_id, [7, 8], sequence_index=0)
    (sent,) = sender.wait_final()
    assert sent.response is not None
    assert sent.response.arrays()["output_ids"].tolist() == [[[7, 8], [9, -1]]]
    assert sent.response.arrays()["text_output"].tolist() == [b"hi", b"j"]
    assert "sequence_index" not in sent.response.arrays()


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stop_string_ends_text_and_ids(decoupled: Stage, streaming: bool) -> None:
    decoupled.client.answers_stops = True
    inputs = token_inputs(
        stop_words=[[b"de"]], streaming=streaming, exclude_input_in_output=True, input_ids=[ids_of("ab")]
    )
    sender = decoupled.take(make_triton_request(inputs))
    engine_id = decoupled.client.last_id
    assert decoupled.client.submitted[engine_id].streaming
    answer(decoupled, engine_id, ids_of("cdef"), final=False)
    sent = sender.wait_final()
    assert decoupled.client.stopped == [(engine_id, StopReason.STOP_WORDS, 0)]
    assert len(sent) == (2 if streaming else 1)
    assert [token for one in sent for token in value_of(one, "output_ids")] == ids_of("cde")
    assert b"".join(value_of(one, "text_output")[0] for one in sent) == b"c"
    assert {value_of(one, "finish_reason")[0] for one in sent} == {b"STOP_WORDS"}


def test_a_stop_string_works_without_text_outputs(in_one: Stage) -> None:
    in_one.client.answers_stops = True
    inputs = token_inputs(stop_words=[[b"d"]], exclude_input_in_output=True)
    sender = in_one.take(make_triton_request(inputs, outputs=frozenset({"output_ids"})))
    answer(in_one, in_one.client.last_id, ids_of("cdef"), final=False)
    (sent,) = sender.wait_final()
    assert sent.response is not None
    assert {name: value.tolist() for name, value in sent.response.arrays().items()} == {
        "output_ids": [[ids_of("cd")]]
    }


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (token_inputs(), frozenset({"text_output"})),
        (token_inputs(stop_words=[[b"x"]]), frozenset({"output_ids"})),
        (token_inputs(bad_words=[[b"x"]]), frozenset({"output_ids"})),
    ],
    ids=["text_output", "stop_words", "bad_words"],
)
def test_text_options_without_a_tokenizer_are_refused(
    inputs: dict[str, np.ndarray], outputs: frozenset[str]
) -> None:
    def fail(directory: str) -> None:
        raise ConfigError(f"{directory} has no tokenizer.json")

    stage, client = Stage(), FakeEngineClient()
    front_end = FrontEnd(
        stage.pb_utils,
        client,
        client.close,
        make_model_args(),
        TokenizerFinder("nowhere", fail),
    )
    request = make_triton_request(inputs, outputs=outputs)
    front_end.execute([request])
    code, message = error_of(request.sender.wait_final()[0])
    assert code == TritonError.UNSUPPORTED and "nowhere has no tokenizer.json" in message
    assert not client.submitted
    front_end.close()
    stage.front_end.close()


def test_bad_words_reach_the_engine_as_token_ids() -> None:
    stage = Stage(Vocabulary.TEXT)
    stage.take(make_triton_request(text_inputs(bad_words=[[b"ab"]])))
    assert tuple(ids_of("ab")) in stage.client.submitted[stage.client.last_id].bad_words
    stage.front_end.close()


def test_a_response_too_large_to_be_sent_is_refused_at_once(decoupled: Stage) -> None:
    def refuse(*args: object) -> int:
        raise Unavailable("no room in /dev/shm")

    decoupled.front_end._budget.reserve = refuse
    sender = decoupled.take(make_triton_request())
    assert error_of(sender.wait_final()[0]) == (TritonError.UNAVAILABLE, "no room in /dev/shm")
    assert not decoupled.client.submitted


def test_the_reservation_covers_the_prompts_of_a_batch_that_is_not_streamed(decoupled: Stage) -> None:
    """The response needs room for the prompt's logits of two beams, which a stream does not return."""
    reserved: list[bool] = []

    def reserve(requests: object, vocab_size: int, streaming: bool, in_one: bool, offered) -> int:
        reserved.append(streaming)
        raise Unavailable("enough seen")

    decoupled.front_end._budget.reserve = reserve
    for streamed in ([True, False], [True, True], [False, True]):
        decoupled.take(make_triton_request(batch(streaming=np.array(streamed)))).wait_final()
    assert reserved == [False, True, False]


@pytest.mark.parametrize("long", [False, True])
def test_the_rows_of_a_batch_are_read_once(
    decoupled: Stage, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    read, rows = [], TensorReader.rows

    def counted(reader: TensorReader) -> list[TensorReader]:
        read.append(reader)
        return rows(reader)

    monkeypatch.setattr(TensorReader, "rows", counted)
    words = np.full([2, 20], b"ab", np.object_)  # so many that they are not tokenized in execute
    sender = decoupled.take(make_triton_request(batch(**({"bad_words": words} if long else {}))))
    decoupled.front_end.close()
    assert sender.wait_final() and len(read) == 1
