"""Non-ASCII letters in paths, in interpreters with UTF-8 and with ASCII file names.

Triton's Python stub has ASCII file names, whatever its environment says. A child process without a locale
simulates it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.errors import ConfigError
from inflight.file_names import native, readable
from tests.models.zoo import make_model
from tests.tiers import with_all

ROOT = Path(__file__).parents[1]
DEMO_MODEL = ROOT / "model_repository" / "tensorrt_llm" / "1" / "demo_model"
WITHOUT_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

ENGINE = """
import json, sys
from inflight.endpoint.client import SocketEngineClient, retire_predecessor
from inflight.errors import ConfigError
from inflight.build import build_engine
from inflight.ranks.job import Job
from inflight.models import read_model_description
from inflight.text.tokenizer import Tokenizer
from tests.triton.factories import make_parameters
from tests.tiers import with_all

given = json.loads(sys.stdin.buffer.read())
parameters = make_parameters(kernels="torch", **given["parameters"])
socket = given["socket"]
job = Job.of(parameters, given["version_dir"], socket)
assert not retire_predecessor(socket, 0.1)
engine = build_engine(parameters, job.version_dir, job.endpoint_path)
client = SocketEngineClient(socket)
description = client.describe()
Tokenizer.from_dir(description.tokenizer_dir).encode("once")
client.close()
engine.close()
try:
    read_model_description(given["missing"])
except ConfigError as error:
    refusal = str(error)
said = {
    "encoding": sys.getfilesystemencoding(),
    "model_path": description.model_path,
    "tokenizer_dir": description.tokenizer_dir,
    "job": [job.parameters.engine.gpt_model_path, job.version_dir, job.endpoint_path, job.digest()],
    "refusal": refusal,
}
sys.stdout.buffer.write(json.dumps(said).encode())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "Käfig 模型"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("environment", with_all([{}, WITHOUT_LOCALE], [WITHOUT_LOCALE]))
def test_an_engine_finds_and_reports_files_with_non_ascii_names(
    folder: Path, environment: dict[str, str]
) -> None:
    model = make_model(folder / "Modèle 模型", "llama").folder
    shutil.copy(DEMO_MODEL / "tokenizer.json", model)
    record, socket, missing = folder / "aufnähme", folder / "söckel", folder / "nirgendwö"
    parameters = {"gpt_model_path": str(model), "record_path": str(record)}
    given = {
        "parameters": parameters,
        "socket": str(socket),
        "version_dir": str(folder),
        "missing": str(missing),
    }
    done = subprocess.run(
        [sys.executable, "-c", ENGINE],
        input=json.dumps(given).encode(),
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    said = json.loads(done.stdout)
    assert said["encoding"] == ("ascii" if environment else "utf-8")
    assert (said["model_path"], said["tokenizer_dir"]) == (str(model), str(model))
    assert said["job"][:3] == [str(model), str(folder), str(socket)]
    assert said["refusal"].startswith(f"{missing} is not a folder")
    assert record.stat().st_size > 0
    assert not socket.exists()


def test_names_are_unchanged_where_file_names_are_utf_8() -> None:
    for text in ("/plain", "/Käfig 模型"):
        assert native(text) == native(Path(text)) == readable(text) == text


def test_error_messages_with_undecodable_names_are_valid_text() -> None:
    of_bytes = os.fsdecode("Käfig 模型".encode()).encode("utf-8").decode("ascii", "surrogateescape")
    assert str(ConfigError(f"{of_bytes} is not there")) == "Käfig 模型 is not there"
    assert str(ConfigError("a half \ud83d pair")).encode() == b"a half ? pair"


def test_a_package_installed_from_such_a_folder_is_imported_without_a_locale(folder: Path) -> None:
    """With the .pth file that pip writes, the interpreter would not even start."""
    backend, environment = folder / "backend", folder / ".venv"
    (backend / "inflight_stand_in").mkdir(parents=True)
    (backend / "inflight_stand_in" / "__init__.py").touch()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python3"
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "__editable__.inflight-0.1.0.pth").write_text(f"{backend}\n")
    ascii_only = {**os.environ, **WITHOUT_LOCALE}
    find = [
        python,
        "-c",
        "import inflight_stand_in, sys; sys.stdout.write(ascii(inflight_stand_in.__file__))",
    ]
    assert subprocess.run(find, env=ascii_only, capture_output=True).returncode != 0

    rewrite = 'lib=$1; . "$lib"; ROOT=$2; PYTHON=$3; spell_in_ascii'
    command = ["bash", "-c", rewrite, "bash", ROOT / "scripts" / "lib.sh", folder, python]
    subprocess.run(command, check=True)
    subprocess.run(find, env=ascii_only, check=True, capture_output=True)

    link = folder.parent / "environment"
    link.symlink_to(environment)
    by_link = [link / "bin" / "python3", *find[1:]]
    found = subprocess.run(by_link, env=ascii_only, check=True, capture_output=True).stdout.decode()
    assert found == repr(str(link / "inflight-backend" / "inflight_stand_in" / "__init__.py"))
