"""The declaration of a parameter: its type and range, and its row in config.pbtxt.

Defines the syntax of booleans, numbers, choices and lists, and the parsing, description and error messages
of a row. `inflight.config` declares the parameters.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, cast

from inflight.errors import ConfigError

FIRST_VERSION = "0.1"
"""The version whose parameters need no `since`."""

MAX_DRAFT_TOKENS = 64
"""Largest K of the parameter speculative_decoding_mode."""

# ---------------------------------------------------------------------- types and ranges


@dataclass(frozen=True, slots=True)
class ParameterKind:
    """The type and the range of a parameter.

    Attributes:
        expected: The allowed values, in words for messages.
        convert: Function that converts a text to a value; it raises ValueError if the text is not of the
            type.
        accepts: Function that returns whether a value is of the type and within the range.
        instead: Advice for values of other servers, by the value in lower case with underscores.
    """

    expected: str
    convert: Callable[[str], Any]
    accepts: Callable[[Any], bool]
    instead: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)

    def parse(self, text: str) -> Any:
        """Return the value of `text`; raise ValueError if it is not accepted."""
        value = self.convert(text)
        if not self.accepts(value):
            raise ValueError(text)
        return value

    def expectation(self, text: str) -> str:
        """Return the allowed values, and what to use if the refused `text` is another server's value."""
        advice = self.instead.get(text.partition(":")[0].lower().replace("-", "_"))
        return f"{self.expected}; {advice}" if advice else self.expected


def integer(minimum: int) -> ParameterKind:
    """Return the kind of an integer that is at least `minimum`."""
    return ParameterKind(f"an integer >= {minimum}", int, lambda value: value >= minimum)


def share(above: bool = False) -> ParameterKind:
    """Return the kind of a number in [0, 1]; if `above` is true, 0 is excluded."""
    return ParameterKind(
        f"a number {'>' if above else '>='} 0 and <= 1",
        float,
        lambda value: 0 <= value <= 1 and not (above and value == 0),
    )


def _named(values: Mapping[str, Any], any_case: bool = False) -> ParameterKind:
    """Return the kind of a value that is given by its name in `values`. `any_case` ignores the case of letters."""
    by_text = {name.lower(): value for name, value in values.items()} if any_case else values

    def convert(text: str) -> Any:
        name = text.lower() if any_case else text
        if name not in by_text:
            raise ValueError(text)
        return by_text[name]

    return ParameterKind(" or ".join(values), convert, lambda value: value in values.values())


def choice(*names: str, any_case: bool = False) -> ParameterKind:
    """Return the kind of one of `names`; `any_case` ignores the case of letters."""
    return _named({name: name for name in names}, any_case)


def member(enum: type[Enum], *but: Enum) -> ParameterKind:
    """Return the kind of a member of an Enum, given by its value; the members in `but` are excluded."""
    return _named({item.value: item for item in enum if item not in but})


def _integers(expected: str, minimum: int) -> ParameterKind:
    def accepts(values: tuple[Any, ...]) -> bool:
        return all(type(value) is int and value >= minimum for value in values)

    return ParameterKind(expected, lambda text: tuple(int(part) for part in text.split(",")), accepts)


def _named_folders(text: str) -> tuple[tuple[str, str], ...]:
    parts = [part.partition("=") for part in text.split(",")]
    pairs = tuple((name.strip(), folder.strip()) for name, _, folder in parts)
    if not all(name and folder for name, folder in pairs):
        raise ValueError(text)
    return pairs


_FLOAT_TYPES = ("TYPE_FP16", "TYPE_BF16", "TYPE_FP32")
DATA_TYPES = choice(*_FLOAT_TYPES)
DATA_TYPE_OF = "_data_type"
"""Suffix of parameters with the data type that config.pbtxt declares for an input: x_data_type for input
`x`. Triton accepts an input only in the declared type."""


