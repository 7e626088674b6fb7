"""Triton loads this file; the model is in the package `inflight`."""

from inflight.triton.models.engine import TritonPythonModel

__all__ = ["TritonPythonModel"]
