"""A checkpoint, before anything is started: where `--model` is, and in how many parts it can be cut.

Where that is, `inflight.hub` finds out. Knows only what config.json calls the sizes. Of a model that says none of
them nothing is known, and the engine itself refuses what cannot be done.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from inflight import hub
from inflight.errors import ConfigError
from inflight.ranks.topology import tensor_parallel_sizes
from inflight.server.errors import OptionError

_LAYERS = ("num_hidden_layers", "n_layer")
_HEADS = ("num_attention_heads", "n_head")
_WIDTH = ("hidden_size", "n_embd")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def find_checkpoint(model: str, revision: str | None = None) -> Path:
    """The folder that holds `model`; raises OptionError where there is none to be had."""
    try:
        folder = hub.find_checkpoint(model, revision)
    except ConfigError as error:
        raise OptionError(f"--model {error}") from None
    return _check_spelling(model, folder.resolve())


def check_rank_sizes(checkpoint: Path, tp: int, pp: int, ep: int = 1) -> None:
    """Raise OptionError if the model cannot be cut so, with what would do."""
    if tp == pp == 1:
        return
    config, name = _read_config(checkpoint), hub.checkpoint_name(checkpoint)
    if (num_layers := _first(config, _LAYERS)) is not None and pp > num_layers:
        raise OptionError(
            f"--pp {pp}: every stage needs a layer, and {name} has {num_layers} layers, "
            f"so --pp can be 1 to {num_layers}"
        )
    num_heads, width = _first(config, _HEADS), _first(config, _WIDTH)
    if num_heads is None or width is None:
        return
    if ep > 1:
        _check_experts(name, _first(config, _EXPERTS), tp, ep)
    num_kv_heads = _first(config, ("num_key_value_heads",)) or num_heads
    inner = _first(config, ("intermediate_size", "n_inner")) or 4 * width
    sizes = tensor_parallel_sizes(
        num_heads, num_kv_heads, inner * ep
    )  # an expert is for the ranks of a group
    if tp not in sizes:
        raise OptionError(
            f"--tp {tp}: does not divide {name}, which has {num_heads} heads, {num_kv_heads} key heads "
            f"and an MLP of {inner}, so --tp can be {', '.join(map(str, sizes))}"
        )


def _check_experts(name: str, count: int | None, tp: int, ep: int) -> None:
    if count is None:
        raise OptionError(f"--ep {ep}: {name} has no experts, so --ep can be 1")
    if count % ep:
        sizes = [size for size in range(1, tp + 1) if not (tp % size or count % size)]
        raise OptionError(
            f"--ep {ep}: does not divide the {count} experts of {name}, so with --tp {tp} it can be "
            f"{', '.join(map(str, sizes))}"
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
