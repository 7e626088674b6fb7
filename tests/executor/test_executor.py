"""Enqueue, await, cancel and shut down, for clients of TensorRT-LLM's Executor."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import inflight.executor as trtllm
from inflight.config import Parameters
from tests.executor.conftest import PROMPT, VOCABULARY, make_config, make_executor, responses_of, results_of

NO_TIME = timedelta(0)
A_MINUTE = timedelta(minutes=1)
LONG = 30_000  # long enough to be still in flight on a busy machine


def request(max_tokens: int = 6, **fields) -> trtllm.Request:
    return trtllm.Request(PROMPT, max_tokens, **fields)


def first_response(executor: trtllm.Executor, request_id: int) -> trtllm.Response:
    return executor.await_responses(request_id)[0]


# ---------------------------------------------------------------------- responses


def test_a_whole_answer_is_the_prompt_and_the_greedy_tokens(executor, reference) -> None:
    (result,) = results_of(executor, request(12))
    assert result.output_token_ids == [PROMPT + reference(PROMPT, 12)]
    assert result.finish_reasons == [trtllm.FinishReason.LENGTH]
    assert (result.is_final, result.is_sequence_final, result.sequence_index) == (True, True, 0)
    assert (result.decoding_iter, result.avg_decoded_tokens_per_iter) == (12, 1.0)


def test_exclude_input_from_output_leaves_the_prompt_out(executor, reference) -> None:
    config = trtllm.OutputConfig(exclude_input_from_output=True)
    (result,) = results_of(executor, request(output_config=config))
    assert result.output_token_ids == [reference(PROMPT, 6)]


def test_a_stream_has_new_tokens_only(executor, reference) -> None:
    results = results_of(executor, request(streaming=True))
    assert [result.output_token_ids for result in results] == [[[token]] for token in reference(PROMPT, 6)]
    assert [result.is_final for result in results] == [False] * 5 + [True]
    assert [result.decoding_iter for result in results] == [1, 2, 3, 4, 5, 6]
    assert results[-1].avg_decoded_tokens_per_iter == 1.0


def test_a_stream_may_repeat_all_tokens_so_far(executor, reference) -> None:
    results = results_of(executor, request(streaming=True, return_all_generated_tokens=True))
    tokens = reference(PROMPT, 6)
    assert [result.output_token_ids[0] for result in results] == [tokens[: n + 1] for n in range(6)]


def test_return_all_generated_tokens_does_not_affect_whole_answers(executor, reference) -> None:
    (result,) = results_of(executor, request(return_all_generated_tokens=True))
    assert result.output_token_ids == [PROMPT + reference(PROMPT, 6)]


def test_an_end_id_or_a_stop_word_ends_a_request(executor, reference) -> None:
    tokens = reference(PROMPT, 6)
    end = tokens.index(tokens[3])  # its first occurrence
    (ended,) = results_of(executor, request(end_id=tokens[3]))
    assert ended.output_token_ids == [PROMPT + tokens[:end]]
    assert ended.finish_reasons == [trtllm.FinishReason.END_ID]
    (stopped,) = results_of(executor, request(stop_words=[tokens[1:3]]))
    assert stopped.output_token_ids == [PROMPT + tokens[:3]]
    assert stopped.finish_reasons == [trtllm.FinishReason.STOP_WORDS]


def test_a_deadline_ends_a_request(executor) -> None:
    (result,) = results_of(executor, request(LONG, allotted_time_ms=timedelta(milliseconds=1)))
    assert result.finish_reasons == [trtllm.FinishReason.TIMED_OUT]
    assert len(result.output_token_ids[0]) < len(PROMPT) + LONG


def test_the_client_id_is_returned(executor) -> None:
    responses = responses_of(executor, executor.enqueue_request(request(client_id=77, streaming=True)))
    assert {response.client_id for response in responses} == {77}
    assert first_response(executor, executor.enqueue_request(request())).client_id is None


def test_requests_of_different_beam_widths_run_together(executor, reference) -> None:
    alone = {
        width: results_of(executor, request(sampling_config=trtllm.SamplingConfig(width)))[0].output_token_ids
        for width in (1, 2, 4)
    }
    assert alone[1] == [PROMPT + reference(PROMPT, 6)]
    assert [len(alone[width]) for width in (2, 4)] == [2, 4]
    widths = [1, 2, 4, 2, 1]
    ids = executor.enqueue_requests(
        [request(sampling_config=trtllm.SamplingConfig(width)) for width in widths]
    )
    together = executor.await_responses(ids)
    assert [found[0].result.output_token_ids for found in together] == [alone[width] for width in widths]


def test_num_return_sequences_limits_the_beams(executor) -> None:
    sampling = trtllm.SamplingConfig(4, num_return_sequences=2)
    (result,) = results_of(executor, request(sampling_config=sampling))
    (all_beams,) = results_of(executor, request(sampling_config=trtllm.SamplingConfig(4)))
    assert result.output_token_ids == all_beams.output_token_ids[:2]
    assert len(result.finish_reasons) == 2 and result.sequence_index == 0


def test_streamed_beams_have_all_tokens_so_far(executor, caplog) -> None:
    results = results_of(executor, request(streaming=True, sampling_config=trtllm.SamplingConfig(2)))
    assert [[len(beam) for beam in result.output_token_ids] for result in results] == [
        [n, n] for n in range(1, 7)
    ]
    assert "every response has all generated tokens" in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_several_sequences_have_one_id(executor, streaming: bool) -> None:
    sampling = trtllm.SamplingConfig(num_return_sequences=3, top_k=50, seed=3)
    results = results_of(executor, request(sampling_config=sampling, streaming=streaming))
    finals = [result.sequence_index for result in results if result.is_sequence_final]
    assert sorted(finals) == [0, 1, 2]
    assert [result.is_final for result in results] == [False] * (len(results) - 1) + [True]
    outputs = {
        index: [
            token
            for result in results
            if result.sequence_index == index
            for token in result.output_token_ids[0]
        ]
        for index in range(3)
    }
    assert len({tuple(tokens) for tokens in outputs.values()}) == 3, "each draws its own tokens"
    assert {len(tokens) for tokens in outputs.values()} == {6 if streaming else len(PROMPT) + 6}


def test_log_probs_cover_all_tokens_so_far(executor) -> None:
    config = trtllm.OutputConfig(return_log_probs=True, return_generation_logits=True)
    sampling = trtllm.SamplingConfig(top_k=VOCABULARY, seed=1)
    (whole,) = results_of(executor, request(output_config=config, sampling_config=sampling))
    tokens = torch.tensor(whole.output_token_ids[0][len(PROMPT) :])
    expected = whole.generation_logits[0].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(whole.log_probs[0]), expected, atol=1e-4, rtol=1e-4)
    assert whole.cum_log_probs == [pytest.approx(sum(whole.log_probs[0]), abs=1e-4)]
    streamed = results_of(executor, request(output_config=config, sampling_config=sampling, streaming=True))
    assert [len(result.log_probs[0]) for result in streamed] == [1, 2, 3, 4, 5, 6]
    assert streamed[-1].log_probs == whole.log_probs


def test_logits_have_the_documented_shapes(executor) -> None:
    config = trtllm.OutputConfig(return_context_logits=True, return_generation_logits=True)
    (whole,) = results_of(executor, request(output_config=config))
    assert whole.context_logits.shape == (len(PROMPT), VOCABULARY)
    assert whole.generation_logits.shape == (1, 6, VOCABULARY)
    assert whole.generation_logits[0].argmax(-1).tolist() == whole.output_token_ids[0][len(PROMPT) :]
    streamed = results_of(executor, request(output_config=config, streaming=True))
    assert [result.generation_logits.shape for result in streamed] == [(1, 1, VOCABULARY)] * 6
    assert all(result.context_logits.equal(whole.context_logits) for result in streamed)
    repeated = results_of(
        executor, request(output_config=config, streaming=True, return_all_generated_tokens=True)
    )
    assert [result.generation_logits.shape for result in repeated] == [
        (n, 1, VOCABULARY) for n in range(1, 7)
    ]
    assert repeated[-1].generation_logits[:, 0].equal(whole.generation_logits[0])
    beams = trtllm.SamplingConfig(2)
    (search,) = results_of(executor, request(output_config=config, sampling_config=beams))
    assert search.generation_logits.shape == (2, 6, VOCABULARY)


def test_logits_after_the_end_are_zero(executor, reference) -> None:
    tokens = reference(PROMPT, 6)
    config = trtllm.OutputConfig(return_generation_logits=True)
    (result,) = results_of(executor, request(output_config=config, stop_words=[tokens[:2]]))
    assert result.generation_logits.shape == (1, 6, VOCABULARY)
    assert result.generation_logits[0, 2:].eq(0).all() and result.generation_logits[0, 1].ne(0).any()


def test_perf_metrics_have_times_and_iterations_in_order(executor) -> None:
    config = trtllm.OutputConfig(return_perf_metrics=True)
    first, *_, last = (
        result.request_perf_metrics
        for result in results_of(executor, request(output_config=config, streaming=True))
    )
    times = last.timing_metrics
    assert NO_TIME < times.arrival_time <= times.first_scheduled_time <= times.first_token_time
    assert times.first_token_time < times.last_token_time
    assert first.timing_metrics.last_token_time == NO_TIME
    assert (first.last_iter, last.last_iter) == (None, last.first_iter + 5)
    assert (first.iter, last.iter) == (first.first_iter, last.last_iter)
    assert last.kv_cache_metrics.num_total_allocated_blocks == 1
    assert results_of(executor, request())[0].request_perf_metrics is None


# ---------------------------------------------------------------------- waiting


def test_await_responses_without_ids_returns_those_of_any_request(executor) -> None:
    ids = executor.enqueue_requests([request(), request()])
    found: list[int] = []
    while len(found) < 2:
        found += [response.request_id for response in executor.await_responses()]
    assert sorted(found) == ids


def test_an_elapsed_timeout_returns_nothing(executor) -> None:
    request_id = executor.enqueue_request(request(LONG))
    assert executor.await_responses(request_id, NO_TIME) == []
    assert executor.await_responses(NO_TIME) == []
    assert executor.await_responses([request_id], NO_TIME) == [[]]
    assert executor.await_responses(id=request_id, timeout=0.0) == []
    assert executor.await_responses(ids=[request_id], timeout=NO_TIME) == [[]]
    with pytest.raises(TypeError, match="await_responses"):
        executor.await_responses(request_id, "soon")
    executor.cancel_request(request_id)
    responses_of(executor, request_id)


def test_await_responses_of_several_ids_returns_a_list_for_each(executor) -> None:
    ids = executor.enqueue_requests([request(4), request(3)])
    both = executor.await_responses(ids, A_MINUTE)
    assert [[response.request_id for response in each] for each in both] == [[each] for each in ids]


def test_a_request_that_has_ended_is_an_error(executor) -> None:
    request_id = executor.enqueue_request(request())
    responses_of(executor, request_id)
    (response,) = executor.await_responses(request_id)
    assert response.error_msg == f"ReqId {request_id} has already been processed and was terminated."
    ((again,),) = executor.await_responses([request_id])
    assert again.error_msg == response.error_msg


def test_an_unknown_id_has_no_responses(executor) -> None:
    assert executor.await_responses(1 << 40, NO_TIME) == []


def test_an_adapter_for_an_engine_that_takes_none_is_an_error_of_its_request(
    executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = executor._description
    limits = replace(described.limits, max_adapter_rank=0)
    monkeypatch.setattr(executor, "_description", replace(described, limits=limits))
    adapted = executor.enqueue_request(request(lora_config=trtllm.LoraConfig(1)))
    (response,) = responses_of(executor, adapted)
    assert response.error_msg.startswith("lora_config.task_id: this engine takes no LoRA adapters")


def test_num_responses_ready_counts_waiting_responses(executor, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, put = threading.Semaphore(0), executor._enqueued.put
    monkeypatch.setattr(executor._enqueued, "put", lambda answer: (put(answer), arrived.release()))
    one, other = executor.enqueue_requests([request(3, streaming=True), request(4, streaming=True)])
    for _ in range(7):
        assert arrived.acquire(timeout=60)
    assert executor.get_num_responses_ready() == 7
    assert [executor.get_num_responses_ready(each) for each in (one, other)] == [3, 4]
    assert executor.get_num_responses_ready(id=1 << 40) == 0
    assert len(executor.await_responses()) == 7
    assert executor.get_num_responses_ready() == 0


def test_threads_wait_for_their_own_requests(executor, reference) -> None:
    prompts = [[token] * 3 for token in range(5, 17)]
    found: dict[int, list[list[int]]] = {}

    def client(index: int) -> None:
        for prompt in prompts[index::3]:
            streamed = results_of(executor, trtllm.Request(prompt, 8, streaming=True))
            found[prompt[0]] = [token for result in streamed for token in result.output_token_ids[0]]

    threads = [threading.Thread(target=client, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {prompt[0]: reference(prompt, 8) for prompt in prompts}


# ---------------------------------------------------------------------- cancelling


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_a_cancelled_request_has_a_last_response(executor, num_sequences: int) -> None:
    sampling = trtllm.SamplingConfig(num_return_sequences=num_sequences)
    request_id = executor.enqueue_request(request(LONG, streaming=True, sampling_config=sampling))
    results = [response.result for response in executor.await_responses(request_id)]
    executor.cancel_request(request_id)
    results += [response.result for response in responses_of(executor, request_id)]
    assert [result.is_final for result in results] == [False] * (len(results) - 1) + [True]
    last = [result for result in results if result.is_sequence_final]
    assert [result.finish_reasons for result in last] == [[trtllm.FinishReason.CANCELLED]] * num_sequences
    assert sum(len(result.output_token_ids[0]) for result in results) < LONG * num_sequences


def test_a_cancelled_whole_answer_has_its_tokens_so_far(executor) -> None:
    waiting = executor.enqueue_request(request(LONG))
    executor.cancel_request(waiting)
    (response,) = executor.await_responses(waiting)
    assert response.result.output_token_ids[0][: len(PROMPT)] == PROMPT
    assert response.result.finish_reasons == [trtllm.FinishReason.CANCELLED]


def test_cancelling_an_unknown_id_is_ignored(executor) -> None:
    request_id = executor.enqueue_request(request())
    responses_of(executor, request_id)
    executor.cancel_request(request_id)
    executor.cancel_request(id=1 << 40)
    assert executor.await_responses(NO_TIME) == []


# ---------------------------------------------------------------------- refusals


def test_a_request_that_cannot_be_served_is_answered_with_an_error(executor, reference) -> None:
    bad = request(embedding_bias=torch.zeros(3))
    good, refused = executor.enqueue_requests([request(), bad])
    (response,) = executor.await_responses(refused)
    assert "embedding bias shape is not as expected" in response.error_msg
    assert "terminated" in first_response(executor, refused).error_msg
    assert first_response(executor, good).result.output_token_ids == [PROMPT + reference(PROMPT, 6)]


def test_a_prompt_that_is_too_long_is_answered_with_an_error(executor) -> None:
    response = first_response(executor, executor.enqueue_request(trtllm.Request([5] * 40_000, 1)))
    assert response.has_error() and "40000" in response.error_msg


def test_an_unknown_post_processor_raises(executor) -> None:
    with pytest.raises(trtllm.ExecutorError, match=r"^LogitsPostProcessor nobody not found$"):
        executor.enqueue_requests([request(), request(logits_post_processor_name="nobody")])
    assert executor.await_responses(NO_TIME) == [], "all requests are enqueued, or none"


def test_a_full_queue_raises(checkpoint: Path) -> None:
    with make_executor(checkpoint, max_batch_size=1, max_beam_width=1, max_queue_size=2) as executor:
        running = executor.enqueue_request(request(LONG, streaming=True))
        executor.await_responses(running)
        text = "Maximum queue size of 2 has been reached, please try again later"
        several = request(sampling_config=trtllm.SamplingConfig(num_return_sequences=3))
        with pytest.raises(RuntimeError, match=text):
            executor.enqueue_request(several)
        waiting = executor.enqueue_requests([request(), request()])
        with pytest.raises(RuntimeError, match=text):
            executor.enqueue_request(request())
        executor.cancel_request(running)
        executor.await_responses(waiting)
        assert first_response(executor, executor.enqueue_request(request())).result.is_final


@pytest.mark.parametrize(
    ("args", "keywords"),
    [
        (("encoder", "decoder", trtllm.ModelType.ENCODER_DECODER, make_config()), {}),
        ((), {"encoder_model_path": "a", "decoder_model_path": "b"}),
        ((b"engine", "{}", trtllm.ModelType.DECODER_ONLY, make_config()), {}),
        ((), {"engine_buffer": b"", "json_config_str": "{}"}),
        ((b"", "{}", b"", "{}", trtllm.ModelType.ENCODER_DECODER, make_config()), {}),
        (("folder", trtllm.ModelType.ENCODER_ONLY, make_config()), {}),
    ],
)
def test_encoders_and_engines_in_memory_are_refused(args, keywords) -> None:
    with pytest.raises(trtllm.NotSupported, match="not supported"):
        trtllm.Executor(*args, **keywords)


def test_wrong_arguments_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="Executor"):
        trtllm.Executor()


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="File does not exist"):
        trtllm.Executor(tmp_path / "nothing", trtllm.ModelType.DECODER_ONLY, make_config())


def test_a_checkpoint_that_does_not_load_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Nobody"]}')
    with pytest.raises(trtllm.ExecutorError, match="Nobody"):
        trtllm.Executor(tmp_path, trtllm.ModelType.DECODER_ONLY, make_config())


# ---------------------------------------------------------------------- shutdown


def test_after_shutdown_every_call_raises(checkpoint: Path) -> None:
    executor = make_executor(checkpoint)
    assert executor.can_enqueue_requests()
    request_id = executor.enqueue_request(request(LONG))
    executor.shutdown()
    executor.shutdown()
    assert not executor.can_enqueue_requests()
    calls = [
        lambda: executor.enqueue_request(request()),
        executor.await_responses,
        lambda: executor.await_responses(request_id),
        lambda: executor.await_responses([request_id]),
        lambda: executor.cancel_request(request_id),
        executor.get_num_responses_ready,
        executor.get_latest_iteration_stats,
        executor.get_latest_request_stats,
        executor.get_latest_debug_tensors,
        executor.get_kv_cache_event_manager,
        lambda: executor.generate([5, 6]),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"^Shutdown called"):
            call()


def test_shutdown_wakes_waiting_threads(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(checkpoint)
    request_id = executor.enqueue_request(request(LONG))
    entered, found = threading.Semaphore(0), []
    take = executor._enqueued.take

    def announced(*args):
        entered.release()
        return take(*args)

    monkeypatch.setattr(executor._enqueued, "take", announced)
    # Only the shutdown ends these waits, or the answer to the last request, which then is an error.
    waits = [lambda: executor.await_responses(1 << 40), lambda: executor.await_responses(request_id)]
    threads = [threading.Thread(target=lambda wait=wait: found.append(wait())) for wait in waits]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert entered.acquire(timeout=60)
    executor.shutdown()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2 and [] in found


_PROGRAM_WITHOUT_SHUTDOWN = """
import sys, threading
import inflight.executor as trtllm

