"""Read a checkpoint's config.json and generation_config.json. No other module reads these files.

Errors have the file, the key, its value and the expected value. `inflight.models` interprets each family's
keys when it loads a checkpoint; code that loads no checkpoint, or needs a fact earlier, uses
`CheckpointFacts`. Imports only the standard library; any thread.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from inflight.errors import ConfigError
from inflight.file_names import native
from inflight.json_values import MAX_NUMBER, is_list, is_object, positive_int
from inflight.multimodal import Multimodal, find_text_part
from inflight.positions import longest_sequence

DTYPES = ("float32", "bfloat16", "float16")
"""Possible dtypes of unquantized weights."""

_CONFIG, _GENERATION = "config.json", "generation_config.json"
MAX_COUNT = 10_000
"""More layers or heads than any model has. Descriptions list all of them, so their number must be bounded."""
GEMMA4_HEADS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Values of `model_type` in draft heads of Gemma 4."""
_POSITIVE_INT, _POSITIVE = "an integer >= 1", "a number > 0"
_SNAPSHOT = re.compile(r"models--(.+)/snapshots/[0-9a-f]{40}")
_NAME_THE_FILE = (
    "; a GGUF file (llama.cpp's format) is read if --model names the file itself: FOLDER/FILE.gguf"
)
_T = TypeVar("_T")


def checkpoint_name(folder: Path) -> str:
    """Return a checkpoint's name: its name on the hub if it was downloaded, else its folder's name."""
    found = _SNAPSHOT.search(folder.as_posix())
    return found[1].replace("--", "/") if found else folder.name


def instead_of_gguf(path: Path) -> str:
    """Return the advice for an error about `path` if the path has a GGUF file; "" if it has none."""
    is_gguf = "gguf" in checkpoint_name(path).rsplit("/")[-1].lower() or any(path.glob("*.gguf"))
    return _NAME_THE_FILE if is_gguf else ""


