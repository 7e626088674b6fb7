"""How the next token is chosen from the logits: one frozen value per request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from inflight.errors import InvalidArgument

MAX_BEAM_WIDTH = 1024
MAX_RETURN_SEQUENCES = 1024
NO_REPEAT_OFF = 1 << 30
"""What TensorRT-LLM's code takes for an absent no_repeat_ngram_size; 0, as documented, means the same here."""
SMALLEST, LARGEST = 1e-10, 1e10
"""What logits may be divided by, or multiplied with; LARGEST is also the most that is added to them or taken
from them. Other numbers have no use, and float32 arithmetic with them ends in values that are no numbers."""


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """TensorRT-LLM's `SamplingConfig`. The order in which it is applied is in `inflight.decoding.pipeline`.

    Attributes:
        beam_width: Beams of a beam search; 1 samples, or is greedy. Tensor `beam_width`.
        num_return_sequences: Sampling: sequences to generate, each its own. Beams: how many of the best come
            back. None means 1, or all beams. Tensor `num_return_sequences`.
        temperature: Divides the logits, in [1e-10, 1e10]; 0 means greedy (beams: 1). Tensor `temperature`.
        top_k: Keep the k likeliest tokens; 0 keeps all, 1 is greedy. Tensor `runtime_top_k`.
        top_p: Keep the smallest set of likeliest tokens whose probability reaches p, in (0, 1]; 0 means unset.
            Applied after top_k, on the renormalized probabilities. Tensor `runtime_top_p`.
        top_p_min: Floor of a decaying top_p, in [0, 1]. Tensor `runtime_top_p_min`.
        top_p_decay: Factor of top_p for every generated token, in (0, 1]. Tensor `runtime_top_p_decay`.
        top_p_reset_id: Token that sets a decayed top_p back to its first value; -1: none. Tensor
            `runtime_top_p_reset_ids`.
        min_p: Keep tokens of at least min_p times the largest probability, in [0, 1]; 0 keeps all. Tensor `min_p`.
        random_seed: Key of the counter-based random numbers, 0 .. 2**64 - 1. The default 0 is a seed like any
            other: identical requests give identical tokens. Tensor `random_seed` (alias `seed`).
        repetition_penalty: In [1e-10, 1e10]; divides positive and multiplies negative logits of tokens seen,
            prompt included; 1 does nothing. Tensor `repetition_penalty`.
        presence_penalty: Taken once from the logits of tokens seen, prompt included; in [-1e10, 1e10]. Tensor
            `presence_penalty`.
        frequency_penalty: Taken from a token's logit for each time it was seen, prompt included; in [-1e10, 1e10].
            Tensor `frequency_penalty`.
        min_length: End ids are banned until so many tokens are generated. Tensor `min_length` (alias
            `min_tokens`).
        no_repeat_ngram_size: No n-gram of this size occurs twice, prompt included; 0 is off. Tensor
            `no_repeat_ngram_size`.
        length_penalty: A finished beam's score is its cumulative log probability divided by
            generated_length ** length_penalty, the end id counted. Tensor `len_penalty`.
        early_stopping: When a beam search with enough finished beams ends. 1: at once. 0: when no running beam
            is better at its present length. Other: when none can become better. Tensor `early_stopping`.
        beam_search_diversity_rate: Times a beam's index, added to its candidates where they are ranked; in
            [0, 1e10]. Tensor `beam_search_diversity_rate`.

    With top_k, top_p and min_p all 0 the request is greedy, whatever the temperature.
    """

    beam_width: int = 1
    num_return_sequences: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    top_p_min: float = 1e-6
    top_p_decay: float = 1.0
    top_p_reset_id: int = -1
    min_p: float = 0.0
    random_seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_length: int = 0
    no_repeat_ngram_size: int = 0
    length_penalty: float = 0.0
    early_stopping: int = 0
    beam_search_diversity_rate: float = 0.0

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return (
            self.temperature == 0.0
            or self.top_k == 1
            or (self.top_k == 0 and self.top_p == 0.0 and self.min_p == 0.0)
        )

    @property
    def uses_beams(self) -> bool:
        """Whether this is a beam search."""
        return self.beam_width > 1

    @property
    def num_sequences(self) -> int:
        """Sequences that are generated apart from one another; a beam search is one."""
        return 1 if self.uses_beams else self.num_return_sequences or 1

    @property
    def num_outputs(self) -> int:
        """Rows of a response: the beams that come back, else 1."""
        return (self.num_return_sequences or self.beam_width) if self.uses_beams else 1

    @property
    def penalizes(self) -> bool:
        """Whether tokens seen have their logits changed."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self) -> None:
        """Raise InvalidArgument naming the tensor, what came and what was expected."""
        self._validate_sampling()
        self._validate_penalties()
        self._validate_beams()

    def _validate_sampling(self) -> None:
        temperature, factor = self.temperature, f"in [{SMALLEST:g}, {LARGEST:g}]"
        is_valid = temperature == 0.0 or SMALLEST <= temperature <= LARGEST
        _check(is_valid, "temperature", f"0 (greedy), or {factor}", temperature)
        _check(self.top_k >= 0, "runtime_top_k", ">= 0 (0 keeps every token)", self.top_k)
        _check(0.0 <= self.top_p <= 1.0, "runtime_top_p", "in (0, 1], or <= 0 for unset", self.top_p)
        _check(0.0 <= self.top_p_min <= 1.0, "runtime_top_p_min", "in [0, 1]", self.top_p_min)
        _check(0.0 < self.top_p_decay <= 1.0, "runtime_top_p_decay", "in (0, 1]", self.top_p_decay)
        _check(self.top_p_reset_id >= -1, "runtime_top_p_reset_ids", ">= -1 (-1: none)", self.top_p_reset_id)
        _check(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]", self.min_p)
        _check(0 <= self.random_seed < 2**64, "random_seed", "a 64-bit unsigned integer", self.random_seed)

    def _validate_penalties(self) -> None:
        repetition, ngram_size = self.repetition_penalty, self.no_repeat_ngram_size
        factor, added = f"in [{SMALLEST:g}, {LARGEST:g}]", f"in [{-LARGEST:g}, {LARGEST:g}]"
        _check(SMALLEST <= repetition <= LARGEST, "repetition_penalty", factor, repetition)
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            _check(-LARGEST <= penalty <= LARGEST, name, added, penalty)
        _check(self.min_length >= 0, "min_length", ">= 0", self.min_length)
        _check(ngram_size >= 0, "no_repeat_ngram_size", ">= 0 (0: off)", ngram_size)

    def _validate_beams(self) -> None:
        width, returned, rate = self.beam_width, self.num_return_sequences, self.beam_search_diversity_rate
        _check(1 <= width <= MAX_BEAM_WIDTH, "beam_width", f"in [1, {MAX_BEAM_WIDTH}]", width)
        if returned is not None:
            most = width if self.uses_beams else MAX_RETURN_SEQUENCES
            which = " (beam_width)" if self.uses_beams else ""
            _check(1 <= returned <= most, "num_return_sequences", f"in [1, {most}]{which}", returned)
        _check(
            0.0 <= self.length_penalty < math.inf, "len_penalty", "a finite number >= 0", self.length_penalty
        )
        _check(self.early_stopping >= 0, "early_stopping", ">= 0", self.early_stopping)
        _check(0.0 <= rate <= LARGEST, "beam_search_diversity_rate", f"in [0, {LARGEST:g}]", rate)


def _check(holds: bool, name: str, expected: str, got: float) -> None:
    if not holds:
        raise InvalidArgument(f"{name} must be {expected}, got {got}")
