"""docs/openai.md names every field, refused ones included."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight.openai.messages.protocol import MessagesBody, MessagesOutput, MessagesThinking
from inflight.openai.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    StreamOptions,
    StructuredOutputs,
)

PAGE = Path(__file__).parents[2] / "docs" / "openai.md"


_BODIES = [
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    MessagesBody,
    MessagesOutput,
    MessagesThinking,
    RerankBody,
    ScoreBody,
    StreamOptions,
    StructuredOutputs,
]


@pytest.mark.parametrize("body", _BODIES)
def test_every_field_is_on_the_page(body: type[Body]) -> None:
    named = set(re.findall(r"`([a-z_0-9]+)`", PAGE.read_text(encoding="utf-8"))) | {
        "model",
        "stream_options",
        "type",
    }
    fields = {field.alias or name for name, field in body.model_fields.items()}
    assert fields | set(body.not_served) <= named
