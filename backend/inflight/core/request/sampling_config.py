"""How the next token is chosen from the logits: one frozen value per request.

Every sampling control is declared here, once, for every protocol: its field has the type and the neutral value,
and beside it stand its range, its meaning, and what tensors, bodies, Executor, client and playground call it.
`inflight.control_files` writes from this what those need as files. How a control changes logits is a step of
`inflight.sampling.pipeline`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

from inflight.errors import InvalidArgument

MAX_BEAM_WIDTH = 1024
MAX_RETURN_SEQUENCES = 1024
MAX_INT32 = (1 << 31) - 1
NO_REPEAT_OFF = 1 << 30
"""What TensorRT-LLM's code takes for an absent no_repeat_ngram_size; 0, as documented, means the same here."""
SMALLEST, LARGEST = 1e-10, 1e10
"""What logits may be divided by, or multiplied with; LARGEST is also the most that is added to them or taken
from them. Other numbers have no use, and float32 arithmetic with them ends in infinity or NaN."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a control may have, or if it has several, each of them may be.

    Attributes:
        text: For errors: "in [0, 1]".
        contains: Whether a value is one of them; a NaN never is.
    """

    text: str
    contains: Callable[[Any], bool]


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


@dataclass(frozen=True, slots=True)
class BodyField:
    """A control's field in the body of the OpenAI API, with vLLM's additions.

    Attributes:
        name: The field.
        default: Its default there.
        bounds: What it is checked by there, in pydantic's words: {"ge": 0, "le": 1}.
        of_openai: Whether OpenAI's own client has an argument for it.
        is_number: Whether it is a number, as the control is. Fields of other types are `openai.protocol`'s.
        meaning: What docs/openai.md says of it; "": the control's meaning.
    """

    name: str
    default: float = 0.0
    bounds: Mapping[str, float] = field(default_factory=lambda: {})
    of_openai: bool = False
    is_number: bool = True
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class ExecutorField:
    """A control's field in TensorRT-LLM's Executor API, where its default is None.

    Attributes:
        name: The field of its SamplingConfig.
        range: The values that it may be assigned.
        note: What docs/executor-fields.md says of it.
    """

    name: str
    range: Range
    note: str


@dataclass(frozen=True, slots=True)
class Setting:
    """How the playground shows a control.

    Attributes:
        group: Title of the group that it stands in.
        label: What people read.
        usual: The server's default, shown in the empty field.
        hint: A sentence about it.
    """

    group: str
    label: str
    usual: str
    hint: str


@dataclass(frozen=True, slots=True)
class Control:
    """All that is known of a sampling control beside its neutral value, which its field's default is.

    Attributes:
        tensor: The tensor that it comes by.
        dtype: The tensor's type; what it holds, if it is a list.
        range: Its values.
        meaning: A line that config.pbtxt, the reference pages and command lines say of it.
        example: A value that asks for something.
        is_off: Whether a value asks for nothing although it is not the neutral one.
        looks_back: Whether the device then needs the tokens so far. The host writes them, and so has to see them.
        bans: Whether it may leave a sequence without a token to go on with.
        draws: Whether it limits the tokens that are drawn from, without which a request is greedy.
        text_names: The tensor's names in text models, the main one first; empty: its own.
        aliases: Other names of the tensor in id models.
        other_dtypes: More types that the tensor is read in.
        body: Its field in OpenAI's body; None: it has none.
        executor: Its field in the Executor API; None: it has none.
        client: The Python client's option; "": it has none.
        on_command_line: Whether that is an option of the client's command line too.
        setting: How the playground shows it; None: not at all.
    """

    tensor: str
    dtype: str
    range: Range
    meaning: str
    example: Any
    is_off: Callable[[Any], bool] = lambda value: False
    looks_back: bool = False
    bans: bool = False
    draws: bool = False
    text_names: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    other_dtypes: tuple[str, ...] = ()
    body: BodyField | None = None
    executor: ExecutorField | None = None
    client: str = ""
    on_command_line: bool = False
    setting: Setting | None = None


def _declare(neutral: _T, control: Control) -> _T:
    """A field of SamplingConfig that says all of its control."""
    return field(default=neutral, metadata={"control": control})


