"""How the next token is chosen from the logits: one frozen value per request.

Every sampling control is declared here, once: its field has the type and the neutral value, and beside it stand
its tensor, its range and what it needs. How it changes logits is a step of `inflight.sampling.pipeline`, and not
part of the field, because front ends read and check controls without torch. Temperature, top_k, top_p and min_p
have no step: together they decide which tokens are drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

from inflight.errors import InvalidArgument

MAX_BEAM_WIDTH = 1024
MAX_RETURN_SEQUENCES = 1024
NO_REPEAT_OFF = 1 << 30
"""What TensorRT-LLM's code takes for an absent no_repeat_ngram_size; 0, as documented, means the same here."""
SMALLEST, LARGEST = 1e-10, 1e10
"""What logits may be divided by, or multiplied with; LARGEST is also the most that is added to them or taken
from them. Other numbers have no use, and float32 arithmetic with them ends in values that are no numbers."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a control may have, or if it has several, each of them may be.

    Attributes:
        text: For errors: "in [0, 1]".
        contains: Whether a value is one of them; a NaN never is.
    """

    text: str
    contains: Callable[[float], bool]


def _within(low: float, high: float) -> Range:
    return Range(f"in [{low:g}, {high:g}]", lambda value: low <= value <= high)


def _at_least(low: int, meaning: str = "") -> Range:
    return Range(f">= {low}{meaning}", lambda value: value >= low)


_SHARE, _FACTOR, _ADDED = _within(0.0, 1.0), _within(SMALLEST, LARGEST), _within(-LARGEST, LARGEST)
_TOKEN_IDS = Range("token ids", lambda value: True)  # `check_token_ids` knows the vocabulary


@dataclass(frozen=True, slots=True)
class Control:
    """What is known of a sampling control beside its type and its neutral value, which its field's default is.

    Attributes:
        tensor: The tensor that it comes by.
        range: Its values.
        is_off: Whether a value asks for nothing although it is not the neutral one.
        looks_back: Whether the device then needs the tokens so far. The host writes them, and so has to see them.
        bans: Whether it may leave a sequence without a token to go on with.
    """

    tensor: str
    range: Range
    is_off: Callable[[Any], bool] = lambda value: False
    looks_back: bool = False
    bans: bool = False