def input_types(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return data types, such as TYPE_FP32, by input, for inputs whose parameter x_data_type is set and valid."""
    return {
        key.removesuffix(DATA_TYPE_OF): value
        for key, value in parameters.items()
        if key.endswith(DATA_TYPE_OF) and value in _FLOAT_TYPES
    }


_TRUTH = {"true": True, "1": True, "false": False, "0": False}
BOOLEAN = dataclasses.replace(_named(_TRUTH, any_case=True), expected="true or false")


class SpecialTokens(Enum):
    """Whether the special tokens that tokenizer.json adds around a text, such as BOS, are added to a prompt.

    AUTO adds them unless the text already begins with the leading special tokens, as the output of a chat
    template may.
    """

    ADDED = "true"
    LEFT_OUT = "false"
    AUTO = "auto"


SPECIAL_TOKENS = dataclasses.replace(
    _named(
        {
            **{text: SpecialTokens(str(value).lower()) for text, value in _TRUTH.items()},
            "auto": SpecialTokens.AUTO,
        },
        any_case=True,
    ),
    expected="true, false or auto",
)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How the server drafts tokens for requests that do not bring drafts.

    Attributes:
        method: PROMPT_LOOKUP, SUFFIX, MTP or EAGLE3.
        num_tokens: Maximum number of tokens of a draft; 0: only for requests with `prompt_lookup_num_tokens`.
    """

    PROMPT_LOOKUP: ClassVar = "prompt-lookup"
    SUFFIX: ClassVar = "suffix"
    MTP: ClassVar = "mtp"
    EAGLE3: ClassVar = "eagle3"

    method: str
    num_tokens: int = 8

    @classmethod
    def parse(cls, text: str) -> Speculation | None:
        """Parse METHOD or METHOD:K; None for `none`. Raises ValueError."""
        method, colon, number = text.partition(":")
        if text == "none":
            return None
        if method not in (cls.PROMPT_LOOKUP, cls.SUFFIX, cls.MTP, cls.EAGLE3):
            raise ValueError(text)
        return cls(method, int(number) if colon else cls.default_length(method))

    @classmethod
    def default_length(cls, method: str) -> int:
        """Return K of a method without `:K`; for heads, as many tokens as they are trained to guess."""
        return {cls.MTP: 1, cls.EAGLE3: 3}.get(method, 8)

    @property
    def has_head(self) -> bool:
        """Whether a draft head guesses the tokens."""
        return self.method in (self.MTP, self.EAGLE3)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A draft tree of TensorRT-LLM, of which only the path of the likeliest guesses is drafted.

    Attributes:
        num_tokens: Number of nodes on that path, which is the length of a draft.
        num_left_out: Number of the other nodes.
    """

    num_tokens: int
    num_left_out: int = 0

    @classmethod
    def of(cls, choices: Sequence[Sequence[int]]) -> DraftTree:
        """Return the tree with the nodes `choices`. Raises ValueError if they are not a tree.

        Args:
            choices: The nodes in any order, as paths from the root: at each step the rank of the guess, from 0.
                The likeliest guesses are [0], [0, 0], [0, 0, 0] and so on.
        """
        paths = {tuple(path) for path in choices}
        is_tree = len(paths) == len(choices) and all(
            path and path[-1] >= 0 and (len(path) == 1 or path[:-1] in paths) for path in paths
        )
        num_tokens = sum(1 for path in paths if not any(path))
        if not is_tree or not num_tokens:
            raise ValueError(choices)
        return cls(num_tokens, len(paths) - num_tokens)

    @property
    def note(self) -> str:
        """The log line about nodes that are not drafted; empty if there are none."""
        if not self.num_left_out:
            return ""
        return (
            f"eagle_choices: the likeliest guesses are drafted, up to {self.num_tokens} tokens; "
            f"other nodes of the tree ({self.num_left_out}) have no effect"
        )


def _parse_choices(text: str) -> DraftTree:
    """Return a tree in tensorrtllm_backend's form or in JSON. Raises ValueError."""
    found: Any = json.loads(f"[{text.replace('{', '[').replace('}', ']')}]")
    if text.lstrip().startswith(("[[", "{{")):
        (found,) = found
    try:
        are_numbers = all(type(rank) is int for path in found for rank in path)
    except TypeError:  # a number in place of a path
        are_numbers = False
    if not are_numbers:
        raise ValueError(text)
    return DraftTree.of(found)


CHOICES = ParameterKind(
    "a tree that contains {0}; for example, '{0}, {1}, {0, 0}' is a tree of three nodes; at most "
    f"{MAX_DRAFT_TOKENS} nodes may consist of zeros only",
    _parse_choices,
    lambda value: value.num_tokens <= MAX_DRAFT_TOKENS,
)

FROM_EARLIER_TOKENS = (
    "speculative_decoding_mode prompt-lookup:K or suffix:K lets the server draft from earlier tokens, without a "
    "draft model"
)
BY_OTHER_HEADS = (
    "an EAGLE-3 head (speculative_model_dir) or the checkpoint's own head (speculative_decoding_mode mtp) drafts "
    "a chain of tokens"
)
_BY_A_MODEL = "a draft model is an engine of its own, tensorrt_llm_draft_model_name of tensorrt_llm_bls"
OTHER_METHODS: Mapping[str, str] = {
    "lookahead": FROM_EARLIER_TOKENS,
    "lookahead_decoding": FROM_EARLIER_TOKENS,
    "ngram": FROM_EARLIER_TOKENS,
    "prompt_lookup": FROM_EARLIER_TOKENS,
    "medusa": f"Medusa heads are not read; {BY_OTHER_HEADS}",
    "redrafter": f"ReDrafter heads are not read; {BY_OTHER_HEADS}",
    "explicit_draft_tokens": f"ReDrafter heads are not read; {BY_OTHER_HEADS}",
    "eagle": f"heads of EAGLE and EAGLE-2 are not read; {BY_OTHER_HEADS}",
    "eagle2": f"heads of EAGLE and EAGLE-2 are not read; {BY_OTHER_HEADS}",
    "draft_model": _BY_A_MODEL,
    "draft_target": _BY_A_MODEL,
    "draft_target_model": _BY_A_MODEL,
    "draft_tokens_external": _BY_A_MODEL,
    "external_draft_tokens": _BY_A_MODEL,
}
"""Advice for other servers' methods of drafting tokens, by their names in lower case with underscores."""

SPECULATION = ParameterKind(
    "none, prompt-lookup, suffix, mtp or eagle3; prompt-lookup:K, suffix:K, mtp:K or eagle3:K limits a draft to K "
    f"tokens, where K is from 0 to {MAX_DRAFT_TOKENS}",
    Speculation.parse,
    lambda value: value is None or 0 <= value.num_tokens <= MAX_DRAFT_TOKENS,
    OTHER_METHODS,
)


_ADDRESS = re.compile(r"(tcp|ipc|inproc|pgm|epgm|ws|wss|udp|vmci)://.")


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """How KV cache events are published, with the names and defaults of vLLM's `--kv-events-config`.

    Attributes:
        enable_kv_cache_events: False: no events are published.
        publisher: `zmq`; `null`: no events are published.
        endpoint: ZeroMQ address. The publisher binds it if it has `*` or `::`, or is of the kind ipc or inproc;
            otherwise it connects to it.
        replay_endpoint: Address at which lost batches can be asked for; None: they cannot.
        buffer_steps: Number of past batches that can be asked for.
        hwm: Number of batches that ZeroMQ keeps for a slow subscriber; it loses further ones.
        max_queue_size: Number of events of one iteration that are kept; older ones are lost.
        topic: Topic of all batches.
    """

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def parse(cls, text: str) -> KvEventsConfig | None:
        """Parse a JSON object; None if it turns events off. Raises ValueError."""
        found: object = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(text)
        given = cast("dict[str, Any]", found)
        for each in dataclasses.fields(cls):
            if each.name not in given:
                continue
            value = given[each.name]
            is_kind = type(value) is type(each.default) or (
                each.name == "replay_endpoint" and isinstance(value, str)
            )
            if not is_kind or (type(value) is int and value < 1):
                raise ValueError(text)
        try:
            config = cls(**given)
        except TypeError:  # an unknown name
            raise ValueError(text) from None
        addresses = (config.endpoint, config.replay_endpoint or config.endpoint)
        if config.publisher not in ("zmq", "null") or not all(map(_ADDRESS.match, addresses)):
            raise ValueError(text)
        return config if config.enable_kv_cache_events and config.publisher == "zmq" else None


KV_EVENTS = ParameterKind(
    "a JSON object, with any of enable_kv_cache_events (true or false), publisher (zmq or null), endpoint (a "
    "ZeroMQ address such as tcp://*:5557), replay_endpoint (a ZeroMQ address), topic (text), buffer_steps (an "
    "integer >= 1), hwm (an integer >= 1) and max_queue_size (an integer >= 1)",
    KvEventsConfig.parse,
    lambda value: True,
)
TEXT = ParameterKind("text", str, lambda value: True)
URL = ParameterKind(
    "a URL such as http://localhost:4318/v1/traces",
    str,
    lambda value: value.startswith(("http://", "https://")),
)
TOKEN_IDS = _integers("token ids >= 0, separated by commas", 0)
WINDOWS = _integers("integers >= 1, separated by commas", 1)
DEVICES = _integers("numbers >= 0, separated by commas", 0)
NAMED_FOLDERS = ParameterKind(
    "pairs of a name and a folder, separated by commas, such as a=/folder/of/a,b=/folder/of/b; each name at most "
    "once",
    _named_folders,
    lambda value: len({name for name, _ in value}) == len(value),
)
NAMES = ParameterKind(
    "names, separated by commas", lambda text: tuple(part.strip() for part in text.split(",")), all
)


# ---------------------------------------------------------------------- rows of config.pbtxt


class Role(Enum):
    """The role of a model in the model repository; each role accepts some of the parameters."""

    ENGINE = "engine"
    FRONT_END = "front end"
    BLS = "front end that may have a draft model"
    PREPROCESSING = "preprocessing"
    POSTPROCESSING = "postprocessing"
    ENCODERS = "multimodal_encoders"


ENGINE_ONLY = frozenset({Role.ENGINE})


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One row of the `parameters` in config.pbtxt.

    Attributes:
        key: The key in config.pbtxt; by default the field's name.
        kind: The type and range of the value.
        default: The value when absent.
        meaning: One line of explanation for readers of config.pbtxt.
        roles: The models that accept the parameter.
        template: tensorrtllm_backend's template variable, if it is not named like the key.
        template_value: The value in config.pbtxt instead of a template variable.
        neutral: None for a parameter that is implemented. Otherwise the only accepted values; (): no value
            is.
        instead: Advice to users of a feature that is not implemented; may be empty.
        read_by_triton: Whether only Triton's Python backend reads the parameter.
        complaint: Beginning of an error about the value, with {key} and {text}.
        no_effect: The reason why no value has an effect, which is logged if the parameter is given; "" for a
            parameter with an effect.
        behind: The key after which the row is in config.pbtxt, if not after the previous field's key.
        since: The first version with the parameter.
    """

    key: str
    kind: ParameterKind
    default: Any
    meaning: str
    roles: frozenset[Role] = ENGINE_ONLY
    template: str = ""
    template_value: str = ""
    neutral: tuple[Any, ...] | None = None
    instead: str = ""
    read_by_triton: bool = False
    complaint: str = "{key}: got {text!r}"
    no_effect: str = ""
    behind: str = ""
    since: str = FIRST_VERSION

    @property
    def built(self) -> bool:
        """Return whether this version implements the parameter."""
        return self.neutral is None and not self.read_by_triton and not self.no_effect

    @property
    def expectation(self) -> str:
        """Return the allowed values, for a comment in config.pbtxt."""
        if self.neutral is not None:
            return f"not available yet, {self._neutral_advice}"
        if self.no_effect:
            expected = "any text" if self.kind is TEXT else self.kind.expected
            return f"no effect, because {self.no_effect}; values: {expected}"
        default = self.default.value if isinstance(self.default, Enum) else self.default
        shown = str(default).lower() if isinstance(default, bool) else default
        expected = "" if self.kind is TEXT else self.kind.expected
        return ", ".join(filter(None, (expected, f"{shown} by default" if shown not in (None, ()) else "")))

    @property
    def _neutral_advice(self) -> str:
        shown = [
            str(value).lower() if isinstance(value, bool) else str(value) for value in self.neutral or ()
        ]
        advice = "leave it out" + (f" or set {' or '.join(shown)}" if shown else "")
        return f"{advice}; {self.instead}" if self.instead else advice

    def parse(self, text: str) -> Any:
        """Parse a filled-in `text`; raise ConfigError with the key, its value and the expected values."""
        try:
            value = self.kind.parse(text)
        except ValueError:
            complaint = self.complaint.format(key=self.key, text=text)
            raise ConfigError(f"{complaint}, expected {self.kind.expectation(text)}") from None
        if self.neutral is not None and value not in self.neutral:
            raise ConfigError(
                f"{self.key}: got {text!r}, which is not available in this version; {self._neutral_advice}"
            )
        return value


def parameter(
    default: Any,
    kind: ParameterKind,
    meaning: str,
    roles: frozenset[Role] = ENGINE_ONLY,
    key: str = "",
    **more: Any,
) -> Any:
    """Return a dataclass field that is a row of config.pbtxt; the arguments are those of ParameterSpec."""
    spec = ParameterSpec(key, kind, default, meaning, roles, **more)
    return field(default=default, metadata={"parameter": spec})


def declared_rows(owner: type) -> dict[str, ParameterSpec]:
    """Return the rows that the fields of a dataclass declare, by field name."""
    return {
        each.name: dataclasses.replace(spec, key=spec.key or each.name)
        for each in dataclasses.fields(owner)
        if (spec := each.metadata.get("parameter"))
    }
