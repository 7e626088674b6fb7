"""Convert the engine's results for one client's request to the outputs of its responses.

A client's request is one prompt or a batch. Each prompt is an engine request of its own with one or several
sequences. A Reply gathers the results for a client that wants one response, drops tokens after a stop
string, and repeats some values in every response of a stream. It is used by the sender thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from inflight.additional_outputs import GENERATION
from inflight.core.request.request import FloatTensor
from inflight.core.request.response import Response, ReturnedOutput, SequenceResult, merge_responses
from inflight.core.request.stop import FinishReason
from inflight.prompt import Output, Prompt
from inflight.receipts.writer import ReceiptWriter
from inflight.serving.completion_text import CompletionText, cut_at_stop
from inflight.text.stop_strings import StopStrings
from inflight.text.tokenizer import Tokenizer

NewText = Callable[[], CompletionText]
"""Function that creates the CompletionText of one more sequence."""

_T = TypeVar("_T")
_ResultAndTexts = tuple[SequenceResult, tuple[str, ...] | None]
_NO_ROWS = FloatTensor((0, 0), b"")
_FLOAT_BYTES = 4


def new_text(prompt: Prompt, tokenizer: Tokenizer) -> NewText:
    """Return a function that creates the text of each of the prompt's sequences."""
    options, prompt_ids = prompt.options, prompt.request.input_token_ids
    stop_strings = StopStrings(options.stop_strings)  # one automaton for all sequences
    if prompt.request.prompt_table is not None:  # ids of the table's rows have no text
        prompt_ids = tuple(token_id for token_id in prompt_ids if token_id < options.vocab_size)
    return lambda: CompletionText(
        tokenizer,
        prompt_ids,
        options.prompt_text,
        options.include_prompt,
        stop_strings,
        options.skip_special_tokens,
        options.min_tokens,
    )


@dataclass(frozen=True, slots=True)
class Repetition:
    """The values that every response of a stream repeats from earlier responses, as in tensorrtllm_backend.

    Attributes:
        log_probs: Whether a response has the log probs of all tokens so far; otherwise only of its new
            tokens.
        max_bytes: Largest size of context outputs that are repeated; larger ones are in the first response
            only.
        text: Whether a response has the whole text so far; otherwise only the new text.
    """

    log_probs: bool = True
    max_bytes: int = 8 << 20
    text: bool = False


AS_UPSTREAM = Repetition()


class Reply:
    """Converts the results of all prompts of one client's request to outputs.

    Args:
        prompts: The prompts in the order of the batch, each with the function that creates its texts; None:
            no text.
        in_one: Whether the client gets one response, after all results.
        repetition: Values that every response of a stream repeats.

    Attributes:
        has_just_stopped: Whether the last added result completed a stop string of its sequence.
    """

    def __init__(
        self,
        prompts: Sequence[tuple[Prompt, NewText | None]],
        in_one: bool,
        repetition: Repetition = AS_UPSTREAM,
    ) -> None:
        self.has_just_stopped = False
        self._prompts = tuple(prompts)
        self._in_one = in_one
        self._repetition = repetition
        self._sequences: dict[tuple[int, int], _Sequence] = {}  # by batch index and sequence index
        self._receipts = {
            index: ReceiptWriter(prompt.request, prompt.options)
            for index, (prompt, _) in enumerate(self._prompts)
            if prompt.request.output.return_receipt
        }
        self._held: list[Output] = []

    def add(self, batch_index: int, result: SequenceResult, is_last: bool) -> tuple[Output, ...]:
        """Add a result; return the outputs of the response to send now, () for none.

        Args:
            batch_index: Index of the prompt in the batch.
            result: Result of the engine.
            is_last: Whether no further result of any prompt of the request will come.
        """
        sequence = self._sequence(batch_index, result.sequence_index)
        was_stopped = sequence.stopped
        output = sequence.add(result)
        self.has_just_stopped = sequence.stopped and not was_stopped
        prompt = self._prompts[batch_index][0]
        outputs = (Output(prompt, *output, batch_index, sequence.stop_string),) if output else ()
        if not self._in_one:
            return outputs
        self._held += outputs
        return _joined(self._held) if is_last else ()

    def _sequence(self, batch_index: int, sequence_index: int) -> _Sequence:
        key = batch_index, sequence_index
        if key not in self._sequences:
            prompt, new_text = self._prompts[batch_index]
            text, receipt = new_text() if new_text else None, self._receipts.get(batch_index)
            self._sequences[key] = _Sequence(prompt, text, self._repetition, receipt)
        return self._sequences[key]


