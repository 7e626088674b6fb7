"""The workload on transformers' continuous batching. See peer_program.py for options and output.

The loop of transformers runs on a thread of its own, which records the time of every token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peer_program import KvCache, Request, Setting, System, main
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

_NO_TOKEN = -1
_TOKENS_PER_BLOCK = 32


class _Transformers(System):
    def __init__(self, setting: Setting) -> None:
        setting.refuse_other_dtypes_than("bfloat16")
        torch.set_num_threads(setting.threads)
        model = AutoModelForCausalLM.from_pretrained(
            setting.model, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self.kv_cache = KvCache(setting.kv_cache_blocks(_TOKENS_PER_BLOCK) * _TOKENS_PER_BLOCK, value_bytes=2)
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=_NO_TOKEN),
            continuous_batching_config=_batching(setting),
        )
        self._manager.start()

    def run(self, requests: Sequence[Request]) -> list[list[float]]:
        ids = [
            self._manager.add_request(
                request.prompt,
                max_new_tokens=request.max_tokens,
                eos_token_id=_NO_TOKEN,
                record_timestamps=True,
            )
            for request in requests
        ]
        moments = {}
        while len(moments) < len(ids):
            result = self._manager.get_result(timeout=1)
            if result is None and not self._manager.is_running():
                raise RuntimeError("the generation thread ended")
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(f"request {result.request_id}: {result.error}")
                moments[result.request_id] = result.timestamps
        return [moments[request_id] for request_id in ids]

    def close(self) -> None:
        self._manager.stop(block=True)


def _batching(setting: Setting) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        page_size=_TOKENS_PER_BLOCK,
        num_blocks=setting.kv_cache_blocks(_TOKENS_PER_BLOCK),
        max_batch_tokens=2048,
        allow_block_sharing=False,
    )


if __name__ == "__main__":
    main(_Transformers, "transformers", "torch")
