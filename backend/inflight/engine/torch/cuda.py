"""What only a GPU can do: attention over KV blocks in place, and recording operations to replay them.

The rest of the engine takes both as arguments, and is tested with others. Called by the loop thread.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from inflight.engine.torch.attention import Attention
from inflight.engine.torch.attention_check import CannotAttend
from inflight.engine.torch.kv_rounding import KvRounding
from inflight.engine.torch.paged_attention import PagedAttention, VarlenAttention
from inflight.models import DecoderConfig

_log = logging.getLogger(__name__)
_HOPPER = 9  # the one generation that FlashAttention 3 is for


def torch_paged_attention(
    device: torch.device, decoder: DecoderConfig, rounding: KvRounding | None = None
) -> PagedAttention:
    """torch's own, by FlashAttention 2, or by 3 where that is installed and the processor is one for it.

    Raises:
        CannotAttend: This torch has none, or none that computes this model's scores or reads such a KV cache.
    """
    if rounding is not None:
        raise CannotAttend(f"it does not read KV blocks in {rounding.name}")
    if decoder.attention_soft_cap is not None:
        raise CannotAttend("it has no cap on scores")
    try:
        from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise CannotAttend(f"torch {torch.__version__} has none") from error
    is_hopper = torch.cuda.get_device_capability(device)[0] == _HOPPER
    if is_hopper and importlib.util.find_spec("flash_attn_interface") is not None:
        _try(lambda: activate_flash_attention_impl("FA3"))
    # FlashAttention 2 wants to be told where each sequence's keys begin, and 3 refuses that beside block tables.
    kernel = cast(VarlenAttention, varlen_attn)  # it returns a pair only if asked for more than its result
    if decoder.attention_scale is not None:
        if "scale" not in inspect.signature(varlen_attn).parameters:
            raise CannotAttend("it has no scale of its own for scores")
        kernel = partial(kernel, scale=decoder.attention_scale)
    if decoder.learned_sinks:
        if "return_aux" not in inspect.signature(varlen_attn).parameters:
            raise CannotAttend("it does not tell the sums of its softmaxes, which learned sinks are added to")
        from torch.nn.attention.varlen import AuxRequest

        kernel = partial(kernel, return_aux=AuxRequest(lse=True))
    return PagedAttention(kernel, takes_key_bounds=current_flash_attention_impl() is None)


def triton_attention(decoder: DecoderConfig, for_chunks: PagedAttention | None = None) -> Attention:
    """Attention by the kernels in Triton's language, over blocks of any size.

    `for_chunks` computes the chunks of batches that are not recorded, if there is one.

    Raises:
        CannotAttend: There is no package `triton`, or the model's heads are too wide.
    """
    if importlib.util.find_spec("triton") is None:
        raise CannotAttend("the package triton is not installed")
    from inflight.engine.torch.kernels.paged_attention import KernelAttention  # imports triton

    return KernelAttention(decoder, for_chunks)


def _try(activate: Callable[[], None]) -> None:
    try:
        activate()
    except Exception as error:  # a package that was built for another torch may raise anything
        _log.warning("FlashAttention 2 is used: 3 is installed, but cannot be activated: %s", error)


class GraphCapture:
    """Records operations as CUDA graphs. All share one pool of memory: none is replayed beside another.

    What a graph reads and writes has to stay where it was, and what it leaves for later goes to memory from
    before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, operations: Callable[[], None]) -> Callable[[], None]:
        """Run `operations` once, then record them; what is returned queues them on the current stream."""
        with torch.cuda.device(self._device):
            self._warm_up(operations)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                operations()
        return graph.replay

    def _warm_up(self, operations: Callable[[], None]) -> None:
        """Libraries allocate and choose kernels at their first call, which cannot be recorded."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            operations()
        torch.cuda.current_stream().wait_stream(self._stream)