class _Sequence:
    """Converts the results of one sequence, or of the beams of one beam search."""

    def __init__(
        self,
        prompt: Prompt,
        text: CompletionText | None,
        repetition: Repetition,
        receipt: ReceiptWriter | None,
    ) -> None:
        self._prompt = prompt
        self._receipt = receipt
        self._text = text
        output = prompt.request.output
        repeats = prompt.options.streaming and (output.wants_context or output.return_log_probs)
        self._repeated = _Repeated(repetition) if repeats else None
        self._repeats_text = repetition.text and prompt.options.streaming
        self._text_so_far = ""
        # If there are stop strings, the engine streams even if the client does not, to end the sequence
        # early.
        self._gathers = prompt.request.streaming and not prompt.options.streaming
        self._gathered: list[_ResultAndTexts] = []
        self._stopped_at: SequenceResult | None = None
        self.stop_string = ""  # the one that has ended the sequence

    @property
    def stopped(self) -> bool:
        return self._stopped_at is not None

    def add(self, result: SequenceResult) -> _ResultAndTexts | None:
        is_last, part = result.is_sequence_final, result.receipt
        if self._stopped_at is not None:
            if not is_last:
                return None
            result, texts = _after_stop(self._stopped_at, result), None if self._text is None else ("",)
        else:
            result, texts = self._with_text(result)
        if self._receipt is not None:
            self._receipt.add(result, part, is_last)
            result = replace(result, receipt=self._receipt.write() if self._receipt.is_complete else None)
        if self._repeats_text and texts is not None and not result.is_cumulative:
            self._text_so_far += texts[0]
            texts = (self._text_so_far,)
        if self._repeated is not None:
            return self._repeated.add(result), texts
        if not self._gathers:
            return result, texts
        self._gathered.append((result, texts))
        return self._whole() if is_last else None

    def _with_text(self, result: SequenceResult) -> _ResultAndTexts:
        if self._text is None:
            return result, None
        deltas = self._text.add(result)
        kept = cut_at_stop(result, deltas)
        # The beam search continues: the next response may replace its texts.
        if not result.is_cumulative and deltas and all(delta.stopped for delta in deltas):
            self._stopped_at, self.stop_string = kept, deltas[0].stop_string
        return kept, tuple(delta.text for delta in deltas)

    def _whole(self) -> _ResultAndTexts:
        """Return all gathered results as one result, as if the request were not streamed."""
        result = merge_responses([Response(0, result) for result, _ in self._gathered]).result
        assert result is not None
        request = self._prompt.request
        if not request.output.exclude_input_from_output:
            whole = (*request.input_token_ids, *result.output_token_ids[0])
            result = replace(result, output_token_ids=(whole,))
        if self._text is None:
            return result, None
        return result, ("".join(chain.from_iterable(texts or () for _, texts in self._gathered)),)


