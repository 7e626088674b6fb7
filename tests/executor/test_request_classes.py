"""Request, SamplingConfig, OutputConfig, and the parts that only some requests have."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import inflight.executor as trtllm

TokenRange = trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig
GuideType = trtllm.GuidedDecodingParams.GuideType


def keywords(cls: type) -> dict[str, Any]:
    """Return the names of the constructor's keyword-only parameters."""
    parameters = inspect.signature(cls).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def positional(cls: type) -> list[str]:
    parameters = inspect.signature(cls).parameters.values()
    return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]


# ---------------------------------------------------------------- sampling

SAMPLING = {
    "top_k": 5,
    "top_p": 0.8,
    "top_p_min": 0.1,
    "top_p_reset_ids": 7,
    "top_p_decay": 0.9,
    "seed": 2**64 - 1,
    "temperature": 0.5,
    "min_tokens": 3,
    "beam_search_diversity_rate": 0.2,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "length_penalty": 1.0,
    "early_stopping": 0,
    "no_repeat_ngram_size": 4,
    "num_return_sequences": 2,
    "min_p": 0.05,
    "beam_width_array": [1, 2],
}


def test_beam_width_is_the_only_positional_argument_of_sampling() -> None:
    assert trtllm.SamplingConfig(3).beam_width == 3
    with pytest.raises(TypeError, match="positional"):
        trtllm.SamplingConfig(1, 5)


def test_sampling_fields_are_none_by_default() -> None:
    config = trtllm.SamplingConfig()
    assert config.beam_width == 1
    assert all(getattr(config, name) is None for name in SAMPLING)


@pytest.mark.parametrize("name", SAMPLING)
def test_a_control_can_be_constructed_assigned_and_pickled(name: str) -> None:
    config = trtllm.SamplingConfig(2 if name == "num_return_sequences" else 1, **{name: SAMPLING[name]})
    assert getattr(config, name) == SAMPLING[name]
    assigned = trtllm.SamplingConfig()
    setattr(assigned, name, SAMPLING[name])
    assert getattr(pickle.loads(pickle.dumps(assigned)), name) == SAMPLING[name]


