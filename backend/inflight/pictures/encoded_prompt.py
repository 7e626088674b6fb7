"""A prompt whose pictures have been encoded, as the engine takes it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.core.request.prompt_table import PromptTable, RotaryTable

MAX_PICTURE_BYTES = 32 << 20
"""Maximum size of a picture's file."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The tokens of a prompt with pictures, and the data that stand for the pictures.

    Attributes:
        token_ids: The prompt. The tokens of the pictures are virtual: vocab_size + i stands for row i of `table`.
        extra_ids: One per token, 0 for text; those of a picture are made from the digest of its content.
        table: The pictures' rows, of all pictures in order.
        rotary: Rotary positions, for models with multimodal rotary embedding (mRoPE); otherwise None.
        num_picture_tokens: For each picture, the number of its virtual tokens.
    """

    token_ids: tuple[int, ...]
    extra_ids: tuple[int, ...]
    table: PromptTable
    rotary: RotaryTable | None
    num_picture_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PictureStats:
    """Counts of an encoder since its start.

    Attributes:
        num_encoded: Pictures that were encoded.
        num_cache_hits: Pictures of prompts whose rows were known.
        milliseconds: Time that was spent on encoded pictures, from their bytes to their rows.
        cached_bytes: Size of the rows that are kept now.
        started_ns: Time of the encoder's start, since the epoch: another one counts from 0 again.
    """

    num_encoded: int
    num_cache_hits: int
    milliseconds: float
    cached_bytes: int
    started_ns: int = 0
