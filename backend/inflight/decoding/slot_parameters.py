"""What a slot remembers of its request: numbers by slot, so that a batch is one index operation, and the rest.

Host memory, except for biases. Random numbers and everything that is counted are made on the host; greedy rows
that want nothing else need none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.request.request import FloatTensor, Request
from inflight.core.request.sampling_config import NO_REPEAT_OFF
from inflight.core.schedule.batch import BeamMove, SlotStart
from inflight.decoding.transfer import upload


class Needs(IntFlag):
    """What a row asks for beyond an argmax; 0 for most."""

    SAMPLE = 1
    BIAS = 2
    PENALTIES = 4
    MIN_LENGTH = 8
    BAD_WORDS = 16
    NO_REPEAT = 32
    HISTORY = 64
    TOP_P_RESET = 128
    DETAILS = 256
    RAW_LOGITS = 512
    BANS = BIAS | MIN_LENGTH | BAD_WORDS | NO_REPEAT
    CHANGES = BANS | PENALTIES
    HOST = HISTORY | TOP_P_RESET | DETAILS


PARAMETERS = np.dtype(
    [
        ("needs", np.int64),
        ("sequence_index", np.int64),
        ("prompt_length", np.int64),
        ("seed", np.uint64),
        ("temperature", np.float64),  # > 0: greedy's 0 is 1 here
        ("top_k", np.int64),
        ("top_p", np.float64),  # 1: no limit
        ("top_p_min", np.float64),
        ("top_p_decay", np.float64),
        ("top_p_reset_id", np.int64),
        ("top_p_since", np.int64),  # position from which on generated tokens have made top_p smaller
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("min_length", np.int64),
        ("no_repeat_ngram_size", np.int64),
    ]
)
"""One record per slot, or per row of a batch. As in SamplingConfig, where not said otherwise."""


@dataclass(frozen=True, slots=True)
class BadWords:
    """Bad words in arrays. A word of several tokens bans the last where all the others stand before it.

    Attributes:
        single: [n] tokens that are always banned.
        last: [words] last token of each longer word.
        word: [parts] the word that a part belongs to.
        back: [parts] how many places before the row's position the part stands, 1 or more.
        token: [parts] the part's token.
    """

    single: NDArray[np.int64]
    last: NDArray[np.int64]
    word: NDArray[np.int64]
    back: NDArray[np.int64]
    token: NDArray[np.int64]

    @classmethod
    def of(cls, words: Sequence[tuple[int, ...]]) -> BadWords:
        """Sort the words of a request by length and take the longer ones apart."""
        long = [word for word in words if len(word) > 1]
        parts = [
            (index, len(word) - 1 - place, token)
            for index, word in enumerate(long)
            for place, token in enumerate(word[:-1])
        ]
        return cls(
            _ids([word[0] for word in words if len(word) == 1]),
            _ids([word[-1] for word in long]),
            *_ids(parts).reshape(-1, 3).T,
        )


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """What a slot remembers beside numbers.

    Attributes:
        request: What was asked.
        end_ids: [n].
        bad_words: Taken apart.
        bias: [vocab_size] float32 on the device.
    """

    request: Request
    end_ids: NDArray[np.int64]
    bad_words: BadWords
    bias: Tensor | None


class SlotParameters:
    """Parameters of every slot. Called by the loop thread.

    Attributes:
        numbers: [slots] of PARAMETERS.
        requests: [slots]; None: nobody has the slot.
        demanding: Slots whose requests ask for more than an argmax; of slots that nobody has, any.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.numbers = np.zeros(num_slots, dtype=PARAMETERS)
        self.requests: list[SlotRequest | None] = [None] * num_slots
        self.demanding: set[int] = set()
        self._device = device

    def start(self, start: SlotStart) -> None:
        """Remember how the sequence that takes a slot chooses its tokens."""
        request = start.request
        self.numbers[start.slot] = _numbers(request, start.sequence_index, start.token_ids)
        self._note_demands(start.slot)
        bias = request.embedding_bias
        self.requests[start.slot] = SlotRequest(
            request,
            _ids(request.end_ids),
            BadWords.of(request.bad_words),
            None if bias is None else upload(float_tensor(bias).numpy(), self._device),
        )

    def release(self, slot: int) -> None:
        """Forget a sequence."""
        self.requests[slot] = None

    def move(self, moves: Sequence[BeamMove]) -> None:
        """Each slot takes over its parent's parameters, all at once."""
        targets, parents = [move.slot for move in moves], [move.parent_slot for move in moves]
        self.numbers[targets] = self.numbers[parents]
        for slot, request in zip(targets, [self.requests[parent] for parent in parents], strict=True):
            self.requests[slot] = request
            self._note_demands(slot)

    def _note_demands(self, slot: int) -> None:
        if self.numbers["needs"][slot]:
            self.demanding.add(slot)
        else:
            self.demanding.discard(slot)

    def of(self, slot: int) -> SlotRequest:
        """What a running slot remembers beside numbers."""
        found = self.requests[slot]
        assert found is not None, f"slot {slot} was never started"
        return found


def float_tensor(tensor: FloatTensor) -> Tensor:
    """A copy in host memory that torch may write to."""
    return torch.from_numpy(np.frombuffer(tensor.data, dtype=np.float32).reshape(tensor.shape).copy())


def _ids(values: Sequence) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _numbers(request: Request, sequence_index: int, token_ids: Sequence[int]) -> tuple:
    sampling, prompt_length = request.sampling, request.prompt_length
    return (
        int(_needs(request)),
        sequence_index,
        prompt_length,
        sampling.random_seed,
        sampling.temperature or 1.0,
        sampling.top_k,
        sampling.top_p or 1.0,
        sampling.top_p_min,
        sampling.top_p_decay if sampling.top_p else 1.0,
        sampling.top_p_reset_id,
        _after_last(sampling.top_p_reset_id, token_ids, prompt_length),
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.min_length,
        sampling.no_repeat_ngram_size,
    )


def _needs(request: Request) -> Needs:
    sampling, output = request.sampling, request.output
    no_repeat = 0 < sampling.no_repeat_ngram_size < NO_REPEAT_OFF
    long_words = any(len(word) > 1 for word in request.bad_words)
    asked = {
        Needs.SAMPLE: not sampling.greedy and not sampling.uses_beams,
        Needs.BIAS: request.embedding_bias is not None,
        Needs.PENALTIES: sampling.penalizes,
        Needs.MIN_LENGTH: sampling.min_length > 0 and bool(request.end_ids),
        Needs.BAD_WORDS: bool(request.bad_words),
        Needs.NO_REPEAT: no_repeat,
        Needs.HISTORY: sampling.penalizes or no_repeat or long_words,
        Needs.TOP_P_RESET: sampling.top_p_decay < 1.0 and sampling.top_p_reset_id >= 0,
        Needs.DETAILS: output.wants_details,
        Needs.RAW_LOGITS: output.wants_details or output.wants_context,
    }
    needs = Needs(0)
    for need, is_asked in asked.items():
        needs |= need if is_asked else 0
    return needs


def _after_last(token_id: int, token_ids: Sequence[int], prompt_length: int) -> int:
    """Position after the last generated `token_id`; without one, of the first generated token."""
    for position in range(len(token_ids) - 1, prompt_length - 1, -1):
        if token_ids[position] == token_id:
            return position + 1
    return prompt_length
