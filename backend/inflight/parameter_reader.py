"""Read the parameters of a config.pbtxt according to their declarations in `config.py`.

An empty value or an unfilled `${…}` counts as absent. Every other value must be valid and every key must be
known; otherwise ConfigError is raised, with all problems in one message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inflight.checkpoint_config import is_gemma4_head
from inflight.config import (
    DEFAULT_NUM_SEQUENCES,
    PARAMETERS,
    CapacityPolicy,
    EngineConfig,
    Parameters,
    ParameterSpec,
    Role,
    SchedulingConfig,
    Speculation,
)
from inflight.errors import ConfigError
from inflight.near_words import nearest
from inflight.parameter_names import in_other_words
from inflight.parameter_spec import declared_rows

OLD_NAMES: Mapping[str, str] = {
    "max_kv_cache_length": "max_attention_window_size",
    "worker_path": "executor_worker_path",
}
"""Present name of each parameter by its former name in tensorrtllm_backend's files of 2023 and 2024."""


def read_parameters(model_config: Mapping[str, Any], role: Role) -> Parameters:
    """Read a model's parameters from its configuration, as Triton passes it to `initialize`.

    Raises a ConfigError that lists every problem: the key, its value, the expected values, and the nearest
    known key.
    """
    problems: list[str] = []
    known = {spec.key: spec for spec in PARAMETERS if role in spec.roles}
    given: dict[str, Any] = {}
    for key, entry in model_config.get("parameters", {}).items():
        text = str(entry.get("string_value", ""))
        name = _newest_name(key)
        if name not in known:
            problems.append(_unknown(key, text, known))
        elif is_filled(text):
            try:
                value = known[name].parse(text)
                if given.setdefault(name, value) != value:
                    problems.append(
                        f"{key}: got {text!r}, but its other name has {given[name]}: set only one of them"
                    )
            except ConfigError as error:
                problems.append(f"{key}, now {error}" if key in OLD_NAMES else str(error))
    max_batch_size = int(model_config.get("max_batch_size", 0))
    least = 0 if role is Role.ENGINE else 1  # 0 means tensors without a batch dimension, as in llmapi
    if max_batch_size < least:
        problems.append(f"max_batch_size: got {max_batch_size}, expected an integer >= {least}")
    problems += _take_draft_folder(given) or _take_choices(given)
    if problems:
        raise ConfigError(
            f"config.pbtxt of {model_config.get('name', role.value)}:\n  " + "\n  ".join(problems)
        )
    given.setdefault("max_queue_size", _queue_bound(model_config))
    if given.get("gpt_model_type") == "V1":
        given["batch_scheduler_policy"] = CapacityPolicy.STATIC_BATCH
    scheduler = SchedulingConfig(**_fields(SchedulingConfig, given))
    speculation = scheduler.speculative_decoding_mode
    engine = EngineConfig(
        **_fields(EngineConfig, given),
        max_num_sequences=max_batch_size or DEFAULT_NUM_SEQUENCES,
        max_num_tokens=scheduler.max_num_tokens,
        has_draft_head=speculation is not None and speculation.method == Speculation.MTP,
        draft_head_dir=scheduler.speculative_model_dir,
    )
    return Parameters(**_fields(Parameters, given), scheduler=scheduler, engine=engine)


def mode_of_head(folder: str | Path) -> str:
    """Return the `speculative_decoding_mode` that the folder of a draft head implies: of Gemma 4, or EAGLE-3."""
    return f"{Speculation.MTP}:3" if is_gemma4_head(folder) else Speculation.EAGLE3


def _take_draft_folder(given: dict[str, Any]) -> list[str]:
    """Make `speculative_model_dir` imply its mode; return the problem if mode and folder do not go together."""
    folder = given.get("speculative_model_dir")
    if folder is None:
        mode = given.get("speculative_decoding_mode")
        if mode is None or mode.method != Speculation.EAGLE3:
            return []
        return [
            "speculative_decoding_mode: got eagle3, expected speculative_model_dir with the folder of its head"
        ]
    implied = Speculation.parse(mode_of_head(folder))
    assert implied is not None, "a head drafts"
    mode = given.setdefault("speculative_decoding_mode", implied)
    method = "none" if mode is None else mode.method
    if method == implied.method:
        return []
    return [
        f"speculative_model_dir: got {folder!r}, expected speculative_decoding_mode {implied.method}, got {method}"
    ]


def _take_choices(given: dict[str, Any]) -> list[str]:
    """Make the length of a draft that of `eagle_choices`; return the problems if there is no head for it or
    for the `decoding_mode` eagle."""
    tree, mode = given.get("eagle_choices"), given.get("speculative_decoding_mode")
    length = None if tree is None else tree.num_tokens
    if mode is None or not mode.has_head:
        asking = [] if length is None else [f"eagle_choices: got drafts of {length} tokens"]
        if given.get("decoding_mode") == "eagle":
            asking.append("decoding_mode: got eagle")
        return [
            f"{each}, expected a head beside it: speculative_model_dir with the folder of an EAGLE-3 head, or "
            "speculative_decoding_mode mtp"
            for each in asking
        ]
    if length is None:
        return []
    if mode.num_tokens not in (length, Speculation.default_length(mode.method)):
        return [
            f"eagle_choices: got drafts of {length} tokens, but speculative_decoding_mode is "
            f"{mode.method}:{mode.num_tokens}: set only one of them"
        ]
    given["speculative_decoding_mode"] = Speculation(mode.method, length)
    return []


def _fields(owner: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values of the fields of `owner`, by field name."""
    return {name: given[spec.key] for name, spec in declared_rows(owner).items() if spec.key in given}


def without_effect(model_config: Mapping[str, Any], role: Role) -> list[str]:
    """Return a log line for each given parameter that has no effect."""
    rows = {spec.key: spec for spec in PARAMETERS if spec.no_effect and role in spec.roles}
    given = {
        key: str(entry.get("string_value", "")) for key, entry in model_config.get("parameters", {}).items()
    }
    return [
        f"parameter {key} is {text!r} and has no effect: {row.no_effect}"
        for key, text in given.items()
        if is_filled(text) and (row := rows.get(_newest_name(key))) is not None
    ]


def _newest_name(key: str) -> str:
    return OLD_NAMES.get(key, key)


def is_filled(text: str | None) -> bool:
    """Return whether a parameter is given: not absent, not empty, and not an unfilled template variable."""
    return bool(text) and not re.fullmatch(r"\$\{[^}]*\}", text or "")


def _queue_bound(model_config: Mapping[str, Any]) -> int:
    """Return the limit of Triton's own queue, which tensorrtllm_backend's files set from max_queue_size."""
    policy = model_config.get("dynamic_batching", {}).get("default_queue_policy", {})
    return int(policy.get("max_queue_size", 0))


def _unknown(key: str, text: str, known: Mapping[str, ParameterSpec]) -> str:
    near = nearest(key, known)
    hint = f"did you mean {near}?" if near else f"expected one of {', '.join(sorted(known))}"
    return f"{key}: got {text!r}, but there is no such parameter; {in_other_words(key) or hint}"
