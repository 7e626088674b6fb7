"""Engines of plans for tests, run by the stand-in for TensorRT."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inflight.config import EngineConfig
from inflight.engine.engine import ModelEngine
from inflight.engine.load import load_engine
from inflight.engine.tensorrt.build import BuildOptions, build_engine
from inflight.sampling.logits_post_processors import NO_POST_PROCESSORS, LogitsPostProcessors
from tests.engine.tensorrt import runtime_stand_in

SIZES = {"max_batch_size": 6, "max_seq_len": 128, "max_num_tokens": 512, "dtype": "float32"}


@contextmanager
def standing_in() -> Iterator[None]:
    """Install the stand-in as TensorRT within this context."""
    before = sys.modules.get(runtime_stand_in.NAME)
    sys.modules[runtime_stand_in.NAME] = runtime_stand_in.make_module()
    try:
        yield
    finally:
        del sys.modules[runtime_stand_in.NAME]
        if before is not None:
            sys.modules[runtime_stand_in.NAME] = before


def build(checkpoint: Path, folder: Path, **options: Any) -> Path:
    """Write a folder of plans for the stand-in."""
    build_engine(checkpoint, folder, BuildOptions(**(SIZES | options)), serialize=runtime_stand_in.dump)
    return folder


def load(
    folder: Path,
    num_blocks: int | None = 80,
    processors: LogitsPostProcessors = NO_POST_PROCESSORS,
    **changes: Any,
) -> ModelEngine:
    """Return an engine on the CPU with blocks of 8 tokens; None: as many blocks as it allocates by default."""
    values = {"device": "cpu", "max_num_tokens": 512, "tokens_per_block": 8, "max_num_sequences": 4} | changes
    if num_blocks is not None:
        values["max_tokens_in_paged_kv_cache"] = values["tokens_per_block"] * num_blocks
    config = EngineConfig(str(folder), implementation="tensorrt", **values)
    with standing_in():
        return load_engine(config, processors)
