from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from inflight_client import Adapter
from inflight_client.__main__ import main
from tests.client.fake_server import (
    PATIENCE_S,
    Asked,
    FakeServer,
    Refusal,
    Response,
    answer_with,
    as_texts,
    response_of,
)
from tests.client.test_client import until_stopped


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_text_is_printed_unchanged(server: FakeServer, capsys, stream: list[str]) -> None:
    server.answer = lambda asked: answer_with(asked, [" Hé", "\n🎉"])
    assert main(["generate", "a prompt", "--url", server.url, "--max-tokens", "5", *stream]) == 0
    assert capsys.readouterr().out == " Hé\n🎉\n"
    assert server.asked[0].inputs["stream"] == [bool(stream)]
    assert server.asked[0].inputs["max_tokens"] == [5]


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_ids_are_printed_as_ids(server: FakeServer, capsys, stream: list[str]) -> None:
    server.answer = lambda asked: answer_with(asked, [[5, 6], [], [7]])
    assert main(["generate", "--ids", "1,2,3", "--url", server.url, *stream]) == 0
    assert capsys.readouterr().out == "5,6,7\n"
    assert server.asked[0].inputs["input_ids"] == [1, 2, 3]


def test_every_option_reaches_the_server(server: FakeServer) -> None:
    given = {
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.75,
        "min_p": 0.25,
        "seed": 9,
        "end_id": 2,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "no_repeat_ngram_size": 3,
        "beam_width": 4,
        "length_penalty": 0.5,
        "min_length": 6,
        "priority": 0.75,
        "client_id": 8,
        "allotted_time_ms": 900,
        "cache_salt_id": 7,
        "logits_post_processor_name": "upper",
    }
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    words = ["--stop", "end", "--stop=\n", "--bad-word", "no"]
    more = ["--n=2", "--prompt-lookup=7", "--model=other"]
    main(["generate", "x", "--url", server.url, *options, *words, *more])
    asked = server.asked[0]
    assert asked.model == "other"
    assert {name: asked.inputs[name][0] for name in given} == given
    assert (asked.inputs["stop_words"], asked.inputs["bad_words"]) == (["end", "\n"], ["no"])
    assert asked.inputs["num_return_sequences"] == [2]
    assert asked.inputs["prompt_lookup_num_tokens"] == [7]


def test_several_answers_are_numbered(server: FakeServer, capsys) -> None:
    reasons = as_texts("LENGTH", "END_ID")
    server.answer = lambda asked: iter(
        [response_of(asked, final=True, text_output=as_texts("a b", "c"), finish_reason=reasons)]
    )
    assert main(["generate", "x", "--url", server.url, "--beam-width=2"]) == 0
    assert capsys.readouterr().out == "[0] a b\n[1] c\n"


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_log_probs_are_printed_to_stderr(server: FakeServer, capsys, stream: list[str]) -> None:
    def part(asked: Asked, text: str, log_prob: float, total: float, **more) -> Response:
        return response_of(
            asked,
            text_output=as_texts(text),
            output_log_probs=np.array([[[log_prob]]], np.float32),
            cum_log_probs=np.array([[total]], np.float32),
            **more,
        )

    server.answer = lambda asked: iter(
        [
            part(asked, "a", -0.5, -0.5, finish_reason=as_texts("NOT_FINISHED")),
            part(asked, "b", -1.0, -1.5, finish_reason=as_texts("LENGTH"), final=True),
        ]
    )
    assert main(["generate", "x", "--url", server.url, "--log-probs", *stream]) == 0
    captured = capsys.readouterr()
    assert captured.out == "ab\n"
    assert captured.err == "log_probs -0.5000 -1.0000 sum -1.5000\n"
    assert server.asked[0].inputs["return_log_probs"] == [True]


def test_the_state_is_printed_indented(server: FakeServer, capsys) -> None:
    server.answer = lambda asked: iter(
        [response_of(asked, final=True, state=as_texts('{"batcher": {"n": 1}}'))]
    )
    assert main(["state", "--url", server.url]) == 0
    assert capsys.readouterr().out == '{\n  "batcher": {\n    "n": 1\n  }\n}\n'
    (asked,) = server.asked
    assert (asked.model, asked.inputs, asked.outputs) == ("tensorrt_llm", {"state": [True]}, ["state"])


