"""README's form, and examples of pages whose output is checked; test_pages.py runs every page's commands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.server import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def commands(language: str, page: str = "README.md") -> list[str]:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    return [text.strip() for name, text in blocks if name == language]


def here(text: str, server) -> str:
    """Return the same command for a server on other ports, in an environment that need not be .venv."""
    text = re.sub(r"(?<!/)\.venv/bin/python", lambda _: shlex.quote(sys.executable), text)
    text = text.replace("localhost:8000", server.http).replace("localhost:8001", server.grpc)
    text = text.replace("localhost:8002", server.metrics)
    if server.openai is not None:
        text = text.replace("http://localhost:9000", server.openai).replace("localhost:9000", server.openai)
    asks = r"(-m inflight_client (?:generate|state|adapters)|examples/multimodal_rows\.py)\b"
    return re.sub(asks, rf"\1 --url {server.grpc}", text)


def test_readme_has_the_first_response_before_line_forty():
    lines = README.splitlines()
    assert next(number for number, line in enumerate(lines, 1) if line.startswith("curl")) < 40


def test_the_documented_perf_analyzer_command_runs(demo_server):
    (command,) = [text for text in commands("bash", "docs/load-testing.md") if "perf_analyzer -m" in text]
    quick = " --measurement-interval 300 --stability-percentage 999"
    done = subprocess.run(
        ["bash", "-c", here(command, demo_server) + quick],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Concurrency: 16" in done.stdout


@pytest.mark.parametrize(
    ("number", "first_line"), [(0, r"\[\[\[10, 11, 12, 13, "), (1, r".+ \w+ \(TopLogProb\(")]
)
def test_a_python_example_prints_its_result(demo_server, number, first_line):
    programs = commands("python", "docs/triton.md")
    assert len(programs) == 2
    assert "tritonclient.http" not in programs[number]  # scripts/serve does not install its dependencies
    program = here(programs[number], demo_server)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.match(first_line, done.stdout, re.S)


@pytest.mark.parametrize("page", ["README.md", "docs/ranks.md"])
def test_every_server_command_has_existing_options(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    started = [line for block in blocks for line in re.findall(r"scripts/serve (-.*)", block)]
    assert started
    for line in started:
        line = line.replace("/path/to/checkpoint", "model_repository/tensorrt_llm/1/demo_model")
        cli.parse(shlex.split(line.replace("--no-venv", ""), comments=True))


def test_every_script_named_in_readme_exists():
    named = set(re.findall(r"scripts/(\w+(?:\.py)?)", README))
    assert named and all((ROOT / "scripts" / name).is_file() for name in named)
