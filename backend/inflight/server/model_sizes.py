"""Whether a checkpoint can be cut into as many parts as there are to be ranks, before any of them is started.

Knows only what its config.json calls the sizes. Of a model that says none of them nothing is known, and the engine
itself refuses what does not go.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from inflight.ranks.topology import tensor_parallel_sizes
from inflight.server.errors import OptionError

_LAYERS = ("num_hidden_layers", "n_layer")
_HEADS = ("num_attention_heads", "n_head")
_WIDTH = ("hidden_size", "n_embd")


def check_rank_sizes(checkpoint: Path, tp: int, pp: int) -> None:
    """Raise OptionError if the model cannot be cut so, with what would do."""
    if tp == pp == 1:
        return
    config = _read(checkpoint)
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


def _read(checkpoint: Path) -> Mapping[str, object]:
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # whoever loads it says what is wrong
    return config if isinstance(config, dict) else {}


def _first(config: Mapping[str, object], keys: tuple[str, ...]) -> int | None:
    """The first of these that is there."""
    found = (config.get(key) for key in keys)
    return next((value for value in found if type(value) is int and value > 0), None)
