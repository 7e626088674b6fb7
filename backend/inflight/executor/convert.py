"""Convert requests of the Executor API to the engine's requests.

The checker in `fields.py` must be called first: it refuses or logs fields that have no effect. Any thread.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.adapters.lora_tensors import lora_weights
from inflight.additional_outputs import WantedOutput
from inflight.arrays import BFLOAT16, check_bias, to_prompt_table, to_rotary_table
from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.kv.retention import Retention, RetentionConfig, TokenRangeRetention
from inflight.core.request.adapter import ITEM_SIZES, LoraRequest
from inflight.core.request.engine_description import ModelLimits
from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.prompt_table import PromptTable, RotaryTable
from inflight.core.request.request import ExternalDraft, FloatTensor, Origin, OutputOptions
from inflight.core.request.request import Request as CoreRequest
from inflight.core.request.sampling_config import CONTROLS
from inflight.core.request.sampling_config import SamplingConfig as CoreSamplingConfig
from inflight.errors import InvalidArgument, Name, Unsupported
from inflight.executor.errors import ExecutorError, NotSupported, in_fields
from inflight.executor.request import (
    ExternalDraftTokensConfig,
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    LoraConfig,
    PromptTuningConfig,
    Request,
)
from inflight.executor.sampling import AdditionalModelOutput, OutputConfig

OWN_POST_PROCESSOR_NAME = "callable of the request"
"""Reserved name under which the engine calls `Request.logits_post_processor`."""

_MS = timedelta(milliseconds=1)


# ---------------------------------------------------------------------- requests


def to_core_request(request: Request, limits: ModelLimits, request_id: int = 0) -> CoreRequest:
    """Convert a request of the API to a request of the engine.

    The callable `Request.logits_post_processor` is referred to as OWN_POST_PROCESSOR_NAME; the caller must
    register it when it submits the request. The caller also implements `return_all_generated_tokens`, which
    affects results only.

    Raises:
        InvalidArgument: The engine cannot serve the request, for the given reason. Clients get this error in
            a Response.
        ExecutorError: The request names a logits post-processor that the engine does not have.
    """
    check_post_processor(request, limits.logits_post_processors)
    sampling = to_core_sampling(request)
    if request.streaming and sampling.uses_beams and request.output_config.return_generation_logits:
        raise InvalidArgument(
            "generation logits cannot be streamed with ", Name("beam_width"), " > 1, because beams change"
        )
    table = _prompt_table(request.prompt_tuning_config)
    converted = CoreRequest(
        request_id=request_id,
        input_token_ids=tuple(request.input_token_ids),
        max_new_tokens=request.max_tokens,
        streaming=request.streaming,
        end_ids=_end_ids(request),
        pad_id=None if request.pad_id is None or request.pad_id < 0 else request.pad_id,
        sampling=sampling,
        output=to_core_output(request.output_config),
        stop_words=_words(request.stop_words),
        bad_words=_words(request.bad_words),
        embedding_bias=_embedding_bias(request.embedding_bias, limits.vocab_size),
        draft=_draft(request.external_draft_tokens_config),
        logits_post_processor_name=_logits_post_processor(request),
        identity=_identity(request),
        retention=_retention(request.kv_cache_retention_config),
        priority=request.priority,
        client_id=request.client_id or 0,
        allotted_time_ms=_allotted_time_ms(request.allotted_time_ms),
        guide=_guide(request.guided_decoding_params),
        lora=to_lora_request(request.lora_config),
        prompt_table=table,
        rotary_table=_rotary_table(request, limits),
        origin=Origin("executor", client=str(request.client_id or "")),
    )
    try:
        converted.validate(limits)
    except (InvalidArgument, Unsupported) as error:
        raise in_fields(error) from None
    return converted


def to_core_sampling(request: Request) -> CoreSamplingConfig:
    """Return a request's sampling config, with TensorRT-LLM's defaults for missing values."""
    given = {
        name: value
        for name, control in CONTROLS.items()
        if control.executor and (value := getattr(request.sampling_config, control.executor.name)) is not None
    }
    if request.num_return_sequences > 1:
        given.setdefault("num_return_sequences", request.num_return_sequences)
    given.setdefault("early_stopping", 1)
    # Without an end id, a minimum length has no effect.
    given.setdefault("min_length", 1 if _end_ids(request) else 0)
    return CoreSamplingConfig(**given)


def to_core_output(config: OutputConfig) -> OutputOptions:
    """Convert an OutputConfig of the Executor API to the core's."""
    return OutputOptions(
        exclude_input_from_output=config.exclude_input_from_output,
        return_log_probs=config.return_log_probs,
        return_context_logits=config.return_context_logits,
        return_generation_logits=config.return_generation_logits,
        return_perf_metrics=config.return_perf_metrics,
        return_receipt=config.return_receipt,
        additional_outputs=wanted_outputs(config.additional_model_outputs),
    )


def _end_ids(request: Request) -> tuple[int, ...]:
    return () if request.end_id is None or request.end_id == -1 else (request.end_id,)


def _words(words: list[list[int]] | None) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(word) for word in words or ())


def _embedding_bias(bias: Any, vocab_size: int) -> FloatTensor | None:
    if bias is None:
        return None
    tensor = to_float_tensor(bias)
    if tensor.shape != (vocab_size,):
        raise InvalidArgument(
            f"embedding bias shape is not as expected: {[vocab_size]}, the vocabulary; got {list(tensor.shape)}"
        )
    check_bias(np.frombuffer(tensor.data, np.float32), "embedding_bias")
    return tensor


