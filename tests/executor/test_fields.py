"""Every field of requests and configurations works, is ignored, or is refused, as the table says."""

from __future__ import annotations

import dataclasses
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import inflight.executor as trtllm
from inflight.executor.fields import FIELDS, FieldChecker, Treatment, check_model_type
from inflight.executor.fields_page import page

PAGE = Path(__file__).parents[2] / "docs" / "executor-fields.md"

NOTED = {(note.owner, note.name): note for note in FIELDS}
WITHOUT_NOTES = {
    trtllm.DynamicBatchConfig: "as a whole it is ignored",
    trtllm.RuntimeDefaults: "what it says is kept by KvCacheConfig",
    trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig: "all of it works",
    trtllm.GuidedDecodingParams: "all of it works",
    trtllm.MultimodalInput: "as a whole it is refused",
    trtllm.MropeConfig: "as a whole it is refused",
    trtllm.LookaheadDecodingConfig: "as a whole it is refused",
    trtllm.ContextPhaseParams: "as a whole it is refused",
}


def classes_of_a_client() -> set[type]:
    """Return all classes of requests and configurations."""
    named = {getattr(trtllm, name) for name in trtllm.__all__}
    ending = ("Config", "Params", "Input", "ModelOutput", "Request", "Defaults")
    found = {cls for cls in named if isinstance(cls, type) and cls.__name__.endswith(ending)}
    return found | {trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig}


def test_every_field_of_every_class_is_in_the_table() -> None:
    expected = {
        (cls, each.name)
        for cls in classes_of_a_client() - set(WITHOUT_NOTES)
        for each in dataclasses.fields(cls)
    }
    assert set(NOTED) == expected
    assert len(NOTED) == len(FIELDS)


def test_the_page_matches_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run scripts/write_configs"


def check(given: trtllm.Request | trtllm.ExecutorConfig) -> None:
    FieldChecker().check(given)


def make_request(**fields: Any) -> trtllm.Request:
    return trtllm.Request([1, 2, 3], 5, **fields)


def test_default_values_are_accepted_without_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    check(make_request())
    check(trtllm.ExecutorConfig())
    everything = trtllm.ExecutorConfig(
        parallel_config=trtllm.ParallelConfig(orchestrator_config=trtllm.OrchestratorConfig()),
        decoding_config=trtllm.DecodingConfig(),
        logits_post_processor_config=trtllm.LogitsPostProcessorConfig(),
        debug_config=trtllm.DebugConfig(),
        spec_dec_config=trtllm.SpeculativeDecodingConfig(),
        cache_transceiver_config=trtllm.CacheTransceiverConfig(),
    )
    check(everything)
    assert caplog.records == []


TokenRange = trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig
FULL_REQUEST: dict[str, Any] = {
    "streaming": True,
    "end_id": 2,
    "bad_words": [[1]],
    "stop_words": [[2]],
    "embedding_bias": torch.ones(10),
    "external_draft_tokens_config": trtllm.ExternalDraftTokensConfig([1], torch.ones(1, 10), 0.5, False),
    "kv_cache_retention_config": trtllm.KvCacheRetentionConfig([TokenRange(0, 2, 5, timedelta(seconds=1))]),
    "logits_post_processor_name": "batched",
    "client_id": 4,
    "return_all_generated_tokens": True,
    "priority": 0.9,
    "guided_decoding_params": trtllm.GuidedDecodingParams(trtllm.GuidedDecodingParams.GuideType.JSON),
    "allotted_time_ms": timedelta(seconds=1),
    "cache_salt_id": 5,
}


def test_supported_values_are_accepted_without_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    check(make_request(**FULL_REQUEST))
    assert caplog.records == []


