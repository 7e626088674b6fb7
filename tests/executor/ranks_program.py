"""Program of all ranks of a test: `python -m tests.executor.ranks_program CHECKPOINT PP` under mpirun.

Every rank constructs an executor, like a program for TensorRT-LLM's bindings, and prints one JSON line. Rank
0 serves requests; the others end when it ends. With one pipeline stage, mpirun alone sets the number of
ranks.
"""

from __future__ import annotations

import json
import sys

import inflight.executor as trtllm
from inflight.config import EngineConfig, Parameters


def only_seven(request_id, logits, token_ids, stream, client_id) -> None:
    logits[:] = float("-inf")
    logits[..., 7] = 0.0


def fails(request_id, logits, token_ids, stream, client_id) -> None:
    raise ValueError("no")


def main() -> None:
    checkpoint, pp_size = sys.argv[1], int(sys.argv[2])
    cache = trtllm.KvCacheConfig(max_tokens=4096, event_buffer_max_size=50)
    config = trtllm.ExecutorConfig(
        2,
        kv_cache_config=cache,
        max_batch_size=4,
        parallel_config=trtllm.ParallelConfig(),
        logits_post_processor_config=trtllm.LogitsPostProcessorConfig({"seven": only_seven, "fails": fails}),
    )
    parameters = Parameters(
        pipeline_parallel_size=pp_size,
        engine=EngineConfig(dtype="float32", engine_threads=1),
    )
    executor = trtllm.Executor(checkpoint, trtllm.ModelType.DECODER_ONLY, config, parameters=parameters)
    said: dict[str, object] = {"can_enqueue": executor.can_enqueue_requests()}
    if executor.can_enqueue_requests():
        prompts = [[token] * 5 for token in range(5, 11)]
        ids = executor.enqueue_requests([trtllm.Request(prompt, 12) for prompt in prompts])
        said["tokens"] = [found[0].result.output_token_ids[0] for found in executor.await_responses(ids)]
        processed = [
            trtllm.Request(prompts[0], 12, logits_post_processor_name=name)
            for name in ("seven", "fails", None)
        ]
        found = [each[-1] for each in executor.await_responses(executor.enqueue_requests(processed))]
        said["processed"] = [
            each.error_msg if each.has_error() else each.result.output_token_ids[0] for each in found
        ]
        said["iterations"] = len(executor.get_latest_iteration_stats())
        manager = executor.get_kv_cache_event_manager()
        assert manager is not None
        said["events"] = [event.event_id for event in manager.get_latest_events()]
    else:
        try:
            executor.enqueue_request(trtllm.Request([5], 1))
        except trtllm.ExecutorError as error:
            said["error"] = str(error)
    if pp_size == 1:
        executor.shutdown()  # otherwise the interpreter's end shuts it down
        try:
            trtllm.Executor(checkpoint, trtllm.ModelType.DECODER_ONLY, config)
        except trtllm.ExecutorError as error:
            said["again"] = str(error)
    sys.stdout.write(json.dumps(said) + "\n")  # one write, as other ranks write to the same stream
    sys.stdout.flush()


if __name__ == "__main__":
    main()
