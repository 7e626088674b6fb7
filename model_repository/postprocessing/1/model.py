"""Triton loads this file; the model is in the package `inflight`."""

from inflight.triton.models.text_models import Postprocessing as TritonPythonModel

__all__ = ["TritonPythonModel"]
