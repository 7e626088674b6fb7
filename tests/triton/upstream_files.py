"""Files of tensorrtllm_backend's users: documented command lines, and a version of its fill_template."""

from __future__ import annotations

import re
from string import Template

QUICK_START = [
    ("ensemble", "triton_max_batch_size:4,logits_datatype:TYPE_FP32"),
    ("preprocessing", "tokenizer_dir:/models/x,triton_max_batch_size:4,preprocessing_instance_count:1"),
    (
        "tensorrt_llm",
        "triton_backend:tensorrtllm,triton_max_batch_size:4,decoupled_mode:false,engine_dir:/models/x,"
        "max_queue_delay_microseconds:0,batching_strategy:inflight_fused_batching,max_queue_size:0,"
        "encoder_input_features_data_type:TYPE_FP16,logits_datatype:TYPE_FP32",
    ),
    ("postprocessing", "tokenizer_dir:/models/x,triton_max_batch_size:4,postprocessing_instance_count:1"),
    (
        "tensorrt_llm_bls",
        "triton_max_batch_size:4,decoupled_mode:false,bls_instance_count:1,accumulate_tokens:false,"
        "logits_datatype:TYPE_FP32",
    ),
]
"""Command lines of its README."""

DOCUMENTED = [
    *QUICK_START,
    # from its documentation of speculative decoding
    (
        "tensorrt_llm_bls",
        "triton_max_batch_size:4,decoupled_mode:False,bls_instance_count:1,accumulate_tokens:False,"
        "logits_datatype:TYPE_FP32,tensorrt_llm_model_name:tensorrt_llm,"
        "tensorrt_llm_draft_model_name:tensorrt_llm_draft",
    ),
    # from docs/llama.md
    (
        "tensorrt_llm",
        "triton_backend:tensorrtllm,triton_max_batch_size:64,decoupled_mode:True,max_beam_width:1,"
        "engine_dir:/models/x,max_tokens_in_paged_kv_cache:2560,max_attention_window_size:2560,"
        "kv_cache_free_gpu_mem_fraction:0.5,exclude_input_in_output:True,enable_kv_cache_reuse:False,"
        "batching_strategy:inflight_batching,max_queue_delay_microseconds:0,"
        "encoder_input_features_data_type:TYPE_FP16,logits_datatype:TYPE_FP32,"
        "prompt_embedding_table_data_type:TYPE_FP16",
    ),
    # from an older version
    (
        "preprocessing",
        "tokenizer_dir:/models/x,tokenizer_type:sp,triton_max_batch_size:64,preprocessing_instance_count:1,"
        "add_special_tokens:True",
    ),
    (
        "postprocessing",
        "tokenizer_dir:/models/x,tokenizer_type:sp,triton_max_batch_size:64,postprocessing_instance_count:1,"
        "skip_special_tokens:True",
    ),
    # from its documentation of multimodal models, for a text model
    (
        "preprocessing",
        "tokenizer_dir:/models/x,triton_max_batch_size:4,preprocessing_instance_count:1,multimodal_model_path:,"
        "engine_dir:/models/x,max_num_images:1,max_queue_delay_microseconds:20000",
    ),
    # from its tests: every variable of the file, some of them empty
    (
        "tensorrt_llm",
        "triton_backend:python,engine_dir:/models/x,decoupled_mode:False,max_tokens_in_paged_kv_cache:,"
        "max_attention_window_size:,batch_scheduler_policy:guaranteed_no_evict,"
        "batching_strategy:inflight_fused_batching,kv_cache_free_gpu_mem_fraction:0.2,"
        "exclude_input_in_output:False,triton_max_batch_size:64,max_queue_delay_microseconds:0,"
        "max_beam_width:1,enable_kv_cache_reuse:False,normalize_log_probs:True,enable_chunked_context:False,"
        "gpu_device_ids:,decoding_mode:top_k_top_p,max_queue_size:0,enable_context_fmha_fp32_acc:False,"
        "encoder_input_features_data_type:TYPE_FP16,prompt_embedding_table_data_type:TYPE_FP16,"
        "logits_datatype:TYPE_FP32,lookahead_window_size:,lookahead_ngram_size:,"
        "lookahead_verification_set_size:",
    ),
]
"""Pairs (model, second argument of fill_template.py)."""


