"""Additional outputs: tensors that a model can return beside its tokens, and the meaning of their names.

The parameters, the launcher, the front ends and the device use these types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

CONTEXT, GENERATION = "context_", "generation_"
"""Prefixes of the tensors' names: the rows of the prompt, and the rows from which tokens were sampled."""

NAMES = "last_hidden_state, hidden_states_<i>, top_<k>_logits and top_<k>_logit_ids"
"""The possible names of an additional output, for error messages."""

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
    """The kind and number that an additional output's name encodes.

    Attributes:
        kind: The kind of values.
        number: For hidden states, the number of layers before them; for top logits, their number per row;
            else 0.
    """

    kind: OutputKind
    number: int = 0


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """TensorRT-LLM's `AdditionalModelOutput`: an output that an engine computes, or that a request selects.

    Attributes:
        name: One of NAMES.
        gather_context: Whether to return the rows of the prompt, too.
    """

    name: str
    gather_context: bool = False


@dataclass(frozen=True, slots=True)
class OfferedOutput:
    """An additional output that an engine computes for the requests that select it.

    Attributes:
        name: One of NAMES.
        gather_context: Whether a request can get the rows of the prompt, too.
        width: Number of values in a row.
    """

    name: str
    gather_context: bool
    width: int


def meaning_of(name: str) -> Meaning:
    """Return the meaning of an output's name; raise ValueError if there is no such output."""
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
    """Parse a list like "last_hidden_state:context, top_5_logits"; raise ValueError if it is not such a list."""
    parts = [part.strip() for part in text.split(",")]
    found = tuple(WantedOutput(part.removesuffix(_GATHERED), part.endswith(_GATHERED)) for part in parts)
    if not are_distinct(found):
        raise ValueError(text)
    return found


def are_distinct(outputs: Iterable[WantedOutput]) -> bool:
    """Return whether all outputs have different names; raise ValueError if there is no output of a name."""
    names = [output.name for output in outputs]
    for name in names:
        meaning_of(name)
    return len(set(names)) == len(names)


def tensor_names(outputs: Iterable[WantedOutput]) -> list[tuple[str, int]]:
    """Return (name, number of dimensions without the batch dimension) of each tensor for these outputs."""
    names: list[tuple[str, int]] = []
    for output in outputs:
        names += [(CONTEXT + output.name, 2)] if output.gather_context else []
        names.append((GENERATION + output.name, 3))
    return names


def outputs_of_tensors(names: Iterable[str]) -> tuple[WantedOutput, ...]:
    """Return the outputs that an engine must compute for the tensors with these names."""
    gathered: dict[str, bool] = {}
    for name in names:
        prefix = CONTEXT if name.startswith(CONTEXT) else GENERATION
        plain = name.removeprefix(prefix)
        gathered[plain] = gathered.get(plain, False) or prefix == CONTEXT
    return tuple(WantedOutput(*each) for each in gathered.items())
