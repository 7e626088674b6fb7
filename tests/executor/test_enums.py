"""Enumerations and decoding modes have TensorRT-LLM's names and numbers."""

from __future__ import annotations

import pickle
from enum import Enum

import pytest

import inflight.executor as trtllm

MEMBERS = {
    "ModelType": ["DECODER_ONLY", "ENCODER_ONLY", "ENCODER_DECODER"],
    "BatchingType": ["STATIC", "INFLIGHT"],
    "CapacitySchedulerPolicy": ["MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"],
    "ContextChunkingPolicy": ["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"],
    "CommunicationType": ["MPI"],
    "CommunicationMode": ["LEADER", "ORCHESTRATOR"],
    "RequestType": [
        "REQUEST_TYPE_CONTEXT_AND_GENERATION",
        "REQUEST_TYPE_CONTEXT_ONLY",
        "REQUEST_TYPE_GENERATION_ONLY",
    ],
    "FinishReason": ["NOT_FINISHED", "END_ID", "STOP_WORDS", "LENGTH", "TIMED_OUT", "CANCELLED"],
    "RequestStage": [
        "QUEUED",
        "ENCODER_IN_PROGRESS",
        "CONTEXT_IN_PROGRESS",
        "GENERATION_IN_PROGRESS",
        "GENERATION_COMPLETE",
    ],
    "KvCacheTransferMode": ["DRAM", "GDS", "POSIX_DEBUG_FALLBACK"],
    "GuidedDecodingParams.GuideType": ["JSON", "JSON_SCHEMA", "REGEX", "EBNF_GRAMMAR", "STRUCTURAL_TAG"],
    "GuidedDecodingConfig.GuidedDecodingBackend": ["XGRAMMAR", "LLGUIDANCE"],
    "CacheTransceiverBackendType": ["DEFAULT", "MPI", "UCX", "NIXL"],
}


def enumeration(path: str) -> type[Enum]:
    found: object = trtllm
    for name in path.split("."):
        found = getattr(found, name)
    assert isinstance(found, type) and issubclass(found, Enum)
    return found


@pytest.mark.parametrize("path", MEMBERS)
def test_members_are_numbered_in_the_originals_order(path: str) -> None:
    members = list(enumeration(path))
    assert [member.name for member in members] == MEMBERS[path]
    assert [int(member) for member in members] == list(range(len(members)))


@pytest.mark.parametrize("path", MEMBERS)
def test_pickled_members_are_the_same_objects(path: str) -> None:
    for member in enumeration(path):
        assert pickle.loads(pickle.dumps(member)) is member


@pytest.mark.parametrize("text", ["UCX", "ucx"])
def test_a_transceiver_backend_is_found_by_its_name(text: str) -> None:
    assert trtllm.CacheTransceiverBackendType.from_string(text) is trtllm.CacheTransceiverBackendType.UCX


def test_an_unknown_transceiver_backend_is_named() -> None:
    with pytest.raises(RuntimeError, match="Invalid backend type: Ucx"):
        trtllm.CacheTransceiverBackendType.from_string("Ucx")


PREDICATES = {
    "Auto": {"isAuto"},
    "TopK": {"isTopK", "isTopKorTopP"},
    "TopP": {"isTopP", "isTopKorTopP"},
    "TopKTopP": {"isTopK", "isTopP", "isTopKorTopP", "isTopKandTopP"},
    "BeamSearch": {"isBeamSearch"},
    "Medusa": {"isMedusa"},
    "Lookahead": {"isLookahead"},
    "ExplicitDraftTokens": {"isExplicitDraftTokens"},
    "Eagle": {"isEagle"},
}


@pytest.mark.parametrize("name", PREDICATES)
def test_a_decoding_mode_answers_its_predicates(name: str) -> None:
    mode = getattr(trtllm.DecodingMode, name)()
    asked = {each for each in dir(mode) if each.startswith("is")}
    assert {each for each in asked if getattr(mode, each)()} == PREDICATES[name]
    assert mode.name == name and len(asked) == 10


def test_decoding_modes_are_equal_by_name_and_can_be_pickled() -> None:
    mode = trtllm.DecodingMode.TopKTopP()
    assert pickle.loads(pickle.dumps(mode)) == mode == trtllm.DecodingMode.TopKTopP()
    assert mode != trtllm.DecodingMode.TopK()
