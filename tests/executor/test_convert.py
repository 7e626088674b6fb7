"""Conversion of an executor's requests and configuration for the engine, field by field."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import inflight.executor as trtllm
from inflight.additional_outputs import OfferedOutput, WantedOutput
from inflight.build import check_parameters
from inflight.config import CapacityPolicy, ChunkingPolicy, Parameters, SchedulingConfig, Speculation
from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.kv.retention import Retention, RetentionConfig, TokenRangeRetention
from inflight.core.request import sampling_config
from inflight.core.request.adapter import LoraRequest, LoraWeights, Matrix, RawBuffer
from inflight.core.request.engine_description import ModelLimits
from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.request import ExternalDraft, FloatTensor, OutputOptions
from inflight.core.request.request import Request as CoreRequest
from inflight.core.request.sampling_config import SamplingConfig as CoreSamplingConfig
from inflight.errors import InvalidArgument
from inflight.executor.convert import (
    OWN_POST_PROCESSOR_NAME,
    to_core_request,
    to_host_array,
    to_lora_request,
)
from inflight.executor.fields import FIELDS, FieldChecker, Treatment
from inflight.executor.parameters import DEFAULT_MAX_BATCH_SIZE, to_parameters

VOCABULARY = 10
LIMITS = ModelLimits(
    VOCABULARY, max_sequence_length=64, max_input_length=63, num_blocks=32, tokens_per_block=4,
    max_beam_width=4, max_draft_length=8, max_adapter_rank=64,
)  # fmt: skip
TokenRange = trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig


def convert(**fields: Any) -> CoreRequest:
    return to_core_request(trtllm.Request([1, 2, 3], 5, **fields), LIMITS)


PLAIN = CoreRequest(0, (1, 2, 3), 5, sampling=CoreSamplingConfig(early_stopping=1))


def test_a_plain_request_gets_the_defaults_of_the_servers_tensors() -> None:
    """If no end id is given, only early stopping has another default than the server's tensors."""
    assert convert() == PLAIN


def test_the_request_id_is_kept() -> None:
    assert to_core_request(trtllm.Request([1], 1), LIMITS, 2**64 - 1).request_id == 2**64 - 1