REFUSED_OF_REQUESTS: dict[str, Any] = {
    "position_ids": [0, 1, 2],
    "multimodal_input": trtllm.MultimodalInput([[1]], [0], [1]),
    "multimodal_embedding": torch.ones(2, 2),
    "lookahead_config": trtllm.LookaheadDecodingConfig(4, 3, 4),
    "encoder_input_token_ids": [1],
    "request_type": trtllm.RequestType.REQUEST_TYPE_CONTEXT_ONLY,
    "context_phase_params": trtllm.ContextPhaseParams([1], 2),
    "encoder_input_features": torch.ones(2, 2),
    "encoder_output_length": 3,
    "cross_attention_mask": torch.ones(2, 2),
    "eagle_config": trtllm.EagleConfig(),
    "skip_cross_attn_blocks": torch.ones(1),
    "language_adapter_uid": 1,
}


def of(owner: type, treatment: Treatment) -> set[str]:
    return {note.name for note in FIELDS if note.owner is owner and note.treatment is treatment}


def test_every_refused_field_of_requests_is_tested_here() -> None:
    assert set(REFUSED_OF_REQUESTS) == of(trtllm.Request, Treatment.REFUSED)


@pytest.mark.parametrize("name", REFUSED_OF_REQUESTS)
def test_a_refused_field_of_a_request_is_an_error_with_the_reason(name: str) -> None:
    with pytest.raises(trtllm.NotSupported) as raised:
        check(make_request(**{name: REFUSED_OF_REQUESTS[name]}))
    assert str(raised.value) == f"Request.{name} is not supported: {NOTED[trtllm.Request, name].text}"


OrchestratorConfig, KvCacheConfig = trtllm.OrchestratorConfig, trtllm.KvCacheConfig
MEDUSA, LOOKAHEAD = trtllm.DecodingConfig(), trtllm.DecodingConfig()
MEDUSA.medusa_choices = [[0]]
LOOKAHEAD.lookahead_decoding_config = trtllm.LookaheadDecodingConfig(4, 3, 4)


def with_eagle(**fields: Any) -> trtllm.ExecutorConfig:
    decoding = trtllm.DecodingConfig()
    decoding.eagle_config = trtllm.EagleConfig(**fields)
    return trtllm.ExecutorConfig(decoding_config=decoding)


def with_orchestrator(**fields: Any) -> trtllm.ExecutorConfig:
    parallel = trtllm.ParallelConfig(orchestrator_config=trtllm.OrchestratorConfig(**fields))
    return trtllm.ExecutorConfig(parallel_config=parallel)


