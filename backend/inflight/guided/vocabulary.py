"""The vocabulary of guides: the bytes of each token. Immutable; any thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GuideVocabulary:
    """A model's vocabulary, as a grammar library needs it.

    Attributes:
        tokens: By token id, the bytes that it adds to a text. For a special token, its spelling; b"" for an unused
            id.
        special_ids: Ids of special tokens. They stand for no text, so no guide allows them where it asks for text;
            a structural tag may use one as its trigger.
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
        """The id after all others, which libraries take for the end of a text.

        Its bit in a mask says whether the text may end here; the bits of a request's end ids follow from it.
        """
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """Number of 32-bit words in a mask, with a bit per token and one for the end."""
        return len(self.tokens) // 32 + 1

    def spelled(self) -> list[bytes]:
        """Return the bytes of every token and of the end, none of them empty."""
        named = [token or b"<|no-token-%d|>" % index for index, token in enumerate(self.tokens)]
        return [*named, b"<|end-of-guide|>"]

    def without_text(self) -> list[int]:
        """Return the ids that stand for no text: special tokens, unused ids, and the end."""
        empty = (index for index, token in enumerate(self.tokens) if not token)
        return [*sorted(self.special_ids.union(empty)), self.end_id]