def fill_template(text: str, arguments: str) -> str:
    """Return the text with `name:value,name:value` filled in; a backslash escapes the next character.

    Variables without a value stay, except for two that default to 0. An unknown name is an error.
    """
    values = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}
    for argument in re.split(r"(?<!\\),", arguments):
        name, value = re.split(r"(?<!\\):", argument)
        assert name in text, f"there is no {name} in the file"
        values[name] = re.sub(r"\\(.)", r"\1", value)
    return Template(text).safe_substitute(values)


# Declarations in its files of 2025: name, data type and dims; type "*" if a template variable decides it.
TENSORS = {
    ("tensorrt_llm", "input"): """
        input_ids INT32 -1; encoder_input_features * -1,-1; encoder_output_lengths INT32 1; input_lengths INT32 1;
        request_output_len INT32 1; num_return_sequences INT32 1; draft_input_ids INT32 -1;
        decoder_input_ids INT32 -1; decoder_input_lengths INT32 1; draft_logits * -1,-1;
        draft_acceptance_threshold FP32 1; end_id INT32 1; pad_id INT32 1; stop_words_list INT32 2,-1;
        bad_words_list INT32 2,-1; embedding_bias FP32 -1; beam_width INT32 1; temperature FP32 1;
        runtime_top_k INT32 1; runtime_top_p FP32 1; runtime_top_p_min FP32 1; runtime_top_p_decay FP32 1;
        runtime_top_p_reset_ids INT32 1; len_penalty FP32 1; early_stopping BOOL 1; repetition_penalty FP32 1;
        min_tokens INT32 1; beam_search_diversity_rate FP32 1; presence_penalty FP32 1; frequency_penalty FP32 1;
        seed UINT64 1; return_log_probs BOOL 1; return_context_logits BOOL 1; return_generation_logits BOOL 1;
        return_perf_metrics BOOL 1; return_num_input_tokens BOOL 1; return_num_output_tokens BOOL 1;
        exclude_input_in_output BOOL 1; stop BOOL 1; streaming BOOL 1; prompt_embedding_table * -1,-1;
        prompt_table_extra_ids UINT64 -1; prompt_vocab_size INT32 1; cross_attention_mask BOOL -1,-1;
        mrope_rotary_cos_sin FP32 -1; mrope_position_deltas INT64 1; lora_task_id UINT64 1;
        lora_weights FP16 -1,-1; lora_config INT32 -1,3; context_phase_params UINT8 -1;
        skip_cross_attn_blocks BOOL 1; retention_token_range_starts INT32 -1; retention_token_range_ends INT32 -1;
        retention_token_range_priorities INT32 -1; retention_token_range_durations_ms INT32 -1;
        retention_decode_priority INT32 1; retention_decode_duration_ms INT32 1;
        guided_decoding_guide_type BYTES 1; guided_decoding_guide BYTES 1; lookahead_window_size INT32 1;
        lookahead_ngram_size INT32 1; lookahead_verification_set_size INT32 1""",
    ("tensorrt_llm", "output"): """
        output_ids INT32 -1,-1; sequence_length INT32 -1; cum_log_probs FP32 -1; output_log_probs FP32 -1,-1;
        context_logits * -1,-1; generation_logits * -1,-1,-1; batch_index INT32 1; sequence_index INT32 1;
        context_phase_params UINT8 -1; kv_cache_alloc_new_blocks INT32 1; kv_cache_reused_blocks INT32 1;
        kv_cache_alloc_total_blocks INT32 1; arrival_time_ns INT64 1; first_scheduled_time_ns INT64 1;
        first_token_time_ns INT64 1; last_token_time_ns INT64 1; acceptance_rate FP32 1;
        total_accepted_draft_tokens INT32 1; total_draft_tokens INT32 1; num_input_tokens INT32 1;
        num_output_tokens INT32 1""",
    # tensors that tensorrt_llm_bls and llmapi have in addition to its ensemble
    ("ensemble", "input"): """
        text_input BYTES 1; decoder_text_input BYTES 1; max_tokens INT32 1; num_return_sequences INT32 1;
        bad_words BYTES -1; stop_words BYTES -1; exclude_input_in_output BOOL 1; end_id INT32 1; pad_id INT32 1;
        top_k INT32 1; top_p FP32 1; temperature FP32 1; length_penalty FP32 1; repetition_penalty FP32 1;
        min_tokens INT32 1; presence_penalty FP32 1; frequency_penalty FP32 1; seed UINT64 1;
        return_log_probs BOOL 1; return_context_logits BOOL 1; return_generation_logits BOOL 1;
        return_perf_metrics BOOL 1; return_num_input_tokens BOOL 1; return_num_output_tokens BOOL 1;
        beam_width INT32 1; stream BOOL 1; prompt_embedding_table FP16 -1,-1; prompt_table_extra_id UINT64 1;
        prompt_vocab_size INT32 1; embedding_bias_words BYTES -1; embedding_bias_weights FP32 -1;
        lora_task_id UINT64 1; lora_weights FP16 -1,-1; lora_config INT32 -1,3;
        guided_decoding_guide_type BYTES 1; guided_decoding_guide BYTES 1; image_input FP16 -1,3,-1,-1;
        image_bytes_input UINT8 -1,-1,-1,-1; image_url_input BYTES -1; image_sizes_input INT64 -1,2;
        video_bytes_input UINT8 -1,-1,-1,-1; num_draft_tokens INT32 1; use_draft_logits BOOL 1;
        image_url BYTES -1; streaming BOOL 1;
        sampling_param_best_of INT32 1; sampling_param_temperature FP32 1; sampling_param_top_k INT32 1;
        sampling_param_top_p FP32 1; sampling_param_frequency_penalty FP32 1;
        sampling_param_presence_penalty FP32 1; sampling_param_max_tokens INT32 1; sampling_param_stop BYTES -1;
        sampling_param_seed UINT64 1; sampling_param_exclude_input_from_output BOOL 1;
        sampling_param_return_perf_metrics BOOL 1; return_finish_reason BOOL 1; return_stop_reason BOOL 1;
        return_cumulative_logprob BOOL 1; stop BOOL 1; lora_id UINT64 1; lora_name BYTES 1; lora_path BYTES 1;
        lora_ckpt_source BYTES 1""",
    ("tensorrt_llm_bls", "input"): """
        text_input BYTES 1; decoder_text_input BYTES 1; image_input FP16 -1,3,-1,-1; max_tokens INT32 1;
        bad_words BYTES -1; stop_words BYTES -1; end_id INT32 1; pad_id INT32 1; top_k INT32 1; top_p FP32 1;
        temperature FP32 1; length_penalty FP32 1; repetition_penalty FP32 1; min_tokens INT32 1;
        min_length INT32 1; presence_penalty FP32 1; frequency_penalty FP32 1; seed UINT64 1;
        random_seed UINT64 1; return_log_probs BOOL 1; return_context_logits BOOL 1;
        return_generation_logits BOOL 1; beam_width INT32 1; stream BOOL 1;
        prompt_embedding_table FP16 -1,-1; prompt_vocab_size INT32 1; embedding_bias_words BYTES -1;
        embedding_bias_weights FP32 -1; num_draft_tokens INT32 1; use_draft_logits BOOL 1""",
    ("tensorrt_llm_bls", "output"): """
        text_output BYTES -1; cum_log_probs FP32 -1; output_log_probs FP32 -1,-1; context_logits * -1,-1;
        generation_logits * -1,-1,-1; batch_index INT32 1""",
    ("preprocessing", "input"): """
        QUERY BYTES 1; DECODER_QUERY BYTES 1; IMAGE_BYTES UINT8 -1,-1,-1,-1; IMAGE_URL BYTES -1;
        IMAGE_SIZES INT64 -1,2; IMAGES BYTES -1; VIDEO_BYTES UINT8 -1,-1,-1,-1;
        REQUEST_OUTPUT_LEN INT32 1; BAD_WORDS_DICT BYTES -1;
        STOP_WORDS_DICT BYTES -1; EMBEDDING_BIAS_WORDS BYTES -1; EMBEDDING_BIAS_WEIGHTS FP32 -1; END_ID INT32 1;
        PAD_ID INT32 1; PROMPT_TABLE_EXTRA_ID UINT64 1""",
    ("preprocessing", "output"): """
        INPUT_ID INT32 -1; REQUEST_INPUT_LEN INT32 1; DECODER_INPUT_ID INT32 -1; REQUEST_DECODER_INPUT_LEN INT32 1;
        BAD_WORDS_IDS INT32 2,-1; STOP_WORDS_IDS INT32 2,-1; EMBEDDING_BIAS FP32 -1; REQUEST_OUTPUT_LEN INT32 -1;
        OUT_END_ID INT32 1; OUT_PAD_ID INT32 1; OUT_PROMPT_TABLE_EXTRA_IDS UINT64 -1;
        PIXEL_VALUES FP16 -1,-1,-1,-1; ASPECT_RATIO_IDS INT64 -1; ASPECT_RATIO_MASK INT64 -1,-1;
        CROSS_ATTENTION_MASK INT64 -1,-1,-1; IMAGE_SIZES INT64 -1,2; IS_VIDEO_INPUT BOOL 1;
        ATTENTION_MASK INT64 -1; IMAGE_GRID_THW INT64 3; VISION_INPUT_ID INT32 -1""",
    ("postprocessing", "input"): "TOKENS_BATCH INT32 -1,-1; SEQUENCE_LENGTH INT32 -1",
    ("postprocessing", "output"): "OUTPUT BYTES -1",
}

