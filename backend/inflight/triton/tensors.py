"""THE table of tensors of `tensorrt_llm`, `tensorrt_llm_infer` and `ensemble`: nothing else spells a data type.

The specification's names, shapes and types come first (Inference Request); then what tensorrtllm_backend adds,
so that its clients work unchanged; then this project's own. config.pbtxt is generated from here. Rows with a
`neutral` value are declared and not built: any other value is refused, never ignored.

`early_stopping` is INT32 as the specification has it; tensorrtllm_backend's config.pbtxt declares BOOL, and a file
that does so is served too.

`ensemble` also takes the names of tensorrtllm_backend's `tensorrt_llm_bls` and of TensorRT-LLM's `llmapi` model
(`sampling_param_*`).
"""

from __future__ import annotations

from inflight.triton.tensor_spec import InStream, Neutral, NeutralRule, TensorSpec, TensorTable


def _values(*values: float) -> Neutral:
    return Neutral(NeutralRule.VALUES, values)


_EMPTY = Neutral(NeutralRule.EMPTY)
_ZERO = _values(0)
_FALSE = _values(False)
# What tensorrtllm_backend's preprocessing sends with every prompt, for models that have no use for it too.
_PAD_ID = Neutral(NeutralRule.PAD_ID)
_NO_TEXT = Neutral(NeutralRule.NO_TEXT)
# Of no effect beside a tensor that has to be neutral itself.
_ANY = Neutral(NeutralRule.ANY)

_PROMPT = (
    TensorSpec("input_ids", "INT32", (-1,), "prompt token ids; or text_input"),
    TensorSpec("input_lengths", "INT32", (), "how many of input_ids count; all by default"),
    TensorSpec("text_input", "BYTES", (), "prompt as UTF-8 text", text_names=("text_input",)),
    TensorSpec(
        "request_output_len",
        "INT32",
        (),
        "most tokens to generate; required",
        (),
        ("max_tokens", "sampling_param_max_tokens"),
    ),
    TensorSpec(
        "streaming", "BOOL", (), "respond at every iteration instead of once", (), ("stream", "streaming")
    ),
    TensorSpec("stop", "BOOL", (), "end the request in flight with this request's id", (), ("stop",)),
    TensorSpec("state", "BOOL", (), "ask for what the batcher is doing, and nothing else", (), ("state",)),
    TensorSpec("end_id", "INT32", (), "token that ends the sequence; -1: none", (), ("end_id",)),
    TensorSpec("pad_id", "INT32", (), "fills ragged outputs; -1 by default", (), ("pad_id",)),
    TensorSpec(
        "stop_words_list", "INT32", (2, -1), "ids over end offsets: [[5,7,3,9,2],[3,5,-1,-1,-1]]; returned"
    ),
    TensorSpec("bad_words_list", "INT32", (2, -1), "as stop_words_list; never generated"),
    TensorSpec(
        "stop_words",
        "BYTES",
        (-1,),
        "texts that end the output; not returned",
        (),
        ("stop_words", "sampling_param_stop"),
    ),
    TensorSpec(
        "bad_words", "BYTES", (-1,), "texts not to generate, in their usual tokens", (), ("bad_words",)
    ),
    TensorSpec("embedding_bias", "FP32", (-1,), "[vocab_size], added to the logits"),
    TensorSpec(
        "embedding_bias_words", "BYTES", (-1,), "texts whose tokens to bias", (), ("embedding_bias_words",)
    ),
    TensorSpec(
        "embedding_bias_weights",
        "FP32",
        (-1,),
        "added for each token of its text",
        (),
        ("embedding_bias_weights",),
    ),
)

