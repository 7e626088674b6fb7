"""Plans with the loop, with the Executor API, and on several ranks over MPI."""

from __future__ import annotations

import json
import threading

import pytest

import inflight.executor as trtllm
from inflight.batch_manager.gpt_manager import GptManager
from inflight.core.request.request import Request
from inflight.core.request.response import Response, merge_responses
from inflight.core.scheduler import Scheduler
from tests.engine.serving import config_of
from tests.engine.tensorrt import ranks_program
from tests.engine.tensorrt.conftest import Plans
from tests.engine.tensorrt.engines import load, standing_in
from tests.models.zoo import Zoo
from tests.ranks.mpirun import run_ranks


def test_a_gpt_manager_over_plans_gives_transformers_tokens(zoo: Zoo, plans: Plans) -> None:
    """A GptManager runs an engine of plans on a thread of its own."""
    model = zoo["llama-gqa"]
    engine = load(plans(model), 40)
    waiting = [Request(number, model.prompt(5 + 9 * number, number), 12) for number in range(6)]
    requests, found, have_all = list(waiting), dict[int, list[Response]](), threading.Event()

    def get(room: int) -> list[Request]:
        return [waiting.pop(0)] if waiting else []

    def send(response: Response) -> None:
        found.setdefault(response.request_id, []).append(response)
        if sum(each[-1].is_final for each in found.values()) == len(requests):
            have_all.set()

    manager = GptManager(engine, Scheduler(config_of("chunked"), engine.limits), get, send)
    assert have_all.wait(60)
    assert manager.shutdown(60)
    for request in requests:
        (tokens,) = merge_responses(found[request.request_id]).result.output_token_ids
        assert list(tokens[request.prompt_length :]) == model.greedy(request.input_token_ids, 12)


def test_an_executor_over_plans_gives_transformers_tokens_and_beams(zoo: Zoo, plans: Plans) -> None:
    """An executor over plans runs as many sequences as the plans have slots, and releases all resources at
    the end."""
    model = zoo["llama-gqa"]
    cache = trtllm.KvCacheConfig(max_tokens=1024)
    config = trtllm.ExecutorConfig(3, kv_cache_config=cache)
    prompts = [list(model.prompt(7 + number, number)) for number in range(8)]
    with (
        standing_in(),
        trtllm.Executor(plans(model), trtllm.ModelType.DECODER_ONLY, config) as executor,
    ):
        ids = executor.enqueue_requests([trtllm.Request(prompt, 10) for prompt in prompts])
        answers = [each[0].result for each in executor.await_responses(ids)]
        beams = executor.enqueue_request(
            trtllm.Request(prompts[0], 10, sampling_config=trtllm.SamplingConfig(beam_width=3))
        )
        (searched,) = executor.await_responses(beams)
        most = max(stats.num_active_requests for stats in executor.get_latest_iteration_stats())
    for prompt, result in zip(prompts, answers, strict=True):
        assert result.output_token_ids == [prompt + model.greedy(tuple(prompt), 10)]
    expected = model.beams(tuple(prompts[0]), 10, num_beams=3, num_return_sequences=3, length_penalty=0.0)
    assert searched.result.output_token_ids == [prompts[0] + tokens for tokens, _ in expected]
    assert most >= 6


@pytest.mark.exhaustive
def test_two_ranks_over_mpi_give_transformers_tokens(zoo: Zoo, plans: Plans) -> None:
    """The plans' sums over ranks use the engine's own collectives."""
    model = zoo["llama-gqa"]
    folder = plans(model, tensor_parallel_size=2)
    said = run_ranks(2, "tests.engine.tensorrt.ranks_program", str(folder))
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("[")]
    leader, other = sorted(lines, key=len, reverse=True)
    assert other == []
    assert leader == [
        prompt + model.greedy(tuple(prompt), ranks_program.NUM_TOKENS) for prompt in ranks_program.PROMPTS
    ]
