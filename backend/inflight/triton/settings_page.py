"""Write the reference of all settings, docs/settings.md, from the declarations of the parameters.

`scripts/write_configs` runs it through `reference_pages.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from inflight import environment
from inflight.config import PARAMETERS, ParameterSpec, Role
from inflight.parameter_names import OTHER_NAMES, OtherNames
from inflight.parameter_spec import BOOLEAN, ENGINE_ONLY, integer
from inflight.triton.config_pbtxt import DEFAULT_MAX_BATCH_SIZE, MODELS

_FIRST_VERSION = "0.1"
_OF_VALUE = re.compile(r"([\w-]+(?: and [\w-]+)?(?: \([^)]*\))?): (.*)")
"""A part of a parameter's meaning that is about a value, or about two values."""
_WORD = re.compile(r"\b(?!and\b)[\w-]+(?![^(]*\))")
"""A value in the first group of `_OF_VALUE`, but not a remark in brackets."""
_CHOICES = re.compile(r"[\w-]+(?:(?:, | or )[\w-]+)+")
"""Expectation of a parameter that is a list of values."""
_NAME = re.compile(
    r"""(?<![\w`/"-])(?:--[a-z][a-z-]*[a-z]|[A-Za-z0-9]+(?:_[A-Za-z0-9]+)+)(?![\w<=(-]|&lt;)"""
)
"""A flag, or a name with underscores, in a text."""

FIELDS = (
    ParameterSpec(
        "max_batch_size",
        integer(1),
        DEFAULT_MAX_BATCH_SIZE,
        "maximum number of sequences that run at a time, and maximum number of prompts in one request",
        frozenset(Role),
    ),
    ParameterSpec(
        "decoupled_mode",
        BOOLEAN,
        True,
        "a request may get several responses; false: a request gets exactly one response",
        frozenset({Role.ENGINE, Role.FRONT_END, Role.BLS}),
    ),
)
"""Fields of config.pbtxt that --set also takes, although they are not parameters."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model": (
        *("gpt_model_path", "tokenizer_dir", "dtype", "engine", "tensorrt_engine_dir", "kernels", "weights"),
        *("cuda_graph_mode", "engine_threads", "max_sequence_length", "max_attention_window_size"),
        *("sink_token_length", "recurrent_state_snapshots", "default_end_ids"),
    ),
    "Scheduling": (
        *("max_batch_size", "max_num_tokens", "gpt_model_type", "batch_scheduler_policy"),
        *("enable_chunked_context", "context_chunking_policy", "schedule_policy", "max_queue_size"),
        *("max_beam_width", "max_sequences_per_request", "speculative_decoding_mode"),
        *("speculative_model_dir", "eagle_choices"),
    ),
    "KV cache": (
        *("kv_cache_free_gpu_mem_fraction", "kv_cache_free_cpu_mem_fraction", "max_tokens_in_paged_kv_cache"),
        *("tokens_per_block", "kv_cache_dtype", "enable_kv_cache_reuse", "kv_cache_host_memory_bytes"),
        *("kv_cache_dir", "kv_cache_disk_bytes", "kv_cache_max_age_s", "kv_cache_onboard_blocks"),
        *("secondary_offload_min_priority", "kv_events_config"),
    ),
    "Requests and responses": (
        *("decoupled_mode", "exclude_input_in_output", "stream_interval", "repeat_log_probs"),
        *("normalize_log_probs", "max_repeated_logits_bytes", "additional_model_outputs"),
        *("add_special_tokens", "skip_special_tokens", "accumulate_tokens", "ignored_request_parameters"),
        *("prompt_embedding_table_data_type", "logits_post_processor_module", "cancellation_check_period_ms"),
        *("receipt_key_file", "otlp_traces_endpoint", "enable_sleep_mode"),
    ),
    "LoRA adapters": (
        *("lora_adapters", "lora_dir", "lora_prefetch_dir", "enable_adapter_commands"),
        *("lora_cache_max_adapter_size", "lora_cache_optimal_adapter_size", "lora_cache_gpu_memory_fraction"),
        *("lora_cache_host_memory_bytes", "lora_weights_data_type"),
    ),
    "Guided decoding": (
        *("guided_decoding_backend", "guided_decoding_compile_timeout_ms", "guided_decoding_max_guide_bytes"),
    ),
    "Several models": (
        *("tensorrt_llm_model_name", "tensorrt_llm_draft_model_name", "engine_endpoint"),
        "draft_engine_endpoint",
    ),
    "Several ranks and GPUs": (
        *("tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size", "gpu_device_ids"),
        *("launch_mode", "mpirun_arguments", "rank_timeout_ms"),
    ),
    "Watching and debugging": (
        *("hang_timeout_ms", "watchdog_timeout_ms", "stats_check_period_ms", "iter_stats_max_iterations"),
        *("request_stats_max_iterations", "enable_state_requests", "record_path", "debug_input_tensors"),
        *("debug_output_tensors", "debug_tensor_names", "debug_tensors_max_iterations", "debug_tensors_dir"),
    ),
}
"""The keys of all implemented settings, by heading of the page."""


def settings_reference() -> str:
    """Return the page's generated part: each setting, those without an effect, and the environment variables."""
    specs = {spec.key: spec for spec in (*FIELDS, *PARAMETERS)}
    parts: list[str] = []
    for title, keys in GROUPS.items():
        parts += [f"## {title}", ""]
        for key in keys:
            parts += [*_entry(specs[key]), ""]
    parts += ["## Settings without effect", ""]
    parts += [
        "The server accepts these keys, so that it can load config.pbtxt files of other servers. A key that "
        "is not available yet can be left out, or have the value that the table names. Any other value is "
        "refused.",
        "",
    ]
    parts += [*_idle(spec for spec in PARAMETERS if not spec.built), ""]
    parts += ["## Environment variables", "", "Variables of this server:", "", *_variables(), ""]
    parts += [
        "Every command and every load of a model fails if one of these variables has a value that is not "
        "allowed, or if another variable has nearly the same name (probably a typing error). For other "
        "unknown variables whose names begin with `INFLIGHT_`, `inflight serve` logs a warning."
    ]
    return "\n".join(parts)


