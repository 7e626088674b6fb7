"""A JSON file of a checkpoint, read key by key; errors name file, key, what came and what was expected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError


class ConfigFile:
    """Typed access to the keys of one JSON object. A key that is null counts as absent.

    It remembers which keys were asked for, so that whoever has read all that is understood can look at the rest.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], section: str = "") -> None:
        """Wrap `values`, found in `path` under the key `section` ("" for the whole file)."""
        self.path = path
        self.values = values
        self._section = section
        self._read: set[str] = set()

    @classmethod
    def load(cls, path: Path) -> ConfigFile:
        """Read `path`. Raises ConfigError if it is missing or no JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist; a Hugging Face checkpoint folder has one") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} holds a {type(values).__name__}, expected a JSON object")
        return cls(path, values)

    def error(self, key: str, expected: str) -> ConfigError:
        """The error for a value that cannot be used."""
        name = f"{self._section}.{key}" if self._section else key
        if key not in self.values:
            return ConfigError(f"{self.path}: key {name!r} is missing, expected {expected}")
        return ConfigError(f"{self.path}: key {name!r} is {self.values[key]!r}, expected {expected}")

    def value(self, key: str) -> Any:
        """What stands under `key`, of whatever type; None if absent. The key counts as read from now on."""
        self._read.add(key)
        return self.values.get(key)

    def unread(self) -> list[str]:
        """The keys that are there and that nobody has asked for."""
        return [key for key in self.values if key not in self._read]

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.value(key) is not None

    def int_or_none(self, key: str) -> int | None:
        """An integer of at least 1, None if absent."""
        value = self.value(key)
        if value is not None and (type(value) is not int or value < 1):
            raise self.error(key, "an integer >= 1")
        return value

    def positive_int(self, key: str) -> int:
        """An integer of at least 1."""
        value = self.int_or_none(key)
        if value is None:
            raise self.error(key, "an integer >= 1")
        return value

    def number_or_none(self, key: str) -> float | None:
        """A positive number, None if absent."""
        value = self.value(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.error(key, "a number > 0")
        return float(value)

    def number(self, key: str) -> float:
        """A positive number."""
        value = self.number_or_none(key)
        if value is None:
            raise self.error(key, "a number > 0")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.value(key)
        if value is not None and type(value) is not bool:
            raise self.error(key, "true or false")
        return default if value is None else value

    def text_or_none(self, key: str) -> str | None:
        """A string, None if absent."""
        value = self.value(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty if absent."""
        value = self.value(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of strings")
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        """A token id or a list of token ids, without those below 0, which no token has; None if absent."""
        value = self.value(key)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if not all(type(item) is int for item in ids):
            raise self.error(key, "a token id or a list of them")
        return tuple(item for item in dict.fromkeys(ids) if item >= 0)

    def child(self, key: str) -> ConfigFile:
        """The object under `key`."""
        value = self.value(key)
        if not isinstance(value, dict):
            raise self.error(key, "a JSON object")
        return ConfigFile(self.path, value, key)
