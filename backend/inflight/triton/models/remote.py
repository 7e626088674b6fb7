"""`tensorrt_llm_infer`, `ensemble` and `tensorrt_llm_bls`: serving models that talk to engine endpoints.

Each owns its front end, and the guard, a process that ends the server if this process is killed. These
models load without waiting for the engine, do not import torch, and answer UNAVAILABLE until the engine can
be reached. Triton calls each model on one thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.config import Parameters, Role
from inflight.core.ports import EngineClient
from inflight.endpoint.client import SocketEngineClient
from inflight.endpoint.drafting import DraftingClient
from inflight.endpoint.path import endpoint_path
from inflight.errors import ConfigError
from inflight.server.guard import guard_of_front_end, keep_private
from inflight.server.runtime_directory import note_initialized
from inflight.serving.completion_text import TokenizerFinder
from inflight.tensors.spec import Vocabulary
from inflight.triton.front_end import FrontEnd
from inflight.triton.host import complete_config, import_pb_utils, log_to_triton, read_model_args


class Infer:
    """`tensorrt_llm_infer`: `tensorrt_llm` with exactly one response per request, for HTTP infer and unary gRPC.

    The model is not decoupled, but still has many requests in flight, because it answers requests after
    `execute` has returned.
    """

    role = Role.FRONT_END
    vocabulary = Vocabulary.TOKENS
    auto_complete_config = staticmethod(complete_config)

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the front end. Raises ConfigError with every problem found in config.pbtxt."""
        keep_private()
        pb_utils = import_pb_utils()
        log_to_triton(pb_utils)
        model = read_model_args(args, self.role)
        parameters = model.parameters
        tokenizers = TokenizerFinder(parameters.tokenizer_dir)
        if parameters.tokenizer_dir:
            tokenizers.find()  # now, so that the first request need not wait for it
        client = self.make_client(parameters)
        self._front_end = FrontEnd(pb_utils, client, client.close, model, tokenizers, self.vocabulary)
        # Last, because Triton does not call finalize if initialize raises.
        self._guard = guard_of_front_end(model.name)
        note_initialized(model.name)

    def make_client(self, parameters: Parameters) -> EngineClient:
        """Make the client of the engine. The front end closes it."""
        return _reach(parameters.engine_endpoint, parameters.tensorrt_llm_model_name)

    def execute(self, requests: Sequence[Any]) -> None:
        """Admit requests. The sender thread sends their responses later."""
        self._front_end.execute(requests)

    def finalize(self) -> None:
        """Answer all requests in flight."""
        self._front_end.close()
        if self._guard is not None:
            self._guard.dismiss()


class Ensemble(Infer):
    """`ensemble`: text in, text out, under tensorrtllm_backend's names (`max_tokens`, `top_k`, `stream`, …).

    It is a decoupled model, not a Triton ensemble, because Triton does not pass cancellations to an
    ensemble's steps.
    """

    vocabulary = Vocabulary.TEXT


class Bls(Ensemble):
    """`tensorrt_llm_bls`: like `ensemble`; if a parameter names a draft model, that model drafts tokens.

    It does not use Triton's business logic scripting. It sends requests to both engines' endpoints.
    """

    role = Role.BLS

    def make_client(self, parameters: Parameters) -> EngineClient:
        """Make the client of the engine, or of both engines."""
        target = super().make_client(parameters)
        if (name := parameters.tensorrt_llm_draft_model_name) is None:
            if parameters.draft_engine_endpoint is not None:
                raise ConfigError(
                    "draft_engine_endpoint is set without tensorrt_llm_draft_model_name: set both, or none"
                )
            return target
        return DraftingClient(target, _reach(parameters.draft_engine_endpoint, name))


def _reach(path: str | None, model_name: str) -> SocketEngineClient:
    """Make a client of the engine at `path`, or if it is None, of this server's model `model_name`."""
    return SocketEngineClient(path or endpoint_path(os.getppid(), model_name))
