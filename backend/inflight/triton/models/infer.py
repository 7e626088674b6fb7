"""`tensorrt_llm_infer`: the tensors of `tensorrt_llm` and exactly one response, for HTTP infer and unary gRPC."""

from __future__ import annotations

from inflight.triton.models.remote import RemoteModel


class TritonPythonModel(RemoteModel):
    """Not decoupled, and still many requests in flight: it answers after execute has returned."""
