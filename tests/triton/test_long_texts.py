"""Long texts are tokenized outside of execute; other requests do not wait, and every promise holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from inflight.core.request.stop import StopReason
from inflight.errors import InvalidArgument
from inflight.serving.completion_text import TokenizerFinder
from inflight.tensors.requests import check_texts
from inflight.tensors.spec import Vocabulary
from inflight.text.text_encoder import MAX_WORDS, MAX_WORDS_BYTES, NO_TEXT, TextEncoder
from inflight.text.tokenizer import Tokenizer
from inflight.triton.front_end import FrontEnd
from tests.tensors.factories import make_description, make_limits, make_rows, text_inputs, token_inputs
from tests.text.tiny_tokenizers import backend
from tests.triton.factories import make_model_args, make_parameters, make_triton_request
from tests.triton.fake_pb_utils import InferenceRequest, TritonError
from tests.triton.stage import Stage, error_of, value_of

WAIT_S = 30
LONG = b"the dog " * 1000
LIMITS = make_limits(max_input_length=20_000, max_sequence_length=30_000, num_blocks=10_000)


class SlowTokenizer(Tokenizer):
    """Waits with long texts until it is released; records the texts that it was given."""

    def __init__(self) -> None:
        super().__init__(backend("byte_level"))
        self.go_on = threading.Event()
        self.batches: list[tuple[int, ...]] = []
        self.threads: set[str] = set()

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        self.batches.append(tuple(map(len, texts)))
        self.threads.add(threading.current_thread().name)
        if any(len(text) > 1000 for text in texts):
            assert self.go_on.wait(WAIT_S)
        return super().encode_batch(texts, add_special_tokens)


class LongTextStage(Stage):
    """A front end of `ensemble` with the slow tokenizer."""

    def __init__(self) -> None:
        super().__init__(Vocabulary.TEXT)
        self.front_end.close()
        self.tokenizer = SlowTokenizer()
        self.client = type(self.client)(make_description(limits=LIMITS, tokenizer_dir="letters"))
        self.front_end = FrontEnd(
            self.pb_utils,
            self.client,
            self.client.close,
            make_model_args(make_parameters(cancellation_check_period_ms="1")),
            TokenizerFinder(None, lambda directory: self.tokenizer),
            Vocabulary.TEXT,
        )

    def wait_for_submits(self, count: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while len(self.client.submitted) < count:
            assert time.monotonic() < deadline, f"{len(self.client.submitted)} of {count}"
            time.sleep(0.001)

    def submitted_lengths(self) -> list[int]:
        return [len(request.input_token_ids) for request in self.client.submitted.values()]

    def wait_for_batches(self, count: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while len(self.tokenizer.batches) < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def stage() -> Iterator[LongTextStage]:
    made = LongTextStage()
    yield made
    made.tokenizer.go_on.set()
    made.front_end.close()


def prompt(text: bytes, request_id: str = "", **tensors: object) -> InferenceRequest:
    return make_triton_request(text_inputs(text_input=text, **tensors), request_id=request_id)


def test_other_requests_do_not_wait_for_a_long_text(stage: LongTextStage) -> None:
    stage.take(prompt(LONG))
    stage.take(prompt(b"the"))
    assert len(stage.client.submitted) == 1
    stage.tokenizer.go_on.set()
    stage.wait_for_submits(2)
    lengths = stage.submitted_lengths()
    assert lengths[1] == len(stage.tokenizer.encode(LONG.decode()))
    assert len(stage.tokenizer.threads) == 2


def test_requests_of_a_client_start_in_order(stage: LongTextStage) -> None:
    stage.take(prompt(LONG, client_id=7))
    stage.take(prompt(b"the", client_id=7))
    stage.take(prompt(b"the dog", client_id=8))
    assert len(stage.client.submitted) == 1
    stage.tokenizer.go_on.set()
    stage.wait_for_submits(3)
    assert [request.client_id for request in stage.client.submitted.values()] == [8, 7, 7]
    lengths = stage.submitted_lengths()
    assert lengths[1] > lengths[2]


def test_a_long_text_is_copied_before_it_is_tokenized(stage: LongTextStage) -> None:
    inputs = text_inputs(text_input=LONG, max_tokens=5, stop_words=[[b"stop"]])
    stage.take(make_triton_request(inputs))
    inputs["max_tokens"][...] = 999
    stage.tokenizer.go_on.set()
    stage.wait_for_submits(1)
    assert stage.client.submitted[stage.client.last_id].max_new_tokens == 5


def test_an_id_whose_text_is_being_tokenized_is_in_flight(stage: LongTextStage) -> None:
    first = stage.take(prompt(LONG, "a"))
    for text in (LONG, b"the"):
        code, _ = error_of(stage.take(prompt(text, "a")).wait_final()[0])
        assert code == TritonError.ALREADY_EXISTS
    stage.tokenizer.go_on.set()
    stage.wait_for_submits(1)
    stage.finish([8])
    assert len(first.wait_final()) == 1


def test_a_stop_while_tokenizing_ends_the_request_normally(stage: LongTextStage) -> None:
    sender = stage.take(prompt(LONG, "a"))
    stopping = stage.take(
        make_triton_request(text_inputs(text_input=None, max_tokens=None, stop=True), request_id="a")
    )
    assert len(stopping.wait_final()) == 1
    stage.tokenizer.go_on.set()
    (sent,) = sender.wait_final()
    assert value_of(sent, "finish_reason") == [b"CANCELLED"]
    assert [reason for _, reason in stage.client.stopped] == [StopReason.CANCELLED]


def test_a_request_cancelled_while_tokenizing_never_reaches_the_engine(stage: LongTextStage) -> None:
    request = prompt(LONG, "a")
    sender = stage.take(request)
    stage.wait_for_batches(1)
    sender.cancelled = True
    asked = sender.times_asked
    deadline = time.monotonic() + WAIT_S
    while sender.times_asked < asked + 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    stage.tokenizer.go_on.set()
    code, _ = error_of(sender.wait_final()[0])
    assert code == TritonError.CANCELLED
    assert not stage.client.submitted
    stage.take(prompt(b"the", "a"))
    assert len(stage.client.submitted) == 1


def test_a_long_text_with_an_error_is_answered_alone(stage: LongTextStage) -> None:
    bad, good = prompt(LONG, "a", max_tokens=0), prompt(LONG, "b")
    stage.front_end.execute([bad, good])
    stage.tokenizer.go_on.set()
    code, message = error_of(bad.sender.wait_final()[0])
    assert code == TritonError.INVALID_ARG and "max_tokens must be at least 1" in message
    stage.wait_for_submits(1)
    stage.take(prompt(b"the", "a"))
    assert len(stage.client.submitted) == 2


def test_an_unload_answers_requests_being_tokenized_and_waiting(stage: LongTextStage) -> None:
    senders = [stage.take(prompt(LONG, client_id=7)) for _ in range(3)]
    stage.wait_for_batches(1)
    closing = threading.Thread(target=stage.front_end.close)
    closing.start()
    for sender in senders:
        (sent,) = sender.wait_final()
        assert error_of(sent)[0] == TritonError.UNAVAILABLE
    stage.tokenizer.go_on.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert not stage.client.submitted and len(stage.tokenizer.batches) == 1
    assert all(len(sender.sent) == 1 for sender in senders)


def test_a_batch_is_tokenized_in_one_call(stage: LongTextStage) -> None:
    texts = np.array([[b"the"], [b"the dog"], [b"a"]], dtype=np.object_)
    stage.take(make_triton_request(text_inputs(text_input=texts, max_tokens=[[4], [4], [4]])))
    assert stage.tokenizer.batches == [(3, 7, 1)]
    expected = [tuple(stage.tokenizer.encode(text)) for text in ("the", "the dog", "a")]
    assert [request.input_token_ids for request in stage.client.submitted.values()] == expected


def test_parallel_tokenization_of_a_batch_gives_the_same_ids() -> None:
    tokenizer = Tokenizer(backend("llama"))
    texts = [f"the dog {number} " * 500 for number in range(6)] + ["", " "]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts[-2:], False) == [tokenizer.encode(text, False) for text in texts[-2:]]


# -------------------------------------------------------------------- bounds


class Bound(Tokenizer):
    """A stand-in for a tokenizer with a bound of four bytes per token, or without one."""

    def __init__(self, max_bytes: int | None = 4) -> None:
        self.max_bytes_per_token = max_bytes


def check(max_bytes: int | None = 4, **tensors: object) -> None:
    rows = make_rows(text_inputs(**tensors), Vocabulary.TEXT)
    encoder = TextEncoder(lambda: Bound(max_bytes))
    check_texts(rows, encoder, make_limits(max_input_length=10))


def test_a_text_that_cannot_fit_is_refused_without_tokenizing(stage: LongTextStage) -> None:
    text = b"x" * 10_000_000
    code, message = error_of(stage.take(prompt(text)).wait_final()[0])
    assert code == TritonError.INVALID_ARG
    longest = stage.tokenizer.max_bytes_per_token
    assert longest is not None
    assert message == (
        "text_input has 10000000 bytes; this server takes prompts of at most 20000 tokens, which hold at most "
        f"{20000 * longest} bytes of text"
    )
    assert not stage.tokenizer.batches


def test_the_bound_is_the_longest_prompt_times_the_longest_token() -> None:
    check(text_input=b"x" * 40)
    with pytest.raises(InvalidArgument, match=r"text_input has 41 bytes; .* at most 10 tokens, .* 40 bytes"):
        check(text_input=b"x" * 41)
    check(None, text_input=b"x" * 1_000_000)


def test_each_text_of_a_batch_has_the_bound() -> None:
    check(text_input=np.array([[b"x" * 40], [b"y" * 40]], dtype=np.object_), max_tokens=None)
    with pytest.raises(InvalidArgument, match="text_input has 41 bytes"):
        check(text_input=np.array([[b"x" * 40], [b"y" * 41]], dtype=np.object_), max_tokens=None)


@pytest.mark.parametrize("name", ["stop_words", "bad_words", "embedding_bias_words"])
def test_words_are_bounded_in_number_and_length(name: str) -> None:
    check(**{name: [[b"w"] * MAX_WORDS]})
    with pytest.raises(InvalidArgument, match=f"{name} has {MAX_WORDS + 1} words; .* at most {MAX_WORDS}"):
        check(**{name: [[b"w"] * (MAX_WORDS + 1)]})
    check(**{name: [[b"w" * MAX_WORDS_BYTES]]})
    with pytest.raises(InvalidArgument, match=f"{name} has {MAX_WORDS_BYTES + 1} bytes"):
        check(**{name: [[b"w" * MAX_WORDS_BYTES, b"x"]]})


def test_many_words_are_tokenized_beside_execute(stage: LongTextStage) -> None:
    words = [[f"w{number}".encode() for number in range(MAX_WORDS)]]
    stage.take(prompt(b"the", bad_words=words))
    stage.wait_for_submits(1)
    assert len(stage.client.submitted[stage.client.last_id].bad_words) > MAX_WORDS
    assert stage.tokenizer.threads != {threading.current_thread().name}


def test_token_ids_have_no_bound_on_bytes() -> None:
    rows = make_rows(token_inputs(input_ids=[[1] * 5000]))
    check_texts(rows, NO_TEXT, make_limits(max_input_length=10))
