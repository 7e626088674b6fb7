"""Executors of several ranks: in leader mode under mpirun, and in orchestrator mode, which starts the ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

import inflight.executor as trtllm
from inflight.config import EngineConfig, Parameters
from inflight.processes import ProcessId
from tests.executor.conftest import PROMPT, make_config, responses_of, results_of
from tests.models.zoo import make_model
from tests.ranks.mpirun import TIMEOUT_S, run_ranks, start_ranks
from tests.tiers import with_all

PROMPTS = [[token] * 5 for token in range(5, 11)]
LONG = 30_000  # long enough to be still in flight on a busy machine
DEFAULTS = Parameters()


@pytest.mark.exhaustive
@pytest.mark.parametrize("pp_size", [1, 2])
def test_ranks_started_by_mpirun_serve_requests(checkpoint: Path, reference, pp_size: int) -> None:
    said = run_ranks(2, "tests.executor.ranks_program", str(checkpoint), str(pp_size))
    ranks = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    (leader,) = [rank for rank in ranks if rank["can_enqueue"]]
    others = [rank for rank in ranks if not rank["can_enqueue"]]
    assert leader["tokens"] == [prompt + reference(prompt, 12) for prompt in PROMPTS]
    seven, failed, plain = leader["processed"]
    assert seven == PROMPTS[0] + [7] * 12 and plain == PROMPTS[0] + reference(PROMPTS[0], 12)
    assert "raised ValueError: no" in failed
    assert leader["iterations"] >= 12 and leader["events"][0] == 0
    assert len(others) == 1
    if pp_size == 1:
        assert all("cannot be entered again" in rank["again"] for rank in ranks)
    assert all("this rank takes no requests" in rank["error"] for rank in others)


@pytest.mark.exhaustive
def test_rank_0_survives_a_lost_rank_and_reports_it(checkpoint: Path) -> None:
    with start_ranks(
        2,
        "tests.executor.losing_ranks_program",
        str(checkpoint),
        mpirun_arguments=["--enable-recovery"],
    ) as ranks:
        said, complained = ranks.communicate(timeout=TIMEOUT_S)
    (line,) = [line for line in said.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert "lost" in found["error"], complained
    assert found["later"] and not found["is_taken"]


def orchestrate(checkpoint: Path, tp_size: int, base: Parameters = DEFAULTS, **fields) -> trtllm.Executor:
    parallel = trtllm.ParallelConfig(
        trtllm.CommunicationType.MPI,
        trtllm.CommunicationMode.ORCHESTRATOR,
        None,
        None,
        trtllm.OrchestratorConfig(True, "executorWorker"),
    )
    parameters = replace(
        base, tensor_parallel_size=tp_size, engine=EngineConfig(engine_threads=1), rank_timeout_ms=30_000
    )
    config = make_config(parallel_config=parallel, **fields)
    return trtllm.Executor(checkpoint, trtllm.ModelType.DECODER_ONLY, config, parameters=parameters)


def test_ranks_started_by_the_executor_serve_requests(checkpoint: Path, reference) -> None:
    cache = trtllm.KvCacheConfig(max_tokens=65536, event_buffer_max_size=10_000)
    with orchestrate(checkpoint, 2, kv_cache_config=cache, request_stats_max_iterations=100_000) as executor:
        assert executor.can_enqueue_requests()
        ids = executor.enqueue_requests([trtllm.Request(prompt, 12) for prompt in PROMPTS])
        tokens = [found[0].result.output_token_ids[0] for found in executor.await_responses(ids)]
        assert tokens == [prompt + reference(prompt, 12) for prompt in PROMPTS]
        streamed = results_of(executor, trtllm.Request(PROMPT, 9, streaming=True))
        assert [t for each in streamed for t in each.output_token_ids[0]] == reference(PROMPT, 9)
        config = trtllm.OutputConfig(return_context_logits=True)
        (result,) = results_of(executor, trtllm.Request(PROMPT, 1, output_config=config))
        assert result.context_logits.argmax(-1)[-1] == reference(PROMPT, 1)[0]
        cancelled = executor.enqueue_request(trtllm.Request(PROMPT, LONG, streaming=True))
        executor.await_responses(cancelled)
        executor.cancel_request(cancelled)
        last = responses_of(executor, cancelled)[-1].result
        assert last.finish_reasons == [trtllm.FinishReason.CANCELLED]
        stats = executor.get_latest_iteration_stats()
        assert [each.iter for each in stats] == sorted({each.iter for each in stats})
        assert len(stats) >= 12 and stats[0].cpu_mem_usage > 0
        assert executor.get_latest_request_stats()[0].request_stats[0].id == ids[0]
        manager = executor.get_kv_cache_event_manager()
        assert manager is not None
        assert manager.get_latest_events()[0].data == trtllm.kv_cache.KVCacheCreatedData([2048, 0])
        assert executor.generate(PROMPT, max_tokens=4, end_id=-1).token_ids == tuple(reference(PROMPT, 4))
        folder = Path(executor._engine._orchestrator._ranks.processes.folder)
        assert folder.is_dir()
    assert not folder.exists()


SIZE, NUM_BLOCKS = 32, 5
SAVED = [5 + 7 * number % 400 for number in range(NUM_BLOCKS * SIZE + 3)]


@pytest.mark.parametrize(("tp_size", "pp_size"), with_all([(2, 1), (1, 2)], [(2, 1)]))
def test_each_rank_finds_its_part_of_saved_blocks(
    checkpoint: Path, reference, tmp_path: Path, tp_size: int, pp_size: int
) -> None:
    """A block is loaded if all ranks can read it: after the tear of a different file of each, fewer are."""
    folder = tmp_path / "blocks"
    base = Parameters(pipeline_parallel_size=pp_size, kv_cache_dir=str(folder))

    def run(least_saved: int) -> trtllm.KvCacheTierStats:
        """Run the prompt on new ranks, check its tokens, and return rank 0's statistics."""
        with orchestrate(checkpoint, tp_size, base) as executor:
            (result,) = results_of(executor, trtllm.Request(SAVED, 6))
            assert result.output_token_ids[0] == SAVED + reference(SAVED, 6)
            deadline = time.monotonic() + 60
            while True:  # another thread writes
                results_of(executor, trtllm.Request([9], 1))
                tier = executor.get_latest_iteration_stats()[-1].kv_cache_tier_stats[0]
                files = [len(list(each.glob("*/*"))) for each in folder.iterdir()]
                if tier.offload_blocks >= least_saved and files == [NUM_BLOCKS] * 2:
                    return tier
                assert time.monotonic() < deadline, (tier, files)

    assert run(NUM_BLOCKS).onboard_blocks == 0
    assert run(0).onboard_blocks == NUM_BLOCKS
    for part, place in zip(folder.iterdir(), (0, -1), strict=True):
        torn = sorted(part.glob("*/*"))[place]
        torn.write_bytes(torn.read_bytes()[:-1])
    again = run(1)  # the first torn block and those behind it are computed and saved again
    assert again.onboard_blocks < NUM_BLOCKS <= again.onboard_blocks + again.offload_blocks
    assert run(0).onboard_blocks == NUM_BLOCKS


