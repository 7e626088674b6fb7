"""Which layers of a model see a window of the last tokens only, in the families' several spellings."""

from __future__ import annotations

from inflight.models.config_file import ConfigFile

_DEFAULT_WINDOW = 4096  # transformers' default where the key is absent; null means none
_DEFAULT_FULL_LAYERS = 28


def read_no_windows(config: ConfigFile) -> tuple[None, ...]:
    """Every layer sees everything. ConfigError if a key speaks of windows that would be used."""
    num_layers = config.positive_int("num_hidden_layers")
    if "sliding_attention" in _read_layer_types(config, num_layers):
        raise config.error("layer_types", "full_attention for every layer")
    config.value("max_window_layers")
    if config.has("sliding_window") and config.boolean("use_sliding_window", True):
        raise config.error("sliding_window", "null: this family has no sliding windows")
    return (None,) * num_layers


def read_windows_of_all(config: ConfigFile) -> tuple[int | None, ...]:
    """Mistral's: `sliding_window` in every layer, or in those that `layer_types` has slide."""
    num_layers = config.positive_int("num_hidden_layers")
    types = _read_layer_types(config, num_layers)
    window = _read_window(config)
    if window is None and "sliding_attention" in types:
        raise _no_window(config)
    return tuple(window if kind == "sliding_attention" else None for kind in types) or (window,) * num_layers


def read_windows_if_used(config: ConfigFile) -> tuple[int | None, ...]:
    """Qwen's: if `use_sliding_window`, in layers that `layer_types` names, or from `max_window_layers` on."""
    num_layers = config.positive_int("num_hidden_layers")
    types = _read_layer_types(config, num_layers)
    # 0 is a meaningful max_window_layers: every layer slides.
    full = config.value("max_window_layers") if "max_window_layers" in config.values else _DEFAULT_FULL_LAYERS
    if not config.boolean("use_sliding_window", False):
        config.value("sliding_window")
        if "sliding_attention" in types:
            raise config.error("use_sliding_window", "true, since layer_types has sliding_attention")
        return (None,) * num_layers
    if type(full) is not int or full < 0:
        raise config.error("max_window_layers", "an integer >= 0")
    slides = [kind == "sliding_attention" for kind in types] or [i >= full for i in range(num_layers)]
    window = _read_window(config)
    if window is None and "sliding_attention" in types:
        raise _no_window(config)
    return tuple(window if sliding else None for sliding in slides)


def _read_layer_types(config: ConfigFile, num_layers: int) -> tuple[str, ...]:
    """One a layer; empty if the key is absent."""
    types = config.texts("layer_types")
    if config.has("layer_types") and (
        len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}
    ):
        raise config.error(
            "layer_types", f"full_attention or sliding_attention for each of num_hidden_layers, {num_layers}"
        )
    return types


def _read_window(config: ConfigFile) -> int | None:
    window = config.int_or_none("sliding_window")
    return window if "sliding_window" in config.values else _DEFAULT_WINDOW


def _no_window(config: ConfigFile) -> Exception:
    return config.error("sliding_window", "an integer >= 1, since layer_types has sliding_attention")
