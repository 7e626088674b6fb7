"""`tensorrt_llm`: the model that holds the engine, in this process, and serves its endpoint to other models.

Owns the engine's life. Triton calls it on one thread.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.endpoint.client import retire_predecessor
from inflight.endpoint.path import endpoint_path
from inflight.triton.completion_text import TokenizerFinder
from inflight.triton.front_end import FrontEnd, ServingModel
from inflight.triton.log import log_to_triton
from inflight.triton.metrics import MetricsPublisher
from inflight.triton.model_args import read_model_args
from inflight.triton.parameters import Role
from inflight.triton.tensor_spec import Vocabulary

_EXIT_TIMEOUT_S = 10


class TritonPythonModel:
    """Token ids or text in and out, decoupled."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the engine; raises ConfigError with everything that is wrong with config.pbtxt."""
        import triton_python_backend_utils as pb_utils

        from inflight.factory import UNLOAD_TIMEOUT_S, build_engine, check_parameters

        log_to_triton(pb_utils)
        model = read_model_args(args, Role.ENGINE)
        check_parameters(model.parameters)
        # The stub's parent is the server, so that two servers on one machine do not meet.
        path = model.parameters.engine_endpoint or endpoint_path(os.getppid(), model.name)
        # Triton lets an unloaded model live on while a client holds a stream that used it. There is neither place
        # nor memory for two engines.
        retire_predecessor(path, UNLOAD_TIMEOUT_S)
        self._publisher = publisher = MetricsPublisher(
            pb_utils, model.name, model.version_dir.name, pb_utils.Logger.log_verbose
        )
        try:
            self._engine = engine = build_engine(
                model.parameters,
                str(model.version_dir),
                path,
                lambda stats, metrics: publisher.put(stats, metrics, time.time()),
            )
        except Exception:  # Triton calls no finalize where initialize fails
            publisher.close()
            raise
        tokenizers = TokenizerFinder(model.parameters.tokenizer_dir)
        tokenizers.find(engine.client.describe().tokenizer_dir)
        serving = ServingModel(Vocabulary.TOKENS, model.decoupled, model.parameters)
        self._front_end = FrontEnd(pb_utils, engine.client, self._close_engine, serving, tokenizers)

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests; their responses come later, from the sender thread."""
        self._front_end.execute(requests)

    def finalize(self) -> None:
        """Answer what is in flight and free the engine."""
        self._front_end.close()
        self._publisher.close()
        if not self._has_ended:
            # What hangs in the device may hang at the process's exit too, and Triton waits for that without end.
            signal.alarm(_EXIT_TIMEOUT_S)

    def _close_engine(self) -> None:
        self._has_ended = self._engine.close()
