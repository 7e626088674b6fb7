"""The sampling parameters of slots, and the rows of a batch's logits with their parameters.

A slot has a record of numbers, from which a batch's parameters are selected by a single index operation. It also
has the state that the steps of the pipeline have prepared. All of this is in host memory, except biases. Used
on the loop thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntFlag
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.request.request import FloatTensor, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import BeamMove, SlotStart
from inflight.errors import InflightError
from inflight.sampling.transfer import as_tensor, upload

Failures = Mapping[int, InflightError]
"""Rows that have failed alone, by index, with their errors."""


class Needs(IntFlag):
    """Features that a row needs beyond an argmax; 0 for most rows."""

    SAMPLE = 1
    HISTORY = 2
    TOP_P_RESET = 4
    DETAILS = 8
    RAW_LOGITS = 16
    CHANGES = 32  # a step of the pipeline changes the row's logits
    BANS = 64  # a step may ban every token
    GUIDE = 128
    HOST = 256  # the host must see each token before the next is sampled
    PROMPT_TABLE = 512  # the prompt may have ids beyond the vocabulary


_NUMBERS = [each.name for each in fields(SamplingConfig) if isinstance(each.default, int | float)]
_TYPES = {
    each.name: np.float64 if isinstance(each.default, float) else np.int64 for each in fields(SamplingConfig)
} | {"random_seed": np.uint64}

PARAMETERS = np.dtype(
    [
        ("needs", np.int64),
        ("steps", np.int64),  # bit i: step i of the pipeline is used
        ("sequence_index", np.int64),
        ("prompt_length", np.int64),
        ("top_p_since", np.int64),  # position from which on each generated token decays top_p
        *((name, _TYPES[name]) for name in _NUMBERS),
    ]
)
"""The dtype of a slot's, or of a row's, record. The numbers are the SamplingConfig's, except that a temperature
of 0, a top_p of 0 and a top_p_decay without top_p are stored as 1."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the pipeline: how one sampling control, or several together, changes the logits of rows that
    use it.

    Attributes:
        prepare: Returns a slot's state for this step, given its request and the logits' device; None if the
            request does not use the step.
        apply: Changes the logits of rows in place, given the indices of the rows that use the step and the
            prepared state of each. It may return rows that have failed: their requests end, unless the row comes
            after a rejected draft. An exception fails the whole batch. Only a step whose requests need the host
            may return failures.
        bans: Whether the step may ban every token of a row.
    """

    prepare: Callable[[Request, torch.device], Any]
    apply: Callable[[Rows, NDArray[np.int64], list[Any]], Failures | None]
    bans: bool = True


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A slot's request, and by the index of each step the state that the step has prepared."""

    request: Request
    prepared: dict[int, Any]


class SlotParameters:
    """The parameters of every slot.

    Attributes:
        numbers: [slots] with the dtype PARAMETERS.
        requests: [slots] the request of each slot; None: the slot is free.
        demanding: Slots whose requests need more than an argmax; may include free slots.
        steps: The steps of the pipeline, in order.
    """

    def __init__(self, num_slots: int, device: torch.device, steps: Sequence[Step] = ()) -> None:
        self.numbers: NDArray[Any] = np.zeros(num_slots, dtype=PARAMETERS)
        self.demanding: set[int] = set()
        self.steps = steps
        self.requests: list[SlotRequest | None] = [None] * num_slots
        self._device = device

    def start(self, start: SlotStart) -> None:
        """Store the parameters of a sequence that takes a slot."""
        request = start.request
        found = ((index, step.prepare(request, self._device)) for index, step in enumerate(self.steps))
        prepared = {index: value for index, value in found if value is not None}
        self.requests[start.slot] = SlotRequest(request, prepared)
        needs = _needs(request)
        needs |= Needs.CHANGES if prepared else 0
        needs |= Needs.BANS if any(self.steps[index].bans for index in prepared) else 0
        self.numbers[start.slot] = _record(start, needs, sum(1 << index for index in prepared))
        self._note_demands(start.slot)

    def release(self, slot: int) -> None:
        """Forget the request of a slot, whose sequence has ended."""
        self.requests[slot] = None

    def move(self, moves: Sequence[BeamMove]) -> None:
        """Give each slot its parent's parameters, all at once."""
        targets, parents = [move.slot for move in moves], [move.parent_slot for move in moves]
        self.numbers[targets] = self.numbers[parents]
        for slot, request in zip(targets, [self.requests[parent] for parent in parents], strict=True):
            self.requests[slot] = request
            self._note_demands(slot)

    def __getitem__(self, slot: int) -> SlotRequest:
        """Return the request and prepared state of a running slot."""
        found = self.requests[slot]
        assert found is not None, f"slot {slot} was never started"
        return found

    def _note_demands(self, slot: int) -> None:
        # HOST is checked elsewhere, as drafts set it too; a prompt table alone has no effect on sampling.
        if self.numbers["needs"][slot] & ~int(Needs.HOST | Needs.PROMPT_TABLE):
            self.demanding.add(slot)
        else:
            self.demanding.discard(slot)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of logits and their parameters; all arrays are on the host.

    Attributes:
        logits: [rows, vocab_size] float32, contiguous.
        slots: [rows] the rows' slots.
        positions: [rows] absolute position of the token to be sampled.
        numbers: [rows] with the dtype PARAMETERS.
    """

    logits: Tensor
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    numbers: NDArray[Any]

    @property
    def vocab_size(self) -> int:
        """Number of logits in a row."""
        return self.logits.shape[-1]

    def needing(self, needs: Needs) -> NDArray[np.int64]:
        """Return the indices of the rows with any of `needs`."""
        return np.flatnonzero(self.numbers["needs"] & int(needs))

    def select(self, indices: NDArray[np.int64]) -> Rows:
        """Return the rows `indices`, in that order."""
        return Rows(
            select_rows(self.logits, indices),
            self.slots[indices],
            self.positions[indices],
            self.numbers[indices],
        )

    def upload(self, values: NDArray[Any]) -> Tensor:
        """Return a copy of a host array on the logits' device."""
        return upload(values, self.logits.device)


