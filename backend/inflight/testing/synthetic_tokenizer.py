"""A byte-level BPE tokenizer of any size, made by a rule instead of training, for checkpoints with random weights.

Its vocabulary has three special tokens, the 256 bytes, then pairs, triples and longer pieces of letters,
common letters first. It can encode any text and decode every id, and splits English into pieces of a few
letters.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PADDING_ID, BEGIN_ID, END_ID = 0, 1, 2
_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
# The spelling of a space in byte-level BPE; a space is always the first character of a piece.
_SPACE = "Ġ"


def write_tokenizer(folder: Path, vocabulary_size: int, longest: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; `longest` is the model's length limit in tokens."""
    make_tokenizer(vocabulary_size).save(str(folder / "tokenizer.json"), pretty=False)
    padding, begin, end = _SPECIAL_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "pad_token": padding,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def make_tokenizer(vocabulary_size: int) -> Tokenizer:
    """Return a tokenizer of exactly this size, which must include the special tokens and the bytes."""
    tokens = [*_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocabulary_size < len(tokens):
        raise ValueError(f"a vocabulary has at least {len(tokens)} tokens, not {vocabulary_size}")
    merges = list(itertools.islice(_merges(), vocabulary_size - len(tokens)))
    tokens += [left + right for left, right in merges]
    model = models.BPE({token: index for index, token in enumerate(tokens)}, merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token in _SPECIAL_TOKENS]
    tokenizer.add_special_tokens(special)  # pyright: ignore[reportUnknownMemberType]  its list has no type
    return tokenizer


def _merges() -> Iterator[tuple[str, str]]:
    """Yield merges without end: every known piece with every letter after it, shorter pieces first."""
    pieces = [_SPACE, *_LETTERS]
    while True:
        # Pairs are ordered by the sum of the piece's and the letter's rank, so that common combinations come
        # first.
        ranked = sorted(
            itertools.product(enumerate(pieces), enumerate(_LETTERS)), key=lambda p: p[0][0] + p[1][0]
        )
        pairs = [(piece, letter) for (_, piece), (_, letter) in ranked]
        yield from pairs
        pieces = [piece + letter for piece, letter in pairs]
