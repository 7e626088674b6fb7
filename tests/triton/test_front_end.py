"""A serving model between fake Triton requests and a fake engine: every path ends with one final response."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from inflight.core.request.adapter import LoraRequest
from inflight.core.request.response import Response
from inflight.core.request.stop import StopReason
from inflight.errors import ConfigError, StepFailed, Unavailable
from inflight.serving.completion_text import TokenizerFinder
from inflight.tensors.spec import Vocabulary
from inflight.triton.front_end import FrontEnd
from tests.tensors.factories import ALL_OUTPUTS, make_description, text_inputs, token_inputs
from tests.text.tiny_tokenizers import tokenizer
from tests.triton.factories import make_model_args, make_parameters, make_response, make_triton_request
from tests.triton.fake_pb_utils import InferenceRequest, TritonError
from tests.triton.letters import letter_tokenizer
from tests.triton.stage import Stage, error_of, value_of

Build = Callable[..., "Stage"]


@pytest.fixture
def build() -> Iterator[Build]:
    stages: list[Stage] = []

    def make(*args: object, **kwargs: object) -> Stage:
        stages.append(Stage(*args, **kwargs))
        return stages[-1]

    yield make
    for stage in stages:
        stage.front_end.close()


def ids_of(text: str) -> list[int]:
    return letter_tokenizer().encode(text)


def test_a_prompt_of_ids_is_answered_with_ids(build: Build) -> None:
    stage = build()
    sender = stage.take(make_triton_request())
    assert stage.client.submitted[stage.client.last_id].input_token_ids == (5, 6, 7)
    stage.finish([5, 6, 7, 8, 9], num_output_tokens=(2,))
    (sent,) = sender.wait_final()
    assert value_of(sent, "output_ids") == [5, 6, 7, 8, 9]
    assert value_of(sent, "finish_reason") == [b"LENGTH"]


def test_a_text_prompt_is_answered_with_text_that_starts_with_it(build: Build) -> None:
    stage = build(Vocabulary.TEXT)
    sender = stage.take(make_triton_request(text_inputs(text_input=b"ab")))
    assert stage.client.submitted[stage.client.last_id].end_ids == (2, 3)
    stage.finish(ids_of("cd"))
    assert value_of(sender.wait_final()[0], "text_output") == [b"abcd"]


def test_exclude_input_in_output_leaves_the_prompt_out_of_the_text(build: Build) -> None:
    stage = build(Vocabulary.TEXT, exclude_input_in_output="true")
    sender = stage.take(make_triton_request(text_inputs(text_input=b"ab")))
    stage.finish(ids_of("cd"))
    assert value_of(sender.wait_final()[0], "text_output") == [b"cd"]


def test_a_prompt_of_ids_is_answered_with_text_if_requested(build: Build) -> None:
    stage = build()
    prompt = ids_of("ab")
    sender = stage.take(make_triton_request(token_inputs(input_ids=[prompt])))
    stage.finish([*prompt, *ids_of("cd")], num_output_tokens=(2,))
    assert value_of(sender.wait_final()[0], "text_output") == [b"abcd"]


def test_streamed_texts_together_are_the_completion(build: Build) -> None:
    stage = build(Vocabulary.TEXT)
    sender = stage.take(make_triton_request(text_inputs(text_input=b"ab", stream=True)))
    for letter in "cde":
        stage.client.respond(make_response(stage.client.last_id, ids_of(letter)))
    stage.finish([])
    texts = [value_of(sent, "text_output")[0] for sent in sender.wait_final()]
    assert b"".join(texts) == b"cde"


def test_text_is_not_decoded_unless_requested(build: Build) -> None:
    stage = build()
    sender = stage.take(make_triton_request(outputs=ALL_OUTPUTS - {"text_output"}))
    stage.finish([8])
    assert "text_output" not in sender.wait_final()[0].response.arrays()


def test_without_a_tokenizer_ids_are_served_and_text_is_refused() -> None:
    def fail(directory: str) -> None:
        raise ConfigError(f"{directory} has no tokenizer.json")

    stage = Stage()
    finder = TokenizerFinder(None, fail)
    front_end = FrontEnd(
        stage.pb_utils,
        stage.client,
        stage.client.close,
        make_model_args(),
        finder,
    )
    by_text = make_triton_request(token_inputs(input_ids=None, text_input=b"ab"))
    by_ids = make_triton_request()
    front_end.execute([by_text, by_ids])
    code, message = error_of(by_text.sender.wait_final()[0])
    assert code == TritonError.UNSUPPORTED and "letters has no tokenizer.json" in message
    stage.finish([8])
    assert value_of(by_ids.sender.wait_final()[0], "output_ids") == [8]
    front_end.close()
    stage.front_end.close()


def test_a_bad_request_is_answered_alone(build: Build) -> None:
    stage = build()
    bad = make_triton_request(token_inputs(request_output_len=0))
    good = make_triton_request()
    stage.front_end.execute([bad, good])
    code, message = error_of(bad.sender.wait_final()[0])
    assert code == TritonError.INVALID_ARG and message.startswith("request_output_len must be at least 1")
    assert len(stage.client.submitted) == 1
    stage.finish([8])
    assert len(good.sender.wait_final()) == 1


def test_an_unexpected_failure_affects_one_request_and_is_logged(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenRequest(InferenceRequest):
        def inputs(self) -> list:
            raise OSError("shared memory is gone")

    stage = build()
    bad, good = BrokenRequest({}), make_triton_request()
    stage.front_end.execute([bad, good])
    code, message = error_of(bad.sender.wait_final()[0])
    assert code == TritonError.INTERNAL and "shared memory is gone" in message
    assert [record.levelname for record in caplog.records if "gone" in record.message] == ["ERROR"]
    assert len(stage.client.submitted) == 1


@pytest.mark.parametrize("error", [Unavailable("no engine"), StepFailed("it broke")])
def test_the_engines_refusal_keeps_its_code(build: Build, error: Unavailable | StepFailed) -> None:
    stage = build()
    stage.client.refusal = error
    code, message = error_of(stage.take(make_triton_request()).wait_final()[0])
    assert (code, message) == (getattr(TritonError, error.code), str(error))


def test_requests_are_unavailable_until_the_engine_can_be_described(build: Build) -> None:
    stage = build()
    stage.client.description = Unavailable("no engine yet")
    assert error_of(stage.take(make_triton_request()).wait_final()[0])[0] == TritonError.UNAVAILABLE


def test_a_duplicate_id_is_refused_and_the_first_request_continues(build: Build) -> None:
    stage = build()
    first = stage.take(make_triton_request(request_id="a"))
    code, message = error_of(stage.take(make_triton_request(request_id="a")).wait_final()[0])
    assert code == TritonError.ALREADY_EXISTS
    assert message == "requestId a is already in progress, request is ignored."
    stage.finish([8])
    assert value_of(first.wait_final()[0], "output_ids") == [8]


def test_a_stop_answers_the_stopped_request_and_the_stop_request(build: Build) -> None:
    stage = build()
    stopped = stage.take(make_triton_request(request_id="a"))
    zeros = token_inputs(input_ids=[[0]], input_lengths=0, request_output_len=0, stop=True)
    (answer,) = stage.take(make_triton_request(zeros, request_id="a")).wait_final()
    assert (
        answer.response is not None
        and not answer.response.output_tensors()
        and not answer.response.has_error()
    )
    (last,) = stopped.wait_final()
    assert value_of(last, "finish_reason") == [b"CANCELLED"]
    assert stage.client.stopped == [(stage.client.last_id, StopReason.CANCELLED)]


def test_a_stop_of_an_unknown_id_is_answered(build: Build) -> None:
    sender = build().take(make_triton_request(token_inputs(stop=True), request_id="nobody"))
    assert [sent.is_final for sent in sender.wait_final()] == [True]


def test_a_stop_without_an_id_is_refused(build: Build) -> None:
    sender = build().take(make_triton_request(token_inputs(stop=True)))
    expected = (TritonError.INVALID_ARG, "Cannot send stop request without specifying a request_id")
    assert error_of(sender.wait_final()[0]) == expected


def test_a_clients_disconnection_is_detected(build: Build) -> None:
    stage = build(cancellation_check_period_ms="1")
    request = make_triton_request()
    request.sender.cancelled = True
    (sent,) = stage.take(request).wait_final()
    assert error_of(sent)[0] == TritonError.CANCELLED


def test_streaming_is_refused_by_a_model_that_is_not_decoupled(build: Build) -> None:
    sender = build(decoupled=False).take(make_triton_request(token_inputs(streaming=True)))
    code, message = error_of(sender.wait_final()[0])
    assert code == TritonError.INVALID_ARG and "tensorrt_llm" in message


def test_close_answers_requests_in_flight_and_refuses_new_ones() -> None:
    stage = Stage()
    senders = [stage.take(make_triton_request()) for _ in range(3)]
    stage.front_end.close()
    assert stage.client.closed
    assert [error_of(sender.wait_final()[0])[0] for sender in senders] == [TritonError.UNAVAILABLE] * 3
    assert error_of(stage.take(make_triton_request()).wait_final()[0])[0] == TritonError.UNAVAILABLE
    stage.front_end.close()


def test_close_answers_requests_that_the_engine_client_left_unanswered() -> None:
    stage = Stage()
    stage.client.answers_stops = False
    sender = stage.take(make_triton_request())
    stage.client._callbacks.clear()
    stage.front_end.close()
    assert error_of(sender.wait_final()[0])[0] == TritonError.UNAVAILABLE


@pytest.mark.parametrize(
    ("vocabulary", "key", "message"),
    [
        (
            Vocabulary.TEXT,
            "runtime_top_k",
            "runtime_top_k is not an input of this model: here it is called top_k",
        ),
        (Vocabulary.TEXT, "draft_input_ids", "draft_input_ids is not an input of this model"),
        (Vocabulary.TOKENS, "top_p", "here it is called runtime_top_p"),
    ],
)
def test_a_tensor_name_of_the_other_vocabulary_is_refused(
    build: Build, vocabulary: Vocabulary, key: str, message: str
) -> None:
    """HTTP generate passes on a key that is not an input as a request parameter."""
    inputs = text_inputs() if vocabulary is Vocabulary.TEXT else token_inputs()
    request = InferenceRequest(inputs, sorted(ALL_OUTPUTS), parameters=json.dumps({key: 5}))
    (sent,) = build(vocabulary).take(request).wait_final()
    assert sent.response is not None
    error = sent.response.error()
    assert error is not None and error.code() == TritonError.INVALID_ARG
    assert message in error.message()


def test_request_parameters_and_timeout_reach_the_engine(build: Build) -> None:
    stage = build()
    parameters = json.dumps({"request_priority": "0.75", "client_id": 3})
    request = InferenceRequest(token_inputs(), sorted(ALL_OUTPUTS), parameters=parameters, timeout=2500)
    stage.take(request)
    submitted = stage.client.submitted[stage.client.last_id]
    assert (submitted.priority, submitted.client_id, submitted.allotted_time_ms) == (0.75, 3, 3)


def test_a_bad_parameter_is_refused_by_name(build: Build) -> None:
    request = InferenceRequest(token_inputs(), sorted(ALL_OUTPUTS), parameters='{"client_id": "me"}')
    code, message = error_of(build().take(request).wait_final()[0])
    assert code == TritonError.INVALID_ARG and "request parameter client_id" in message


CODED = '{"error_codes": true}'


def test_errors_begin_with_their_codes_on_request(build: Build) -> None:
    """Errors of the front end and of the engine begin with codes; requests without the option get messages
    without codes."""
    stage = build()
    bad = token_inputs(temperature=-1.0)
    plain = error_of(stage.take(InferenceRequest(bad, sorted(ALL_OUTPUTS))).wait_final()[0])
    request = InferenceRequest(bad, sorted(ALL_OUTPUTS), parameters=CODED)
    assert error_of(stage.take(request).wait_final()[0]) == (plain[0], f"INVALID_ARG: {plain[1]}")
    request = InferenceRequest(token_inputs(), sorted(ALL_OUTPUTS), parameters=CODED)
    sender = stage.take(request)
    error = Unavailable("the server is shutting down")
    stage.client.respond(Response(stage.client.last_id, error=error, is_final=True))
    expected = TritonError.UNAVAILABLE, "UNAVAILABLE: the server is shutting down"
    assert error_of(sender.wait_final()[0]) == expected


def test_a_successful_response_is_the_same_with_error_codes(build: Build) -> None:
    stage = build()
    sender = stage.take(InferenceRequest(token_inputs(), sorted(ALL_OUTPUTS), parameters=CODED))
    stage.finish([5, 6])
    assert value_of(sender.wait_final()[0], "output_ids")[-2:] == [5, 6]


def test_known_parameters_of_clients_are_accepted(build: Build) -> None:
    stage = build()
    request = InferenceRequest(
        token_inputs(), sorted(ALL_OUTPUTS), parameters='{"Streaming": true, "model": "m"}'
    )
    stage.take(request)
    assert len(stage.client.submitted) == 1


def test_special_tokens_are_hidden_if_configured_and_can_always_be_stop_words() -> None:
    the, special, dog = tokenizer("byte_level").encode("the"), 2, tokenizer("byte_level").encode(" dog")
    for skip, shown in (("true", b"the dog"), ("false", b"the</s> dog")):
        stage = Stage(Vocabulary.TEXT)
        stage.front_end.close()
        client = type(stage.client)(make_description(tokenizer_dir="tiny"))
        parameters = make_parameters(skip_special_tokens=skip, exclude_input_in_output="true")
        front_end = FrontEnd(
            stage.pb_utils,
            client,
            client.close,
            make_model_args(parameters),
            TokenizerFinder(None, lambda directory: tokenizer("byte_level")),
            Vocabulary.TEXT,
        )
        stage.client = client
        for stops, text in (([], shown), ([b"</s>"], b"the"), ([b"he</s>"], b"t")):
            request = make_triton_request(text_inputs(stop_words=[stops] if stops else None))
            front_end.execute([request])
            stage.finish([*the, special, *dog])
            assert value_of(request.sender.wait_final()[0], "text_output") == [text]
        front_end.close()


def test_a_front_end_does_not_keep_submitted_adapter_weights(build: Build) -> None:
    """A reply lives as long as its request, and adapters' weights are large."""
    stage = build()
    rows, config = np.ones([1, 2, 6], np.float16), np.array([[[1, 0, 2, 0], [3, 1, 1, 1]]], np.int32)
    stage.take(make_triton_request(token_inputs(lora_task_id=7, lora_weights=rows, lora_config=config)))
    (_, request) = stage.client.submitted.popitem()
    assert request.lora is not None and request.lora.weights is not None
    weights = request.lora.weights
    del request  # the engine has put them into its cache
    assert not [each for each in gc.get_referrers(weights) if isinstance(each, LoraRequest)]
