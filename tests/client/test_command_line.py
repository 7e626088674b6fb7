from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from inflight_client.__main__ import main
from tests.client.fake_server import PATIENCE_S, FakeServer, answer_with
from tests.client.test_client import until_stopped


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_text_is_printed_as_it_is(server: FakeServer, capsys, stream: list[str]) -> None:
    server.answer = lambda asked: answer_with(asked, [" Hé", "\n🎉"])
    assert main(["generate", "a prompt", "--url", server.url, "--max-tokens", "5", *stream]) == 0
    assert capsys.readouterr().out == " Hé\n🎉\n"
    assert server.asked[0].inputs["stream"] == [bool(stream)]
    assert server.asked[0].inputs["max_tokens"] == [5]


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_ids_are_printed_as_they_are_given(server: FakeServer, capsys, stream: list[str]) -> None:
    server.answer = lambda asked: answer_with(asked, [[5, 6], [], [7]])
    assert main(["generate", "--ids", "1,2,3", "--url", server.url, *stream]) == 0
    assert capsys.readouterr().out == "5,6,7\n"
    assert server.asked[0].inputs["input_ids"] == [1, 2, 3]


def test_every_option_reaches_the_server(server: FakeServer) -> None:
    options = ["--temperature=0.5", "--top-k=4", "--top-p=0.75", "--seed=9", "--end-id=2", "--model=other"]
    main(["generate", "x", "--url", server.url, *options])
    asked = server.asked[0]
    values = [asked.inputs[name][0] for name in ("temperature", "top_k", "top_p", "seed", "end_id")]
    assert (asked.model, values) == ("other", [0.5, 4, 0.75, 9, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["x", "--url", "localhost:9"],
            "error: UNAVAILABLE: no server answers at localhost:9; scripts/serve",
        ),
        (["x", "--seed", "-1"], "error: seed must be in"),
    ],
)
def test_errors_are_one_line_and_exit_1(capsys, arguments: list[str], message: str) -> None:
    assert main(["generate", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["x", "--ids", "1"], ["--ids", "1,two"]])
def test_arguments_that_make_no_sense_exit_2(capsys, arguments: list[str]) -> None:
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


def test_a_reader_who_has_enough_ends_it(server: FakeServer) -> None:
    server.answer = lambda asked: answer_with(asked, ["x" * 4096] * 100)
    command = [sys.executable, "-m", "inflight_client", "generate", "x", "--stream", "--url", server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"x"
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr.read() == b""
