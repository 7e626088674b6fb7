"""Return the token ids of a word: its likely tokenizations in a text, and the ids to which a bias for it applies.

A vocabulary usually has one token for a word at the start of a text or within another word, and another
token for the same word after a space. To ban a word, or to find it among ids, both are needed. This is best
effort: a model can also form a word from smaller tokens. Any thread.
"""

from __future__ import annotations

from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.tokenizer import Tokenizer

# A character that no vocabulary joins with a following letter or space. It precedes a text so that the text
# is not at the start, where SentencePiece-style tokenizers would insert a space.
_ANCHOR = "\n"


def word_ids(tokenizer: Tokenizer, word: str) -> tuple[tuple[int, ...], ...]:
    """Return the tokenizations of `word` as written and after a space, without special tokens or repetitions.

    A word that begins with a space has only one tokenization, an empty word none. If the word is the
    spelling of an added token, special or not, the tokenization is this token.
    """
    if not word:
        return ()
    added = tokenizer.added_token_id(word)
    spellings = [word] if word[0].isspace() else [word, f" {word}"]
    found = [() if added is None else (added,)]
    found += [_ids_within_a_text(tokenizer, spelling) for spelling in spellings]
    return tuple(dict.fromkeys(ids for ids in found if ids))


def biased_ids(tokenizer: Tokenizer, word: str) -> list[int]:
    """Return the ids that a bias for `word` applies to: the word encoded like a prompt, with its special tokens.

    This is tensorrtllm_backend's rule. So the bias also applies to the special tokens around a prompt: to a
    beginning-of-sequence token, which is never generated, and for a few tokenizers to an end-of-sequence
    token.
    """
    return tokenizer.encode(word)


def _ids_within_a_text(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the ids of `text` within a longer text; if they cannot be determined, the ids of `text` alone."""
    anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
    both = tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
    ids = both[len(anchor) :]
    if anchor and both[: len(anchor)] == anchor and _continuation(tokenizer, anchor, ids) == text:
        return tuple(ids)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _continuation(tokenizer: Tokenizer, prefix: list[int], ids: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False, prefix_ids=prefix)
    return detokenizer.add(ids) + detokenizer.flush()
