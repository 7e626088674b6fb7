"""Ports, the private folder and the installed server, which a start needs before there is a process."""

import os
import socket
import sys
import sysconfig
from pathlib import Path

import pytest

from inflight.server import installation, runtime_directory
from inflight.server.errors import OptionError, ServeError
from inflight.server.keeper import Keeper
from inflight.server.ports import Ports, reserve_ports, resolve_host, resolve_ports

LOCALHOST = "127.0.0.1"


def test_chosen_ports_differ() -> None:
    ports = resolve_ports(LOCALHOST, Ports())
    assert len({ports.http, ports.grpc, ports.metrics}) == 3
    assert 0 not in (ports.http, ports.grpc, ports.metrics)


def test_chosen_ports_are_below_the_ephemeral_ports() -> None:
    """The server binds its ports seconds later, and ranks open many connections meanwhile."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = resolve_ports(LOCALHOST, Ports())
    assert max(ports.http, ports.grpc, ports.metrics) < first


def test_a_port_in_use_is_refused_with_its_flag() -> None:
    with socket.create_server((LOCALHOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=rf"port {port} .*--grpc-port"):
            resolve_ports(LOCALHOST, Ports(grpc=port))


def test_all_ports_in_use_are_named_at_once() -> None:
    with socket.create_server((LOCALHOST, 0)) as one, socket.create_server((LOCALHOST, 0)) as other:
        http, openai = one.getsockname()[1], other.getsockname()[1]
        with pytest.raises(OptionError) as several:
            resolve_ports(LOCALHOST, Ports(http=http, openai=openai))
    assert str(several.value) == (
        f"ports {http} (--http-port), {openai} (--port) on {LOCALHOST} cannot be used (Address already in use): "
        "choose others, 0 for any free one"
    )
    with pytest.raises(OptionError, match="no such address") as refused:
        resolve_ports("192.0.2.1", Ports())
    assert str(refused.value).count("no such address") == 1


@pytest.mark.parametrize("host", [LOCALHOST, "0.0.0.0"])
def test_a_reserved_port_is_chosen_by_nobody_but_its_server(host: str) -> None:
    with reserve_ports(host, Ports()) as ports, reserve_ports(host, ports) as again:
        assert again == ports
        for port in ports.of_triton().values():
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((host, port))
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((LOCALHOST, port))
            with socket.create_server((host, port)):  # sets SO_REUSEADDR, as the servers do
                socket.create_connection((LOCALHOST, port)).close()
                with pytest.raises(OptionError, match=f"port {port}"):
                    resolve_ports(host, ports)
    assert resolve_ports(host, ports) == ports


def test_one_port_for_two_services_is_refused() -> None:
    port = resolve_ports(LOCALHOST, Ports()).http
    with pytest.raises(OptionError, match="--metrics-port"):
        resolve_ports(LOCALHOST, Ports(http=port, metrics=port))


def test_a_host_that_cannot_be_resolved_is_refused() -> None:
    assert resolve_host("localhost") == LOCALHOST
    with pytest.raises(OptionError, match="--host"):
        resolve_host("no such host")
    with pytest.raises(OptionError, match="--host got '', expected an address"):
        resolve_host("")


@pytest.mark.parametrize("host", ["http://0.0.0.0", "0.0.0.0:9000", "localhost:8000/v1"])
def test_a_host_is_given_without_scheme_and_port(host: str) -> None:
    with pytest.raises(
        OptionError, match=f"--host {host}: expected an address or a name alone, such as 0.0.0.0"
    ):
        resolve_host(host)
    with pytest.raises(OptionError, match="tritonserver listens on IPv4 alone"):
        resolve_host("::1")


def test_removing_the_folder_removes_its_shared_memory() -> None:
    folder = runtime_directory.make()
    prefix = runtime_directory.shared_memory_prefix(folder)
    mine, other = (Path("/dev/shm") / f"{name}-test" for name in (prefix, "inflight-other"))
    for path in (mine, other):
        path.touch()
    of_ranks = runtime_directory.make_shared_memory_folder(folder)
    (of_ranks / "segment").touch()
    try:
        assert runtime_directory.shared_memory_files(folder) == [of_ranks, mine]
        runtime_directory.remove(folder)
        assert not mine.exists()
        assert not of_ranks.exists()
        assert other.exists()
        assert not folder.exists()
    finally:
        other.unlink()


@pytest.mark.parametrize("name", ["with space", "Käfig"])
def test_a_temporary_folder_with_letters_outside_ascii_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / name))
    folder = runtime_directory.make()
    assert name not in str(folder)
    runtime_directory.remove(folder)


def test_an_environment_with_a_non_ascii_path_is_used_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installation.embedded(tmp_path / "plain").interpreter == Path(sys.executable).parent
    environment = tmp_path / "Käfig"
    environment.symlink_to(sys.prefix)
    programs = Path(sys.executable).relative_to(sys.prefix).parent
    monkeypatch.setattr("sys.executable", str(environment / programs / "python"))
    monkeypatch.setattr("sys.prefix", str(environment))
    found = installation.embedded(tmp_path / "linked")
    assert found.environment()["PATH"].startswith(f"{tmp_path}/linked/environment/{programs}:")
    assert (found.interpreter / "python3").resolve() == (environment / programs / "python3").resolve()


def test_a_dismissed_keeper_removes_nothing(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    keeper.dismiss()
    assert tmp_path.exists()


def test_the_embedded_server_has_its_program_backend_and_libraries(tmp_path: Path) -> None:
    found = installation.embedded(tmp_path)
    backend = Path(found.arguments[1]) / "python"
    assert os.access(found.program, os.X_OK)
    assert os.access(backend / "triton_python_backend_stub", os.X_OK)
    assert (backend / "libtriton_python.so").exists()
    assert found.environment()["LD_LIBRARY_PATH"].startswith(str(found.library_path[0]))


def test_a_python_without_a_shared_library_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: None)
    monkeypatch.setattr("sys.base_prefix", str(tmp_path))
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    with pytest.raises(ServeError, match=r"libpython3\.\d+\.so\.1\.0.*apt-get install"):
        installation.embedded(tmp_path)


def test_a_missing_wheel_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"nvidia-pytriton.*--tritonserver"):
        installation.embedded(tmp_path)


def test_another_tritonserver_uses_its_own_backends(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    program.touch(mode=0o755)
    assert installation.external(program, tmp_path).arguments == ()
    (tmp_path / "backends" / "python").mkdir(parents=True)
    found = installation.external(program, tmp_path)
    assert found.arguments == ("--backend-directory", str(tmp_path / "backends"))


def test_a_server_that_cannot_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--tritonserver"):
        installation.external(tmp_path, tmp_path)
