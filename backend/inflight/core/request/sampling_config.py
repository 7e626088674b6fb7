"""The sampling controls of a request, in one frozen value.

Every sampling control is declared here, once for all protocols. Its field has the type and the neutral value; the
declaration adds the range, the meaning, and the control's names as a tensor, in OpenAI bodies, in the Executor
API, in the client and in the playground where they differ from the field's name. `inflight.control_files`
writes the generated files from these declarations. The effect of a control on logits is a step of
`inflight.sampling.pipeline`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from inflight.core.request.control import BodyField, Control, ExecutorField, Range, Setting
from inflight.errors import InvalidArgument, Name

MAX_BEAM_WIDTH = 1024
MAX_RETURN_SEQUENCES = 1024
MAX_INT32 = (1 << 31) - 1
NO_REPEAT_OFF = 1 << 30
"""TensorRT-LLM's internal value for an absent no_repeat_ngram_size; like the documented 0, it means off."""
SMALLEST, LARGEST = 1e-10, 1e10
"""Bounds of a factor or divisor of logits. LARGEST also bounds numbers that are added or subtracted. Numbers
outside of these bounds have no use, and in float32 lead to infinity or NaN."""

_T = TypeVar("_T")
_P = ParamSpec("_P")


def _within(low: float, high: float) -> Range:
    return Range(f"in [{low:g}, {high:g}]", lambda value: low <= value <= high)


def _at_least(low: int, meaning: str = "") -> Range:
    return Range(f">= {low}{meaning}", lambda value: value >= low)


_SHARE, _FACTOR, _ADDED = _within(0.0, 1.0), _within(SMALLEST, LARGEST), _within(-LARGEST, LARGEST)
_POSITIVE_SHARE = Range("in (0, 1]", lambda value: 0.0 < value <= 1.0)
_POSITIVE = Range("> 0", lambda value: value > 0)
_SEED = Range("a 64-bit unsigned integer", lambda seed: 0 <= seed < 1 << 64)
_ANY = Range("", lambda value: True)
_TOKEN_IDS = Range("token ids", lambda value: True)  # `check_token_ids` knows the vocabulary


