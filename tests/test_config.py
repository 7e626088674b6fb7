"""The table of parameters: which values parse, which count as absent, and that others fail the load by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from inflight.additional_outputs import WantedOutput
from inflight.config import (
    PARAMETERS,
    CapacityPolicy,
    ChunkingPolicy,
    EngineConfig,
    KvEventsConfig,
    Parameters,
    ParameterSpec,
    Role,
    SchedulePolicy,
    SchedulingConfig,
    SpecialTokens,
    Speculation,
)
from inflight.errors import ConfigError
from inflight.parameter_reader import read_parameters, without_effect
from inflight.parameter_spec import DraftTree
from tests.triton.factories import make_model_config, make_parameters

UNBUILT = [spec for spec in PARAMETERS if spec.neutral is not None]
NO_EFFECT = [spec for spec in PARAMETERS if spec.no_effect]


def role_of(key: str) -> Role:
    return next(role for spec in PARAMETERS if spec.key == key for role in Role if role in spec.roles)


def test_the_result_has_a_field_for_every_built_row() -> None:
    parts = (Parameters, SchedulingConfig, EngineConfig)
    fields = [
        field.metadata["parameter"].key or field.name
        for part in parts
        for field in dataclasses.fields(part)
        if "parameter" in field.metadata
    ]
    assert sorted(fields) == sorted(spec.key for spec in PARAMETERS if spec.built)


def test_parameters_that_are_left_out_have_their_defaults() -> None:
    parameters = make_parameters(max_batch_size=16)
    scheduler, engine = parameters.scheduler, parameters.engine
    assert engine.max_num_sequences == 16
    assert scheduler.policy is CapacityPolicy.GUARANTEED_NO_EVICT
    assert (engine.tokens_per_block, engine.max_num_tokens, scheduler.max_num_tokens) == (32, 8192, 8192)
    assert engine.gpt_model_path is None


def value_of(parameters: Parameters, key: str) -> object:
    """Return the value read for `key`, in any part of the configuration."""
    name = {
        "batch_scheduler_policy": "policy",
        "engine": "implementation",
        "tensorrt_engine_dir": "engine_dir",
    }.get(key, key)
    parts = (parameters, parameters.scheduler, parameters.engine)
    return next(getattr(part, name) for part in parts if hasattr(part, name))


@pytest.mark.parametrize("text", ["", "${tokens_per_block}", "${anything at all}"])
@pytest.mark.parametrize("spec", PARAMETERS, ids=lambda spec: spec.key)
def test_an_empty_or_unfilled_parameter_counts_as_absent(spec: ParameterSpec, text: str) -> None:
    role = role_of(spec.key)
    assert make_parameters(role, **{spec.key: text}) == make_parameters(role)


GOOD = [
    ("gpt_model_path", "/models/x", "/models/x"),
    ("tokenizer_dir", "/models/x", "/models/x"),
    ("dtype", "bfloat16", "bfloat16"),
    ("dtype", "int8", "int8"),
    ("dtype", "fp8", "fp8"),
    ("kernels", "torch", "torch"),
    ("weights", "mmap", "mmap"),
    ("engine", "transformers", "transformers"),
    ("tensorrt_engine_dir", "/engines/llama", "/engines/llama"),
    ("cuda_graph_mode", "false", False),
    ("gpt_model_type", "V1", "V1"),
    ("gpt_model_type", "v1", "V1"),
    ("gpt_model_type", "inflight_batching", "inflight_batching"),
    ("normalize_log_probs", "True", True),
    ("ignored_request_parameters", "x-request-id, traceparent", ("x-request-id", "traceparent")),
    ("batch_scheduler_policy", "max_utilization", CapacityPolicy.MAX_UTILIZATION),
    ("enable_chunked_context", "TRUE", True),
    ("context_chunking_policy", "equal_progress", ChunkingPolicy.EQUAL_PROGRESS),
    ("schedule_policy", "lpm", SchedulePolicy.LPM),
    ("enable_kv_cache_reuse", "0", False),
    ("max_num_tokens", "512", 512),
    ("max_queue_size", "16", 16),
    ("max_beam_width", "4", 4),
    ("max_sequences_per_request", "8", 8),
    ("max_sequence_length", "2048", 2048),
    ("max_attention_window_size", "512", (512,)),
    ("max_attention_window_size", "512, 1024", (512, 1024)),
    ("sink_token_length", "4", 4),
    ("tokens_per_block", "16", 16),
    ("kv_cache_dtype", "fp8", "fp8"),
    ("max_tokens_in_paged_kv_cache", "4096", 4096),
    ("recurrent_state_snapshots", "0", 0),
    ("kv_cache_free_gpu_mem_fraction", "0.25", 0.25),
    ("kv_cache_free_cpu_mem_fraction", "1", 1.0),
    ("exclude_input_in_output", "False", False),
    ("default_end_ids", "2, 7", (2, 7)),
    ("cancellation_check_period_ms", "100", 100),
    ("stream_interval", "4", 4),
    ("repeat_log_probs", "false", False),
    ("max_repeated_logits_bytes", "0", 0),
    ("additional_model_outputs", "top_2_logits", (WantedOutput("top_2_logits"),)),
    ("debug_input_tensors", "true", True),
    ("debug_output_tensors", "1", True),
    ("debug_tensor_names", "logits, positions", ("logits", "positions")),
    ("debug_tensors_max_iterations", "3", 3),
    ("debug_tensors_dir", "/tmp/x", "/tmp/x"),
    ("stats_check_period_ms", "1000", 1000),
    ("iter_stats_max_iterations", "0", 0),
    ("request_stats_max_iterations", "10", 10),
    ("enable_state_requests", "true", True),
    ("logits_post_processor_module", "rules.py", "rules.py"),
    ("record_path", "/tmp/a file", "/tmp/a file"),
    ("watchdog_timeout_ms", "0", 0),
    ("hang_timeout_ms", "30000", 30_000),
    ("engine_endpoint", "a.sock", "a.sock"),
    ("engine_threads", "2", 2),
    ("tensor_parallel_size", "2", 2),
    ("moe_expert_parallel_size", "2", 2),
    ("pipeline_parallel_size", "4", 4),
    ("launch_mode", "leader", "leader"),
    ("mpirun_arguments", "--hostfile hosts", "--hostfile hosts"),
    ("rank_timeout_ms", "1000", 1000),
    ("gpu_device_ids", "1, 0", (1, 0)),
    ("prompt_embedding_table_data_type", "TYPE_BF16", "TYPE_BF16"),
    ("tensorrt_llm_model_name", "other", "other"),
    ("tensorrt_llm_draft_model_name", "small", "small"),
    ("draft_engine_endpoint", "/run/small.sock", "/run/small.sock"),
    ("accumulate_tokens", "True", True),
    ("add_special_tokens", "false", SpecialTokens.LEFT_OUT),
    ("add_special_tokens", "1", SpecialTokens.ADDED),
    ("add_special_tokens", "Auto", SpecialTokens.AUTO),
    ("skip_special_tokens", "1", True),
    ("guided_decoding_backend", "XGRAMMAR", "xgrammar"),
    ("guided_decoding_compile_timeout_ms", "100", 100),
    ("guided_decoding_max_guide_bytes", "1000", 1000),
    ("lora_cache_optimal_adapter_size", "16", 16),
    ("lora_cache_max_adapter_size", "128", 128),
    ("lora_cache_gpu_memory_fraction", "0.1", 0.1),
    ("lora_cache_host_memory_bytes", "4096", 4096),
    ("lora_prefetch_dir", "/adapters", "/adapters"),
    ("lora_dir", "/adapters", "/adapters"),
    ("receipt_key_file", "/keys/receipts", "/keys/receipts"),
    ("kv_cache_host_memory_bytes", "4096", 4096),
    ("kv_cache_onboard_blocks", "false", False),
    ("secondary_offload_min_priority", "0", 0),
    ("kv_cache_dir", "/cache/kv", "/cache/kv"),
    ("kv_cache_disk_bytes", "1000000", 1_000_000),
    ("kv_cache_max_age_s", "60", 60),
    ("otlp_traces_endpoint", "http://localhost:4318/v1/traces", "http://localhost:4318/v1/traces"),
    ("kv_events_config", "{}", KvEventsConfig()),
    ("kv_events_config", '{"enable_kv_cache_events": false}', None),
    ("kv_events_config", '{"publisher": "null"}', None),
    (
        "kv_events_config",
        '{"endpoint": "tcp://*:1", "replay_endpoint": "ipc:///run/r", "hwm": 5, "topic": "kv"}',
        KvEventsConfig(endpoint="tcp://*:1", replay_endpoint="ipc:///run/r", hwm=5, topic="kv"),
    ),
    ("speculative_decoding_mode", "none", None),
    ("speculative_decoding_mode", "suffix", Speculation("suffix", 8)),
    ("speculative_decoding_mode", "prompt-lookup:64", Speculation("prompt-lookup", 64)),
    ("speculative_decoding_mode", "mtp", Speculation("mtp", 1)),
    ("speculative_decoding_mode", "mtp:3", Speculation("mtp", 3)),
    ("speculative_model_dir", "/heads/a", "/heads/a"),
    ("eagle_choices", "{0, 0, 0}, {0}, {0, 0}", DraftTree(3)),
    ("eagle_choices", "[[0], [0, 0]]", DraftTree(2)),
    ("eagle_choices", "{{0}, {1}, {0, 0}, {0, 1}, {1, 0}}", DraftTree(2, 3)),
    ("lora_adapters", "sql=/a/sql, chat = /a/c=d", (("sql", "/a/sql"), ("chat", "/a/c=d"))),
    ("enable_adapter_commands", "true", True),
    ("enable_sleep_mode", "true", True),
    ("lora_weights_data_type", "TYPE_BF16", "TYPE_BF16"),
]


@pytest.mark.parametrize(("key", "text", "value"), GOOD)
def test_valid_texts_of_parameters_are_read(key: str, text: str, value: object) -> None:
    beside = {"speculative_decoding_mode": "mtp"} if key == "eagle_choices" else {}
    assert value_of(make_parameters(role_of(key), **{key: text}, **beside), key) == value


def test_an_eagle_head_has_a_folder_and_a_mode() -> None:
    alone = make_parameters(Role.ENGINE, speculative_model_dir="/heads/a")
    assert alone.scheduler.speculative_decoding_mode == Speculation("eagle3", 3)
    assert (alone.engine.draft_head_dir, alone.engine.has_draft_head) == ("/heads/a", False)
    given = {"speculative_model_dir": "/heads/a", "speculative_decoding_mode": "eagle3:5"}
    assert make_parameters(Role.ENGINE, **given).scheduler.speculative_decoding_mode == Speculation(
        "eagle3", 5
    )
    with pytest.raises(
        ConfigError, match="speculative_decoding_mode: got eagle3, expected speculative_model_dir"
    ):
        make_parameters(Role.ENGINE, speculative_decoding_mode="eagle3")
    for mode in ("mtp", "none"):
        message = (
            f"speculative_model_dir: got '/heads/a', expected speculative_decoding_mode eagle3, got {mode}"
        )
        with pytest.raises(ConfigError, match=message):
            make_parameters(Role.ENGINE, speculative_model_dir="/heads/a", speculative_decoding_mode=mode)


def test_a_head_of_gemma_4_implies_another_mode(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma4_assistant"}')
    folder = str(tmp_path)
    alone = make_parameters(Role.ENGINE, speculative_model_dir=folder)
    assert alone.scheduler.speculative_decoding_mode == Speculation("mtp", 3)
    assert (alone.engine.draft_head_dir, alone.engine.has_draft_head) == (folder, True)
    given = {"speculative_model_dir": folder, "speculative_decoding_mode": "mtp:5"}
    assert make_parameters(Role.ENGINE, **given).scheduler.speculative_decoding_mode == Speculation("mtp", 5)
    for mode in ("eagle3", "none"):
        message = f"speculative_model_dir: got '{folder}', expected speculative_decoding_mode mtp, got {mode}"
        with pytest.raises(ConfigError, match=message):
            make_parameters(Role.ENGINE, speculative_model_dir=folder, speculative_decoding_mode=mode)


@pytest.mark.parametrize(
    ("beside", "method"),
    [
        ({"speculative_model_dir": "/heads/a"}, "eagle3"),
        ({"speculative_model_dir": "/heads/a", "speculative_decoding_mode": "eagle3:2"}, "eagle3"),
        ({"speculative_decoding_mode": "mtp"}, "mtp"),
    ],
)
def test_the_likeliest_choices_set_the_length_of_drafts(beside: dict[str, str], method: str) -> None:
    scheduler = make_parameters(Role.ENGINE, eagle_choices="{0, 0}, {0}", **beside).scheduler
    assert scheduler.speculative_decoding_mode == Speculation(method, 2)


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({}, "expected a head beside it: speculative_model_dir with the folder of an EAGLE-3 head, or"),
        ({"speculative_decoding_mode": "suffix"}, "expected a head beside it"),
        ({"speculative_decoding_mode": "none"}, "expected a head beside it"),
        ({"speculative_decoding_mode": "mtp:3"}, "but speculative_decoding_mode is mtp:3: set only one"),
    ],
)
def test_choices_need_a_head_and_no_other_length(beside: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"eagle_choices: got drafts of 2 tokens, {message}"):
        make_parameters(Role.ENGINE, eagle_choices="{0, 0}, {0}", **beside)


@pytest.mark.parametrize(
    "beside",
    [{"speculative_model_dir": "/heads/a"}, {"speculative_decoding_mode": "mtp"}],
    ids=["EAGLE-3", "mtp"],
)
def test_the_decoding_mode_eagle_changes_nothing_beside_a_head(beside: dict[str, str]) -> None:
    assert make_parameters(decoding_mode="eagle", **beside) == make_parameters(**beside)


@pytest.mark.parametrize("mode", [None, "suffix", "none"])
def test_the_decoding_mode_eagle_needs_a_head(mode: str | None) -> None:
    beside = {} if mode is None else {"speculative_decoding_mode": mode}
    with pytest.raises(
        ConfigError, match=r"decoding_mode: got eagle, expected a head .* EAGLE-3 head, or .* mtp"
    ):
        make_parameters(decoding_mode="eagle", **beside)


def test_every_built_row_is_covered_above() -> None:
    assert {key for key, *_ in GOOD} == {spec.key for spec in PARAMETERS if spec.built}


BAD = [
    ("enable_chunked_context", "yes", "true or false"),
    ("max_num_tokens", "many", "an integer >= 1"),
    ("max_num_tokens", "0", "an integer >= 1"),
    ("tokens_per_block", "1.5", "an integer >= 1"),
    ("kv_cache_free_gpu_mem_fraction", "0", "a number > 0 and <= 1"),
    ("kv_cache_free_gpu_mem_fraction", "nan", "a number > 0 and <= 1"),
    ("batch_scheduler_policy", "no_evict", "guaranteed_no_evict or max_utilization"),
    ("batch_scheduler_policy", "static_batch", "guaranteed_no_evict or max_utilization"),
    ("context_chunking_policy", "fair", "first_come_first_served or equal_progress"),
    ("schedule_policy", "priority", "fcfs or lpm"),
    ("max_attention_window_size", "512,0", "integers >= 1, separated by commas"),
    ("sink_token_length", "-1", "an integer >= 0"),
    ("max_queue_size", "-1", "an integer >= 0"),
    ("watchdog_timeout_ms", "1 s", "an integer >= 0"),
    ("enable_state_requests", "on", "true or false"),
    ("tensor_parallel_size", "0", "an integer >= 1"),
    ("launch_mode", "follower", "in_process or leader or orchestrator"),
    ("rank_timeout_ms", "0", "an integer >= 100"),
    ("gpu_device_ids", "0,-1", "numbers >= 0"),
    ("dtype", "int4", "float32 or bfloat16 or float16 or int8"),
    ("kernels", "eager", "native or torch"),
    ("weights", "disk", "memory or mmap"),
    ("engine", "onnx", "torch or transformers or tensorrt"),
    ("default_end_ids", "2;7", "token ids >= 0"),
    ("default_end_ids", "-1", "token ids >= 0"),
    ("FORCE_CPU_ONLY_INPUT_TENSORS", "maybe", "yes or no"),
    ("max_beam_width", "two", "an integer >= 1"),
    ("lora_cache_host_memory_bytes", "0", "an integer >= 1"),
    ("kv_cache_host_memory_bytes", "1G", "an integer >= 0"),
    ("kv_cache_disk_bytes", "0", "an integer >= 1"),
    ("kv_events_config", "tcp://*:5557", "a JSON object, with any of enable_kv_cache_events"),
    ("kv_events_config", "[]", "a JSON object"),
    ("kv_events_config", '{"port": 5557}', "a JSON object"),
    ("kv_events_config", '{"hwm": 0}', "a JSON object"),
    ("kv_events_config", '{"endpoint": "localhost:5557"}', "a JSON object"),
    ("kv_events_config", '{"replay_endpoint": "5558"}', "a JSON object"),
    ("kv_events_config", '{"hwm": true}', "a JSON object"),
    ("kv_events_config", '{"endpoint": null}', "a JSON object"),
    ("kv_events_config", '{"publisher": "nats"}', "a JSON object"),
    ("speculative_decoding_mode", "suffix:", "none, prompt-lookup, suffix, mtp or eagle3"),
    ("speculative_decoding_mode", "suffix:65", "none, prompt-lookup, suffix, mtp or eagle3"),
    ("speculative_decoding_mode", "mtp:65", "none, prompt-lookup, suffix, mtp or eagle3"),
    ("eagle_choices", "{1}", "a tree that contains {0}; for example, '{0}, {1}, {0, 0}' is a tree"),
    ("eagle_choices", "{0}, {-1}", "a tree that contains {0}"),
    ("eagle_choices", "{0}, {0, 0, 0}, {0, 1}", "a tree that contains {0}"),
    ("eagle_choices", "{0}, {0}", "a tree that contains {0}"),
    ("eagle_choices", "{0, 0}", "a tree that contains {0}"),
    ("eagle_choices", "3", "a tree that contains {0}"),
    ("eagle_choices", "{0}, 0", "a tree that contains {0}"),
    ("eagle_choices", "{}", "a tree that contains {0}"),
    ("eagle_choices", "{0", "a tree that contains {0}"),
    (
        "eagle_choices",
        ", ".join(f"{{{', '.join('0' * n)}}}" for n in range(1, 66)),
        "a tree that contains {0}",
    ),
    ("lora_adapters", "/adapters/a", "pairs of a name and a folder, separated by commas"),
    ("lora_adapters", "a=/x,=/y", "pairs of a name and a folder, separated by commas"),
    ("lora_adapters", "a=/x,a=/y", "pairs of a name and a folder, separated by commas"),
    ("lora_weights_data_type", "FP32", "TYPE_FP16 or TYPE_BF16 or TYPE_FP32"),
]


@pytest.mark.parametrize(("key", "text", "expected"), BAD)
def test_bad_values_fail_by_name(key: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_parameters(**{key: text})
    assert f"{key}: got {text!r}, expected {expected}" in str(raised.value)


def test_v1_is_static_batching_whatever_the_policy() -> None:
    parameters = make_parameters(gpt_model_type="V1", batch_scheduler_policy="max_utilization")
    assert parameters.scheduler.policy is CapacityPolicy.STATIC_BATCH


def test_engine_and_scheduler_have_the_same_max_num_tokens() -> None:
    parameters = make_parameters(max_num_tokens="512")
    assert parameters.engine.max_num_tokens == parameters.scheduler.max_num_tokens == 512


def test_an_unknown_model_type_is_refused_with_tensorrtllm_backends_message() -> None:
    with pytest.raises(ConfigError) as raised:
        make_parameters(gpt_model_type="V3")
    message = "gpt_model_type value of 'V3' is not supported, expected V1 or inflight_batching or "
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("parameter", "triton_queue", "bound"),
    [(None, None, 0), (None, 7, 7), ("5", None, 5), ("5", 7, 5), ("0", 7, 0), ("${max_queue_size}", 7, 7)],
)
def test_the_queue_limit_may_be_given_as_in_tensorrtllm_backend(
    parameter: str | None, triton_queue: int | None, bound: int
) -> None:
    config = make_model_config(**({} if parameter is None else {"max_queue_size": parameter}))
    if triton_queue is not None:
        config["dynamic_batching"] = {"default_queue_policy": {"max_queue_size": triton_queue}}
    assert read_parameters(config, Role.ENGINE).scheduler.max_queue_size == bound


def test_a_dynamic_batcher_without_a_queue_limit_sets_none() -> None:
    assert (
        read_parameters(make_model_config() | {"dynamic_batching": {}}, Role.ENGINE).scheduler.max_queue_size
        == 0
    )


@pytest.mark.parametrize("spec", UNBUILT, ids=lambda spec: spec.key)
def test_unsupported_parameters_load_at_their_neutral_values_only(spec: ParameterSpec) -> None:
    for value in spec.neutral or ():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        assert make_parameters(role_of(spec.key), **{spec.key: text}) == make_parameters(role_of(spec.key))
    others = ("7", "true", "false", "0.5", "0.25")
    refused = [
        text for text in others if parses(spec, text) and spec.kind.parse(text) not in (spec.neutral or ())
    ]
    if set(spec.neutral or ()) == {True, False}:
        return
    assert refused
    for text in refused:
        with pytest.raises(
            ConfigError, match=rf"{spec.key}: got '{text}', which is not available .* leave it out"
        ):
            make_parameters(role_of(spec.key), **{spec.key: text})


def parses(spec: ParameterSpec, text: str) -> bool:
    try:
        spec.kind.parse(text)
    except ValueError:
        return False
    return True


def test_an_unknown_key_fails_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"max_num_token: got '5', .* did you mean max_num_tokens\?"):
        make_parameters(max_num_token="5")


def test_old_names_of_tensorrtllm_backend_are_read() -> None:
    assert make_parameters(max_kv_cache_length="512").engine.max_attention_window_size == (512,)
    assert make_parameters(max_kv_cache_length="${max_kv_cache_length}", worker_path="").engine
    same = make_parameters(max_kv_cache_length="512", max_attention_window_size="512")
    assert same.engine.max_attention_window_size == (512,)
    config = make_model_config(worker_path="/a/path")
    assert without_effect(config, Role.ENGINE) == [
        "parameter worker_path is '/a/path' and has no effect: ranks run this package"
    ]


def test_an_old_name_with_a_different_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_attention_window_size: got '7', but its other name has"):
        make_parameters(max_kv_cache_length="512", max_attention_window_size="7")
    with pytest.raises(ConfigError, match="max_kv_cache_length, now max_attention_window_size: got 'x'"):
        make_parameters(max_kv_cache_length="x")


def test_an_unknown_key_fails_even_when_it_is_not_filled_in() -> None:
    with pytest.raises(ConfigError, match=r"xyzzy: got '', .* expected one of .*add_special_tokens|xyzzy"):
        make_parameters(xyzzy="")


def test_a_parameter_of_another_model_is_unknown() -> None:
    with pytest.raises(ConfigError, match="no such parameter"):
        make_parameters(Role.POSTPROCESSING, max_num_tokens="5")


def test_one_error_lists_all_problems() -> None:
    with pytest.raises(ConfigError) as raised:
        make_parameters(max_batch_size=-1, max_num_tokens="x", nonsense="y", num_nodes="4")
    message = str(raised.value)
    assert message.startswith("config.pbtxt of a_model:")
    assert all(name in message for name in ("max_batch_size", "max_num_tokens", "nonsense", "num_nodes"))


def sample_of(spec: ParameterSpec) -> str:
    """Return a text that the row accepts."""
    texts = ("7", "0.5", "true", "auto", "beam_search", "python", "TYPE_FP32", "/a/path")
    return next(text for text in texts if parses(spec, text))


@pytest.mark.parametrize("spec", NO_EFFECT, ids=lambda spec: spec.key)
def test_parameters_without_effect_load_and_are_logged(spec: ParameterSpec) -> None:
    role, text = role_of(spec.key), sample_of(spec)
    config = make_model_config(**{spec.key: text, "tokenizer_dir": "/a/path"})
    assert read_parameters(config, role) == make_parameters(role, tokenizer_dir="/a/path")
    assert without_effect(config, role) == [
        f"parameter {spec.key} is {text!r} and has no effect: {spec.no_effect}"
    ]
    assert without_effect(make_model_config(**{spec.key: f"${{{spec.key}}}"}), role) == []


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("medusa_choices", "{0}", "Medusa heads are not read; an EAGLE-3 head .* mtp"),
        ("lookahead_window_size", "4", "speculative_decoding_mode prompt-lookup:K or suffix:K"),
        ("lookahead_ngram_size", "4", "speculative_decoding_mode prompt-lookup:K or suffix:K"),
        ("lookahead_verification_set_size", "4", "speculative_decoding_mode prompt-lookup:K or suffix:K"),
    ],
)
def test_the_error_for_another_method_of_drafting_names_what_there_is(
    key: str, value: str, instead: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^.*\n  {key}: got .* leave it out.*; {instead}"):
        make_parameters(**{key: value})


@pytest.mark.parametrize(
    ("method", "instead"),
    [
        ("medusa", "Medusa heads are not read; an EAGLE-3 head .* mtp"),
        ("lookahead", "speculative_decoding_mode prompt-lookup:K or suffix:K"),
        ("Lookahead", "speculative_decoding_mode prompt-lookup:K or suffix:K"),
        ("redrafter", "ReDrafter heads are not read; an EAGLE-3 head"),
        ("draft-tokens-external", "a draft model is an engine of its own, tensorrt_llm_draft_model_name of"),
        ("top-k", None),
    ],
)
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("decoding_mode", "auto or top_k or top_p or top_k_top_p or beam_search or eagle"),
        ("speculative_decoding_mode", "none, prompt-lookup, suffix, mtp or eagle3; .*:K .* 0 to 64"),
    ],
)
def test_the_name_of_another_decoding_mode_is_refused_with_what_there_is(
    method: str, instead: str | None, key: str, expected: str
) -> None:
    advice = "" if instead is None else f"; {instead}.*"
    with pytest.raises(ConfigError, match=f"{key}: got '{method}', expected {expected}{advice}$"):
        make_parameters(**{key: method})


def test_heads_of_the_first_eagle_are_refused_with_what_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r"got 'eagle', expected .*; heads of EAGLE and EAGLE-2 are not read; an EAGLE-3"
    ):
        make_parameters(speculative_decoding_mode="eagle")


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("posterior_threshold", "a draft token is accepted if it is the model's own token, so leave it out"),
        ("dynamic_tree_max_topK", "drafts are chains and not trees, so leave it out"),
        ("max_seq_len", "here it is max_sequence_length"),
        ("free_gpu_memory_fraction", "here it is kv_cache_free_gpu_mem_fraction"),
        ("gpu_memory_utilization", "here it is kv_cache_free_gpu_mem_fraction"),
        ("max-num-seqs", "here it is max_batch_size"),
    ],
)
def test_a_key_of_another_server_is_refused_with_what_there_is(key: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: got '1', but there is no such parameter; {instead}"):
        make_parameters(**{key: "1"})