NESTED: dict[str, trtllm.Request | trtllm.ExecutorConfig] = {
    "SamplingConfig.beam_width_array": make_request(
        sampling_config=trtllm.SamplingConfig(beam_width_array=[1, 2])
    ),
    "SamplingConfig.prompt_ignore_length": make_request(
        sampling_config=trtllm.SamplingConfig(prompt_ignore_length=2)
    ),
    "OutputConfig.return_encoder_output": make_request(
        output_config=trtllm.OutputConfig(return_encoder_output=True)
    ),
    "ExternalDraftTokensConfig.fast_logits": make_request(
        external_draft_tokens_config=trtllm.ExternalDraftTokensConfig([1], fast_logits=True)
    ),
    "KvCacheRetentionConfig.transfer_mode": make_request(
        kv_cache_retention_config=trtllm.KvCacheRetentionConfig(
            [], transfer_mode=trtllm.KvCacheTransferMode.GDS
        )
    ),
    "KvCacheRetentionConfig.directory": make_request(
        kv_cache_retention_config=trtllm.KvCacheRetentionConfig([], directory="/x")
    ),
    "ExecutorConfig.gpu_weights_percent": trtllm.ExecutorConfig(gpu_weights_percent=0.5),
    "KvCacheConfig.cross_kv_cache_fraction": trtllm.ExecutorConfig(
        kv_cache_config=KvCacheConfig(cross_kv_cache_fraction=0.5)
    ),
    "KvCacheConfig.use_uvm": trtllm.ExecutorConfig(kv_cache_config=KvCacheConfig(use_uvm=True)),
    "KvCacheConfig.max_gpu_total_bytes": trtllm.ExecutorConfig(
        kv_cache_config=KvCacheConfig(max_gpu_total_bytes=1)
    ),
    "OrchestratorConfig.is_orchestrator": with_orchestrator(is_orchestrator=False),
    "OrchestratorConfig.orch_leader_comm": with_orchestrator(orch_leader_comm=object()),
    "OrchestratorConfig.spawn_processes": with_orchestrator(spawn_processes=False),
    "DecodingConfig.decoding_mode": trtllm.ExecutorConfig(
        decoding_config=trtllm.DecodingConfig(trtllm.DecodingMode.ExplicitDraftTokens())
    ),
    "EagleConfig.greedy_sampling": with_eagle(greedy_sampling=False),
    "EagleConfig.posterior_threshold": with_eagle(posterior_threshold=0.5),
    "EagleConfig.use_dynamic_tree": with_eagle(use_dynamic_tree=True),
    "EagleConfig.dynamic_tree_max_topK": with_eagle(dynamic_tree_max_topK=4),
    "SpeculativeDecodingConfig.fast_logits": trtllm.ExecutorConfig(
        spec_dec_config=trtllm.SpeculativeDecodingConfig(True)
    ),
    "CacheTransceiverConfig.backend": trtllm.ExecutorConfig(
        cache_transceiver_config=trtllm.CacheTransceiverConfig(trtllm.CacheTransceiverBackendType.MPI)
    ),
    "CacheTransceiverConfig.max_tokens_in_buffer": trtllm.ExecutorConfig(
        cache_transceiver_config=trtllm.CacheTransceiverConfig(max_tokens_in_buffer=8)
    ),
    "CacheTransceiverConfig.kv_transfer_timeout_ms": trtllm.ExecutorConfig(
        cache_transceiver_config=trtllm.CacheTransceiverConfig(kv_transfer_timeout_ms=8)
    ),
}
# Setting one of these also sets the mode, which is refused first.
BEHIND_THE_MODE = {"lookahead_decoding_config", "medusa_choices"}


def test_every_other_refused_field_is_tested_here() -> None:
    refused = {
        f"{note.owner.__name__}.{note.name}"
        for note in FIELDS
        if note.treatment is Treatment.REFUSED and note.owner is not trtllm.Request
    }
    assert refused == set(NESTED) | {f"DecodingConfig.{name}" for name in BEHIND_THE_MODE}


@pytest.mark.parametrize("place", NESTED)
def test_a_refused_field_within_a_part_is_an_error_with_its_path(place: str) -> None:
    with pytest.raises(trtllm.NotSupported, match=rf"^{place} is not supported: "):
        check(NESTED[place])


@pytest.mark.parametrize("config", [MEDUSA, LOOKAHEAD], ids=["Medusa", "lookahead"])
def test_unimplemented_drafting_methods_are_refused(config: trtllm.DecodingConfig) -> None:
    with pytest.raises(
        trtllm.NotSupported, match=r"^DecodingConfig\.decoding_mode is not supported: .* EAGLE-3"
    ):
        check(trtllm.ExecutorConfig(decoding_config=config))


def test_heads_that_draft_a_chain_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    check(with_eagle())
    check(with_eagle(eagle_choices=[[0], [0, 0]], greedy_sampling=True))
    assert caplog.records == []


@pytest.mark.parametrize("name", ["Auto", "TopK", "TopP", "TopKTopP", "BeamSearch"])
def test_decoding_modes_that_sample_are_accepted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    mode = getattr(trtllm.DecodingMode, name)()
    check(trtllm.ExecutorConfig(decoding_config=trtllm.DecodingConfig(mode)))
    assert caplog.records == []