OUT_OF_RANGE = [
    ("beam_width", 0),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_p", float("nan")),
    ("top_p_min", -0.1),
    ("top_p_min", 1.1),
    ("top_p_reset_ids", -1),
    ("top_p_decay", 0.0),
    ("top_p_decay", 1.1),
    ("seed", -1),
    ("seed", 2**64),
    ("temperature", -0.1),
    ("min_tokens", -1),
    ("beam_search_diversity_rate", -0.1),
    ("repetition_penalty", 0.0),
    ("length_penalty", -1.0),
    ("early_stopping", -1),
    ("no_repeat_ngram_size", -1),
    ("num_return_sequences", 0),
    ("min_p", -0.1),
    ("min_p", 1.1),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_number_out_of_range_is_refused_at_assignment(name: str, value: float) -> None:
    with pytest.raises(RuntimeError, match=rf"SamplingConfig\.{name} must be .*, got {value}"):
        trtllm.SamplingConfig(**{name: value})
    config = trtllm.SamplingConfig()
    with pytest.raises(RuntimeError, match=rf"SamplingConfig\.{name} must be"):
        setattr(config, name, value)


def test_no_more_beams_are_returned_than_searched() -> None:
    with pytest.raises(RuntimeError, match=r"num_return_sequences must be at most beam_width \(2\)"):
        trtllm.SamplingConfig(2, num_return_sequences=3)
    assert trtllm.SamplingConfig(1, num_return_sequences=3).num_return_sequences == 3


@pytest.mark.parametrize(("older", "name"), [("random_seed", "seed"), ("min_length", "min_tokens")])
def test_older_names_of_controls_set_the_newer_ones(older: str, name: str) -> None:
    config = trtllm.SamplingConfig(**{older: 4})
    assert getattr(config, name) == getattr(config, older) == 4
    setattr(config, older, 5)
    assert getattr(config, name) == 5
    both = trtllm.SamplingConfig(**{older: 1, name: 2})
    assert getattr(both, name) == 2, "the newer name counts"


def test_an_unknown_attribute_is_refused() -> None:
    config = trtllm.SamplingConfig()
    with pytest.raises(AttributeError, match="SamplingConfig has no attribute 'topk'"):
        config.topk = 3
    with pytest.raises(TypeError, match="topk"):
        trtllm.SamplingConfig(topk=3)


@pytest.mark.parametrize(
    ("name", "value", "annotation"),
    [
        ("top_k", "5", r"int \| None"),
        ("top_k", 1.5, r"int \| None"),
        ("top_p", "a", r"float \| None"),
        ("beam_width", None, "int"),
        ("beam_width_array", "12", r"list\[int\] \| None"),
        ("beam_width_array", [1.5], r"list\[int\] \| None"),
    ],
)
def test_a_value_of_another_type_is_a_type_error(name: str, value: object, annotation: str) -> None:
    with pytest.raises(TypeError, match=rf"SamplingConfig\.{name} must be {annotation}, got"):
        trtllm.SamplingConfig(**{name: value})


def test_numpy_numbers_become_python_numbers() -> None:
    config = trtllm.SamplingConfig(
        top_k=np.int32(5), top_p=np.float32(0.5), beam_width_array=np.array([1, 2])
    )
    assert (type(config.top_k), type(config.top_p)) == (int, float)
    assert config.beam_width_array == [1, 2]


# ---------------------------------------------------------------- output


def test_output_is_positional_and_off_by_default() -> None:
    config = trtllm.OutputConfig()
    names = positional(trtllm.OutputConfig)
    assert names == [
        "return_log_probs",
        "return_context_logits",
        "return_generation_logits",
        "exclude_input_from_output",
        "return_encoder_output",
        "return_perf_metrics",
        "additional_model_outputs",
        "return_receipt",  # not in TensorRT-LLM
    ]
    assert [getattr(config, name) for name in names] == [False] * 6 + [None, False]


def test_output_can_be_pickled_with_the_models_own_outputs() -> None:
    config = trtllm.OutputConfig(
        True, False, True, False, True, False, [trtllm.AdditionalModelOutput("topKLogits", True)]
    )
    copied = pickle.loads(pickle.dumps(config))
    assert (copied.return_log_probs, copied.return_context_logits, copied.return_encoder_output) == (
        True,
        False,
        True,
    )
    assert (copied.additional_model_outputs[0].name, copied.additional_model_outputs[0].gather_context) == (
        "topKLogits",
        True,
    )
    assert trtllm.AdditionalModelOutput("x").gather_context is False


# ---------------------------------------------------------------- read-only parts

READ_ONLY = [
    trtllm.ExternalDraftTokensConfig([1, 2, 3], torch.ones(3, 5), 0.5, False),
    trtllm.PromptTuningConfig(torch.ones(10, 4), [0, 1]),
    trtllm.MultimodalInput([[1, 2, 3], [4, 5, 6]], [1, 2], [4, 5]),
    trtllm.MropeConfig(torch.ones(1, 8), -50),
    trtllm.LoraConfig(2, torch.ones(1, 2), torch.ones(1, 3, dtype=torch.int32)),
    trtllm.LookaheadDecodingConfig(3, 5, 7),
    trtllm.EagleConfig([[0, 0], [0, 1]], False, 0.5, True, 3),
    trtllm.ContextPhaseParams([1, 2], 9, b"state", [3]),
    trtllm.GuidedDecodingParams(GuideType.REGEX, r"\d+"),
    trtllm.KvCacheRetentionConfig([TokenRange(0, 2, 30)], 80),
]


def same(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


@pytest.mark.parametrize("config", READ_ONLY, ids=lambda config: type(config).__name__)
def test_a_read_only_part_cannot_be_changed_and_can_be_pickled(config: Any) -> None:
    copied = pickle.loads(pickle.dumps(config))
    for name in positional(type(config)):
        assert same(getattr(copied, name), getattr(config, name))
        with pytest.raises(AttributeError):
            setattr(config, name, getattr(config, name))


def test_a_draft_has_defaults_and_a_row_of_logits_for_each_token() -> None:
    config = trtllm.ExternalDraftTokensConfig([1, 2, 3])
    assert (config.tokens, config.logits, config.acceptance_threshold, config.fast_logits) == (
        [1, 2, 3],
        None,
        None,
        None,
    )
    with pytest.raises(RuntimeError, match=r"must have shape \[3, vocab_size\], got \[2, 5\]"):
        trtllm.ExternalDraftTokensConfig([1, 2, 3], torch.ones(2, 5))
    with pytest.raises(RuntimeError, match="tokens is empty"):
        trtllm.ExternalDraftTokensConfig([])


def test_the_offset_of_mrope_may_be_a_tensor() -> None:
    config = trtllm.MropeConfig(torch.ones(1, 8), torch.tensor([-50]))
    assert config.mrope_position_deltas == -50


def test_an_adapter_may_be_only_a_task_id() -> None:
    config = trtllm.LoraConfig(1)
    assert (config.task_id, config.weights, config.config) == (1, None, None)


INT32 = torch.int32


@pytest.mark.parametrize(
    ("weights", "config", "message"),
    [
        (torch.ones(1, 2), None, "must also have lora config"),
        (None, torch.ones(1, 3, dtype=INT32), "must also have lora config"),
        (torch.ones(2), torch.ones(1, 3, dtype=INT32), "Expected weights tensor to have 2 dimensions"),
        (torch.ones(1, 2), torch.ones(3, dtype=INT32), "Expected config tensor to have 2 dimensions"),
        (torch.ones(2, 2), torch.ones(1, 3, dtype=INT32), "Expected dim 0 of lora weights and lora config"),
        (
            torch.ones(1, 2),
            torch.ones(1, 3),
            "Expected lora config tensor to have type kINT32, got torch.float",
        ),
        (torch.ones(1, 2), torch.ones(1, 3, dtype=torch.uint32), "to have type kINT32"),
        (torch.ones(1, 2, device="meta"), torch.ones(1, 3, dtype=INT32), "lora weights to be in CPU memory"),
        (torch.ones(1, 2), torch.ones(1, 3, dtype=INT32, device="meta"), "lora config to be in CPU memory"),
    ],
)
def test_an_adapters_tensors_must_match(weights: Any, config: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        trtllm.LoraConfig(1, weights, config)


@pytest.mark.parametrize("task_id", [-1, 2**64])
def test_the_id_of_an_adapter_has_64_bits(task_id: int) -> None:
    with pytest.raises(RuntimeError, match="task_id"):
        trtllm.LoraConfig(task_id)
    assert trtllm.LoraConfig(2**64 - 1).task_id == 2**64 - 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 3, 4), "windowSize requires >= 1"),
        ((4, 0, 4), "ngramSize requires >= 1"),
        ((4, 3, -1), "verificationSetSize requires >=0"),
        ((1, 1, 1), "ngramSize=1 requires verificationSetSize=0"),
        ((2, 1, 0), "ngramSize=1 requires windowSize=1"),
    ],
)
def test_invalid_lookahead_sizes_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        trtllm.LookaheadDecodingConfig(*sizes)


