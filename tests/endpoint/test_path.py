from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from inflight.endpoint.path import endpoint_path
from inflight.endpoint.server import EndpointServer
from inflight.errors import ConfigError
from tests.endpoint.test_socket import Batcher

MODEL = "tensorrt_llm"


def test_a_path_is_unique_per_user_server_and_model(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = endpoint_path(123, MODEL)
    assert Path(path).parent == tmp_path
    assert str(os.geteuid()) in Path(path).name
    others = {
        endpoint_path(pid, name) for pid in (123, 124) for name in (MODEL, "a b", "a_b", "é", "x" * 300)
    }
    assert len(others | {path}) == 10


@pytest.mark.parametrize("runtime_dir", [None, "", "/does/not/exist", "/tmp/" + "x" * 100])
def test_without_a_usable_runtime_folder_the_path_is_in_the_temporary_folder(
    monkeypatch, runtime_dir
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    expected = endpoint_path(1, MODEL)
    if runtime_dir is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime_dir)
    assert endpoint_path(1, MODEL) == expected


@pytest.mark.parametrize("name", [MODEL, "x" * 300, "模型" * 40, "../../etc/passwd"])
def test_every_model_name_makes_a_path_short_enough_for_a_socket(tmp_path, monkeypatch, name) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    path = endpoint_path(4_000_000, name)
    assert len(os.fsencode(path)) <= 107
    assert os.path.normpath(path) == path


def test_the_socket_is_private_and_removed_with_its_server(path) -> None:
    server = EndpointServer(Batcher().client, path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    server.close()
    assert not os.path.exists(path)


def test_a_dead_servers_socket_is_replaced(path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    EndpointServer(Batcher().client, path).close()


def test_a_live_servers_socket_is_not_replaced(path) -> None:
    server = EndpointServer(Batcher().client, path)
    with pytest.raises(ConfigError, match=r"engine\.sock"):
        EndpointServer(Batcher().client, path)
    assert os.path.exists(path)
    server.close()


@pytest.mark.parametrize("place", ["", "folder", "missing/engine.sock", "x" * 120])
def test_the_error_names_an_unusable_path(tmp_path, place) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=str(tmp_path)):
        EndpointServer(Batcher().client, str(tmp_path / place))


def test_a_file_that_is_no_socket_is_not_replaced(path) -> None:
    Path(path).write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        EndpointServer(Batcher().client, path)
    assert Path(path).read_text() == "precious"
