"""The workload on this package's own engine, without a server. See peer_program.py for options and output.

Uses the engine and the loop of `benchmarks.offline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from peer_program import KvCache, Request, Setting, System, main

from benchmarks.measuring.options import Options, engine_settings
from benchmarks.measuring.setup import value_bytes
from benchmarks.measuring.workload import BenchRequest
from benchmarks.offline import InProcess
from inflight.models.registry import read_model_description

_MAX_NUM_TOKENS = 2048  # of an iteration


def _stays_quantized(setting: Setting) -> bool:
    """Whether the checkpoint has quantized weights, which are run as they are."""
    if setting.dtype == "int4":
        return True
    return setting.dtype == "int8" and read_model_description(setting.model).quantization is not None


class _Ours(System):
    def __init__(self, setting: Setting) -> None:
        together = setting.max_together
        options = Options(
            Path(setting.model),
            "w",
            together,
            together,
            None if _stays_quantized(setting) else setting.dtype,
            None,
            setting.threads,
            _MAX_NUM_TOKENS,
            1,
        )
        room = {"max_tokens_in_paged_kv_cache": str(setting.kv_cache_tokens)}
        self._engine = InProcess(engine_settings(options, ()) | room)
        self.kv_cache = KvCache(setting.kv_cache_tokens, value_bytes(setting.dtype))

    def run(self, requests: Sequence[Request]) -> list[list[float]]:
        timelines = self._engine.run(
            [BenchRequest(tuple(request.prompt), request.max_tokens) for request in requests], len(requests)
        )
        return [[1e-9 * moment for moment in timeline.responses_ns] for timeline in timelines]

    def notes(self) -> Mapping[str, object]:
        return {"kernels": asdict(self._engine.kernels)}

    def close(self) -> None:
        self._engine.close()


if __name__ == "__main__":
    main(_Ours, "inflight", "torch")