def _entry(spec: ParameterSpec) -> Iterator[str]:
    """Yield the lines about one setting: its meaning, its values, the flag and other names, the models."""
    names = OTHER_NAMES.get(spec.key, OtherNames())
    meaning = _ValueMeaning.of(spec.meaning)
    yield f"### {spec.key}"
    yield ""
    text = mark_names(_plain(meaning.text))
    yield f"{text[0].upper()}{text[1:]}."
    yield ""
    yield f"- values: {_values(spec.kind.expected)}; default: {_default(spec, meaning)}"
    for values, says in meaning.values:
        yield f"    - {_WORD.sub(_code, values)}: {mark_names(_plain(says))}"
    flag = f"`{names.flag}`, or " if names.flag else ""
    since = f", since {spec.since}" if spec.since != _FIRST_VERSION else ""
    yield f"- set by {flag}`--set {spec.key}=…`{since}"
    if found := list(_elsewhere(spec.key, names)):
        yield f"- {'; '.join(found)}"
    if spec.roles != ENGINE_ONLY:
        yield f"- read by {', '.join(f'`{model.name}`' for model in MODELS if model.role in spec.roles)}"


def _code(word: re.Match[str]) -> str:
    return f"`{word[0]}`"


def mark_names(text: str) -> str:
    """Return the text in Markdown, with flags and names of settings as code."""
    return _NAME.sub(_code, text).replace("` `", " ")


def mark_values(text: str) -> str:
    """Return a meaning with the values that it describes as code: "auto: not quantized" begins with `auto`."""
    found = [(part, _OF_VALUE.fullmatch(part)) for part in text.split("; ")]
    return "; ".join(f"{_WORD.sub(_code, value[1])}: {value[2]}" if value else part for part, value in found)


@dataclass(frozen=True, slots=True)
class _ValueMeaning:
    """The parts of a parameter's meaning.

    Attributes:
        text: Purpose of the parameter.
        values: Values of the parameter, and what each of them does.
        default: The default, if the meaning has it.
    """

    text: str
    values: tuple[tuple[str, str], ...]
    default: str

    @classmethod
    def of(cls, meaning: str) -> _ValueMeaning:
        parts = meaning.split("; ")
        found = [_OF_VALUE.fullmatch(part) for part in parts]
        text = "; ".join(part for part, value in zip(parts, found, strict=True) if not value)
        values = [(value[1], value[2]) for value in found if value]
        default = next((says for value, says in values if value == "default"), "")
        return cls(text, tuple(pair for pair in values if pair[0] != "default"), default)


def _default(spec: ParameterSpec, meaning: _ValueMeaning) -> str:
    value = spec.default.value if isinstance(spec.default, Enum) else spec.default
    if value in (None, ()):
        return mark_names(_plain(meaning.default)) or "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _values(expected: str) -> str:
    """Return the values that a parameter takes; names of values as code."""
    if not _CHOICES.fullmatch(expected):
        return _plain(expected)
    *others, last = (f"`{value}`" for value in re.split(", | or ", expected))
    return f"{', '.join(others)} or {last}"


def _elsewhere(key: str, names: OtherNames) -> Iterator[str]:
    if names.vllm:
        yield f"vLLM: {', '.join(f'`{name}`' for name in names.vllm.split(', '))}"
    if names.tensorrt_llm:
        yield f"TensorRT-LLM: `{names.tensorrt_llm}`"
    if names.is_of_backend:
        yield f"tensorrtllm_backend: `{_variable(key)}`"


def _variable(key: str) -> str:
    """Return the variable of tensorrtllm_backend's templates that sets the parameter."""
    spec = next((spec for spec in PARAMETERS if spec.key == key), None)
    return (spec.template if spec else {"max_batch_size": "triton_max_batch_size"}.get(key, "")) or key


def _idle(specs: Iterator[ParameterSpec]) -> Iterator[str]:
    yield "| key | meaning | here |"
    yield "|---|---|---|"
    for spec in specs:
        here, _, values = spec.expectation.partition("; values: ")
        if spec.read_by_triton:
            here, values = "read by Triton's Python backend only", spec.kind.expected
        values = f"; values: {_values(values)}" if values else ""
        meaning = (
            "whether Triton gives a model its tensors in CPU memory" if spec.read_by_triton else spec.meaning
        )
        yield f"| `{spec.key}` | {mark_names(_plain(meaning))} | {mark_names(_plain(here))}{values} |"


def _variables() -> Iterator[str]:
    yield "| variable | meaning |"
    yield "|---|---|"
    for variable in environment.VARIABLES.values():
        yield f"| `{variable.name}` | {variable.meaning} |"


def _plain(text: str) -> str:
    """Return the text without characters that Markdown would read as HTML or as a column."""
    return (
        text.replace(">=", "≥")
        .replace("<=", "≤")
        .replace("<", "&lt;")
        .replace(">", "&gt;")
        .replace("|", "\\|")
    )
