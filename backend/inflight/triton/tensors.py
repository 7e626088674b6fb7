"""THE table of tensors of `tensorrt_llm`, `tensorrt_llm_infer` and `ensemble`: nothing else spells a data type.

The specification's names, shapes and types come first (Inference Request); then what tensorrtllm_backend adds,
so that its clients work unchanged; then this project's own. config.pbtxt is generated from here. Rows with a
`neutral` value are declared and not built: any other value is refused, never ignored.

Left out, because no model served here could use them: encoder_*, decoder_*, cross_attention_mask,
skip_cross_attn_blocks, mrope_*, context_phase_params and the output batch_index (a request is one prompt).

`early_stopping` is INT32 as the specification has it; tensorrtllm_backend declares BOOL and reads an int.
"""

from __future__ import annotations

from inflight.triton.tensor_spec import Neutral, NeutralRule, TensorSpec, TensorTable


def _values(*values: float) -> Neutral:
    return Neutral(NeutralRule.VALUES, values)


_EMPTY = Neutral(NeutralRule.EMPTY)
_ZERO = _values(0)
_FALSE = _values(False)
_ONE = _values(1)
_NO_WORDS = Neutral(NeutralRule.NO_WORDS)
_NO_TEXT = Neutral(NeutralRule.NO_TEXT)
# Of no effect with a single beam, or beside a tensor that has to be neutral itself.
_ANY = Neutral(NeutralRule.ANY)
# Upstream's code defaults to 1, its documentation to 0; both do nothing there, as a first token is a token.
_MIN_LENGTH_OFF = _values(0, 1)
# "Off" is 0 in the documentation and 2**30 in TensorRT-LLM's code.
_NO_REPEAT_OFF = _values(0, 1 << 30)

_PROMPT = (
    TensorSpec("input_ids", "INT32", (-1,), "prompt token ids; or text_input"),
    TensorSpec("input_lengths", "INT32", (), "how many of input_ids count; all by default"),
    TensorSpec("text_input", "BYTES", (), "prompt as UTF-8 text", text_names=("text_input",)),
    TensorSpec("request_output_len", "INT32", (), "most tokens to generate; required", (), ("max_tokens",)),
    TensorSpec("streaming", "BOOL", (), "respond at every iteration instead of once", (), ("stream",)),
    TensorSpec("stop", "BOOL", (), "end the request in flight with this request's id", (), ("stop",)),
    TensorSpec("end_id", "INT32", (), "token that ends the sequence; -1: none", (), ("end_id",)),
    TensorSpec("pad_id", "INT32", (), "fills ragged outputs; -1: none", (), ("pad_id",)),
    TensorSpec(
        "stop_words_list",
        "INT32",
        (2, -1),
        "ids over end offsets: [[5,7,3,9,2],[3,5,-1,-1,-1]]",
        neutral=_NO_WORDS,
    ),
    TensorSpec("bad_words_list", "INT32", (2, -1), "as stop_words_list", neutral=_NO_WORDS),
    TensorSpec("stop_words", "BYTES", (-1,), "texts that end the output", (), ("stop_words",), _NO_TEXT),
    TensorSpec("bad_words", "BYTES", (-1,), "texts never to generate", (), ("bad_words",), _NO_TEXT),
    TensorSpec("embedding_bias", "FP32", (-1,), "[vocab_size], added to the logits", neutral=_ZERO),
    TensorSpec(
        "embedding_bias_words", "BYTES", (-1,), "texts to bias", (), ("embedding_bias_words",), _NO_TEXT
    ),
    TensorSpec(
        "embedding_bias_weights", "FP32", (-1,), "one per text", (), ("embedding_bias_weights",), _ANY
    ),
)

