"""What of a request's text is refused unread, and how long the rest takes to tokenize.

Owns the bounds on texts and what is said of one that exceeds them. Looks at lengths alone. Runs on the thread that
calls execute.
"""

from __future__ import annotations

from inflight.core.request.request import ModelLimits
from inflight.errors import InvalidArgument
from inflight.serving.text_encoder import TextEncoder
from inflight.triton.tensor_reader import TensorReader

MAX_WORDS = 1024
"""Most words in stop_words, bad_words or embedding_bias_words of one prompt."""

MAX_WORDS_BYTES = 32 * 1024
"""Most bytes of UTF-8 in all of these words together."""

_WORD_LISTS = ("stop_words", "bad_words", "embedding_bias_words")
_BYTES_PER_WORD = 512  # of a prompt that take as long to tokenize as a word in its spellings


def check_texts(reader: TensorReader, encoder: TextEncoder, limits: ModelLimits) -> None:
    """Refuse texts that are too long for this model, whatever they say.

    Raises:
        InvalidArgument: text_input has more bytes than the tokens of the longest prompt can stand for, or there
            are too many words or too long ones; the message names tensor, length and bound.
        Unsupported: A long text came, and there is no tokenizer.
    """
    for num_bytes in reader.text_sizes("text_input"):
        # Every token stands for a byte at least, so shorter ones need no further look.
        if num_bytes > limits.max_input_length:
            _check_prompt(num_bytes, encoder.max_bytes_per_token(), limits)
    for name in _WORD_LISTS:
        if reader.text_sizes(name):
            for row in reader.rows():
                _check_words(row, name)


def tokenizing_cost(reader: TensorReader) -> int:
    """Bytes of a prompt that take as long to tokenize as all texts of this request."""
    words = [size for name in _WORD_LISTS for size in reader.text_sizes(name)]
    return sum(reader.text_sizes("text_input")) + sum(words) + _BYTES_PER_WORD * len(words)


def _check_prompt(num_bytes: int, max_bytes_per_token: int | None, limits: ModelLimits) -> None:
    max_tokens = limits.max_input_length
    if max_bytes_per_token is None or num_bytes <= max_tokens * max_bytes_per_token:
        return
    raise InvalidArgument(
        f"text_input has {num_bytes} bytes; this server takes prompts of at most {max_tokens} tokens, which hold "
        f"at most {max_tokens * max_bytes_per_token} bytes of text{_remedy(limits)}"
    )


def _remedy(limits: ModelLimits) -> str:
    if limits.max_context_tokens >= limits.max_sequence_length:
        return ""
    return (
        f"; one iteration has to hold all of a prompt (max_num_tokens is {limits.max_context_tokens}), with the "
        "parameter enable_chunked_context it would be split over several"
    )


def _check_words(reader: TensorReader, name: str) -> None:
    sizes = reader.text_sizes(name)
    shown = reader.shown_name(name)
    if len(sizes) > MAX_WORDS:
        raise InvalidArgument(f"{shown} has {len(sizes)} words; this server takes at most {MAX_WORDS}")
    if sum(sizes) > MAX_WORDS_BYTES:
        raise InvalidArgument(
            f"{shown} has {sum(sizes)} bytes of text; this server takes at most {MAX_WORDS_BYTES}"
        )