_CHOICE, _REPETITION = "Choice of tokens", "Repetition"


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """TensorRT-LLM's `SamplingConfig`. Of the controls that limit a draw, those declared first are applied first.

    A control's `meaning` says what it does; `inflight.sampling.pipeline` says in which order all are applied.

    `num_return_sequences` None means 1, or all beams. The default 0 of `random_seed` is a seed like any other:
    identical requests give identical tokens. With no control set that `draws` the request is greedy, whatever the
    temperature. A beam search with enough finished beams ends, by `early_stopping`: 1: at once. 0: when no running
    beam is better at its present length. Other: when none can become better. A finished beam's score is its
    cumulative log probability divided by generated_length ** length_penalty, the end id counted.
    """

    beam_width: int = _declare(
        1,
        Control(
            "beam_width",
            "INT32",
            _within(1, MAX_BEAM_WIDTH),
            "beams of a beam search; 1: none",
            example=4,
            body=BodyField("n", is_number=False),
            executor=ExecutorField("beam_width", _at_least(1), "1 by default"),
            client="beam_width",
            on_command_line=True,
        ),
    )
    num_return_sequences: int | None = _declare(
        None,
        Control(
            "num_return_sequences",
            "INT32",
            _ANY,  # checked beside beam_width
            "sequences to sample; of beams, how many of the best",
            example=2,
            body=BodyField("n", is_number=False),
            executor=ExecutorField("num_return_sequences", _at_least(1), "1, or all beams, by default"),
            client="num_return_sequences",
        ),
    )
    temperature: float = _declare(
        1.0,
        Control(
            "temperature",
            "FP32",
            Range(f"0 (greedy), or {_FACTOR.text}", lambda value: value == 0.0 or _FACTOR.contains(value)),
            "divides the logits; 0: greedy; 1 by default",
            example=0.5,
            text_names=("temperature", "sampling_param_temperature"),
            body=BodyField(
                "temperature", 1.0, {"ge": 0}, True, meaning="divides the logits; 0 takes the likeliest token"
            ),
            executor=ExecutorField("temperature", _at_least(0), "1 by default; 0 is greedy"),
            client="temperature",
            on_command_line=True,
            setting=Setting(
                _CHOICE,
                "Temperature",
                "1",
                "0 always takes the likeliest token; the higher, the more often others are chosen.",
            ),
        ),
    )
    top_n_sigma: float = _declare(
        0.0,
        Control(
            "top_n_sigma",
            "FP32",
            _within(0.0, LARGEST),
            "keep logits of at least the highest minus top_n_sigma times their standard deviation; 0: all",
            example=1.5,
            draws=True,
            body=BodyField("top_n_sigma", 0.0, {"ge": 0}),
            client="top_n_sigma",
            on_command_line=True,
            setting=Setting(
                _CHOICE,
                "Top n sigma",
                "0",
                "Tokens whose logits are more than so many standard deviations below the highest are left out.",
            ),
        ),
    )
    top_k: int = _declare(
        0,
        Control(
            "runtime_top_k",
            "INT32",
            _at_least(0, " (0 keeps every token)"),
            "keep the k likeliest; 0: all",
            example=50,
            draws=True,
            text_names=("top_k", "sampling_param_top_k"),
            body=BodyField(
                "top_k",
                0,
                {"ge": -1, "le": MAX_INT32},
                meaning="keep the top_k likeliest tokens; 0 and −1: all",
            ),
            executor=ExecutorField(
                "top_k", _at_least(0), "0 by default: all; greedy if top_p and min_p are unset too"
            ),
            client="top_k",
            on_command_line=True,
            setting=Setting(_CHOICE, "Top k", "all", "The choice is among so many of the likeliest tokens."),
        ),
    )
    top_p: float = _declare(
        0.0,
        Control(
            "runtime_top_p",
            "FP32",
            Range("in (0, 1], or <= 0 for unset", _SHARE.contains),
            "keep the smallest set of likeliest tokens that has probability p in (0, 1]; <= 0: unset",
            example=0.875,
            is_off=lambda p: p <= 0.0,
            draws=True,
            text_names=("top_p", "sampling_param_top_p"),
            body=BodyField(
                "top_p",
                1.0,
                {"ge": 0, "le": 1},
                True,
                meaning="keep the smallest set of likeliest tokens that has probability top_p",
            ),
            executor=ExecutorField("top_p", _POSITIVE_SHARE, "unset by default"),
            client="top_p",
            on_command_line=True,
            setting=Setting(
                _CHOICE,
                "Top p",
                "1",
                "The choice is among the likeliest tokens that have this probability together.",
            ),
        ),
    )
    top_p_min: float = _declare(
        1e-6,
        Control(
            "runtime_top_p_min",
            "FP32",
            _SHARE,
            "floor of a decaying top_p; 1e-6",
            example=0.25,
            text_names=("top_p_min",),
            executor=ExecutorField("top_p_min", _SHARE, "1e-6 by default"),
            client="top_p_min",
        ),
    )
    top_p_decay: float = _declare(
        1.0,
        Control(
            "runtime_top_p_decay",
            "FP32",
            _POSITIVE_SHARE,
            "top_p's factor per token; 1",
            example=0.5,
            looks_back=True,
            text_names=("top_p_decay",),
            executor=ExecutorField("top_p_decay", _POSITIVE_SHARE, "1 by default"),
            client="top_p_decay",
        ),
    )
    top_p_reset_id: int = _declare(
        -1,
        Control(
            "runtime_top_p_reset_ids",
            "INT32",
            _at_least(-1, " (-1: none)"),
            "token that resets top_p; -1: none",
            example=3,
            text_names=("top_p_reset_ids",),
            executor=ExecutorField("top_p_reset_ids", _at_least(0), "none by default"),
            client="top_p_reset_id",
        ),
    )
    min_p: float = _declare(
        0.0,
        Control(
            "min_p",
            "FP32",
            _SHARE,
            "keep tokens of at least min_p times the largest probability; 0: all",
            example=0.0625,
            draws=True,
            body=BodyField("min_p", 0.0, {"ge": 0, "le": 1}),
            executor=ExecutorField("min_p", _SHARE, "0 by default"),
            client="min_p",
            on_command_line=True,
            setting=Setting(
                _CHOICE,
                "Min p",
                "0",
                "Tokens with less than this share of the likeliest token’s probability are left out.",
            ),
        ),
    )
    random_seed: int = _declare(
        0,
        Control(
            "random_seed",
            "UINT64",
            _SEED,
            "of the random numbers: the same seed, the same tokens; 0 by default",
            example=11,
            text_names=("seed", "random_seed", "sampling_param_seed"),
            aliases=("seed",),
            body=BodyField("seed", of_openai=True, is_number=False),
            executor=ExecutorField(
                "seed", _SEED, "0 by default, a seed like any other: equal requests give equal tokens"
            ),
            client="seed",
            on_command_line=True,
            setting=Setting(
                _CHOICE, "Seed", "random", "The same seed and the same request give the same answer again."
            ),
        ),
    )
    allowed_token_ids: tuple[int, ...] = _declare(
        (),
        Control(
            "allowed_token_ids",
            "INT32",
            _TOKEN_IDS,
            "the only tokens that may come, end ids among them; none: all may",
            example=(4, 9, 4),
            bans=True,
            body=BodyField("allowed_token_ids", is_number=False),
            client="allowed_token_ids",
        ),
    )
    logit_bias_ids: tuple[int, ...] = _declare(
        (),
        Control(
            "logit_bias_ids",
            "INT32",
            _TOKEN_IDS,
            "tokens whose logits to change; of one that is named twice the biases add up",
            example=(4, 9),
            body=BodyField("logit_bias", of_openai=True, is_number=False),
        ),
    )
    logit_bias_values: tuple[float, ...] = _declare(
        (),
        Control(
            "logit_bias_values",
            "FP32",
            Range("finite numbers, or -inf to ban a token", lambda value: value < math.inf),
            "added to the logit of each; -inf bans the token",
            example=(1.5, -math.inf),
            bans=True,
            body=BodyField("logit_bias", of_openai=True, is_number=False),
        ),
    )
    repetition_penalty: float = _declare(
        1.0,
        Control(
            "repetition_penalty",
            "FP32",
            _FACTOR,
            "divides positive and multiplies negative logits of tokens seen, prompt included; 1: none",
            example=1.125,
            looks_back=True,
            body=BodyField("repetition_penalty", 1.0, {"gt": 0}),
            executor=ExecutorField("repetition_penalty", _POSITIVE, "1 by default; the prompt counts"),
            client="repetition_penalty",
            on_command_line=True,
            setting=Setting(
                _REPETITION,
                "Repetition penalty",
                "1",
                "Above 1, tokens of the prompt and of the answer become less likely to come again.",
            ),
        ),
    )
    presence_penalty: float = _declare(
        0.0,
        Control(
            "presence_penalty",
            "FP32",
            _ADDED,
            "taken once from the logits of tokens seen, prompt included; 0: none",
            example=0.5,
            looks_back=True,
            text_names=("presence_penalty", "sampling_param_presence_penalty"),
            body=BodyField("presence_penalty", of_openai=True),
            executor=ExecutorField("presence_penalty", _ANY, "0 by default; the prompt counts"),
            client="presence_penalty",
            on_command_line=True,
            setting=Setting(
                _REPETITION,
                "Presence penalty",
                "0",
                "Tokens become less likely once the prompt or the answer has used them, however often.",
            ),
        ),
    )
    frequency_penalty: float = _declare(
        0.0,
        Control(
            "frequency_penalty",
            "FP32",
            _ADDED,
            "taken from a token's logit for each time it was seen, prompt included; 0: none",
            example=0.5,
            looks_back=True,
            text_names=("frequency_penalty", "sampling_param_frequency_penalty"),
            body=BodyField("frequency_penalty", of_openai=True),
            executor=ExecutorField("frequency_penalty", _ANY, "0 by default; the prompt counts"),
            client="frequency_penalty",
            on_command_line=True,
            setting=Setting(
                _REPETITION,
                "Frequency penalty",
                "0",
                "Tokens become less likely each time that the prompt or the answer has used them.",
            ),
        ),
    )
    min_length: int = _declare(
        0,
        Control(
            "min_length",
            "INT32",
            _at_least(0),
            "no end id before so many tokens; 0",
            example=2,
            bans=True,
            text_names=("min_tokens", "min_length"),
            aliases=("min_tokens",),
            body=BodyField(
                "min_tokens",
                0,
                {"ge": 0, "le": MAX_INT32},
                meaning="no end before so many tokens: end ids are banned until then, and a stop string that is "
                "complete by then ends nothing; so it is for every beam",
            ),
            executor=ExecutorField("min_tokens", _at_least(0), "1 by default"),
            client="min_length",
            on_command_line=True,
        ),
    )
    no_repeat_ngram_size: int = _declare(
        0,
        Control(
            "no_repeat_ngram_size",
            "INT32",
            _at_least(0, " (0: off)"),
            "no n-gram of so many tokens comes twice, prompt included; 0 or 2**30: off",
            example=3,
            is_off=lambda size: size >= NO_REPEAT_OFF,
            looks_back=True,
            bans=True,
            body=BodyField("no_repeat_ngram_size", 0, {"ge": 0, "le": MAX_INT32}),
            executor=ExecutorField(
                "no_repeat_ngram_size", _at_least(0), "off by default; 0 and 1 << 30 are off"
            ),
            client="no_repeat_ngram_size",
            on_command_line=True,
        ),
    )
    length_penalty: float = _declare(
        0.0,
        Control(
            "len_penalty",
            "FP32",
            Range("a finite number >= 0", lambda penalty: 0.0 <= penalty < math.inf),
            "exponent of a beam's length, which its score is divided by; 0",
            example=0.5,
            text_names=("length_penalty",),
            body=BodyField("length_penalty", 1.0, {"ge": 0}, meaning="exponent of a beam's length"),
            executor=ExecutorField("length_penalty", _at_least(0), "0 by default"),
            client="length_penalty",
            on_command_line=True,
        ),
    )
    early_stopping: int = _declare(
        0,
        Control(
            "early_stopping",
            "INT32",
            _at_least(0),
            "end with enough beams: 1 at once, 0 if none is better now, other if none can be",
            example=2,
            other_dtypes=("BOOL",),
            body=BodyField("early_stopping", is_number=False),
            executor=ExecutorField(
                "early_stopping", _at_least(0), "1 by default: a search ends with enough finished beams"
            ),
            client="early_stopping",
        ),
    )
    beam_search_diversity_rate: float = _declare(
        0.0,
        Control(
            "beam_search_diversity_rate",
            "FP32",
            _within(0.0, LARGEST),
            "times a beam's index, added to its candidates' ranks; 0",
            example=0.5,
            executor=ExecutorField("beam_search_diversity_rate", _at_least(0), "0 by default"),
            client="beam_search_diversity_rate",
        ),
    )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1 or not any(self.uses(name) for name in DRAWING)

    @property
    def uses_beams(self) -> bool:
        """Whether the request is a beam search."""
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
        return value != NEUTRAL[name] and not CONTROLS[name].is_off(value)

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidArgument naming the tensor, what came and what was expected."""
        for name, neutral in NEUTRAL.items():
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

NEUTRAL: dict[str, Any] = {each.name: each.default for each in fields(SamplingConfig)}
"""The values that ask for nothing."""

DRAWING = [name for name, control in CONTROLS.items() if control.draws]
"""The controls that limit the tokens that are drawn from, in the order in which they do."""
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