_SAMPLING = (
    TensorSpec(
        "temperature",
        "FP32",
        (),
        "divides the logits; 0: greedy; 1 by default",
        (),
        ("temperature", "sampling_param_temperature"),
    ),
    TensorSpec(
        "runtime_top_k", "INT32", (), "keep the k likeliest; 0: all", (), ("top_k", "sampling_param_top_k")
    ),
    TensorSpec(
        "runtime_top_p",
        "FP32",
        (),
        "keep probability p in (0, 1]; <= 0: unset",
        (),
        ("top_p", "sampling_param_top_p"),
    ),
    TensorSpec(
        "random_seed",
        "UINT64",
        (),
        "0 by default",
        ("seed",),
        ("seed", "random_seed", "sampling_param_seed"),
    ),
    TensorSpec(
        "allowed_token_ids", "INT32", (-1,), "the only tokens that may come", (), ("allowed_token_ids",)
    ),
    TensorSpec("logit_bias_ids", "INT32", (-1,), "tokens whose logits to change", (), ("logit_bias_ids",)),
    TensorSpec("logit_bias_values", "FP32", (-1,), "added to the logit of each", (), ("logit_bias_values",)),
    TensorSpec("min_p", "FP32", (), "keep p >= min_p * largest p", (), ("min_p",)),
    TensorSpec("runtime_top_p_min", "FP32", (), "floor of a decaying top_p; 1e-6", (), ("top_p_min",)),
    TensorSpec("runtime_top_p_decay", "FP32", (), "top_p's factor per token; 1", (), ("top_p_decay",)),
    TensorSpec(
        "runtime_top_p_reset_ids", "INT32", (), "token that resets top_p; -1: none", (), ("top_p_reset_ids",)
    ),
    TensorSpec(
        "repetition_penalty",
        "FP32",
        (),
        "divides positive and multiplies negative logits of tokens seen; 1: none",
        (),
        ("repetition_penalty",),
    ),
    TensorSpec(
        "presence_penalty",
        "FP32",
        (),
        "off the logits of tokens seen; 0: none",
        (),
        ("presence_penalty", "sampling_param_presence_penalty"),
    ),
    TensorSpec(
        "frequency_penalty",
        "FP32",
        (),
        "the same for each time a token was seen; 0: none",
        (),
        ("frequency_penalty", "sampling_param_frequency_penalty"),
    ),
    TensorSpec(
        "no_repeat_ngram_size",
        "INT32",
        (),
        "no n-gram twice; 0 or 2**30: off",
        (),
        ("no_repeat_ngram_size",),
    ),
    TensorSpec(
        "min_length",
        "INT32",
        (),
        "no end id before so many tokens; 0",
        ("min_tokens",),
        ("min_tokens", "min_length"),
    ),
)

_BEAMS = (
    TensorSpec("beam_width", "INT32", (), "beams of a beam search; 1: none", (), ("beam_width",)),
    TensorSpec(
        "num_return_sequences",
        "INT32",
        (),
        "sequences to sample; of beams, how many of the best",
        (),
        ("num_return_sequences",),
    ),
    TensorSpec("len_penalty", "FP32", (), "exponent of a beam's length; 0", (), ("length_penalty",)),
    TensorSpec(
        "early_stopping",
        "INT32",
        (),
        "end with enough beams: 1 at once, 0 if none is better now, other if none can be",
        (),
        ("early_stopping",),
        other_dtypes=("BOOL",),
    ),
    TensorSpec(
        "beam_search_diversity_rate",
        "FP32",
        (),
        "times a beam's index, added to its candidates' ranks; 0",
        (),
        ("beam_search_diversity_rate",),
    ),
)


def _flag(
    name: str, meaning: str, aliases: tuple[str, ...] = (), text_aliases: tuple[str, ...] = ()
) -> TensorSpec:
    return TensorSpec(name, "BOOL", (), meaning, aliases, (name, *aliases, *text_aliases))


def _text_only(
    name: str, dtype: str, dims: tuple[int, ...], meaning: str, neutral: Neutral | None = None
) -> TensorSpec:
    return TensorSpec(name, dtype, dims, meaning, (), (name,), neutral, text_only=True)