def test_lookahead_decoding_computes_its_resources() -> None:
    config = trtllm.LookaheadDecodingConfig(3, 5, 7)
    assert (config.max_window_size, config.max_ngram_size, config.max_verification_set_size) == (3, 5, 7)
    # 3 tokens of the first column, 4 for each of 2 more columns and 7 guesses, and one more token.
    assert config.calculate_speculative_resource() == (40, 5, 39, 4)
    assert trtllm.LookaheadDecodingConfig.calculate_speculative_resource_tuple(1, 1, 0) == (1, 1, 0, 0)
    defaults = (
        trtllm.LookaheadDecodingConfig.get_default_lookahead_decoding_window(),
        trtllm.LookaheadDecodingConfig.get_default_lookahead_decoding_ngram(),
        trtllm.LookaheadDecodingConfig.get_default_lookahead_decoding_verification_set(),
    )
    assert defaults == (4, 3, 4)


def test_eagle_has_defaults() -> None:
    config = trtllm.EagleConfig()
    values = [getattr(config, name) for name in positional(trtllm.EagleConfig)]
    assert values == [None, True, None, False, None]


def test_every_guide_except_json_needs_a_text() -> None:
    assert trtllm.GuidedDecodingParams(GuideType.JSON).guide is None
    for guide_type in GuideType:
        assert trtllm.GuidedDecodingParams(guide_type, guide="x").guide == "x"
        if guide_type is not GuideType.JSON:
            with pytest.raises(
                RuntimeError, match="guide string must be provided unless using GuideType::kJSON"
            ):
                trtllm.GuidedDecodingParams(guide_type)