@pytest.mark.exhaustive
@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)])
def test_recurrent_states_are_saved_on_each_rank(tmp_path: Path, tp_size: int, pp_size: int) -> None:
    model = make_model(tmp_path / "model", "qwen3.5")
    base = Parameters(pipeline_parallel_size=pp_size, kv_cache_dir=str(tmp_path / "blocks"))
    prompt = [number % 40 for number in range(9, 9 + 2 * SIZE + 3)]
    expected = [*prompt, *model.greedy(tuple(prompt), 4)]
    tier = None
    for _ in range(2):
        with orchestrate(model.folder, tp_size, base) as executor:
            (result,) = results_of(executor, trtllm.Request(prompt, 4))
            assert result.output_token_ids[0] == expected
            (tier,) = executor.get_latest_iteration_stats()[-1].kv_cache_tier_stats
    assert tier is not None and tier.onboard_blocks >= 2, "blocks, and the state at the prompt's end"


def test_ranks_whose_folder_is_in_use_do_not_start(checkpoint: Path, tmp_path: Path) -> None:
    base = Parameters(kv_cache_dir=str(tmp_path))
    with orchestrate(checkpoint, 2, base), pytest.raises(trtllm.ExecutorError) as error:
        orchestrate(checkpoint, 2, base)
    assert "another server uses the blocks of this model there" in str(error.value)


@pytest.mark.exhaustive
def test_a_lost_rank_is_reported_and_the_ranks_restart(checkpoint: Path, reference) -> None:
    with orchestrate(checkpoint, 1) as executor:
        request_id = executor.enqueue_request(trtllm.Request(PROMPT, LONG, streaming=True))
        executor.await_responses(request_id)
        launcher = ProcessId.parse(executor._engine._orchestrator._ranks.processes.launcher)
        launcher.signal(signal.SIGKILL)
        assert "lost" in responses_of(executor, request_id)[-1].error_msg
        answer = None
        while answer is None:
            try:
                answer = results_of(executor, trtllm.Request(PROMPT, 3))[0]
            except RuntimeError as error:
                assert "cannot be reached" in str(error) or "later attempt" in str(error)
        assert answer.output_token_ids == [PROMPT + reference(PROMPT, 3)]
        assert executor.await_responses(timedelta(0)) == []


def test_ranks_that_do_not_load_report_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Nobody"]}')
    with pytest.raises(trtllm.ExecutorError, match="Nobody"):
        orchestrate(tmp_path, 1)


@pytest.mark.parametrize(
    "parallel",
    [
        trtllm.ParallelConfig(
            communication_mode=trtllm.CommunicationMode.ORCHESTRATOR,
            orchestrator_config=trtllm.OrchestratorConfig(False),
        ),
        trtllm.ParallelConfig(
            communication_mode=trtllm.CommunicationMode.ORCHESTRATOR,
            orchestrator_config=trtllm.OrchestratorConfig(spawn_processes=False),
        ),
        trtllm.ParallelConfig(
            communication_mode=trtllm.CommunicationMode.ORCHESTRATOR, participant_ids=[1, 2]
        ),
    ],
)
def test_unsupported_parallel_configurations_are_refused(checkpoint: Path, parallel) -> None:
    with pytest.raises(trtllm.NotSupported):
        trtllm.Executor(checkpoint, trtllm.ModelType.DECODER_ONLY, make_config(parallel_config=parallel))


def test_several_ranks_without_mpirun_are_refused(checkpoint: Path) -> None:
    assert "PMIX_RANK" not in os.environ
    with pytest.raises(trtllm.ExecutorError, match="needs 2 ranks, but this program was started alone"):
        trtllm.Executor(
            checkpoint,
            trtllm.ModelType.DECODER_ONLY,
            make_config(),
            parameters=Parameters(tensor_parallel_size=2),
        )
