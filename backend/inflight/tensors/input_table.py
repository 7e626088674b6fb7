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
    NO_ENCODER,
    NO_TEXT,
    NO_VIDEO,
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
    name: str,
    dtype: str,
    meaning: str,
    neutral: Neutral | None = None,
    dims: tuple[int, ...] = (),
    reason: str = "",
) -> TensorSpec:
    return TensorSpec(name, dtype, dims, meaning, (), (name,), neutral, text_only=True, reason=reason)


def _flag(name: str, meaning: str, aliases: tuple[str, ...] = (), text_alias: str = "") -> TensorSpec:
    text_names = (name, *aliases, *([text_alias] if text_alias else []))
    return TensorSpec(name, "BOOL", (), meaning, text_names[1:], text_names)


_MAX_TOKENS = ("max_tokens", "sampling_param_max_tokens")
_PROMPT = (
    TensorSpec("input_ids", "INT32", (-1,), "token ids of the prompt; send these or text_input"),
    TensorSpec("input_lengths", "INT32", (), "number of valid ids in input_ids; default: all"),
    _both("text_input", "BYTES", "the prompt as UTF-8 text"),
    _both(
        "request_output_len",
        "INT32",
        "maximum number of tokens to generate; required",
        text_names=_MAX_TOKENS,
    ),
    _both(
        "streaming",
        "BOOL",
        "send a response after every iteration instead of one response at the end",
        text_names=("stream", "streaming"),
    ),
    _both("stop", "BOOL", "stop the request in flight that has this request's id"),
    _both("state", "BOOL", "return the state of the server instead of generating"),
    _both("end_id", "INT32", "token id that ends the sequence; -1: none"),
    _both("pad_id", "INT32", "token id that pads shorter rows of outputs; default: -1"),
    TensorSpec(
        "stop_words_list",
        "INT32",
        (2, -1),
        "words that end the output and are returned. First row: all ids; second row: where each word ends, as "
        "in [[5,7,3,9,2],[3,5,-1,-1,-1]]",
    ),
    TensorSpec(
        "bad_words_list", "INT32", (2, -1), "words that are never generated, in the layout of stop_words_list"
    ),
    _both(
        "stop_words",
        "BYTES",
        "texts that end the output and are not returned",
        (-1,),
        text_names=("stop_words", "sampling_param_stop"),
    ),
    _both("bad_words", "BYTES", "texts that are never generated, in their usual tokenizations", (-1,)),
    TensorSpec("embedding_bias", "FP32", (-1,), "[vocab_size]: number added to the logit of each token"),
    _both("embedding_bias_words", "BYTES", "texts whose tokens get a bias", (-1,)),
    _both(
        "embedding_bias_weights", "FP32", "bias for the tokens of each text in embedding_bias_words", (-1,)
    ),
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
        "leave the prompt out of the outputs; default: the model's parameter exclude_input_in_output",
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
        "adds the outputs with times, numbers of KV blocks and numbers of draft tokens",
        ("return_kv_cache_reuse_stats",),
        "sampling_param_return_perf_metrics",
    ),
    _flag("return_receipt", "adds output receipt"),
    _both("num_top_log_probs", "INT32", "number of likeliest tokens to return at each position"),
    _both(
        "additional_outputs",
        "BYTES",
        "names of additional outputs, context_<name> or generation_<name>",
        (-1,),
    ),
    _llmapi("return_finish_reason", "BOOL", "false: leave output finish_reason out"),
    _llmapi("return_cumulative_logprob", "BOOL", "adds output cumulative_logprob"),
    _llmapi("return_stop_reason", "BOOL", "adds the stop word that ended the output", _FALSE),
)

