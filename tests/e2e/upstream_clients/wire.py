"""Building blocks of the clients here: named arrays, requested outputs, a connection over either protocol.

Every client in this folder sends the tensors of a program of tensorrtllm_backend, with its dtypes, its shapes
and its order, and reads the same outputs as that program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType

import numpy as np
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import np_to_triton_dtype

from inflight.server.launch import TritonServer

LIBRARIES = {"grpc": grpc, "http": http}
TIMEOUT_S = 60
TENSORS_OF_PERF_METRICS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)


def integer(value: int) -> np.ndarray:
    """Return an INT32 array [1, 1]."""
    return np.array([[value]], np.int32)


def real(value: float) -> np.ndarray:
    """Return an FP32 array [1, 1]."""
    return np.array([[value]], np.float32)


def flag(value: bool) -> np.ndarray:
    """Return a BOOL array [1, 1]."""
    return np.array([[value]], bool)


def texts(*values: str) -> np.ndarray:
    """Return a BYTES array [1, n]."""
    return np.array([values], dtype=object)


def tensors(library: ModuleType, arrays: Mapping[str, np.ndarray]) -> list:
    """Return the arrays as inputs of a request, in the order of the mapping."""
    inputs = []
    for name, array in arrays.items():
        tensor = library.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def requested(library: ModuleType, names: Iterable[str]) -> list | None:
    """Return the named outputs; None if no names are given, so that the server sends all outputs."""
    return [library.InferRequestedOutput(name) for name in names] or None


def config_of(server: TritonServer, model: str):
    """Return the model's configuration as the server has read it."""
    with connect(server, "grpc") as client:
        return client.get_model_config(model).config


def connect(server: TritonServer, protocol: str, concurrency: int = 1):
    """Make a client of tritonclient, to be used as a context manager."""
    if protocol == "http":
        return http.InferenceServerClient(
            server.http, concurrency=concurrency, network_timeout=TIMEOUT_S, connection_timeout=TIMEOUT_S
        )
    return grpc.InferenceServerClient(server.grpc)
