"""Libraries and coding agents of other projects, each in an environment of its own, before a scripted engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integrations.clients import CLAUDE_CODE, CODEX, LIBRARIES, Client
from tests.integrations.environments import install_npm, install_python, run
from tests.integrations.scripted_agent import answering, call

pytestmark = pytest.mark.exhaustive

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


@pytest.mark.parametrize("client", LIBRARIES, ids=lambda client: client.name)
def test_a_library_talks_calls_tools_and_reads_streams(client: Client, tmp_path: Path) -> None:
    installed = _install(client, tmp_path)
    program = shutil.copy(PROGRAMS / client.program, tmp_path)  # npm's packages are found beside it
    with answering(RULES) as url:
        run(["node" if client.is_npm else installed / "python", program], tmp_path, URL=url)


def test_claude_code_writes_a_file(tmp_path: Path) -> None:
    installed, file = _install(CLAUDE_CODE, tmp_path), tmp_path / "greeting.txt"
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
    installed = _install(CODEX, tmp_path)
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


def _install(client: Client, folder: Path) -> Path:
    """Install a client in `folder`; return the folder of its environment's programs."""
    install = install_npm if client.is_npm else install_python
    return install(folder, client.packages)