_SAMPLING = (
    TensorSpec(
        "temperature", "FP32", (), "divides the logits; 0: greedy; 1 by default", (), ("temperature",)
    ),
    TensorSpec("runtime_top_k", "INT32", (), "keep the k likeliest; 0: all", (), ("top_k",)),
    TensorSpec("runtime_top_p", "FP32", (), "keep probability p in (0, 1]; <= 0: unset", (), ("top_p",)),
    TensorSpec("random_seed", "UINT64", (), "0 by default", ("seed",), ("seed", "random_seed")),
    TensorSpec("min_p", "FP32", (), "keep p >= min_p * largest p", (), ("min_p",), _ZERO),
    TensorSpec("runtime_top_p_min", "FP32", (), "floor of a decaying top_p", neutral=_values(0, 1e-6)),
    TensorSpec("runtime_top_p_decay", "FP32", (), "top_p's factor per token", neutral=_ONE),
    TensorSpec("runtime_top_p_reset_ids", "INT32", (), "token that resets top_p", neutral=_values(-1)),
    TensorSpec("repetition_penalty", "FP32", (), "1: none", (), ("repetition_penalty",), _ONE),
    TensorSpec("presence_penalty", "FP32", (), "0: none", (), ("presence_penalty",), _ZERO),
    TensorSpec("frequency_penalty", "FP32", (), "0: none", (), ("frequency_penalty",), _ZERO),
    TensorSpec("no_repeat_ngram_size", "INT32", (), "0: off", (), ("no_repeat_ngram_size",), _NO_REPEAT_OFF),
    TensorSpec(
        "min_length",
        "INT32",
        (),
        "fewest tokens",
        ("min_tokens",),
        ("min_tokens", "min_length"),
        _MIN_LENGTH_OFF,
    ),
)

_BEAMS = (
    TensorSpec("beam_width", "INT32", (), "beams of a beam search", (), ("beam_width",), _ONE),
    TensorSpec("num_return_sequences", "INT32", (), "answers wanted", (), ("num_return_sequences",), _ONE),
    TensorSpec("len_penalty", "FP32", (), "exponent of a beam's length", (), ("length_penalty",), _ANY),
    TensorSpec("early_stopping", "INT32", (), "when a beam search ends", (), ("early_stopping",), _ANY),
    TensorSpec("beam_search_diversity_rate", "FP32", (), "bias per beam index", neutral=_ANY),
)


def _flag(name: str, meaning: str, aliases: tuple[str, ...] = (), built: bool = False) -> TensorSpec:
    return TensorSpec(name, "BOOL", (), meaning, aliases, (name, *aliases), None if built else _FALSE)


_WANTED = (
    _flag("exclude_input_in_output", "leave the prompt out; default: the model's parameter", built=True),
    _flag("return_num_input_tokens", "adds output num_input_tokens", built=True),
    _flag("return_num_output_tokens", "adds output num_output_tokens", built=True),
    _flag("return_log_probs", "adds outputs cum_log_probs and output_log_probs"),
    _flag("return_context_logits", "adds output context_logits"),
    _flag("return_generation_logits", "adds output generation_logits"),
    _flag("return_prompt_log_probs", "adds output prompt_log_probs"),
    _flag("return_perf_metrics", "adds times, blocks and draft counts", ("return_kv_cache_reuse_stats",)),
    TensorSpec(
        "num_top_log_probs", "INT32", (), "likeliest tokens to report", (), ("num_top_log_probs",), _ZERO
    ),
)

_ADAPTERS = (
    TensorSpec(
        "prompt_embedding_table", "FP16", (-1, -1), "[rows, hidden]", (), ("prompt_embedding_table",), _EMPTY
    ),
    TensorSpec("prompt_vocab_size", "INT32", (), "rows of that table", (), ("prompt_vocab_size",), _ANY),
    TensorSpec(
        "prompt_table_extra_ids",
        "UINT64",
        (-1,),
        "one per prompt token; 0: text",
        (),
        ("prompt_table_extra_id",),
        _ZERO,
    ),
    TensorSpec("lora_task_id", "UINT64", (), "names the adapter", (), ("lora_task_id",), _EMPTY),
    TensorSpec("lora_weights", "FP16", (-1, -1), "[modules, D*Hi + Ho*D]", (), ("lora_weights",), _EMPTY),
    TensorSpec("lora_config", "INT32", (-1, 3), "rows module, layer, rank", (), ("lora_config",), _EMPTY),
)

_DRAFTS = (
    TensorSpec("draft_input_ids", "INT32", (-1,), "tokens to verify", neutral=_EMPTY),
    TensorSpec("draft_logits", "FP32", (-1, -1), "[draft tokens, vocab_size]", neutral=_EMPTY),
    TensorSpec(
        "draft_acceptance_threshold", "FP32", (), "accept when p_target / p_draft reaches it", neutral=_ANY
    ),
    TensorSpec("lookahead_window_size", "INT32", (1,), "of lookahead decoding", neutral=_ZERO),
    TensorSpec("lookahead_ngram_size", "INT32", (1,), "of lookahead decoding", neutral=_ZERO),
    TensorSpec("lookahead_verification_set_size", "INT32", (1,), "of lookahead decoding", neutral=_ZERO),
    TensorSpec("prompt_lookup_num_tokens", "INT32", (), "draft tokens taken from the prompt", neutral=_ZERO),
)


