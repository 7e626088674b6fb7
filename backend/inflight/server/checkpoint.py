"""A checkpoint, before anything is started: where `--model` is, and in how many parts it can be cut.

`--model` is a folder on this machine, or the name of a checkpoint to fetch from the Hugging Face hub. Knows only
what config.json calls the sizes. Of a model that says none of them nothing is known, and the engine itself refuses
what cannot be done.
"""

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from inflight.ranks.topology import tensor_parallel_sizes
from inflight.server.errors import OptionError

_LAYERS = ("num_hidden_layers", "n_layer")
_HEADS = ("num_attention_heads", "n_head")
_WIDTH = ("hidden_size", "n_embd")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WANTED_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]


def find_checkpoint(model: str) -> Path:
    """The folder that holds `model`; raises OptionError where there is none to be had."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise OptionError(
                f"--model {model}: no config.json in that folder, so not a Hugging Face checkpoint"
            )
        return _check_spelling(model, folder.resolve())
    if folder.exists() or not _HUB_ID.fullmatch(model):
        raise OptionError(f"--model {model}: not a folder")
    return _download(model)


def check_rank_sizes(checkpoint: Path, tp: int, pp: int) -> None:
    """Raise OptionError if the model cannot be cut so, with what would do."""
    if tp == pp == 1:
        return
    config = _read_config(checkpoint)
    if (num_layers := _first(config, _LAYERS)) is not None and pp > num_layers:
        raise OptionError(
            f"--pp {pp}: every stage needs a layer, and {checkpoint.name} has {num_layers} layers, "
            f"so --pp can be 1 to {num_layers}"
        )
    num_heads, width = _first(config, _HEADS), _first(config, _WIDTH)
    if num_heads is None or width is None:
        return
    num_kv_heads = _first(config, ("num_key_value_heads",)) or num_heads
    inner = _first(config, ("intermediate_size", "n_inner")) or 4 * width
    sizes = tensor_parallel_sizes(num_heads, num_kv_heads, inner)
    if tp not in sizes:
        raise OptionError(
            f"--tp {tp}: does not divide {checkpoint.name}, which has {num_heads} heads, {num_kv_heads} key heads "
            f"and an MLP of {inner}, so --tp can be {', '.join(map(str, sizes))}"
        )


def _check_spelling(model: str, folder: Path) -> Path:
    """Return the folder; OptionError if config.pbtxt, which is UTF-8, cannot say where it is."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise OptionError(
            f"--model {model}: the folder's name is not UTF-8, as config.pbtxt has to be"
        ) from None
    return folder


def _download(model: str) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise OptionError(
            f"--model {model}: no such folder, and fetching it from the Hugging Face hub needs the package "
            "huggingface_hub (pip install huggingface_hub)"
        ) from None
    try:
        return Path(hub.snapshot_download(model, allow_patterns=_WANTED_FILES))
    except Exception as error:  # the hub's client raises its own, the HTTP library's and the system's
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OptionError(
            f"--model {model}: no such folder, and not to be had from the Hugging Face hub: {reason}"
        ) from None


def _read_config(checkpoint: Path) -> Mapping[str, object]:
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # whoever loads it says what is wrong
    return config if isinstance(config, dict) else {}


def _first(config: Mapping[str, object], keys: tuple[str, ...]) -> int | None:
    """The value of the first of these keys that has a positive one."""
    found = (config.get(key) for key in keys)
    return next((value for value in found if type(value) is int and value > 0), None)
