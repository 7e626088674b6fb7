"""Validation: each error names the tensor, the actual value and the allowed values."""

from __future__ import annotations

from dataclasses import replace
from math import inf, prod

import pytest

from inflight.config import SchedulingConfig
from inflight.core.request.engine_description import ModelLimits
from inflight.core.request.prompt_table import PromptTable
from inflight.core.request.request import ExternalDraft, FloatTensor, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import EngineLimits
from inflight.errors import InvalidArgument, Unsupported, error_from_kind

from .factories import make_prompt_table, make_request, with_table

LIMITS = ModelLimits(
    vocab_size=100,
    max_sequence_length=32,
    max_input_length=20,
    num_blocks=6,
    tokens_per_block=4,
    max_beam_width=4,
    max_draft_length=5,
    logits_post_processors=("upper", "batched"),
)


def make_sampled(**sampling) -> Request:
    return make_request(sampling=SamplingConfig(**sampling))


def make_drafted(num_tokens: int = 2, new: int = 8, **draft) -> Request:
    return make_request(new=new, draft=ExternalDraft(tuple(range(num_tokens)), **draft))


def make_floats(*shape: int) -> FloatTensor:
    return FloatTensor(shape, bytes(4 * prod(shape)))


def test_a_request_within_the_limits_is_valid():
    make_request(prompt=20, new=5).validate(LIMITS)


