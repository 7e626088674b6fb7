"""A `/v1` endpoint whose answers depend on the prompt, so that a client's agent loop calls a tool and goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from inflight.core.ports import EngineClient, SendResponseCallback
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import Request
from inflight.text.tokenizer import Tokenizer
from tests.openai_endpoint.scripted import LIMITS, ScriptedEngine
from tests.openai_endpoint.serving import DEMO, served

TEMPLATE = Path(__file__).parents[1] / "serving/chat/templates/qwen3.jinja"
_LONGEST = 262_144  # tokens: coding agents send prompts of tens of thousands

Rules = Sequence[tuple[str, str]]
"""Pairs of a text of the prompt and the answer to such a prompt; the first pair that fits counts."""


class AgentEngine(ScriptedEngine):
    """A scripted engine that chooses its answer by the prompt."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        longest = replace(
            LIMITS, max_sequence_length=_LONGEST, max_input_length=_LONGEST - 1, num_blocks=_LONGEST
        )
        self.description = replace(self.description, limits=longest)
        self._tokenizer, self._rules = Tokenizer.from_dir(DEMO), rules

    def submit(self, request: Request, on_response: SendResponseCallback) -> RequestHandle:
        prompt = self._tokenizer.decode(request.input_token_ids)
        answer = next((answer for text, answer in self._rules if text in prompt), "I do not know.")
        self._ids = tuple(self._tokenizer.encode(answer, add_special_tokens=False))
        return super().submit(request, on_response)


@contextmanager
def answering(rules: Rules) -> Iterator[str]:
    """Serve `/v1` for the model `demo`; yields its URL, without a path."""
    with served(cast(EngineClient, AgentEngine(rules)), chat_template=TEMPLATE) as url:
        yield url


def call(tool: str, **arguments: str) -> str:
    """Return the text with which the model of `TEMPLATE` calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
