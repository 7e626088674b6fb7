"""The table of inputs of `tensorrt_llm`, `tensorrt_llm_infer` and `ensemble`; config.pbtxt is generated from it.

The tensors of sampling controls are declared with the controls (`core/request/sampling_config.py`). All
other tensors are declared here: the tensors of TensorRT-LLM's Inference Request; tensorrtllm_backend's
additional tensors, so that its clients work unchanged; and this project's own tensors. A row with `neutral`
declares a tensor that is not implemented: a request is refused if it sends any value other than the neutral
one.

`early_stopping` is INT32 as in TensorRT-LLM's specification. tensorrtllm_backend's config.pbtxt declares
BOOL, which is accepted too.

All models accept the names of TensorRT-LLM's `llmapi` model (`sampling_param_*`). `ensemble` also accepts
the names of tensorrtllm_backend's `tensorrt_llm_bls`. Inputs that only image, video and encoder-decoder
models use are declared as in tensorrtllm_backend.
"""

from __future__ import annotations

from typing import Any

from inflight.core.request.control import Control
from inflight.core.request.sampling_config import CONTROLS, NEUTRAL
from inflight.tensors.spec import (
    EMPTY,
    NO_TEXT,
    Neutral,
    NeutralRule,
    TensorSpec,
    TensorTable,
    of_other_models,
)


def _values(*values: float) -> Neutral:
    return Neutral(NeutralRule.VALUES, values)


_SAMPLING_PARAM = "sampling_param_"
_LLMAPI = ("max_tokens", "lora_id")
"""Names of llmapi's clients for tensors that have another name here."""

_ZERO = _values(0)
_FALSE = _values(False)
# tensorrtllm_backend's preprocessing sends the pad id with every prompt, even to models that do not use it.
_PAD_ID = Neutral(NeutralRule.PAD_ID)


def _both(
    name: str,
    dtype: str,
    meaning: str,
    dims: tuple[int, ...] = (),
    text_names: tuple[str, ...] = (),
    **more: Any,
) -> TensorSpec:
    """Return a tensor of both vocabularies; `text_names` are its names in the text vocabulary, by default `name`.

    llmapi's names in `text_names` are aliases in the vocabulary of `tensorrt_llm` too, because llmapi's
    model is called `tensorrt_llm`.
    """
    own = more.pop("aliases", ())
    aliases = (
        *own,
        *(alias for alias in text_names if alias.startswith(_SAMPLING_PARAM) or alias in _LLMAPI),
    )
    return TensorSpec(name, dtype, dims, meaning, aliases, text_names or (name,), **more)


def _llmapi(
    name: str, dtype: str, meaning: str, neutral: Neutral | None = None, dims: tuple[int, ...] = ()
) -> TensorSpec:
    """Return a tensor of TensorRT-LLM's llmapi model, which has the same name in both vocabularies."""
    return TensorSpec(name, dtype, dims, meaning, (), (name,), neutral)


def _text_only(
    name: str, dtype: str, meaning: str, neutral: Neutral | None = None, dims: tuple[int, ...] = ()
) -> TensorSpec:
    return TensorSpec(name, dtype, dims, meaning, (), (name,), neutral, text_only=True)


def _flag(name: str, meaning: str, aliases: tuple[str, ...] = (), text_alias: str = "") -> TensorSpec:
    text_names = (name, *aliases, *([text_alias] if text_alias else []))
    return TensorSpec(name, "BOOL", (), meaning, text_names[1:], text_names)


