"""The commands and programs of every page, as they are typed and in their order.

A request goes to the server that the page has started last, or else to the demo model's. Addresses, paths of
examples and the checkout's scripts are replaced. `NOT_RUN` says what is left out, and why.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.commands import end, read_ready_line
from tests.openai_endpoint.serving import make_certificate
from tests.tiers import with_all

from .conftest import DEMO_MODEL
from .lora_folders import make_adapter
from .test_readme import ROOT, here

FAST = ("README.md", "docs/first-model.md", "docs/openai.md", "docs/triton.md")
START = re.compile(r"(\w+=(\".*\"|\S+) )?scripts/serve(?P<flags>( [^#]+)?)(#.*)?$")
PLAIN = ("", "--allow-model-config", "--model /path/to/checkpoint")
"""Flags with which a server is the demo model's, which other tests use too."""
INSTALLS, DOCKER, CLUSTER = "installs packages", "needs Docker", "needs a cluster"
DEVELOPERS = "runs, measures or builds what this test is a part of"
NOT_RUN: Mapping[str, Mapping[str, str]] = {
    "docs/chat.md": {".venv/bin/pip": INSTALLS},
    "docs/clients.md": {"": "runs programs of other projects; tests/integrations runs them"},
    "docs/comparing.md": {"": "installs other systems"},
    "docs/contributing.md": {"": DEVELOPERS},
    "docs/demo-model.md": {"scripts/train": "trains for minutes"},
    "docs/dynamo.md": {"": "installs NVIDIA Dynamo; tests/dynamo/test_behind_dynamo.py runs it"},
    "docs/from-vllm.md": {"vllm serve": "is vLLM's own command"},
    "docs/from-tensorrtllm-backend.md": {
        "scripts/launch": "leaves a server behind; tests/server/test_trtllm_launcher.py runs it"
    },
    "docs/kubernetes.md": {"": CLUSTER},
    "docs/kv-events.md": {
        "dynamo/bin/python": "is NVIDIA Dynamo's; tests/batch_manager/test_kv_event_publisher.py runs it",
        "curl localhost:8090": "asks Dynamo's indexer",
    },
    "docs/load-testing.md": {
        "scripts/bench": INSTALLS,
        "scripts/perf_analyzer -m": "takes minutes; test_readme.py runs it with shorter intervals",
        ".venv-aiperf": INSTALLS,
        "scripts/perf_analyzer --version": INSTALLS,
        "PATH=": INSTALLS,
    },
    "docs/models.md": {
        "scripts/serve --model Qwen": "downloads a model",
        "scripts/serve --model ~": "needs a downloaded file; tests/engine/test_gguf.py loads others",
        "def _read": "is a part of the package; tests/docs/test_models_page.py compares them",
    },
    "docs/openai.md": {
        "scripts/serve --model Qwen/Qwen3-Reranker": "downloads a model",
        "scripts/serve --model /path/to/classifier": "needs such a model",
        "curl localhost:9000/v1/classify": "needs that model; test_classify.py has small ones",
        "curl localhost:9000/v1/rerank": "needs that model; tests/openai_endpoint/test_rerank.py has a small one",
    },
    "docs/openai-server.md": {
        ".venv/bin/python -m inflight.openai": "needs a second host; test_kserve_client.py has one",
        "docker": DOCKER,
        "curl": "is for Triton's own front end, which is in NVIDIA's image only",
    },
    "docs/operating.md": {
        "python3 /path/to": "is tensorrtllm_backend's; test_upstream_files.py fills the files in"
    },
    "docs/pictures.md": {
        ".venv/bin/pip": INSTALLS,
        "scripts/serve": "downloads a model",
        "curl": "needs that model; test_text_with_pictures.py sends both requests to a small one",
    },
    "docs/playground.md": {
        ".venv/bin/pip": INSTALLS,
        ".venv/bin/python -m tests": "writes the pictures of the pages again",
    },
    "docs/production.md": {"docker": DOCKER, "MODEL=": DOCKER},
    "docs/ranks.md": {
        "scripts/serve --model": "needs a mixture of experts; test_other_checkpoints.py has one",
        "scripts/serve --tp 2 --pp 2 --mpirun": "needs two hosts; tests/ranks/test_two_hosts.py has them",
        ".venv/bin/mpirun": "is abbreviated",
        "srun": CLUSTER,
        "[": CLUSTER,
        "exec": CLUSTER,
    },
    "docs/scaling.md": {
        "ENVIRONMENT/bin/serve run": "is Ray's; tests/integrations/test_ray_serve.py runs it"
    },
    "docs/security.md": {".venv/bin/pip": INSTALLS},
    "docs/speculation.md": {
        "scripts/train": "trains for minutes",
        "scripts/bench": "needs the trained head",
        "scripts/serve --draft-model": "needs the trained head",
    },
    "docs/tensorrt.md": {
        ".venv/bin/pip": INSTALLS,
        "scripts/serve": "needs a GPU",
        "scripts/test": "needs a GPU",
        "scripts/bench": "needs a GPU",
    },
    "tensorrt_llm_shim/README.md": {"": "installs a package; tests/executor/test_shim.py imports it"},
}
"""Beginnings of commands and programs that are not run, by page."""


def steps(page: str) -> list[tuple[str, str]]:
    """Return the commands ("bash") and programs ("python") of a page."""
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    return [
        (language, step)
        for language, block in blocks
        for step in (split(block) if language == "bash" else [block])
    ]


def split(block: str) -> list[str]:
    """Split a block into commands, some of which have several lines."""
    commands, command = [], ""
    for line in block.splitlines(keepends=True):
        command += line
        if line.endswith("\\\n") or not _is_complete(command):
            continue
        if command.strip() and not command.startswith("#"):
            commands.append(command.strip())
        command = ""
    assert not command, command
    return commands