@pytest.mark.parametrize(
    ("length", "chunked", "helps"),
    [(17, False, True), (31, False, True), (32, False, False), (40, False, False), (32, True, False)],
)
def test_the_error_for_a_prompt_too_long_for_an_iteration_names_the_remedy(length, chunked, helps):
    engine = EngineLimits(
        vocab_size=100, max_sequence_length=32, max_num_sequences=4, num_blocks=64, tokens_per_block=4
    )
    limits = engine.model_limits(SchedulingConfig(max_num_tokens=16, enable_chunked_context=chunked))
    with pytest.raises(InvalidArgument) as error:
        make_request(prompt=(1,) * length, new=1).validate(limits)
    assert f"input_ids has {length} tokens" in str(error.value)
    assert ("max_num_tokens is 16" in str(error.value)) is helps
    assert ("enable_chunked_context" in str(error.value)) is helps


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make_request(prompt=()), ["input_ids", "empty"]),
        (make_request(new=0), ["request_output_len", "at least 1", "got 0"]),
        (make_request(prompt=(1, 100)), ["input_ids", "[0, 99]", "got 100", "position 1"]),
        (make_request(prompt=(1, -3)), ["input_ids", "got -3"]),
        (make_request(end_ids=(100,)), ["end_id", "[0, 99]", "got 100"]),
        (make_request(end_ids=(3, -1)), ["end_id must be a token id in [0, 99], got -1"]),
        (make_request(prompt=(1,) * 21), ["input_ids", "21 tokens", "at most 20"]),
        (make_request(prompt=(1,) * 20, new=13), ["request_output_len 13", "holds 24", "at most 5"]),
        (make_request(prompt=(1,) * 20, new=6), ["request_output_len", "24", "at most 5"]),
        (make_sampled(temperature=-1), ["temperature", "-1"]),
        (make_sampled(temperature=float("nan")), ["temperature", "nan"]),
        (make_sampled(top_k=-1), ["runtime_top_k", "-1"]),
        (make_sampled(top_p=1.5), ["runtime_top_p", "1.5"]),
        (make_sampled(top_p_min=1.5), ["runtime_top_p_min", "[0, 1]"]),
        (make_sampled(top_p_decay=0.0), ["runtime_top_p_decay", "(0, 1]"]),
        (make_sampled(top_p_reset_id=-2), ["runtime_top_p_reset_ids", "-2"]),
        (make_sampled(min_p=1.1), ["min_p", "1.1"]),
        (make_sampled(random_seed=2**64), ["random_seed", "64"]),
        (make_sampled(temperature=1e-40), ["temperature", "0 (greedy), or in [1e-10, 1e+10]", "got 1e-40"]),
        (make_sampled(temperature=3e38), ["temperature", "[1e-10, 1e+10]", "got 3e+38"]),
        (make_sampled(repetition_penalty=0.0), ["repetition_penalty", "in [1e-10, 1e+10]", "got 0.0"]),
        (make_sampled(repetition_penalty=1e-40), ["repetition_penalty", "in [1e-10, 1e+10]", "got 1e-40"]),
        (make_sampled(presence_penalty=3e38), ["presence_penalty", "in [-1e+10, 1e+10]", "got 3e+38"]),
        (make_sampled(frequency_penalty=-3e38), ["frequency_penalty", "in [-1e+10, 1e+10]", "got -3e+38"]),
        (make_sampled(beam_search_diversity_rate=3e38), ["beam_search_diversity_rate", "[0, 1e+10]"]),
        (make_sampled(presence_penalty=inf), ["presence_penalty", "inf"]),
        (make_sampled(frequency_penalty=float("nan")), ["frequency_penalty", "nan"]),
        (make_sampled(min_length=-1), ["min_length", "-1"]),
        (make_sampled(no_repeat_ngram_size=-1), ["no_repeat_ngram_size", "-1"]),
        (make_sampled(beam_width=0), ["beam_width", "[1, 1024]", "0"]),
        (make_sampled(beam_width=5), ["beam_width", "at most 4", "got 5"]),
        (
            make_sampled(beam_width=2, num_return_sequences=3),
            ["num_return_sequences", "[1, 2]", "beam_width"],
        ),
        (make_sampled(num_return_sequences=0), ["num_return_sequences", "got 0"]),
        (make_sampled(length_penalty=float("nan")), ["len_penalty", "nan"]),
        (make_sampled(early_stopping=-1), ["early_stopping", "-1"]),
        (make_sampled(beam_search_diversity_rate=-0.5), ["beam_search_diversity_rate", "-0.5"]),
        (make_request(prompt=8, new=9, sampling=SamplingConfig(beam_width=3)), ["beam_width 3", "at most 5"]),
        (make_request(output=OutputOptions(num_top_log_probs=101)), ["num_top_log_probs", "[0, 100]", "101"]),
        (make_request(stop_words=((1,), ())), ["stop_words_list", "empty word"]),
        (make_request(bad_words=((1, 100),)), ["bad_words_list", "got 100"]),
        (make_request(embedding_bias=make_floats(99)), ["embedding_bias", "[1, 100]", "[1, 99]"]),
        (make_drafted(num_tokens=0), ["draft_input_ids", "empty"]),
        (make_drafted(num_tokens=6), ["draft_input_ids", "(6)", "(5)"]),
        (make_drafted(num_tokens=2, new=2), ["draft_input_ids", "request_output_len 2", "at most 1"]),
        (make_drafted(logits=make_floats(1, 100)), ["draft_logits", "[1, 2, 100]", "[1, 1, 100]"]),
        (make_drafted(acceptance_threshold=-1.0), ["draft_acceptance_threshold", "-1"]),
        (make_request(prompt_lookup_num_tokens=-1), ["prompt_lookup_num_tokens", "-1"]),
        (
            make_request(prompt_lookup_num_tokens=2, sampling=SamplingConfig(beam_width=2)),
            ["prompt_lookup_num_tokens", "beam_width 1", "got 2"],
        ),
    ],
)
def test_each_error_has_the_tensor_the_value_and_the_allowed_values(request_, words):
    with pytest.raises(InvalidArgument) as caught:
        request_.validate(LIMITS)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "known", "message"),
    [
        (
            "lower",
            ("upper", "batched"),
            "LogitsPostProcessor lower not found: logits_post_processor_name is 'lower', expected one of 'upper', "
            "'batched'",
        ),
        (
            "uper",
            ("upper", "batched"),
            "LogitsPostProcessor uper not found: logits_post_processor_name is 'uper', expected one of 'upper', "
            "'batched'; did you mean 'upper'?",
        ),
        (
            "lower",
            (),
            "LogitsPostProcessor lower not found: logits_post_processor_name is 'lower', this server has none",
        ),
        (
            "batched",
            ("upper",),
            "Batched logits post processor is not defined: logits_post_processor_name is 'batched', expected one "
            "of 'upper'",
        ),
    ],
)
def test_an_unknown_post_processor_is_refused(name, known, message):
    limits = replace(LIMITS, logits_post_processors=known)
    with pytest.raises(InvalidArgument) as error:
        make_request(logits_post_processor_name=name).validate(limits)
    assert str(error.value) == message


@pytest.mark.parametrize("name", ["upper", "batched", ""])
def test_a_known_post_processor_is_accepted(name):
    request = make_request(logits_post_processor_name=name)
    request.validate(LIMITS)
    assert request.needs_host is request.looks_back is bool(name)
    engine = EngineLimits(100, 32, 4, 64, 4, logits_post_processors=("upper", "batched"))
    assert engine.model_limits(SchedulingConfig()).logits_post_processors == ("upper", "batched")


