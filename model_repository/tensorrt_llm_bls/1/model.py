"""Triton loads this file; the model is in the package `inflight`."""

from inflight.triton.models.remote import Bls as TritonPythonModel

__all__ = ["TritonPythonModel"]
