"""A row of the table of config.pbtxt `parameters`: what it takes, and how it reads and explains itself. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from inflight.errors import ConfigError
from inflight.triton.parameter_kinds import TEXT, Kind


class Role(Enum):
    """What a model of the repository does; each takes its own part of the parameters."""

    ENGINE = "engine"
    FRONT_END = "front end"
    PREPROCESSING = "preprocessing"
    POSTPROCESSING = "postprocessing"


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One row.

    Attributes:
        key: The key in config.pbtxt; a built row's is a field of Parameters too.
        kind: What its text may be.
        default: The value when absent.
        meaning: One line for the reader of config.pbtxt.
        roles: The models that take it.
        template: tensorrtllm_backend's template variable, where its name is not the key.
        template_value: What config.pbtxt says instead of a template variable.
        neutral: None for a built row. Otherwise the only values accepted, () for none.
        read_by_triton: Whether Triton's Python backend reads it and this package does not.
        no_effect: Why any value that parses does nothing; "" for a row of which that is not so. What was given is
            logged with it.
        complaint: How an error about its value begins: with {key} and {text}.
    """

    key: str
    kind: Kind
    default: Any
    meaning: str
    roles: frozenset[Role] = frozenset({Role.ENGINE})
    template: str = ""
    template_value: str = ""
    neutral: tuple[Any, ...] | None = None
    read_by_triton: bool = False
    complaint: str = "{key}: got {text!r}"
    no_effect: str = ""

    @property
    def built(self) -> bool:
        """Whether this version acts on it."""
        return self.neutral is None and not self.read_by_triton and not self.no_effect

    @property
    def expectation(self) -> str:
        """What may be written, for a comment."""
        if self.neutral is not None:
            return f"not available yet, {self._neutral_advice}"
        if self.no_effect:
            expected = "any text" if self.kind is TEXT else self.kind.expected
            return f"no effect, {self.no_effect}; {expected}"
        default = self.default.value if isinstance(self.default, Enum) else self.default
        shown = str(default).lower() if isinstance(default, bool) else default
        expected = "" if self.kind is TEXT else self.kind.expected
        return ", ".join(filter(None, (expected, f"{shown} by default" if shown not in (None, ()) else "")))

    @property
    def _neutral_advice(self) -> str:
        shown = [
            str(value).lower() if isinstance(value, bool) else str(value) for value in self.neutral or ()
        ]
        return "leave it out" + (f" or say {' or '.join(shown)}" if shown else "")

    def parse(self, text: str) -> Any:
        """The value of a filled-in `text`; ConfigError with key, value and what was expected."""
        try:
            value = self.kind.parse(text)
        except ValueError:
            complaint = self.complaint.format(key=self.key, text=text)
            raise ConfigError(f"{complaint}, expected {self.kind.expected}") from None
        if self.neutral is not None and value not in self.neutral:
            raise ConfigError(
                f"{self.key}: got {text!r}, which is not available in this version; {self._neutral_advice}"
            )
        return value
