"""`tensorrt_llm_infer`, `ensemble` and `tensorrt_llm_bls`: serving models that talk to engine endpoints.

Each owns nothing but its front end, and the guard that ends the server if this process is killed. Loads whether or
not the engine is there yet, imports no torch, and answers UNAVAILABLE until the engine can be reached. Triton
calls it on one thread.
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
    """`tensorrt_llm_infer`: the tensors of `tensorrt_llm`, one response, for HTTP infer and unary gRPC.

    Not decoupled, and still many requests in flight: it answers after execute has returned.
    """

    role = Role.FRONT_END
    vocabulary = Vocabulary.TOKENS
    auto_complete_config = staticmethod(complete_config)

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the front end; raises ConfigError with everything that is wrong with config.pbtxt."""
        keep_private()
        pb_utils = import_pb_utils()
        log_to_triton(pb_utils)
        model = read_model_args(args, self.role)
        parameters = model.parameters
        tokenizers = TokenizerFinder(parameters.tokenizer_dir)
        if parameters.tokenizer_dir:
            tokenizers.find()  # now rather than while the first request waits
        client = self.make_client(parameters)
        self._front_end = FrontEnd(pb_utils, client, client.close, model, tokenizers, self.vocabulary)
        # Last, as Triton calls no finalize where this fails.
        self._guard = guard_of_front_end(model.name)
        note_initialized(model.name)

    def make_client(self, parameters: Parameters) -> EngineClient:
        """The way to the engine; the front end closes it."""
        return _reach(parameters.engine_endpoint, parameters.tensorrt_llm_model_name)

    def execute(self, requests: Sequence[Any]) -> None:
        """Admit requests; their responses come later, from the sender thread."""
        self._front_end.execute(requests)

    def finalize(self) -> None:
        """Answer what is in flight."""
        self._front_end.close()
        if self._guard is not None:
            self._guard.dismiss()


class Ensemble(Infer):
    """`ensemble`: text in, text out, under tensorrtllm_backend's names (`max_tokens`, `top_k`, `stream`, …).

    A decoupled front end and no Triton ensemble, because Triton passes no cancellation on to an ensemble's steps.
    """

    vocabulary = Vocabulary.TEXT


class Bls(Ensemble):
    """`tensorrt_llm_bls`: as `ensemble`, with a draft model where its parameters name one.

    Nothing goes through Triton's business logic scripting: both models are reached by their engine endpoints.
    """

    role = Role.BLS

    def make_client(self, parameters: Parameters) -> EngineClient:
        """The way to the engine, or to both engines."""
        target = super().make_client(parameters)
        if (name := parameters.tensorrt_llm_draft_model_name) is None:
            if parameters.draft_engine_endpoint is not None:
                raise ConfigError(
                    "draft_engine_endpoint is set without tensorrt_llm_draft_model_name: set both, or none"
                )
            return target
        return DraftingClient(target, _reach(parameters.draft_engine_endpoint, name))


def _reach(path: str | None, model_name: str) -> SocketEngineClient:
    """A client of the engine at `path`, or without one of that in a model of the server that started this."""
    return SocketEngineClient(path or endpoint_path(os.getppid(), model_name))