class _Repeated:
    """Values of earlier responses of a stream that later responses repeat."""

    def __init__(self, rules: Repetition) -> None:
        self._rules = rules
        self._log_probs: list[float] = []
        self._context_logits: FloatTensor | None = None
        self._prompt_log_probs: tuple[float, ...] | None = None

    def add(self, result: SequenceResult) -> SequenceResult:
        """Return `result` with the repeated values of earlier results."""
        logits, prompt = result.context_logits, result.prompt_log_probs
        if logits is not None and len(logits.data) <= self._rules.max_bytes:
            self._context_logits = logits
        if prompt is not None and _FLOAT_BYTES * len(prompt) <= self._rules.max_bytes:
            self._prompt_log_probs = prompt
        log_probs = result.log_probs
        if log_probs is not None and self._rules.log_probs and not result.is_cumulative:
            self._log_probs += log_probs[0]
            log_probs = (tuple(self._log_probs),)
        return replace(
            result,
            log_probs=log_probs,
            context_logits=self._context_logits if logits is None else logits,
            prompt_log_probs=self._prompt_log_probs if prompt is None else prompt,
        )


def _after_stop(stopped_at: SequenceResult, last: SequenceResult) -> SequenceResult:
    """Return the last result of a sequence that a stop string ended earlier: its metrics, but no tokens."""
    return replace(
        stopped_at,
        output_token_ids=((),),
        num_output_tokens=(0,),
        finish_reasons=(FinishReason.STOP_WORDS,),
        log_probs=None if stopped_at.log_probs is None else ((),),
        model_log_probs=None,
        top_log_probs=None if stopped_at.top_log_probs is None else ((),),
        prompt_log_probs=None,
        context_logits=None,
        generation_logits=None if stopped_at.generation_logits is None else (_NO_ROWS,),
        additional_outputs=tuple(
            ReturnedOutput(output.name, (_NO_ROWS,)) for output in _of_tokens(stopped_at)
        ),
        perf_metrics=last.perf_metrics,
    )


def _joined(outputs: list[Output]) -> tuple[Output, ...]:
    """Return one output for each prompt, with its sequences as rows, in order."""
    of_prompt: dict[int, list[Output]] = {}
    for output in sorted(outputs, key=lambda one: (one.batch_index, one.result.sequence_index)):
        of_prompt.setdefault(output.batch_index, []).append(output)
    return tuple(_as_rows(sequences) for sequences in of_prompt.values())


def _as_rows(sequences: list[Output]) -> Output:
    if len(sequences) == 1:
        return sequences[0]
    first, results = sequences[0], [output.result for output in sequences]
    result = replace(
        first.result,
        output_token_ids=tuple(r.output_token_ids[0] for r in results),
        num_output_tokens=tuple(r.num_output_tokens[0] for r in results),
        finish_reasons=tuple(r.finish_reasons[0] for r in results),
        log_probs=_rows([r.log_probs for r in results], ()),
        cum_log_probs=_rows([r.cum_log_probs for r in results], 0.0),
        top_log_probs=_rows([r.top_log_probs for r in results], ()),
        generation_logits=_rows([r.generation_logits for r in results], _NO_ROWS),
        additional_outputs=_additional_rows(results),
        receipt=next((r.receipt for r in results if r.receipt is not None), None),
    )
    texts = None if first.texts is None else tuple(chain.from_iterable(one.texts or () for one in sequences))
    return replace(first, result=result, texts=texts)


def _of_tokens(result: SequenceResult) -> Iterator[ReturnedOutput]:
    """Return the additional outputs that belong to tokens."""
    return (output for output in result.additional_outputs if output.name.startswith(GENERATION))


def _additional_rows(results: list[SequenceResult]) -> tuple[ReturnedOutput, ...]:
    """Combine additional outputs: one tensor for the shared prompt, and one for the tokens of each sequence."""
    of_sequences = [{output.name: output.tensors[0] for output in _of_tokens(result)} for result in results]
    return tuple(
        ReturnedOutput(output.name, tuple(each.get(output.name, _NO_ROWS) for each in of_sequences))
        if output.name.startswith(GENERATION)
        else output
        for output in results[0].additional_outputs
    )


def _rows(parts: list[tuple[_T, ...] | None], missing: _T) -> tuple[_T, ...] | None:
    """Return the single row of each part, or `missing` for a part that is None.

    Returns None if all parts are None.
    """
    if all(part is None for part in parts):
        return None
    return tuple(missing if part is None else part[0] for part in parts)