ADAPTER = torch.randn(2, 6)
ROWS = torch.tensor([[1, 0, 2, 0], [3, 1, 1, 1]], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_adapters_weights_keep_their_bytes(dtype: torch.dtype) -> None:
    weights = ADAPTER.to(dtype)
    raw = bytes(weights.flatten().view(torch.uint8).tolist())
    name = str(dtype).removeprefix("torch.")
    expected = LoraWeights(Matrix((2, 6), name, RawBuffer(raw)), ((1, 0, 2, 0), (3, 1, 1, 1)))
    assert convert(lora_config=trtllm.LoraConfig(7, weights, ROWS)).lora == LoraRequest(7, weights=expected)
    turned = weights.T.contiguous().T  # not contiguous
    assert convert(lora_config=trtllm.LoraConfig(7, turned, ROWS)).lora == LoraRequest(7, weights=expected)


def test_an_adapter_may_be_numpy_arrays() -> None:
    made = trtllm.LoraConfig(7, ADAPTER.half().numpy(), ROWS[:, :3].numpy())
    assert to_lora_request(made) == to_lora_request(trtllm.LoraConfig(7, ADAPTER.half(), ROWS[:, :3]))


def test_an_adapter_may_be_only_an_id_or_a_name() -> None:
    assert convert().lora is None
    assert convert(lora_config=trtllm.LoraConfig(0)).lora == LoraRequest(0)
    assert to_lora_request("sql") == LoraRequest(name="sql")
    assert to_lora_request("") is None


@pytest.mark.parametrize(
    ("weights", "config", "message"),
    [
        (ADAPTER.double(), ROWS, "lora weights must be one of float32, float16, bfloat16, got float64"),
        (ADAPTER, ROWS[:, :2], r"lora_keys to have a size in \[3, 4\]"),
    ],
)
def test_invalid_adapters_are_refused(weights: torch.Tensor, config: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        convert(lora_config=trtllm.LoraConfig(1, weights, config))


def test_lists_and_bfloat16_tensors_become_arrays() -> None:
    assert to_host_array([1, 2]).tolist() == [1, 2]
    assert to_host_array(torch.ones(2, dtype=torch.bfloat16)).tolist() == [0x3F80] * 2


def test_settings_of_saved_blocks_are_converted() -> None:
    cache = trtllm.KvCacheConfig(
        host_cache_size=1 << 20, onboard_blocks=False, secondary_offload_min_priority=50
    )
    made = to_parameters(trtllm.ExecutorConfig(kv_cache_config=cache), "/model")
    assert made.engine.kv_cache_host_memory_bytes == 1 << 20
    assert not made.scheduler.kv_cache_onboard_blocks
    assert made.scheduler.secondary_offload_min_priority == 50
    plain = to_parameters(trtllm.ExecutorConfig(), "/model")
    assert plain.engine.kv_cache_host_memory_bytes == 0 and plain.scheduler.kv_cache_onboard_blocks
    assert plain.scheduler.secondary_offload_min_priority == 30


def test_settings_of_the_adapter_cache_are_converted() -> None:
    peft = trtllm.PeftCacheConfig(
        optimal_adapter_size=16, max_adapter_size=128, device_cache_percent=0.1, host_cache_size=1 << 20,
        lora_prefetch_dir="/adapters",
    )  # fmt: skip
    made = to_parameters(trtllm.ExecutorConfig(peft_cache_config=peft), "/checkpoint")
    engine = made.engine
    assert (engine.lora_cache_optimal_adapter_size, engine.lora_cache_max_adapter_size) == (16, 128)
    assert engine.lora_cache_gpu_memory_fraction == 0.1
    assert (made.lora_cache_host_memory_bytes, made.lora_prefetch_dir) == (1 << 20, "/adapters")


def test_unset_fields_of_the_adapter_cache_keep_their_defaults() -> None:
    base = Parameters(
        lora_cache_host_memory_bytes=5, lora_dir="/l", lora_adapters=(("sql", "/s"),), lora_prefetch_dir="/p"
    )
    base = replace(base, engine=replace(base.engine, lora_cache_max_adapter_size=256))
    made = to_parameters(trtllm.ExecutorConfig(), "/checkpoint", base)
    assert made.engine.lora_cache_max_adapter_size == 256
    for name in ("lora_cache_host_memory_bytes", "lora_dir", "lora_adapters", "lora_prefetch_dir"):
        assert getattr(made, name) == getattr(base, name)


def floats(*values: float) -> FloatTensor:
    return FloatTensor((len(values),), np.array(values, np.float32).tobytes())


BIAS = [float(value) for value in range(VOCABULARY)]
FIELDS_OF_A_REQUEST: dict[str, tuple[Any, dict[str, Any]]] = {
    "streaming": (True, {"streaming": True}),
    "pad_id": (7, {"pad_id": 7}),
    "bad_words": ([[4], [5, 6]], {"bad_words": ((4,), (5, 6))}),
    "stop_words": ([[4], [5, 6]], {"stop_words": ((4,), (5, 6))}),
    "embedding_bias": (torch.tensor(BIAS), {"embedding_bias": floats(*BIAS)}),
    "external_draft_tokens_config": (
        trtllm.ExternalDraftTokensConfig([1, 2], None, 0.5),
        {"draft": ExternalDraft((1, 2), None, 0.5)},
    ),
    "kv_cache_retention_config": (
        trtllm.KvCacheRetentionConfig(
            [TokenRange(0, 2, 80, timedelta(seconds=30)), TokenRange(2, None, 5)], 10
        ),
        {
            "retention": RetentionConfig(
                (
                    TokenRangeRetention(0, 2, Retention(80, 30_000)),
                    TokenRangeRetention(2, None, Retention(5, None)),
                ),
                Retention(10, None),
            )
        },
    ),
    "client_id": (9, {"client_id": 9}),
    "priority": (0.75, {"priority": 0.75}),
    "allotted_time_ms": (timedelta(seconds=2, microseconds=1500), {"allotted_time_ms": 2001}),
    "cache_salt_id": (6, {"identity": PrefixIdentity(cache_salt_id=6)}),
}


@pytest.mark.parametrize("name", FIELDS_OF_A_REQUEST)
def test_each_field_of_a_request_is_converted(name: str) -> None:
    value, expected = FIELDS_OF_A_REQUEST[name]
    assert convert(**{name: value}) == replace(PLAIN, **expected)


CONTROLS = {
    control.executor.name: (control.example, {name: control.example})
    for name, control in sampling_config.CONTROLS.items()
    if control.executor
} | {"early_stopping": (0, {"early_stopping": 0}), "temperature": (0.0, {"temperature": 0.0})}


@pytest.mark.parametrize("name", CONTROLS)
def test_every_control_of_sampling_is_converted(name: str) -> None:
    value, expected = CONTROLS[name]
    request = convert(sampling_config=trtllm.SamplingConfig(**{name: value}))
    assert request.sampling == replace(PLAIN.sampling, **expected)


OUTPUTS = {
    "return_log_probs": "return_log_probs",
    "return_context_logits": "return_context_logits",
    "return_generation_logits": "return_generation_logits",
    "exclude_input_from_output": "exclude_input_from_output",
    "return_perf_metrics": "return_perf_metrics",
    "return_receipt": "return_receipt",
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_output_flag_is_converted(name: str) -> None:
    request = convert(output_config=trtllm.OutputConfig(**{name: True}))
    assert request.output == OutputOptions(**{OUTPUTS[name]: True})


def test_every_working_field_is_converted_or_handled_by_the_executor() -> None:
    own = {
        trtllm.Request: {
            "input_token_ids", "max_tokens", "sampling_config", "output_config", "end_id", "num_return_sequences",
            "return_all_generated_tokens", "logits_post_processor_name", "logits_post_processor",
            "guided_decoding_params", "lora_config", "prompt_tuning_config",
            "mrope_config",
        },
        trtllm.OutputConfig: {"additional_model_outputs"},
    }  # fmt: skip
    converted = {
        trtllm.Request: set(FIELDS_OF_A_REQUEST) - {"pad_id"},
        trtllm.SamplingConfig: set(CONTROLS),
        trtllm.OutputConfig: set(OUTPUTS),
    }
    for owner, names in converted.items():
        working = {n.name for n in FIELDS if n.owner is owner and n.treatment is Treatment.WORKS}
        assert working == names | own.get(owner, set())


# ---------------------------------------------------------------- fields with converted meanings


@pytest.mark.parametrize("end_id", [None, -1])
def test_an_end_id_of_none_or_negative_is_ignored(end_id: int | None) -> None:
    assert convert(end_id=end_id).end_ids == ()


def test_with_an_end_id_the_minimum_length_is_1_by_default() -> None:
    request = convert(end_id=4)
    assert (request.end_ids, request.sampling.min_length) == ((4,), 1)
    allowed = convert(end_id=4, sampling_config=trtllm.SamplingConfig(min_tokens=0))
    assert allowed.sampling.min_length == 0


@pytest.mark.parametrize("pad_id", [-1, -2, None])
def test_a_pad_id_of_none_or_negative_is_left_out(pad_id: int | None) -> None:
    assert convert(pad_id=pad_id).pad_id is None


def test_a_number_of_sequences_may_be_assigned_to_the_request() -> None:
    request = trtllm.Request([1], 1)
    request.num_return_sequences = 3
    assert to_core_request(request, LIMITS).sampling.num_return_sequences == 3
    request.sampling_config.num_return_sequences = 2
    assert to_core_request(request, LIMITS).sampling.num_return_sequences == 2


@pytest.mark.parametrize(
    ("time", "milliseconds"),
    [(None, 0), (timedelta(0), 1), (timedelta(microseconds=10), 1), (timedelta(days=1), 86_400_000)],
)
def test_an_allotted_time_of_zero_is_a_deadline(time: timedelta | None, milliseconds: int) -> None:
    assert convert(allotted_time_ms=time).allotted_time_ms == milliseconds


def test_a_negative_allotted_time_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="allotted_time_ms must not be negative"):
        convert(allotted_time_ms=timedelta(seconds=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_bias_may_be_of_any_float_type_and_layout(dtype: torch.dtype) -> None:
    bias = torch.stack([torch.tensor(BIAS), torch.zeros(VOCABULARY)], dim=1).to(dtype)[:, 0]
    assert not bias.is_contiguous()
    assert convert(embedding_bias=bias.requires_grad_()).embedding_bias == floats(*BIAS)


def test_a_bias_may_be_a_numpy_array() -> None:
    assert convert(embedding_bias=np.array(BIAS)).embedding_bias == floats(*BIAS)


def test_a_bias_with_numbers_that_are_not_finite_is_refused() -> None:
    bias = torch.zeros(VOCABULARY)
    bias[1], bias[3] = -torch.inf, torch.nan  # the first one bans a token
    with pytest.raises(InvalidArgument, match=r"embedding_bias must hold finite .* got nan for token 3$"):
        convert(embedding_bias=bias)


def test_a_bias_of_another_size_is_refused_with_the_message_of_tensorrt_llm() -> None:
    with pytest.raises(InvalidArgument, match=r"embedding bias shape is not as expected.*\[10\].*got \[9\]"):
        convert(embedding_bias=torch.ones(9))


def test_a_drafts_logits_are_converted() -> None:
    logits = torch.arange(2.0 * VOCABULARY).reshape(2, VOCABULARY)
    draft = convert(external_draft_tokens_config=trtllm.ExternalDraftTokensConfig([1, 2], logits)).draft
    assert draft.logits.shape == (2, VOCABULARY)
    assert np.frombuffer(draft.logits.data, np.float32).tolist() == logits.flatten().tolist()


def test_retention_of_generated_tokens_has_the_originals_default() -> None:
    retention = convert(kv_cache_retention_config=trtllm.KvCacheRetentionConfig([])).retention
    assert retention.decode == Retention(35, None)
    assert convert().retention.decode is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_words": [[]]}, "stop_words has an empty word"),
        ({"end_id": 10}, "end_id must be a token id in"),
        ({"sampling_config": trtllm.SamplingConfig(5)}, "beam_width must be at most 4"),
    ],
)
def test_fields_that_the_model_cannot_serve_are_errors_of_the_request(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        convert(**fields)


def test_generation_logits_of_streamed_beams_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="cannot be streamed with beam_width > 1"):
        convert(
            streaming=True,
            sampling_config=trtllm.SamplingConfig(2),
            output_config=trtllm.OutputConfig(return_generation_logits=True),
        )


Types = trtllm.GuidedDecodingParams.GuideType


@pytest.mark.parametrize("kind", [kind.name for kind in Types])
def test_guides_are_converted_by_name(kind: str) -> None:
    text = None if kind == "JSON" else "a"
    converted = convert(guided_decoding_params=trtllm.GuidedDecodingParams(Types[kind], text))
    assert converted.guide == Guide(GuideKind[kind], text or "")


def test_an_additional_output_is_converted() -> None:
    limits = replace(LIMITS, additional_outputs=(OfferedOutput("last_hidden_state", True, 4),))
    wanted = [trtllm.AdditionalModelOutput("last_hidden_state", True)]
    request = trtllm.Request([1], 1, output_config=trtllm.OutputConfig(additional_model_outputs=wanted))
    found = to_core_request(request, limits).output.additional_outputs
    assert found == (WantedOutput("last_hidden_state", True),)
    with pytest.raises(InvalidArgument, match="no output 'last_hidden_state'"):
        to_core_request(request, LIMITS)


def test_logits_post_processors_are_converted_by_name() -> None:
    limits = replace(LIMITS, logits_post_processors=("a", OWN_POST_PROCESSOR_NAME))

    def name(**fields: Any) -> str:
        request = trtllm.Request([1], 1, **fields)
        return to_core_request(request, limits).logits_post_processor_name

    assert name(logits_post_processor_name="a") == "a"
    assert name(logits_post_processor=print) == OWN_POST_PROCESSOR_NAME
    for missing in ("b", OWN_POST_PROCESSOR_NAME):
        with pytest.raises(trtllm.ExecutorError, match=f"^LogitsPostProcessor {missing} not found$"):
            name(logits_post_processor_name=missing)
    with pytest.raises(trtllm.ExecutorError, match=r"^Batched logits post processor is not defined$"):
        name(logits_post_processor_name="batched")
    with pytest.raises(trtllm.NotSupported, match="whole model is in this process"):
        convert(logits_post_processor=print)


# ---------------------------------------------------------------- configuration


def parameters(**fields: Any) -> Parameters:
    made = to_parameters(trtllm.ExecutorConfig(**fields), "/checkpoint")
    check_parameters(made)
    return made


def test_a_plain_configuration_gets_the_defaults() -> None:
    plain = parameters()
    assert plain.engine.gpt_model_path == "/checkpoint"
    assert plain.engine.max_num_sequences == DEFAULT_MAX_BATCH_SIZE
    assert plain.engine.max_num_tokens == plain.scheduler.max_num_tokens == 8192
    assert (plain.scheduler.max_beam_width, plain.engine.normalize_log_probs) == (1, True)
    assert plain.scheduler.policy is CapacityPolicy.GUARANTEED_NO_EVICT
    assert plain.launch_mode is None and plain.gpu_device_ids == ()


KV = trtllm.KvCacheConfig
CONFIGURATION: dict[str, tuple[dict[str, Any], str, Any]] = {
    "beams": ({"max_beam_width": 3}, "scheduler.max_beam_width", 3),
    "chunks": ({"enable_chunked_context": True}, "scheduler.enable_chunked_context", True),
    "log probs": ({"normalize_log_probs": False}, "engine.normalize_log_probs", False),
    "iterations": ({"iter_stats_max_iterations": 5}, "iter_stats_max_iterations", 5),
    "requests": ({"request_stats_max_iterations": 5}, "request_stats_max_iterations", 5),
    "sequences": ({"max_batch_size": 5}, "engine.max_num_sequences", 5),
    "tokens": ({"max_num_tokens": 100}, "scheduler.max_num_tokens", 100),
    "the engine's tokens": ({"max_num_tokens": 100}, "engine.max_num_tokens", 100),
    "static": ({"batching_type": trtllm.BatchingType.STATIC}, "gpt_model_type", "V1"),
    "reuse": ({"kv_cache_config": KV(False)}, "scheduler.enable_kv_cache_reuse", False),
    "cache": ({"kv_cache_config": KV(max_tokens=4096)}, "engine.max_tokens_in_paged_kv_cache", 4096),
    "window": ({"kv_cache_config": KV(max_attention_window=[8, 16])}, "engine.max_attention_window_size", (8, 16)),
    "sinks": ({"kv_cache_config": KV(sink_token_length=4)}, "engine.sink_token_length", 4),
    "memory of a GPU": (
        {"kv_cache_config": KV(free_gpu_memory_fraction=0.25)}, "engine.kv_cache_free_gpu_mem_fraction", 0.25,
    ),
    "memory of a CPU": (
        {"kv_cache_config": KV(free_gpu_memory_fraction=0.25)}, "engine.kv_cache_free_cpu_mem_fraction", 0.25,
    ),
    "devices": ({"parallel_config": trtllm.ParallelConfig(device_ids=[1, 0])}, "gpu_device_ids", (1, 0)),
    "chunking": (
        {"scheduler_config": trtllm.SchedulerConfig(
            context_chunking_policy=trtllm.ContextChunkingPolicy.EQUAL_PROGRESS)},
        "scheduler.context_chunking_policy", ChunkingPolicy.EQUAL_PROGRESS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CONFIGURATION)
def test_each_field_of_the_configuration_is_converted(what: str) -> None:
    fields, path, expected = CONFIGURATION[what]
    found: Any = parameters(**fields)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == expected


@pytest.mark.parametrize("name", [policy.name for policy in trtllm.CapacitySchedulerPolicy])
def test_policies_are_converted_by_name(name: str) -> None:
    config = trtllm.SchedulerConfig(trtllm.CapacitySchedulerPolicy[name])
    assert parameters(scheduler_config=config).scheduler.policy is CapacityPolicy[name]


def test_static_batching_may_be_set_in_two_ways() -> None:
    by_type = parameters(batching_type=trtllm.BatchingType.STATIC)
    by_policy = parameters(
        scheduler_config=trtllm.SchedulerConfig(trtllm.CapacitySchedulerPolicy.STATIC_BATCH)
    )
    assert by_type == by_policy


@pytest.mark.parametrize(
    ("fields", "num_sequences"),
    [
        ({"max_num_tokens": 40}, 40),
        ({"max_num_tokens": 40, "enable_chunked_context": True}, 9),
        ({"kv_cache_config": KV(max_tokens=256)}, 8),
        ({"max_beam_width": 100}, 100),
    ],
)
def test_the_default_batch_size_is_limited_by_room(fields: dict[str, Any], num_sequences: int) -> None:
    assert parameters(**fields).engine.max_num_sequences == num_sequences


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(trtllm.CommunicationMode.LEADER, "leader"), (trtllm.CommunicationMode.ORCHESTRATOR, "orchestrator")],
)
def test_the_launch_mode_of_several_ranks_is_set(mode: trtllm.CommunicationMode, expected: str) -> None:
    config = trtllm.ExecutorConfig(parallel_config=trtllm.ParallelConfig(communication_mode=mode))
    assert to_parameters(config, "", Parameters(tensor_parallel_size=2)).launch_mode == expected
    assert to_parameters(config, "").launch_mode is None


def test_parameters_missing_in_a_configuration_are_kept() -> None:
    base = Parameters(watchdog_timeout_ms=5, tensor_parallel_size=2)
    base = replace(base, engine=replace(base.engine, dtype="float32", tokens_per_block=16))
    made = to_parameters(trtllm.ExecutorConfig(), "/checkpoint", base)
    assert (made.watchdog_timeout_ms, made.engine.dtype, made.engine.tokens_per_block) == (5, "float32", 16)


Backend = trtllm.GuidedDecodingConfig.GuidedDecodingBackend


def test_the_guided_decoding_backend_is_set() -> None:
    base = Parameters(guided_decoding_backend="xgrammar")
    config = trtllm.ExecutorConfig
    guided = trtllm.GuidedDecodingConfig(Backend.LLGUIDANCE)
    assert to_parameters(config(), "", base).guided_decoding_backend == "xgrammar"
    assert (
        to_parameters(config(guided_decoding_config=guided), "", base).guided_decoding_backend == "llguidance"
    )
    assert parameters(guided_decoding_config=trtllm.GuidedDecodingConfig(Backend.XGRAMMAR)) == replace(
        parameters(), guided_decoding_backend="xgrammar"
    )


EAGLE3 = Speculation(Speculation.EAGLE3, 3)


@pytest.mark.parametrize(
    ("choices", "base", "expected"),
    [
        ([[0, 0], [0]], None, Speculation(Speculation.MTP, 2)),
        ([[0]], Speculation(Speculation.MTP, 4), Speculation(Speculation.MTP, 1)),
        ([[0], [0, 0]], EAGLE3, Speculation(Speculation.EAGLE3, 2)),
        (None, EAGLE3, EAGLE3),
        (None, None, Speculation(Speculation.MTP, 1)),
        (None, Speculation(Speculation.SUFFIX), Speculation(Speculation.MTP, 1)),
    ],
)
def test_a_chain_of_eagle_choices_is_the_length_of_drafts_by_a_head(
    choices: list[list[int]] | None, base: Speculation | None, expected: Speculation
) -> None:
    decoding = trtllm.DecodingConfig(trtllm.DecodingMode.Eagle(), None, None, trtllm.EagleConfig(choices))
    config = trtllm.ExecutorConfig(decoding_config=decoding)
    FieldChecker().check(config)
    parameters = Parameters(scheduler=SchedulingConfig(speculative_decoding_mode=base))
    made = to_parameters(config, "/checkpoint", parameters)
    assert made.scheduler.speculative_decoding_mode == expected
    assert made.engine.has_draft_head == (expected.method == Speculation.MTP)
    unchanged = to_parameters(trtllm.ExecutorConfig(), "/checkpoint", parameters)
    assert unchanged.scheduler.speculative_decoding_mode == base


def _with_choices(choices: list[list[int]]) -> trtllm.DecodingConfig:
    return trtllm.DecodingConfig(trtllm.DecodingMode.Eagle(), None, None, trtllm.EagleConfig(choices))


def test_other_nodes_of_eagle_choices_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    made = parameters(decoding_config=_with_choices([[0], [1], [0, 0], [0, 1], [1, 0]]))
    assert made.scheduler.speculative_decoding_mode == Speculation(Speculation.MTP, 2)
    assert "the likeliest guesses are drafted, up to 2 tokens; other nodes of the tree (3)" in caplog.text


@pytest.mark.parametrize("choices", [[[1]], [[0, 0, 0], [0, 1]], [[0, 0]], [], [[]], [[0], [0]], [[0], [-1]]])
def test_eagle_choices_that_are_no_tree_are_refused(choices: list[list[int]]) -> None:
    with pytest.raises(
        trtllm.InvalidValue, match=r"^EagleConfig\.eagle_choices .* is not a tree that contains"
    ):
        parameters(decoding_config=_with_choices(choices))


def test_eagle_choices_with_too_long_drafts_are_refused() -> None:
    with pytest.raises(trtllm.NotSupported, match="path of 65 likeliest guesses, expected at most 64"):
        parameters(decoding_config=_with_choices([[0] * n for n in range(1, 66)]))


def test_additional_outputs_and_debug_tensors_are_converted() -> None:
    outputs = [
        trtllm.AdditionalModelOutput("top_3_logits", True),
        trtllm.AdditionalModelOutput("hidden_states_1"),
    ]
    debug = trtllm.DebugConfig(True, True, ["logits"], 3)
    engine = parameters(additional_model_outputs=outputs, debug_config=debug).engine
    assert engine.additional_model_outputs == (
        WantedOutput("top_3_logits", True),
        WantedOutput("hidden_states_1", False),
    )
    assert (engine.debug_input_tensors, engine.debug_output_tensors) == (True, True)
    assert (engine.debug_tensor_names, engine.debug_tensors_max_iterations) == (("logits",), 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"additional_model_outputs": [trtllm.AdditionalModelOutput("x")]}, "no additional output 'x'"),
        ({"additional_model_outputs": [trtllm.AdditionalModelOutput("hidden_states_0")] * 2}, "a name twice"),
        (
            {"debug_config": trtllm.DebugConfig(debug_tensor_names=["x"])},
            "has 'x', expected some of input_ids",
        ),
    ],
)
def test_a_tensor_that_does_not_exist_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(trtllm.ExecutorError, match=message):
        parameters(**fields)
