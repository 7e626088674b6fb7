"""Prompts with pictures, as the engine gets them: rows for their tokens and, for some models, positions in time,
height and width.

The rows are random, as if an encoder had made them. The oracle is transformers' language model of the whole
multimodal model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.request.adapter import Matrix, RawBuffer
from inflight.core.request.prompt_table import PromptTable, RotaryTable
from inflight.core.request.request import Request
from tests.engine.tables import make_table
from tests.models.zoo import ZooModel
from tests.models.zoo_configs import VOCAB_SIZE


@dataclass(frozen=True)
class Picture:
    """A picture of height x width tokens; `seed` stands for its content."""

    height: int
    width: int
    seed: int

    @property
    def num_tokens(self) -> int:
        return self.height * self.width


@dataclass(frozen=True)
class PicturePrompt:
    """A prompt of texts (numbers of tokens) and pictures, for one model.

    Attributes:
        token_ids: Its tokens; VOCAB_SIZE + i stands for row i.
        rows: [picture tokens, hidden_size * (1 + added layers)].
        axes: [3, tokens] int64: positions in time, height and width.
        extra_ids: One per token, 0 for text.
    """

    token_ids: tuple[int, ...]
    rows: Tensor
    axes: Tensor
    extra_ids: tuple[int, ...]

    @property
    def delta(self) -> int:
        return int(self.axes.max()) + 1 - len(self.token_ids)


def make_prompt(
    model: ZooModel, parts: Sequence[int | Picture], num_added: int, seed: int = 0
) -> PicturePrompt:
    """Return a prompt of `parts`: a number is that many random tokens of text."""
    ids: list[int] = []
    axes: list[list[int]] = []
    extra: list[int] = []
    rows: list[Tensor] = []
    begin = num_rows = 0
    for index, part in enumerate(parts):
        if isinstance(part, int):
            ids += model.prompt(part, seed + index)
            axes += [[begin + i] * 3 for i in range(part)]
            extra += [0] * part
            begin += part
            continue
        ids += range(VOCAB_SIZE + num_rows, VOCAB_SIZE + num_rows + part.num_tokens)
        places = [(row, column) for row in range(part.height) for column in range(part.width)]
        axes += [[begin, begin + row, begin + column] for row, column in places]
        numbers = random.Random(part.seed)
        extra += [numbers.getrandbits(63) + 1 for _ in places]
        rows.append(make_table(part.num_tokens, part.seed, 64 * (1 + num_added)))
        begin += max(part.height, part.width)
        num_rows += part.num_tokens
    return PicturePrompt(tuple(ids), torch.cat(rows), torch.tensor(axes).T, tuple(extra))


def as_matrix(rows: Tensor) -> Matrix:
    """Return float32 rows in the form that requests have."""
    return Matrix((rows.shape[0], rows.shape[1]), "float32", RawBuffer(rows.contiguous().numpy().tobytes()))


def language_model(model: ZooModel) -> Any:
    """Return transformers' language model of a whole multimodal model."""
    return model.oracle.model.language_model


def has_mrope(model: ZooModel) -> bool:
    """Whether a model has multimodal rotary embedding."""
    return hasattr(model.oracle.model, "get_rope_index")


def rotary_table(model: ZooModel, prompt: PicturePrompt, is_identified: bool = True) -> RotaryTable:
    """Return the prompt's rotary table, by transformers' own rotary embedding."""
    cos, sin = language_model(model).rotary_emb(torch.zeros(1), prompt.axes[:, None])
    half = cos.shape[-1] // 2
    pairs = torch.stack([cos[0, :, :half], sin[0, :, :half]], dim=-1).flatten(1)
    return RotaryTable.of(as_matrix(pairs), prompt.delta, is_identified)


def request_of(
    model: ZooModel,
    request_id: int,
    prompt: PicturePrompt,
    new: int = 12,
    *,
    is_identified: bool = True,
    **options: Any,
) -> Request:
    """Return a request with this prompt."""
    return Request(
        request_id,
        prompt.token_ids,
        new,
        prompt_table=PromptTable.of(as_matrix(prompt.rows), is_identified),
        rotary_table=rotary_table(model, prompt, is_identified) if has_mrope(model) else None,
        identity=PrefixIdentity(extra_ids=prompt.extra_ids),
        **options,
    )


@torch.inference_mode()
def expected_logits(model: ZooModel, prompt: PicturePrompt, generated: Sequence[int] = ()) -> Tensor:
    """Return transformers' logits [tokens, vocab_size] float32 for the prompt and tokens after it."""
    ids = torch.tensor([*prompt.token_ids, *generated])
    virtual = ids >= VOCAB_SIZE
    embed = model.oracle.get_input_embeddings()
    x = embed(ids.clamp(max=VOCAB_SIZE - 1)).detach().clone()
    rows, *added = prompt.rows.split(64, dim=1)
    x[virtual] = rows * getattr(embed, "embed_scale", 1.0)
    if not has_mrope(model):
        masks = _bidirectional_masks(model, x[None], virtual[None])
        out = language_model(model)(inputs_embeds=x[None], attention_mask=masks, use_cache=False)
        logits = model.oracle.lm_head(out.last_hidden_state[0]).float()
        cap = model.oracle.config.text_config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap
    after = torch.arange(len(prompt.token_ids), len(ids)) + prompt.delta
    axes = torch.cat([prompt.axes, after.expand(3, -1)], dim=1)
    options = {"visual_pos_masks": virtual[None], "deepstack_visual_embeds": added} if added else {}
    out = language_model(model)(inputs_embeds=x[None], position_ids=axes[:, None], use_cache=False, **options)
    return model.oracle.lm_head(out.last_hidden_state[0]).float()


def _bidirectional_masks(model: ZooModel, x: Tensor, virtual: Tensor) -> Any:
    """Return transformers' masks for generation, in which the virtual tokens of a picture see each other."""
    types = {"token_type_ids": virtual.int()}
    if "gemma4" in model.oracle.config.model_type:
        types = {"mm_token_type_ids": virtual.int()}
    return model.oracle.create_masks_for_generate(
        config=model.oracle.config,
        inputs_embeds=x,
        attention_mask=None,
        cache=None,
        position_ids=None,
        **types,
    )


def expected_tokens(model: ZooModel, prompt: PicturePrompt, num_tokens: int) -> list[int]:
    """Return the tokens of greedy decoding with transformers, computing every step from the beginning."""
    key = ("of pictures", prompt.token_ids, prompt.rows.numpy().tobytes(), num_tokens)
    if key not in model.found:
        tokens: list[int] = []
        for _ in range(num_tokens):
            tokens.append(int(expected_logits(model, prompt, tokens)[-1].argmax()))
        model.found[key] = tokens
    return model.found[key]
