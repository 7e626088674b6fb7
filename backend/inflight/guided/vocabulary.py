"""The vocabulary that a guide is followed in: the bytes that each token stands for. Immutable; any thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GuideVocabulary:
    """The vocabulary of a model, as a grammar library needs it.

    Attributes:
        tokens: By token id, the bytes that it adds to a text; of a special token its spelling; b"" for an id that
            is no token.
        special_ids: Ids of special tokens. They stand for no text, so that no guide allows them where it asks for
            text; a structural tag may name one as its trigger.
    """

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]

    @classmethod
    def of_size(
        cls, vocab_size: int, tokens: Sequence[bytes], special_ids: Collection[int]
    ) -> GuideVocabulary:
        """The vocabulary of a model that has `vocab_size` logits: more or fewer than its tokenizer has tokens."""
        padding = (b"",) * max(0, vocab_size - len(tokens))
        return cls(
            (*tokens[:vocab_size], *padding), frozenset(each for each in special_ids if each < vocab_size)
        )

    @property
    def end_id(self) -> int:
        """An id behind all others, which libraries are told is the end of a text.

        Its bit in a mask says whether the text may end; the requests' own end ids follow from that.
        """
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """Words of 32 bits in a mask: a bit for each token, and one for the end."""
        return len(self.tokens) // 32 + 1

    def spelled(self) -> list[bytes]:
        """The bytes of every token and of the end, none of them empty."""
        named = [token or b"<|no-token-%d|>" % index for index, token in enumerate(self.tokens)]
        return [*named, b"<|end-of-guide|>"]

    def without_text(self) -> list[int]:
        """Ids that stand for no text: special tokens, ids that are no token, and the end."""
        empty = (index for index, token in enumerate(self.tokens) if not token)
        return [*sorted(self.special_ids.union(empty)), self.end_id]