def select_rows(tensor: Tensor, indices: NDArray[np.int64]) -> Tensor:
    """Return tensor[indices]: a view if the indices are consecutive, otherwise a copy."""
    if len(indices) and (np.diff(indices) == 1).all():
        return tensor[int(indices[0]) : int(indices[-1]) + 1]
    return tensor[upload(indices, tensor.device)]


class RawLogits:
    """The model's unchanged logits, while the pipeline changes them in place.

    Copies only rows whose logits will be changed and whose requests ask for unchanged logits.
    """

    def __init__(self, rows: Rows) -> None:
        self._logits = rows.logits
        needs = rows.numbers["needs"]
        is_saved = (needs & int(Needs.CHANGES) != 0) & (needs & int(Needs.RAW_LOGITS) != 0)
        self._indices = np.flatnonzero(is_saved)
        self._saved = select_rows(rows.logits, self._indices).clone() if len(self._indices) else None

    def select(self, indices: NDArray[np.int64]) -> Tensor:
        """Return the unchanged logits [n, vocab_size] of the rows `indices`, whose requests ask for them; not
        to be modified."""
        rows = select_rows(self._logits, indices)
        is_saved = np.isin(indices, self._indices)
        if self._saved is None or not is_saved.any():
            return rows
        places = upload(np.searchsorted(self._indices, indices[is_saved]), rows.device)
        if is_saved.all():
            return self._saved[places]
        rows = rows.clone()
        rows[upload(np.flatnonzero(is_saved), rows.device)] = self._saved[places]
        return rows

    def restore(self) -> None:
        """Restore the unchanged logits in the rows that ask for them."""
        if self._saved is not None:
            self._logits[upload(self._indices, self._logits.device)] = self._saved


def host_tensor(tensor: FloatTensor) -> Tensor:
    """Return a copy in host memory that torch may write to."""
    return as_tensor(np.frombuffer(tensor.data, dtype=np.float32).reshape(tensor.shape).copy())


def _needs(request: Request) -> Needs:
    sampling, output = request.sampling, request.output
    uses = {
        Needs.SAMPLE: not sampling.greedy and not sampling.uses_beams,
        Needs.HISTORY: request.looks_back,
        Needs.TOP_P_RESET: sampling.top_p_decay < 1.0 and sampling.top_p_reset_id >= 0,
        Needs.DETAILS: output.wants_details,
        Needs.RAW_LOGITS: output.wants_details or output.wants_context,
        Needs.GUIDE: request.guide is not None,
        Needs.HOST: request.needs_host,
        Needs.PROMPT_TABLE: request.prompt_table is not None,
    }
    needs = Needs(0)
    for need, is_used in uses.items():
        needs |= need if is_used else 0
    return needs


def _record(start: SlotStart, needs: Needs, steps: int) -> tuple[float, ...]:
    sampling, prompt_length = start.request.sampling, start.request.prompt_length
    changed = {
        "temperature": sampling.temperature or 1.0,
        "top_p": sampling.top_p or 1.0,
        "top_p_decay": sampling.top_p_decay if sampling.top_p else 1.0,
    }
    return (
        int(needs),
        steps,
        start.sequence_index,
        prompt_length,
        _after_last(sampling.top_p_reset_id, start.token_ids, prompt_length),
        *(changed[name] if name in changed else getattr(sampling, name) for name in _NUMBERS),
    )


def _after_last(token_id: int, token_ids: Sequence[int], prompt_length: int) -> int:
    """Return the position after the last generated `token_id`; if it was never generated, the prompt's length."""
    for position in range(len(token_ids) - 1, prompt_length - 1, -1):
        if token_ids[position] == token_id:
            return position + 1
    return prompt_length
