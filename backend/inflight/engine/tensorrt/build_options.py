"""The options of a build. Standard library only, so that the help of `scripts/build` needs no installation."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config import FP8, INT8

INT4 = "int4"
"""The data type that keeps the checkpoint's 4-bit matrices."""

WEIGHT_DTYPES = (INT8, FP8, INT4)
"""Quantized data types, which matrices alone have. Activations are bfloat16 with int8 and fp8; with int4 they
have the checkpoint's type."""


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The options of a build; see `Settings`.

    Attributes:
        dtype: float32, float16, bfloat16, int8, fp8 or int4; None: the checkpoint's.
        max_seq_len: Longest sequence in tokens; None: the model's maximum, at most 4096.
        max_context_chunks: Maximum number of context chunks; None: 8, or the number of slots if smaller.
        target: The GPUs to build for; None: portable with tensorrt_rtx, this machine's GPU with tensorrt.
        module: tensorrt or tensorrt_rtx; None: the first that is installed.
    """

    dtype: str | None = None
    max_batch_size: int = 16
    max_seq_len: int | None = None
    max_num_tokens: int = 2048
    max_context_chunks: int | None = None
    max_lora_rank: int = 0
    additional_outputs: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    attention: str = "split"
    weights: str = "constants"
    target: str | None = None
    module: str | None = None