ADAPTERS = json.dumps({"adapters": [dataclasses.asdict(Adapter("sql", path="/a", rank=8, num_bytes=9))]})


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ([], {"command": "list"}),
        (["--load", "sql"], {"command": "load", "name": "sql"}),
        (["--load", "sql", "--path", "a/b"], {"command": "load", "name": "sql", "path": "a/b"}),
        (["--unload", "sql"], {"command": "unload", "name": "sql"}),
        (["--unload", "7"], {"command": "unload", "task_id": 7}),
    ],
)
def test_adapters_are_printed(server: FakeServer, capsys, arguments: list[str], command: dict) -> None:
    server.answer = lambda asked: iter([response_of(asked, final=True, adapters=as_texts(ADAPTERS))])
    assert main(["adapters", "--url", server.url, *arguments]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(ADAPTERS)["adapters"]
    (asked,) = server.asked
    assert (asked.model, asked.outputs) == ("tensorrt_llm", ["adapters"])
    assert json.loads(asked.inputs["lora_command"][0]) == command


def test_an_adapter_path_without_load_is_refused(server: FakeServer) -> None:
    with pytest.raises(SystemExit):
        main(["adapters", "--url", server.url, "--path", "a"])


def test_the_address_may_have_a_scheme(server: FakeServer) -> None:
    assert main(["generate", "x", "--url", f"http://{server.url}/"]) == 0
    assert len(server.asked) == 1


@pytest.mark.parametrize(("given", "tensor"), [("sql", "lora_name"), ("7", "lora_task_id")])
def test_lora_selects_an_adapter(server: FakeServer, capsys, given: str, tensor: str) -> None:
    assert main(["generate", "x", "--url", server.url, "--lora", given]) == 0
    assert server.asked[0].inputs[tensor] == [int(given) if given.isdecimal() else given]


def test_a_server_without_state_requests_is_an_error(server: FakeServer, capsys) -> None:
    def refuse(asked: Asked) -> Iterator[Response]:
        raise Refusal("UNSUPPORTED", "parameter enable_state_requests is false")
        yield

    server.answer = refuse
    assert main(["state", "--url", server.url, "--model=ensemble"]) == 1
    assert capsys.readouterr().err == "error: UNIMPLEMENTED: parameter enable_state_requests is false\n"
    assert server.asked[0].model == "ensemble"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["x", "--url", "localhost:9"],
            "error: UNAVAILABLE: no gRPC server answers at localhost:9; url is the address of Triton's gRPC port",
        ),
        (["x", "--seed", "-1"], "error: seed must be in"),
    ],
)
def test_errors_are_one_line_and_the_exit_status_is_1(capsys, arguments: list[str], message: str) -> None:
    assert main(["generate", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["x", "--ids", "1"],
        ["--ids", "1,two"],
        ["x", "--stream", "--n=2"],
        ["x", "--stream", "--beam-width=2"],
    ],
)
def test_the_exit_status_of_invalid_arguments_is_2(capsys, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", *arguments])
    assert caught.value.code == 2


def test_interrupting_cancels_the_request(server: FakeServer) -> None:
    server.answer = lambda asked: until_stopped(server, asked)
    command = [sys.executable, "-m", "inflight_client", "generate", "x", "--stream", "--url", server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"a"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert b"Traceback" not in process.stderr.read()
    assert server.cancelled.wait(PATIENCE_S)


def test_a_closed_pipe_ends_the_command(server: FakeServer) -> None:
    server.answer = lambda asked: answer_with(asked, ["x" * 4096] * 100)
    command = [sys.executable, "-m", "inflight_client", "generate", "x", "--stream", "--url", server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"x"
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["generate", "x", "--max-tokens", "ten"],
            "argument --max-tokens: expected a whole number, got 'ten'",
        ),
        (["generate", "x", "--temperature", "hot"], "argument --temperature: expected a number, got 'hot'"),
        (["generate", "x", "--top-k", "1.5"], "argument --top-k: expected a whole number, got '1.5'"),
        (["generate", "x", "--n", ""], "argument --n: expected a whole number, got ''"),
        (["chat", "--max-tokens", "ten"], "argument --max-tokens: expected a whole number, got 'ten'"),
        (["generate", "x", "--max-token", "5"], "--max-token 5 (did you mean --max-tokens?)"),
        (["generate", "--promt", "x"], "unrecognized arguments: --promt"),
        (["state", "--ulr=x"], "unrecognized arguments: --ulr=x (did you mean --url?)"),
        (["--versoin"], "unrecognized arguments: --versoin (did you mean --version?)"),
        (["generat", "x"], "got 'generat'; did you mean generate? choose from generate, state, chat,"),
        (
            ["--max-token", "5", "def f("],
            "got '5'; options come after the command, but --max-token is before it",
        ),
        (
            ["generate"],
            "one of the arguments prompt --ids is required, as in: python -m inflight_client generate "
            "'The capital of France is'",
        ),
        (
            ["convert-lora", "a"],
            "required: OUT, as in: python -m inflight_client convert-lora PEFT_FOLDER OUT",
        ),
    ],
)
def test_wrong_usage_is_answered_in_two_lines(given: list[str], said: str, capsys) -> None:
    with pytest.raises(SystemExit) as status:
        main(given)
    error, hint = capsys.readouterr().err.splitlines()
    assert status.value.code == 2
    assert said in error and hint.endswith("--help lists the options")