def _prompt_table(config: PromptTuningConfig | None) -> PromptTable | None:
    if config is None:
        return None
    array = to_host_array(config.embedding_table)
    if array.dtype not in (BFLOAT16, np.float16, np.float32):
        raise InvalidArgument(
            f"embedding_table must be of float32, float16 or bfloat16, got {config.embedding_table.dtype}"
        )
    return to_prompt_table(array, "embedding_table")


def _rotary_table(request: Request, limits: ModelLimits) -> RotaryTable | None:
    config = request.mrope_config
    if config is None:
        return None
    array, num_tokens = to_host_array(config.mrope_rotary_cos_sin), len(request.input_token_ids)
    name = Name("mrope_rotary_cos_sin")
    if array.dtype != np.float32:
        raise InvalidArgument(name, f" must be of float32, got {config.mrope_rotary_cos_sin.dtype}")
    return to_rotary_table(array, config.mrope_position_deltas, num_tokens, limits.rotary_dim, name)


def _identity(request: Request) -> PrefixIdentity:
    extra_ids = request.prompt_tuning_config and request.prompt_tuning_config.input_token_extra_ids
    return PrefixIdentity(
        cache_salt_id=request.cache_salt_id or 0,
        extra_ids=tuple(extra_ids or ()),
    )


def to_float_tensor(tensor: Any) -> FloatTensor:
    """Return a torch or numpy tensor, on any device, as float32."""
    on_host = tensor.detach().cpu().float().numpy() if hasattr(tensor, "detach") else tensor
    array = np.ascontiguousarray(on_host, np.float32)
    return FloatTensor(array.shape, array.tobytes())


def to_host_array(tensor: Any) -> NDArray[Any]:
    """Return a torch or numpy tensor as an array.

    The elements of a bfloat16 tensor are returned as bits, in uint16.
    """
    if not hasattr(tensor, "detach"):
        return np.asarray(tensor)
    on_host = tensor.detach().cpu()
    if str(on_host.dtype) != "torch.bfloat16":
        return on_host.numpy()
    import torch

    return on_host.contiguous().view(torch.int16).numpy().view(np.uint16)


def to_lora_request(lora: LoraConfig | str | None) -> LoraRequest | None:
    """Return the adapter of a request, from a LoraConfig or the name of an adapter in the parameters.

    Raises InvalidArgument if the weights are not valid weights of an adapter.
    """
    if lora is None or isinstance(lora, str):
        return LoraRequest(name=lora) if lora else None
    if lora.weights is None or lora.config is None:
        return LoraRequest(lora.task_id)
    weights, dtype = to_host_array(lora.weights), str(lora.weights.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZES:
        raise InvalidArgument(f"lora weights must be one of {', '.join(ITEM_SIZES)}, got {dtype}")
    return LoraRequest(lora.task_id, weights=lora_weights(weights, to_host_array(lora.config), dtype))


def _draft(config: ExternalDraftTokensConfig | None) -> ExternalDraft | None:
    if config is None:
        return None
    logits = None if config.logits is None else to_float_tensor(config.logits)
    return ExternalDraft(tuple(config.tokens), logits, config.acceptance_threshold)


def _retention(config: KvCacheRetentionConfig | None) -> RetentionConfig:
    if config is None:
        return RetentionConfig()
    ranges = tuple(
        TokenRangeRetention(
            each.token_start, each.token_end, Retention(each.priority, _milliseconds(each.duration_ms))
        )
        for each in config.token_range_retention_configs
    )
    decode = Retention(config.decode_retention_priority, _milliseconds(config.decode_duration_ms))
    return RetentionConfig(ranges, decode)


def _milliseconds(duration: timedelta | None) -> int | None:
    return None if duration is None else duration // _MS


def _allotted_time_ms(time: timedelta | None) -> int:
    """Return a deadline as whole milliseconds, at least 1; 0 for None, which means no deadline."""
    if time is None:
        return 0
    if time < timedelta(0):
        raise InvalidArgument(Name("allotted_time_ms"), f" must not be negative, got {time}")
    return max(1, time // _MS)


# ---------------------------------------------------------------------- guides, post-processors, tensors


def check_post_processor(request: Request, known: tuple[str, ...]) -> None:
    """Raise ExecutorError unless the request's logits post-processor is among the engine's (`known`)."""
    name = request.logits_post_processor_name
    if request.logits_post_processor is not None and OWN_POST_PROCESSOR_NAME not in known:
        raise NotSupported(
            "Request.logits_post_processor needs an engine whose whole model is in this process and that has no "
            "logits_post_processor_module: use Request.logits_post_processor_name"
        )
    if not name or (name in known and name != OWN_POST_PROCESSOR_NAME):
        return
    if name == request.BATCHED_POST_PROCESSOR_NAME:
        raise ExecutorError("Batched logits post processor is not defined")
    raise ExecutorError(f"LogitsPostProcessor {name} not found")


def _guide(params: GuidedDecodingParams | None) -> Guide | None:
    return None if params is None else Guide(GuideKind[params.guide_type.name], params.guide or "")


def _logits_post_processor(request: Request) -> str:
    if request.logits_post_processor is not None:
        return OWN_POST_PROCESSOR_NAME
    return request.logits_post_processor_name or ""


def wanted_outputs(outputs: list[AdditionalModelOutput] | None) -> tuple[WantedOutput, ...]:
    """Return the additional outputs by the engine's names."""
    return tuple(WantedOutput(each.name, each.gather_context) for each in outputs or ())
