"""Describe a remote engine by its model's configuration and a tokenizer folder on this machine.

A server does not report all of its limits. Limits that are not known are set as wide as possible; the server
itself refuses requests that exceed its limits. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from inflight.checkpoint_config import CheckpointFacts
from inflight.config import PARAMETERS, Parameters, Role
from inflight.core.request.engine_description import EngineDescription, ModelLimits
from inflight.core.schedule.batch import EngineLimits
from inflight.parameter_reader import read_parameters
from inflight.text.tokenizer import Tokenizer

_UNKNOWN = 1 << 30
_KNOWN_HERE = {spec.key for spec in PARAMETERS if Role.ENGINE in spec.roles}


class _AnyName(tuple[str, ...]):
    """A tuple that contains every name, for names that only the server knows."""

    def __contains__(self, name: object) -> bool:
        return True


def describe(tokenizer_dir: str) -> Callable[[Mapping[str, Any], int | None], EngineDescription]:
    """Return a function that converts a server's model configuration to an engine description.

    The returned function takes KServe's ModelConfig as JSON, and the number of KV blocks (None if the server
    does not report it). It raises ConfigError for a parameter with an invalid value.

    `describe` itself reads the tokenizer, and config.json and generation_config.json if they exist. It
    raises ConfigError if the folder has no tokenizer, or one of these files is invalid.
    """
    folder = Path(tokenizer_dir).expanduser()
    tokenizer = Tokenizer.from_dir(folder)
    facts = CheckpointFacts.read(folder)
    vocab_size = facts.vocab_size or tokenizer.vocab_size
    positions = facts.longest_sequence or _UNKNOWN
    end_ids = facts.eos_token_ids

    def of_model(model: Mapping[str, Any], num_blocks: int | None) -> EngineDescription:
        given = model.get("parameters", {})
        known = {key: value for key, value in given.items() if key in _KNOWN_HERE}  # newer servers have more
        parameters = read_parameters({**model, "parameters": known}, Role.ENGINE)
        return EngineDescription(
            _limits(parameters, vocab_size, positions, num_blocks),
            model_path=parameters.engine.gpt_model_path or str(folder),
            tokenizer_dir=str(folder),
            eos_token_ids=end_ids,
            dtype=parameters.engine.dtype or "float32",
            state_enabled=parameters.enable_state_requests,
            adapter_commands_enabled=parameters.enable_adapter_commands,
        )

    return of_model


def _limits(parameters: Parameters, vocab_size: int, positions: int, num_blocks: int | None) -> ModelLimits:
    engine = parameters.engine
    if num_blocks is None:
        size = engine.max_tokens_in_paged_kv_cache
        num_blocks = _UNKNOWN if size is None else size // engine.tokens_per_block
    of_engine = EngineLimits(
        vocab_size,
        engine.max_sequence_length or positions,
        engine.max_num_sequences,
        num_blocks,
        engine.tokens_per_block,
        logits_post_processors=_AnyName(),
    )
    return replace(of_engine.model_limits(parameters.scheduler), max_adapter_rank=_UNKNOWN)
