"""`tensorrt_llm_infer` and `ensemble`: serving models that talk to the engine endpoint of `tensorrt_llm`.

Each owns nothing but its front end, and the guard that ends the server if this process is killed. Loads whether or
not the engine is there yet, imports no torch, and answers UNAVAILABLE until the engine can be reached. Triton
calls it on one thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.config import Role
from inflight.endpoint.client import SocketEngineClient
from inflight.endpoint.path import endpoint_path
from inflight.server.guard import guard_in_server
from inflight.serving.completion_text import TokenizerFinder
from inflight.triton.front_end import FrontEnd
from inflight.triton.host import complete_outputs, import_pb_utils, log_to_triton, read_model_args
from inflight.triton.tensor_spec import Vocabulary


class Infer:
    """`tensorrt_llm_infer`: the tensors of `tensorrt_llm`, one response, for HTTP infer and unary gRPC.

    Not decoupled, and still many requests in flight: it answers after execute has returned.
    """

    vocabulary = Vocabulary.TOKENS
    auto_complete_config = staticmethod(complete_outputs)

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the front end; raises ConfigError with everything that is wrong with config.pbtxt."""
        pb_utils = import_pb_utils()
        log_to_triton(pb_utils)
        model = read_model_args(args, Role.FRONT_END)
        parameters = model.parameters
        path = parameters.engine_endpoint or endpoint_path(os.getppid(), parameters.tensorrt_llm_model_name)
        tokenizers = TokenizerFinder(parameters.tokenizer_dir)
        if parameters.tokenizer_dir:
            tokenizers.find()  # now rather than while the first request waits
        client = SocketEngineClient(path)
        self._front_end = FrontEnd(pb_utils, client, client.close, model, tokenizers, self.vocabulary)
        # Last, as Triton calls no finalize where this fails.
        self._guard = guard_in_server(model.name)

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