PARAMETERS = {
    "tensorrt_llm": """
        max_beam_width FORCE_CPU_ONLY_INPUT_TENSORS gpt_model_type gpt_model_path encoder_model_path
        max_tokens_in_paged_kv_cache max_attention_window_size sink_token_length batch_scheduler_policy
        kv_cache_free_gpu_mem_fraction cross_kv_cache_fraction kv_cache_host_memory_bytes kv_cache_onboard_blocks
        exclude_input_in_output cancellation_check_period_ms stats_check_period_ms iter_stats_max_iterations
        request_stats_max_iterations enable_kv_cache_reuse normalize_log_probs enable_chunked_context
        gpu_device_ids participant_ids num_nodes lora_cache_optimal_adapter_size lora_cache_max_adapter_size
        lora_cache_gpu_memory_fraction lora_cache_host_memory_bytes lora_prefetch_dir decoding_mode
        executor_worker_path lookahead_window_size lookahead_ngram_size lookahead_verification_set_size
        medusa_choices eagle_choices gpu_weights_percent enable_context_fmha_fp32_acc multi_block_mode
        cuda_graph_mode cuda_graph_cache_size speculative_decoding_fast_logits tokenizer_dir
        guided_decoding_backend xgrammar_tokenizer_info_path""",
    "preprocessing": """
        tokenizer_dir add_special_tokens multimodal_model_path gpt_model_path max_num_images hf_model_path""",
    "postprocessing": "tokenizer_dir skip_special_tokens",
    "tensorrt_llm_bls": """
        accumulate_tokens tensorrt_llm_model_name tensorrt_llm_draft_model_name multimodal_encoders_name""",
}
FILLED = {
    "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
    "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
    "gpt_model_type": "v1",
    "decoding_mode": "beam_search",
    "normalize_log_probs": "true",
    "lora_cache_optimal_adapter_size": "8",
    "lora_cache_gpu_memory_fraction": "0.05",
    "lora_cache_host_memory_bytes": "1073741824",
    "max_num_images": "1",
}
"""Values of some parameters; the others stay template variables."""


