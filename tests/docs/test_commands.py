"""Commands in the pages for newcomers use existing flags, scripts and files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from inflight.server import cli, trtllm_launcher
from tests.openai_endpoint.serving import make_certificate

ROOT = Path(__file__).parents[2]
PAGES = ("index", "first-model", "from-vllm", "from-tensorrtllm-backend", "production")
TEXTS = {page: (ROOT / "docs" / f"{page}.md").read_text() for page in PAGES}
DEMO_MODEL = ROOT / "model_repository" / "tensorrt_llm" / "1" / "demo_model"
FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z-]+)")


def lines(page: str) -> list[str]:
    """Return the lines of a page's bash blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```", TEXTS[page], re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line]


SERVERS = [line for page in PAGES for line in lines(page) if "scripts/serve" in line or "docker run" in line]


@pytest.mark.parametrize("line", SERVERS)
def test_flags_of_server_commands_exist(line, tmp_path):
    (tmp_path / "keys.txt").write_text("a-key")
    certificate, key = make_certificate(tmp_path)
    files = {"keys.txt": tmp_path / "keys.txt", "chain.pem": certificate, "key.pem": key}
    for name, file in files.items():
        line = re.sub(rf"(?<=\s){re.escape(name)}", shlex.quote(str(file)), line)
    arguments = re.split(r"scripts/serve|/model:ro inflight", line, maxsplit=1)[1]
    for model in ("/path/to/checkpoint", "build/tiny", "--model /model"):
        arguments = arguments.replace(
            model, f"{'--model ' * model.startswith('--')}{shlex.quote(str(DEMO_MODEL))}"
        )
    cli.parse(shlex.split(arguments))


def test_flags_of_launcher_commands_exist():
    (line,) = [line for line in lines("from-tensorrtllm-backend") if "launch_triton_server" in line]
    repository = ROOT / "model_repository"
    arguments = shlex.split(line.replace("/path/to/triton_model_repo", shlex.quote(str(repository))))[1:]
    translated = trtllm_launcher.translate(trtllm_launcher.parser(repository).parse_args(arguments))
    assert cli.parse(list(translated.arguments)).model_repository == repository


def test_flags_in_the_tables_exist(capsys):
    """Every flag in the table of vLLM's flags and in the table of first settings exists."""
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    known = set(FLAG.findall(capsys.readouterr().out))
    named = set(FLAG.findall(TEXTS["first-model"].split("## What to set first")[1]))
    for row in re.findall(r"^\|.*\|$", TEXTS["from-vllm"].split("## Requests")[0], re.M):
        theirs, ours = row.strip("|").split("|")
        named |= set(FLAG.findall(theirs if ours.strip() == "the same" else ours))
    assert len(named) > 12 and named <= known, named - known


def test_set_parameters_exist():
    config = (ROOT / "model_repository" / "tensorrt_llm" / "config.pbtxt").read_text()
    known = set(re.findall(r'key: "(\w+)"', config)) | {"max_batch_size", "decoupled_mode"}
    named = {name for text in TEXTS.values() for name in re.findall(r"--set ([a-z]\w+)=", text)}
    assert len(named) > 10 and named <= known, named - known


def test_named_scripts_and_files_exist():
    text = "\n".join(TEXTS.values())
    named = set(re.findall(r"(?<![\w/])((?:scripts|deploy|all_models|model_repository)/[\w./-]*\w)", text))
    assert len(named) > 8
    assert all((ROOT / name).exists() for name in named), [n for n in named if not (ROOT / n).exists()]
