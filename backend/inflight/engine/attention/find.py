"""Chooses the attention that computes a model on a device: candidates are tried when the model is loaded. Loading
thread."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

import torch

from inflight.config import EngineConfig
from inflight.engine.attention.check import CannotAttend, check_attention
from inflight.engine.attention.gathering import by_plain_products, gathering
from inflight.engine.attention.interface import Attention
from inflight.engine.attention.paged import PagedAttention, VarlenAttention
from inflight.engine.kv_quantization import KvQuantization, find_kv_quantization
from inflight.engine.windows import AttentionWindow
from inflight.models import DecoderConfig

_log = logging.getLogger(__name__)
_HOPPER = 9  # the only generation that FlashAttention 3 supports
_NO_ALIBI = "it has no ALiBi"

_Found = TypeVar("_Found", bound=Attention)


def find_attention(
    config: EngineConfig,
    held: DecoderConfig,
    windows: tuple[AttentionWindow | None, ...],
    dtype: torch.dtype,
    device: torch.device,
    log: Callable[..., None] = _log.warning,
) -> Attention:
    """Return the first attention that computes this model correctly on the device.

    The order is: attention over blocks in place, by kernels in Triton's language (with torch's kernel for chunks
    that are not recorded) or by torch's kernel alone; attention over gathered blocks; plain matrix products. On a
    CPU, attention over gathered blocks is used without a trial. `log` is called like a logger's method, with the
    reason why an earlier candidate is not used.
    """
    if device.type != "cuda":
        return gathering(held)
    quantization = find_kv_quantization(config.kv_cache_dtype)
    check = _checker(config, held, windows, dtype, device)
    of_blocks = f"{str(dtype).removeprefix('torch.')} over blocks of {config.tokens_per_block} tokens"
    if quantization is not None:
        of_blocks += f" in {quantization.name}"
    reasons: list[str] = []

    def find(make: Callable[[], _Found]) -> _Found | None:
        try:
            attention = make()
            check(attention)
            return attention
        except CannotAttend as reason:
            reasons.append(str(reason))
            return None

    torchs = find(lambda: torch_paged_attention(device, held, quantization))
    if (kernels := find(lambda: triton_attention(held, torchs))) is not None:
        _log.info("attention of %s uses %s", of_blocks, kernels.name)
        return kernels
    if torchs is not None:
        log(
            "attention of %s uses %s, and only generation is recorded as CUDA graphs: kernels in Triton's "
            "language cannot be used (%s)",
            of_blocks,
            torchs.name,
            reasons[0],
        )
        return torchs
    log(
        "KV blocks are copied together before they are read, which is slower, and nothing is recorded as CUDA "
        "graphs: neither torch's attention of %s (%s) nor kernels in Triton's language (%s) can be used here",
        of_blocks,
        *reasons,
    )
    return _find_gathering(held, dtype, check, log)


def find_picture_attention(
    config: EngineConfig,
    held: DecoderConfig,
    windows: tuple[AttentionWindow | None, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Attention | None:
    """Return the attention over gathered blocks, for batches with pictures whose rows see each other.

    None if such batches need no attention of their own: the one of `find_attention` gathers blocks already, or the
    model has no layers in which rows see later ones.
    """
    if device.type != "cuda" or not any(held.bidirectional_layers):
        return None
    return _find_gathering(held, dtype, _checker(config, held, windows, dtype, device), _log.info)


def _checker(
    config: EngineConfig,
    held: DecoderConfig,
    windows: tuple[AttentionWindow | None, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[Attention], None]:
    """Return a function that raises CannotAttend unless an attention computes every kind of layer correctly."""
    tried = config.tokens_per_block, windows, dtype, device, find_kv_quantization(config.kv_cache_dtype)
    kinds = dict.fromkeys([held.only(layer) for layer in held.cached_layers] or [held])

    def check(attention: Attention) -> None:
        for of_layer in kinds:
            check_attention(attention, of_layer, *tried)

    return check


def _find_gathering(
    held: DecoderConfig, dtype: torch.dtype, check: Callable[[Attention], None], log: Callable[..., None]
) -> Attention:
    """Return attention over gathered blocks, by plain products if `check` refuses torch's own operator."""
    gathered = gathering(held)
    try:
        check(gathered)
        return gathered
    except CannotAttend as reason:
        log(
            "attention is computed by plain matrix products, which is slower still: torch's scaled dot product "
            "attention of %s gives wrong results on this device: %s",
            str(dtype).removeprefix("torch."),
            reason,
        )
        return by_plain_products(held)


def torch_paged_attention(
    device: torch.device, decoder: DecoderConfig, quantization: KvQuantization | None = None
) -> PagedAttention:
    """Return torch's own paged attention, by FlashAttention 2, or 3 where installed and supported by the
    processor.

    Raises:
        CannotAttend: This torch has no paged attention, or it cannot compute this model's scores or read
            this KV cache.
    """
    if quantization is not None:
        raise CannotAttend(f"it does not read KV blocks in {quantization.name}")
    if decoder.attention_soft_cap is not None:
        raise CannotAttend("it has no cap on scores")
    if decoder.alibi is not None:
        raise CannotAttend(_NO_ALIBI)
    try:
        from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise CannotAttend(f"torch {torch.__version__} has no paged attention") from error
    is_hopper = torch.cuda.get_device_capability(device)[0] == _HOPPER
    if is_hopper and importlib.util.find_spec("flash_attn_interface") is not None:
        _try(lambda: activate_flash_attention_impl("FA3"))
    # FlashAttention 2 needs the beginnings of each sequence's keys; 3 refuses beginnings beside block tables.
    kernel = cast(VarlenAttention, varlen_attn)  # it returns a pair only if asked for the log-sum-exps
    if decoder.attention_scale is not None:
        if "scale" not in inspect.signature(varlen_attn).parameters:
            raise CannotAttend("it has no argument for the scale of scores")
        kernel = partial(kernel, scale=decoder.attention_scale)
    if decoder.learned_sinks:
        if "return_aux" not in inspect.signature(varlen_attn).parameters:
            raise CannotAttend(
                "it does not return the sums of its softmaxes, to which learned sinks are added"
            )
        from torch.nn.attention.varlen import AuxRequest

        kernel = partial(kernel, return_aux=AuxRequest(lse=True))
    return PagedAttention(kernel, takes_key_bounds=current_flash_attention_impl() is None)


def triton_attention(decoder: DecoderConfig, for_chunks: PagedAttention | None = None) -> Attention:
    """Return attention by kernels in Triton's language, over blocks of any size.

    `for_chunks` computes the chunks of batches that are not recorded; None: the kernels compute them too.

    Raises:
        CannotAttend: The package `triton` is missing, or the kernels do not compute this model's scores.
    """
    if decoder.alibi is not None:
        raise CannotAttend(_NO_ALIBI)
    if importlib.util.find_spec("triton") is None:
        raise CannotAttend("the package triton is not installed")
    from inflight.engine.attention.by_kernels import KernelAttention  # imports triton

    return KernelAttention(decoder, for_chunks)


def _try(activate: Callable[[], None]) -> None:
    try:
        activate()
    except Exception as error:  # a package built for another torch may raise anything
        _log.warning("FlashAttention 2 is used: 3 is installed, but cannot be activated: %s", error)