# ---------------------------------------------------------------- retention


def test_retention_has_defaults_and_times() -> None:
    config = trtllm.KvCacheRetentionConfig([TokenRange(0, None, 30, timedelta(seconds=30))])
    part = config.token_range_retention_configs[0]
    assert (part.token_start, part.token_end, part.priority, part.duration_ms) == (
        0,
        None,
        30,
        timedelta(seconds=30),
    )
    assert (config.decode_retention_priority, config.decode_duration_ms) == (35, None)
    assert (config.transfer_mode, config.directory) == (trtllm.KvCacheTransferMode.DRAM, "")


def test_retention_is_positional() -> None:
    config = trtllm.KvCacheRetentionConfig(
        [TokenRange(64, 100, 10), TokenRange(0, 64, 80)],
        10,
        timedelta(milliseconds=30000),
        trtllm.KvCacheTransferMode.GDS,
        "test_dir",
    )
    assert [part.token_start for part in config.token_range_retention_configs] == [0, 64], "sorted by start"
    assert config.decode_duration_ms == timedelta(seconds=30)
    assert (config.transfer_mode, config.directory) == (trtllm.KvCacheTransferMode.GDS, "test_dir")


def test_retention_is_equal_by_value() -> None:
    def make(priority: int) -> trtllm.KvCacheRetentionConfig:
        return trtllm.KvCacheRetentionConfig([TokenRange(0, 2, priority, timedelta(seconds=30))], 80)

    assert make(30) == make(30) != make(31)
    assert pickle.loads(pickle.dumps(make(30))) == make(30)
    assert TokenRange(0, 2, 30) == TokenRange(0, 2, 30) != TokenRange(0, 3, 30)