IGNORED: dict[str, trtllm.Request | trtllm.ExecutorConfig] = {
    "Request.pad_id": make_request(pad_id=0),
    "ExecutorConfig.use_gpu_direct_storage": trtllm.ExecutorConfig(use_gpu_direct_storage=True),
    "ExecutorConfig.recv_poll_period_ms": trtllm.ExecutorConfig(recv_poll_period_ms=50),
    "ExecutorConfig.max_seq_idle_microseconds": trtllm.ExecutorConfig(max_seq_idle_microseconds=5),
    "ExecutorConfig.gather_generation_logits": trtllm.ExecutorConfig(gather_generation_logits=True),
    "ExecutorConfig.mm_embedding_offloading": trtllm.ExecutorConfig(mm_embedding_offloading=True),
    "ExecutorConfig.enable_trt_overlap": trtllm.ExecutorConfig(enable_trt_overlap=True),
    "ExecutorConfig.fail_fast_on_attention_window_too_large": trtllm.ExecutorConfig(
        fail_fast_on_attention_window_too_large=True
    ),
    "SchedulerConfig.dynamic_batch_config": trtllm.ExecutorConfig(
        scheduler_config=trtllm.SchedulerConfig(dynamic_batch_config=trtllm.DynamicBatchConfig(True, True))
    ),
    "KvCacheConfig.enable_partial_reuse": trtllm.ExecutorConfig(
        kv_cache_config=KvCacheConfig(enable_partial_reuse=False)
    ),
    "KvCacheConfig.copy_on_partial_reuse": trtllm.ExecutorConfig(
        kv_cache_config=KvCacheConfig(copy_on_partial_reuse=False)
    ),
    "KvCacheConfig.attention_dp_events_gather_period_ms": trtllm.ExecutorConfig(
        kv_cache_config=KvCacheConfig(attention_dp_events_gather_period_ms=6)
    ),
    "ParallelConfig.num_nodes": trtllm.ExecutorConfig(parallel_config=trtllm.ParallelConfig(num_nodes=2)),
    "OrchestratorConfig.worker_executable_path": with_orchestrator(
        worker_executable_path="/bin/executorWorker"
    ),
    **{
        f"PeftCacheConfig.{name}": trtllm.ExecutorConfig(
            peft_cache_config=trtllm.PeftCacheConfig(**{name: 10})
        )
        for name in (
            "num_host_module_layer",
            "num_device_module_layer",
            "num_put_workers",
            "num_ensure_workers",
            "num_copy_streams",
            "max_pages_per_block_host",
            "max_pages_per_block_device",
        )
    },
    "ExtendedRuntimePerfKnobConfig.multi_block_mode": trtllm.ExecutorConfig(
        extended_runtime_perf_knob_config=trtllm.ExtendedRuntimePerfKnobConfig(False)
    ),
    "ExtendedRuntimePerfKnobConfig.enable_context_fmha_fp32_acc": trtllm.ExecutorConfig(
        extended_runtime_perf_knob_config=trtllm.ExtendedRuntimePerfKnobConfig(True, True)
    ),
}


@pytest.mark.parametrize("place", IGNORED)
def test_an_ignored_field_is_logged_once(place: str, caplog: pytest.LogCaptureFixture) -> None:
    checker = FieldChecker()
    for _ in range(2):
        checker.check(IGNORED[place])
    (record,) = caplog.records
    owner, name = place.split(".")
    note = NOTED[getattr(trtllm, owner), name]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"{place} has no effect: {note.text}"


def test_an_unknown_attribute_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    config, checker = trtllm.ExecutorConfig(), FieldChecker()
    config.backend = "pytorch"
    checker.check(config)
    checker.check(config)
    (record,) = caplog.records
    assert record.getMessage() == "ExecutorConfig.backend has no effect: there is no such field"


def test_models_with_an_encoder_are_refused() -> None:
    check_model_type(trtllm.ModelType.DECODER_ONLY)
    for model_type in (trtllm.ModelType.ENCODER_ONLY, trtllm.ModelType.ENCODER_DECODER):
        with pytest.raises(trtllm.NotSupported, match=f"ModelType.{model_type.name} is not supported"):
            check_model_type(model_type)