def _guide(name: str, meaning: str) -> TensorSpec:
    return TensorSpec(name, "BYTES", (1,), meaning, (), (name,), _NO_TEXT)


def _retention(
    name: str, meaning: str, dims: tuple[int, ...] = (-1,), neutral: Neutral = _EMPTY
) -> TensorSpec:
    return TensorSpec(f"retention_{name}", "INT32", dims, meaning, neutral=neutral)


_GUIDES_AND_CACHE = (
    _guide("guided_decoding_guide_type", "json, json_schema, regex or ebnf_grammar"),
    _guide("guided_decoding_guide", "the schema, expression or grammar"),
    _retention("token_range_starts", "prompt ranges whose KV blocks to keep"),
    _retention("token_range_ends", "-1: the prompt's end"),
    _retention("token_range_priorities", "0 .. 100"),
    _retention("token_range_durations_ms", "-1: for ever"),
    _retention("decode_priority", "of generated blocks", (1,), _values(35)),
    _retention("decode_duration_ms", "of generated blocks", (1,), _values(-1)),
    TensorSpec(
        "cache_salt_id", "UINT64", (), "share KV blocks under this salt only", (), ("cache_salt_id",), _ZERO
    ),
)

_QUEUE = (
    TensorSpec("priority", "FP32", (), "0 .. 1, higher first", (), ("priority",), _values(0.5)),
    TensorSpec("client_id", "UINT64", (), "whose request it is", (), ("client_id",), _ZERO),
    TensorSpec("allotted_time_ms", "INT32", (), "deadline; 0: none", (), ("allotted_time_ms",), _ZERO),
)

INPUTS = TensorTable(
    (*_PROMPT, *_SAMPLING, *_BEAMS, *_WANTED, *_ADAPTERS, *_DRAFTS, *_GUIDES_AND_CACHE, *_QUEUE),
)


def _output(name: str, dtype: str, dims: tuple[int, ...], meaning: str, built: bool = False) -> TensorSpec:
    # Ids and their lengths are for those who speak in ids; everything else `ensemble` returns too.
    text_names = () if name in ("output_ids", "sequence_length") else (name,)
    return TensorSpec(name, dtype, dims, meaning, (), text_names, None if built else _EMPTY)


OUTPUTS = TensorTable(
    (
        _output("output_ids", "INT32", (-1, -1), "[beams, n]; streaming: the new tokens", built=True),
        _output("sequence_length", "INT32", (-1,), "[beams] ids in this response", built=True),
        _output("text_output", "BYTES", (-1,), "[beams] text; streaming: the new text", built=True),
        _output("finish_reason", "BYTES", (-1,), "[beams] NOT_FINISHED, END_ID, LENGTH, …", built=True),
        _output("num_input_tokens", "INT32", (1,), "prompt tokens", built=True),
        _output("num_output_tokens", "INT32", (1,), "tokens generated, in this response", built=True),
        _output("cum_log_probs", "FP32", (-1,), "[beams]"),
        _output("output_log_probs", "FP32", (-1, -1), "[beams, n]"),
        _output("top_log_prob_ids", "INT32", (-1, -1, -1), "[beams, n, k]"),
        _output("top_log_probs", "FP32", (-1, -1, -1), "[beams, n, k]"),
        _output("prompt_log_probs", "FP32", (-1,), "[prompt tokens]"),
        _output("context_logits", "FP32", (-1, -1), "[prompt tokens, vocab_size]"),
        _output("generation_logits", "FP32", (-1, -1, -1), "[beams, n, vocab_size]"),
        _output("sequence_index", "INT32", (1,), "which of num_return_sequences"),
        _output("kv_cache_alloc_new_blocks", "INT32", (1,), "with return_perf_metrics"),
        _output("kv_cache_reused_blocks", "INT32", (1,), "with return_perf_metrics"),
        _output("kv_cache_alloc_total_blocks", "INT32", (1,), "with return_perf_metrics"),
        _output("arrival_time_ns", "INT64", (1,), "with return_perf_metrics"),
        _output("first_scheduled_time_ns", "INT64", (1,), "with return_perf_metrics"),
        _output("first_token_time_ns", "INT64", (1,), "with return_perf_metrics"),
        _output("last_token_time_ns", "INT64", (1,), "with return_perf_metrics"),
        _output("acceptance_rate", "FP32", (1,), "of draft tokens"),
        _output("total_accepted_draft_tokens", "INT32", (1,), "with return_perf_metrics"),
        _output("total_draft_tokens", "INT32", (1,), "with return_perf_metrics"),
    )
)
