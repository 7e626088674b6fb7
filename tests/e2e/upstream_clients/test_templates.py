"""Configuration files filled in by documented command lines, and the servers they configure."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import DEMO_MODEL

from . import batcher_client, steps_client, templates
from .test_generate import generate
from .wire import config_of

PROMPT = "import os\n"
VOCABULARY = 3072


@pytest.mark.parametrize("documented", templates.COMMAND_LINES.values(), ids=templates.COMMAND_LINES)
@pytest.mark.parametrize("model", templates.QUICK_START)
def test_every_name_of_a_command_line_is_in_the_file(documented, model):
    text = (templates.SOURCE / model / "config.pbtxt").read_text(encoding="utf-8")
    assert templates.missing(text, documented[model]) == []


@pytest.mark.parametrize("model", templates.QUICK_START)
def test_filled_in_values_are_in_the_file(model):
    text = (templates.SOURCE / model / "config.pbtxt").read_text(encoding="utf-8")
    command_line = templates.QUICK_START[model]
    filled = templates.fill(text, command_line, DEMO_MODEL)
    assert "max_batch_size: 4\n" in filled
    assert [name for name in templates.pairs(command_line) if f"${{{name}}}" in filled] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", templates.QUICK_START)
def test_the_quick_start_sets_the_batch_size(quick_start_server, model):
    assert config_of(quick_start_server, model).max_batch_size == 4


@pytest.mark.exhaustive
def test_the_quick_start_answers_each_request_once(quick_start_server, prompt):
    assert not config_of(quick_start_server, "tensorrt_llm").model_transaction_policy.decoupled
    flags = batcher_client.Flags(request_output_len=8, end_id=-1)
    outcome = batcher_client.run(quick_start_server, prompt, flags)
    assert outcome.sequences[0][: len(prompt)] == prompt and len(outcome.generated[0]) == 8


@pytest.mark.exhaustive
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_quick_starts_models_give_the_same_text(quick_start_server, protocol):
    flags = steps_client.Flags(protocol)
    assert steps_client.compare(quick_start_server, PROMPT, 8, VOCABULARY, flags).startswith(PROMPT)


@pytest.mark.exhaustive
def test_the_quick_starts_request_is_answered(quick_start_server):
    body = {"text_input": PROMPT, "max_tokens": 20, "bad_words": "", "stop_words": ""}
    assert generate(quick_start_server, body)["text_output"].startswith(PROMPT)
