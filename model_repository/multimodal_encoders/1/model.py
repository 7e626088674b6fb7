"""Triton loads this file; the model is in the package `inflight`."""

from inflight.triton.models.multimodal_encoders import MultimodalEncoders as TritonPythonModel

__all__ = ["TritonPythonModel"]
