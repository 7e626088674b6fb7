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
    TensorSpec("input_ids", "INT32", (-1,), "token ids of the prompt; send either input_ids or text_input"),
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
        "if true, send a response after every iteration; if false, send one response at the end",
        text_names=("stream", "streaming"),
    ),
    _both("stop", "BOOL", "if true, stop the request in flight that has the same request id"),
    _both("state", "BOOL", "if true, return the state of the server, and generate nothing"),
    _both("end_id", "INT32", "token id that ends the sequence; -1: none"),
    _both("pad_id", "INT32", "token id that pads shorter rows of outputs; default: -1"),
    TensorSpec(
        "stop_words_list",
        "INT32",
        (2, -1),
        "words that end the output; the word that ended it is returned. First row: the ids of all words; "
        "second row: where each word ends, as in [[5,7,3,9,2],[3,5,-1,-1,-1]]",
    ),
    TensorSpec(
        "bad_words_list", "INT32", (2, -1), "words that are never generated, in the layout of stop_words_list"
    ),
    _both(
        "stop_words",
        "BYTES",
        "texts that end the output; the text that ended it is not returned",
        (-1,),
        text_names=("stop_words", "sampling_param_stop"),
    ),
    _both(
        "bad_words",
        "BYTES",
        "texts to ban; two tokenizations of each text are never generated: as written, and with a space "
        "before it",
        (-1,),
    ),
    TensorSpec(
        "embedding_bias", "FP32", (-1,), "[vocab_size]: for each token, a number that is added to its logit"
    ),
    _both("embedding_bias_words", "BYTES", "texts; a bias is added to the logits of their tokens", (-1,)),
    _both(
        "embedding_bias_weights",
        "FP32",
        "for each text in embedding_bias_words, the bias of its tokens",
        (-1,),
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
        "if true, leave the prompt out of the outputs; default: the value of the model's parameter "
        "exclude_input_in_output",
        text_alias="sampling_param_exclude_input_from_output",
    ),
    _flag("return_num_input_tokens", "adds the output num_input_tokens"),
    _flag("return_num_output_tokens", "adds the output num_output_tokens"),
    _flag("return_log_probs", "adds the outputs cum_log_probs and output_log_probs"),
    _flag("return_context_logits", "adds the output context_logits"),
    _flag("return_generation_logits", "adds the output generation_logits"),
    _flag("return_prompt_log_probs", "adds the output prompt_log_probs"),
    _flag(
        "return_perf_metrics",
        "adds outputs for the times of the request, its numbers of KV blocks and its numbers of draft tokens",
        ("return_kv_cache_reuse_stats",),
        "sampling_param_return_perf_metrics",
    ),
    _flag("return_receipt", "adds the output receipt"),
    _both(
        "num_top_log_probs",
        "INT32",
        "number of likeliest tokens whose ids and log probs are returned for each generated token",
    ),
    _both(
        "additional_outputs",
        "BYTES",
        "names of additional outputs to return, such as `context_<name>` or `generation_<name>`",
        (-1,),
    ),
    _llmapi("return_finish_reason", "BOOL", "if false, leave the output finish_reason out"),
    _llmapi("return_cumulative_logprob", "BOOL", "adds the output cumulative_logprob"),
    _llmapi("return_stop_reason", "BOOL", "returns the stop word that ended the output", _FALSE),
)

_ADAPTERS = (
    _both(
        "prompt_embedding_table",
        "FP16",
        "[rows, hidden_size]: embeddings for positions of the prompt. In input_ids, the id vocab_size + i "
        "stands for row i; with text_input, all rows come before the text",
        (-1, -1),
        other_dtypes=("FP32", "BF16"),
    ),
    _both("prompt_vocab_size", "INT32", "number of rows of prompt_embedding_table"),
    TensorSpec(
        "prompt_table_extra_ids",
        "UINT64",
        (-1,),
        "one extra id for each token of the prompt, 0 for tokens of text; KV blocks are shared only between "
        "prompts with equal extra ids",
    ),
    _text_only("prompt_table_extra_id", "UINT64", "the extra id that all rows of prompt_embedding_table get"),
    _both(
        "lora_task_id",
        "UINT64",
        "id of the LoRA adapter; the first request with this id also needs lora_weights",
        text_names=("lora_task_id", "lora_id"),
    ),
    _both(
        "lora_weights",
        "FP16",
        "[rows, width]: each row has the matrices A and B of one linear layer, with B already scaled; for "
        "DoRA, it also has the magnitudes; zeros fill it up to the width",
        (-1, -1),
        other_dtypes=("FP32", "BF16"),
    ),
    _both(
        "lora_config",
        "INT32",
        "[rows, 3 or 4]: for each row of lora_weights, the module id, the layer and the rank; an optional "
        "fourth number is 1 for DoRA, and otherwise 0",
        (-1, -1),
    ),
    _both(
        "lora_name",
        "BYTES",
        "name that the operator gave to a LoRA adapter; send it in place of lora_task_id",
    ),
    _llmapi(
        "lora_path",
        "BYTES",
        "path of the LoRA adapter's folder, which must be below lora_dir; with lora_path, the inputs "
        "lora_name and lora_task_id have no effect",
    ),
    _llmapi("lora_ckpt_source", "BYTES", "format of the folder lora_path; hf means PEFT's format"),
    _both(
        "lora_command",
        "BYTES",
        "command in JSON to list, load or unload adapters; the request generates nothing",
    ),
)

