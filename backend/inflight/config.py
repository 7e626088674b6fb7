"""The table of config.pbtxt `parameters`, and the one reader of it.

TensorRT-LLM's keys come with their meaning and, where it is known, their default; then this project's own. An
empty value or an unfilled `${…}` is absent. Every other value must parse and every key must be known: the load
fails otherwise, with all problems in one message. Keys of TensorRT-LLM for what is not built yet are known, and
accepted at the values that ask for nothing. Those that could do nothing here, whatever their value is, are
accepted and logged. Pure.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from inflight.core.schedule.config import CapacitySchedulerPolicy, ContextChunkingPolicy
from inflight.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of parameter: what to write, and a parser that raises ValueError for anything else."""

    expected: str
    parse: Callable[[str], Any]


def _parse_boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "1"):
        return True
    if lowered in ("false", "0"):
        return False
    raise ValueError(text)


BOOLEAN = Kind("true or false", _parse_boolean)
TEXT = Kind("text", str)


def integer(minimum: int, maximum: int | None = None) -> Kind:
    """An integer in [minimum, maximum]."""

    def parse(text: str) -> int:
        value = int(text)
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(text)
        return value

    bounds = f">= {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    return Kind(f"an integer {bounds}", parse)


def real(minimum: float, maximum: float = math.inf, above: bool = False) -> Kind:
    """A number in [minimum, maximum], or ]minimum, maximum] if it has to be above the minimum."""

    def parse(text: str) -> float:
        value = float(text)
        if not (minimum <= value <= maximum) or (above and value == minimum) or math.isinf(value):
            raise ValueError(text)
        return value

    low = f"{'>' if above else '>='} {minimum:g}"
    return Kind(f"a number {low}" + ("" if math.isinf(maximum) else f" and <= {maximum:g}"), parse)


def choice(*names: str, any_case: bool = False) -> Kind:
    """One of these names, letter for letter, or with `any_case` in small letters or capitals."""

    def parse(text: str) -> str:
        for name in names:
            if text == name or (any_case and text.lower() == name.lower()):
                return name
        raise ValueError(text)

    return Kind(" or ".join(names), parse)


def member(enum: type[Enum], *but: Enum) -> Kind:
    """The value of one of an Enum's members, `but` these."""
    members = {item.value: item for item in enum if item not in but}

    def parse(text: str) -> Enum:
        if text not in members:
            raise ValueError(text)
        return members[text]

    return Kind(" or ".join(members), parse)


def _parse_names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise ValueError(text)
    return names


def _integers(expected: str, minimum: int) -> Kind:
    def parse(text: str) -> tuple[int, ...]:
        values = tuple(int(part) for part in text.split(","))
        if min(values) < minimum:
            raise ValueError(text)
        return values

    return Kind(expected, parse)


TOKEN_IDS = _integers("token ids >= 0 with commas between", 0)
WINDOWS = _integers("integers >= 1 with commas between", 1)
DEVICES = _integers("numbers >= 0 with commas between", 0)
NAMES = Kind("names with commas between", _parse_names)


