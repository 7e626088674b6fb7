"""The example for Ray Serve, with the official client: two replicas, one of whose servers is killed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.integrations.environments import environment, install_python
from tests.openai_endpoint.serving import DEMO

pytestmark = pytest.mark.exhaustive

EXAMPLES = Path(__file__).parents[2] / "examples"
RAY = ("ray[serve]==2.60.0",)
PATIENCE_S = 900
ANSWER = {"model": "demo_model", "prompt": "def area(", "max_tokens": 8, "temperature": 0}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def application(programs: Path, folder: Path) -> Iterator[str]:
    """Run the example with two replicas; yields its URL."""
    port, config = free_port(), folder / "serve.yaml"
    arguments = {
        "model": str(DEMO),
        "command": f"{sys.executable} -m inflight serve --no-triton",
        "min_replicas": 2,
        "max_replicas": 2,
        "num_cpus": 0.5,
    }
    application = {"name": "inflight", "import_path": "ray_serve:app", "args": arguments}
    options = {"host": "127.0.0.1", "port": port}
    config.write_text(json.dumps({"http_options": options, "applications": [application]}))  # JSON is YAML
    log = (folder / "log").open("w")
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # pytest's folders are too deep for sockets
        variables = environment(
            folder, PYTHONPATH=str(EXAMPLES), RAY_TMPDIR=short, RAY_USAGE_STATS_ENABLED="0"
        )
        process = subprocess.Popen(
            [programs / "serve", "run", config], env=variables, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)
            log.close()


def servers() -> list[psutil.Process]:
    """Return the servers of this checkout's environment that replicas of Ray have started."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it may end at any time
            is_server = {sys.executable, "--no-triton"} <= set(process.cmdline())
            parent = process.parent() if is_server else None
            if parent is not None and "ray::" in " ".join(parent.cmdline()):
                found.append(process)
    return found


def wait_for(
    url: str, num_servers: int, *, other_than: tuple[psutil.Process, ...] = ()
) -> list[psutil.Process]:
    """Wait until as many servers run and /v1 answers; return the servers."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < deadline
        found = [each for each in servers() if each not in other_than]
        try:
            is_up = httpx.get(f"{url}/health", timeout=10).status_code == 200
        except httpx.HTTPError:
            is_up = False
        if is_up and len(found) == num_servers:
            return found
        time.sleep(0.5)


def test_replicas_answer_and_are_replaced(tmp_path: Path) -> None:
    programs = install_python(tmp_path, RAY)
    with application(programs, tmp_path) as url:
        first, second = wait_for(url, 2)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=20) as client:
            assert [model.id for model in client.models.list().data] == ["demo_model"]
            whole = client.completions.create(**ANSWER).choices[0].text
            chunks = [chunk.choices[0].text for chunk in client.completions.create(**ANSWER, stream=True)]
            assert len(chunks) > 2 and "".join(chunks) == whole
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                client.completions.create(**{**ANSWER, "model": "other"})
            first.kill()
            for _ in range(8):
                assert client.completions.create(**ANSWER).choices[0].text == whole
            wait_for(url, 2, other_than=(first,))
            assert client.completions.create(**ANSWER).choices[0].text == whole
    _, still_running = psutil.wait_procs([*servers(), second], PATIENCE_S)
    assert not still_running and not servers()