def make():
    config = trtllm.ExecutorConfig(kv_cache_config=trtllm.KvCacheConfig(max_tokens=2048))
    return trtllm.Executor(sys.argv[1], trtllm.ModelType.DECODER_ONLY, config)

executor = make()
assert "gpt-manager" in [thread.name for thread in threading.enumerate()]
del executor
assert "gpt-manager" not in [thread.name for thread in threading.enumerate()]
executor = make()
executor.enqueue_request(trtllm.Request([5, 6], 1500))
print("done")
"""


def test_an_unreferenced_executor_ends_and_so_does_its_program(checkpoint: Path) -> None:
    # In a process of its own: log records kept by pytest may refer to an executor.
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM_WITHOUT_SHUTDOWN, checkpoint],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


# ---------------------------------------------------------------------- reports


def test_statistics_are_returned_once(executor) -> None:
    executor.get_latest_iteration_stats(), executor.get_latest_request_stats()
    request_id = executor.enqueue_request(request(4, streaming=True))
    responses_of(executor, request_id)
    stats = executor.get_latest_iteration_stats()
    assert [each.inflight_batching_stats.num_context_requests for each in stats[:2]] == [1, 0]
    assert [each.iter for each in stats] == list(range(stats[0].iter, stats[0].iter + len(stats)))
    assert 3 <= len(stats) <= 4, "the last may come after its response"
    assert stats[0].num_active_requests == 1 and stats[0].static_batching_stats is None
    told = executor.get_latest_request_stats()
    assert told[0].iter == stats[0].iter and [each.id for each in told[0].request_stats] == [request_id]
    assert told[0].request_stats[0].stage is trtllm.RequestStage.GENERATION_IN_PROGRESS
    assert told[1].request_stats[0].num_generated_tokens == 2
    results_of(executor, request(1))
    later = executor.get_latest_iteration_stats()
    assert all(each.iter > stats[-1].iter for each in later)


def test_statistics_of_saved_blocks_add_up_and_survive_a_restart(checkpoint: Path, tmp_path: Path) -> None:
    prompt = [5 + number % 400 for number in range(5 * 32 + 3)]
    parameters = Parameters(kv_cache_dir=str(tmp_path / "blocks"))
    kind, config = trtllm.ModelType.DECODER_ONLY, make_config()
    kept: list[trtllm.IterationStats] = []
    with trtllm.Executor(checkpoint, kind, config, parameters=parameters) as first:
        results_of(first, trtllm.Request(prompt, 2))
        deadline = time.monotonic() + 60
        while not kept or _tier(kept[-1]).offload_blocks < 5:  # another thread writes
            assert time.monotonic() < deadline
            results_of(first, request(1))
            kept += first.get_latest_iteration_stats()
        assert _iteration_sum(kept, "iter_offload_blocks") == _tier(kept[-1]).used_num_blocks == 5
        assert _iteration_sum(kept, "iter_onboard_blocks") == 0
    with trtllm.Executor(checkpoint, kind, config, parameters=parameters) as second:
        results_of(second, trtllm.Request(prompt, 2))
        kept = second.get_latest_iteration_stats()
    tier = _tier(kept[-1])
    assert (tier.medium, tier.used_num_blocks, tier.offload_blocks, tier.dropped_blocks) == ("disk", 5, 0, 0)
    assert _iteration_sum(kept, "iter_onboard_blocks") == tier.onboard_blocks == 5
    assert _iteration_sum(kept, "iter_onboard_bytes") == tier.onboard_bytes - 5 * 16, "a digest in each file"
    assert _iteration_sum(kept, "iter_reused_blocks") == 5, "the loaded blocks were found in the cache"


def _tier(stats: trtllm.IterationStats) -> trtllm.KvCacheTierStats:
    assert stats.kv_cache_tier_stats is not None
    (tier,) = stats.kv_cache_tier_stats
    return tier


def _iteration_sum(kept: list[trtllm.IterationStats], field: str) -> int:
    assert all(list(each.kv_cache_iteration_stats or ()) == [32768] for each in kept)
    return sum(getattr(each.kv_cache_iteration_stats[32768], field) for each in kept)


def test_statistics_are_off_if_zero_iterations_are_kept(checkpoint: Path) -> None:
    with make_executor(checkpoint, iter_stats_max_iterations=0) as executor:
        results_of(executor, request())
        assert executor.get_latest_iteration_stats() == []
        assert executor.get_latest_request_stats() == []
        assert executor.get_latest_debug_tensors() == []
        assert executor.get_kv_cache_event_manager() is None


def test_statistics_are_limited_to_the_given_number(checkpoint: Path) -> None:
    with make_executor(checkpoint, iter_stats_max_iterations=2, request_stats_max_iterations=3) as executor:
        results_of(executor, request(9))
        assert len(executor.get_latest_iteration_stats()) == 2
        assert len(executor.get_latest_request_stats()) == 3


def test_kv_cache_events_report_stored_updated_and_removed_blocks(checkpoint: Path) -> None:
    cache = trtllm.KvCacheConfig(max_tokens=256, event_buffer_max_size=100)
    with make_executor(checkpoint, kv_cache_config=cache) as executor:
        manager = executor.get_kv_cache_event_manager()
        (result,) = results_of(executor, trtllm.Request(list(range(5, 75)), 8))
        created, stored = _events(manager, 2)
        assert (created.event_id, created.data.num_blocks_per_cache_level) == (0, [8, 0])
        assert created.window_size == 32768 and created.attention_dp_rank is None
        blocks = stored.data.blocks
        assert stored.data.parent_hash is None and len(blocks) == 2
        tokens = [token.token_id for block in blocks for token in block.tokens]
        assert tokens == result.output_token_ids[0][:64]
        assert {(block.lora_id, block.cache_level, block.priority) for block in blocks} == {(None, 0, 35)}
        retention = trtllm.KvCacheRetentionConfig(
            [trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig(0, None, 80)]
        )
        results_of(executor, trtllm.Request(list(range(5, 75)), 1, kv_cache_retention_config=retention))
        first, second = _events(manager, 2)
        assert [first.data.block_hash, second.data.block_hash] == [block.block_hash for block in blocks]
        assert first.data.priority == trtllm.kv_cache.KVCacheEventDiffInt(35, 80)
        results_of(executor, trtllm.Request(list(range(100, 330)), 8))
        later = _events(manager, 2)
        removed = [event.data for event in later if hasattr(event.data, "block_hashes")]
        assert set(removed[0].block_hashes) == {block.block_hash for block in blocks}
        assert manager.get_latest_events(NO_TIME) == []


def _events(manager, count: int) -> list[trtllm.kv_cache.KVCacheEvent]:
    """Return the first `count` events."""
    found: list[trtllm.kv_cache.KVCacheEvent] = []
    while len(found) < count:
        found += manager.get_latest_events()
    return found


# ---------------------------------------------------------------------- batching


def test_static_batching_does_not_stream(checkpoint: Path, reference) -> None:
    with make_executor(checkpoint, batching_type=trtllm.BatchingType.STATIC) as executor:
        (result,) = results_of(executor, request(streaming=True))
        assert result.output_token_ids == [reference(PROMPT, 6)], "and leaves the prompt out"
        stats = executor.get_latest_iteration_stats()[0]
        assert stats.inflight_batching_stats is None and stats.static_batching_stats.num_context_requests == 1


def test_a_static_batch_ends_before_the_next_begins(checkpoint: Path, reference) -> None:
    policy = trtllm.SchedulerConfig(trtllm.CapacitySchedulerPolicy.STATIC_BATCH)
    with make_executor(checkpoint, scheduler_config=policy, max_batch_size=4) as executor:
        config = trtllm.OutputConfig(return_perf_metrics=True)
        first = executor.enqueue_request(request(60, streaming=True, output_config=config))
        executor.await_responses(first)
        second = executor.enqueue_request(request(5, output_config=config))
        ended = responses_of(executor, first)[-1].result.request_perf_metrics
        (later,) = responses_of(executor, second)
        assert later.result.output_token_ids == [PROMPT + reference(PROMPT, 5)]
        assert later.result.request_perf_metrics.first_iter > ended.last_iter


def test_a_small_cache_pauses_requests(checkpoint: Path, reference) -> None:
    policy = trtllm.SchedulerConfig(trtllm.CapacitySchedulerPolicy.MAX_UTILIZATION)
    cache = trtllm.KvCacheConfig(max_tokens=8 * 32, enable_block_reuse=False)
    prompts = [[token] * 20 for token in range(5, 11)]
    with make_executor(checkpoint, scheduler_config=policy, kv_cache_config=cache) as executor:
        ids = executor.enqueue_requests([trtllm.Request(prompt, 60) for prompt in prompts])
        found = executor.await_responses(ids)
        stats = executor.get_latest_iteration_stats()
    assert [responses[0].result.output_token_ids for responses in found] == [
        [prompt + reference(prompt, 60)] for prompt in prompts
    ]
    assert sum(each.inflight_batching_stats.num_paused_requests for each in stats) > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((5,), "model_path is 5, expected the path of a folder, or a name"),
        (
            ("/model", trtllm.ModelType.DECODER_ONLY, {"max_beam_width": 1}),
            "executor_config is {'max_beam_width': 1}, expected an ExecutorConfig",
        ),
    ],
)
def test_constructor_arguments_of_another_kind_are_named(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(TypeError, match=f"^Executor: {said}$"):
        trtllm.Executor(*arguments)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda executor: executor.enqueue_request("abc"), "expected a Request, got 'abc'"),
        (lambda executor: executor.enqueue_requests(5), "expected a list of Requests, got 5"),
        (lambda executor: executor.cancel_request("a"), "cancel_request: the request is 'a', expected an id"),
        (lambda executor: executor.get_num_responses_ready("a"), "the request is 'a', expected an id"),
        (
            lambda executor: executor.await_responses("abc", 1),
            "the request is 'abc', expected an id or a list",
        ),
        (
            lambda executor: executor.await_responses(["a"], 1),
            r"the request is \['a'\], expected an id or a list",
        ),
        (lambda executor: executor.generate(None), "prompts is None: expected a text, token ids, or a list"),
    ],
)
def test_arguments_of_another_kind_are_named(executor, call, said: str) -> None:
    with pytest.raises((TypeError, trtllm.InvalidValue), match=said):
        call(executor)
