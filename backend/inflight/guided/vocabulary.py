"""The vocabulary of guides: the bytes of each token. Immutable; any thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GuideVocabulary:
    """The part of a model's vocabulary that a grammar library needs: the bytes of each token.

    Attributes:
        tokens: The bytes that each token adds to a text, indexed by token id. For a special token, its
            spelling; b"" for an unused id.
        special_ids: Ids of special tokens. They have no text, so no guide allows them as text; a structural
            tag may use one as its trigger.
    """

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]

    @classmethod
    def of_size(
        cls, vocab_size: int, tokens: Sequence[bytes], special_ids: Collection[int]
    ) -> GuideVocabulary:
        """Return the vocabulary of a model with `vocab_size` logits.

        The tokenizer may have more or fewer tokens.
        """
        padding = (b"",) * max(0, vocab_size - len(tokens))
        return cls(
            (*tokens[:vocab_size], *padding), frozenset(each for each in special_ids if each < vocab_size)
        )

    @property
    def end_id(self) -> int:
        """Return the id after all others, which libraries use for the end of a text.

        Its bit in a mask is set if the text may end here; the bits of a request's end ids are set
        accordingly.
        """
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """Return the number of 32-bit words in a mask, which has a bit for each token and one for the end."""
        return len(self.tokens) // 32 + 1

    def spelled(self) -> list[bytes]:
        """Return the bytes of every token and of the end. Empty bytes are replaced by made-up ones."""
        named = [token or b"<|no-token-%d|>" % index for index, token in enumerate(self.tokens)]
        return [*named, b"<|end-of-guide|>"]

    def without_text(self) -> list[int]:
        """Return the ids that have no text: special tokens, unused ids, and the end."""
        empty = (index for index, token in enumerate(self.tokens) if not token)
        return [*sorted(self.special_ids.union(empty)), self.end_id]
