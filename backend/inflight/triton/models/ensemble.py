"""`ensemble`: text in, text out, under tensorrtllm_backend's names.

A decoupled front end and no Triton ensemble, because Triton passes no cancellation on to an ensemble's steps.
"""

from __future__ import annotations

from inflight.triton.models.remote import RemoteModel
from inflight.triton.tensor_spec import Vocabulary


class TritonPythonModel(RemoteModel):
    """Speaks `max_tokens`, `top_k`, `stream`, …"""

    vocabulary = Vocabulary.TEXT
