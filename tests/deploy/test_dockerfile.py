"""The Dockerfile, as far as it can be checked without Docker: its files, modules, user and layers."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from inflight.server import cli

from .chart import RENDERED, documents, pod_templates

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile and their arguments, on one line each."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def of_kind(kind: str) -> list[str]:
    return [rest for name, rest in instructions() if name == kind]


def test_it_builds_on_a_release_of_tritonserver_by_name() -> None:
    (argument,) = of_kind("ARG")
    release = re.fullmatch(r"TRITON_IMAGE=nvcr\.io/nvidia/tritonserver:(\d\d\.\d\d)-py3", argument)
    assert release and release[1] >= "24.08"
    for page in ("Dockerfile", "docs/production.md"):
        words = " ".join((ROOT / page).read_text().split())
        assert re.search(rf"{re.escape(release[1])},? (which )?was the newest in November 2026", words), page
    assert of_kind("FROM") == ["${TRITON_IMAGE}"]


def test_copied_files_exist_and_are_not_ignored() -> None:
    sources = [source for copy in of_kind("COPY") for source in copy.split()[:-1]]
    assert {"backend", "client", "model_repository"} < set(sources)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source in sources:
        assert (ROOT / source).exists() and source.split("/")[0] in kept, source


def test_dependencies_are_installed_before_the_source_is_copied() -> None:
    steps = [f"{name} {rest}" for name, rest in instructions()]
    install = next(place for place, step in enumerate(steps) if "pip install -c constraints.txt" in step)
    before = [step for step in steps[:install] if step.startswith("COPY")]
    assert before == ["COPY pyproject.toml constraints.txt ./", "COPY client/pyproject.toml client/"]
    assert any("pip install --no-deps . ./client" in step for step in steps[install + 1 :])


def test_the_modules_that_it_runs_exist() -> None:
    text = " ".join(rest for _, rest in instructions())
    modules = set(re.findall(r'-m"?,? "?(inflight[\w.]*)', text))
    assert modules == {"inflight.engine.cpu.prebuild", "inflight"}
    assert all(importlib.util.find_spec(module) for module in modules)


def test_the_server_accepts_the_flags_of_the_entry_point() -> None:
    (entry,) = of_kind("ENTRYPOINT")
    command = json.loads(entry)
    assert command[:4] == ["python3", "-m", "inflight", "serve"]
    options = cli.parse(command[4:])
    assert options.host == "0.0.0.0" and str(options.model_repository) == "/opt/inflight/model_repository"


def test_the_user_is_the_charts_and_not_root() -> None:
    names = [name for name, _ in instructions()]
    assert names.index("USER") > max(place for place, name in enumerate(names) if name == "RUN")
    (user,) = of_kind("USER")
    for file in RENDERED.iterdir():
        for template in pod_templates(documents(file.read_text())):
            context = template["spec"]["securityContext"]
            assert user == f"{context['runAsUser']}:{context['runAsGroup']}" and context["runAsUser"] > 0


def test_the_folders_that_are_written_are_the_charts() -> None:
    folders = dict(word.split("=") for word in of_kind("ENV")[-1].split())
    helpers = (ROOT / "deploy" / "helm" / "inflight" / "templates" / "_helpers.tpl").read_text()
    block = helpers.split('define "inflight.folders"')[1].split("{{- end }}")[0].partition("\n")[2]
    assert {each["name"]: each["value"] for each in yaml.safe_load(block)} == folders
    owned = " ".join(of_kind("RUN")).split("chown 1000:1000")[1]
    assert all(folder in owned for folder in folders.values() if folder != "/tmp")


@pytest.mark.exhaustive
def test_the_layer_of_dependencies_builds_without_the_source(tmp_path: Path) -> None:
    """Run the steps of that layer with pip that builds the empty packages, but installs nothing."""
    (step,) = [run for run in of_kind("RUN") if "-c constraints.txt" in run]
    for copy in of_kind("COPY")[:2]:
        *sources, target = copy.split()
        (tmp_path / target).mkdir(exist_ok=True)
        for source in sources:
            (tmp_path / target / Path(source).name).write_bytes((ROOT / source).read_bytes())
    prepare = step.partition(" && python3")[0]
    subprocess.run(["sh", "-c", prepare], cwd=tmp_path, check=True)
    for package in (".", "./client"):
        wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "wheels", package]
        subprocess.run(wheel, cwd=tmp_path, check=True, timeout=300)
    assert len(list((tmp_path / "wheels").glob("inflight*.whl"))) == 2
