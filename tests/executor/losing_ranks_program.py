"""Rank 1 is killed during a request of rank 0: `python -m tests.executor.losing_ranks_program CHECKPOINT`."""

from __future__ import annotations

import json
import os
import signal
import sys

import inflight.executor as trtllm
from inflight.config import Parameters
from tests.executor.conftest import responses_of


def main() -> None:
    config = trtllm.ExecutorConfig(kv_cache_config=trtllm.KvCacheConfig(max_tokens=4096), max_batch_size=4)
    parameters = Parameters(tensor_parallel_size=2, rank_timeout_ms=2000)
    executor = trtllm.Executor(sys.argv[1], trtllm.ModelType.DECODER_ONLY, config, parameters=parameters)
    if not executor.can_enqueue_requests():
        os.kill(os.getpid(), signal.SIGKILL)
    request_id = executor.enqueue_request(trtllm.Request([5, 6], 1500, streaming=True))
    said: dict[str, object] = {"error": responses_of(executor, request_id)[-1].error_msg}
    try:
        executor.enqueue_request(trtllm.Request([5], 1))
        said["is_taken"] = True
    except trtllm.ExecutorError as error:
        said["is_taken"], said["later"] = False, str(error)
    executor.shutdown()
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
