"""adapter_config.json of a PEFT folder: target layers, scales, and the fields that rows cannot express.

Source: PEFT 0.21's `LoraConfig`, and its rules for patterns (`get_pattern_key`) and target modules
(`check_target_module_exists`). A field that is neither implemented nor listed as harmless may change the
computation, so an adapter with such a field is refused, unless its value is null, false, "" or empty.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.errors import InvalidArgument
from inflight.json_values import is_list, is_object

CONFIG_FILE = "adapter_config.json"

_HONOURED = """
    peft_type r lora_alpha use_rslora use_dora rank_pattern alpha_pattern target_modules exclude_modules
    layers_to_transform layers_pattern init_lora_weights bias
"""
_HARMLESS = """
    task_type auto_mapping peft_version base_model_name_or_path revision inference_mode runtime_config
    lora_dropout fan_in_fan_out ensure_weight_tying megatron_core qalora_group_size
    loftq_config eva_config corda_config lora_ga_config
"""
HONOURED = frozenset(_HONOURED.split())
HARMLESS = frozenset(_HARMLESS.split())
"""Fields about an adapter's origin and training, and details of features that are refused by another field.
`fan_in_fan_out` describes how the model's own weights are stored, which the model's family determines; the
configurations of initializations only matter for values of `init_lora_weights`.
"""
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_CHANGES_MODEL = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields of adapter_config.json that determine the rows of `lora_weights`.

    For their meaning see PEFT's documentation of `LoraConfig`.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...] | None
    exclude_modules: str | tuple[str, ...]
    layers_to_transform: tuple[int, ...]
    layers_pattern: tuple[str, ...]

    @classmethod
    def load(cls, folder: Path) -> PeftConfig:
        """Read a folder's file; raise InvalidArgument, naming the field, for an unsupported value."""
        try:
            values: Any = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InvalidArgument(f"{CONFIG_FILE} is missing") from None
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"{CONFIG_FILE} cannot be read as JSON: {error}: download it again"
            ) from None
        if not is_object(values):
            raise InvalidArgument(f"{CONFIG_FILE} holds a {type(values).__name__}, expected a JSON object")
        return cls.from_values(values)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> PeftConfig:
        """Read the file's object; raise InvalidArgument like `load`."""
        _refuse(values)
        read = _Reader(values)
        layers = values.get("layers_to_transform")
        patterns = values.get("layers_pattern")
        return cls(
            r=read.get("r", 8, _is_rank, "an integer >= 1"),
            lora_alpha=read.get("lora_alpha", 8, _is_number, "a number"),
            use_rslora=read.get("use_rslora", False, _is_bool, "true or false"),
            use_dora=read.get("use_dora", False, _is_bool, "true or false"),
            rank_pattern=read.patterns("rank_pattern", _is_rank, "integers >= 1"),
            alpha_pattern=read.patterns("alpha_pattern", _is_number, "numbers"),
            target_modules=read.names("target_modules", None),
            exclude_modules=read.names("exclude_modules", ()) or (),
            layers_to_transform=(layers,) if type(layers) is int else read.items("layers_to_transform", int),
            layers_pattern=(
                (patterns,) if type(patterns) is str and patterns else read.items("layers_pattern", str)
            ),
        )

    def rank(self, module: str) -> int:
        """Return the rank of a module, given its name in the base model, such as
        `model.layers.0.self_attn.q_proj`."""
        return self.rank_pattern.get(_pattern_key(self.rank_pattern, module), self.r)

    def scale(self, module: str) -> float:
        """Return the scale of a module's delta, the factor of B A."""
        rank = self.rank(module)
        alpha = self.alpha_pattern.get(_pattern_key(self.alpha_pattern, module), self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def is_target(self, module: str) -> bool:
        """Return whether the adapter changes a module of this name, by PEFT's rules."""
        if _is_named(self.exclude_modules, module):
            return False
        if self.target_modules is None:
            return True
        if not _is_named(self.target_modules, module):
            return False
        is_listed = not isinstance(self.target_modules, str)
        if not (is_listed and self.layers_to_transform) or module in self.target_modules:
            return True
        # The first number after a name is the layer's.
        patterns = [rf"(?:^|.*?\.){each}" for each in self.layers_pattern] or [r".*?\.[^.]*"]
        matches = (re.match(rf"{each}\.(\d+)\.", module) for each in patterns)
        match = next((each for each in matches if each is not None), None)
        return match is not None and int(match.group(1)) in self.layers_to_transform


def _refuse(values: Mapping[str, Any]) -> None:
    """Raise InvalidArgument for the first field that a row cannot express."""

    def error(field: str, expected: str) -> InvalidArgument:
        return InvalidArgument(f"{CONFIG_FILE}: {field} is {values.get(field)!r}, expected {expected}")

    if values.get("peft_type") != "LORA":
        raise error("peft_type", "'LORA'")
    if values.get("bias", "none") != "none":
        raise error("bias", "'none': rows of lora_weights have no biases")
    init = values.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_MODEL):
        raise error(
            "init_lora_weights",
            "one that leaves the model's own weights as they are: save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion",
        )
    for field, value in values.items():
        if field not in HONOURED and field not in HARMLESS and not any(value == each for each in _NOTHING):
            raise error(field, "nothing there: a row of lora_weights cannot express it")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed access to fields; error messages have the field, the received and the expected value."""

    values: Mapping[str, Any]

    def get(self, field: str, default: Any, is_valid: Any, expected: str) -> Any:
        value = self.values.get(field)
        if value is None:
            return default
        if not is_valid(value):
            raise self._error(field, expected)
        return value

    def patterns(self, field: str, is_valid: Any, expected: str) -> dict[str, Any]:
        value: Any = self.values.get(field) or {}
        if not is_object(value) or not all(map(is_valid, value.values())):
            raise self._error(field, f"an object of names, or regular expressions, and {expected}")
        for each in value:
            self._check_expression(field, each)
        return value

    def names(self, field: str, default: Any) -> Any:
        """Return a regular expression or a list of names."""
        value = self.values.get(field)
        if isinstance(value, str):
            self._check_expression(field, value)
            return value
        return default if value is None else self.items(field, str)

    def items(self, field: str, kind: type) -> tuple[Any, ...]:
        value: Any = self.values.get(field) or []
        if not is_list(value) or not all(type(each) is kind for each in value):
            raise self._error(field, f"a list of {'integers' if kind is int else 'names'}")
        return tuple(value)

    def _check_expression(self, field: str, text: str) -> None:
        try:
            re.compile(text)
        except re.error as error:
            raise self._error(field, f"regular expressions; {text!r} is not one: {error}") from None

    def _error(self, field: str, expected: str) -> InvalidArgument:
        return InvalidArgument(f"{CONFIG_FILE}: {field} is {self.values[field]!r}, expected {expected}")


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _pattern_key(patterns: Mapping[str, Any], module: str) -> str:
    """Return the first pattern that matches the whole name of a module, or its end after a dot; "" if none
    does."""
    return next((each for each in patterns if re.match(rf"(.*\.)?({each})$", module)), "")


def _is_named(names: str | tuple[str, ...], module: str) -> bool:
    """Return whether `names` selects a module: as a regular expression it must match the whole name; of a list,
    an entry must equal the name or its end after a dot."""
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == each or module.endswith(f".{each}") for each in names)
