"""Kernels on rows of logits: torch's operators, and compiled code if this machine supports it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inflight.engine.cpu.library import load_library
from inflight.engine.cpu.row_kernels import NativeRowKernels
from inflight.engine.cpu.structs import Handle, LayerStruct, ShapeStruct
from inflight.sampling.row_kernels import RowKernels
from tests.engine.kernels import needs_native
from tests.sampling import factories


@pytest.fixture(scope="module", params=["torch", pytest.param("native", marks=needs_native)])
def row_kernels(request: pytest.FixtureRequest) -> Iterator[RowKernels]:
    """Run a module's tests with both kinds of kernels."""
    if request.param == "torch":
        yield factories.ROW_KERNELS[-1]
        return
    library = load_library("float32")
    handle = Handle(library, ShapeStruct(num_threads=2), (LayerStruct * 0)())  # a decoder without layers
    assert handle.exists
    factories.ROW_KERNELS.append(NativeRowKernels(library, handle))
    yield factories.ROW_KERNELS[-1]
    factories.ROW_KERNELS.pop()