@pytest.mark.parametrize("priority", [-1, 101])
def test_priorities_are_from_0_to_100(priority: int) -> None:
    with pytest.raises(RuntimeError, match="must be between 0 and 100"):
        TokenRange(0, 2, priority)
    with pytest.raises(RuntimeError, match="must be between 0 and 100"):
        trtllm.KvCacheRetentionConfig([], priority)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 64), (32, 128)], r"non-overlapping\. got \[\(0, 64\), \(32, 128\)\]"),
        ([(0, None), (30, 50)], "Invalid use of end indicator"),
        ([(-1, 5)], "non-negative"),
        ([(5, 5)], r"positive, non-zero length\. got \[\(5, 5\)\]"),
    ],
)
def test_invalid_ranges_are_refused(ranges: list[tuple[int, int | None]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trtllm.KvCacheRetentionConfig([TokenRange(start, end, 10) for start, end in ranges], 50)


@pytest.mark.parametrize("ranges", [[(0, None)], [(50, 100), (30, 40)], [(0, 30), (30, 50), (60, 80)]])
def test_ranges_that_do_not_overlap_are_accepted(ranges: list[tuple[int, int | None]]) -> None:
    config = trtllm.KvCacheRetentionConfig([TokenRange(start, end, 10) for start, end in ranges])
    assert len(config.token_range_retention_configs) == len(ranges)


# ---------------------------------------------------------------- requests

KEYWORDS = [
    "streaming", "sampling_config", "output_config", "end_id", "pad_id", "position_ids", "bad_words", "stop_words",
    "embedding_bias", "external_draft_tokens_config", "prompt_tuning_config", "multimodal_input",
    "multimodal_embedding", "mrope_config", "lora_config", "lookahead_config", "kv_cache_retention_config",
    "logits_post_processor_name", "logits_post_processor", "encoder_input_token_ids", "client_id",
    "return_all_generated_tokens", "priority", "context_phase_params", "encoder_input_features",
    "encoder_output_length", "cross_attention_mask", "num_return_sequences", "eagle_config",
    "skip_cross_attn_blocks", "guided_decoding_params", "language_adapter_uid", "allotted_time_ms",
    "cache_salt_id",
]  # fmt: skip


def test_a_request_takes_two_positional_arguments_and_the_originals_keywords() -> None:
    assert positional(trtllm.Request) == ["input_token_ids", "max_tokens"]
    assert [name for name in keywords(trtllm.Request) if name != "request_type"] == KEYWORDS


def test_a_request_has_the_originals_defaults() -> None:
    request = trtllm.Request([1, 2, 3], 5)
    set_by_default = {
        "streaming": False,
        "return_all_generated_tokens": False,
        "priority": 0.5,
        "num_return_sequences": 1,
    }
    for name in KEYWORDS:
        if name not in ("sampling_config", "output_config"):
            assert getattr(request, name) == set_by_default.get(name), name
    assert request.sampling_config.beam_width == 1 and not request.output_config.return_log_probs
    assert request.request_type is trtllm.RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION


VALUES: dict[str, Any] = {
    "streaming": True,
    "end_id": -1,
    "pad_id": -2,
    "position_ids": [0, 1, 2],
    "bad_words": [[4, 5, 6]],
    "stop_words": [[7, 8, 9], [1]],
    "embedding_bias": torch.ones(10),
    "multimodal_embedding": torch.ones(10, 6),
    "logits_post_processor_name": "my_logits_pp",
    "encoder_input_token_ids": [1],
    "client_id": 1234,
    "return_all_generated_tokens": True,
    "priority": 0.7,
    "encoder_output_length": 4,
    "allotted_time_ms": timedelta(milliseconds=5),
    "cache_salt_id": 6,
    "request_type": trtllm.RequestType.REQUEST_TYPE_CONTEXT_ONLY,
}


@pytest.mark.parametrize("name", VALUES)
def test_a_field_of_a_request_can_be_constructed_assigned_and_pickled(name: str) -> None:
    made = trtllm.Request([1, 2, 3], max_tokens=1, **{name: VALUES[name]})
    assert same(getattr(made, name), VALUES[name])
    assigned = trtllm.Request([1, 2, 3], 1)
    setattr(assigned, name, VALUES[name])
    assert same(getattr(pickle.loads(pickle.dumps(assigned)), name), VALUES[name])


def test_the_keyword_of_request_type_is_type() -> None:
    context_only = trtllm.RequestType.REQUEST_TYPE_CONTEXT_ONLY
    request = trtllm.Request([1], 1, type=context_only)
    assert request.request_type is context_only


@pytest.mark.parametrize("name", ["input_token_ids", "max_tokens"])
def test_the_prompt_and_the_length_are_read_only(name: str) -> None:
    request = trtllm.Request([1, 2], 3)
    with pytest.raises(AttributeError, match=f"Request.{name} is read-only"):
        setattr(request, name, getattr(request, name))


def test_max_new_tokens_is_an_alias_of_max_tokens() -> None:
    request = trtllm.Request(input_token_ids=[1], max_new_tokens=25)
    assert request.max_tokens == request.max_new_tokens == 25


def test_the_batched_post_processors_name_is_read_on_class_and_instance() -> None:
    request = trtllm.Request([1], 1)
    assert trtllm.Request.BATCHED_POST_PROCESSOR_NAME == request.BATCHED_POST_PROCESSOR_NAME == "batched"


def test_a_request_takes_unknown_attributes_and_pickles_them() -> None:
    request = trtllm.Request([1], 1)
    request.py_note = "x"
    assert pickle.loads(pickle.dumps(request)).py_note == "x"


@pytest.mark.parametrize("priority", [-0.1, 1.1])
def test_a_priority_is_from_0_to_1(priority: float) -> None:
    with pytest.raises(RuntimeError, match=r"Request\.priority must be in \[0, 1\]"):
        trtllm.Request([1], 1, priority=priority)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1), "input_token_ids is empty"),
        (([1], 0), "max_tokens must be >= 1"),
    ],
)
def test_a_request_without_a_prompt_or_tokens_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        trtllm.Request(*arguments)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda given: trtllm.Request([1], 1, embedding_bias=given), "Request.embedding_bias"),
        (lambda given: trtllm.PromptTuningConfig(given), "PromptTuningConfig.embedding_table"),
        (lambda given: trtllm.LoraConfig(1, given, given), "LoraConfig.weights"),
        (lambda given: trtllm.ExternalDraftTokensConfig([1], given), "ExternalDraftTokensConfig.logits"),
    ],
)
def test_a_list_in_place_of_a_tensor_is_a_type_error(make: Callable[[Any], Any], field: str) -> None:
    with pytest.raises(TypeError, match=rf"{field} must be torch\.Tensor.*, got \[1\.0\] \(list\)"):
        make([1.0])


