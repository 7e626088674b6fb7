"""The chart's ssh configuration starts ranks on another host, as a user without rights.

Hosts are two network namespaces of this machine. Needs root, ip, unshare, setpriv and sshd (Debian's
openssh-server).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.ranks.launch import find_mpirun
from inflight.server import cli
from tests.ranks.two_hosts import NoHosts, TwoHosts, two_hosts

from .chart import RENDERED, by_kind, documents

pytestmark = pytest.mark.exhaustive
TIMEOUT_S = 60
USER = 1000
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
# Each host has a file of users in which number 1000 has a shell, as in the image.
_AS_USER = """
mount --bind "$0/passwd" /etc/passwd
exec setpriv --reuid=1000 --regid=1000 --clear-groups --inh-caps=-all --no-new-privs env HOME=/tmp "$@"
"""


def as_user(folder: Path, *command: str) -> list[str]:
    """Return a command line for a host that runs `command` as the image's user."""
    return ["sh", "-c", _AS_USER, str(folder), *command]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    if SSHD is None or shutil.which("setpriv") is None:
        pytest.skip("no sshd or no setpriv: apt-get install openssh-server")
    try:
        with two_hosts(tmp_path) as made:
            yield made
    except NoHosts as reason:
        pytest.skip(str(reason))


@pytest.fixture
def folder() -> Iterator[Path]:
    """Make a folder with the files that pods have at /etc/inflight/ssh, readable by the user."""
    folder = Path("/tmp") / f"inflight-ssh-{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "id_ed25519"], check=True
        )
        (folder / "id_ed25519").chmod(0o440)  # as in the chart's volume
        os.chown(folder / "id_ed25519", 0, USER)
        for name, text in by_kind(documents((RENDERED / "multi-node.yaml").read_text()))["ConfigMap"][
            "data"
        ].items():
            (folder / name).write_text(text.replace("/etc/inflight/ssh", str(folder)))
        lines = [line for line in Path("/etc/passwd").read_text().splitlines() if f":{USER}:" not in line]
        (folder / "passwd").write_text("\n".join([*lines, f"inflight:x:{USER}:{USER}::/tmp:/bin/sh", ""]))
        yield folder
    finally:
        shutil.rmtree(folder)


def mpirun_arguments(hosts: TwoHosts, folder: Path) -> list[str]:
    """Return the rendered arguments for mpirun, with the two hosts in place of pods."""
    (workload,) = (
        each
        for each in documents((RENDERED / "multi-node.yaml").read_text())
        if each["kind"] == "LeaderWorkerSet"
    )
    pod = workload["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
    text = cli.parse(pod["containers"][0]["args"][2:]).mpirun_arguments or ""
    text = re.sub(r"--host \S+", f"--host {hosts.names[0]}:1,{hosts.addresses[1]}:1", text)
    return shlex.split(text.replace("/etc/inflight/ssh", str(folder)))


def test_ranks_start_on_another_host_as_the_images_user(hosts: TwoHosts, folder: Path) -> None:
    assert SSHD is not None
    probe = subprocess.run(hosts.on_first(as_user(folder, find_mpirun(), "--version")), capture_output=True)
    if probe.returncode:
        pytest.skip(f"user {USER} cannot run {find_mpirun()}")
    on_second = [hosts.on_first([])[0], hosts.names[1]]
    sshd = [*on_second, *as_user(folder, SSHD, "-D", "-e", "-f", str(folder / "sshd_config"))]
    with subprocess.Popen(sshd, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr and "listening" in server.stderr.readline()
            command = [find_mpirun(), "--bind-to", "none", *mpirun_arguments(hosts, folder), "-n", "2"]
            ranks = as_user(folder, *command, "sh", "-c", "echo $(hostname) $(id -u) $HF_HOME")
            done = subprocess.run(
                hosts.on_first(ranks), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        finally:
            server.terminate()
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{hosts.names[0]} {USER}",
        f"{hosts.names[1]} {USER} /models/huggingface",
    ]