def _declaring(control: Callable[_P, Control]) -> Callable[Concatenate[_T, _P], _T]:
    """Return a function that declares a field from its neutral value and the control's arguments."""

    def declare(neutral: _T, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return field(default=neutral, metadata={"control": control(*args, **kwargs)})

    return declare


_declare = _declaring(Control)

_CHOICE, _REPETITION = "Choice of tokens", "Repetition"


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """TensorRT-LLM's `SamplingConfig`. Controls that limit the tokens to sample from apply in order of
    declaration.

    A control's `meaning` describes its effect; `inflight.sampling.pipeline` has the order of all controls.
    `num_return_sequences` None means 1, or for a beam search all beams. The default 0 of `random_seed` is an
    ordinary seed: identical requests give identical tokens. If no control with `draws` is set, the request is
    greedy, whatever the temperature.

    Once a beam search has beam_width finished beams, `early_stopping` decides when the search ends: 1, at once; 0,
    when no running beam has a better score at its current length; other values, when no running beam can reach a
    better score. The score of a finished beam is its cumulative log probability divided by generated_length **
    length_penalty, where the length includes the end id.
    """

    beam_width: int = _declare(
        1,
        "INT32",
        _within(1, MAX_BEAM_WIDTH),
        "number of beams of a beam search; 1: no beam search",
        example=4,
        body=BodyField(of_openai=True, is_number=False, name="n"),
        executor=ExecutorField(_at_least(1), "1 by default"),
        on_command_line=True,
    )
    num_return_sequences: int | None = _declare(
        None,
        "INT32",
        _ANY,  # checked beside beam_width
        "number of sequences to sample; in a beam search, number of best beams to return",
        example=2,
        body=BodyField(of_openai=True, is_number=False, name="n"),
        executor=ExecutorField(
            _at_least(1), "1 by default; in a beam search, the default is the number of beams"
        ),
    )
    temperature: float = _declare(
        1.0,
        "FP32",
        Range(f"0 (greedy), or {_FACTOR.text}", lambda value: value == 0.0 or _FACTOR.contains(value)),
        "number by which the logits are divided; 0: greedy decoding; 1 by default",
        example=0.5,
        text_names=("temperature", "sampling_param_temperature"),
        body=BodyField(
            1.0,
            {"ge": 0},
            of_openai=True,
            meaning="the logits are divided by this number. With 0, the likeliest token is always taken",
        ),
        executor=ExecutorField(_at_least(0), "1 by default; 0 makes decoding greedy"),
        on_command_line=True,
        setting=Setting(
            _CHOICE, "0 always takes the likeliest token; the higher, the more often others are chosen."
        ),
    )
    top_n_sigma: float = _declare(
        0.0,
        "FP32",
        _within(0.0, LARGEST),
        "keep tokens whose logit is at most this many standard deviations below the highest logit; 0: keep "
        "all tokens",
        example=1.5,
        draws=True,
        body=BodyField(
            0.0,
            {"ge": 0},
            meaning="tokens are kept if their logit is at most this many standard deviations below the highest "
            "logit. With 0, all tokens are kept",
        ),
        on_command_line=True,
        setting=Setting(
            _CHOICE,
            "Tokens whose logits are more than this many standard deviations below the highest are left out.",
        ),
    )
    top_k: int = _declare(
        0,
        "INT32",
        _at_least(0, " (0 keeps every token)"),
        "number of likeliest tokens to keep; 0: keep all tokens",
        tensor="runtime_top_k",
        example=50,
        draws=True,
        text_names=("top_k", "sampling_param_top_k"),
        body=BodyField(
            0,
            {"ge": -1, "le": MAX_INT32},
            meaning="number of likeliest tokens that are kept. With 0 or −1, all tokens are kept",
        ),
        executor=ExecutorField(
            _at_least(0),
            "0 by default; 0 keeps all tokens if top_p or min_p is set, and makes decoding greedy if neither is "
            "set",
        ),
        on_command_line=True,
        setting=Setting(_CHOICE, "The choice is among this many of the likeliest tokens.", usual="all"),
    )
    top_p: float = _declare(
        0.0,
        "FP32",
        Range("in (0, 1], or <= 0 for unset", _SHARE.contains),
        "keep the likeliest tokens, in order, until their total probability reaches this number in (0, 1]; "
        "<= 0: unset",
        tensor="runtime_top_p",
        example=0.875,
        is_off=lambda p: p <= 0.0,
        draws=True,
        text_names=("top_p", "sampling_param_top_p"),
        body=BodyField(
            1.0,
            {"ge": 0, "le": 1},
            of_openai=True,
            meaning="tokens are kept, the likeliest first, until the total probability of the kept tokens reaches "
            "this number. The other tokens are left out",
        ),
        executor=ExecutorField(_POSITIVE_SHARE, "unset by default"),
        on_command_line=True,
        setting=Setting(
            _CHOICE, "The choice is among the likeliest tokens that have this probability together."
        ),
    )
    top_p_min: float = _declare(
        1e-6,
        "FP32",
        _SHARE,
        "smallest value to which top_p_decay can reduce top_p; 1e-6 by default",
        tensor="runtime_top_p_min",
        example=0.25,
        text_names=("top_p_min",),
        executor=ExecutorField(_SHARE, "1e-6 by default"),
    )
    top_p_decay: float = _declare(
        1.0,
        "FP32",
        _POSITIVE_SHARE,
        "factor by which top_p is multiplied after each token; 1 by default",
        tensor="runtime_top_p_decay",
        example=0.5,
        looks_back=True,
        text_names=("top_p_decay",),
        executor=ExecutorField(_POSITIVE_SHARE, "1 by default"),
    )
    top_p_reset_id: int = _declare(
        -1,
        "INT32",
        _at_least(-1, " (-1: none)"),
        "id of a token after which top_p has its initial value again; -1: none",
        tensor="runtime_top_p_reset_ids",
        example=3,
        text_names=("top_p_reset_ids",),
        executor=ExecutorField(_at_least(0), "none by default", name="top_p_reset_ids"),
    )
    min_p: float = _declare(
        0.0,
        "FP32",
        _SHARE,
        "keep tokens whose probability is at least this number times the largest probability; 0: keep all "
        "tokens",
        example=0.0625,
        draws=True,
        body=BodyField(
            0.0,
            {"ge": 0, "le": 1},
            meaning="tokens are kept if their probability is at least this number times the largest probability. "
            "With 0, all tokens are kept",
        ),
        executor=ExecutorField(_SHARE, "0 by default"),
        on_command_line=True,
        setting=Setting(
            _CHOICE, "Tokens with less than this share of the likeliest token’s probability are left out."
        ),
    )
    random_seed: int = _declare(
        0,
        "UINT64",
        _SEED,
        "seed of the random numbers; identical requests with the same seed get the same tokens; 0 by default",
        example=11,
        text_names=("seed", "random_seed", "sampling_param_seed"),
        aliases=("seed",),
        body=BodyField(of_openai=True, is_number=False, name="seed"),
        executor=ExecutorField(
            _SEED,
            "0 by default; equal requests with equal seeds get equal tokens",
            name="seed",
            aliases=("random_seed",),
        ),
        client="seed",
        on_command_line=True,
        setting=Setting(
            _CHOICE, "The same seed and the same request give the same answer again.", usual="random"
        ),
    )
    allowed_token_ids: tuple[int, ...] = _declare(
        (),
        "INT32",
        _TOKEN_IDS,
        "ids of the tokens that may be generated, including end ids; every other token is banned; empty: no "
        "token is banned",
        example=(4, 9, 4),
        bans=True,
        body=BodyField(is_number=False),
    )
    logit_bias_ids: tuple[int, ...] = _declare(
        (),
        "INT32",
        _TOKEN_IDS,
        "ids of tokens that get a bias; if an id occurs twice, its biases are added",
        example=(4, 9),
        body=BodyField(of_openai=True, is_number=False, name="logit_bias"),
        client=None,
    )
    logit_bias_values: tuple[float, ...] = _declare(
        (),
        "FP32",
        Range("finite numbers, or -inf to ban a token", lambda value: value < math.inf),
        "for each id in logit_bias_ids, a bias that is added to the token's logit; -inf bans the token",
        example=(1.5, -math.inf),
        bans=True,
        body=BodyField(of_openai=True, is_number=False, name="logit_bias"),
        client=None,
    )
    repetition_penalty: float = _declare(
        1.0,
        "FP32",
        _FACTOR,
        "number for tokens that the prompt or the output already has; their positive logits are divided by "
        "it, and their negative logits are multiplied by it; 1: no penalty",
        example=1.125,
        looks_back=True,
        body=BodyField(
            1.0,
            {"gt": 0},
            meaning="a number above 1 makes tokens less likely if the prompt or the answer already has them. "
            "A positive logit of such a token is divided by the number, and a negative logit is multiplied by it. "
            "The number 1 has no effect",
        ),
        executor=ExecutorField(_POSITIVE, "1 by default; also applies to tokens of the prompt"),
        on_command_line=True,
        setting=Setting(
            _REPETITION, "Above 1, tokens of the prompt and of the answer become less likely to come again."
        ),
    )
    presence_penalty: float = _declare(
        0.0,
        "FP32",
        _ADDED,
        "number subtracted once from the logit of each token that the prompt or the output already has; 0: "
        "no penalty",
        example=0.5,
        looks_back=True,
        text_names=("presence_penalty", "sampling_param_presence_penalty"),
        body=BodyField(
            of_openai=True,
            meaning="this number is subtracted once from the logit of each token that the prompt or the answer "
            "already has",
        ),
        executor=ExecutorField(_ANY, "0 by default; also applies to tokens of the prompt"),
        on_command_line=True,
        setting=Setting(
            _REPETITION,
            "Tokens become less likely once the prompt or the answer has used them, however often.",
        ),
    )
    frequency_penalty: float = _declare(
        0.0,
        "FP32",
        _ADDED,
        "number subtracted from a token's logit for each occurrence of the token in the prompt and in the "
        "output so far; 0: no penalty",
        example=0.5,
        looks_back=True,
        text_names=("frequency_penalty", "sampling_param_frequency_penalty"),
        body=BodyField(
            of_openai=True,
            meaning="this number is subtracted from a token's logit for each occurrence of the token in the "
            "prompt and in the answer so far",
        ),
        executor=ExecutorField(_ANY, "0 by default; also applies to tokens of the prompt"),
        on_command_line=True,
        setting=Setting(
            _REPETITION, "Tokens become less likely each time that the prompt or the answer has used them."
        ),
    )
    min_length: int = _declare(
        0,
        "INT32",
        _at_least(0),
        "number of tokens that must be generated before an end id can be generated; 0 by default",
        example=2,
        bans=True,
        text_names=("min_tokens", "min_length"),
        aliases=("min_tokens",),
        body=BodyField(
            0,
            {"ge": 0, "le": MAX_INT32},
            meaning="minimum number of tokens to generate. Before this number is reached, end ids are banned, and "
            "a stop string does not end the output. In a beam search, the minimum applies to every beam",
            name="min_tokens",
        ),
        executor=ExecutorField(_at_least(0), "1 by default", name="min_tokens", aliases=("min_length",)),
        client_aliases=("min_tokens",),
        ends_answer=True,
        on_command_line=True,
    )
    no_repeat_ngram_size: int = _declare(
        0,
        "INT32",
        _at_least(0, " (0: off)"),
        "length n of n-grams; an n-gram that the prompt or the output already has is not generated again; 0 "
        "or 2**30: off",
        example=3,
        is_off=lambda size: size >= NO_REPEAT_OFF,
        looks_back=True,
        bans=True,
        body=BodyField(
            0,
            {"ge": 0, "le": MAX_INT32},
            meaning="length n of n-grams. The model cannot generate an n-gram that the prompt or the answer "
            "already has. With 0 or 2**30, there is no such rule",
        ),
        executor=ExecutorField(_at_least(0), "off by default; 0 and 1 << 30 mean off"),
        on_command_line=True,
    )
    length_penalty: float = _declare(
        0.0,
        "FP32",
        Range("a finite number >= 0", lambda penalty: 0.0 <= penalty < math.inf),
        "a beam's length is raised to this power, and the beam's score is its log probability divided by the "
        "result; 0 by default",
        tensor="len_penalty",
        example=0.5,
        text_names=("length_penalty",),
        body=BodyField(
            1.0,
            {"ge": 0},
            meaning="a beam's length is raised to this power. The beam's score is its log probability divided "
            "by the result",
        ),
        executor=ExecutorField(_at_least(0), "0 by default"),
        client_aliases=("len_penalty",),
        on_command_line=True,
    )
    early_stopping: int = _declare(
        0,
        "INT32",
        _at_least(0),
        "determines when to end a beam search in which beam_width beams have finished. 1: at once; 0: as soon "
        "as no running beam has a score among the beam_width best; other values: as soon as no running beam "
        "can still reach such a score",
        example=2,
        other_dtypes=("BOOL",),
        body=BodyField(is_number=False),
        executor=ExecutorField(
            _at_least(0), "1 by default: a beam search ends once enough beams have finished"
        ),
    )
    beam_search_diversity_rate: float = _declare(
        0.0,
        "FP32",
        _within(0.0, LARGEST),
        "in a beam search, this number times a beam's index is added to the scores of the tokens that may "
        "continue the beam; 0 by default",
        example=0.5,
        executor=ExecutorField(_at_least(0), "0 by default"),
    )

    @property
    def greedy(self) -> bool:
        """Whether the request is greedy: the most likely token is always chosen."""
        return self.temperature == 0.0 or self.top_k == 1 or not any(self.uses(name) for name in DRAWING)

    @property
    def uses_beams(self) -> bool:
        """Whether the request is a beam search."""
        return self.beam_width > 1

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are generated independently; a beam search is one."""
        return 1 if self.uses_beams else self.num_return_sequences or 1

    @property
    def num_outputs(self) -> int:
        """Number of outputs in a response: the returned beams of a beam search, otherwise 1."""
        return (self.num_return_sequences or self.beam_width) if self.uses_beams else 1

    @property
    def penalizes(self) -> bool:
        """Whether a repetition, presence or frequency penalty is in effect."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def looks_back(self) -> bool:
        """Whether the device needs all tokens so far to sample the next one."""
        return any(self.uses(name) for name in _LOOKING_BACK)

    @property
    def needs_host(self) -> bool:
        """Whether the host must see each token before the next one is sampled.

        The host sends the device the earlier tokens for penalties, ranks beams, and checks whether the candidates
        that the device keeps were enough for a top_p without top_k.
        """
        return (
            self.uses_beams
            or self.looks_back
            or (0.0 < self.top_p < 1.0 and self.top_k == 0 and not self.greedy)
        )

    def uses(self, name: str) -> bool:
        """Whether the control `name` has an effect."""
        value = getattr(self, name)
        return value != NEUTRAL[name] and not CONTROLS[name].is_off(value)

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidArgument with the tensor, its value and the expected values if a control is not valid."""
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name)
            if value != neutral:
                _check(CONTROLS[name], value, vocab_size)
        returned, width = self.num_return_sequences, self.beam_width
        most = width if self.uses_beams else MAX_RETURN_SEQUENCES
        if returned is not None and not 1 <= returned <= most:
            which = (" (", Name("beam_width"), ")") if self.uses_beams else ()
            raise InvalidArgument(
                Name("num_return_sequences"), f" must be in [1, {most}]", *which, f", got {returned}"
            )
        if len(self.logit_bias_ids) != len(self.logit_bias_values):
            raise InvalidArgument(
                Name("logit_bias_ids"),
                f" has {len(self.logit_bias_ids)} token ids and ",
                Name("logit_bias_values"),
                f" {len(self.logit_bias_values)} values: send one value for each id",
            )


CONTROLS: dict[str, Control] = {
    each.name: each.metadata["control"].named(each.name) for each in fields(SamplingConfig)
}
"""The controls by the names of SamplingConfig's fields."""

NEUTRAL: dict[str, Any] = {each.name: each.default for each in fields(SamplingConfig)}
"""The neutral values, with which no control has an effect."""

DRAWING = [name for name, control in CONTROLS.items() if control.draws]
"""The controls that limit the tokens to sample from, in the order in which they apply."""
_LOOKING_BACK = [name for name, control in CONTROLS.items() if control.looks_back]


def check_token_ids(tensor: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raise InvalidArgument, naming `tensor`, unless all its token ids (at least one) are in [0, vocab_size)."""
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidArgument(
            Name(tensor),
            f" must be in [0, {vocab_size - 1}], got {wrong} at position {token_ids.index(wrong)}",
        )


def _check(control: Control, value: Any, vocab_size: int) -> None:
    if control.range is _TOKEN_IDS:
        check_token_ids(control.tensor, value, vocab_size)
        return
    several = isinstance(value, tuple)
    values = cast(
        "tuple[Any, ...]", value if several else (value,)
    )  # pyright does not know the elements' type
    for position, each in enumerate(values):
        if not control.range.contains(each):
            where = f" at position {position}" if several else ""
            raise InvalidArgument(Name(control.tensor), f" must be {control.range.text}, got {each}{where}")
