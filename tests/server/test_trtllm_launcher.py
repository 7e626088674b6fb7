"""The flags of tensorrtllm_backend's launcher, and what they start here."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inflight.server import cli, trtllm_launcher
from inflight.server.errors import OptionError

SCRIPT = Path(__file__).parents[2] / "scripts" / "launch_triton_server.py"


@pytest.fixture
def translate(ranked_repository: Path):
    def run(*arguments: str) -> trtllm_launcher.Translation:
        made = trtllm_launcher.parser(ranked_repository).parse_args(list(arguments))
        translation = trtllm_launcher.translate(made)
        cli.parse(list(translation.arguments))  # `scripts/serve` accepts them all
        return translation

    return run


def fill(repository: Path, key: str, value: str, model: str = "tensorrt_llm") -> None:
    config = repository / model / "config.pbtxt"
    unfilled = f'"{key}" value {{ string_value: '
    head, found, tail = config.read_text().partition(unfilled)
    assert found
    config.write_text(f'{head}{unfilled}"{value}"' + tail.split('"', 2)[2])


def ranks_of(translation: trtllm_launcher.Translation) -> tuple[int | None, str | None]:
    options = cli.parse(list(translation.arguments))
    return options.tp, options.mode


def test_the_defaults_equal_those_of_the_original_launcher(translate) -> None:
    translation = translate()
    options = cli.parse(list(translation.arguments))
    assert (options.ports.http, options.ports.grpc, options.ports.metrics) == (8000, 8001, 8002)
    assert options.host == "0.0.0.0"
    assert ranks_of(translation) == (None, None)
    assert translation.log_file is None
    assert translation.notes == ()


def test_ports_log_and_timeout_are_passed_on(translate) -> None:
    flags = "--http_port 1 --grpc_port 2 --metrics_port 3 --exit_timeout 4 --log --log-file here.txt"
    translation = translate(*flags.split())
    options = cli.parse(list(translation.arguments))
    assert (options.ports.http, options.ports.grpc, options.ports.metrics) == (1, 2, 3)
    assert options.exit_timeout_s == 4
    assert options.log_verbose
    assert translation.log_file == Path("here.txt")


def test_the_world_size_is_the_number_of_tensor_parallel_ranks(translate) -> None:
    assert ranks_of(translate("--world_size", "2")) == (2, "leader")


def test_a_world_size_agrees_with_the_repository_or_is_refused(translate, ranked_repository: Path) -> None:
    fill(ranked_repository, "tensor_parallel_size", "2")
    fill(ranked_repository, "pipeline_parallel_size", "2")
    assert ranks_of(translate("--world_size", "4")) == (None, "leader")
    for size in ("1", "2"):
        with pytest.raises(OptionError, match=rf"--world_size {size}: tensorrt_llm has 4 ranks"):
            translate("--world_size", size)


def test_several_engines_have_orchestrators(translate, ranked_repository: Path) -> None:
    shutil.copytree(ranked_repository / "tensorrt_llm", ranked_repository / "second")
    names = ("--tensorrt_llm_model_name", "tensorrt_llm,second")
    assert ranks_of(translate("--multi-model", *names)) == (None, "orchestrator")
    with pytest.raises(OptionError, match="--multi-model"):
        translate("--world_size", "2", *names)
    with pytest.raises(OptionError, match="must be 1 with --multi-model"):
        translate("--multi-model", "--world_size", "2", *names)


def test_without_mpi_there_is_one_rank(translate) -> None:
    assert ranks_of(translate("--no-mpi")) == (None, None)
    with pytest.raises(OptionError, match="must be 1 with --no-mpi"):
        translate("--no-mpi", "--world_size", "2")


def test_a_missing_model_is_refused(translate) -> None:
    with pytest.raises(OptionError, match=r"no_such: .* has no such model"):
        translate("--tensorrt_llm_model_name", "no_such")


def test_a_missing_repository_is_refused(translate) -> None:
    with pytest.raises(OptionError, match="--model_repo /no/such: there is no such folder"):
        translate("--model_repo", "/no/such")


def test_a_missing_tritonserver_is_refused(translate) -> None:
    with pytest.raises(OptionError, match="--tritonserver elsewhere"):
        translate("--tritonserver", "elsewhere")
    assert "--tritonserver" in translate("--tritonserver", sys.executable).arguments


def test_flags_without_effect_print_a_note(translate) -> None:
    translation = translate(
        "--multi-model",
        "--disable-spawn-processes",
        "--world_size=3",
        "--trtllm_llmapi_launch",
        "--multimodal_gpu0_cuda_mem_pool_bytes=1",
    )
    for flag in ("--disable-spawn", "--trtllm_llmapi_launch", "--multimodal_gpu0_cuda_mem_pool_bytes"):
        assert any(note.startswith(flag) and "means nothing" in note for note in translation.notes)


def test_oversubscribe_reaches_mpirun(translate) -> None:
    options = cli.parse(list(translate("--world_size", "2", "--oversubscribe").arguments))
    assert "--oversubscribe" in str(options.mpirun_arguments)


@pytest.fixture
def serve(tmp_path: Path, ranked_repository: Path) -> Path:
    """A stand-in for `scripts/serve` that prints its arguments on each stream, a second later."""
    script = tmp_path / "checkout" / "scripts" / "serve"
    script.parent.mkdir(parents=True)
    script.write_text('#!/bin/sh\nsleep 1\necho "log of $*" >&2\n')
    script.chmod(0o755)
    return script


def test_the_launcher_returns_while_the_server_starts(
    serve: Path, ranked_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trtllm_launcher, "running_servers", lambda: [])
    log = tmp_path / "log.txt"
    flags = ["--model_repo", str(ranked_repository), "--log", "--log-file", str(log)]
    assert trtllm_launcher.main(serve, flags) == 0
    assert log.read_text() == ""
    deadline = time.monotonic() + 60
    while "log of --model-repository" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_second_server_is_started_only_with_force(
    serve: Path, ranked_repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trtllm_launcher, "running_servers", lambda: [17, 18])
    repository = ["--model_repo", str(ranked_repository)]
    assert trtllm_launcher.main(serve, repository) == 2
    assert "`kill 17 18`" in capsys.readouterr().err
    assert trtllm_launcher.main(serve, [*repository, "--force"]) == 0
    assert "17 18" in capsys.readouterr().err


def test_running_servers_are_found_by_their_programs_name(tmp_path: Path) -> None:
    before = trtllm_launcher.running_servers()
    program = tmp_path / "tritonserver"
    shutil.copy(shutil.which("sleep") or "", program)
    with subprocess.Popen([str(program), "1000"]) as process:
        try:
            assert process.pid in set(trtllm_launcher.running_servers()) - set(before)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "wrong", ["--world_size 0", "--http_port here", "--grpc_port 70000", "--exit_timeout -1"]
)
def test_invalid_numbers_are_refused_before_anything_starts(
    serve: Path, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        trtllm_launcher.main(serve, wrong.split())
    assert ended.value.code == 2
    assert f"argument {wrong.split()[0]}: expected" in capsys.readouterr().err


def test_the_script_runs_before_anything_is_installed(tmp_path: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-S", "-I", str(SCRIPT), "--tensorrt_llm_model_name", "no_such"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 2
    assert "no_such" in said.stderr