def _declare(
    neutral: _T,
    tensor: str,
    values: Range,
    is_off: Callable[[Any], bool] = lambda value: False,
    looks_back: bool = False,
    bans: bool = False,
) -> _T:
    """A field of SamplingConfig that says all of its control."""
    return field(default=neutral, metadata={"control": Control(tensor, values, is_off, looks_back, bans)})


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """TensorRT-LLM's `SamplingConfig`. The order in which it is applied is in `inflight.sampling.pipeline`.

    Attributes:
        beam_width: Beams of a beam search; 1 samples, or is greedy.
        num_return_sequences: Sampling: sequences to generate, each its own. Beams: how many of the best come
            back. None means 1, or all beams.
        temperature: Divides the logits; 0 means greedy (beams: 1).
        top_k: Keep the k likeliest tokens; 0 keeps all, 1 is greedy.
        top_p: Keep the smallest set of likeliest tokens whose probability reaches p; 0 means unset. Applied after
            top_k, on the renormalized probabilities.
        top_p_min: Floor of a decaying top_p.
        top_p_decay: Factor of top_p for every generated token.
        top_p_reset_id: Token that sets a decayed top_p back to its first value; -1: none.
        min_p: Keep tokens of at least min_p times the largest probability; 0 keeps all.
        random_seed: Key of the counter-based random numbers. The default 0 is a seed like any other: identical
            requests give identical tokens.
        allowed_token_ids: The only tokens that may come, end ids among them; empty: all may.
        logit_bias_ids: Tokens whose logits are changed. What a token gets that is named twice adds up.
        logit_bias_values: What is added to the logit of each of `logit_bias_ids`; -inf bans the token.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen, prompt included.
        presence_penalty: Taken once from the logits of tokens seen, prompt included.
        frequency_penalty: Taken from a token's logit for each time it was seen, prompt included.
        min_length: End ids are banned until so many tokens are generated.
        no_repeat_ngram_size: No n-gram of this size occurs twice, prompt included; 0 is off.
        length_penalty: A finished beam's score is its cumulative log probability divided by
            generated_length ** length_penalty, the end id counted.
        early_stopping: When a beam search with enough finished beams ends. 1: at once. 0: when no running beam
            is better at its present length. Other: when none can become better.
        beam_search_diversity_rate: Times a beam's index, added to its candidates where they are ranked.

    With top_k, top_p and min_p all 0 the request is greedy, whatever the temperature.
    """

    beam_width: int = _declare(1, "beam_width", _within(1, MAX_BEAM_WIDTH))
    num_return_sequences: int | None = _declare(
        None,
        "num_return_sequences",
        Range("", lambda value: True),  # checked beside beam_width
    )
    temperature: float = _declare(
        1.0,
        "temperature",
        Range(f"0 (greedy), or {_FACTOR.text}", lambda value: value == 0.0 or _FACTOR.contains(value)),
    )
    top_k: int = _declare(0, "runtime_top_k", _at_least(0, " (0 keeps every token)"))
    top_p: float = _declare(
        0.0,
        "runtime_top_p",
        Range("in (0, 1], or <= 0 for unset", _SHARE.contains),
        is_off=lambda p: p <= 0.0,
    )
    top_p_min: float = _declare(1e-6, "runtime_top_p_min", _SHARE)
    top_p_decay: float = _declare(
        1.0, "runtime_top_p_decay", Range("in (0, 1]", lambda decay: 0.0 < decay <= 1.0), looks_back=True
    )
    top_p_reset_id: int = _declare(-1, "runtime_top_p_reset_ids", _at_least(-1, " (-1: none)"))
    min_p: float = _declare(0.0, "min_p", _SHARE)
    random_seed: int = _declare(
        0, "random_seed", Range("a 64-bit unsigned integer", lambda seed: 0 <= seed < 1 << 64)
    )
    allowed_token_ids: tuple[int, ...] = _declare((), "allowed_token_ids", _TOKEN_IDS, bans=True)
    logit_bias_ids: tuple[int, ...] = _declare((), "logit_bias_ids", _TOKEN_IDS)
    logit_bias_values: tuple[float, ...] = _declare(
        (),
        "logit_bias_values",
        Range("finite numbers, or -inf to ban a token", lambda value: value < math.inf),
        bans=True,
    )
    repetition_penalty: float = _declare(1.0, "repetition_penalty", _FACTOR, looks_back=True)
    presence_penalty: float = _declare(0.0, "presence_penalty", _ADDED, looks_back=True)
    frequency_penalty: float = _declare(0.0, "frequency_penalty", _ADDED, looks_back=True)
    min_length: int = _declare(0, "min_length", _at_least(0), bans=True)
    no_repeat_ngram_size: int = _declare(
        0,
        "no_repeat_ngram_size",
        _at_least(0, " (0: off)"),
        is_off=lambda size: size >= NO_REPEAT_OFF,
        looks_back=True,
        bans=True,
    )
    length_penalty: float = _declare(
        0.0, "len_penalty", Range("a finite number >= 0", lambda penalty: 0.0 <= penalty < math.inf)
    )
    early_stopping: int = _declare(0, "early_stopping", _at_least(0))
    beam_search_diversity_rate: float = _declare(0.0, "beam_search_diversity_rate", _within(0.0, LARGEST))

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

    @property
    def looks_back(self) -> bool:
        """Whether the device needs the tokens so far to choose the next one."""
        return any(self.uses(name) for name in _LOOKING_BACK)

    @property
    def needs_host(self) -> bool:
        """Whether the host has to see a token before the next one is chosen.

        It writes what is looked back at, ranks beams, and finds out whether a top_p alone was reached by few
        tokens.
        """
        return (
            self.uses_beams
            or self.looks_back
            or (0.0 < self.top_p < 1.0 and self.top_k == 0 and not self.greedy)
        )

    def uses(self, name: str) -> bool:
        """Whether the control `name` has a value that asks for something."""
        value = getattr(self, name)
        return value != _NEUTRAL[name] and not CONTROLS[name].is_off(value)

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidArgument naming the tensor, what came and what was expected."""
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name)
            if value != neutral:
                _check(CONTROLS[name], value, vocab_size)
        returned, width = self.num_return_sequences, self.beam_width
        most = width if self.uses_beams else MAX_RETURN_SEQUENCES
        if returned is not None and not 1 <= returned <= most:
            which = " (beam_width)" if self.uses_beams else ""
            raise InvalidArgument(f"num_return_sequences must be in [1, {most}]{which}, got {returned}")
        if len(self.logit_bias_ids) != len(self.logit_bias_values):
            raise InvalidArgument(
                f"logit_bias_ids has {len(self.logit_bias_ids)} token ids and logit_bias_values "
                f"{len(self.logit_bias_values)} values: send one value for each id"
            )


CONTROLS: dict[str, Control] = {each.name: each.metadata["control"] for each in fields(SamplingConfig)}
"""By the names of SamplingConfig's fields."""

_NEUTRAL = {each.name: each.default for each in fields(SamplingConfig)}
_LOOKING_BACK = [name for name, control in CONTROLS.items() if control.looks_back]


def check_token_ids(tensor: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raise InvalidArgument about `tensor` if one of its token ids, of which there is one at least, is none."""
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidArgument(
            f"{tensor} must be in [0, {vocab_size - 1}], got {wrong} at position {token_ids.index(wrong)}"
        )


def _check(control: Control, value: Any, vocab_size: int) -> None:
    if control.range is _TOKEN_IDS:
        check_token_ids(control.tensor, value, vocab_size)
        return
    several = isinstance(value, tuple)
    values = cast("tuple[Any, ...]", value if several else (value,))  # pyright knows a tuple, and not of what
    for position, each in enumerate(values):
        if not control.range.contains(each):
            where = f" at position {position}" if several else ""
            raise InvalidArgument(f"{control.tensor} must be {control.range.text}, got {each}{where}")
