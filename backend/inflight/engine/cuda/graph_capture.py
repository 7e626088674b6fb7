"""Records operations on a GPU as CUDA graphs, if the settings and the GPU allow it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from inflight.config import EngineConfig
from inflight.engine.cuda.iteration_graphs import Capture
from inflight.ranks.topology import Mapping

_log = logging.getLogger(__name__)


class GraphCapture:
    """Records operations as CUDA graphs. All graphs share one memory pool, as no two of them run at the same time.

    The inputs and outputs of a graph must stay at the same addresses, in memory allocated before the recording.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, operations: Callable[[], None]) -> Callable[[], None]:
        """Run `operations` once, then record them; return a function that queues the recording on the current
        stream."""
        with torch.cuda.device(self._device):
            self._warm_up(operations)
            graph = torch.cuda.CUDAGraph()
            # other threads may continue to use the device
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                operations()
        return graph.replay

    def _warm_up(self, operations: Callable[[], None]) -> None:
        """Run the operations once: libraries allocate and choose kernels at their first call, which cannot be
        recorded."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            operations()
        torch.cuda.current_stream().wait_stream(self._stream)


def find_capture(
    config: EngineConfig,
    has_fixed_shapes: bool,
    mapping: Mapping,
    device: torch.device,
    has_debug_tensors: bool,
) -> Capture | None:
    """Return the function that records iterations; if iterations are not recorded, log the reason and return
    None."""
    if device.type != "cuda" or not has_fixed_shapes:  # logged when the attention was chosen
        return None
    if config.cuda_graph_mode and mapping.pp_size == 1 and not has_debug_tensors:
        if any(output.name.startswith("hidden_states_") for output in config.additional_model_outputs):
            _log.info("iterations with a request that wants hidden_states_<i> run without CUDA graphs")
        return GraphCapture(device)
    _log.info(
        "iterations run without CUDA graphs: %s",
        "CUDA graphs are turned off"
        if not config.cuda_graph_mode
        else "debug tensors are recorded"
        if has_debug_tensors
        else "transfers between pipeline stages cannot be recorded",
    )
    return None


def agree_on_capture(
    capture: Capture | None, device: torch.device, min_over_ranks: Callable[[int], int]
) -> Capture | None:
    """Return `capture`, or None if any rank has none; `min_over_ranks` returns the minimum of all ranks'
    numbers."""
    if device.type == "cuda" and not min_over_ranks(int(capture is not None)):
        return None
    return capture
