"""Prompts with rows of prompt tables, and transformers' results for them with inputs_embeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.request.adapter import Matrix, RawBuffer
from inflight.core.request.prompt_table import PromptTable
from inflight.core.request.request import Request
from tests.models.zoo import ZooModel
from tests.models.zoo_configs import VOCAB_SIZE


def make_table(
    num_rows: int, seed: int = 0, hidden_size: int = 64, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return random rows of about the size of the zoo's embeddings."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return (torch.randn(num_rows, hidden_size, generator=generator) * 0.3).to(dtype)


def as_table(rows: Tensor) -> PromptTable:
    """Return the table in the form that requests have."""
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = str(rows.dtype).removeprefix("torch.")
    return PromptTable.of(Matrix((rows.shape[0], rows.shape[1]), dtype, RawBuffer(data)))


def with_table(
    request_id: int, prompt: Sequence[int], rows: Tensor, new: int = 12, **options: Any
) -> Request:
    """Return a request whose ids from VOCAB_SIZE on stand for `rows`."""
    table = as_table(rows)
    extra_ids = options.pop("extra_ids", ())
    identity = PrefixIdentity(extra_ids=extra_ids)
    return Request(request_id, tuple(prompt), new, prompt_table=table, identity=identity, **options)


@dataclass(frozen=True)
class TableOracle:
    """transformers' results for prompts with tables.

    The model caches generated results: several tests ask for the same ones.
    """

    model: ZooModel

    def embeddings(self, ids: Sequence[int], rows: Tensor) -> Tensor:
        """Return embeddings [1, ids, hidden_size]."""
        tokens = torch.tensor(ids)
        found = self.model.oracle.get_input_embeddings()(tokens.clamp(max=VOCAB_SIZE - 1)).detach().clone()
        virtual = tokens >= VOCAB_SIZE
        found[virtual] = rows.to(found.dtype)[tokens[virtual] - VOCAB_SIZE]
        return found[None]

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], rows: Tensor) -> Tensor:
        """Return logits [ids, vocab_size] float32."""
        return self.model.oracle(inputs_embeds=self.embeddings(ids, rows)).logits[0].float()

    @torch.inference_mode()
    def greedy(self, ids: Sequence[int], rows: Tensor, num_tokens: int) -> list[int]:
        """Generate greedily with transformers' own `generate`."""
        return self._generate(ids, rows, num_tokens)[0]

    @torch.inference_mode()
    def beams(self, ids: Sequence[int], rows: Tensor, num_tokens: int, width: int) -> list[list[int]]:
        """Search with transformers' own beam search; return beams, best first."""
        options = {"num_beams": width, "num_return_sequences": width, "early_stopping": True}
        return self._generate(ids, rows, num_tokens, length_penalty=0.0, **options)

    def _generate(self, ids: Sequence[int], rows: Tensor, num_tokens: int, **options: Any) -> list[list[int]]:
        key = ("of a table", tuple(ids), as_table(rows).digest, num_tokens, tuple(sorted(options.items())))
        if key not in self.model.found:
            self.model.found[key] = self.model.oracle.generate(
                inputs_embeds=self.embeddings(ids, rows),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                **options,
            ).tolist()
        return [list(tokens) for tokens in self.model.found[key]]
