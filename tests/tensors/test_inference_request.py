"""The specification's map of tensors, and a GptManager that serves requests made from it."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from inflight.batch_manager import GptManager
from inflight.config import SchedulingConfig
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.batch import EngineLimits
from inflight.core.scheduler import Scheduler
from inflight.errors import InvalidArgument, Unsupported
from inflight.tensors.inference_request import InferenceRequest
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.fake_model import expected_beams, expected_log_probs, expected_tokens
from tests.tensors.factories import make_limits

VOCABULARY = 50
LIMITS = EngineLimits(
    VOCABULARY, max_sequence_length=100, max_num_sequences=8, num_blocks=64, tokens_per_block=4
)
PROMPT = [3, 1, 4, 1, 5]


def make_tensors(**tensors: np.ndarray) -> dict[str, np.ndarray]:
    """Return the specification's two mandatory tensors in its shapes."""
    mandatory = {
        "input_ids": np.array([PROMPT], np.int32),
        "request_output_len": np.array([[6]], np.int32),
    }
    return mandatory | tensors


def to_request(**tensors: np.ndarray) -> Request:
    return InferenceRequest(7, make_tensors(**tensors)).to_request(make_limits())


class Library:
    """A program around a GptManager: its callbacks, and the responses that they received."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(SchedulingConfig(), LIMITS)
        self._pending: queue.Queue[Request] = queue.Queue()
        self._responses: queue.Queue[Response] = queue.Queue()
        self.manager = GptManager(
            FakeEngine(LIMITS), self.scheduler, self._get_inference_requests, self._responses.put
        )

    def _get_inference_requests(self, max_num_requests: int) -> list[Request]:
        requests = []
        while not self._pending.empty() and max_num_requests != len(requests):
            requests.append(self._pending.get())
        return requests

    def ask(self, request_id: int, **tensors: np.ndarray) -> list[Response]:
        """Return every response to one request."""
        self._pending.put(
            InferenceRequest(request_id, make_tensors(**tensors)).to_request(self.scheduler.limits)
        )
        self.manager.notify()
        responses = [self._responses.get(timeout=30)]
        while not responses[-1].is_final:
            responses.append(self._responses.get(timeout=30))
        assert {response.request_id for response in responses} == {request_id}
        return responses


@contextmanager
def running() -> Iterator[Library]:
    library = Library()
    try:
        yield library
    finally:
        library.manager.shutdown()


def test_a_gpt_manager_serves_inference_requests() -> None:
    with running() as library:
        (answer,) = library.ask(2**64 - 1)
        streamed = library.ask(2, streaming=np.array([True]))
    expected = expected_tokens(PROMPT, 6, VOCABULARY)
    assert answer.result is not None
    assert list(answer.result.output_token_ids[0]) == PROMPT + expected
    assert [token for one in streamed for token in one.result.output_token_ids[0]] == expected
    assert len(streamed) == 6


def test_controls_and_outputs_reach_the_engine() -> None:
    with running() as library:
        (answer,) = library.ask(1, return_log_probs=np.array([True]))
        (beams,) = library.ask(2, beam_width=np.array([3], np.int32), len_penalty=np.array([1.0], np.float32))
        (draft,) = library.ask(
            3,
            draft_input_ids=np.array([expected_tokens(PROMPT, 3, VOCABULARY)], np.int32),
            return_perf_metrics=np.array([[True]]),
        )
    tokens = expected_tokens(PROMPT, 6, VOCABULARY)
    assert answer.result.log_probs[0] == pytest.approx(expected_log_probs(PROMPT, tokens, VOCABULARY))
    request = Request(2, tuple(PROMPT), 6, sampling=SamplingConfig(beam_width=3, length_penalty=1.0))
    best = [tuple(PROMPT) + beam.token_ids for beam in expected_beams(request, VOCABULARY)]
    assert beams.result.output_token_ids == tuple(best)
    assert list(draft.result.output_token_ids[0]) == PROMPT + tokens
    assert draft.result.perf_metrics.num_accepted_draft_tokens == 3


@pytest.mark.parametrize("batch_dimension", [True, False], ids=["[1, 2, n]", "[2, n]"])
def test_word_lists_may_have_either_layout(batch_dimension: bool) -> None:
    tokens = expected_tokens(PROMPT, 6, VOCABULARY)
    words = np.array([[tokens[1], tokens[2], 49], [2, 3, -1]], np.int32)
    with running() as library:
        (answer,) = library.ask(1, stop_words_list=words[np.newaxis] if batch_dimension else words)
    assert list(answer.result.output_token_ids[0]) == PROMPT + tokens[:3]
    assert answer.result.finish_reasons == (FinishReason.STOP_WORDS,)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_scalars_may_have_any_shape_of_one_element(shape: tuple[int, ...]) -> None:
    assert to_request(end_id=np.full(shape, 9, np.int32)).end_ids == (9,)


def test_ids_may_have_the_batch_dimension() -> None:
    assert to_request(input_ids=np.array(PROMPT, np.int32)) == to_request()


def test_a_request_of_mandatory_tensors_has_its_id_and_the_defaults() -> None:
    assert to_request() == Request(7, tuple(PROMPT), 6)


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"beam_widht": np.array([1])}, InvalidArgument, "no tensor 'beam_widht'; did you mean beam_width"),
        ({"end_id": np.array([1])}, InvalidArgument, "end_id must be INT32, got int64"),
        (
            {"bad_words_list": np.array([[5], [2]], np.int32)},
            InvalidArgument,
            r"bad_words_list has the end offset 2.*\[\[5,7,3,9,2\],\[3,5,-1,-1,-1\]\]",
        ),
        (
            {"bad_words_list": np.array([5, 2], np.int32)},
            InvalidArgument,
            r"bad_words_list must have shape \[1, 2, n\], got \[2\]\. .*\[\[5,7,3,9,2\],\[3,5,-1,-1,-1\]\]",
        ),
        (
            {"image_input": np.ones([1, 3, 1, 1], np.float16)},
            InvalidArgument,
            "there is no tensor 'image_input'",
        ),
        ({"lookahead_ngram_size": np.array([[1]], np.int32)}, Unsupported, "lookahead_ngram_size"),
        ({"lora_config": np.ones([2, 3], np.int32)}, InvalidArgument, "must have both lora_weights"),
        ({"lora_command": np.array([b"{}"], np.object_)}, InvalidArgument, "lora_command"),
        ({"stop_words": np.array([[b"x"]], np.object_)}, Unsupported, "send stop_words_list"),
        ({"bad_words": np.array([[b"x"]], np.object_)}, Unsupported, "no tokenizer here"),
        ({"stop": np.array([True])}, InvalidArgument, "PollStopSignal"),
        ({"state": np.array([True])}, InvalidArgument, "GptManager.state"),
        (
            {"input_ids": np.ones([2, 3], np.int32), "request_output_len": np.ones([2, 1], np.int32)},
            InvalidArgument,
            "the tensors have 2 rows: make an InferenceRequest for each",
        ),
    ],
    ids=lambda part: "",
)
def test_invalid_tensors_are_refused_by_name(
    tensors: dict[str, np.ndarray], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        to_request(**tensors)