_ADAPTERS = (
    _both(
        "prompt_embedding_table",
        "FP16",
        "[rows, hidden_size]: token id vocab_size + i stands for row i; in a request with text_input, all rows "
        "come before the text",
        (-1, -1),
        other_dtypes=("FP32", "BF16"),
    ),
    _both("prompt_vocab_size", "INT32", "number of rows of prompt_embedding_table"),
    TensorSpec(
        "prompt_table_extra_ids",
        "UINT64",
        (-1,),
        "one extra id per prompt token, 0 for text; KV blocks are shared only between prompts "
        "with equal extra ids",
    ),
    _text_only("prompt_table_extra_id", "UINT64", "extra id of all rows of prompt_embedding_table"),
    _both(
        "lora_task_id",
        "UINT64",
        "id of the LoRA adapter; the first request with this id also needs lora_weights",
        text_names=("lora_task_id", "lora_id"),
    ),
    _both(
        "lora_weights",
        "FP16",
        "[rows, width]: the matrices A and B, with B already scaled, and magnitudes of DoRA; padded with 0",
        (-1, -1),
        other_dtypes=("FP32", "BF16"),
    ),
    _both(
        "lora_config",
        "INT32",
        "[rows, 3 or 4]: module id, layer, rank, and whether the row is DoRA",
        (-1, -1),
    ),
    _both("lora_name", "BYTES", "name that the operator gave to a LoRA adapter; replaces lora_task_id"),
    _llmapi(
        "lora_path",
        "BYTES",
        "path of the LoRA adapter's folder, which is below lora_dir; lora_name and lora_task_id are then only "
        "labels",
    ),
    _llmapi("lora_ckpt_source", "BYTES", "format of the folder lora_path: hf for PEFT's format"),
    _both("lora_command", "BYTES", "JSON command: list, load or unload adapters instead of generating"),
)

_DRAFTS = (
    TensorSpec(
        "draft_input_ids", "INT32", (-1,), "draft of the first generated tokens, verified in one pass"
    ),
    TensorSpec(
        "draft_logits",
        "FP32",
        (-1, -1),
        "[draft tokens, vocab_size]: the logits that the draft tokens were sampled from",
        other_dtypes=("FP16",),
    ),
    TensorSpec(
        "draft_acceptance_threshold",
        "FP32",
        (),
        "accept a draft token if p_target / p_draft is at least this number",
    ),
    *(
        TensorSpec(
            f"lookahead_{size}",
            "INT32",
            (1,),
            "parameter of lookahead decoding",
            neutral=_ZERO,
            reason="prompt_lookup_num_tokens, or for all requests --speculate (speculative_decoding_mode), drafts "
            "from earlier tokens instead",
        )
        for size in ("window_size", "ngram_size", "verification_set_size")
    ),
    _both(
        "prompt_lookup_num_tokens",
        "INT32",
        "maximum length of a draft, in tokens. If speculative_decoding_mode is set, the drafts come from this "
        "mode, and 0 means the mode's own maximum. Otherwise, they come from prompt lookup, and 0 means no drafts",
    ),
    _text_only(
        "num_draft_tokens",
        "INT32",
        "number of tokens that the draft model drafts in a round; tensorrt_llm_bls only",
    ),
    _text_only(
        "use_draft_logits", "BOOL", "accept draft tokens by rejection sampling with the draft model's logits"
    ),
    _llmapi("sampling_param_best_of", "INT32", "number of sequences to choose the best from", _values(0, 1)),
)

_PICTURES = (
    _both(
        "image_bytes_input",
        "UINT8",
        "[pictures, height, width, 3] or [pictures, 3, height, width]: RGB pixels of the pictures in text_input",
        (-1, -1, -1, -1),
    ),
    _both(
        "image_sizes_input",
        "INT64",
        "[pictures, 2]: height and width of each picture in image_bytes_input, if the pictures are padded",
        (-1, 2),
    ),
    _both("image_url_input", "BYTES", "URLs of the pictures in text_input", (-1,)),
    _llmapi("image_url", "BYTES", "URLs of the pictures in text_input", dims=(-1,)),
    TensorSpec(
        "mrope_rotary_cos_sin",
        "FP32",
        (-1,),
        "rotary positions of a prompt with pictures, for models with multimodal rotary embedding: for each "
        "prompt token, cosine and sine of each rotated pair of dimensions",
    ),
    TensorSpec(
        "mrope_position_deltas",
        "INT64",
        (1,),
        "number added to the position of each generated token; sent together with mrope_rotary_cos_sin",
    ),
)

