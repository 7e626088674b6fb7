"""`pip install` and `inflight serve`, as a user types them: the files of the wheel suffice."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import urllib.request
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from inflight.text.tokenizer import Tokenizer
from tests.commands import end, is_alive, read_ready_line
from tests.engine.driver import Driver, load_engine

from .installation import ROOT, Installation, build_wheel, copy_sources

DEMO_MODEL = ROOT / "model_repository" / "tensorrt_llm" / "1" / "demo_model"
PROMPT, NUM_TOKENS = "def f(", 12


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without compiled layers."""
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(copy_sources(folder / "checkout"), folder / "dist")


def test_the_installed_command_serves_the_demo_model(wheel: Path, tmp_path: Path) -> None:
    installation = Installation(wheel, tmp_path)
    for name in ("empty", "temporary"):
        (tmp_path / name).mkdir()
    # Without a cache of its own, so that the layers which the tests have compiled are not compiled again.
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    environment["PATH"] = f"{installation.bin}{os.pathsep}{environment['PATH']}"
    environment.pop("PYTHONPATH", None)
    process = subprocess.Popen(
        [installation.bin / "inflight", "serve", "--no-triton", "--openai-port", "0"],
        cwd=tmp_path / "empty", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        ready = read_ready_line(process)
        processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        text = complete(ready["openai"])
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            end(process)
    assert process.returncode == 0, log
    assert "Traceback" not in log
    assert Path(ready["model"]).is_relative_to(installation.packages)
    tokenizer = Tokenizer.from_dir(DEMO_MODEL)
    driver = Driver(load_engine(DEMO_MODEL))
    prompt = tokenizer.encode(PROMPT)
    assert text == tokenizer.decode(driver.generate(driver.start(prompt), NUM_TOKENS))
    assert not [each for each in processes if is_alive(each.pid)]
    assert not list((tmp_path / "temporary").iterdir()) and not list((tmp_path / "empty").iterdir())


def complete(url: str) -> str:
    """Return the most probable text after PROMPT."""
    body = {"model": "demo_model", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["text"]


def test_pip_would_accept_the_versions_that_the_tests_use(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (name,) = (each for each in files.namelist() if each.endswith(".dist-info/METADATA"))
        fields = message_from_bytes(files.read(name))
    requirements = [Requirement(text) for text in fields.get_all("Requires-Dist", ())]
    needed = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    assert {"torch", "numpy", "fastapi"} <= {each.name for each in needed}
    refused = {
        str(each): version
        for each in needed
        if not each.specifier.contains(version := metadata.version(each.name), prereleases=True)
    }
    assert not refused
    assert platform.python_version() in SpecifierSet(fields["Requires-Python"])
