"""Parameters of TensorRT-LLM that have no effect here: rows of `inflight.config` without a field.

Some have no effect whatever their value is: they are accepted, and the reason is logged. Others belong to
features that are not implemented: they are accepted only with values that do not enable the feature.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inflight.parameter_spec import (
    BOOLEAN,
    DATA_TYPES,
    ENGINE_ONLY,
    FROM_EARLIER_TOKENS,
    OTHER_METHODS,
    TEXT,
    ParameterKind,
    ParameterSpec,
    Role,
    choice,
    integer,
    share,
)

_PREPROCESSING = frozenset({Role.PREPROCESSING})


def _unbuilt(
    key: str,
    kind: ParameterKind,
    meaning: str,
    *neutral: Any,
    template: str = "",
    roles: frozenset[Role] = ENGINE_ONLY,
    instead: str = "",
) -> ParameterSpec:
    return ParameterSpec(key, kind, None, meaning, roles, template=template, neutral=neutral, instead=instead)


def _no_effect(
    key: str, kind: ParameterKind, meaning: str, reason: str, roles: frozenset[Role] = ENGINE_ONLY
) -> ParameterSpec:
    return ParameterSpec(key, kind, None, meaning, roles, no_effect=reason)


NO_EFFECT: tuple[ParameterSpec, ...] = (
    _no_effect(
        "decoding_mode",
        replace(
            choice("auto", "top_k", "top_p", "top_k_top_p", "beam_search", "eagle"), instead=OTHER_METHODS
        ),
        "how tokens are chosen; the value eagle is accepted only with a draft head",
        "the mode follows from each request's sampling parameters and from the draft head",
    ),
    _no_effect(
        "multi_block_mode",
        BOOLEAN,
        "attention over a long context by several GPU thread blocks",
        "it is a switch of TensorRT-LLM's kernels",
    ),
    _no_effect(
        "triton_backend",
        choice("tensorrtllm", "python"),
        "implementation of tensorrtllm_backend",
        "there is only one implementation",
    ),
    _no_effect("executor_worker_path", TEXT, "program of a worker rank", "ranks run this package"),
    _no_effect(
        "max_queue_delay_microseconds",
        integer(0),
        "how long Triton may hold back requests to batch them",
        "a request joins the running batch at once",
    ),
    _no_effect(
        "encoder_input_features_data_type",
        DATA_TYPES,
        "data type of the input encoder_input_features",
        "no model here has an encoder",
    ),
    _no_effect(
        "max_num_images",
        integer(0),
        "maximum number of images in a prompt",
        "the flag --limit-mm-per-prompt limits their number",
        _PREPROCESSING,
    ),
    _no_effect(
        "hf_model_path",
        TEXT,
        "checkpoint of an image model",
        "the server's checkpoint has the vision tower that encodes pictures",
        _PREPROCESSING,
    ),
    _no_effect(
        "multimodal_encoders_name",
        TEXT,
        "model that encodes images",
        "tensorrt_llm_bls itself sends pictures to the process that encodes them",
        frozenset({Role.BLS}),
    ),
    _no_effect(
        "tokenizer_type",
        TEXT,
        "type of the tokenizer, in older versions of tensorrtllm_backend",
        "tokenizer.json states the type",
        frozenset({Role.PREPROCESSING, Role.POSTPROCESSING}),
    ),
)

UNBUILT: tuple[ParameterSpec, ...] = (
    _unbuilt("multimodal_model_path", TEXT, "engine of an image model", roles=_PREPROCESSING),
    _unbuilt(
        "visual_model_path", TEXT, "name of multimodal_model_path in older versions", roles=_PREPROCESSING
    ),
    _unbuilt("encoder_model_path", TEXT, "engine of an encoder", template="encoder_engine_dir"),
    _unbuilt("cross_kv_cache_fraction", share(), "share of the KV cache for cross attention", 0.0),
    _unbuilt("enable_trt_overlap", BOOLEAN, "overlap of two microbatches (deprecated)", False),
    _unbuilt("recv_poll_period_ms", integer(0), "interval at which the leader polls for requests", 0),
    _unbuilt("participant_ids", TEXT, "ids of the MPI ranks"),
    _unbuilt("num_nodes", integer(1), "number of nodes in orchestrator mode", 1),
    _unbuilt("speculative_decoding_fast_logits", BOOLEAN, "transfer of draft logits over MPI", False),
    _unbuilt("lookahead_window_size", integer(0), "lookahead decoding", 0, instead=FROM_EARLIER_TOKENS),
    _unbuilt("lookahead_ngram_size", integer(0), "lookahead decoding", 0, instead=FROM_EARLIER_TOKENS),
    _unbuilt(
        "lookahead_verification_set_size", integer(0), "lookahead decoding", 0, instead=FROM_EARLIER_TOKENS
    ),
    _unbuilt(
        "medusa_choices",
        TEXT,
        "draft tree of Medusa heads",
        instead=OTHER_METHODS["medusa"],
    ),
    _unbuilt("gpu_weights_percent", share(), "fraction of the weights that is kept on the GPU", 1.0),
    _unbuilt("enable_context_fmha_fp32_acc", BOOLEAN, "float32 sums in the attention of prompts", False),
    _unbuilt("cuda_graph_cache_size", integer(0), "number of CUDA graphs that are kept", 0),
    _unbuilt("xgrammar_tokenizer_info_path", TEXT, "file with xgrammar's description of the tokenizer"),
)
