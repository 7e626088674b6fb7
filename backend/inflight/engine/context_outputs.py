"""Outputs about a prompt: logits, log probabilities and additional outputs of every position.

The logits of a whole prompt would be large, so they are computed for a slice of its rows at a time and stored on
the host, or not at all if only log probabilities are wanted. Rows without such outputs cost nothing. Used on the
loop thread.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO

import torch
from torch import Tensor

from inflight.core.request.request import Request
from inflight.core.schedule.batch import ContextChunk, ContextDetails, ScheduledBatch
from inflight.engine.additional_outputs import AdditionalOutputs, LayerOutputs
from inflight.sampling.transfer import as_array, to_list

MakeLogits = Callable[[Tensor, Tensor], Tensor]
"""A function of hidden states [rows, hidden_size] and indices of rows [n] int64, which returns these rows'
logits [n, vocab_size] float32."""

_SLICE_BYTES = 1 << 25
"""Size of a slice's logits in bytes: small compared with free device memory, large enough for efficient
kernels."""


class ContextOutputs:
    """The requests that want context outputs, by slot.

    Args:
        vocab_size: Width of a row of logits.
        is_kept: Whether this rank stores the outputs; the other ranks of the last stage only help to
            compute logits.
        additional: Computes additional outputs of rows.
    """

    def __init__(self, vocab_size: int, is_kept: bool, additional: AdditionalOutputs) -> None:
        self._is_kept = is_kept
        self._additional = additional
        self._slice_rows = max(16, _SLICE_BYTES // (4 * vocab_size))
        self._requests: dict[int, Request] = {}

    def apply(self, batch: ScheduledBatch) -> None:
        """Record the sequences started by the batch that want context outputs, and forget released slots."""
        for slot in batch.released_slots:
            self._requests.pop(slot, None)
        for start in batch.starts:
            if start.request.output.wants_context:
                self._requests[start.slot] = start.request
            else:
                self._requests.pop(start.slot, None)

    def compute(
        self,
        batch: ScheduledBatch,
        layers: LayerOutputs,
        make_logits: MakeLogits,
    ) -> dict[int, ContextDetails]:
        """Return the outputs by slot, for chunks that want them; waits for the device if there are any.

        Args:
            batch: The batch, already passed to `apply`.
            layers: Hidden states of its rows, in the order of `pack`.
            make_logits: Computes the model's logits.
        """
        details: dict[int, ContextDetails] = {}
        first_row = 0
        for chunk in batch.context:
            if chunk.wants_context:
                details[chunk.slot] = self._details(chunk, layers, first_row, make_logits)
            first_row += len(chunk.token_ids)
        return details

    def _details(
        self, chunk: ContextChunk, layers: LayerOutputs, first_row: int, make_logits: MakeLogits
    ) -> ContextDetails:
        request, hidden = self._requests[chunk.slot], layers.last
        prompt, outputs = request.input_token_ids, request.output.gathered_outputs
        # Rows after the prompt are drafts, or tokens generated before a pause.
        num_rows = min(len(chunk.token_ids), max(0, len(prompt) - chunk.start))
        rows = torch.arange(first_row, first_row + num_rows, device=hidden.device)
        following = prompt[chunk.start + 1 : chunk.start + 1 + num_rows]
        token_ids = torch.tensor(following, dtype=torch.int64, device=hidden.device)
        kept = BytesIO()  # returns its content without another copy
        log_probs: list[float] = []
        additional = [BytesIO() for _ in outputs]
        for begin in range(0, num_rows, self._slice_rows):
            of_slice = rows[begin : begin + self._slice_rows]
            logits = make_logits(hidden, of_slice) if self._needs_logits(request) else None
            if not self._is_kept:
                continue
            if logits is not None and request.output.return_context_logits:
                kept.write(as_array(logits.cpu()).data)
            if logits is not None and request.output.return_prompt_log_probs:
                log_probs += _log_probs(logits, token_ids[begin : begin + self._slice_rows])
            for output, written in zip(outputs, additional, strict=True):
                values = self._additional.values(output, layers, of_slice, logits)
                written.write(as_array(values.contiguous().cpu()).data)
        return ContextDetails(
            tuple(log_probs), kept.getvalue(), tuple(written.getvalue() for written in additional)
        )

    def _needs_logits(self, request: Request) -> bool:
        output = request.output
        needs = output.return_context_logits or output.return_prompt_log_probs
        return needs or any(map(self._additional.needs_logits, output.gathered_outputs))


def _log_probs(logits: Tensor, token_ids: Tensor) -> list[float]:
    """Return log_softmax of each row at its token; the last row of a prompt has no token."""
    logits = logits[: token_ids.shape[0]]
    return to_list(logits.log_softmax(dim=-1).gather(1, token_ids[:, None]).squeeze(1))
