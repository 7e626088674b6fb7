"""The compiled code's side of a decoder, and how long it lives."""

from __future__ import annotations

import ctypes

from inflight.engine.torch.native.structs import LayerStruct, ShapeStruct


class Handle:
    """A decoder of the compiled code. It ends with the last who holds this.

    Attributes:
        exists: Whether its threads could be started.
    """

    def __init__(self, library: ctypes.CDLL, shape: ShapeStruct, layers: ctypes.Array[LayerStruct]) -> None:
        self._library = library
        self._layers = layers  # which it points to
        self._as_parameter_ = library.create(shape, layers)
        self.exists = self._as_parameter_ is not None

    def __del__(self) -> None:
        if getattr(self, "_as_parameter_", None) is not None:
            self._library.destroy(self._as_parameter_)