def test_a_bias_is_a_vector() -> None:
    with pytest.raises(RuntimeError, match="embedding_bias must be a tensor of one dimension"):
        trtllm.Request([1], 1, embedding_bias=torch.ones(1, 10))


def test_a_request_has_one_post_processor() -> None:
    with pytest.raises(RuntimeError, match="Only one of 'logitsPostProcessorName' and 'logitsPostProcessor'"):
        trtllm.Request([1], 1, logits_post_processor_name="a", logits_post_processor=print)


def test_guides_and_beams_exclude_each_other() -> None:
    with pytest.raises(RuntimeError, match="Guided decoding does not support"):
        trtllm.Request(
            [1],
            1,
            sampling_config=trtllm.SamplingConfig(2),
            guided_decoding_params=trtllm.GuidedDecodingParams(GuideType.JSON),
        )


def test_a_requests_num_return_sequences_is_deprecated_and_works() -> None:
    with pytest.warns(DeprecationWarning, match="set it in SamplingConfig"):
        request = trtllm.Request([1], 1, num_return_sequences=3)
    assert request.sampling_config.num_return_sequences == 3


def test_a_request_copies_its_configurations() -> None:
    """As in the bindings, a configuration may be changed after a request was made from it."""
    sampling, words = trtllm.SamplingConfig(), [[1]]
    request = trtllm.Request([1], 1, sampling_config=sampling, bad_words=words)
    sampling.top_k = 5
    words.append([2])
    assert request.sampling_config.top_k is None and request.bad_words == [[1]]
    request.sampling_config.top_k = 7
    assert request.sampling_config.top_k == 7, "what it has is its own, and not another copy"


def test_ids_may_be_an_array_or_a_tensor() -> None:
    for ids in (np.array([1, 2]), torch.tensor([1, 2]), (1, 2), range(1, 3)):
        assert trtllm.Request(ids, 1).input_token_ids == [1, 2]
    with pytest.raises(TypeError, match=r"Request\.input_token_ids must be list\[int\]"):
        trtllm.Request("12", 1)


def test_times_are_timedeltas() -> None:
    with pytest.raises(TypeError, match=r"Request\.allotted_time_ms must be timedelta \| None, got 5"):
        trtllm.Request([1], 1, allotted_time_ms=5)
