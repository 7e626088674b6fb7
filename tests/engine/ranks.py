"""Several ranks as one engine, for tests: the topologies, and the comparison of results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.config import EngineConfig
from inflight.core.request.response import SequenceResult
from inflight.engine.load import MakeGrammars, no_grammars
from inflight.sampling.logits_post_processors import NO_POST_PROCESSORS, LogitsPostProcessors
from tests.engine.serving import Served, to_torch
from tests.engine.thread_ranks import ThreadRanks

TOPOLOGIES = {"tp2": (2, 1), "pp2": (1, 2), "pp3": (1, 3), "tp2-pp2": (2, 2)}
"""(tp_size, pp_size)."""


@contextmanager
def ranks(
    folder: Path,
    topology: tuple[int, int],
    num_blocks: int = 64,
    max_num_sequences: int = 4,
    processors: LogitsPostProcessors = NO_POST_PROCESSORS,
    make_grammars: MakeGrammars = no_grammars,
    moe_ep_size: int = 1,
    **changes: Any,
) -> Iterator[ThreadRanks]:
    """Load an engine of several ranks, as `tests.engine.serving.load` loads one."""
    values = {
        "dtype": "float32", "device": "cpu", "max_num_tokens": 512, "tokens_per_block": 8,
        "max_num_sequences": max_num_sequences, "max_tokens_in_paged_kv_cache": 8 * num_blocks, **changes,
    }  # fmt: skip
    engine = ThreadRanks(
        EngineConfig(str(folder), **values), *topology, processors, make_grammars, moe_ep_size
    )
    try:
        yield engine
    finally:
        engine.close()


def assert_same(many: Served, one: Served) -> None:
    """Compare tokens exactly, and values that are sums over ranks within their rounding."""
    assert many.responses.keys() == one.responses.keys()
    for key in one.responses:
        assert_same_result(many.result(*key), one.result(*key))


def assert_same_result(result: SequenceResult, expected: SequenceResult) -> None:
    """Compare one sequence's results in the same way."""
    assert result.output_token_ids == expected.output_token_ids
    assert result.finish_reasons == expected.finish_reasons
    for found, wanted in zip(result.log_probs or (), expected.log_probs or (), strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)
    assert (result.prompt_log_probs or ()) == pytest.approx(expected.prompt_log_probs or (), abs=1e-4)
    for found, wanted in zip(_logits(result), _logits(expected), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def _logits(result: SequenceResult) -> list[torch.Tensor]:
    context = () if result.context_logits is None else (result.context_logits,)
    return [to_torch(tensor) for tensor in (*context, *(result.generation_logits or ()))]
