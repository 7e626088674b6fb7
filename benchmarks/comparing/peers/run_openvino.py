"""The workload on OpenVINO GenAI's continuous batching. See peer_program.py for options and output.

`--model` is a folder that `optimum-cli export openvino` wrote, which already has weights of `--dtype`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy
import openvino
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig
from peer_program import KvCache, Request, Setting, System, main

_MAX_TOKENS_AN_ITERATION = 2048
_TOKENS_PER_BLOCK = 32  # OpenVINO's default on CPUs
_KV_VALUE_BYTES = 1  # OpenVINO's default when it computes in bfloat16


class _OpenVino(System):
    def __init__(self, setting: Setting) -> None:
        scheduler = SchedulerConfig()
        scheduler.num_kv_blocks = setting.kv_cache_blocks(_TOKENS_PER_BLOCK)
        scheduler.max_num_batched_tokens = _MAX_TOKENS_AN_ITERATION
        scheduler.max_num_seqs = max(64, setting.max_together)
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        # oneDNN restricted to AVX2 has no products of bfloat16, and OpenVINO does not notice.
        precision = "f32" if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2" else "bf16"
        properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": setting.threads}
        self._pipeline = ContinuousBatchingPipeline(setting.model, scheduler, "CPU", properties)
        self.kv_cache = KvCache(scheduler.num_kv_blocks * _TOKENS_PER_BLOCK, _KV_VALUE_BYTES)
        self._num_submitted = 0

    def run(self, requests: Sequence[Request]) -> list[list[float]]:
        handles = [self._submit(request) for request in requests]
        moments: list[list[float]] = [[] for _ in requests]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter()
            for handle, row in zip(handles, moments):
                while handle.can_read():
                    row += [now] * sum(len(output.generated_ids) for output in handle.read().values())
        return moments

    def _submit(self, request: Request):
        self._num_submitted += 1
        config = GenerationConfig(max_new_tokens=request.max_tokens, ignore_eos=True, do_sample=False)
        ids = openvino.Tensor(numpy.array([request.prompt], numpy.int64))
        return self._pipeline.add_request(self._num_submitted, ids, config)


if __name__ == "__main__":
    main(_OpenVino, "openvino", "openvino-genai")
