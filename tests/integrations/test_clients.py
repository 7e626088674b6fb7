"""Libraries and coding agents of other projects, each in an environment of its own, before a scripted engine."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.integrations.clients import CLAUDE_CODE, CODEX, CONTINUE, LIBRARIES, OPEN_WEBUI, Client
from tests.integrations.environments import environment, install, run
from tests.integrations.scripted_agent import answering, call

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]  # some install gigabytes

PROGRAMS = Path(__file__).parent / "programs"
RULES = (
    ("turned left", "I turned left."),
    ("Turn the pen, please", call("turn", to="left")),
    ("Which shape", json.dumps({"kind": "circle", "is_filled": True})),
    ("Say hello", "Hello, world!"),
)
CODEX_SETTINGS = """
model = "demo"
model_provider = "inflight"
web_search = "disabled"

[model_providers.inflight]
name = "inflight"
base_url = "URL/v1"
wire_api = "responses"

[features]
multi_agent = false
"""
CONTINUE_SETTINGS = """
name: local
version: 1.0.0
schema: v1
models:
  - {name: demo, provider: openai, model: demo, apiBase: URL/v1, apiKey: none, capabilities: [tool_use]}
"""
PATIENCE_S = 300


@pytest.mark.parametrize("client", LIBRARIES, ids=lambda client: client.name)
def test_a_library_talks_calls_tools_and_reads_streams(client: Client, tmp_path: Path) -> None:
    installed = install(client, tmp_path)
    program = shutil.copy(PROGRAMS / client.program, tmp_path)  # npm's packages are found beside it
    with answering(RULES) as url:
        run(["node" if client.is_npm else installed / "python", program], tmp_path, URL=url)


def test_claude_code_writes_a_file(tmp_path: Path) -> None:
    installed, file = install(CLAUDE_CODE, tmp_path), tmp_path / "greeting.txt"
    rules = (
        ("successfully", "The greeting is written."),
        ("Write the greeting, please", call("Write", file_path=str(file), content="hello")),
    )
    command = ["-p", "Write the greeting, please.", "--allowedTools", "Write", "--output-format", "json"]
    with answering(rules) as url:
        printed = run(
            [installed / "claude", *command],
            tmp_path,
            ANTHROPIC_BASE_URL=url,
            ANTHROPIC_AUTH_TOKEN="none",
            ANTHROPIC_MODEL="demo",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
    result = json.loads(printed.splitlines()[-1])
    assert (result["result"], result["is_error"]) == ("The greeting is written.", False)
    assert file.read_text() == "hello"


def test_codex_runs_a_command_and_reads_its_output(tmp_path: Path) -> None:
    installed = install(CODEX, tmp_path)
    rules = (
        ("made by codex", "The greeting is printed."),
        ("Print the greeting, please", call("exec_command", cmd="echo $(echo made) by codex")),
    )
    (tmp_path / ".codex").mkdir()
    command = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    with answering(rules) as url:
        (tmp_path / ".codex/config.toml").write_text(CODEX_SETTINGS.replace("URL", url))
        printed = run([installed / "codex", *command, "Print the greeting, please."], tmp_path)
    assert printed.splitlines()[-1] == "The greeting is printed."


def test_continue_writes_a_file(tmp_path: Path) -> None:
    installed, file = install(CONTINUE, tmp_path), tmp_path / "greeting.txt"
    rules = (
        ("Successfully", "The greeting is written."),
        ("Write the greeting, please", call("Write", filepath=str(file), content="hello")),
    )
    command = ["-p", "--auto", "--config", "settings.yaml", "Write the greeting, please."]
    with answering(rules) as url:
        (tmp_path / "settings.yaml").write_text(CONTINUE_SETTINGS.replace("URL", url))
        printed = run([installed / "cn", *command], tmp_path, CONTINUE_TELEMETRY_ENABLED="0")
    assert printed.strip() == "The greeting is written."
    assert file.read_text() == "hello"


def test_open_webui_lists_the_model_and_chats(tmp_path: Path) -> None:
    installed = install(OPEN_WEBUI, tmp_path)
    hello = {"model": "demo", "messages": [{"role": "user", "content": "Say hello."}]}
    with answering(RULES) as url, open_webui(installed, tmp_path, url) as client:
        assert [model["id"] for model in client.get("/api/models").json()["data"]] == ["demo"]
        whole = client.post("/api/chat/completions", json={**hello, "stream": False}).json()
        assert whole["choices"][0]["message"]["content"] == "Hello, world!"
        events = client.post("/api/chat/completions", json={**hello, "stream": True}).text.splitlines()
        chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]
        # Open WebUI joins pieces that arrive at nearly the same time.
        assert len(texts) > 1 and "".join(texts) == "Hello, world!"
        assert events[-2:] == ["data: [DONE]", ""] or events[-1] == "data: [DONE]"


@contextmanager
def open_webui(installed: Path, folder: Path, url: str) -> Iterator[httpx.Client]:
    """Run Open WebUI before the server at `url`; yields a client of its API, with its only user's token."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    variables = {
        "DATA_DIR": str(folder / "data"),
        "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "RAG_EMBEDDING_ENGINE": "openai",  # instead of a model from a hub
        "WEBUI_SECRET_KEY": "a key of the sessions of this test",
        **{"WEBUI_AUTH": "False", "OFFLINE_MODE": "true", "ENABLE_OLLAMA_API": "False"},
    }
    command = [installed / "open-webui", "serve", "--host", "127.0.0.1", "--port", port]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment(folder, **variables), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
                _wait_until_up(client, process, folder)
                signed_in = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
                client.headers["Authorization"] = f"Bearer {signed_in['token']}"
                yield client
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def _wait_until_up(client: httpx.Client, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
        with contextlib.suppress(httpx.HTTPError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(0.5)
