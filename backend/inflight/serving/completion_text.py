"""Texts of prompts and completions: loading of the model's tokenizer, and conversion of tokens to text.

Decides when a tokenizer is loaded, how text_output starts, and where a stop string ends it. The thread that
calls `execute` loads the tokenizer; a CompletionText is used by the sender thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from inflight.additional_outputs import GENERATION
from inflight.core.request.request import FloatTensor
from inflight.core.request.response import ReturnedOutput, SequenceResult
from inflight.core.request.stop import FinishReason
from inflight.errors import Unsupported, without_places
from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.stop_strings import StopStringFinder, StopStrings
from inflight.text.tokenizer import Tokenizer

# Whether a completion starts with a space depends on the tokens before it. This many are enough.
_PREFIX_TOKENS = 32

NO_STOP_STRINGS = StopStrings(())
"""An empty set of stop strings."""

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class TokenizerFinder:
    """Loads a model's tokenizer once, as soon as its folder is known.

    Args:
        directory: Parameter tokenizer_dir; None: use the folder that the engine reports.
        load: Function that loads the tokenizer of a folder, and raises if the folder has none.
    """

    def __init__(self, directory: str | None, load: Callable[[str], Tokenizer] = Tokenizer.from_dir) -> None:
        self._directory = directory
        self._load = load
        self._found: Tokenizer | None = None
        self._problem: str | None = None

    def find(self, engine_directory: str = "") -> Tokenizer | None:
        """Return the tokenizer in the folder tokenizer_dir, or else in `engine_directory`.

        Returns None if there is none.
        """
        if self._found is None and self._problem is None:
            self._look(self._directory or engine_directory)
        return self._found

    def require(self, engine_directory: str = "") -> Tokenizer:
        """Return the tokenizer like `find`, or raise Unsupported with the reason why there is none."""
        tokenizer = self.find(engine_directory)
        if tokenizer is None:
            raise Unsupported(f"this model serves no text: {self._problem}")
        return tokenizer

    def _look(self, directory: str) -> None:
        if not directory:
            self._problem = "its checkpoint has no tokenizer.json, and parameter tokenizer_dir is not set"
            return
        try:
            self._found = self._load(directory)
        except Exception as error:  # broken files raise any class; requests with ids still work
            self._problem = without_places(str(error))
            _log.warning("text will be refused: %s", error)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that one result adds to a sequence or beam.

    Attributes:
        text: The new part of the text; for beams, the whole text.
        num_kept_tokens: How many of the result's new tokens belong to the answer: all, or up to the token
            that completes a stop string.
        stop_string: The stop string that this result or an earlier one completes; "" for none.
    """

    text: str
    num_kept_tokens: int
    stop_string: str = ""

    @property
    def stopped(self) -> bool:
        """Return whether a stop string is complete."""
        return bool(self.stop_string)


