"""The pipeline's first step: calls the logits post-processors of rows whose requests name one.

A call gets the rows of one sequence: the row of its next token, or for a beam search the rows of all beams. A row
after draft tokens gets its own call, with the drafts as tokens, because it is not known yet whether the drafts are
accepted. The batched post-processor gets all other rows in one call.

An error of a post-processor fails only the rows of the call. Called on the loop thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.request.request import BATCHED_POST_PROCESSOR_NAME, Request
from inflight.errors import InflightError, StepFailed
from inflight.sampling.history import History
from inflight.sampling.logits_post_processors import LogitsPostProcessors, takes_client_id
from inflight.sampling.rows import Failures, Rows, Step, select_rows
from inflight.sampling.transfer import as_array, to_host

_log = logging.getLogger(__name__)

_MAX_ERROR_TEXT = 2000  # characters, as a message is sent in the header of a response


class _WrongResult(Exception):
    """A post-processor returned or left a value of the wrong kind; the message follows the post-processor's
    name."""


@dataclass(frozen=True, slots=True, eq=False)
class _SlotProcessor:
    """The post-processor of a slot; the beams of a search share one."""

    request: Request
    process: Callable[..., Any]
    has_client_id: bool

    @property
    def name(self) -> str:
        return self.request.logits_post_processor_name

    @property
    def client_id(self) -> int | None:
        return self.request.client_id or None


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a post-processor for one sequence.

    Attributes:
        processor: The slot's post-processor.
        rows: [beams] indices of the rows, consecutive.
        logits: [1, beams, vocab_size], a view.
        token_ids: For each beam, the tokens so far, prompt included.
        is_behind_draft: Whether the row comes after a draft token.
        shape, address: Shape and address of `logits` before the call.
    """

    processor: _SlotProcessor
    rows: range
    logits: Tensor
    token_ids: list[list[int]]
    is_behind_draft: bool
    shape: torch.Size
    address: int

    @property
    def is_batched(self) -> bool:
        return self.processor.name == BATCHED_POST_PROCESSOR_NAME and not self.is_behind_draft


class PostProcessorStep:
    """Calls post-processors; `step` is the first step of the pipeline."""

    def __init__(self, processors: LogitsPostProcessors, history: History) -> None:
        self._functions: dict[str, Callable[..., Any]] = dict(processors.processor_map)
        if processors.processor_batched is not None:
            self._functions[BATCHED_POST_PROCESSOR_NAME] = processors.processor_batched
        self._have_client_id = {name: takes_client_id(name, f) for name, f in self._functions.items()}
        self._history = history

    @property
    def step(self) -> Step:
        """The step of the pipeline."""
        return Step(self._prepare, self._apply)

    def _prepare(self, request: Request, _: torch.device) -> _SlotProcessor | None:
        name = request.logits_post_processor_name
        return _SlotProcessor(request, self._functions[name], self._have_client_id[name]) if name else None

    def _apply(
        self, rows: Rows, indices: NDArray[np.int64], processors: Sequence[_SlotProcessor]
    ) -> Failures:
        device = rows.logits.device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        calls = list(self._calls(rows, indices, processors))
        failures: dict[int, InflightError] = {}
        together = [call for call in calls if call.is_batched]
        if together:
            failures |= _call_batched(together, stream)
        for call in calls:
            if not call.is_batched:
                failures |= _call_one(call, stream)
        return _check_numbers(rows, indices, processors) | failures

    def _calls(
        self, rows: Rows, indices: NDArray[np.int64], processors: Sequence[_SlotProcessor]
    ) -> Iterator[_Call]:
        """Divide the rows among calls."""
        positions, slots = rows.positions[indices].tolist(), rows.slots[indices].tolist()
        (seen,) = to_host(self._history.before(rows.slots[indices], rows.positions[indices]).token_ids)
        token_ids = [part.tolist() for part in np.split(seen, np.cumsum(positions)[:-1])]
        first = 0
        for end in range(1, len(indices) + 1):
            start = int(indices[first])
            if (
                end < len(indices)
                and processors[end] is processors[first]
                and positions[end] == positions[first]
                and indices[end] == start + end - first
            ):
                continue  # another beam of the same search
            call_rows = range(start, start + end - first)
            logits = rows.logits[call_rows.start : call_rows.stop].unsqueeze(0)
            yield _Call(
                processors[first],
                call_rows,
                logits,
                token_ids[first:end],
                is_behind_draft=first > 0 and slots[first] == slots[first - 1],
                shape=logits.shape,
                address=logits.data_ptr(),
            )
            first = end


