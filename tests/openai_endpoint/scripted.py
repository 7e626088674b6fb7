"""An engine with given answers, for texts that no model can be made to generate."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from inflight.core.ports import EngineClient, SendResponseCallback
from inflight.core.request.adapter_command import AdapterCommand, AdapterState
from inflight.core.request.engine_description import EngineDescription, ModelLimits
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import Request
from inflight.core.request.response import Response, SequenceResult, TopLogProbs
from inflight.core.request.stop import FinishReason, StopReason
from inflight.text.tokenizer import Tokenizer
from tests.openai_endpoint.serving import DEMO, DEMO_VOCABULARY, served

END_ID = 0
BOS_ID = DEMO_VOCABULARY
LIMITS = ModelLimits(DEMO_VOCABULARY + 1, 256, 255, num_blocks=64, tokens_per_block=16, max_beam_width=4)
_PAUSE_S = 0.001


def folder_with_bos(folder: Path, **settings: Any) -> Path:
    """Write the demo model's tokenizer to `folder`, so that it puts the special token `<s>` before texts.

    `settings` are added to tokenizer_config.json.
    """
    pipeline = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    pipeline["added_tokens"].append({**pipeline["added_tokens"][0], "id": BOS_ID, "content": "<s>"})
    text = {"Sequence": {"id": "A", "type_id": 0}}
    pipeline["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS_ID], "tokens": ["<s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(pipeline), encoding="utf-8")
    config = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    config = {**config, "bos_token": "<s>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class ScriptedEngine:
    """An engine client that answers every sequence with the same tokens, and streams them one at a time.

    Args:
        answer: A text or token ids; the end id follows.
        folder: The folder of the tokenizer.

    Attributes:
        requests: The submitted requests.
    """

    def __init__(self, answer: str | Sequence[int] = "", folder: Path = DEMO) -> None:
        self.description = EngineDescription(
            LIMITS, model_path=str(folder), tokenizer_dir=str(folder), eos_token_ids=(END_ID,)
        )
        tokenizer = Tokenizer.from_dir(folder)
        self._ids = tuple(
            tokenizer.encode(answer, add_special_tokens=False) if isinstance(answer, str) else answer
        )
        self._request_ids = itertools.count(1)
        self.requests: list[Request] = []

    def describe(self) -> EngineDescription:
        return self.description

    def adapters(self, command: AdapterCommand, timeout_s: float) -> tuple[AdapterState, ...]:
        return ()

    def submit(self, request: Request, on_response: SendResponseCallback) -> RequestHandle:
        request_id = next(self._request_ids)
        self.requests.append(request)
        responses = self._responses(request_id, request)

        def answer() -> None:
            for response in responses:
                on_response(response)
                time.sleep(_PAUSE_S)

        threading.Thread(target=answer, name="scripted-engine").start()
        return RequestHandle(request_id, self.stop)

    def stop(self, request_id: int, reason: StopReason, sequence_index: int | None = None) -> None:
        pass

    def _responses(self, request_id: int, request: Request) -> Iterator[Response]:
        ids = self._ids[: request.max_new_tokens]
        reason = FinishReason.END_ID if len(self._ids) < request.max_new_tokens else FinishReason.LENGTH
        size = 1 if request.streaming else max(len(ids), 1)
        steps = [ids[start : start + size] for start in range(0, len(ids), size)]
        if (reason is FinishReason.END_ID and request.streaming) or not steps:
            steps.append(())  # the end id is in a response of its own
        count = request.sampling.num_sequences
        for place, step in enumerate(steps):
            for index in range(count):
                is_last = place == len(steps) - 1
                yield Response(
                    request_id,
                    SequenceResult(
                        (step,),
                        request.prompt_length,
                        (len(step),),
                        (reason if is_last else FinishReason.NOT_FINISHED,),
                        sequence_index=index,
                        is_sequence_final=is_last,
                        log_probs=(tuple(-0.5 for _ in step),) if request.output.return_log_probs else None,
                        top_log_probs=self._tops(request, step),
                    ),
                    is_final=is_last and index == count - 1,
                )

    def _tops(self, request: Request, step: Sequence[int]) -> tuple[tuple[TopLogProbs, ...], ...] | None:
        count = request.output.num_top_log_probs
        if not count:
            return None
        beside = [
            (token_id, *(other for other in range(count) if other != token_id))[:count] for token_id in step
        ]
        return (tuple(TopLogProbs(ids, tuple(-0.5 - place for place in range(count))) for ids in beside),)


@contextmanager
def scripted(answer: str | Sequence[int] = "", folder: Path = DEMO, **options: Any) -> Iterator[str]:
    """The application in front of a ScriptedEngine; yields its URL."""
    with served(cast(EngineClient, ScriptedEngine(answer, folder)), **options) as url:
        yield url