def engine_config(parameters: dict[str, str], logits_type: str = "TYPE_FP16") -> str:
    """Return its filled-in config.pbtxt of `tensorrt_llm`: TENSORS, and these parameters over FILLED."""
    values = {**FILLED, **parameters}
    types = {"*": logits_type, "BYTES": "TYPE_STRING"}
    blocks = [
        'name: "tensorrt_llm"\nbackend: "python"\nmax_batch_size: 4\n'
        "model_transaction_policy {\n  decoupled: False\n}\n"
        "dynamic_batching {\n    preferred_batch_size: [ 4 ]\n    max_queue_delay_microseconds: 0\n"
        "    default_queue_policy: { max_queue_size: 0 }\n}"
    ]
    for kind in ("input", "output"):
        rows = []
        for line in TENSORS["tensorrt_llm", kind].split(";"):
            name, dtype, dims = line.split()
            row = f'    name: "{name}"\n    data_type: {types.get(dtype, f"TYPE_{dtype}")}\n    dims: [ {dims} ]\n'
            # Most scalars have a reshape; some are arrays of one element.
            is_scalar = dims == "1" and not name.startswith(
                ("retention_", "lookahead_", "guided_", "mrope_", "skip_")
            )
            if kind == "input":
                row += "    reshape: { shape: [ ] }\n" if is_scalar else "    allow_ragged_batch: true\n"
                row += "" if name in ("input_lengths", "request_output_len") else "    optional: true\n"
            rows.append(f"  {{\n{row}  }}")
        blocks.append(f"{kind} [\n" + ",\n".join(rows) + "\n]")
    blocks.append("instance_group [\n  {\n    count: 1\n    kind : KIND_CPU\n  }\n]")
    for key in PARAMETERS["tensorrt_llm"].split():
        value = values.get(key, f"${{{key}}}")
        blocks.append(f'parameters: {{\n  key: "{key}"\n  value: {{\n    string_value: "{value}"\n  }}\n}}')
    return "\n".join(blocks) + "\n"


