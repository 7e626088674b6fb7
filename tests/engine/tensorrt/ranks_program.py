"""The program of every rank under mpirun: an executor on a folder of plans, with a stand-in for TensorRT.

`python -m tests.engine.tensorrt.ranks_program FOLDER`. Every rank prints one JSON line; rank 0 serves requests.
"""

from __future__ import annotations

import json
import sys

import inflight.executor as trtllm
from inflight.config import EngineConfig, Parameters
from tests.engine.tensorrt import runtime_stand_in

PROMPTS = [[token] * 5 for token in range(5, 9)]
NUM_TOKENS = 10


def main() -> None:
    runtime_stand_in.install()
    config = trtllm.ExecutorConfig(
        2,
        kv_cache_config=trtllm.KvCacheConfig(max_tokens=512),
        parallel_config=trtllm.ParallelConfig(),
    )
    parameters = Parameters(engine=EngineConfig(engine_threads=1))
    executor = trtllm.Executor(sys.argv[1], trtllm.ModelType.DECODER_ONLY, config, parameters=parameters)
    tokens: list[list[int]] = []
    if executor.can_enqueue_requests():
        ids = executor.enqueue_requests([trtllm.Request(prompt, NUM_TOKENS) for prompt in PROMPTS])
        tokens = [found[0].result.output_token_ids[0] for found in executor.await_responses(ids)]
    executor.shutdown()
    sys.stdout.write(json.dumps(tokens) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