_WANTED = (
    _flag(
        "exclude_input_in_output",
        "leave the prompt out; default: the model's parameter",
        text_aliases=("sampling_param_exclude_input_from_output",),
    ),
    _flag("return_num_input_tokens", "adds output num_input_tokens"),
    _flag("return_num_output_tokens", "adds output num_output_tokens"),
    _flag("return_log_probs", "adds outputs cum_log_probs and output_log_probs"),
    _flag("return_context_logits", "adds output context_logits"),
    _flag("return_generation_logits", "adds output generation_logits"),
    _flag("return_prompt_log_probs", "adds output prompt_log_probs"),
    _flag(
        "return_perf_metrics",
        "adds times, blocks and draft counts",
        ("return_kv_cache_reuse_stats",),
        ("sampling_param_return_perf_metrics",),
    ),
    TensorSpec("num_top_log_probs", "INT32", (), "likeliest tokens to report", (), ("num_top_log_probs",)),
    _text_only("return_finish_reason", "BOOL", (), "false: leave output finish_reason out"),
    _text_only("return_cumulative_logprob", "BOOL", (), "adds output cumulative_logprob"),
    _text_only("return_stop_reason", "BOOL", (), "which stop word it was", _FALSE),
)

_ADAPTERS = (
    TensorSpec(
        "prompt_embedding_table",
        "FP16",
        (-1, -1),
        "[rows, hidden]",
        (),
        ("prompt_embedding_table",),
        _EMPTY,
        other_dtypes=("FP32",),
    ),
    TensorSpec("prompt_vocab_size", "INT32", (), "rows of that table", (), ("prompt_vocab_size",), _ANY),
    TensorSpec(
        "prompt_table_extra_ids",
        "UINT64",
        (-1,),
        "one per prompt token; 0: text",
        neutral=_ZERO,
    ),
    _text_only("prompt_table_extra_id", "UINT64", (), "of all rows of that table", _ZERO),
    TensorSpec("lora_task_id", "UINT64", (), "names the adapter", (), ("lora_task_id",), _EMPTY),
    TensorSpec("lora_weights", "FP16", (-1, -1), "[modules, D*Hi + Ho*D]", (), ("lora_weights",), _EMPTY),
    TensorSpec("lora_config", "INT32", (-1, 3), "rows module, layer, rank", (), ("lora_config",), _EMPTY),
    _text_only("lora_id", "UINT64", (), "names the adapter", _EMPTY),
    _text_only("lora_name", "BYTES", (), "names the adapter", _NO_TEXT),
    _text_only("lora_path", "BYTES", (), "folder of the adapter", _NO_TEXT),
    _text_only("lora_ckpt_source", "BYTES", (), "format of that folder", _NO_TEXT),
)

_DRAFTS = (
    TensorSpec("draft_input_ids", "INT32", (-1,), "a guess at the first tokens, verified in one pass"),
    TensorSpec(
        "draft_logits",
        "FP32",
        (-1, -1),
        "[draft tokens, vocab_size] they were drawn from",
        other_dtypes=("FP16",),
    ),
    TensorSpec("draft_acceptance_threshold", "FP32", (), "accept where p_target / p_draft reaches it"),
    TensorSpec("lookahead_window_size", "INT32", (1,), "of lookahead decoding", neutral=_ZERO),
    TensorSpec("lookahead_ngram_size", "INT32", (1,), "of lookahead decoding", neutral=_ZERO),
    TensorSpec("lookahead_verification_set_size", "INT32", (1,), "of lookahead decoding", neutral=_ZERO),
    TensorSpec(
        "prompt_lookup_num_tokens",
        "INT32",
        (),
        "most tokens to guess from what came before; 0: off",
        (),
        ("prompt_lookup_num_tokens",),
    ),
    _text_only("num_draft_tokens", "INT32", (), "tokens to draft with another model", _ZERO),
    _text_only("use_draft_logits", "BOOL", (), "accept these by chance", _FALSE),
    _text_only("sampling_param_best_of", "INT32", (), "sequences to choose the best of", _values(0, 1)),
)

