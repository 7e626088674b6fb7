"""The command line, up to where a process would be started."""

from pathlib import Path

import pytest

from inflight.server import cli
from inflight.server.errors import OptionError
from inflight.server.ports import Ports


def test_defaults() -> None:
    options = cli.parse([])
    assert options.ports == Ports(8000, 8001, 8002)
    assert options.host == "127.0.0.1"
    assert options.wanted.model is None
    assert options.wanted.settings == {}
    assert options.model_repository.name == "model_repository"


def test_settings_keep_everything_behind_the_first_equals_sign() -> None:
    options = cli.parse(["--set", "a=b=c", "--set", "empty=", "--set", "a=last"])
    assert options.wanted.settings == {"a": "last", "empty": ""}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_dtypes(dtype: str) -> None:
    assert cli.parse(["--dtype", dtype, "--set", "kernels=torch"]).wanted.dtype == dtype


def test_a_model_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert cli.parse(["--model", "m"]).wanted.model == tmp_path / "m"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--engine", "tensorrt"],
        ["--engine-dir", "somewhere"],
    ],
)
def test_what_is_not_available_says_so(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    message = capsys.readouterr().err
    assert "not available in this version" in message
    assert arguments[0] in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "novalue"],
        ["--http-port", "99999"],
        ["--exit-timeout", "-1"],
        ["--tp", "0"],
        ["--pp", "two"],
        ["--mode", "follower"],
        ["--nonsense"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parse(arguments)
    assert ended.value.code == 2


def test_ranks_and_who_starts_them() -> None:
    options = cli.parse(
        ["--tp", "2", "--pp", "3", "--mode", "leader", "--mpirun-arguments", "--hostfile hosts"]
    )
    assert (options.tp, options.pp, options.mode) == (2, 3, "leader")
    assert options.mpirun_arguments == "--hostfile hosts"


def test_a_single_rank_may_be_spelled_out() -> None:
    cli.parse(["--tp", "1", "--pp", "1", "--mode", "in_process", "--engine", "torch"])


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no config\.json"):
        cli.parse(["--model", str(tmp_path)])
    with pytest.raises(OptionError, match="not a folder"):
        cli.parse(["--model", str(tmp_path / "missing")])


def test_models_can_be_unloaded_by_request_where_that_is_asked_for() -> None:
    assert cli.parse([]).model_control == "none"
    assert cli.parse(["--model-control", "explicit"]).model_control == "explicit"
