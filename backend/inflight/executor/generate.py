"""`Executor.generate`: generate texts for a list of prompts in one call.

Prompts run concurrently, as many as fit into the engine's queue. Texts and stop strings are handled as in
the server (`inflight.serving`). Everything in this module runs on the caller's thread.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import cast

from inflight.core.ports import EngineClient
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import Request as CoreRequest
from inflight.core.request.response import Response as CoreResponse
from inflight.core.request.stop import FinishReason, StopReason
from inflight.endpoint.delivery import Delivery
from inflight.errors import InflightError, StepFailed
from inflight.executor.errors import ExecutorError, InvalidValue, in_fields
from inflight.prompt import Output, Prompt, ReplyOptions
from inflight.serving.reply import NewText, Reply, new_text
from inflight.text.tokenizer import Tokenizer

_LONG = 1000
"""A call that may generate at least this many tokens shows a progress bar."""

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""One prompt or several, as text or as token ids."""


@dataclass(frozen=True, slots=True)
class GeneratedSequence:
    """One output of a prompt.

    Attributes:
        token_ids: Generated tokens, up to the token that completes a stop string.
        text: Text of the tokens, without the stop string; "" if the model has no tokenizer.
        finish_reason: Reason for the sequence's end.
        cum_log_prob: Sum of the tokens' log probs, or a beam's score; None if not requested.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    cum_log_prob: float | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """The outputs of one prompt.

    Attributes:
        prompt_token_ids: Token ids of the prompt.
        sequences: The `num_return_sequences` outputs, or the beams of a search, best first.
        receipt: The prompt's receipt as JSON; None if not requested.
    """

    prompt_token_ids: tuple[int, ...]
    sequences: tuple[GeneratedSequence, ...]
    receipt: str | None = None

    @property
    def text(self) -> str:
        """Return the first sequence's text."""
        return self.sequences[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the first sequence's tokens."""
        return self.sequences[0].token_ids


def is_one_prompt(prompts: Prompts) -> bool:
    """Return whether `prompts` is one text or one sequence of token ids.

    Raises InvalidValue if it is neither that nor a list of prompts.
    """
    if isinstance(prompts, str):
        return True
    is_list = isinstance(prompts, Iterable)  # pyright: ignore[reportUnnecessaryIsInstance] - from callers
    are_ids = [isinstance(each, Integral) for each in prompts] if is_list else []
    if not are_ids or any(are_ids) != all(are_ids):
        raise InvalidValue(f"prompts is {prompts!r:.100}: expected a text, token ids, or a list of either")
    return are_ids[0]


def as_list(prompts: Prompts) -> list[str | list[int]]:
    """Return one or several prompts as a list; raise InvalidValue like `is_one_prompt`."""
    listed = [prompts] if is_one_prompt(prompts) else prompts
    return [each if isinstance(each, str) else list(cast("Sequence[int]", each)) for each in listed]


class Generating:
    """The state of one call of `generate`: its prompts, and their outputs so far.

    Args:
        client: Client of the engine.
        requests: One request for each prompt. A request streams if `engine_streams` requires it.
        stop_strings: Stop strings.
        tokenizer: Tokenizer for text; None: no text.
    """

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[CoreRequest],
        stop_strings: Sequence[str],
        tokenizer: Tokenizer | None,
    ) -> None:
        self._client = client
        self._requests = requests
        prompts = [_prompt(each, stop_strings, tokenizer) for each in requests]
        self._reply = Reply(prompts, in_one=False)
        # Responses are not merged, because with some tokenizers the token that completes a stop string would
        # then depend on timing.
        self._delivery: Delivery[CoreResponse] = Delivery(merges=False)
        self._outputs: list[list[Output]] = [[] for _ in requests]
        self._in_flight: dict[int, tuple[int, RequestHandle]] = {}  # (prompt index, handle) by request id

    def run(self, most_at_once: int | None, progress: bool | None) -> list[Generation]:
        """Generate, and return the generations in the order of the prompts.

        Args:
            most_at_once: Largest number of sequences in flight at a time; None: no limit.
            progress: Whether to show a progress bar; None: show it if stderr is a terminal and the call is
                long.

        Raises:
            ExecutorError: A prompt failed; all others are cancelled.
        """
        waiting = iter(range(len(self._requests)))
        with self._bar(progress) as advance:
            try:
                self._submit_next(waiting, most_at_once)
                while self._in_flight:
                    for response in self._delivery.take():
                        self._take(response, advance)
                    self._submit_next(waiting, most_at_once)
            finally:
                for _, handle in self._in_flight.values():  # after an error or KeyboardInterrupt
                    handle.stop()
        return [_generation(*pair) for pair in zip(self._requests, self._outputs, strict=True)]

    def _submit_next(self, waiting: Iterator[int], most_at_once: int | None) -> None:
        """Submit further prompts, until `most_at_once` sequences are in flight, but at least one prompt."""
        while not self._in_flight or most_at_once is None or self._num_sequences() < most_at_once:
            index = next(waiting, None)
            if index is None:
                return
            try:
                handle = self._client.submit(self._requests[index], self._delivery.put)
            except InflightError as error:
                raise ExecutorError(f"prompt {index}: {in_fields(error)}") from error
            self._in_flight[handle.request_id] = index, handle

    def _num_sequences(self) -> int:
        return sum(self._requests[index].sampling.num_sequences for index, _ in self._in_flight.values())

    def _take(self, response: CoreResponse, advance: Callable[[], None]) -> None:
        index, handle = self._in_flight[response.request_id]
        if response.is_final:
            del self._in_flight[response.request_id]
        if response.result is None:
            error = response.error or StepFailed("the engine gave no result")
            raise ExecutorError(f"prompt {index}: {in_fields(error)}")
        self._outputs[index] += self._reply.add(index, response.result, is_last=response.is_final)
        if self._reply.has_just_stopped:
            sequence = response.result.sequence_index
            handle.stop(StopReason.STOP_WORDS, sequence)
        if response.is_final:
            advance()

    @contextlib.contextmanager
    def _bar(self, progress: bool | None) -> Generator[Callable[[], None]]:
        num_tokens = sum(each.max_new_tokens * each.sampling.num_sequences for each in self._requests)
        if progress is None:
            progress = num_tokens >= _LONG and sys.stderr.isatty()
        if not progress:
            yield lambda: None
            return
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        with Progress(console=console, transient=console.is_terminal) as bar:
            task = bar.add_task("generating", total=len(self._requests))
            yield lambda: bar.advance(task)


def _prompt(
    request: CoreRequest, stop_strings: Sequence[str], tokenizer: Tokenizer | None
) -> tuple[Prompt, NewText | None]:
    prompt = Prompt(request, ReplyOptions(frozenset(), stop_strings=tuple(stop_strings)))
    return prompt, None if tokenizer is None else new_text(prompt, tokenizer)


def _generation(request: CoreRequest, outputs: Sequence[Output]) -> Generation:
    ordered = sorted(outputs, key=lambda output: output.result.sequence_index)
    sequences = [sequence for output in ordered for sequence in _sequences(output)]
    receipt = next((output.result.receipt for output in outputs if output.result.receipt), None)
    return Generation(request.input_token_ids, tuple(sequences), receipt)


def _sequences(output: Output) -> Iterator[GeneratedSequence]:
    result = output.result
    for row, token_ids in enumerate(result.output_token_ids):
        yield GeneratedSequence(
            token_ids,
            "" if output.texts is None else output.texts[row],
            result.finish_reasons[row],
            None if result.cum_log_probs is None else result.cum_log_probs[row],
        )