class CompletionText:
    """Incremental text_output of one sequence, or of the beams of one beam search, up to a stop string.

    A completion continues the text of its prompt: a space between the two belongs to the completion. Stop
    strings are searched in the generated text only, both with and without its special tokens. The returned
    text never contains a stop string; text that may be the beginning of one is held back. Tokens are kept up
    to the token that completes a stop string. The result does not depend on how tokens are divided into
    results, except for a tokenizer whose text is known only at the end (`TokenDecoder.is_token_by_token`):
    then all received tokens are kept.

    Args:
        tokenizer: Tokenizer of the model.
        prompt_ids: Token ids of the prompt.
        prompt_text: Text of the prompt; None if the prompt was given as ids.
        lead: Whether the text starts with the prompt.
        stop_strings: Stop strings; all sequences of a request may share one object.
        skip_special_tokens: Whether to leave special tokens out of the text. Stop strings that contain
            special tokens are found nevertheless.
        min_tokens: A stop string is ignored if one of the first `min_tokens` tokens completes it.

    Usage, once per result and in order:

        deltas = text.add(result)
        result = cut_at_stop(result, deltas)   # a stopped sequence ends here with STOP_WORDS
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: tuple[int, ...],
        prompt_text: str | None = None,
        lead: bool = False,
        stop_strings: StopStrings = NO_STOP_STRINGS,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._prompt_ids = prompt_ids
        self._prompt_text = prompt_text
        self._lead = lead
        self._stop_strings = stop_strings
        self._skip_special_tokens = skip_special_tokens
        # Created when the first result arrives, so that the sender thread does it, and only if there is a
        # result.
        self._row: _RowText | None = None

    def add(self, result: SequenceResult) -> tuple[TextDelta, ...]:
        """Add a result; return one delta for each of its beams, or one delta if there are no beams.

        Bytes of an incomplete character, and text that may begin a stop string, are held back until later
        tokens decide, or until the sequence's last result. After a stop, deltas have no text and keep no
        tokens.
        """
        if result.is_cumulative or len(result.output_token_ids) > 1:
            return tuple(self._whole(ids, result) for ids in new_tokens(result))
        lead = ""
        if self._row is None:
            self._row = self._start_row()
            lead = self._prompt()
        return (self._row.add(new_tokens(result)[0], result.is_sequence_final, lead),)

    def _whole(self, ids: tuple[int, ...], result: SequenceResult) -> TextDelta:
        return self._start_row().add(ids, result.is_sequence_final, self._prompt())

    def _start_row(self) -> _RowText:
        prefix_ids = self._prompt_ids[-_PREFIX_TOKENS:]
        detokenizer = IncrementalDetokenizer(self._tokenizer, self._skip_special_tokens, prefix_ids)
        finder = StopStringFinder(self._stop_strings) if self._stop_strings else None
        return _RowText(detokenizer, finder, self._min_tokens)

    def _prompt(self) -> str:
        if not self._lead:
            return ""
        if self._prompt_text is not None:
            return self._prompt_text
        return self._tokenizer.decode(self._prompt_ids, self._skip_special_tokens)


class _RowText:
    """Generated text of one row, which is a sequence or a beam."""

    def __init__(
        self, detokenizer: IncrementalDetokenizer, finder: StopStringFinder | None, min_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._finder = finder
        self._num_protected = min_tokens  # number of next tokens that cannot complete a stop string

    def add(self, ids: tuple[int, ...], is_final: bool, lead: str) -> TextDelta:
        if self._finder is not None:
            return self._add_until_stop(self._finder, ids, is_final, lead)
        text = lead + self._detokenizer.add(ids)
        return TextDelta(text + self._detokenizer.flush() if is_final else text, len(ids))

    def _add_until_stop(
        self, finder: StopStringFinder, ids: tuple[int, ...], is_final: bool, lead: str
    ) -> TextDelta:
        if finder.stopped:
            return TextDelta("", 0, finder.found)
        parts = [lead]
        # One by one, to find the token that completes a stop string.
        for count, token_id in enumerate(ids, 1):
            parts.append(self._add_token(finder, token_id))
            if finder.stopped:
                return TextDelta("".join(parts), count, finder.found)
        if is_final:
            rest = finder.add(self._detokenizer.flush(), may_stop=self._may_stop)
            parts += [rest, finder.flush()]
        return TextDelta("".join(parts), len(ids), finder.found)

    @property
    def _may_stop(self) -> bool:
        return self._num_protected < 0

    def _add_token(self, finder: StopStringFinder, token_id: int) -> str:
        self._num_protected -= 1
        may_stop = self._may_stop
        hidden = self._detokenizer.hidden_text(token_id)
        if not hidden:
            return finder.add(self._detokenizer.add((token_id,)), may_stop=may_stop)
        # The detokenizer may hold text back. It precedes the special token only if the text ends here.
        rest = self._detokenizer.flush()
        if rest:
            trial = finder.copy()
            trial.add(rest, may_stop=may_stop)
            trial.add(hidden, is_shown=False, may_stop=may_stop)
            if not trial.stopped:
                rest = ""
        return finder.add(rest, may_stop=may_stop) + finder.add(hidden, is_shown=False, may_stop=may_stop)


def new_tokens(result: SequenceResult) -> tuple[tuple[int, ...], ...]:
    """Return the result's generated tokens, by beam."""
    return tuple(
        ids[len(ids) - count :] for ids, count in zip(result.output_token_ids, result.num_output_tokens)
    )


def cut_at_stop(result: SequenceResult, deltas: Sequence[TextDelta]) -> SequenceResult:
    """Cut `result` after the tokens that `deltas` keep, together with all values that belong to tokens.

    Stopped rows end with STOP_WORDS. The sequence ends when all of its rows have ended.
    """
    if not any(delta.stopped for delta in deltas):
        return result
    kept = [delta.num_kept_tokens for delta in deltas]
    dropped = [count - keep for count, keep in zip(result.num_output_tokens, kept)]
    reasons = zip(result.finish_reasons, deltas)
    return replace(
        result,
        output_token_ids=tuple(ids[: len(ids) - n] for ids, n in zip(result.output_token_ids, dropped)),
        num_output_tokens=tuple(kept),
        finish_reasons=tuple(FinishReason.STOP_WORDS if d.stopped else reason for reason, d in reasons),
        is_sequence_final=result.is_sequence_final or all(delta.stopped for delta in deltas),
        log_probs=_first_of_each(result.log_probs, kept),
        model_log_probs=_first_of_each(result.model_log_probs, kept),
        cum_log_probs=_cum_log_probs(result, kept),
        top_log_probs=_first_of_each(result.top_log_probs, kept),
        generation_logits=_first_rows(result.generation_logits, kept),
        additional_outputs=tuple(_cut_output(output, kept) for output in result.additional_outputs),
    )


def _cut_output(output: ReturnedOutput, kept: list[int]) -> ReturnedOutput:
    if not output.name.startswith(GENERATION):
        return output
    return ReturnedOutput(output.name, _first_rows(output.tensors, kept) or ())


def _first_of_each(
    rows: tuple[tuple[_T, ...], ...] | None, kept: list[int]
) -> tuple[tuple[_T, ...], ...] | None:
    return None if rows is None else tuple(row[:count] for row, count in zip(rows, kept))


def _cum_log_probs(result: SequenceResult, kept: list[int]) -> tuple[float, ...] | None:
    of_model = result.model_log_probs or result.log_probs
    if result.cum_log_probs is None or of_model is None:
        return result.cum_log_probs
    rows = zip(result.cum_log_probs, of_model, kept)
    return tuple(cum - sum(log_probs[count:]) for cum, log_probs, count in rows)


def _first_rows(tensors: tuple[FloatTensor, ...] | None, kept: list[int]) -> tuple[FloatTensor, ...] | None:
    return None if tensors is None else tuple(_rows_before(*pair) for pair in zip(tensors, kept))


def _rows_before(tensor: FloatTensor, end: int) -> FloatTensor:
    row_bytes = len(tensor.data) // max(tensor.shape[0], 1)
    return FloatTensor((end, *tensor.shape[1:]), tensor.data[: end * row_bytes])
