"""Completes the receipt of one request from its results and the engine's part. One thread at a time."""

from __future__ import annotations

import msgspec

from inflight.core.request.request import Request
from inflight.core.request.response import SequenceResult
from inflight.core.request.stop import FinishReason
from inflight.prompt import ReplyOptions
from inflight.receipts.document import (
    FORMAT,
    NO_TEXT,
    EnginePart,
    OutputForm,
    Receipt,
    finished,
    request_form,
    why_not_rerun,
)

_Row = tuple[list[int], FinishReason]
"""The tokens and the finish reason of a sequence or beam so far."""


class ReceiptWriter:
    """The outputs of a request so far, and its receipt after the last one.

    Args:
        request: The request.
        options: Options of its reply.
    """

    def __init__(self, request: Request, options: ReplyOptions = NO_TEXT) -> None:
        self._request = request
        self._options = options
        self._rows: dict[int, list[_Row]] = {}  # by sequence index
        self._num_ended = 0
        self._part = ""

    def add(self, result: SequenceResult, part: str | None, is_last: bool) -> None:
        """Add a result as the client gets it: cut at a stop string.

        Args:
            result: The result.
            part: The engine's part of the receipt, if the engine's result has it.
            is_last: Whether this is the sequence's last result.
        """
        self._part = part or self._part
        self._num_ended += is_last
        before = self._rows.get(result.sequence_index)
        rows: list[_Row] = []
        for row, (ids, count) in enumerate(zip(result.output_token_ids, result.num_output_tokens)):
            tokens = [] if before is None or result.is_cumulative else before[row][0]
            tokens += ids[len(ids) - count :]
            rows.append((tokens, result.finish_reasons[row]))
        self._rows[result.sequence_index] = rows

    @property
    def is_complete(self) -> bool:
        """Whether all sequences have ended, and the engine has made its part."""
        return bool(self._part) and self._num_ended == self._request.sampling.num_sequences

    def write(self) -> str:
        """Return the receipt as JSON; raise InvalidArgument if it cannot be signed."""
        part = msgspec.json.decode(self._part, type=EnginePart)
        rows = [row for index in sorted(self._rows) for row in self._rows[index]]
        receipt = Receipt(
            format=FORMAT,
            software=part.software,
            model=part.model,
            engine=part.engine,
            request=request_form(self._request, self._options, part.adapter),
            outputs=tuple(
                OutputForm(token_ids=tuple(ids), finish_reason=reason.name) for ids, reason in rows
            ),
            cannot_rerun=why_not_rerun(self._request),
        )
        return finished(receipt, part.key_file)
