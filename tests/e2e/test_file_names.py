"""A server whose files are all in folders with letters outside ASCII, started without a locale."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.commands import read_line
from tests.e2e.conftest import DEMO_MODEL


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of compiled layers, which all servers with ranks share."""
    return tmp_path_factory.mktemp("Zwischenlager für alles")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="in process"),
        pytest.param(["--tp", "2", "--mode", "orchestrator"], id="orchestrator"),
        pytest.param(["--tp", "2", "--mode", "leader"], id="leader"),
    ],
)
def test_a_server_works_with_letters_outside_ascii_in_every_path(
    tmp_path: Path, cache: Path, options: list[str]
) -> None:
    folder = tmp_path / "Käfig 模型"
    home, model, environment = folder / "Hüme", folder / "Modèle 模型", folder / "environmënt"
    home.mkdir(parents=True)
    shutil.copytree(DEMO_MODEL, model)
    environment.symlink_to(sys.prefix)
    python = environment / Path(sys.executable).relative_to(sys.prefix)
    if not options:  # another server has compiled the layers, which takes as long as the rest of this test
        compiled = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inflight"
        cache = folder / "Zwischenlager für alles"
        (cache / "inflight").mkdir(mode=0o700, parents=True)
        for library in compiled.glob("*.so"):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                shutil.copy2(library, cache / "inflight")
    settings = {"engine_endpoint": folder / "söckel", "record_path": folder / "aufnähme"}
    command = [python, "-m", "inflight.server", "--model", model, *options]
    command += [f"--{kind}-port=0" for kind in ("http", "grpc", "metrics", "openai")]
    command += [f"--set={key}={value}" for key, value in settings.items()]
    variables = {"LC_ALL": "C", "HOME": str(home), "XDG_CACHE_HOME": str(cache)}
    log = (tmp_path / "log").open("wb")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, env={**os.environ, **variables}
    ) as server:
        try:
            ready = read_line(server, timeout_s=400)  # layers are compiled
            assert ready.startswith("READY"), (tmp_path / "log").read_text(errors="replace")
            assert ready.endswith(f"model={model}\n")
            addresses = dict(word.split("=", 1) for word in ready.split()[1:5])
            http = addresses["http"]
            question = json.dumps({"text_input": "Once upon a time", "max_tokens": 5}).encode()
            address = f"http://{http}/v2/models/ensemble/generate"
            with urllib.request.urlopen(address, question, timeout=60) as answer:
                assert json.load(answer)["text_output"].startswith("Once upon a time")
            with urllib.request.urlopen(f"{addresses['openai']}/v1/models", timeout=60) as answer:
                assert json.load(answer)["data"][0]["id"] == model.name
            assert settings["record_path"].stat().st_size > 0
        finally:
            server.terminate()
            server.wait(timeout=60)
            log.close()
    assert server.returncode == 0
    assert not settings["engine_endpoint"].exists()
