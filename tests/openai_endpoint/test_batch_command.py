"""`inflight batch`: the answers are those of the official client, and an interrupted batch goes on."""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from inflight.core.ports import EngineClient
from inflight.openai.batches import command
from tests.openai_endpoint.scripted import ScriptedEngine
from tests.openai_endpoint.serving import PATIENCE_S, fake_engine, served

Body = dict[str, Any]


def completion(prompt: str, max_tokens: int = 8) -> Body:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def write_batch(path: Path, bodies: list[Body], url: str = "/v1/completions") -> Path:
    lines = [
        {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def answers(path: Path) -> dict[str, Any]:
    """Return the lines of an output by custom_id, which must occur once."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "inflight", "batch", *map(str, arguments)], text=True,
        stdout=options.pop("stdout", subprocess.PIPE), stderr=options.pop("stderr", subprocess.STDOUT), **options,
    )  # fmt: skip


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_answers_are_those_of_the_official_client(
    client: openai.OpenAI, fake_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = [completion(f"prompt {number}") for number in range(40)]
    file = write_batch(tmp_path / "requests.jsonl", bodies)
    assert command.main([str(file), "--url", f"{fake_url}/v1", "--concurrency", "8"]) == 0
    assert "batch: 40 succeeded, 0 failed: " in capsys.readouterr().err
    found = answers(tmp_path / "requests.output.jsonl")
    assert len(found) == 40
    for number in (0, 13, 39):
        line = found[f"request-{number}"]
        assert line["error"] is None and line["response"]["status_code"] == 200
        got = Completion.model_validate(line["response"]["body"])
        assert got.id == f"cmpl-{line['response']['request_id']}"
        expected = client.completions.create(
            model="demo",
            prompt=f"prompt {number}",
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert got.choices == expected.choices and got.usage is not None


def test_chats_and_failures_are_in_the_same_output(
    fake_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    bodies = [chat, {**chat, "temperature": -1}, {**chat, "model": "other"}]
    file = write_batch(tmp_path / "chats.jsonl", bodies, "/v1/chat/completions")
    output = tmp_path / "answers"
    arguments = [str(file), "--url", fake_url, "-o", str(output)]
    assert command.main(arguments) == 1
    assert "batch: 1 succeeded, 2 failed: " in capsys.readouterr().err
    found = [answers(output)[f"request-{number}"]["response"] for number in range(3)]
    assert [each["status_code"] for each in found] == [200, 400, 404]
    ChatCompletion.model_validate(found[0]["body"])
    assert found[1]["body"]["error"]["param"] == "temperature"
    before = output.read_bytes()  # a refused request is answered: it is not sent again
    assert command.main(arguments) == 1 and output.read_bytes() == before
    assert "3 of 3 requests are already answered" in capsys.readouterr().err


def test_requests_reach_the_engine_with_a_lower_priority_than_all_others(tmp_path: Path) -> None:
    engine = ScriptedEngine("yes")
    with served(cast(EngineClient, engine)) as url:
        file = write_batch(tmp_path / "requests.jsonl", [completion("x")])
        assert command.main([str(file), "--url", url]) == 0
        body = {**completion("y"), "priority": 1_000_000}
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            client.completions.create(model="demo", prompt="y", extra_body=body)
    batch, live = engine.requests
    assert 0 <= batch.priority < live.priority < 0.5


def test_a_live_request_starts_before_the_waiting_ones_of_a_batch(tmp_path: Path) -> None:
    file = write_batch(tmp_path / "requests.jsonl", [completion(f"x{number}", 100) for number in range(30)])
    output = tmp_path / "requests.output.jsonl"
    with (
        fake_engine(step_us=1000, max_batch_size="1", max_beam_width="1") as engine,
        served(engine) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        process = start(file, "--url", url, "--concurrency", 20)
        wait_for(lambda: num_lines(output) > 0)
        before = num_lines(output)
        client.completions.create(model="demo", prompt="live", max_tokens=2)
        after = num_lines(output)
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert after - before <= 5, "19 of the batch were waiting"
    assert process.returncode == 0, said


def test_a_killed_batch_goes_on_where_it_ended(tmp_path: Path) -> None:
    file = write_batch(tmp_path / "requests.jsonl", [completion(f"x{number}", 20) for number in range(60)])
    output = tmp_path / "requests.output.jsonl"
    with fake_engine(step_us=500, max_batch_size="4") as engine, served(engine) as url:
        process = start(file, "--url", url, "--concurrency", 6)
        wait_for(lambda: num_lines(output) >= 5)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=PATIENCE_S)
        first = output.read_bytes()
        assert 5 <= first.count(b"\n") < 60
        with output.open("ab") as torn:
            torn.write(b'{"id":"batch_req_12')
        process = start(file, "--url", url, "--concurrency", 6)
        said, _ = process.communicate(timeout=PATIENCE_S)
        page = urllib.request.urlopen(f"{url}/metrics").read().decode()
    assert process.returncode == 0 and "batch: 60 succeeded, 0 failed" in said
    assert len(answers(output)) == 60 and output.read_bytes().startswith(first[: first.rindex(b"\n") + 1])
    served_ = re.search(r'handler="/v1/completions",method="POST",status="2xx",code="200"} (\d+)', page)
    assert served_ and 60 <= int(served_[1]) <= 66, "only those in flight at the kill are computed twice"


def test_ctrl_c_ends_a_batch_at_once(tmp_path: Path) -> None:
    file = write_batch(tmp_path / "requests.jsonl", [completion("x", 4), completion("y", 250)])
    output = tmp_path / "requests.output.jsonl"
    with fake_engine(step_us=200_000) as engine, served(engine) as url:
        process = start(file, "--url", url)
        wait_for(lambda: num_lines(output) == 1)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "batch: 1 succeeded, 0 failed" in said and "1 have no answer yet" in said
    assert "Traceback" not in said


def test_ten_thousand_requests_with_a_bar_on_a_terminal(tmp_path: Path) -> None:
    """An earlier run has answered all but the last hundred."""
    file = write_batch(tmp_path / "requests.jsonl", [completion("x", 1)] * 10_000)
    done = b"".join(
        b'{"id":"batch_req_%d","custom_id":"request-%d","response":{"status_code":200},"error":null}\n'
        % (n, n)
        for n in range(9_900)
    )
    output = tmp_path / "out.jsonl"
    output.write_bytes(done)
    screen, terminal = pty.openpty()
    shown = b""
    with fake_engine() as engine, served(engine) as url:
        process = start(file, "--url", url, "-o", output, stdout=terminal, stderr=terminal)
        os.close(terminal)
        while True:
            try:
                part = os.read(screen, 1 << 16)
            except OSError:  # the process has closed the terminal
                break
            shown += part
        os.close(screen)
        assert process.wait(PATIENCE_S) == 0
    assert b"10000/10000" in shown and b"10000 succeeded, 0 failed" in shown
    assert num_lines(output) == 10_000


@contextmanager
def http_server(statuses: list[int | None]) -> Iterator[tuple[str, list[str]]]:
    """A server that answers POSTs with these statuses in turn, the last for ever; None closes the connection."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            seen.append(self.headers.get("Authorization", ""))
            status = statuses[min(len(seen), len(statuses)) - 1]
            if status is not None:
                self._answer(status)

        def _answer(self, status: int) -> None:
            body = b"{}" if status == 200 else b'{"error": {"message": "why"}}'
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("status", [429, 503, None])
def test_a_temporary_failure_is_sent_again(
    status: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(command.API_KEYS_VARIABLE, "a-key second")
    file = write_batch(tmp_path / "requests.jsonl", [completion("x")])
    with http_server([status, 200]) as (url, seen):
        assert command.main([str(file), "--url", url]) == 0
    assert seen == ["Bearer a-key"] * 2
    assert answers(tmp_path / "requests.output.jsonl")["request-0"]["response"]["body"] == {}


def test_a_request_that_stays_without_an_answer_is_sent_by_the_next_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_batch(tmp_path / "requests.jsonl", [completion("x"), completion("y")])
    output = tmp_path / "requests.output.jsonl"
    arguments = [str(file), "--concurrency", "1", "--retries", "0", "--url"]
    with http_server([200, 503]) as (url, _):
        assert command.main([*arguments, url]) == 1
    said = capsys.readouterr().err
    assert "the server answers no requests: 503: why" in said
    assert "1 succeeded, 0 failed" in said and "1 have no answer yet: run the same command again" in said
    assert list(answers(output)) == ["request-0"]
    with http_server([200]) as (url, seen):
        assert command.main([*arguments, url]) == 0
    assert len(seen) == 1 and list(answers(output)) == ["request-0", "request-1"]


def test_without_a_server_nothing_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_batch(tmp_path / "requests.jsonl", [completion("x")])
    with http_server([]) as (url, _):
        pass
    assert command.main([str(file), "--url", url]) == 1
    assert f"no server answers at {url}; inflight serve starts one" in capsys.readouterr().err


def test_a_wrong_key_is_told_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_batch(tmp_path / "requests.jsonl", [completion("x")])
    (tmp_path / "key").write_text("right\n")
    with fake_engine() as engine, served(engine, api_keys=("right",)) as url:
        assert command.main([str(file), "--url", url]) == 1
        assert "401: this server needs an API key" in capsys.readouterr().err
        assert command.main([str(file), "--url", url, "--api-key-file", str(tmp_path / "key")]) == 0


def test_a_bad_line_ends_the_command_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_batch(tmp_path / "requests.jsonl", [completion("x"), completion("y")])
    file.write_text(file.read_text().replace("request-1", "request-0"))
    with http_server([200]) as (url, seen):
        assert command.main([str(file), "--url", url]) == 2
    expected = f"batch: {file}: line 2: custom_id 'request-0' is also in line 1"
    assert expected in capsys.readouterr().err and seen == []


def test_wrong_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing.jsonl"
    assert command.main([str(missing)]) == 2
    assert capsys.readouterr().err == f"batch: {missing}: No such file or directory\n"
    file = write_batch(tmp_path / "requests.jsonl", [completion("x")])
    assert command.main([str(file), "-o", str(file)]) == 2
    assert f"batch: {file}: line 1: expected an answer of a batch" in capsys.readouterr().err
    other = tmp_path / "other.output.jsonl"
    other.write_text('{"custom_id": "z", "response": null}\n')
    assert command.main([str(file), "-o", str(other)]) == 2
    assert f"{other}: it has an answer to 'z', which is not in {file}" in capsys.readouterr().err


def test_a_folder_in_place_of_the_requests_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["."]) == 2
    assert capsys.readouterr().err == "batch: .: expected a file with requests, got a folder\n"


def test_two_batches_do_not_write_to_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_batch(tmp_path / "requests.jsonl", [completion("x")])
    output = tmp_path / "requests.output.jsonl"
    with output.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert command.main([str(file)]) == 2
    assert capsys.readouterr().err == f"batch: {output}: another batch is writing to it\n"


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--url", "ftp://x", "expected a URL such as http://localhost:9000"),
        ("--url", "http://x/v2", "expected a URL"),
        ("--concurrency", "0", "1 or more, got '0'"),
        ("--retries", "-1", "from 0 to 9999, got '-1'"),
        ("--api-key-file", "/nowhere/key", "/nowhere/key: No such file"),
    ],
)
def test_invalid_flags_are_refused_with_the_value(
    flag: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["requests.jsonl", flag, value])
    message = capsys.readouterr().err
    assert ended.value.code == 2 and said in message and flag in message
