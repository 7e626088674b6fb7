"""Data that requests send in place of token ids: embeddings of virtual tokens, and rotary positions. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from inflight.core.request.adapter import Matrix
from inflight.errors import InvalidArgument, Name, Unsupported

TABLE_TENSORS = ("prompt_embedding_table", "mrope_rotary_cos_sin")
"""Names of the tensors of `PromptTable.rows` and `RotaryTable.cos_sin`."""


@dataclass(frozen=True, slots=True)
class PromptTable:
    """The embeddings of a request's virtual tokens: token id vocab_size + i stands for row i.

    Attributes:
        rows: [rows, hidden_size]; for a model with n `num_added_layers`, also [rows, (1 + n) * hidden_size]: a
            token's embedding, and what is added to its row after each of the first n layers. Tensor
            `prompt_embedding_table`.
        digest: 16-byte digest of the elements, their type and shape.
        is_identified: Whether the extra ids of the prompt's tokens identify the rows, so that keys of KV blocks
            need no digest. Only code that makes these ids from the rows' content may set this.
    """

    rows: Matrix
    digest: bytes
    is_identified: bool = False

    @classmethod
    def of(cls, rows: Matrix, is_identified: bool = False) -> PromptTable:
        """Return the prompt table with its digest, which takes some milliseconds per megabyte."""
        return cls(rows, _digest(rows), is_identified)

    @property
    def key(self) -> bytes:
        """The part of the keys of KV blocks that stands for the table."""
        return b"" if self.is_identified else self.digest

    @property
    def num_rows(self) -> int:
        """Number of rows, each of which is the embedding of one virtual token."""
        return self.rows.shape[0]

    def validate(self, hidden_size: int, num_added_layers: int = 0) -> None:
        """Raise InvalidArgument unless the rows have the model's width.

        Raise Unsupported if `hidden_size` is 0, the value of an engine that takes no prompt tables.
        """
        if not hidden_size:
            raise Unsupported(
                Name("prompt_embedding_table"), " is not available: this engine takes no prompt tables"
            )
        widths = {hidden_size, hidden_size * (1 + num_added_layers)}
        if self.rows.shape[1] not in widths or not self.num_rows:
            raise InvalidArgument(
                Name("prompt_embedding_table"),
                f" must have shape [1, rows, {' or '.join(map(str, sorted(widths)))}] with at least one row, got "
                f"{[1, *self.rows.shape]}",
            )


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Rotary positions of a prompt's tokens that are not their indices: multimodal rotary embedding (mRoPE).

    Attributes:
        cos_sin: float32 [positions, rotary_dim], at least one row for each prompt token: cosine and sine of the
            first angle, of the second, and so on. Tensor `mrope_rotary_cos_sin`.
        delta: Number added to the index of each generated token for its rotary position. Tensor
            `mrope_position_deltas`.
        digest: 16-byte digest of the table and the number.
        is_identified: As of `PromptTable`.
    """

    cos_sin: Matrix
    delta: int
    digest: bytes
    is_identified: bool = False

    @classmethod
    def of(cls, cos_sin: Matrix, delta: int, is_identified: bool = False) -> RotaryTable:
        """Return the table with its digest."""
        return cls(cos_sin, delta, _digest(cos_sin, delta), is_identified)

    @property
    def key(self) -> bytes:
        """The part of the keys of KV blocks that stands for the table."""
        return b"" if self.is_identified else self.digest

    def validate(
        self, rotary_dim: int, num_prompt_tokens: int, max_new_tokens: int, num_positions: int
    ) -> None:
        """Raise InvalidArgument unless each token of a sequence has a rotary position.

        Raise Unsupported if `rotary_dim` is 0, the value of an engine whose model has no multimodal rotary
        embedding.

        Args:
            rotary_dim: Number of rotated dimensions of a head.
            num_prompt_tokens: Length of the prompt.
            max_new_tokens: Maximum number of generated tokens.
            num_positions: Number of positions that the engine has for generated tokens.
        """
        name = Name("mrope_rotary_cos_sin")
        if not rotary_dim:
            raise Unsupported(name, " is not available: the model has no multimodal rotary embedding (mRoPE)")
        rows, width = self.cos_sin.shape
        if self.cos_sin.dtype != "float32" or width != rotary_dim or rows < num_prompt_tokens:
            raise InvalidArgument(
                name,
                f" must have {rotary_dim} numbers for each of the {num_prompt_tokens} prompt tokens, got "
                f"{rows * width}",
            )
        least, most = -num_prompt_tokens, num_positions - num_prompt_tokens - max_new_tokens
        if not least <= self.delta <= most:
            raise InvalidArgument(
                Name("mrope_position_deltas"),
                f" must be in [{least}, {most}] for {num_prompt_tokens} prompt tokens and {max_new_tokens} more, "
                f"got {self.delta}",
            )


def _digest(rows: Matrix, *others: int) -> bytes:
    key = f"{rows.dtype} {rows.shape} {others}".encode()
    return blake2b(rows.buffer.data, digest_size=16, key=key).digest()
