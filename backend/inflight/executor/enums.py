"""The enumerations of the Executor API, and how tokens may be chosen (DecodingMode). Names and numbers are
TensorRT-LLM's."""

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
    """An enumeration whose members can be made integers, as the bindings' could."""

    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value


class ModelType(Numbered):
    """The parts that a model consists of."""

    DECODER_ONLY = 0
    ENCODER_ONLY = 1
    ENCODER_DECODER = 2


class BatchingType(Numbered):
    """STATIC ends a batch before it starts the next; INFLIGHT lets requests join and leave at every iteration."""

    STATIC = 0
    INFLIGHT = 1


class CapacitySchedulerPolicy(Numbered):
    """The policy that says which sequences may hold KV blocks: see `inflight.config.CapacitySchedulerPolicy`."""

    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1
    STATIC_BATCH = 2


class ContextChunkingPolicy(Numbered):
    """The policy that divides an iteration's remaining tokens among contexts."""

    FIRST_COME_FIRST_SERVED = 0
    EQUAL_PROGRESS = 1


class CommunicationType(Numbered):
    """How ranks talk to each other."""

    MPI = 0


class CommunicationMode(Numbered):
    """LEADER: ranks were started by mpirun, rank 0 takes requests. ORCHESTRATOR: this process starts the ranks."""

    LEADER = 0
    ORCHESTRATOR = 1


class RequestType(Numbered):
    """The phases of a request that are computed here; the last two are for disaggregated serving."""

    REQUEST_TYPE_CONTEXT_AND_GENERATION = 0
    REQUEST_TYPE_CONTEXT_ONLY = 1
    REQUEST_TYPE_GENERATION_ONLY = 2


class KvCacheTransferMode(Numbered):
    """How KV blocks are written to files."""

    DRAM = 0
    GDS = 1
    POSIX_DEBUG_FALLBACK = 2


class CacheTransceiverBackendType(Numbered):
    """How disaggregated servers send each other KV blocks."""

    DEFAULT = 0
    MPI = 1
    UCX = 2
    NIXL = 3

    @staticmethod
    def from_string(text: str) -> CacheTransceiverBackendType:
        """The member of that name, in capitals or in small letters; raises InvalidValue for any other text."""
        for member in CacheTransceiverBackendType:
            if text in (member.name, member.name.lower()):
                return member
        raise InvalidValue(f"Invalid backend type: {text}")


@dataclass(frozen=True)
class DecodingMode:
    """How an engine chooses tokens. Made by its factories, `DecodingMode.TopK()`.

    Attributes:
        name: The factory's name.
    """

    name: str

    def __str__(self) -> str:
        return f"DecodingMode.{self.name}"

    @classmethod
    def Auto(cls) -> DecodingMode:
        """By each request's sampling configuration."""
        return cls("Auto")

    @classmethod
    def TopK(cls) -> DecodingMode:
        """Among the k likeliest tokens."""
        return cls("TopK")

    @classmethod
    def TopP(cls) -> DecodingMode:
        """Among the likeliest tokens whose probability reaches p."""
        return cls("TopP")

    @classmethod
    def TopKTopP(cls) -> DecodingMode:
        """Among the top_k likeliest tokens, those whose probability reaches p."""
        return cls("TopKTopP")

    @classmethod
    def BeamSearch(cls) -> DecodingMode:
        """By beam search."""
        return cls("BeamSearch")

    @classmethod
    def Medusa(cls) -> DecodingMode:
        """With drafts from Medusa heads."""
        return cls("Medusa")

    @classmethod
    def Lookahead(cls) -> DecodingMode:
        """With drafts from lookahead decoding."""
        return cls("Lookahead")

    @classmethod
    def ExplicitDraftTokens(cls) -> DecodingMode:
        """With drafts from a recurrent drafter."""
        return cls("ExplicitDraftTokens")

    @classmethod
    def Eagle(cls) -> DecodingMode:
        """With drafts from EAGLE heads."""
        return cls("Eagle")

    def isAuto(self) -> bool:
        """Whether requests decide."""
        return self.name == "Auto"

    def isTopK(self) -> bool:
        """Whether top-k is among the ways."""
        return self.name in ("TopK", "TopKTopP")

    def isTopP(self) -> bool:
        """Whether top-p is among the ways."""
        return self.name in ("TopP", "TopKTopP")

    def isTopKorTopP(self) -> bool:
        """Whether the mode samples by top-k, top-p or both."""
        return self.isTopK() or self.isTopP()

    def isTopKandTopP(self) -> bool:
        """Whether the mode samples by top-k and top-p together."""
        return self.isTopK() and self.isTopP()

    def isBeamSearch(self) -> bool:
        """Whether the mode is beam search."""
        return self.name == "BeamSearch"

    def isMedusa(self) -> bool:
        """Whether the mode is Medusa."""
        return self.name == "Medusa"

    def isLookahead(self) -> bool:
        """Whether the mode is lookahead decoding."""
        return self.name == "Lookahead"

    def isExplicitDraftTokens(self) -> bool:
        """Whether the mode is a recurrent drafter."""
        return self.name == "ExplicitDraftTokens"

    def isEagle(self) -> bool:
        """Whether the mode is EAGLE."""
        return self.name == "Eagle"
