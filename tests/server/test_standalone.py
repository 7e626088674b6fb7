"""`inflight serve --no-triton` serves /v1 without a tritonserver, and ends without leaving anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from inflight import serve_command


def test_v1_is_served_until_a_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inflight", "serve", "--no-triton", "--openai-port", "0"]
    engine = tmp_path / "engine.sock"
    command += ["--log-format", "json", "--set", f"engine_endpoint={engine}"]
    command += ["--kv-cache-dir", str(tmp_path / "kv"), "--kv-cache-disk", "1G"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        try:
            ready = process.stdout.readline().split()
            assert ready[0] == "READY"
            assert engine.is_socket()
            url = ready[1].removeprefix("openai=")
            body = {"model": "demo_model", "prompt": "def f(", "max_tokens": 3}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["usage"]["completion_tokens"] == 3
            with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
                page = response.read().decode()
            assert 'inflight_generated_tokens_total{model="tensorrt_llm",version="1"} 3\n' in page
            second = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
            assert second.returncode == 2 and "another server uses the blocks of this model" in second.stderr
            assert second.stderr.count("\n") == 1, "it loads no model"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert not list(tmp_path.glob("inflight-server-*"))
    assert not engine.exists()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["output_tokens"] for line in lines if line.get("front") == "openai"] == [3]
    assert {"engine", "openai", "access"} >= {line["source"] for line in lines} >= {"engine", "access"}
    assert all({"time", "level", "pid"} <= line.keys() for line in lines)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--no-openai"], "--no-openai"),
        (["--tp", "2"], "--tp"),
        (["--write-repository", "new"], "--write-repo"),
    ],
)
def test_options_that_need_a_tritonserver_are_refused(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve_command.main(["--no-triton", *options]) == 2
    assert named in capsys.readouterr().err
