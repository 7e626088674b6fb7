"""Response, Result, performance metrics and events of the KV cache."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

import inflight.executor as trtllm
from inflight.executor import kv_cache


def make_result() -> trtllm.Result:
    result = trtllm.Result()
    result.is_final = True
    result.output_token_ids = [[1, 2, 3]]
    result.cum_log_probs = [1.0]
    result.log_probs = [[1.0, 2.0, 3.0]]
    result.context_logits = torch.ones(3, 100)
    result.generation_logits = torch.arange(300.0).reshape(1, 3, 100)
    result.encoder_output = torch.ones(1, 1)
    result.finish_reasons = [trtllm.FinishReason.LENGTH]
    result.sequence_index = 1
    result.is_sequence_final = True
    result.decoding_iter = 4
    result.avg_decoded_tokens_per_iter = 1.5
    result.context_phase_params = trtllm.ContextPhaseParams([1], 2, b"state", None)
    result.request_perf_metrics = trtllm.RequestPerfMetrics()
    result.request_perf_metrics.last_iter = 33
    result.request_perf_metrics.timing_metrics.arrival_time = timedelta(seconds=42, milliseconds=123)
    result.additional_outputs = [trtllm.AdditionalOutput("topKLogits", torch.ones(1, 4, 100))]
    return result


def assert_same(left: trtllm.Result, right: trtllm.Result) -> None:
    for name, value in vars(left).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(right, name)), name
        elif name != "additional_outputs":
            assert value == getattr(right, name), name
    outputs = list(zip(left.additional_outputs, right.additional_outputs, strict=True))
    assert all(one.name == other.name and torch.equal(one.output, other.output) for one, other in outputs)


def test_an_empty_result_has_no_values() -> None:
    result = trtllm.Result()
    assert (result.is_final, result.output_token_ids, result.finish_reasons) == (False, [], [])
    optional = (
        "cum_log_probs", "log_probs", "context_logits", "generation_logits", "spec_dec_fast_logits_info",
        "encoder_output", "context_phase_params", "request_perf_metrics",
    )  # fmt: skip
    assert [getattr(result, name) for name in optional] == [None] * len(optional)
    assert (result.sequence_index, result.is_sequence_final, result.decoding_iter) == (0, False, 0)


def test_a_result_can_be_pickled() -> None:
    assert_same(pickle.loads(pickle.dumps(make_result())), make_result())


def test_a_result_can_be_serialized() -> None:
    data = trtllm.serialize_result(make_result())
    assert isinstance(data, bytes)
    assert_same(trtllm.deserialize_result(data), make_result())


class Harmful:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("this was executed",)


def harmful_zip() -> bytes:
    buffer = io.BytesIO()
    torch.save(Harmful(), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [b"", b"abc", b"PK", pickle.dumps(make_result()), pickle.dumps(Harmful()), harmful_zip()],
    ids=["empty", "text", "broken", "pickle", "harmful", "harmful zip"],
)
def test_bytes_that_are_no_result_are_refused_and_not_executed(data: bytes) -> None:
    with pytest.raises(RuntimeError, match=f"these {len(data)} bytes are no"):
        trtllm.deserialize_result(data)


def test_a_serialized_part_of_a_result_is_refused() -> None:
    buffer = io.BytesIO()
    torch.save([1], buffer)
    with pytest.raises(RuntimeError, match="not a Result but of type list"):
        trtllm.deserialize_result(buffer.getvalue())


def test_a_response_with_an_error_has_no_result() -> None:
    response = trtllm.Response(3, "it failed", 7)
    assert (response.request_id, response.client_id, response.has_error()) == (3, 7, True)
    assert response.error_msg == "it failed"
    with pytest.raises(RuntimeError, match="Cannot get the result for a response with an error: it failed"):
        _ = response.result


def test_a_response_with_a_result_has_no_error() -> None:
    result = make_result()
    response = trtllm.Response(1, result)
    assert not response.has_error() and response.client_id is None
    assert response.result is result
    with pytest.raises(RuntimeError, match="Cannot get the error message for a response without error"):
        _ = response.error_msg


def test_a_response_accepts_keywords() -> None:
    assert trtllm.Response(request_id=1, error_msg="x", client_id=2).has_error()
    assert trtllm.Response(request_id=1, result=trtllm.Result(), client_id=2).client_id == 2
    with pytest.raises(TypeError, match="either an error_msg or a result"):
        trtllm.Response(1)
    with pytest.raises(RuntimeError, match="Error message should not be empty"):
        trtllm.Response(1, "")


def test_logits_can_be_dropped_from_a_response() -> None:
    response = trtllm.Response(1, make_result())
    response.clear_context_logits()
    assert response.result.context_logits is None and response.result.generation_logits is not None
    response.clear_generation_logits()
    assert response.result.generation_logits is None
    trtllm.Response(1, "it failed").clear_context_logits()


def test_a_responses_attributes_are_read_only_and_it_can_be_pickled() -> None:
    response = trtllm.Response(1, "it failed", 2)
    for name in ("request_id", "client_id", "error_msg", "result"):
        with pytest.raises(AttributeError):
            setattr(response, name, 1)
    copied = pickle.loads(pickle.dumps(response))
    assert (copied.request_id, copied.error_msg, copied.client_id) == (1, "it failed", 2)


def test_performance_metrics_can_be_written_and_pickled() -> None:
    metrics = trtllm.RequestPerfMetrics()
    assert metrics.timing_metrics.last_token_time == timedelta(0)
    assert (metrics.first_iter, metrics.last_iter, metrics.iter) == (None, None, None)
    metrics.timing_metrics.first_token_time = timedelta(milliseconds=3)
    metrics.timing_metrics.kv_cache_size = 1024
    metrics.kv_cache_metrics.num_total_allocated_blocks = 1
    metrics.kv_cache_metrics.kv_cache_hit_rate = 0.5
    metrics.speculative_decoding.acceptance_rate = 0.5
    metrics.speculative_decoding.total_draft_tokens = 4
    metrics.first_iter, metrics.iter, metrics.last_iter = 0, 40, 50
    assert pickle.loads(pickle.dumps(metrics)) == metrics


def test_the_place_of_a_drafts_logits_is_packed_into_floats() -> None:
    info = trtllm.SpeculativeDecodingFastLogitsInfo()
    info.draft_request_id, info.draft_participant_id = 3, 5
    tensor = info.to_tensor()
    assert tensor.dtype is torch.float32 and tensor.shape == (1, 4)
    assert tensor.view(torch.int32).tolist() == [[3, 0, 5, 0]]


def test_kv_cache_events_differ_by_the_class_of_their_data() -> None:
    block = kv_cache.KVCacheStoredBlockData(7, [kv_cache.UniqueToken(1)], None, 0, 35)
    events = [
        kv_cache.KVCacheEvent(0, kv_cache.KVCacheCreatedData([8, 0]), 4096),
        kv_cache.KVCacheEvent(1, kv_cache.KVCacheStoredData(None, [block])),
        kv_cache.KVCacheEvent(2, kv_cache.KVCacheUpdatedData(7, kv_cache.KVCacheEventDiffInt(0, 1), None)),
        kv_cache.KVCacheEvent(3, kv_cache.KVCacheRemovedData([7])),
    ]
    assert [event.event_id for event in events] == [0, 1, 2, 3]
    assert events[1].data.blocks[0].tokens[0].token_extra_id == 0
    assert events[2].data.cache_level.new_value == 1 and events[2].data.priority is None
    assert pickle.loads(pickle.dumps(events)) == events
    with pytest.raises(AttributeError):
        events[0].event_id = 5


def test_importing_the_classes_imports_neither_torch_nor_an_engine() -> None:
    program = """
import sys, inflight.executor as trtllm
assert all(hasattr(trtllm, name) for name in trtllm.__all__)
heavy = {"torch", "numpy", "inflight.build", "inflight.load_model", "inflight.batch_manager", "inflight.triton"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Exekutor'"):
        _ = trtllm.Exekutor