@pytest.mark.parametrize("prompt", [1, 3, 4, 7, 8, 11])
def test_the_length_that_a_refusal_recommends_is_accepted(prompt):
    sampling = SamplingConfig(beam_width=2)
    with pytest.raises(InvalidArgument) as caught:
        make_request(prompt=prompt, new=32 - prompt, sampling=sampling).validate(LIMITS)
    most = int(str(caught.value).rsplit(" ", 1)[1])
    make_request(prompt=prompt, new=most, sampling=sampling).validate(LIMITS)
    with pytest.raises(InvalidArgument):
        make_request(prompt=prompt, new=most + 1, sampling=sampling).validate(LIMITS)


def test_a_refusal_for_the_sequence_length_names_what_fits_it():
    with pytest.raises(InvalidArgument, match="at most 12 fit in the model's sequence length of 32"):
        make_request(prompt=(1,) * 20, new=13).validate(replace(LIMITS, num_blocks=8))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_room_is_the_most_new_tokens_that_fit_into_the_blocks(width):
    """`room` is the inverse of `max_kv_blocks`, also for prompts that are larger than the cache."""
    sampling = SamplingConfig(beam_width=width)
    for num_blocks in range(1, 7):
        for size in (1, 2, 4):
            limits = ModelLimits(1000, 10**6, 10**6, num_blocks, size, max_beam_width=4)
            for length in range(1, 30):
                room = limits.room(length, width)
                for count in range(1, 30):
                    request = Request(0, (1,) * length, count, sampling=sampling)
                    assert (request.max_kv_blocks(size) <= num_blocks) == (count <= room)


def test_an_error_is_made_again_from_its_code_and_text():
    error = error_from_kind("INVALID_ARG", "why")
    assert isinstance(error, InvalidArgument) and str(error) == "why"
    assert error_from_kind("no such code", "why").code == "INTERNAL"


# ---------------------------------------------------------------- prompt tables

TABLES = replace(LIMITS, hidden_size=2)


def test_virtual_tokens_stand_for_rows_of_the_table_and_are_optional():
    with_table(prompt=(102, 5, 100, 100, 101)).validate(TABLES)
    with_table(prompt=(1, 2, 3)).validate(TABLES)
    with_table(prompt=(1, 2), output=OutputOptions(return_prompt_log_probs=True)).validate(TABLES)
    with_table(prompt=(102,), output=OutputOptions(return_context_logits=True)).validate(TABLES)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (with_table(prompt=(1, 103)), ["input_ids", "[0, 102]", "got 103", "position 1"]),
        (with_table(prompt=(1, -1)), ["input_ids", "got -1"]),
        (
            make_request(prompt=(1, 100)),
            ["input_ids", "[0, 99]", "got 100", "prompt_embedding_table", "missing"],
        ),
        (with_table(make_prompt_table(3, 4)), ["prompt_embedding_table", "[1, rows, 2]", "got [1, 3, 4]"]),
        (
            with_table(make_prompt_table(0, 2)),
            ["prompt_embedding_table", "at least one row", "got [1, 0, 2]"],
        ),
        (
            with_table(prompt=(1, 100), output=OutputOptions(return_prompt_log_probs=True)),
            ["return_prompt_log_probs", "prompt_embedding_table", "no probability"],
        ),
        (with_table(end_ids=(100,)), ["end_id", "got 100"]),
        (with_table(stop_words=((100,),)), ["stop_words_list", "got 100"]),
        (with_table(bad_words=((1, 102),)), ["bad_words_list", "got 102"]),
        (with_table(draft=ExternalDraft((100,))), ["draft_input_ids", "got 100"]),
    ],
)
def test_requests_that_no_prompt_table_allows_are_refused(request_, words):
    with pytest.raises(InvalidArgument) as error:
        request_.validate(TABLES)
    assert all(word in str(error.value) for word in words), error.value


def test_an_engine_without_tables_refuses_them():
    with pytest.raises(Unsupported, match="prompt_embedding_table"):
        with_table().validate(LIMITS)


def test_a_tables_digest_depends_on_bytes_type_and_shape():
    tables = [
        make_prompt_table(),
        make_prompt_table(fill=1),
        make_prompt_table(2, 3),
        make_prompt_table(6, 1),
    ]
    halves = replace(make_prompt_table().rows, shape=(3, 4), dtype="float16")
    digests = [table.digest for table in tables] + [PromptTable.of(halves).digest]
    assert len(set(digests)) == 5 and {len(digest) for digest in digests} == {16}
    assert make_prompt_table().digest == make_prompt_table().digest
