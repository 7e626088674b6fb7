"""The pages about /v1 name every field, refused ones included; the program in the Responses page runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight.core.request.sampling_config import CONTROLS
from inflight.openai.adapters import LoadAdapterBody, UnloadAdapterBody
from inflight.openai.generate import GenerateBody, SamplingParams
from inflight.openai.messages.protocol import MessagesBody, MessagesOutput, MessagesThinking
from inflight.openai.protocol import (
    BatchBody,
    Body,
    ChatBody,
    ClassifyBody,
    CompletionBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    StreamOptions,
    StructuredOutputs,
)
from inflight.openai.responses.body import ReasoningOptions, ResponseBody, TextOptions
from tests.openai_endpoint.serving import fake_engine, served

DOCS = Path(__file__).parents[2] / "docs"
PAGE, RESPONSES = DOCS / "openai.md", DOCS / "openai-responses.md"


_BODIES = [
    ChatBody,
    ClassifyBody,
    CompletionBody,
    EmbeddingBody,
    GenerateBody,
    MessagesBody,
    MessagesOutput,
    MessagesThinking,
    RerankBody,
    SamplingParams,
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


@pytest.mark.parametrize("body", [LoadAdapterBody, UnloadAdapterBody])
def test_every_field_about_adapters_is_on_their_page(body: type[Body]) -> None:
    named = set(re.findall(r"`([a-z_0-9]+)`", (DOCS / "adapters.md").read_text(encoding="utf-8")))
    assert set(body.model_fields) | set(body.not_served) <= named


@pytest.mark.parametrize("body", [ResponseBody, ReasoningOptions, TextOptions])
def test_every_field_of_a_response_is_on_its_page(body: type[Body]) -> None:
    named = set(re.findall(r"`([a-z_]+)`", RESPONSES.read_text(encoding="utf-8"))) | {"model"}
    controls = {control.body.name for control in CONTROLS.values() if control.body}  # on the other page
    assert (set(body.model_fields) - controls) | set(body.not_served) <= named


def test_every_field_of_a_batch_is_on_its_page() -> None:
    named = set(re.findall(r"`([a-z_]+)`", (DOCS / "batches.md").read_text(encoding="utf-8")))
    assert set(BatchBody.model_fields) | set(BatchBody.not_served) <= named


def test_the_program_of_the_responses_page_runs(template: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", RESPONSES.read_text(encoding="utf-8"), re.DOTALL)
    with fake_engine() as engine, served(engine, chat_template=template) as url:
        exec(block.replace("http://localhost:9000", url), {})