ENSEMBLE_OUTPUTS = [
    line.split()
    for line in TENSORS["tensorrt_llm", "output"].split(";")
    if "context_phase_params" not in line
]
"""Outputs that its ensemble always requests from tensorrt_llm; all but output_ids go to the client."""

_TO_PREPROCESSING = """
    QUERY text_input; DECODER_QUERY decoder_text_input; REQUEST_OUTPUT_LEN max_tokens; BAD_WORDS_DICT bad_words;
    STOP_WORDS_DICT stop_words; EMBEDDING_BIAS_WORDS embedding_bias_words;
    EMBEDDING_BIAS_WEIGHTS embedding_bias_weights; END_ID end_id; PAD_ID pad_id;
    PROMPT_TABLE_EXTRA_ID prompt_table_extra_id"""
_FROM_PREPROCESSING = """
    INPUT_ID input_ids; REQUEST_INPUT_LEN input_lengths; DECODER_INPUT_ID decoder_input_ids;
    REQUEST_DECODER_INPUT_LEN decoder_input_lengths; REQUEST_OUTPUT_LEN request_output_len;
    STOP_WORDS_IDS stop_words_list; BAD_WORDS_IDS bad_words_list; EMBEDDING_BIAS embedding_bias;
    OUT_END_ID end_id; OUT_PAD_ID pad_id; OUT_PROMPT_TABLE_EXTRA_IDS prompt_table_extra_ids"""
_RENAMED = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
_HANDED_ON = """
    exclude_input_in_output top_k top_p temperature length_penalty repetition_penalty min_tokens presence_penalty
    frequency_penalty seed return_log_probs return_context_logits return_generation_logits return_perf_metrics
    return_num_input_tokens return_num_output_tokens num_return_sequences beam_width stream lora_task_id
    guided_decoding_guide_type guided_decoding_guide"""


def ensemble_config(batch_size: int = 4) -> str:
    """Return its filled-in config.pbtxt of `ensemble`: a Triton ensemble of three models."""
    pairs = [line.split() for line in _TO_PREPROCESSING.split(";")]
    names = {*(wire for _, wire in pairs), *_HANDED_ON.split()}
    inputs = [
        (name, dtype, dims)
        for name, dtype, dims in map(str.split, TENSORS["ensemble", "input"].split(";"))
        if name in names
    ]
    made = [line.split() for line in _FROM_PREPROCESSING.split(";")]
    handed = [(_RENAMED.get(name, name), name) for name in _HANDED_ON.split()]
    answered = [name for name, _, _ in ENSEMBLE_OUTPUTS]
    internal = {"output_ids", "sequence_length"}
    steps = (
        ("preprocessing", pairs, [(theirs, f"_{ours}") for theirs, ours in made]),
        (
            "tensorrt_llm",
            [*((ours, f"_{ours}") for _, ours in made), *handed],
            [(name, f"_{name}" if name in internal else name) for name in answered],
        ),
        (
            "postprocessing",
            [("TOKENS_BATCH", "_output_ids"), ("SEQUENCE_LENGTH", "_sequence_length")],
            [("OUTPUT", "text_output")],
        ),
    )
    outputs = [("text_output", "BYTES", "-1"), *(row for row in ENSEMBLE_OUTPUTS if row[0] not in internal)]
    optional = {name for name, _, _ in inputs} - {"text_input", "max_tokens"}
    return "\n".join(
        [
            f'name: "ensemble"\nplatform: "ensemble"\nmax_batch_size: {batch_size}',
            f"input [{', '.join(_tensor(*row, row[0] in optional) for row in inputs)}]",
            f"output [{', '.join(_tensor(*row) for row in outputs)}]",
            f"ensemble_scheduling {{ step [{', '.join(_step(*step) for step in steps)}] }}",
        ]
    )


def _tensor(name: str, dtype: str, dims: str, is_optional: bool = False) -> str:
    data_type = {"*": "TYPE_FP32", "BYTES": "TYPE_STRING"}.get(dtype, f"TYPE_{dtype}")
    optional = " optional: true" if is_optional else ""
    return f'{{ name: "{name}" data_type: {data_type} dims: [{dims}]{optional} }}'


def _step(model: str, inputs: list[tuple[str, str]], outputs: list[tuple[str, str]]) -> str:
    maps = [
        f'{kind}_map {{ key: "{theirs}" value: "{ours}" }}'
        for kind, pairs in (("input", inputs), ("output", outputs))
        for theirs, ours in pairs
    ]
    return f'{{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'