_OTHER_MODELS = (
    TensorSpec(
        "encoder_input_features",
        "FP16",
        (-1, -1),
        "[frames, features]: input of an encoder",
        neutral=EMPTY,
        other_dtypes=("FP32",),
        reason=NO_ENCODER,
    ),
    TensorSpec(
        "encoder_output_lengths",
        "INT32",
        (),
        "number of valid encoder states",
        neutral=_ZERO,
        reason=NO_ENCODER,
    ),
    TensorSpec(
        "decoder_input_ids",
        "INT32",
        (-1,),
        "prompt of the decoder of an encoder-decoder model",
        neutral=_PAD_ID,
        reason=NO_ENCODER,
    ),
    TensorSpec(
        "decoder_input_lengths",
        "INT32",
        (),
        "number of valid ids in decoder_input_ids",
        neutral=_values(0, 1),
        reason=NO_ENCODER,
    ),
    _text_only(
        "decoder_text_input",
        "BYTES",
        "prompt of the decoder of an encoder-decoder model",
        NO_TEXT,
        reason=NO_ENCODER,
    ),
    of_other_models(
        "cross_attention_mask",
        "BOOL",
        (-1, -1),
        "[prompt tokens, image tiles]: which tiles each token attends to",
        NO_ENCODER,
    ),
    TensorSpec(
        "skip_cross_attn_blocks",
        "BOOL",
        (1,),
        "whether to skip cross attention",
        neutral=_FALSE,
        reason=NO_ENCODER,
    ),
    of_other_models(
        "context_phase_params",
        "UINT8",
        (-1,),
        "state of a request after another server has computed its context",
        "this server computes both phases",
    ),
    _text_only(
        "image_input",
        "FP16",
        "pixel values of images",
        EMPTY,
        (-1, 3, -1, -1),
        "the server makes pixel values itself (send image_bytes_input or image_url_input)",
    ),
    _text_only("video_bytes_input", "UINT8", "frames of a video", EMPTY, (-1, -1, -1, -1), NO_VIDEO),
)

_GUIDES = (
    _both(
        "guided_decoding_guide_type",
        "BYTES",
        "kind of guide: json, json_schema, regex, ebnf_grammar or structural_tag",
    ),
    _both(
        "guided_decoding_guide",
        "BYTES",
        "the schema, expression, grammar or structural tags; not needed for json",
    ),
)

_POST_PROCESSORS = (
    _both(
        "logits_post_processor_name",
        "BYTES",
        "name of the operator's logits post-processor to apply",
    ),
)

_CACHE = (
    _both(
        "retention_token_range_starts",
        "INT32",
        "position of the first token of each range of the prompt that gets a retention priority",
        (-1,),
    ),
    _both(
        "retention_token_range_ends",
        "INT32",
        "position after the last token of each range; -1: the prompt's end",
        (-1,),
    ),
    _both(
        "retention_token_range_priorities",
        "INT32",
        "retention priority of each range, 0 .. 100; blocks of lower priority are evicted first; default: 35",
        (-1,),
    ),
    _both(
        "retention_token_range_durations_ms",
        "INT32",
        "time after which a range gets the default priority again; -1, the default: never",
        (-1,),
    ),
    _both("retention_decode_priority", "INT32", "retention priority of the KV blocks of generated tokens"),
    _both("retention_decode_duration_ms", "INT32", "duration of retention_decode_priority; -1: unlimited"),
    _both(
        "cache_salt_id", "UINT64", "KV blocks are shared only between prompts with equal salts; default: 0"
    ),
)

_QUEUE = (
    _both("priority", "FP32", "from 0 to 1; requests of higher priority start first; default: 0.5"),
    _both("client_id", "UINT64", "id of the client; clients of equal priority take turns; default: 0"),
    _both("allotted_time_ms", "INT32", "time from arrival after which the request ends; 0: no limit"),
)

INPUTS = TensorTable(
    _PROMPT
    + _SAMPLING
    + _WANTED
    + _ADAPTERS
    + _PICTURES
    + _DRAFTS
    + _GUIDES
    + _POST_PROCESSORS
    + _CACHE
    + _QUEUE
    + _OTHER_MODELS
)
