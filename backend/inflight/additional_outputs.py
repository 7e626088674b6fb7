"""The tensors of a model that can be had beside its tokens: their names, and what the names mean.

Everybody who takes part in sending them, from the parameters and the launcher to the device, speaks of them by
the types that are declared here. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

CONTEXT, GENERATION = "context_", "generation_"
"""What the names of output tensors begin with: the prompt's rows, and those that tokens were chosen from."""

NAMES = "last_hidden_state, hidden_states_<i>, top_<k>_logits and top_<k>_logit_ids"
"""The names that an additional output can have, for messages."""

_GATHERED = ":context"
_NUMBERED = re.compile(
    r"hidden_states_(?P<layer>0|[1-9]\d{0,5})|top_(?P<count>[1-9]\d{0,8})_(?P<what>logits|logit_ids)"
)


class OutputKind(Enum):
    """The kind of values that an additional output has."""

    HIDDEN_STATES = auto()
    LAST_HIDDEN_STATE = auto()
    TOP_LOGITS = auto()
    TOP_LOGIT_IDS = auto()


@dataclass(frozen=True, slots=True)
class Meaning:
    """The kind and the number that an additional output's name stands for.

    Attributes:
        kind: What is computed.
        number: Of hidden states how many layers are behind them; of top logits how many of a row; else 0.
    """

    kind: OutputKind
    number: int = 0


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """TensorRT-LLM's `AdditionalModelOutput`: an output to be computed, or one that a request asks for.

    Attributes:
        name: One of NAMES.
        gather_context: Whether the prompt's rows are wanted too.
    """

    name: str
    gather_context: bool = False


@dataclass(frozen=True, slots=True)
class OfferedOutput:
    """An additional output that an engine computes for requests that ask for it.

    Attributes:
        name: One of NAMES.
        gather_context: Whether a request may have the prompt's rows too.
        width: Values of a row.
    """

    name: str
    gather_context: bool
    width: int


def meaning_of(name: str) -> Meaning:
    """Return the meaning of an output's name; ValueError for a name that no output has."""
    if name == "last_hidden_state":
        return Meaning(OutputKind.LAST_HIDDEN_STATE)
    match = _NUMBERED.fullmatch(name)
    if match is None:
        raise ValueError(f"there is no additional output {name!r}: there are {NAMES}")
    if match["layer"] is not None:
        return Meaning(OutputKind.HIDDEN_STATES, int(match["layer"]))
    kind = OutputKind.TOP_LOGITS if match["what"] == "logits" else OutputKind.TOP_LOGIT_IDS
    return Meaning(kind, int(match["count"]))


def parse_outputs(text: str) -> tuple[WantedOutput, ...]:
    """The outputs of a list like "last_hidden_state:context, top_5_logits"; ValueError if it is none."""
    parts = [part.strip() for part in text.split(",")]
    found = tuple(WantedOutput(part.removesuffix(_GATHERED), part.endswith(_GATHERED)) for part in parts)
    if not are_distinct(found):
        raise ValueError(text)
    return found


def are_distinct(outputs: Iterable[WantedOutput]) -> bool:
    """Whether all have names that outputs can have, and none comes twice; ValueError for another name."""
    names = [output.name for output in outputs]
    for name in names:
        meaning_of(name)
    return len(set(names)) == len(names)


def tensor_names(outputs: Iterable[WantedOutput]) -> list[tuple[str, int]]:
    """(name, dimensions) of the tensors that carry these outputs; the batch dimension is not counted."""
    names: list[tuple[str, int]] = []
    for output in outputs:
        names += [(CONTEXT + output.name, 2)] if output.gather_context else []
        names.append((GENERATION + output.name, 3))
    return names


def outputs_of_tensors(names: Iterable[str]) -> tuple[WantedOutput, ...]:
    """Return the outputs to ask an engine for, to get the tensors of these names."""
    gathered: dict[str, bool] = {}
    for name in names:
        prefix = CONTEXT if name.startswith(CONTEXT) else GENERATION
        plain = name.removeprefix(prefix)
        gathered[plain] = gathered.get(plain, False) or prefix == CONTEXT
    return tuple(WantedOutput(*each) for each in gathered.items())