_OTHER_MODELS = (
    TensorSpec(
        "encoder_input_features",
        "FP16",
        (-1, -1),
        "[frames, features] for an encoder",
        neutral=_EMPTY,
        other_dtypes=("FP32",),
    ),
    TensorSpec("encoder_output_lengths", "INT32", (), "how many of an encoder's states count", neutral=_ZERO),
    TensorSpec(
        "decoder_input_ids", "INT32", (-1,), "prompt of the decoder beside an encoder", neutral=_PAD_ID
    ),
    TensorSpec("decoder_input_lengths", "INT32", (), "how many of these count", neutral=_values(0, 1)),
    _text_only("decoder_text_input", "BYTES", (), "prompt of the decoder beside an encoder", _NO_TEXT),
    TensorSpec(
        "cross_attention_mask",
        "BOOL",
        (-1, -1),
        "[prompt tokens, image tiles] they attend to",
        neutral=_EMPTY,
    ),
    TensorSpec("skip_cross_attn_blocks", "BOOL", (1,), "whether none is attended to", neutral=_FALSE),
    TensorSpec("mrope_rotary_cos_sin", "FP32", (-1,), "rotations of image tokens", neutral=_EMPTY),
    TensorSpec("mrope_position_deltas", "INT64", (1,), "shift of positions after images", neutral=_ZERO),
    TensorSpec(
        "context_phase_params", "UINT8", (-1,), "what another server's context phase left", neutral=_EMPTY
    ),
    _text_only("image_input", "FP16", (-1, 3, -1, -1), "pixels of images", _EMPTY),
    _text_only("image_bytes_input", "UINT8", (-1, -1, -1, -1), "images", _EMPTY),
    _text_only("image_url_input", "BYTES", (), "where an image is", _NO_TEXT),
    _text_only("image_url", "BYTES", (-1,), "where images are", _NO_TEXT),
    _text_only("video_bytes_input", "UINT8", (-1, -1, -1, -1), "frames of a video", _EMPTY),
)


def _guide(name: str, meaning: str) -> TensorSpec:
    return TensorSpec(name, "BYTES", (1,), meaning, (), (name,), _NO_TEXT)


def _retention(name: str, meaning: str, dims: tuple[int, ...] = (-1,)) -> TensorSpec:
    return TensorSpec(f"retention_{name}", "INT32", dims, meaning, (), (f"retention_{name}",))


_GUIDES = (
    _guide("guided_decoding_guide_type", "json, json_schema, regex or ebnf_grammar"),
    _guide("guided_decoding_guide", "the schema, expression or grammar"),
)

_CACHE = (
    _retention("token_range_starts", "prompt ranges whose KV blocks get a priority of their own"),
    _retention("token_range_ends", "-1: the prompt's end"),
    _retention("token_range_priorities", "0 .. 100; lower ones are evicted first; 35 by default"),
    _retention("token_range_durations_ms", "then the default again; -1: never; never by default"),
    _retention("decode_priority", "of generated blocks", ()),
    _retention("decode_duration_ms", "of generated blocks; -1: for ever", ()),
    TensorSpec(
        "cache_salt_id", "UINT64", (), "share KV blocks under this salt only; 0", (), ("cache_salt_id",)
    ),
)

_QUEUE = (
    TensorSpec("priority", "FP32", (), "0 .. 1, higher first; 0.5 by default", (), ("priority",)),
    TensorSpec("client_id", "UINT64", (), "whose request it is; clients take turns; 0", (), ("client_id",)),
    TensorSpec("allotted_time_ms", "INT32", (), "deadline; 0: none", (), ("allotted_time_ms",)),
)

INPUTS = TensorTable(
    (
        *_PROMPT,
        *_SAMPLING,
        *_BEAMS,
        *_WANTED,
        *_ADAPTERS,
        *_DRAFTS,
        *_GUIDES,
        *_CACHE,
        *_QUEUE,
        *_OTHER_MODELS,
    ),
)


_NEW, _SO_FAR, _SAME = InStream.NEW, InStream.SO_FAR, InStream.SAME


def _output(
    name: str,
    dtype: str,
    dims: tuple[int, ...],
    in_stream: InStream | None,
    meaning: str,
    asked_by: str = "",
    is_batched: bool = True,
) -> TensorSpec:
    # Ids and their lengths are for those who speak in ids; everything else `ensemble` returns too.
    text_names = () if name in ("output_ids", "sequence_length") else (name,)
    return TensorSpec(
        name,
        dtype,
        dims,
        meaning,
        (),
        text_names,
        asked_by=asked_by,
        in_stream=in_stream,
        is_batched=is_batched,
    )