def _is_complete(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:  # a quotation mark is open
        return False
    return True


def run_steps(page: str) -> list[tuple[str, str]]:
    """Return the commands and programs of a page that are run."""
    left_out = tuple(NOT_RUN.get(page, ()))
    return [(language, step) for language, step in steps(page) if not step.startswith(left_out)]


PAGES = [
    name
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")])
    if (name := str(path.relative_to(ROOT))) != "docs/index.md" and run_steps(name)  # the home page is README
]


def test_what_is_not_run_is_on_its_page():
    for page, reasons in NOT_RUN.items():
        for begin in reasons:
            assert any(step.startswith(begin) for _, step in steps(page)), (page, begin)


def test_every_command_is_in_a_block_of_bash_and_names_its_environment():
    command = re.compile(r"^(?:\$ )?(?:scripts/\w|\.venv|ENVIRONMENT/|curl |pip |python\d? |docker )", re.M)
    of_any_environment = re.compile(r"(exec )?(python\d? -m (?!venv )|pip )")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]:
        text = path.read_text()
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M):
            assert language == "bash" or not command.search(block), f"{path.name}: {block}"
        for language, step in steps(str(path.relative_to(ROOT))):
            assert language == "python" or not of_any_environment.match(step), f"{path.name}: {step}"
            for client in re.findall(r"^(?:from|import) (openai|anthropic|httpx)\b", step, re.M):
                assert re.search(rf"/pip install [\w ]*{client}", text), (
                    f"{path.name}: no install of {client}"
                )


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters that the pages name."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "chat")):
        make_adapter(folder / name, seed)
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the pages' commands read in the checkout, and the files that readers bring."""
    for name in ("all_models", "deploy", "examples", "model_repository", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "keys.txt").write_text("a-key\n")
    certificate, key = make_certificate(tmp_path)
    certificate.rename(tmp_path / "chain.pem")
    key.rename(tmp_path / "key.pem")
    return tmp_path


def local(text: str, checkout: Path, adapters: Path | None) -> str:
    """Return a command or program with paths of this machine, and of the checkout's scripts."""
    paths = {
        "/path/to/checkpoint": DEMO_MODEL,
        "Qwen/Qwen3-Embedding-0.6B": f"{DEMO_MODEL} --convert embed",
        "/models/large": DEMO_MODEL,
        "/models/small": DEMO_MODEL,
        "/path/to/adapter": f"{adapters}/sql",
        "/path/to/engine": checkout / "engine",
        "/var/tmp/": f"{checkout}/",
        "/triton_model_repo": checkout / "triton_model_repo",
    }
    for path, here_ in paths.items():
        text = text.replace(path, str(here_))
    text = re.sub(r"(?<=[= \"'])/adapters/", f"{adapters}/", text)
    environment = shlex.quote(str(Path(sys.executable).parent))
    text = re.sub(r"(?<![\w/])\.venv/bin/", lambda _: f"{environment}/", text)
    return re.sub(r"(?<![\w/])scripts/(\w+)", lambda script: _command_of(script[1]), text)


def _command_of(script: str) -> str:
    """Return the script's path or, if the script could install packages, the command in its last line."""
    ports = "--http-port 0 --grpc-port 0 --metrics-port 0 --openai-port 0"
    path = ROOT / "scripts" / script
    if _scripts_install_nothing():
        command = shlex.quote(str(path))
    else:
        (module,) = re.findall(r"^run ([\w.]+(?: \w+)?)", path.read_text(), re.MULTILINE)
        command = f"{shlex.quote(sys.executable)} -m {module}"
    return f"{command} {ports if script in ('serve', 'doctor') else ''}"


@cache
def _scripts_install_nothing() -> bool:
    """Return whether the tests run in the environment that `scripts/test` has made and filled."""
    stamp = ROOT / ".venv" / ".inflight-test"
    if Path(sys.prefix) != ROOT / ".venv" or not stamp.is_file():
        return False
    command = ["bash", "-c", '. "$0/scripts/lib.sh"; fingerprint', str(ROOT)]
    return stamp.read_text() == subprocess.run(command, capture_output=True, text=True).stdout.rstrip("\n")


@contextmanager
def served(command: str, checkout: Path) -> Iterator[SimpleNamespace]:
    """Run a command that starts a server, and yield its addresses."""
    with (checkout / "server.log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {command}"],
            cwd=checkout, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1,
        )  # fmt: skip
        try:
            yield SimpleNamespace(**read_ready_line(process))
        finally:
            end(process)


@pytest.mark.parametrize("page", with_all(PAGES, FAST))
def test_the_commands_of_a_page_work(page, request, elsewhere, checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    adapters = None
    if any("adapter" in step for _, step in run_steps(page)):
        adapters = request.getfixturevalue("adapters")
    names: dict[str, object] = {"__name__": "__main__"}
    server = None
    with ExitStack() as running:
        for language, step in run_steps(page):
            text = local(step, checkout, adapters)
            if language == "bash" and (start := re.match(START, step)):
                running.close()
                server = (
                    None if start["flags"].strip() in PLAIN else running.enter_context(served(text, checkout))
                )
                continue
            text = here(text, server or request.getfixturevalue("demo_server"))
            if language == "bash":
                run(text, checkout)
            elif file := re.match(r"# (\w+\.py)\n", text):
                (checkout / file[1]).write_text(text)
            else:
                exec(compile(text, page, "exec"), names)


def run(command: str, checkout: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", command], cwd=checkout, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=240, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert '"error"' not in done.stdout, f"{command}\n{done.stdout}"  # the word may be in a sampled text