def _call_one(call: _Call, stream: int) -> dict[int, InflightError]:
    processor = call.processor
    process, request_id = processor.process, processor.request.request_id
    client_id = [processor.client_id] if processor.has_client_id else []
    try:
        if processor.name == BATCHED_POST_PROCESSOR_NAME:
            client_ids = [[each] for each in client_id]
            returned = process([request_id], [call.logits], [call.token_ids], stream, *client_ids)
            (returned,) = _as_list(returned, 1)
        else:
            returned = process(request_id, call.logits, call.token_ids, stream, *client_id)
        _take(call, returned)
    except BaseException as error:  # the operator's code may raise anything, such as asyncio.CancelledError
        return _failed(call, error)
    return {}


def _call_batched(calls: Sequence[_Call], stream: int) -> dict[int, InflightError]:
    processor = calls[0].processor
    client_ids = [[call.processor.client_id for call in calls]] if processor.has_client_id else []
    try:
        returned = processor.process(
            [call.processor.request.request_id for call in calls],
            [call.logits for call in calls],
            [call.token_ids for call in calls],
            stream,
            *client_ids,
        )
        each_returned = _as_list(returned, len(calls))
    except BaseException as error:  # as in `_call_one`
        others = f"; the faulty one of this call's {len(calls)} requests is unknown, so all of them end"
        failures: dict[int, InflightError] = {}
        for call in calls:
            failures |= _failed(call, error, others if len(calls) > 1 else "", is_logged=call is calls[0])
        return failures
    failures = {}
    for call, one in zip(calls, each_returned, strict=True):
        try:
            _take(call, one)
        except Exception as error:  # a value returned by the operator's code may raise when it is used
            failures |= _failed(call, error)
    return failures


def _as_list(returned: object, count: int) -> list[object]:
    """Return the results of a batched post-processor, one per request."""
    if returned is None:
        return [None] * count
    each = list(cast(Sequence[object], returned)) if isinstance(returned, list | tuple) else []
    if len(each) != count:
        shown = f"a list of {len(each)}" if each else _shown(cast(object, returned))
        raise _WrongResult(f"returned {shown}, expected None or a list of {count} tensors")
    return each


def _take(call: _Call, returned: object) -> None:
    """Copy returned logits to the rows. Raises _WrongResult unless `returned` is None, or a tensor like the
    call's logits."""
    expected = list(call.shape)
    if call.logits.shape != call.shape or call.logits.data_ptr() != call.address:
        raise _WrongResult(
            f"left {_shown(call.logits)} in another place, expected {expected} changed in place"
        )
    if returned is None or returned is call.logits:
        return
    if not isinstance(returned, Tensor) or returned.shape != call.shape:
        raise _WrongResult(f"returned {_shown(returned)}, expected None or a tensor {expected}")
    if not returned.is_floating_point():
        raise _WrongResult(f"returned a tensor of {returned.dtype}, expected logits: floating-point numbers")
    call.logits.copy_(returned)


def _check_numbers(
    rows: Rows, indices: NDArray[np.int64], processors: Sequence[_SlotProcessor]
) -> dict[int, InflightError]:
    """Return errors for rows with a NaN or +inf logit, from which no token can be sampled. Waits for the
    device."""
    highest = as_array(select_rows(rows.logits, indices).amax(dim=-1).cpu())
    failures: dict[int, InflightError] = {}
    found: list[int] = np.flatnonzero(np.isnan(highest) | np.isposinf(highest)).tolist()
    for at in found:
        name = processors[at].request.logits_post_processor_name
        failures[int(indices[at])] = StepFailed(
            f"the logits post-processor {name!r} left a logit that is {highest[at]}, expected numbers, or -inf to "
            "ban a token"
        )
    return failures


def _failed(
    call: _Call, error: BaseException, others: str = "", is_logged: bool = True
) -> dict[int, InflightError]:
    name, request_id = call.processor.name, call.processor.request.request_id
    if is_logged:
        # For a row after a draft only at level DEBUG, as a post-processor may raise for a draft that it has
        # banned.
        level = logging.DEBUG if call.is_behind_draft else logging.WARNING
        _log.log(
            level,
            "the logits post-processor %r failed for request %d",
            name,
            request_id,
            exc_info=error,
            extra=call.processor.request.log_extra,
        )
    did = (
        str(error) if isinstance(error, _WrongResult) else f"raised {type(error).__name__}: {_text_of(error)}"
    )
    failure = StepFailed(f"the logits post-processor {name!r} {did}{others}")
    return dict.fromkeys(call.rows, failure)


def _text_of(error: BaseException) -> str:
    """Return an error's text, shortened for a message; its class may be the operator's own."""
    try:
        text = str(error)
    except BaseException as second:  # the operator's `__str__` may raise anything too
        return f"(its text raised {type(second).__name__})"
    return text if len(text) <= _MAX_ERROR_TEXT else f"{text[:_MAX_ERROR_TEXT]}…"


def _shown(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
