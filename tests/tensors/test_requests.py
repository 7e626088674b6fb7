"""From tensors to a Request: defaults, corner cases, and errors that name the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from inflight.core.request.request import Request
from inflight.errors import InflightError, InvalidArgument, Unsupported
from inflight.prompt import Prompt, ReplyOptions
from inflight.tensors.requests import ServingContext, convert
from inflight.tensors.spec import Vocabulary
from inflight.tensors.wanted_outputs import Naming
from tests.tensors.factories import (
    ALL_OUTPUTS,
    make_context,
    make_description,
    make_rows,
    text_inputs,
    token_inputs,
)


class Codes:
    """A TextEncoder: letters become their code points; words also have a spelling with a leading space."""

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokens(text) for text in texts]

    def tokens(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def max_bytes_per_token(self) -> int:
        return 4

    def spellings(self, word: str) -> tuple[tuple[int, ...], ...]:
        return (tuple(map(ord, word)), (32, *map(ord, word)))


def convert_all(
    context: ServingContext | None = None,
    outputs: frozenset[str] = ALL_OUTPUTS,
    vocabulary: Vocabulary = Vocabulary.TOKENS,
    **tensors: object,
) -> tuple[Prompt, ...]:
    inputs = token_inputs(**tensors) if vocabulary is Vocabulary.TOKENS else text_inputs(**tensors)
    naming = Naming.from_triton(outputs, vocabulary)
    context = replace(context or make_context(), naming=naming, encoder=Codes())
    return convert(make_rows(inputs, vocabulary), context)


def convert_tokens(
    context: ServingContext | None = None, outputs: frozenset[str] = ALL_OUTPUTS, **tensors: object
) -> tuple[Request, ReplyOptions]:
    (prompt,) = convert_all(context, outputs, **tensors)
    return prompt.request, prompt.options


def convert_text(context: ServingContext | None = None, **tensors: object) -> tuple[Request, ReplyOptions]:
    text_outputs = ALL_OUTPUTS - {"output_ids", "sequence_length"}
    (prompt,) = convert_all(context, text_outputs, Vocabulary.TEXT, **tensors)
    return prompt.request, prompt.options


def test_defaults_equal_those_of_the_specification() -> None:
    request, options = convert_tokens()
    assert request == Request(0, (5, 6, 7), 4)
    assert not options.streaming and options.include_prompt


@pytest.mark.parametrize(
    ("by_text", "end_id", "expected"),
    [
        (False, None, (9,)),
        (False, -1, ()),
        (False, 4, (4,)),
        (True, None, (2, 3)),
        (True, -1, ()),
        (True, 4, (4,)),
    ],
)
def test_end_id_of_the_request_replaces_those_of_the_model(
    by_text: bool, end_id: int | None, expected: tuple[int, ...]
) -> None:
    context = make_context(description=make_description(default_end_ids=(9,)))
    prompt = {"input_ids": None, "text_input": b"hi"} if by_text else {}
    assert convert_tokens(context, end_id=end_id, **prompt)[0].end_ids == expected


@pytest.mark.parametrize("top_p", [0.0, -1.0])
def test_a_top_p_of_zero_or_less_counts_as_unset(top_p: float) -> None:
    assert convert_tokens(runtime_top_p=top_p)[0].sampling.top_p == 0.0


def test_pad_id_of_minus_one_is_none() -> None:
    assert convert_tokens(pad_id=-1)[0].pad_id is None


def test_prompt_ids_are_left_out_if_only_text_output_is_asked_for() -> None:
    request, options = convert_tokens(outputs=frozenset({"text_output"}))
    assert request.output.exclude_input_from_output
    assert options.include_prompt


@pytest.mark.parametrize("default", [True, False])
def test_exclude_input_follows_the_parameter_and_then_the_request(default: bool) -> None:
    context = make_context(exclude_input_in_output=default)
    assert convert_tokens(context)[0].output.exclude_input_from_output is default
    request, options = convert_tokens(context, exclude_input_in_output=not default)
    assert request.output.exclude_input_from_output is not default
    assert options.include_prompt is default


def test_streamed_text_never_starts_with_the_prompt() -> None:
    assert not convert_text(stream=True)[1].include_prompt


# (tensors, class of the error, its message)
REFUSED: list[tuple[dict[str, object], type[InflightError], str]] = [
    (
        {"input_ids": None},
        InvalidArgument,
        "a value is required for input_ids, or text_input: it is missing or",
    ),
    ({"input_ids": np.zeros([1, 0], np.int32)}, InvalidArgument, "a value is required for input_ids"),
    (
        {"request_output_len": None},
        InvalidArgument,
        "a value is required for request_output_len: it is missing",
    ),
    ({"text_input": b"hi"}, InvalidArgument, "both input_ids and text_input"),
    ({"input_ids": None, "text_input": b"hi", "input_lengths": 2}, InvalidArgument, "input_lengths is 2"),
    (
        {"input_lengths": 4},
        InvalidArgument,
        "input_lengths must be from 1 to 3, the length of input_ids, got 4",
    ),
    ({"input_lengths": 0}, InvalidArgument, "input_lengths must be from 1 to 3"),
    ({"request_output_len": 0}, InvalidArgument, "request_output_len must be at least 1, got 0"),
    ({"request_output_len": 62}, InvalidArgument, "request_output_len is 62, but after 3 prompt tokens"),
    ({"input_ids": [[5, 1000]]}, InvalidArgument, r"input_ids must be in \[0, 999\], got 1000 at position 1"),
    ({"input_ids": [[-1]]}, InvalidArgument, r"input_ids must be in \[0, 999\], got -1 at position 0"),
    ({"input_ids": [list(range(61))]}, InvalidArgument, "input_ids has 61 tokens"),
    ({"input_ids": [[1, 2], [3, 4]]}, InvalidArgument, "request_output_len has 1 rows and input_ids has 2"),
    ({"end_id": 1000}, InvalidArgument, r"end_id must be a token id in \[0, 999\], got 1000"),
    ({"end_id": -2}, InvalidArgument, r"end_id must be a token id, or -1 for none, got -2"),
    ({"pad_id": -2}, InvalidArgument, "pad_id must be >= -1"),
    (
        {"temperature": float("nan")},
        InvalidArgument,
        r"temperature must be 0 \(greedy\), or in \[.*\], got nan",
    ),
    ({"temperature": -1.0}, InvalidArgument, "temperature must be"),
    ({"runtime_top_k": -1}, InvalidArgument, "runtime_top_k must be >= 0"),
    ({"runtime_top_p": 1.5}, InvalidArgument, r"runtime_top_p must be in \(0, 1\].*got 1.5"),
    ({"runtime_top_p": float("nan")}, InvalidArgument, "runtime_top_p must be"),
    ({"lookahead_window_size": [[2]]}, Unsupported, "lookahead_window_size is not available"),
    ({"beam_width": 5}, InvalidArgument, "beam_width must be at most 4 on this server, got 5"),
    ({"beam_width": 0}, InvalidArgument, r"beam_width must be in \[1, 1024\], got 0"),
    ({"num_return_sequences": 0}, InvalidArgument, "num_return_sequences must be in"),
    ({"beam_width": 2, "num_return_sequences": 3}, InvalidArgument, r"in \[1, 2\] \(beam_width\), got 3"),
    ({"early_stopping": -1}, InvalidArgument, "early_stopping must be >= 0, got -1"),
    ({"repetition_penalty": 0.0}, InvalidArgument, r"repetition_penalty must be in \[1e-10"),
    ({"temperature": 1e-40}, InvalidArgument, r"temperature must be 0 .*, or in \[1e-10, 1e\+10\], got 9.99"),
    ({"frequency_penalty": -3e38}, InvalidArgument, r"frequency_penalty must be in \[-1e\+10, 1e\+10\], got"),
    ({"no_repeat_ngram_size": -1}, InvalidArgument, r"no_repeat_ngram_size must be >= 0"),
    ({"min_p": 1.5}, InvalidArgument, r"min_p must be in \[0, 1\], got 1.5"),
    ({"num_top_log_probs": 1001}, InvalidArgument, r"num_top_log_probs must be in \[0, 1000\], got 1001"),
    ({"num_top_log_probs": -1}, InvalidArgument, r"num_top_log_probs must be in"),
    (
        {"stop_words_list": np.array([[[5], [2]]], np.int32)},
        InvalidArgument,
        r"stop_words_list has the end offset 2, but 1 ids\. .*\[\[5,7,3,9,2\],\[3,5,-1,-1,-1\]\]",
    ),
    (
        {"bad_words_list": np.array([[[1000], [1]]], np.int32)},
        InvalidArgument,
        r"bad_words_list must be in \[0, 999\], got 1000",
    ),
    ({"bad_words": [[b"\xff"]]}, InvalidArgument, "bad_words must be UTF-8"),
    (
        {"embedding_bias": np.zeros([1, 7], np.float32)},
        InvalidArgument,
        r"embedding_bias must have shape \[1, 1000\], got \[1, 7\]",
    ),
    (
        {"embedding_bias": np.full([1, 1000], np.nan, np.float32)},
        InvalidArgument,
        "embedding_bias must hold finite numbers, or -inf to ban a token",
    ),
    (
        {"embedding_bias_words": [[b"a", b"a"]], "embedding_bias_weights": [[3e38, 3e38]]},
        InvalidArgument,
        "embedding_bias_weights must hold finite numbers, or -inf to ban a token",
    ),
    (
        {"embedding_bias_words": [[b"a", b"b"]], "embedding_bias_weights": [[1.0]]},
        InvalidArgument,
        "embedding_bias_words has 2 texts and embedding_bias_weights 1 weights",
    ),
    (
        {"allowed_token_ids": [[3, 1000]]},
        InvalidArgument,
        r"allowed_token_ids must be in \[0, 999\], got 1000",
    ),
    (
        {"logit_bias_ids": [[-1]], "logit_bias_values": [[2.0]]},
        InvalidArgument,
        r"logit_bias_ids must be in \[0, 999\], got -1 at position 0",
    ),
    (
        {"logit_bias_ids": [[3]]},
        InvalidArgument,
        "logit_bias_ids has 1 token ids and logit_bias_values 0 values",
    ),
    ({"logit_bias_values": [[3.0]]}, InvalidArgument, "has 0 token ids and logit_bias_values 1 values"),
    (
        {"logit_bias_ids": [[3, 4]], "logit_bias_values": [[1.0, np.inf]]},
        InvalidArgument,
        "logit_bias_values must be finite numbers, or -inf to ban a token, got inf at position 1",
    ),
    ({"draft_logits": np.zeros([1, 1, 1000], np.float32)}, InvalidArgument, "without draft_input_ids"),
    *(
        (
            {"draft_input_ids": [[1]], "draft_logits": np.full([1, 1, 1000], value, np.float32)},
            InvalidArgument,
            "draft_logits must hold finite numbers in every row",
        )
        for value in (np.nan, np.inf, -np.inf)
    ),
    (
        {"draft_input_ids": [[1, 2]], "draft_logits": np.zeros([1, 1, 1000], np.float32)},
        InvalidArgument,
        r"draft_logits must have shape \[1, 2, 1000\].*got \[1, 1, 1000\]",
    ),
    ({"draft_input_ids": [[1, 1000]]}, InvalidArgument, r"draft_input_ids must be in \[0, 999\]"),
    ({"draft_input_ids": [[1]], "beam_width": 2}, InvalidArgument, "draft_input_ids needs beam_width 1"),
    (
        {"logits_post_processor_name": b"lower"},
        InvalidArgument,
        "LogitsPostProcessor lower not found: logits_post_processor_name is 'lower', expected one of 'upper'",
    ),
    ({"logits_post_processor_name": b"\xff"}, InvalidArgument, "logits_post_processor_name must be UTF-8"),
    ({"prompt_lookup_num_tokens": -1}, InvalidArgument, "prompt_lookup_num_tokens must be >= 0"),
    (
        {"streaming": True, "beam_width": 2, "return_generation_logits": True},
        InvalidArgument,
        "generation_logits cannot be streamed with beam_width > 1",
    ),
    ({"input_ids": None, "text_input": b"\xff"}, InvalidArgument, "text_input must be UTF-8"),
    ({"seed": 1, "random_seed": 2}, InvalidArgument, "seed is 1 but random_seed is 2"),
]


@pytest.mark.parametrize(("tensors", "error", "message"), REFUSED, ids=lambda part: str(part)[:40])
def test_invalid_tensors_are_refused_by_name(
    tensors: dict[str, object], error: type[InflightError], message: str
) -> None:
    with pytest.raises(error, match=message):
        convert_tokens(**tensors)


REFUSED_TEXT: list[tuple[dict[str, object], str]] = [
    ({"text_input": None}, "a value is required for text_input: it is missing or empty"),
    ({"text_input": b""}, "text_input is empty"),
    ({"text_input": b"x" * 61}, "text_input has 61 tokens"),
    ({"max_tokens": None}, "a value is required for max_tokens"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"top_k": -1}, "^top_k must be >= 0"),
    ({"top_p": 1.5}, "^top_p must be in"),
    ({"length_penalty": -1.0}, "^length_penalty must be a finite number >= 0"),
    (
        {"stream": True, "beam_width": 2, "return_generation_logits": True},
        "leave stream or generation_logits",
    ),
]


@pytest.mark.parametrize(("tensors", "message"), REFUSED_TEXT, ids=lambda part: str(part)[:40])
def test_refusals_use_the_names_of_ensemble(tensors: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        convert_text(**tensors)


def test_streaming_needs_a_decoupled_model() -> None:
    with pytest.raises(InvalidArgument, match=r"streaming is true, but this model gives one response.*_llm"):
        convert_tokens(make_context(decoupled=False), streaming=True)
    with pytest.raises(InvalidArgument, match=r"^stream is true"):
        convert_text(make_context(decoupled=False), stream=True)


@pytest.mark.parametrize("tensors", [{"text_input": b"a"}, {"text_input": b"a", "bad_words": [[b"b"]]}])
def test_text_without_a_tokenizer_is_refused(tensors: dict[str, object]) -> None:
    rows = make_rows(text_inputs(**tensors), Vocabulary.TEXT)
    with pytest.raises(Unsupported, match="no tokenizer"):
        convert(rows, make_context())


def test_both_values_that_turn_no_repeat_ngram_size_off_are_accepted() -> None:
    for off in (0, 1 << 30):
        assert convert_tokens(no_repeat_ngram_size=off)[0].sampling.no_repeat_ngram_size == 0


def test_a_bias_of_zeros_counts_as_none() -> None:
    zeros = np.zeros([1, 1000], np.float32)
    assert convert_tokens(embedding_bias=zeros)[0].embedding_bias is None
    nothing = {"embedding_bias_words": [[b""]], "embedding_bias_weights": [[0.0]]}
    assert convert_tokens(**nothing)[0].embedding_bias is None
    assert convert_tokens(embedding_bias_words=[[b""]])[0].embedding_bias is None


def test_a_bias_of_minus_infinity_is_kept() -> None:
    banned = np.zeros([1, 1000], np.float32)
    banned[0, 3] = -np.inf
    bias = convert_tokens(embedding_bias=banned)[0].embedding_bias
    assert bias is not None and np.frombuffer(bias.data, np.float32)[3] == -np.inf


def test_stop_strings_make_the_engine_stream() -> None:
    """The server searches the text while it is generated; the client still gets one response."""
    request, options = convert_tokens(stop_words=[[b"x"]], stop_words_list=np.array([[[5], [1]]], np.int32))
    assert request.streaming and not options.streaming
    assert request.stop_words == ((5,),)


def test_a_beam_search_gets_stop_strings_as_ids() -> None:
    request, options = convert_tokens(stop_words=[[b"x"]], beam_width=2)
    assert not request.streaming
    assert request.stop_words == ((120,), (32, 120))
    assert options.stop_strings == ("x",)


def batch(**tensors: object) -> dict[str, object]:
    given: dict[str, object] = {
        "input_ids": [[5, 6, 7], [8, 9, 0]],
        "input_lengths": np.array([3, 2], np.int32),
        "request_output_len": np.array([4, 5], np.int32),
    }
    return given | tensors


def test_a_batch_is_a_request_for_each_row() -> None:
    prompts = convert_all(
        **batch(
            beam_width=np.array([1, 3], np.int32),
            stop_words_list=np.array([[[5], [1]], [[0], [-1]]], np.int32),
        )
    )
    first, second = (prompt.request for prompt in prompts)
    assert (first.input_token_ids, second.input_token_ids) == ((5, 6, 7), (8, 9))
    assert (first.max_new_tokens, second.max_new_tokens) == (4, 5)
    assert (first.sampling.beam_width, second.sampling.beam_width) == (1, 3)
    assert (first.stop_words, second.stop_words) == (((5,),), ())
    assert all("batch_index" in prompt.options.outputs for prompt in prompts)


def test_the_error_names_the_wrong_row_of_a_batch() -> None:
    with pytest.raises(InvalidArgument, match=r"^row 1 of the batch: temperature must be"):
        convert_all(**batch(temperature=np.array([1.0, -1.0], np.float32)))


def test_a_single_row_has_no_batch_index_unless_asked_for() -> None:
    assert "batch_index" not in convert_tokens()[1].outputs
    assert "batch_index" in convert_tokens(outputs=frozenset({"batch_index"}))[1].outputs
