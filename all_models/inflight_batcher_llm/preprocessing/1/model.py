"""Triton loads this file; the model is in the package `inflight`."""

from inflight.triton.models.preprocessing import TritonPythonModel

__all__ = ["TritonPythonModel"]
