"""Adapter commands run on a thread of their own, and never on execute's thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from inflight.core.request.adapter_command import AdapterAction, AdapterCommand, AdapterState
from inflight.errors import NotFound
from inflight.tensors.spec import Vocabulary
from tests.lines_of import lines_of
from tests.tensors.factories import make_description, token_inputs
from tests.triton.factories import make_triton_request
from tests.triton.fake_pb_utils import ResponseSender, TritonError
from tests.triton.stage import Stage, error_of, value_of

PATIENCE_S = 60.0
Build = Callable[..., Stage]
SQL = AdapterState("sql", None, "/adapters/sql", True, 8, 4096)
SENT = AdapterState(task_id=2**64 - 1, rank=4, num_bytes=64)


@pytest.fixture
def build() -> Iterator[Build]:
    stages: list[Stage] = []

    def make(*args: object, enabled: bool = True) -> Stage:
        stage = Stage(*args)
        stage.client.description = make_description(tokenizer_dir="letters", adapter_commands_enabled=enabled)
        stages.append(stage)
        return stage

    yield make
    for stage in stages:
        stage.front_end.close()


def ask(stage: Stage, **command: object) -> ResponseSender:
    text = json.dumps(command).encode()
    return stage.take(make_triton_request({"lora_command": np.array([text], np.object_)}))


@pytest.mark.parametrize("vocabulary", Vocabulary)
@pytest.mark.parametrize("decoupled", [True, False])
def test_one_response_lists_all_adapters(build: Build, vocabulary: Vocabulary, decoupled: bool) -> None:
    stage = build(vocabulary, decoupled)
    commands = []
    stage.client.carry_out = lambda command: commands.append(command) or (SQL, SENT)
    (sent,) = ask(stage, command="load", name="sql").wait_final()
    (text,) = value_of(sent, "adapters")
    assert json.loads(text) == {
        "adapters": [
            {
                "name": "sql",
                "task_id": None,
                "path": "/adapters/sql",
                "is_loaded": True,
                "rank": 8,
                "num_bytes": 4096,
            },
            {"name": "", "task_id": 2**64 - 1, "path": "", "is_loaded": True, "rank": 4, "num_bytes": 64},
        ]
    }
    assert commands == [AdapterCommand(AdapterAction.LOAD, "sql")]
    assert not stage.client.submitted


def test_adapter_commands_are_refused_unless_enabled(build: Build) -> None:
    code, message = error_of(ask(build(enabled=False), command="list").wait_final()[0])
    assert code == TritonError.UNSUPPORTED and "parameter enable_adapter_commands" in message


def test_a_bad_adapter_command_is_an_invalid_argument(build: Build) -> None:
    code, message = error_of(ask(build(), command="drop").wait_final()[0])
    assert code == TritonError.INVALID_ARG and message.startswith("lora_command has no known command")


@pytest.mark.parametrize(
    ("error", "code"),
    [(NotFound("no adapter sql"), TritonError.NOT_FOUND), (OSError("a bug"), TritonError.INTERNAL)],
)
def test_errors_of_adapter_commands_are_answered_and_later_commands_run(
    build: Build, error: Exception, code: int
) -> None:
    def carry_out(command: AdapterCommand) -> tuple[AdapterState, ...]:
        raise error

    stage = build()
    stage.client.carry_out = carry_out
    for _ in range(2):
        found, message = error_of(ask(stage, command="unload", name="sql").wait_final()[0])
        assert found == code and str(error) in message


def test_a_failed_commands_log_line_names_its_request(build: Build) -> None:
    stage = build()
    stage.client.carry_out = lambda command: 1 / 0
    command = np.array([b'{"command": "list"}'], np.object_)
    with lines_of("inflight.triton.adapter_requests") as lines:
        stage.take(make_triton_request({"lora_command": command}, request_id="a")).wait_final()
    assert lines == ["a command could not be carried out request_id=a"]


def test_execute_does_not_wait_for_an_adapter_command(build: Build) -> None:
    may = threading.Event()
    stage = build()
    stage.client.carry_out = lambda command: (may.wait(PATIENCE_S), (SQL,))[1]
    waiting = ask(stage, command="list")
    other = stage.take(make_triton_request())
    stage.finish([8])
    assert value_of(other.wait_final()[0], "output_ids") == [8]
    assert not waiting.sent
    may.set()
    assert json.loads(value_of(waiting.wait_final()[0], "adapters")[0])["adapters"][0]["name"] == "sql"


def test_an_empty_adapter_command_is_a_generation_request(build: Build) -> None:
    stage = build(enabled=False)
    sender = stage.take(make_triton_request(token_inputs(lora_command=b"")))
    stage.finish([8])
    assert "adapters" not in sender.wait_final()[0].response.arrays()
