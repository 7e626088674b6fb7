"""The maximum sequence length of an engine, by its parameters and the checkpoint's positions. Imports no torch."""

from __future__ import annotations

from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.models.decoder_config import DecoderConfig
from inflight.models.rope_config import DynamicScaling


def longest_sequence(config: EngineConfig, decoder: DecoderConfig) -> int:
    """Return the maximum sequence length in tokens: the configured one, or what the model's positions allow.

    Raises ConfigError if the configured length exceeds the model's.
    """
    wanted, longest = config.max_sequence_length, decoder.max_positions
    if wanted is None or wanted <= longest:
        return wanted or longest
    reason = ""
    if any(rope is not None and isinstance(rope.scaling, DynamicScaling) for rope in decoder.ropes):
        reason = (
            ": its rotary positions are of type dynamic, which change for all tokens of a sequence with every one "
            "beyond that, so that cached keys would be wrong; type yarn or linear in config.json reaches further"
        )
    raise ConfigError(
        f"max_sequence_length is {wanted}, expected at most {longest}, which is how far the positions of "
        f"{config.gpt_model_path} reach{reason}"
    )
