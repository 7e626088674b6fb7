"""TensorRT-LLM's Executor API, under its names: `import inflight.executor as trtllm`.

    executor = trtllm.Executor("path/to/checkpoint", trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig())
    request_id = executor.enqueue_request(trtllm.Request([1, 2, 3, 4], max_tokens=10))
    print(executor.await_responses(request_id)[0].result.output_token_ids)

Importing this package imports neither torch nor an engine: the classes in `_WITH_ENGINE`, which need both,
are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from inflight.executor import kv_cache
from inflight.executor.config import (
    CacheTransceiverConfig,
    DebugConfig,
    DecodingConfig,
    DynamicBatchConfig,
    ExecutorConfig,
    ExtendedRuntimePerfKnobConfig,
    GuidedDecodingConfig,
    KvCacheConfig,
    LogitsPostProcessorConfig,
    OrchestratorConfig,
    ParallelConfig,
    PeftCacheConfig,
    RuntimeDefaults,
    SchedulerConfig,
    SpeculativeDecodingConfig,
)
from inflight.executor.debug_tensors import DebugTensorsPerIteration
from inflight.executor.enums import (
    BatchingType,
    CacheTransceiverBackendType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    CommunicationType,
    ContextChunkingPolicy,
    DecodingMode,
    FinishReason,
    KvCacheTransferMode,
    ModelType,
    RequestStage,
    RequestType,
)
from inflight.executor.errors import ExecutorError, InvalidValue, NotSupported
from inflight.executor.request import (
    ContextPhaseParams,
    EagleConfig,
    ExternalDraftTokensConfig,
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    LookaheadDecodingConfig,
    LoraConfig,
    MropeConfig,
    MultimodalInput,
    PromptTuningConfig,
    Request,
)
from inflight.executor.response import (
    AdditionalOutput,
    KvCacheMetrics,
    RequestPerfMetrics,
    Response,
    Result,
    SpeculativeDecodingFastLogitsInfo,
    SpeculativeDecodingMetrics,
    TimingMetrics,
    deserialize_result,
    serialize_result,
)
from inflight.executor.sampling import AdditionalModelOutput, OutputConfig, SamplingConfig
from inflight.executor_stats import (
    DisServingRequestStats,
    InflightBatchingStats,
    IterationStats,
    KvCacheIterationStats,
    KvCacheStats,
    KvCacheTierStats,
    RequestStats,
    RequestStatsPerIteration,
    SpecDecodingStats,
    StaticBatchingStats,
)

_WITH_ENGINE: dict[str, str] = {"Executor": "inflight.executor.executor"}
"""Modules that import the engine, by the name of the class that they define."""

__all__ = [
    "AdditionalModelOutput",
    "AdditionalOutput",
    "BatchingType",
    "CacheTransceiverBackendType",
    "CacheTransceiverConfig",
    "CapacitySchedulerPolicy",
    "CommunicationMode",
    "CommunicationType",
    "ContextChunkingPolicy",
    "ContextPhaseParams",
    "DebugConfig",
    "DebugTensorsPerIteration",
    "DecodingConfig",
    "DecodingMode",
    "DisServingRequestStats",
    "DynamicBatchConfig",
    "EagleConfig",
    "ExecutorConfig",
    "ExecutorError",
    "ExtendedRuntimePerfKnobConfig",
    "ExternalDraftTokensConfig",
    "FinishReason",
    "GuidedDecodingConfig",
    "GuidedDecodingParams",
    "InflightBatchingStats",
    "InvalidValue",
    "IterationStats",
    "KvCacheConfig",
    "KvCacheIterationStats",
    "KvCacheMetrics",
    "KvCacheRetentionConfig",
    "KvCacheStats",
    "KvCacheTierStats",
    "KvCacheTransferMode",
    "LogitsPostProcessorConfig",
    "LookaheadDecodingConfig",
    "LoraConfig",
    "ModelType",
    "MropeConfig",
    "MultimodalInput",
    "NotSupported",
    "OrchestratorConfig",
    "OutputConfig",
    "ParallelConfig",
    "PeftCacheConfig",
    "PromptTuningConfig",
    "Request",
    "RequestPerfMetrics",
    "RequestStage",
    "RequestStats",
    "RequestStatsPerIteration",
    "RequestType",
    "Response",
    "Result",
    "RuntimeDefaults",
    "SamplingConfig",
    "SchedulerConfig",
    "SpecDecodingStats",
    "SpeculativeDecodingConfig",
    "SpeculativeDecodingFastLogitsInfo",
    "SpeculativeDecodingMetrics",
    "StaticBatchingStats",
    "TimingMetrics",
    "__version__",
    "deserialize_result",
    "kv_cache",
    "serialize_result",
]

try:
    __version__ = version("inflight")
except PackageNotFoundError:  # the package is not installed but imported from its source folder
    __version__ = "0"


def __getattr__(name: str) -> Any:
    if name in _WITH_ENGINE:
        return getattr(import_module(_WITH_ENGINE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
