"""torch's attention over block tables, on any device, unoptimized: its checks and its results.

The checks are those of FlashAttention 2 in torch 2.13 (`mha_varlen_fwd` in
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp), except that the dtype of queries and the
block size can be configured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.varlen import AuxRequest  # imports torch's compiler


@dataclass
class ReferenceVarlen:
    """Uses tensor operations only, so that it can be recorded.

    Attributes:
        dtypes: Accepted dtypes of queries.
        block_multiple: The block size must be a multiple of this.
        num_rows: Number of rows of every call.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    block_multiple: int = 1
    num_rows: list[int] = field(default_factory=list)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor,
        num_splits: int,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        num_sequences, num_blocks = block_table.shape
        rows, heads, head_dim = query.shape
        _, tokens_per_block, kv_heads, _ = key.shape
        if query.dtype not in self.dtypes:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type\nException raised from")
        if tokens_per_block % self.block_multiple:
            raise RuntimeError(f"Paged KV cache block size must be divisible by {self.block_multiple}")
        assert cu_seq_k is not None, "cumulative_sequence_length_q and _k must be both set or both not set"
        for integers, shape in (
            (cu_seq_q, (num_sequences + 1,)),
            (cu_seq_k, (num_sequences + 1,)),
            (seqused_k, (num_sequences,)),
            (block_table, (num_sequences, num_blocks)),
        ):
            assert integers.dtype == torch.int32 and integers.shape == shape and integers.is_contiguous()
        assert query.dtype == key.dtype == value.dtype and key.shape == value.shape
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        assert heads % kv_heads == 0 and (enable_gqa or heads == kv_heads)
        assert window_size[1] == 0 or (window_size == (-1, -1) and max_q == 1)
        assert num_splits == 1 and max_k == num_blocks * tokens_per_block
        assert max_q > 1 or rows == num_sequences
        self.num_rows.append(rows)

        row = torch.arange(rows, device=query.device)
        bounds = cu_seq_q.long()
        sequence = torch.searchsorted(bounds[1:].contiguous(), row, right=True)
        position = seqused_k[sequence] - bounds[sequence + 1] + row
        place = torch.arange(max_k, device=query.device)
        visible = place <= position[:, None]
        if window_size[0] >= 0:
            visible &= place >= position[:, None] - window_size[0]
        shape = (rows, max_k, kv_heads, 1, head_dim)
        keys, values = (pages[block_table[sequence].long()].view(shape).float() for pages in (key, value))
        queries = query.reshape(rows, 1, kv_heads, heads // kv_heads, head_dim).float()
        scores = (queries * keys).sum(-1) * head_dim**-0.5
        scores = scores.masked_fill(~visible[:, :, None, None], -torch.inf)
        weights = scores.softmax(dim=1)
        # Numbers after a sequence's last token are never multiplied, so they may be anything.
        values = values.masked_fill(~visible[:, :, None, None, None], 0.0)
        read = (weights[..., None] * values).sum(1).reshape(rows, heads, head_dim).to(query.dtype)
        if return_aux is None or not return_aux.lse:
            return read
        return read, scores.logsumexp(1).reshape(rows, heads).T.contiguous()
