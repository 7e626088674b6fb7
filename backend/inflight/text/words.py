"""A word's token ids: every way in which it is likely to be spelled in a text, and those that a bias is for.

Owns which tokenizations of a word count. Does not know what they are banned or looked for. Plain functions, any
thread.

A vocabulary usually has one token for a word at the start of a text or within another word, and another for the
same word after a space. To ban a text, or to find it as ids, both are needed. It is a best effort: a model can
also put a word together from smaller tokens.
"""

from __future__ import annotations

from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.tokenizer import Tokenizer

# What no vocabulary joins with a letter or a space after it. Behind it a text is no longer at the start, where
# SentencePiece-style tokenizers would put a space before it.
_ANCHOR = "\n"


def word_ids(tokenizer: Tokenizer, word: str) -> tuple[tuple[int, ...], ...]:
    """The tokenizations of `word` as written and with a space before it, without special tokens or repetitions.

    A word that begins with a space has only that one. An empty word has none. A word that is the name of a special
    or another added token has that token, however the tokenizer splits the name.
    """
    if not word:
        return ()
    added = tokenizer.added_token_id(word)
    spellings = [word] if word[0].isspace() else [word, f" {word}"]
    found = [() if added is None else (added,)]
    found += [_ids_within_a_text(tokenizer, spelling) for spelling in spellings]
    return tuple(dict.fromkeys(ids for ids in found if ids))


def biased_ids(tokenizer: Tokenizer, word: str) -> list[int]:
    """The ids that a bias for `word` is added to: the word encoded like a prompt, with its special tokens.

    That is tensorrtllm_backend's rule. The same weight so falls on a beginning-of-sequence token too, which nobody
    generates, and with the few tokenizers that end a prompt with an end-of-sequence token also on that one.
    """
    return tokenizer.encode(word)


def _ids_within_a_text(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Ids that continue a text by `text`; where they cannot be told, the ids of `text` alone."""
    anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
    both = tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
    ids = both[len(anchor) :]
    if anchor and both[: len(anchor)] == anchor and _continuation(tokenizer, anchor, ids) == text:
        return tuple(ids)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _continuation(tokenizer: Tokenizer, prefix: list[int], ids: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False, prefix_ids=prefix)
    return detokenizer.add(ids) + detokenizer.flush()