_MAX_TOKENS = ("max_tokens", "sampling_param_max_tokens")
_PROMPT = (
    TensorSpec("input_ids", "INT32", (-1,), "prompt token ids; or text_input"),
    TensorSpec("input_lengths", "INT32", (), "how many of input_ids count; all by default"),
    _both("text_input", "BYTES", "prompt as UTF-8 text"),
    _both("request_output_len", "INT32", "most tokens to generate; required", text_names=_MAX_TOKENS),
    _both(
        "streaming", "BOOL", "respond at every iteration instead of once", text_names=("stream", "streaming")
    ),
    _both("stop", "BOOL", "end the request in flight with this request's id"),
    _both("state", "BOOL", "ask for what the batcher is doing, and nothing else"),
    _both("end_id", "INT32", "token that ends the sequence; -1: none"),
    _both("pad_id", "INT32", "fills ragged outputs; -1 by default"),
    TensorSpec(
        "stop_words_list", "INT32", (2, -1), "ids over end offsets: [[5,7,3,9,2],[3,5,-1,-1,-1]]; returned"
    ),
    TensorSpec("bad_words_list", "INT32", (2, -1), "as stop_words_list; never generated"),
    _both(
        "stop_words",
        "BYTES",
        "texts that end the output; not returned",
        (-1,),
        text_names=("stop_words", "sampling_param_stop"),
    ),
    _both("bad_words", "BYTES", "texts not to generate, in their usual tokens", (-1,)),
    TensorSpec("embedding_bias", "FP32", (-1,), "[vocab_size], added to the logits"),
    _both("embedding_bias_words", "BYTES", "texts whose tokens to bias", (-1,)),
    _both("embedding_bias_weights", "FP32", "added for each token of its text", (-1,)),
)


def _of_control(name: str, control: Control) -> TensorSpec:
    """Return the tensor of a sampling control."""
    dims = (-1,) if isinstance(NEUTRAL[name], tuple) else ()
    more = {"aliases": control.aliases, "other_dtypes": control.other_dtypes}
    return _both(control.tensor, control.dtype, control.meaning, dims, control.text_names, **more)


_SAMPLING = tuple(_of_control(name, control) for name, control in CONTROLS.items())

_WANTED = (
    _flag(
        "exclude_input_in_output",
        "leave the prompt out; default: the model's parameter",
        text_alias="sampling_param_exclude_input_from_output",
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
        "sampling_param_return_perf_metrics",
    ),
    _both("num_top_log_probs", "INT32", "likeliest tokens to report"),
    _both(
        "additional_outputs", "BYTES", "names of outputs context_<name> and generation_<name> to add", (-1,)
    ),
    _llmapi("return_finish_reason", "BOOL", "false: leave output finish_reason out"),
    _llmapi("return_cumulative_logprob", "BOOL", "adds output cumulative_logprob"),
    _llmapi("return_stop_reason", "BOOL", "which stop word it was", _FALSE),
)

_ADAPTERS = (
    _both(
        "prompt_embedding_table",
        "FP16",
        "[rows, hidden_size], which ids from vocab_size on stand for; of a text they come first",
        (-1, -1),
        other_dtypes=("FP32", "BF16"),
    ),
    _both("prompt_vocab_size", "INT32", "rows of that table"),
    TensorSpec(
        "prompt_table_extra_ids",
        "UINT64",
        (-1,),
        "one per prompt token, 0 for text: share KV blocks by these too",
    ),
    _text_only("prompt_table_extra_id", "UINT64", "that of all rows of that table"),
    _both(
        "lora_task_id",
        "UINT64",
        "of the adapter that changes the model; with its weights the first time",
        text_names=("lora_task_id", "lora_id"),
    ),
    _both(
        "lora_weights",
        "FP16",
        "[rows, width] A, B with its scale and the magnitudes of DoRA, filled up with 0",
        (-1, -1),
        other_dtypes=("FP32", "BF16"),
    ),
    _both("lora_config", "INT32", "[rows, 3 or 4] module, layer, rank, whether it is DoRA", (-1, -1)),
    _both("lora_name", "BYTES", "of the adapter, instead of lora_task_id: one that the operator has named"),
    _llmapi("lora_path", "BYTES", "folder of the adapter below lora_dir; then name and id say nothing"),
    _llmapi("lora_ckpt_source", "BYTES", "format of that folder: hf, PEFT's"),
    _both("lora_command", "BYTES", "JSON: list, load or unload adapters, and nothing else"),
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
    _both("prompt_lookup_num_tokens", "INT32", "most tokens to guess from what came before; 0: off"),
    _text_only(
        "num_draft_tokens", "INT32", "tokens that another model drafts in a round; tensorrt_llm_bls alone"
    ),
    _text_only("use_draft_logits", "BOOL", "accept these by chance, by the logits of that model"),
    _llmapi("sampling_param_best_of", "INT32", "sequences to choose the best of", _values(0, 1)),
)

