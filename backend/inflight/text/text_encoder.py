"""Convert texts of requests to token ids: prompts, and words to ban, to bias or to stop at.

Also checks the limits on the lengths of texts. Runs on the thread that receives requests, or for long texts
on another thread; the GIL is released during tokenization.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inflight.config import SpecialTokens
from inflight.core.request.engine_description import ModelLimits
from inflight.errors import InvalidArgument, Name, TooLong, Unsupported
from inflight.text.tokenizer import Tokenizer
from inflight.text.words import biased_ids, word_ids

MAX_WORDS = 1024
"""Maximum number of words to stop at, to ban or to bias in one prompt."""

MAX_WORDS_BYTES = 32 * 1024
"""Maximum number of UTF-8 bytes in all words of one of these lists."""

_BYTES_PER_WORD = 512  # bytes of prompt that take as long to tokenize as the spellings of one word


class TextEncoder:
    """Encodes texts of requests with a model's tokenizer. Every method raises `require_tokenizer`'s errors.

    Args:
        require_tokenizer: Function that returns the tokenizer, or raises Unsupported if there is none.
        special_tokens: Whether special tokens are added around prompts.
    """

    def __init__(
        self,
        require_tokenizer: Callable[[], Tokenizer],
        special_tokens: SpecialTokens = SpecialTokens.ADDED,
    ) -> None:
        self._tokenizer = require_tokenizer
        self._special_tokens = special_tokens

    @property
    def special_tokens(self) -> SpecialTokens:
        """Whether special tokens are added around prompts."""
        return self._special_tokens

    def prompts(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the ids of each prompt."""
        tokenizer = self._tokenizer()
        is_added = self._special_tokens is not SpecialTokens.LEFT_OUT
        encoded = tokenizer.encode_batch(texts, add_special_tokens=is_added)
        if self._special_tokens is not SpecialTokens.AUTO:
            return encoded
        prefix = tokenizer.prefix_ids
        size = len(prefix)
        return [ids[size:] if ids[size : 2 * size] == prefix else ids for ids in encoded]

    def tokens(self, word: str) -> Sequence[int]:
        """Return the ids to which a bias for a word is added, repeated as often as they occur in the word."""
        return biased_ids(self._tokenizer(), word)

    def spellings(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Return the ids of a word in every form in which it is likely to occur in a text."""
        return word_ids(self._tokenizer(), word)

    def check_prompt_length(self, num_bytes: int, name: str, limits: ModelLimits) -> None:
        """Refuse a prompt that is certainly too long for the model.

        Args:
            num_bytes: Length of the prompt in UTF-8 bytes.
            name: The client's name of the prompt, for the error.
            limits: The model's limits.

        Raises:
            TooLong: The prompt has more bytes than the tokens of the longest prompt can represent.
            Unsupported: The prompt is long, and there is no tokenizer.
        """
        max_tokens = limits.max_input_length
        if num_bytes <= max_tokens:  # every token has at least one byte
            return
        max_bytes_per_token = self._tokenizer().max_bytes_per_token
        if max_bytes_per_token is None or num_bytes <= max_tokens * max_bytes_per_token:
            return
        remedy = (
            f"; one iteration has to hold all of a prompt (max_num_tokens is {limits.max_context_tokens}), "
            "with the parameter enable_chunked_context it would be split over several"
        )
        raise TooLong(
            Name(name),
            f" has {num_bytes} bytes; this server takes prompts of at most {max_tokens} tokens, which hold "
            f"at most {max_tokens * max_bytes_per_token} bytes of text"
            f"{remedy if limits.max_context_tokens < limits.max_sequence_length else ''}",
        )


def _no_tokenizer() -> Tokenizer:
    raise Unsupported("there is no tokenizer here: send token ids instead of text")


NO_TEXT = TextEncoder(_no_tokenizer)
"""The encoder for models without a tokenizer, which refuses all texts."""


def check_words(sizes: Sequence[int], name: str) -> None:
    """Raise InvalidArgument if there are too many words, or too many bytes in them.

    Args:
        sizes: Length of each word in UTF-8 bytes.
        name: The client's name of the list, for the error.
    """
    if len(sizes) > MAX_WORDS:
        raise InvalidArgument(Name(name), f" has {len(sizes)} words; this server takes at most {MAX_WORDS}")
    if sum(sizes) > MAX_WORDS_BYTES:
        raise InvalidArgument(
            Name(name), f" has {sum(sizes)} bytes of text; this server takes at most {MAX_WORDS_BYTES}"
        )


def tokenizing_cost(prompt_sizes: Sequence[int], word_sizes: Sequence[int]) -> int:
    """Return the cost of tokenizing prompts and words, as the length in bytes of one prompt of equal cost.

    The arguments are lengths in bytes.
    """
    return sum(prompt_sizes) + sum(word_sizes) + _BYTES_PER_WORD * len(word_sizes)
