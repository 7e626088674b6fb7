"""Typed access to the keys of a GGUF file that belong to its architecture."""

from __future__ import annotations

from typing import Any

from inflight.checkpoint_config import MAX_COUNT, ConfigFile
from inflight.gguf.header import GgufHeader
from inflight.json_values import is_list


class ArchitectureKeys:
    """The architecture's keys, named without the prefix "<architecture>."; and the names of the file's tensors.

    All methods raise ConfigError if a value has another type, or a required key is absent.
    """

    def __init__(self, header: GgufHeader, keys: ConfigFile) -> None:
        self.header, self.keys, self._prefix = header, keys, f"{header.architecture}."

    @property
    def num_layers(self) -> int:
        """Number of layers without draft layers, which follow them."""
        count = self.size("block_count")
        if count > MAX_COUNT:
            raise self.keys.error(self.name("block_count"), f"at most {MAX_COUNT}")
        return count - (self.size_or_none("nextn_predict_layers") or 0)

    def name(self, key: str) -> str:
        """Return a key with the architecture's prefix, such as llama.context_length."""
        return self._prefix + key

    def size(self, key: str) -> int:
        """Return an integer of at least 1."""
        return self.keys.positive_int(self.name(key))

    def size_or_none(self, key: str) -> int | None:
        """Return an integer of at least 1; None if the key is absent or 0."""
        return self.keys.int_or_none(self.name(key)) if self.keys.value(self.name(key)) else None

    def count(self, key: str) -> int:
        """Return an integer of at least 0; 0 if the key is absent."""
        return self.keys.count(self.name(key), 0)

    def number(self, key: str) -> float:
        """Return a required positive number."""
        return self.keys.number(self.name(key))

    def number_or_none(self, key: str) -> float | None:
        """Return a positive number; None if the key is absent or 0."""
        return self.keys.number_or_none(self.name(key)) if self.keys.value(self.name(key)) else None

    def boolean(self, key: str, default: bool) -> bool:
        """Return a boolean; `default` if absent."""
        return self.keys.boolean(self.name(key), default)

    def of_layers(self, key: str) -> list[Any] | None:
        """Return a value for each layer, from a list of them or one for all; None if the key is absent.

        Draft layers are left out.
        """
        value = self.keys.value(self.name(key))
        if value is None:
            return None
        if not is_list(value):
            return [value] * self.num_layers
        if len(value) < self.num_layers or {type(each) for each in value} not in ({bool}, {int}):
            raise self.keys.error(self.name(key), f"a value for each of the {self.num_layers} layers")
        return value[: self.num_layers]

    def numbers(self, name: str) -> list[float] | None:
        """Return the numbers of a list, with one for each layer; None if the key is absent.

        `name` is the whole name of the key, because not all such keys have the architecture's prefix.
        """
        value = self.keys.value(name)
        if value is not None and (not is_list(value) or len(value) != self.num_layers):
            raise self.keys.error(name, f"a number for each of the {self.num_layers} layers")
        return value

    def largest(self, key: str) -> int:
        """Return the largest of the layers' sizes."""
        found = self.of_layers(key) or [0]
        if type(found[0]) is not int or max(found) < 1:
            raise self.keys.error(self.name(key), "an integer >= 1, or integers for each layer")
        return max(found)

    def expect(self, key: str, *allowed: object) -> None:
        """Raise ConfigError unless the value is one of `allowed`; None allows an absent key."""
        if self.keys.value(self.name(key)) not in allowed:
            expected = " or ".join(repr(each) for each in allowed if each is not None)
            raise self.keys.error(self.name(key), expected or "no such key")

    def has_tensor(self, of_layer: str) -> bool:
        """Return whether any layer has a tensor of this name, such as attn_q.bias."""
        return any(f"blk.{layer}.{of_layer}" in self.header.tensors for layer in range(self.num_layers))