def _metric(name: str, meaning: str, dtype: str = "INT32") -> TensorSpec:
    return _output(name, dtype, (1,), _SO_FAR, meaning, "return_perf_metrics")


OUTPUTS = TensorTable(
    (
        _output("output_ids", "INT32", (-1, -1), _NEW, "[beams, n]; streaming: the new tokens"),
        _output("sequence_length", "INT32", (-1,), _NEW, "[beams] ids in this response"),
        _output(
            "text_output",
            "BYTES",
            (-1,),
            _NEW,
            "text of each beam; streaming: the new text",
            is_batched=False,
        ),
        _output("finish_reason", "BYTES", (-1,), _SO_FAR, "[beams] NOT_FINISHED, END_ID, LENGTH, …"),
        _output("batch_index", "INT32", (1,), _SAME, "which prompt of a batch; only then"),
        _output("sequence_index", "INT32", (1,), _SAME, "which of num_return_sequences; only then"),
        _output("num_input_tokens", "INT32", (1,), _SAME, "prompt tokens", "return_num_input_tokens"),
        _output(
            "num_output_tokens",
            "INT32",
            (1,),
            _NEW,
            "generated in this response, first beam's",
            "return_num_output_tokens",
        ),
        _output("cum_log_probs", "FP32", (-1,), _SO_FAR, "[beams] sum so far", "return_log_probs"),
        TensorSpec(
            "cumulative_logprob",
            "FP32",
            (-1,),
            "as cum_log_probs",
            (),
            ("cumulative_logprob",),
            asked_by="return_cumulative_logprob",
            in_stream=_SO_FAR,
            text_only=True,
        ),
        _output(
            "output_log_probs",
            "FP32",
            (-1, -1),
            _SO_FAR,
            "[beams, n] of generated tokens",
            "return_log_probs",
        ),
        _output("top_log_prob_ids", "INT32", (-1, -1, -1), _NEW, "[beams, n, k]", "num_top_log_probs"),
        _output(
            "top_log_probs", "FP32", (-1, -1, -1), _NEW, "[beams, n, k] likeliest first", "num_top_log_probs"
        ),
        _output(
            "prompt_log_probs",
            "FP32",
            (-1,),
            _SAME,
            "[prompt tokens], the first 0",
            "return_prompt_log_probs",
        ),
        _output(
            "context_logits", "FP32", (-1, -1), _SAME, "[prompt tokens, vocab_size]", "return_context_logits"
        ),
        _output(
            "generation_logits",
            "FP32",
            (-1, -1, -1),
            _NEW,
            "[beams, n, vocab_size]",
            "return_generation_logits",
        ),
        _metric("kv_cache_alloc_new_blocks", "KV blocks taken for the prompt"),
        _metric("kv_cache_reused_blocks", "KV blocks found in the cache"),
        _metric("kv_cache_missed_blocks", "full blocks of known tokens not found there"),
        _metric("kv_cache_alloc_total_blocks", "as kv_cache_alloc_new_blocks"),
        _metric("arrival_time_ns", "monotonic clock: it was queued", "INT64"),
        _metric("first_scheduled_time_ns", "its first iteration began", "INT64"),
        _metric("first_token_time_ns", "the first token was there", "INT64"),
        _metric("last_token_time_ns", "the last one was; 0 until then", "INT64"),
        _metric("acceptance_rate", "accepted / verified draft tokens; 0 without any", "FP32"),
        _metric("total_accepted_draft_tokens", "draft tokens accepted"),
        _metric("total_draft_tokens", "draft tokens verified"),
        TensorSpec(
            "context_phase_params",
            "UINT8",
            (-1,),
            "never: this server does both phases itself",
            neutral=_EMPTY,
        ),
        _output("state", "BYTES", (1,), None, "JSON; the answer to a state request", "state"),
    )
)
