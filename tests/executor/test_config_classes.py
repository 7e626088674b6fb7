"""ExecutorConfig and its parts: order, defaults, ranges, references and pickling."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

import inflight.executor as trtllm

Backend = trtllm.GuidedDecodingConfig.GuidedDecodingBackend
Policy = trtllm.CapacitySchedulerPolicy


def parameters(cls: type) -> list[str]:
    return list(inspect.signature(cls).parameters)


# Fields in positional order with their defaults, by class; ... for a required field.
DEFAULTS: dict[type, dict[str, Any]] = {
    trtllm.DynamicBatchConfig: {
        "enable_batch_size_tuning": ...,
        "enable_max_num_tokens_tuning": ...,
        "dynamic_batch_moving_average_window": 128,
    },
    trtllm.SchedulerConfig: {
        "capacity_scheduler_policy": Policy.GUARANTEED_NO_EVICT,
        "context_chunking_policy": None,
        "dynamic_batch_config": None,
    },
    trtllm.RuntimeDefaults: {"max_attention_window": None, "sink_token_length": None},
    trtllm.KvCacheConfig: {
        "enable_block_reuse": True,
        "max_tokens": None,
        "max_attention_window": None,
        "sink_token_length": None,
        "free_gpu_memory_fraction": None,
        "host_cache_size": None,
        "onboard_blocks": True,
        "cross_kv_cache_fraction": None,
        "secondary_offload_min_priority": None,
        "event_buffer_max_size": 0,
        "enable_partial_reuse": True,
        "copy_on_partial_reuse": True,
        "use_uvm": False,
        "attention_dp_events_gather_period_ms": 5,
        "max_gpu_total_bytes": 0,
    },
    trtllm.OrchestratorConfig: {
        "is_orchestrator": True,
        "worker_executable_path": "",
        "orch_leader_comm": None,
        "spawn_processes": True,
    },
    trtllm.ParallelConfig: {
        "communication_type": trtllm.CommunicationType.MPI,
        "communication_mode": trtllm.CommunicationMode.LEADER,
        "device_ids": None,
        "participant_ids": None,
        "orchestrator_config": None,
        "num_nodes": None,
    },
    trtllm.PeftCacheConfig: {
        "num_host_module_layer": 0,
        "num_device_module_layer": 0,
        "optimal_adapter_size": 8,
        "max_adapter_size": 64,
        "num_put_workers": 1,
        "num_ensure_workers": 1,
        "num_copy_streams": 1,
        "max_pages_per_block_host": 24,
        "max_pages_per_block_device": 8,
        "device_cache_percent": None,
        "host_cache_size": None,
        "lora_prefetch_dir": None,
    },
    trtllm.DecodingConfig: {
        "decoding_mode": None,
        "lookahead_decoding_config": None,
        "medusa_choices": None,
        "eagle_config": None,
    },
    trtllm.DebugConfig: {
        "debug_input_tensors": False,
        "debug_output_tensors": False,
        "debug_tensor_names": [],
        "debug_tensors_max_iterations": 0,
    },
    trtllm.LogitsPostProcessorConfig: {"processor_map": None, "processor_batched": None, "replicate": True},
    trtllm.ExtendedRuntimePerfKnobConfig: {"multi_block_mode": True, "enable_context_fmha_fp32_acc": False},
    trtllm.SpeculativeDecodingConfig: {"fast_logits": False},
    trtllm.GuidedDecodingConfig: {
        "backend": ...,
        "encoded_vocab": None,
        "tokenizer_str": None,
        "stop_token_ids": None,
    },
    trtllm.CacheTransceiverConfig: {
        "backend": None,
        "max_tokens_in_buffer": None,
        "kv_transfer_timeout_ms": None,
    },
}

EXECUTOR_DEFAULTS: dict[str, Any] = {
    "max_beam_width": 1,
    "scheduler_config": trtllm.SchedulerConfig(),
    "kv_cache_config": trtllm.KvCacheConfig(),
    "enable_chunked_context": False,
    "normalize_log_probs": True,
    "iter_stats_max_iterations": 1000,
    "request_stats_max_iterations": 0,
    "batching_type": trtllm.BatchingType.INFLIGHT,
    "max_batch_size": None,
    "max_num_tokens": None,
    "parallel_config": None,
    "peft_cache_config": trtllm.PeftCacheConfig(),
    "logits_post_processor_config": None,
    "decoding_config": None,
    "use_gpu_direct_storage": False,
    "gpu_weights_percent": 1.0,
    "max_queue_size": None,
    "extended_runtime_perf_knob_config": trtllm.ExtendedRuntimePerfKnobConfig(),
    "debug_config": None,
    "recv_poll_period_ms": 0,
    "max_seq_idle_microseconds": 180_000_000,
    "spec_dec_config": None,
    "guided_decoding_config": None,
    "additional_model_outputs": None,
    "cache_transceiver_config": None,
    "gather_generation_logits": False,
    "mm_embedding_offloading": False,
    "enable_trt_overlap": False,
    "fail_fast_on_attention_window_too_large": False,
}

REQUIRED: dict[str, Any] = {
    "enable_batch_size_tuning": True,
    "enable_max_num_tokens_tuning": False,
    "backend": Backend.XGRAMMAR,
}


@pytest.mark.parametrize("cls", DEFAULTS, ids=lambda cls: cls.__name__)
def test_fields_have_the_originals_order_and_defaults(cls: type) -> None:
    defaults = DEFAULTS[cls]
    names = [name for name in parameters(cls) if name != "runtime_defaults"]
    assert names == list(defaults)
    required = {name: REQUIRED[name] for name, value in defaults.items() if value is ...}
    made = cls(**required)
    assert {name: getattr(made, name) for name in names} == defaults | required


def test_the_executors_fields_have_the_originals_order_and_defaults() -> None:
    config = trtllm.ExecutorConfig()
    assert parameters(trtllm.ExecutorConfig) == list(EXECUTOR_DEFAULTS)
    assert {name: getattr(config, name) for name in EXECUTOR_DEFAULTS} == EXECUTOR_DEFAULTS


def test_the_first_ten_arguments_of_kv_cache_config_are_positional() -> None:
    given = [False, 1, [2], 3, 0.5, 4, False, 0.4, 50, 1024]
    config = trtllm.KvCacheConfig(*given)
    assert [getattr(config, name) for name in parameters(trtllm.KvCacheConfig)[:10]] == given
    with pytest.raises(TypeError, match="positional"):
        trtllm.KvCacheConfig(*given, True)


VALUES: dict[str, Any] = {
    "max_beam_width": 2,
    "scheduler_config": trtllm.SchedulerConfig(Policy.MAX_UTILIZATION),
    "kv_cache_config": trtllm.KvCacheConfig(enable_block_reuse=False, free_gpu_memory_fraction=0.5),
    "enable_chunked_context": True,
    "normalize_log_probs": False,
    "iter_stats_max_iterations": 100,
    "request_stats_max_iterations": 50,
    "batching_type": trtllm.BatchingType.STATIC,
    "max_batch_size": 8,
    "max_num_tokens": 128,
    "parallel_config": trtllm.ParallelConfig(
        device_ids=[0, 1], orchestrator_config=trtllm.OrchestratorConfig()
    ),
    "peft_cache_config": trtllm.PeftCacheConfig(10),
    "decoding_config": trtllm.DecodingConfig(trtllm.DecodingMode.TopKTopP()),
    "use_gpu_direct_storage": True,
    "gpu_weights_percent": 0.5,
    "max_queue_size": 3,
    "extended_runtime_perf_knob_config": trtllm.ExtendedRuntimePerfKnobConfig(multi_block_mode=False),
    "debug_config": trtllm.DebugConfig(True, True, ["test"], 5),
    "recv_poll_period_ms": 50,
    "max_seq_idle_microseconds": 240_000_000,
    "spec_dec_config": trtllm.SpeculativeDecodingConfig(fast_logits=True),
    "guided_decoding_config": trtllm.GuidedDecodingConfig(Backend.XGRAMMAR, ["eos", "a"], None, [0]),
    "additional_model_outputs": [trtllm.AdditionalModelOutput("topKLogits")],
    "cache_transceiver_config": trtllm.CacheTransceiverConfig(trtllm.CacheTransceiverBackendType.UCX, 1024),
    "gather_generation_logits": True,
    "mm_embedding_offloading": True,
    "enable_trt_overlap": True,
    "fail_fast_on_attention_window_too_large": True,
}


@pytest.mark.parametrize("name", VALUES)
def test_a_field_of_the_executor_can_be_constructed_assigned_and_pickled(name: str) -> None:
    assert getattr(trtllm.ExecutorConfig(**{name: VALUES[name]}), name) == VALUES[name]
    config = trtllm.ExecutorConfig()
    setattr(config, name, VALUES[name])
    assert getattr(pickle.loads(pickle.dumps(config)), name) == VALUES[name]


def test_the_executor_takes_unknown_attributes_and_pickles_them() -> None:
    config = trtllm.ExecutorConfig()
    config.backend = "pytorch"
    assert pickle.loads(pickle.dumps(config)).backend == "pytorch"


def test_nested_getters_return_references() -> None:
    config = trtllm.ExecutorConfig()
    config.kv_cache_config.max_tokens = 42
    assert config.kv_cache_config.max_tokens == 42
    config.parallel_config = trtllm.ParallelConfig(orchestrator_config=trtllm.OrchestratorConfig())
    config.parallel_config.orchestrator_config.spawn_processes = False
    assert config.parallel_config.orchestrator_config.spawn_processes is False
    assert config.scheduler_config is config.scheduler_config


def test_an_executor_config_copies_its_parts() -> None:
    cache = trtllm.KvCacheConfig()
    config, other = trtllm.ExecutorConfig(kv_cache_config=cache), trtllm.ExecutorConfig()
    cache.max_tokens = 42
    config.kv_cache_config.sink_token_length = 1
    assert config.kv_cache_config.max_tokens is None
    assert other.kv_cache_config.sink_token_length is None, "nor are defaults shared"


READ_ONLY = [
    trtllm.SchedulerConfig(),
    trtllm.DynamicBatchConfig(True, True),
    trtllm.RuntimeDefaults([10], 2),
    trtllm.PeftCacheConfig(1, 2, 3, 4, 5, 6, 7, 8, 9, 0.9, 1024, "/adapters"),
]


@pytest.mark.parametrize("config", READ_ONLY, ids=lambda config: type(config).__name__)
def test_a_read_only_part_cannot_be_changed_and_can_be_pickled(config: Any) -> None:
    assert pickle.loads(pickle.dumps(config)) == config
    for name in parameters(type(config)):
        with pytest.raises(AttributeError):
            setattr(config, name, getattr(config, name))


OUT_OF_RANGE = [
    (trtllm.KvCacheConfig, "max_tokens", 0),
    (trtllm.KvCacheConfig, "max_attention_window", [2, 0]),
    (trtllm.KvCacheConfig, "sink_token_length", 0),
    (trtllm.KvCacheConfig, "free_gpu_memory_fraction", 0.0),
    (trtllm.KvCacheConfig, "free_gpu_memory_fraction", 1.0),
    (trtllm.KvCacheConfig, "cross_kv_cache_fraction", 1.0),
    (trtllm.KvCacheConfig, "host_cache_size", -1),
    (trtllm.KvCacheConfig, "event_buffer_max_size", -1),
    (trtllm.KvCacheConfig, "attention_dp_events_gather_period_ms", 0),
    (trtllm.ParallelConfig, "device_ids", []),
    (trtllm.DebugConfig, "debug_tensors_max_iterations", -1),
    (trtllm.ExecutorConfig, "max_beam_width", 0),
    (trtllm.ExecutorConfig, "max_batch_size", 0),
    (trtllm.ExecutorConfig, "max_num_tokens", 0),
    (trtllm.ExecutorConfig, "iter_stats_max_iterations", -1),
    (trtllm.ExecutorConfig, "request_stats_max_iterations", -1),
    (trtllm.ExecutorConfig, "max_seq_idle_microseconds", 0),
]


@pytest.mark.parametrize(("cls", "name", "value"), OUT_OF_RANGE)
def test_a_number_out_of_range_is_refused_at_assignment(cls: type, name: str, value: object) -> None:
    with pytest.raises(RuntimeError, match=f"{cls.__name__}.{name} must be"):
        cls(**{name: value})
    made = cls()
    with pytest.raises(RuntimeError, match=f"{cls.__name__}.{name} must be"):
        setattr(made, name, value)


def test_an_object_of_another_class_is_a_type_error() -> None:
    with pytest.raises(
        TypeError, match=r"ExecutorConfig\.scheduler_config must be SchedulerConfig, got KvCacheConfig"
    ):
        trtllm.ExecutorConfig(1, trtllm.KvCacheConfig())


# ---------------------------------------------------------------- the KV cache


def test_a_models_defaults_fill_empty_fields() -> None:
    defaults = trtllm.RuntimeDefaults(max_attention_window=[10, 1], sink_token_length=3)
    filled = trtllm.KvCacheConfig()
    filled.fill_empty_fields_from_runtime_defaults(defaults)
    assert (filled.max_attention_window, filled.sink_token_length) == ([10, 1], 3)
    assert trtllm.KvCacheConfig(runtime_defaults=defaults) == filled


def test_a_models_defaults_override_no_field() -> None:
    defaults = trtllm.RuntimeDefaults(max_attention_window=[10, 1], sink_token_length=3)
    config = trtllm.KvCacheConfig(max_attention_window=[5], sink_token_length=2, runtime_defaults=defaults)
    assert (config.max_attention_window, config.sink_token_length) == ([5], 2)


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize(
    ("name", "value", "mode"),
    [
        ("lookahead_decoding_config", trtllm.LookaheadDecodingConfig(3, 5, 7), "isLookahead"),
        ("medusa_choices", [[0, 0], [0, 1]], "isMedusa"),
        ("eagle_config", trtllm.EagleConfig([[0, 0], [0, 1]]), "isEagle"),
    ],
)
def test_assigning_a_drafting_config_sets_the_mode(name: str, value: object, mode: str) -> None:
    config = trtllm.DecodingConfig()
    setattr(config, name, value)
    assert getattr(config.decoding_mode, mode)() and getattr(config, name) == value
    others = {"lookahead_decoding_config", "medusa_choices", "eagle_config"} - {name}
    assert [getattr(config, other) for other in others] == [None, None]


def test_a_drafting_config_must_match_the_constructors_mode() -> None:
    lookahead = trtllm.LookaheadDecodingConfig(3, 5, 7)
    with pytest.raises(RuntimeError, match="LookaheadDecodingConfig is set, but DecodingMode is not set"):
        trtllm.DecodingConfig(None, lookahead)
    with pytest.raises(RuntimeError, match="DecodingMode is not set to Lookahead"):
        trtllm.DecodingConfig(trtllm.DecodingMode.TopK(), lookahead)
    assert trtllm.DecodingConfig(trtllm.DecodingMode.Lookahead(), lookahead).decoding_mode.isLookahead()


def test_a_drafting_mode_cannot_be_assigned_without_its_config() -> None:
    config = trtllm.DecodingConfig()
    config.decoding_mode = trtllm.DecodingMode.TopKTopP()
    assert config.decoding_mode.isTopKandTopP()
    for make in (trtllm.DecodingMode.Medusa, trtllm.DecodingMode.Lookahead, trtllm.DecodingMode.Eagle):
        with pytest.raises(RuntimeError, match="is set by assigning its configuration"):
            config.decoding_mode = make()


def test_a_decoding_configuration_can_be_pickled_and_copied() -> None:
    config = trtllm.DecodingConfig()
    config.medusa_choices = [[0, 0]]
    assert pickle.loads(pickle.dumps(config)) == config
    assert trtllm.ExecutorConfig(decoding_config=config).decoding_config == config


# ---------------------------------------------------------------- the rest


def change(*arguments: object) -> None:
    """A post-processor that can be pickled."""


def test_post_processors_may_have_no_callable_and_can_be_pickled() -> None:
    config = trtllm.LogitsPostProcessorConfig({"test_pp": None, "other": change}, None, False)
    copied = pickle.loads(pickle.dumps(config))
    assert copied.processor_map == {"test_pp": None, "other": change} and copied.replicate is False
    config.processor_batched = print
    assert config.processor_batched is print


def test_older_attributes_of_post_processors_set_the_newer_ones() -> None:
    config = trtllm.ExecutorConfig()
    assert config.logits_post_processor_map is None and config.logits_post_processor_batched is None
    config.logits_post_processor_map = {"a": change}
    config.logits_post_processor_batched = print
    assert config.logits_post_processor_config.processor_map == {"a": change}
    assert (
        config.logits_post_processor_config.processor_batched is config.logits_post_processor_batched is print
    )
    assert config.logits_post_processor_map == {"a": change}


def test_cuda_graph_settings_are_attributes_only() -> None:
    config = trtllm.ExtendedRuntimePerfKnobConfig(True, True)
    assert (config.cuda_graph_mode, config.cuda_graph_cache_size) == (False, 0)
    config.cuda_graph_mode, config.cuda_graph_cache_size = True, 8
    copied = pickle.loads(pickle.dumps(config))
    assert (copied.cuda_graph_mode, copied.cuda_graph_cache_size) == (True, 8)


def test_any_path_of_a_worker_program_is_accepted() -> None:
    assert trtllm.OrchestratorConfig(True, "/nowhere/executorWorker").worker_executable_path.startswith(
        "/nowhere"
    )


def test_backends_of_guides_are_members_of_their_class() -> None:
    config = trtllm.GuidedDecodingConfig(
        backend=Backend.LLGUIDANCE, encoded_vocab=["eos", "a"], stop_token_ids=[0]
    )
    assert pickle.loads(pickle.dumps(config)) == config
