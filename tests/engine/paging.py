"""Engines on a CPU that attend over blocks in place, with a slow kernel instead of a GPU's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from inflight.core.schedule.batch import EngineLimits
from inflight.engine.attention.interface import Attention
from inflight.engine.attention.paged import PagedAttention
from inflight.engine.collectives import ALONE, Collectives
from inflight.engine.cuda.iteration_graphs import Capture
from inflight.engine.engine import ModelEngine
from inflight.engine.kv_cache import KvCache
from inflight.engine.kv_quantization import KvQuantization
from inflight.engine.layers.decoder import Decoder
from inflight.engine.layers.layer_operations import LayerOperations
from inflight.engine.layers.torch_sink import load_weights
from inflight.engine.load import make_engine
from inflight.engine.runner import ModelRunner
from inflight.engine.windows import layer_windows
from inflight.models import read_model_description
from inflight.models.sharding import Part
from inflight.sampling.row_kernels import RowKernels
from tests.engine.varlen import ReferenceVarlen

TOKENS_PER_BLOCK = 8
MAX_SEQUENCE_LENGTH = 96


@torch.inference_mode()
def load_paged(
    folder: Path,
    num_blocks: int = 80,
    max_num_sequences: int = 6,
    capture: Capture | None = None,
    attention: Attention | None = None,
    device: str = "cpu",
    num_adapter_pages: int = 0,
    max_num_tokens: int = 512,
    part: Part | None = None,
    collectives: Collectives = ALONE,
    operations: LayerOperations | None = None,
    row_kernels: RowKernels | None = None,
    quantization: KvQuantization | None = None,
    dtype: torch.dtype = torch.float32,
    **windows: Any,
) -> ModelEngine:
    """Return an engine; `windows` are max_attention_window_size and sink_token_length."""
    model, on = read_model_description(folder), torch.device(device)
    part = part or Part.whole(model.decoder)
    aux = None
    if model.decoder.learned_sinks:
        from torch.nn.attention.varlen import AuxRequest  # imports torch's compiler, which takes long

        aux = AuxRequest(lse=True)
    kernel = partial(ReferenceVarlen(), return_aux=aux)
    asked = windows.get("max_attention_window_size", ()), windows.get("sink_token_length", 0)
    decoder = Decoder(
        model.decoder,
        load_weights(model, dtype, on, part),
        layer_windows(model.decoder.sliding_windows, *asked, MAX_SEQUENCE_LENGTH),
        MAX_SEQUENCE_LENGTH,
        part,
        collectives,
        attention or PagedAttention(kernel, takes_key_bounds=True),
        operations,
        row_kernels or RowKernels(),
    )
    held = part.held_config(model.decoder)
    cache = KvCache(held, num_blocks, TOKENS_PER_BLOCK, dtype, on, quantization)
    limits = EngineLimits(
        model.decoder.vocab_size,
        MAX_SEQUENCE_LENGTH,
        max_num_sequences,
        num_blocks,
        TOKENS_PER_BLOCK,
        num_adapter_pages=num_adapter_pages,
        max_adapter_rank=64,
    )
    if num_adapter_pages:
        decoder.reserve_adapters(num_adapter_pages, limits.adapter_page_rank)
    return make_engine(ModelRunner(decoder, cache, limits, max_num_tokens, capture=capture))