_DRAFTS = (
    TensorSpec(
        "draft_input_ids",
        "INT32",
        (-1,),
        "guesses for the first generated tokens; the model verifies all of them in one forward pass",
    ),
    TensorSpec(
        "draft_logits",
        "FP32",
        (-1, -1),
        "[draft tokens, vocab_size]: for each draft token, the logits from which it was sampled",
        other_dtypes=("FP16",),
    ),
    TensorSpec(
        "draft_acceptance_threshold",
        "FP32",
        (),
        "a draft token is accepted if its probability in the model, divided by its probability according to "
        "draft_logits, is at least this number",
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
        "maximum length of a draft, in tokens. If the parameter speculative_decoding_mode is set, this mode "
        "makes the drafts, and 0 means the mode's own maximum. If not, prompt lookup makes the drafts, and 0 "
        "means no drafts",
    ),
    _text_only(
        "num_draft_tokens",
        "INT32",
        "only in tensorrt_llm_bls: maximum number of tokens that the draft model guesses at a time; 0: no "
        "drafts",
    ),
    _text_only(
        "use_draft_logits",
        "BOOL",
        "only in tensorrt_llm_bls: if true, accept draft tokens by rejection sampling, which uses the draft "
        "model's logits",
    ),
    _llmapi(
        "sampling_param_best_of", "INT32", "number of sequences from which the best is chosen", _values(0, 1)
    ),
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
    _llmapi(
        "image_url", "BYTES", "the same as image_url_input, under the name of llmapi's model", dims=(-1,)
    ),
    TensorSpec(
        "mrope_rotary_cos_sin",
        "FP32",
        (-1,),
        "rotary positions of a prompt with pictures, for models with multimodal rotary embedding: for each "
        "prompt token, the cosine and the sine of each rotated pair of dimensions",
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
        "[prompt tokens, image tiles]: which image tiles each token of the prompt attends to",
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
        "state of a request whose prompt another server has computed",
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
        "the JSON schema, regular expression, grammar or structural tags; not needed for the type json",
    ),
)

_POST_PROCESSORS = (
    _both(
        "logits_post_processor_name",
        "BYTES",
        "name of a logits post-processor, which is a Python function of the operator",
    ),
)

_CACHE = (
    _both(
        "retention_token_range_starts",
        "INT32",
        "for each range of prompt tokens that gets a retention priority, the position of its first token",
        (-1,),
    ),
    _both(
        "retention_token_range_ends",
        "INT32",
        "for each range, the position after its last token; -1: the end of the prompt",
        (-1,),
    ),
    _both(
        "retention_token_range_priorities",
        "INT32",
        "for each range, the retention priority from 0 to 100; blocks of lower priority are evicted first; "
        "new blocks outside of the ranges have 35",
        (-1,),
    ),
    _both(
        "retention_token_range_durations_ms",
        "INT32",
        "for each range, the time after which its blocks have the default priority 35 again; -1, the "
        "default: never",
        (-1,),
    ),
    _both(
        "retention_decode_priority",
        "INT32",
        "retention priority of KV blocks that begin with a generated token; default: 35",
    ),
    _both(
        "retention_decode_duration_ms",
        "INT32",
        "time after which blocks with retention_decode_priority have the priority 35 again; -1: never",
    ),
    _both(
        "cache_salt_id",
        "UINT64",
        "number; requests share KV blocks only if their cache_salt_id is equal; default: 0",
    ),
)

_QUEUE = (
    _both("priority", "FP32", "number from 0 to 1; requests of higher priority start first; default: 0.5"),
    _both(
        "client_id",
        "UINT64",
        "id of the client; if requests of several clients have equal priority, the clients take turns; "
        "default: 0",
    ),
    _both("allotted_time_ms", "INT32", "time limit for the request, counted from its arrival; 0: no limit"),
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
