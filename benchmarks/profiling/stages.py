"""Map functions of the program to the stages of an iteration.

The stages of the forward pass are the compiled code for embeddings, layers and logits, or without compiled
code torch's decoder. The Python code around them belongs to the stage of packing.
"""

from __future__ import annotations

from benchmarks.profiling.stopwatch import Place, Stage, Stopwatch
from inflight.batch_manager import GptManager
from inflight.config import INT8
from inflight.core.scheduler import Scheduler
from inflight.endpoint.local import LocalEngineClient
from inflight.engine.cpu.library import CannotBuild, load_library
from inflight.engine.engine import ModelEngine
from inflight.engine.layers.decoder import Decoder

_PLACES = (
    Place(LocalEngineClient, "get_inference_requests", Stage.GET),
    Place(LocalEngineClient, "poll_stop_signals", Stage.GET),
    Place(Scheduler, "accept", Stage.SCHEDULE),
    Place(Scheduler, "schedule", Stage.SCHEDULE),
    Place(Decoder, "forward", Stage.FORWARD),
    Place(Decoder, "logits", Stage.FORWARD),
    Place(ModelEngine, "decode", Stage.CHOOSE),
    Place(Scheduler, "update", Stage.UPDATE),
    Place(LocalEngineClient, "send_response", Stage.SEND),
)


def watch_loop(dtype: str) -> Stopwatch:
    """Make a stopwatch for engines of this dtype that are created while its `with` block runs."""
    return Stopwatch(
        Place(GptManager, "step", Stage.OTHER),
        Place(ModelEngine, "forward", Stage.PACK),
        (*_PLACES, *_compiled(dtype)),
    )


def _compiled(dtype: str) -> tuple[Place, ...]:
    is_int8 = dtype == INT8
    try:
        library = load_library("bfloat16" if is_int8 else dtype, is_int8)
    except CannotBuild:
        return ()
    return (
        Place(library, "prepare", Stage.FORWARD),
        Place(library, "run", Stage.FORWARD),
        Place(library, "unpack_rows", Stage.FORWARD),
        Place(library, "logits", Stage.FORWARD),
        Place(library, "run_to_logits", Stage.FORWARD),
    )
