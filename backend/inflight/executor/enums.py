"""The enumerations of the Executor API, and DecodingMode. Names and numbers are TensorRT-LLM's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from inflight.core.report.stats import RequestStage
from inflight.core.request.stop import FinishReason
from inflight.executor.errors import InvalidValue

__all__ = [
    "BatchingType",
    "CacheTransceiverBackendType",
    "CapacitySchedulerPolicy",
    "CommunicationMode",
    "CommunicationType",
    "ContextChunkingPolicy",
    "DecodingMode",
    "FinishReason",
    "KvCacheTransferMode",
    "ModelType",
    "RequestStage",
    "RequestType",
]


class Numbered(Enum):
    """An enumeration whose members convert to integers, as in TensorRT-LLM's bindings."""

    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value


class ModelType(Numbered):
    """The parts of a model."""

    DECODER_ONLY = 0
    ENCODER_ONLY = 1
    ENCODER_DECODER = 2


class BatchingType(Numbered):
    """STATIC ends a batch before it starts the next; INFLIGHT lets requests join and leave at every iteration."""

    STATIC = 0
    INFLIGHT = 1


class CapacitySchedulerPolicy(Numbered):
    """Policies for which sequences may hold KV blocks: see `inflight.config.CapacitySchedulerPolicy`."""

    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1
    STATIC_BATCH = 2


class ContextChunkingPolicy(Numbered):
    """Policies for dividing an iteration's remaining tokens among contexts."""

    FIRST_COME_FIRST_SERVED = 0
    EQUAL_PROGRESS = 1


class CommunicationType(Numbered):
    """Transports between ranks."""

    MPI = 0


class CommunicationMode(Numbered):
    """LEADER: mpirun starts the ranks, and rank 0 takes requests. ORCHESTRATOR: this process starts the ranks."""

    LEADER = 0
    ORCHESTRATOR = 1


class RequestType(Numbered):
    """The phases of a request that this engine computes. The last two are for disaggregated serving."""

    REQUEST_TYPE_CONTEXT_AND_GENERATION = 0
    REQUEST_TYPE_CONTEXT_ONLY = 1
    REQUEST_TYPE_GENERATION_ONLY = 2


class KvCacheTransferMode(Numbered):
    """Methods of writing KV blocks to files."""

    DRAM = 0
    GDS = 1
    POSIX_DEBUG_FALLBACK = 2


class CacheTransceiverBackendType(Numbered):
    """Transports of KV blocks between disaggregated servers."""

    DEFAULT = 0
    MPI = 1
    UCX = 2
    NIXL = 3

    @staticmethod
    def from_string(text: str) -> CacheTransceiverBackendType:
        """Return the member with this name, in upper or lower case; raise InvalidValue if there is none."""
        for member in CacheTransceiverBackendType:
            if text in (member.name, member.name.lower()):
                return member
        raise InvalidValue(f"Invalid backend type: {text}")


@dataclass(frozen=True)
class DecodingMode:
    """How an engine chooses tokens. Created by its factories, such as `DecodingMode.TopK()`.

    Attributes:
        name: Name of the factory.
    """

    name: str

    def __str__(self) -> str:
        return f"DecodingMode.{self.name}"

    @classmethod
    def Auto(cls) -> DecodingMode:
        """Return the mode in which each request's sampling configuration decides."""
        return cls("Auto")

    @classmethod
    def TopK(cls) -> DecodingMode:
        """Return the mode that samples from the k likeliest tokens."""
        return cls("TopK")

    @classmethod
    def TopP(cls) -> DecodingMode:
        """Return the mode that samples from the smallest set of likeliest tokens with total probability p."""
        return cls("TopP")

    @classmethod
    def TopKTopP(cls) -> DecodingMode:
        """Return the mode that applies top-k, then top-p."""
        return cls("TopKTopP")

    @classmethod
    def BeamSearch(cls) -> DecodingMode:
        """Return the mode of beam search."""
        return cls("BeamSearch")

    @classmethod
    def Medusa(cls) -> DecodingMode:
        """Return the mode with drafts from Medusa heads."""
        return cls("Medusa")

    @classmethod
    def Lookahead(cls) -> DecodingMode:
        """Return the mode with drafts from lookahead decoding."""
        return cls("Lookahead")

    @classmethod
    def ExplicitDraftTokens(cls) -> DecodingMode:
        """Return the mode with drafts from a recurrent drafter."""
        return cls("ExplicitDraftTokens")

    @classmethod
    def Eagle(cls) -> DecodingMode:
        """Return the mode with drafts from EAGLE heads."""
        return cls("Eagle")

    def isAuto(self) -> bool:
        """Return whether each request's sampling configuration decides."""
        return self.name == "Auto"

    def isTopK(self) -> bool:
        """Return whether the mode includes top-k."""
        return self.name in ("TopK", "TopKTopP")

    def isTopP(self) -> bool:
        """Return whether the mode includes top-p."""
        return self.name in ("TopP", "TopKTopP")

    def isTopKorTopP(self) -> bool:
        """Return whether the mode samples by top-k, top-p or both."""
        return self.isTopK() or self.isTopP()

    def isTopKandTopP(self) -> bool:
        """Return whether the mode samples by top-k and top-p together."""
        return self.isTopK() and self.isTopP()

    def isBeamSearch(self) -> bool:
        """Return whether the mode is beam search."""
        return self.name == "BeamSearch"

    def isMedusa(self) -> bool:
        """Return whether the mode is Medusa."""
        return self.name == "Medusa"

    def isLookahead(self) -> bool:
        """Return whether the mode is lookahead decoding."""
        return self.name == "Lookahead"

    def isExplicitDraftTokens(self) -> bool:
        """Return whether the mode is a recurrent drafter."""
        return self.name == "ExplicitDraftTokens"

    def isEagle(self) -> bool:
        """Return whether the mode is EAGLE."""
        return self.name == "Eagle"