_OTHER_MODELS = (
    TensorSpec(
        "encoder_input_features",
        "FP16",
        (-1, -1),
        "[frames, features] for an encoder",
        neutral=EMPTY,
        other_dtypes=("FP32",),
    ),
    TensorSpec("encoder_output_lengths", "INT32", (), "how many of an encoder's states count", neutral=_ZERO),
    TensorSpec(
        "decoder_input_ids", "INT32", (-1,), "prompt of the decoder beside an encoder", neutral=_PAD_ID
    ),
    TensorSpec("decoder_input_lengths", "INT32", (), "how many of these count", neutral=_values(0, 1)),
    _text_only("decoder_text_input", "BYTES", "prompt of the decoder beside an encoder", NO_TEXT),
    of_other_models("cross_attention_mask", "BOOL", (-1, -1), "[prompt tokens, image tiles] they attend to"),
    TensorSpec("skip_cross_attn_blocks", "BOOL", (1,), "whether none is attended to", neutral=_FALSE),
    of_other_models("mrope_rotary_cos_sin", "FP32", (-1,), "rotations of image tokens"),
    TensorSpec("mrope_position_deltas", "INT64", (1,), "shift of positions after images", neutral=_ZERO),
    of_other_models("context_phase_params", "UINT8", (-1,), "what another server's context phase left"),
    _text_only("image_input", "FP16", "pixels of images", EMPTY, (-1, 3, -1, -1)),
    _text_only("image_bytes_input", "UINT8", "images", EMPTY, (-1, -1, -1, -1)),
    _text_only("image_url_input", "BYTES", "where an image is", NO_TEXT),
    _llmapi("image_url", "BYTES", "where images are", NO_TEXT, (-1,)),
    _text_only("video_bytes_input", "UINT8", "frames of a video", EMPTY, (-1, -1, -1, -1)),
)

_GUIDES = (
    _both(
        "guided_decoding_guide_type",
        "BYTES",
        "what the text has to be: json, json_schema, regex, ebnf_grammar or structural_tag",
    ),
    _both("guided_decoding_guide", "BYTES", "the schema, expression, grammar or tags; none for json"),
)

_POST_PROCESSORS = (
    _both(
        "logits_post_processor_name",
        "BYTES",
        "which function of the server's operator changes its logits first",
    ),
)

_CACHE = (
    _both(
        "retention_token_range_starts",
        "INT32",
        "prompt ranges whose KV blocks get a priority of their own",
        (-1,),
    ),
    _both("retention_token_range_ends", "INT32", "-1: the prompt's end", (-1,)),
    _both(
        "retention_token_range_priorities",
        "INT32",
        "0 .. 100; lower ones are evicted first; 35 by default",
        (-1,),
    ),
    _both(
        "retention_token_range_durations_ms",
        "INT32",
        "then the default again; -1: never; never by default",
        (-1,),
    ),
    _both("retention_decode_priority", "INT32", "of generated blocks"),
    _both("retention_decode_duration_ms", "INT32", "of generated blocks; -1: for ever"),
    _both("cache_salt_id", "UINT64", "share KV blocks under this salt only; 0"),
)

_QUEUE = (
    _both("priority", "FP32", "0 .. 1, higher first; 0.5 by default"),
    _both("client_id", "UINT64", "whose request it is; clients take turns; 0"),
    _both("allotted_time_ms", "INT32", "deadline; 0: none"),
)

INPUTS = TensorTable(
    _PROMPT
    + _SAMPLING
    + _WANTED
    + _ADAPTERS
    + _DRAFTS
    + _GUIDES
    + _POST_PROCESSORS
    + _CACHE
    + _QUEUE
    + _OTHER_MODELS
)