def read_json(path: Path) -> Any:
    """Return the value in a JSON file of a checkpoint.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigError: The file cannot be read, or is no JSON, for example because a download was interrupted.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}: download it again") from error


class ConfigFile:
    """Typed access to the keys of one JSON object. A key whose value is null counts as absent.

    It records which keys were read, so that a caller can check the other keys afterwards.

    Attributes:
        path: The file.
        values: Keys and values.
        whole: The whole config.json, if this is a multimodal model's text part; otherwise this object.
        multimodal: The class of that model; None if this is not a text part.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], section: str = "") -> None:
        """Wrap `values`, found in `path` under the keys `section`, with dots ("" for the whole file)."""
        self.path = path
        self.values = values
        self._section = section
        self._outside: frozenset[str] = frozenset()
        self._read: set[str] = set()
        self.whole: ConfigFile = self
        self.multimodal: Multimodal | None = None

    @classmethod
    def load(cls, path: Path) -> ConfigFile:
        """Read the file `path`; raise ConfigError if it is missing or not a JSON object."""
        try:
            values = read_json(path)
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist; a Hugging Face checkpoint folder has one") from None
        if not is_object(values):
            raise ConfigError(f"{path} holds a {type(values).__name__}, expected a JSON object")
        return cls(path, values)

    def error(self, key: str, expected: str) -> ConfigError:
        """Return the error for a value of `key` that cannot be used."""
        name = self._path_of(key)
        if key not in self.values:
            return ConfigError(f"{self.path}: key {name!r} is missing, expected {expected}")
        return ConfigError(f"{self.path}: key {name!r} is {self.values[key]!r}, expected {expected}")

    def value(self, key: str) -> Any:
        """Return the value of `key`, of any type, or None if absent; the key counts as read from now on."""
        self._read.add(key)
        return self.values.get(key)

    def unread(self) -> list[str]:
        """Return the present keys that have not been read."""
        return [key for key in self.values if key not in self._read]

    def has(self, key: str) -> bool:
        """Return whether `key` is present and not null."""
        return self.value(key) is not None

    def int_or_none(self, key: str) -> int | None:
        """Return an integer of at least 1; None if absent."""
        value = self._checked(key, lambda value: type(value) is int and value >= 1, _POSITIVE_INT)
        return self._bounded(key, value)

    def positive_int(self, key: str) -> int:
        """Return an integer of at least 1."""
        return self._required(key, self.int_or_none(key), _POSITIVE_INT)

    def count(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 0; `default` if the key is absent. null is an error."""
        found = self.value(key) if key in self.values else default
        if type(found) is not int or found < 0:
            raise self.error(key, "an integer >= 0")
        return self._bounded(key, found)

    def number_or_none(self, key: str) -> float | None:
        """Return a positive number; None if absent."""
        value = self._checked(
            key, lambda value: type(value) in (int, float) and 0 < value < float("inf"), _POSITIVE
        )
        return None if value is None else float(self._bounded(key, value))

    def number(self, key: str) -> float:
        """Return a required positive number; ConfigError if it is absent or of another type."""
        return self._required(key, self.number_or_none(key), _POSITIVE)

    def boolean(self, key: str, default: bool) -> bool:
        """Return a boolean; `default` if absent."""
        value = self._checked(key, lambda value: type(value) is bool, "true or false")
        return default if value is None else value

    def text_or_none(self, key: str) -> str | None:
        """Return a string; None if absent."""
        return self._checked(key, lambda value: isinstance(value, str), "a string")

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty if absent."""
        return tuple(self._checked(key, lambda value: _is_list_of(value, str), "a list of strings") or ())

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of positive numbers."""

        def is_valid(value: Any) -> bool:
            return is_list(value) and all(type(item) in (int, float) and item > 0 for item in value)

        expected = "a list of numbers > 0"
        found = self._required(key, self._checked(key, is_valid, expected), expected)
        return tuple(float(self._bounded(key, item)) for item in found)

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        """Return the ids of a token id or list of token ids, without negative ones; None if absent."""
        value = self._checked(
            key, lambda value: type(value) is int or _is_list_of(value, int), "a token id or a list of them"
        )
        if value is None:
            return None
        ids = value if is_list(value) else [value]
        return tuple(item for item in dict.fromkeys(ids) if item >= 0)

    def _checked(self, key: str, is_valid: Callable[[Any], bool], expected: str) -> Any:
        """Return the value of `key`, or None if absent; raise ConfigError if it is not valid."""
        value = self.value(key)
        if value is not None and not is_valid(value):
            raise self.error(key, expected)
        return value

    def _bounded(self, key: str, value: _T) -> _T:
        """Return `value`, which is a number or None; raise ConfigError if it is too large to compute with."""
        if isinstance(value, int | float) and value > MAX_NUMBER:
            raise self.error(key, f"at most {MAX_NUMBER}")
        return value

    def _required(self, key: str, value: _T | None, expected: str) -> _T:
        if value is None:
            raise self.error(key, expected)
        return value

    def with_values(self, values: Mapping[str, Any]) -> ConfigFile:
        """Return the file with other values for some keys. Keys read from the copy count as read in both."""
        changed = copy.copy(self)
        changed.values = {**self.values, **values}
        return changed

    def text_part(self) -> ConfigFile:
        """Return the config.json of a multimodal model's text part; for any other model this object."""
        found = find_text_part(self.values)
        if found is None:
            return self
        part = ConfigFile(self.path, found.values, found.section)
        part._outside, part.whole, part.multimodal = found.outside, self, found.whole_class
        return part

    def child(self, key: str) -> ConfigFile:
        """Return the object under `key`."""
        value = self.value(key)
        if not is_object(value):
            raise self.error(key, "a JSON object")
        return ConfigFile(self.path, value, self._path_of(key))

    def _path_of(self, key: str) -> str:
        return f"{self._section}.{key}" if self._section and key not in self._outside else key


class CheckpointFacts:
    """Facts about a checkpoint from its config.json, whatever key a family uses for a fact.

    For a multimodal model, name, model type and tokenizer are the whole model's, and all other facts are the
    text part's. A fact that config.json does not state is None. Sizes that are not integers of at least 1
    are treated as absent; loading the checkpoint reports such errors.
    """

    def __init__(self, config: ConfigFile) -> None:
        """Read the facts from `config`, the contents of a config.json."""
        self._config = config.text_part()

    @classmethod
    def read(cls, *folders: str | Path) -> CheckpointFacts:
        """Return the facts from the first of these folders that has a config.json.

        Without one, all facts are None.

        Raises:
            ConfigError: The file cannot be read, or is not a JSON object.
        """
        paths = [Path(native(folder)) / _CONFIG for folder in folders]
        for path in paths:
            if path.is_file():
                return cls(ConfigFile.load(path))
        return cls(ConfigFile(paths[0] if paths else Path(_CONFIG), {}))

    @property
    def name(self) -> str:
        """The class names in `architectures`, else the model type; ConfigError if they are not strings."""
        return ", ".join(self._config.whole.texts("architectures")) or self.model_type or "unnamed"

    @property
    def model_type(self) -> str | None:
        """The model type; ConfigError if it is not a string."""
        return self._config.whole.text_or_none("model_type")

    @property
    def tokenizer_class(self) -> str | None:
        """Name of transformers' tokenizer class; ConfigError if it is not a string."""
        return self._config.whole.text_or_none("tokenizer_class")

    @property
    def vocab_size(self) -> int | None:
        """Number of logits, which may exceed the number of tokens in the tokenizer."""
        return self._size("vocab_size")

    @property
    def num_layers(self) -> int | None:
        """Number of decoder layers, recurrent ones included; None if not stated."""
        return self._size("num_hidden_layers", "n_layer")

    @property
    def hidden_size(self) -> int | None:
        """Width of the hidden states."""
        return self._size("hidden_size", "n_embd", "n_embed")

    @property
    def num_heads(self) -> int | None:
        """Number of attention heads of a layer."""
        return self._size("num_attention_heads", "n_head")

    @property
    def num_kv_heads(self) -> int | None:
        """Number of key and value heads of a layer; the number of attention heads if not stated."""
        values = self._config.values
        # Falcon has one key head by default, whatever the file says about their number.
        is_falcon = values.get("model_type") == "falcon"
        if is_falcon and not values.get("new_decoder_architecture") and values.get("multi_query", True):
            return 1
        return self._size("num_key_value_heads", "num_kv_heads") or self.num_heads

    @property
    def mlp_size(self) -> int | None:
        """Inner width of an MLP, or of a shared one beside experts; four times the hidden size if not stated."""
        stated = self._size(
            "intermediate_size_mlp",
            "intermediate_size",
            "block_ff_dim",
            "n_inner",
            "ffn_hidden_size",
            "shared_expert_intermediate_size",
        )
        return stated or (self.hidden_size and 4 * self.hidden_size)

    @property
    def num_experts(self) -> int | None:
        """Number of experts of a layer; None in a model without experts."""
        return self._size("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

    @property
    def longest_sequence(self) -> int | None:
        """Longest sequence in tokens that the positions allow, scaled ones too."""
        return longest_sequence(self._config.values)

    @property
    def dtype(self) -> str | None:
        """Dtype of the stored weights, one of DTYPES; None if it is not stated, or auto."""
        return stated_dtype(self._config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a sequence; empty if neither file states any."""
        return eos_token_ids(self._config)

    @property
    def quantization(self) -> ConfigFile | None:
        """The section about quantized weights. Raises ConfigError if it is not a JSON object."""
        key = "quantization_config"
        return self._config.child(key) if self._config.has(key) else None

    def _size(self, *keys: str) -> int | None:
        """Return the first size that is stated; of a list with a size for each layer, the largest."""
        for key in keys:
            value = self._config.value(key)
            sizes = [positive_int(each) or 0 for each in (value if is_list(value) else [value])]
            if largest := max(sizes, default=0):
                return largest
        return None


def read_config_file(folder: Path | str) -> ConfigFile:
    """Read config.json of a checkpoint folder; raise ConfigError if there is none."""
    folder = Path(native(folder))
    if not folder.is_dir():
        hint = instead_of_gguf(folder)
        raise ConfigError(f"{folder} is not a folder, expected a Hugging Face checkpoint folder{hint}")
    path = folder / _CONFIG
    if not path.exists() and (hint := instead_of_gguf(folder)):
        raise ConfigError(f"{path} does not exist{hint}")
    return ConfigFile.load(path)


def is_gemma4_head(folder: Path | str) -> bool:
    """Whether a folder's config.json is that of a draft head of Gemma 4; False if it cannot be read."""
    try:
        return read_config_file(folder).values.get("model_type") in GEMMA4_HEADS
    except ConfigError:
        return False


def eos_token_ids(config: ConfigFile) -> tuple[int, ...]:
    """Return the end ids from generation_config.json beside a config.json, else from config.json itself."""
    of_config = config.token_ids("eos_token_id")
    path = config.path.with_name(_GENERATION)
    of_generation = ConfigFile.load(path).token_ids("eos_token_id") if path.exists() else None
    return (of_config if of_generation is None else of_generation) or ()


def stated_dtype(config: ConfigFile) -> str | None:
    """Return the stated dtype of the weights, one of DTYPES; None if it is not stated, or auto."""
    old, new = config.text_or_none("torch_dtype"), config.text_or_none("dtype")
    key, name = ("torch_dtype", old) if new is None else ("dtype", new)
    if name == "auto":
        return None
    if name is not None and name not in DTYPES:
        raise config.error(key, f"one of {', '.join(DTYPES)}, or auto")
    return name


def _is_list_of(value: Any, kind: type) -> bool:
    """Return whether a value is a list whose items all have this type; a bool is not an int."""
    return is_list(value) and all(type(item) is kind for item in value)