class Role(Enum):
    """What a model of the repository does; each takes its own part of the parameters."""

    ENGINE = "engine"
    FRONT_END = "front end"
    PREPROCESSING = "preprocessing"
    POSTPROCESSING = "postprocessing"


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One row.

    Attributes:
        key: The key in config.pbtxt; a built row's is a field of Parameters too.
        kind: What its text may be.
        default: The value when absent.
        meaning: One line for the reader of config.pbtxt.
        roles: The models that take it.
        template: tensorrtllm_backend's template variable, where its name is not the key.
        template_value: What config.pbtxt says instead of a template variable.
        neutral: None for a built row. Otherwise the only values accepted, () for none.
        read_by_triton: Whether Triton's Python backend reads it and this package does not.
        no_effect: Why any value that parses does nothing; "" for a row of which that is not so. What was given is
            logged with it.
        complaint: How an error about its value begins: with {key} and {text}.
    """

    key: str
    kind: Kind
    default: Any
    meaning: str
    roles: frozenset[Role] = frozenset({Role.ENGINE})
    template: str = ""
    template_value: str = ""
    neutral: tuple[Any, ...] | None = None
    read_by_triton: bool = False
    complaint: str = "{key}: got {text!r}"
    no_effect: str = ""

    @property
    def built(self) -> bool:
        """Whether this version acts on it."""
        return self.neutral is None and not self.read_by_triton and not self.no_effect

    @property
    def expectation(self) -> str:
        """What may be written, for a comment."""
        if self.neutral is not None:
            return f"not available yet, {self._neutral_advice}"
        if self.no_effect:
            expected = "any text" if self.kind is TEXT else self.kind.expected
            return f"no effect, {self.no_effect}; {expected}"
        default = self.default.value if isinstance(self.default, Enum) else self.default
        shown = str(default).lower() if isinstance(default, bool) else default
        expected = "" if self.kind is TEXT else self.kind.expected
        return ", ".join(filter(None, (expected, f"{shown} by default" if shown not in (None, ()) else "")))

    @property
    def _neutral_advice(self) -> str:
        shown = [
            str(value).lower() if isinstance(value, bool) else str(value) for value in self.neutral or ()
        ]
        return "leave it out" + (f" or say {' or '.join(shown)}" if shown else "")

    def parse(self, text: str) -> Any:
        """The value of a filled-in `text`; ConfigError with key, value and what was expected."""
        try:
            value = self.kind.parse(text)
        except ValueError:
            complaint = self.complaint.format(key=self.key, text=text)
            raise ConfigError(f"{complaint}, expected {self.kind.expected}") from None
        if self.neutral is not None and value not in self.neutral:
            raise ConfigError(
                f"{self.key}: got {text!r}, which is not available in this version; {self._neutral_advice}"
            )
        return value


__all__ = [
    "PARAMETERS",
    "ParameterSpec",
    "Parameters",
    "Role",
    "is_filled",
    "read_parameters",
    "without_effect",
]


@dataclass(frozen=True, slots=True)
class Parameters:
    """Everything config.pbtxt says to this package, complete and checked. None means not given.

    One field per built row of PARAMETERS, by its key; the comments there say what they mean.
    """

    max_num_sequences: int
    gpt_model_path: str | None
    tokenizer_dir: str | None
    dtype: str | None
    kernels: str | None
    cuda_graph_mode: bool
    gpt_model_type: str
    batch_scheduler_policy: CapacitySchedulerPolicy
    enable_chunked_context: bool
    context_chunking_policy: ContextChunkingPolicy
    enable_kv_cache_reuse: bool
    max_num_tokens: int
    max_queue_size: int
    max_beam_width: int | None
    max_sequence_length: int | None
    max_attention_window_size: tuple[int, ...]
    sink_token_length: int
    tokens_per_block: int
    max_tokens_in_paged_kv_cache: int | None
    kv_cache_free_gpu_mem_fraction: float
    kv_cache_free_cpu_mem_fraction: float
    exclude_input_in_output: bool | None
    normalize_log_probs: bool
    default_end_ids: tuple[int, ...]
    ignored_request_parameters: tuple[str, ...]
    cancellation_check_period_ms: int
    stream_interval: int
    repeat_log_probs: bool
    max_repeated_logits_bytes: int
    stats_check_period_ms: int
    iter_stats_max_iterations: int
    request_stats_max_iterations: int
    enable_state_requests: bool
    record_path: str | None
    watchdog_timeout_ms: int
    engine_endpoint: str | None
    engine_threads: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    launch_mode: str | None
    mpirun_arguments: str | None
    rank_timeout_ms: int
    gpu_device_ids: tuple[int, ...]
    fake_engine: str | None
    tensorrt_llm_model_name: str
    add_special_tokens: bool
    skip_special_tokens: bool


_MODELS = frozenset({Role.ENGINE, Role.FRONT_END})
_FRONT_END = frozenset({Role.FRONT_END})
# Static batching is a type of model, not a policy.
_POLICIES = member(CapacitySchedulerPolicy, CapacitySchedulerPolicy.STATIC_BATCH)
_NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


_ENGINE = frozenset({Role.ENGINE})
_PREPROCESSING = frozenset({Role.PREPROCESSING})
_DATA_TYPES = choice("TYPE_FP16", "TYPE_BF16", "TYPE_FP32")


def _unbuilt(
    key: str,
    kind: Kind,
    meaning: str,
    *neutral: Any,
    template: str = "",
    roles: frozenset[Role] = _ENGINE,
) -> ParameterSpec:
    return ParameterSpec(key, kind, None, meaning, roles, template=template, neutral=neutral)


def _no_effect(
    key: str,
    kind: Kind,
    meaning: str,
    reason: str,
    roles: frozenset[Role] = _ENGINE,
) -> ParameterSpec:
    return ParameterSpec(key, kind, None, meaning, roles, no_effect=reason)


_BUILT: tuple[ParameterSpec, ...] = (
    ParameterSpec(
        "gpt_model_path",
        TEXT,
        None,
        "folder of the checkpoint; the demo model without one",
        frozenset({Role.ENGINE, Role.PREPROCESSING}),
        template="engine_dir",
    ),
    ParameterSpec("tokenizer_dir", TEXT, None, "folder of tokenizer.json", frozenset(Role)),
    ParameterSpec(
        "dtype",
        choice("float32", "bfloat16", "float16", "int8"),
        None,
        "of weights and KV cache, or int8, of weights beside bfloat16 for the rest; the checkpoint's without one",
    ),
    ParameterSpec(
        "kernels",
        choice("native", "torch"),
        None,
        "compiled layers, for CPUs with AVX-512, or torch's operators; native where possible without one",
    ),
    ParameterSpec(
        "cuda_graph_mode", BOOLEAN, True, "on one GPU, record iterations that only generate and replay them"
    ),
    ParameterSpec(
        "gpt_model_type",
        choice("V1", "inflight_batching", "inflight_fused_batching", any_case=True),
        "inflight_fused_batching",
        "V1 ends a batch before it starts the next; the others are in-flight batching, context and generation in "
        "one forward pass",
        template="batching_strategy",
        complaint="{key} value of {text!r} is not supported",
    ),
    ParameterSpec("batch_scheduler_policy", _POLICIES, _NO_EVICT, "who may hold KV blocks"),
    ParameterSpec("enable_chunked_context", BOOLEAN, False, "split long prompts over iterations"),
    ParameterSpec(
        "context_chunking_policy",
        member(ContextChunkingPolicy),
        ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
        "who gets the tokens of an iteration that are left for split prompts",
    ),
    ParameterSpec("enable_kv_cache_reuse", BOOLEAN, True, "share KV blocks of equal prefixes"),
    ParameterSpec("max_num_tokens", integer(1), 8192, "most tokens in one iteration"),
    ParameterSpec(
        "max_queue_size",
        integer(0),
        0,
        "most sequences that wait beyond the free slots, later ones are refused; 0: no bound",
    ),
    ParameterSpec("max_beam_width", integer(1), None, "most beams of a search; max_batch_size without one"),
    ParameterSpec(
        "max_sequence_length",
        integer(2),
        None,
        "prompt and output, at most what the model's positions reach; that without one",
    ),
    ParameterSpec(
        "max_attention_window_size",
        WINDOWS,
        (),
        "tokens that a layer attends to: one number, or some that are repeated over the layers; all without one",
    ),
    ParameterSpec(
        "sink_token_length", integer(0), 0, "first tokens that stay in every window, as part of it"
    ),
    ParameterSpec("tokens_per_block", integer(1), 32, "tokens per KV cache block"),
    ParameterSpec(
        "max_tokens_in_paged_kv_cache", integer(1), None, "size of the KV cache; by fraction without one"
    ),
    ParameterSpec(
        "kv_cache_free_gpu_mem_fraction",
        real(0, 1, above=True),
        0.9,
        "share of free GPU memory for the KV cache",
    ),
    ParameterSpec(
        "kv_cache_free_cpu_mem_fraction", real(0, 1, above=True), 0.5, "the same share of memory, on a CPU"
    ),
    ParameterSpec(
        "exclude_input_in_output",
        BOOLEAN,
        None,
        "leave the prompt out unless a request says otherwise",
        _MODELS,
    ),
    ParameterSpec(
        "normalize_log_probs",
        BOOLEAN,
        False,
        "output_log_probs of the distribution that a token was drawn from instead of the model's own",
    ),
    ParameterSpec(
        "ignored_request_parameters",
        NAMES,
        (),
        "request parameters that may come and that nobody reads, for instance HTTP headers that Triton forwards",
        frozenset(Role),
    ),
    ParameterSpec("default_end_ids", TOKEN_IDS, (), "end ids of requests by token ids without end_id"),
    ParameterSpec(
        "cancellation_check_period_ms",
        integer(1),
        20,
        "how often every client is asked whether it is gone",
        _MODELS,
    ),
    ParameterSpec(
        "stream_interval",
        integer(1),
        1,
        "tokens of a streamed response, but for the first and the last: each costs time that the model could have",
        _MODELS,
    ),
    ParameterSpec(
        "repeat_log_probs",
        BOOLEAN,
        True,
        "every response of a stream has the output_log_probs of all tokens so far; else those of its own tokens",
        _MODELS,
    ),
    ParameterSpec(
        "max_repeated_logits_bytes",
        integer(0),
        8 << 20,
        "context_logits up to this size are in every response of a stream, larger ones in its first alone",
        _MODELS,
    ),
    ParameterSpec("stats_check_period_ms", integer(1), 100, "how often statistics are published"),
    ParameterSpec(
        "iter_stats_max_iterations", integer(0), 1000, "iterations whose statistics are kept to be fetched"
    ),
    ParameterSpec("request_stats_max_iterations", integer(0), 0, "the same with statistics of every request"),
    ParameterSpec(
        "enable_state_requests", BOOLEAN, False, "let clients ask what is queued, running and cached"
    ),
    ParameterSpec("record_path", TEXT, None, "file to record requests and decisions to, for a replay"),
    ParameterSpec(
        "watchdog_timeout_ms",
        integer(0),
        60000,
        "an iteration that takes longer is reported as hung; 0: off",
    ),
    ParameterSpec(
        "engine_endpoint", TEXT, None, "path of the engine's socket; unique per server without one", _MODELS
    ),
    ParameterSpec(
        "engine_threads",
        integer(1),
        None,
        "threads of a rank's forward pass; its share of the cores without one",
    ),
    ParameterSpec("tensor_parallel_size", integer(1), 1, "ranks that share every layer"),
    ParameterSpec("pipeline_parallel_size", integer(1), 1, "stages that share out the layers"),
    ParameterSpec(
        "launch_mode",
        choice("in_process", "leader", "orchestrator"),
        None,
        "who starts the ranks: nobody, for one rank; mpirun or srun around tritonserver; this model. Found out "
        "without one",
    ),
    ParameterSpec("mpirun_arguments", TEXT, None, "more arguments for mpirun, in a shell's words"),
    ParameterSpec("rank_timeout_ms", integer(100), 5000, "a rank that is silent for longer is lost"),
    ParameterSpec(
        "gpu_device_ids", DEVICES, (), "GPUs to use, one for each rank of a host; the first without"
    ),
    ParameterSpec("fake_engine", TEXT, None, "a fake in place of the model: vocab=1000,step_us=200"),
    ParameterSpec(
        "tensorrt_llm_model_name",
        TEXT,
        "tensorrt_llm",
        "the model that holds the engine",
        _FRONT_END,
        template_value="tensorrt_llm",
    ),
    ParameterSpec(
        "add_special_tokens", BOOLEAN, True, "as the tokenizer does", frozenset({Role.PREPROCESSING})
    ),
    ParameterSpec(
        "skip_special_tokens",
        BOOLEAN,
        True,
        "leave special tokens out of text",
        _MODELS | {Role.POSTPROCESSING},
    ),
    ParameterSpec(
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        choice("yes", "no"),
        None,
        "read by Triton's Python backend",
        frozenset(Role),
        template_value="yes",
        read_by_triton=True,
    ),
)

_NO_ADAPTERS = "there are no adapters in this version"

_NO_EFFECT: tuple[ParameterSpec, ...] = (
    _no_effect(
        "decoding_mode",
        choice("auto", "top_k", "top_p", "top_k_top_p", "beam_search"),
        "how tokens are chosen",
        "every request says so for itself",
    ),
    _no_effect(
        "triton_backend",
        choice("tensorrtllm", "python"),
        "of tensorrtllm_backend, which implementation",
        "there is one",
    ),
    _no_effect("executor_worker_path", TEXT, "program of a worker rank", "ranks run this package"),
    _no_effect(
        "max_queue_delay_microseconds",
        integer(0),
        "how long Triton may hold requests back to batch them",
        "a request joins the batch in flight at once",
    ),
    _no_effect(
        "encoder_input_features_data_type",
        _DATA_TYPES,
        "of the input encoder_input_features",
        "no model here has an encoder",
    ),
    _no_effect(
        "prompt_embedding_table_data_type",
        _DATA_TYPES,
        "of the input prompt_embedding_table",
        "there are no prompt tables in this version",
    ),
    _no_effect("lora_cache_optimal_adapter_size", integer(0), "page size of the adapter cache", _NO_ADAPTERS),
    _no_effect("lora_cache_max_adapter_size", integer(0), "largest rank", _NO_ADAPTERS),
    _no_effect("lora_cache_gpu_memory_fraction", real(0, 1), "adapter cache", _NO_ADAPTERS),
    _no_effect("lora_cache_host_memory_bytes", integer(0), "adapter cache", _NO_ADAPTERS),
    _no_effect(
        "max_num_images", integer(0), "most images of a prompt", "no model here takes any", _PREPROCESSING
    ),
    _no_effect("hf_model_path", TEXT, "checkpoint of an image model", "no model here is one", _PREPROCESSING),
    _no_effect(
        "tokenizer_type",
        TEXT,
        "of older versions of tensorrtllm_backend",
        "tokenizer.json says it",
        frozenset({Role.PREPROCESSING, Role.POSTPROCESSING}),
    ),
)

_UNBUILT: tuple[ParameterSpec, ...] = (
    _unbuilt("multimodal_model_path", TEXT, "engine of an image model", roles=_PREPROCESSING),
    _unbuilt("visual_model_path", TEXT, "its name in older versions", roles=_PREPROCESSING),
    _unbuilt("encoder_model_path", TEXT, "encoder", template="encoder_engine_dir"),
    _unbuilt("cross_kv_cache_fraction", real(0, 1), "KV cache share of an encoder", 0.0),
    _unbuilt("kv_cache_host_memory_bytes", integer(0), "KV blocks offloaded to host memory", 0),
    _unbuilt("kv_cache_onboard_blocks", BOOLEAN, "copy offloaded blocks back", True, False),
    _unbuilt("enable_trt_overlap", BOOLEAN, "deprecated", False),
    _unbuilt("recv_poll_period_ms", integer(0), "of the leader", 0),
    _unbuilt("participant_ids", TEXT, "MPI ranks"),
    _unbuilt("num_nodes", integer(1), "nodes of an orchestrator", 1),
    _unbuilt("lora_prefetch_dir", TEXT, "adapters to load at start"),
    _unbuilt("speculative_decoding_fast_logits", BOOLEAN, "draft logits over MPI", False),
    _unbuilt("lookahead_window_size", integer(0), "lookahead decoding", 0),
    _unbuilt("lookahead_ngram_size", integer(0), "lookahead decoding", 0),
    _unbuilt("lookahead_verification_set_size", integer(0), "lookahead decoding", 0),
    _unbuilt("medusa_choices", TEXT, "draft tree"),
    _unbuilt("eagle_choices", TEXT, "draft tree"),
    _unbuilt("gpu_weights_percent", real(0, 1), "weights kept on the GPU", 1.0),
    _unbuilt("enable_context_fmha_fp32_acc", BOOLEAN, "TensorRT engines", False),
    _unbuilt("multi_block_mode", BOOLEAN, "TensorRT engines", True, False),
    _unbuilt("cuda_graph_cache_size", integer(0), "TensorRT engines", 0),
    _unbuilt("guided_decoding_backend", TEXT, "grammars"),
    _unbuilt("xgrammar_tokenizer_info_path", TEXT, "grammars"),
)

PARAMETERS: tuple[ParameterSpec, ...] = (*_BUILT, *_NO_EFFECT, *_UNBUILT)


def read_parameters(model_config: Mapping[str, Any], role: Role) -> Parameters:
    """What a model's configuration, as Triton hands it to `initialize`, says.

    Raises ConfigError that lists every problem: key, value, what was expected, and the nearest known key.
    """
    problems: list[str] = []
    known = {spec.key: spec for spec in PARAMETERS if role in spec.roles}
    given: dict[str, Any] = {}
    for key, entry in model_config.get("parameters", {}).items():
        text = str(entry.get("string_value", ""))
        if key not in known:
            problems.append(_unknown(key, text, known))
        elif is_filled(text):
            try:
                given[key] = known[key].parse(text)
            except ConfigError as error:
                problems.append(str(error))
    max_batch_size = int(model_config.get("max_batch_size", 0))
    if max_batch_size < 1:
        problems.append(f"max_batch_size: got {max_batch_size}, expected an integer >= 1")
    if problems:
        raise ConfigError(
            f"config.pbtxt of {model_config.get('name', role.value)}:\n  " + "\n  ".join(problems)
        )
    given.setdefault("max_queue_size", _queue_bound(model_config))
    values = {spec.key: given.get(spec.key, spec.default) for spec in PARAMETERS if spec.built}
    return Parameters(max_num_sequences=max_batch_size, **values)


def without_effect(model_config: Mapping[str, Any], role: Role) -> list[str]:
    """A line for each parameter that was given and does nothing, for the log."""
    rows = {spec.key: spec for spec in PARAMETERS if spec.no_effect and role in spec.roles}
    given = {
        key: str(entry.get("string_value", "")) for key, entry in model_config.get("parameters", {}).items()
    }
    return [
        f"parameter {key} is {text!r} and has no effect: {rows[key].no_effect}"
        for key, text in given.items()
        if key in rows and is_filled(text)
    ]


def is_filled(text: str) -> bool:
    """Whether a parameter says anything: not if it is empty or a template variable nobody filled in."""
    return bool(text) and not re.fullmatch(r"\$\{[^}]*\}", text)


def _queue_bound(model_config: Mapping[str, Any]) -> int:
    """tensorrtllm_backend's place for max_queue_size: the bound of Triton's own queue."""
    policy = model_config.get("dynamic_batching", {}).get("default_queue_policy", {})
    return int(policy.get("max_queue_size", 0))


def _unknown(key: str, text: str, known: Mapping[str, ParameterSpec]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(sorted(known))}"
    return f"{key}: got {text!r}, but there is no such parameter; {hint}"
