"""Records operations on a GPU as CUDA graphs. Loop thread."""

from __future__ import annotations

from collections.abc import Callable

import torch


class GraphCapture:
    """Records operations as CUDA graphs. All share one pool of memory: none is replayed beside another.

    What a graph reads and writes has to stay where it was, and what it leaves for later goes to memory from
    before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, operations: Callable[[], None]) -> Callable[[], None]:
        """Run `operations` once, then record them; what is returned queues them on the current stream."""
        with torch.cuda.device(self._device):
            self._warm_up(operations)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                operations()
        return graph.replay

    def _warm_up(self, operations: Callable[[], None]) -> None:
        """Libraries allocate and choose kernels at their first call, which cannot be recorded."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            operations()
        torch.cuda.current_stream().wait_stream(self._stream)
