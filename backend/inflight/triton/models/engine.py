"""`tensorrt_llm`: the model that holds the engine, in this process, and serves its endpoint to other models.

Owns the engine's life. Triton calls it on one thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.endpoint.path import endpoint_path
from inflight.triton.completion_text import TokenizerFinder
from inflight.triton.front_end import FrontEnd, ServingModel
from inflight.triton.log import log_to_triton
from inflight.triton.model_args import read_model_args
from inflight.triton.parameters import Role
from inflight.triton.tensor_spec import Vocabulary


class TritonPythonModel:
    """Token ids or text in and out, decoupled."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the engine; raises ConfigError with everything that is wrong with config.pbtxt."""
        import triton_python_backend_utils as pb_utils

        from inflight.factory import build_engine

        log_to_triton(pb_utils)
        model = read_model_args(args, Role.ENGINE)
        # The stub's parent is the server, so that two servers on one machine do not meet.
        path = model.parameters.engine_endpoint or endpoint_path(os.getppid(), model.name)
        engine = build_engine(
            model.parameters, str(model.version_dir), path, report_stats=pb_utils.Logger.log_verbose
        )
        tokenizers = TokenizerFinder(model.parameters.tokenizer_dir)
        tokenizers.find(engine.client.describe().tokenizer_dir)
        serving = ServingModel(Vocabulary.TOKENS, model.decoupled, model.parameters)
        self._front_end = FrontEnd(pb_utils, engine.client, engine.close, serving, tokenizers)

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests; their responses come later, from the sender thread."""
        self._front_end.execute(requests)

    def finalize(self) -> None:
        """Answer what is in flight and free the engine."""
        self._front_end.close()
