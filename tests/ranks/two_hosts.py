"""Two hosts on one machine: a network namespace each, with a cable between them, a name and a /dev/shm of its own.

mpirun reaches the second host by a script instead of ssh. Needs root, ip and unshare.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Two hosts of one name are one host to mpirun; ranks that share /dev/shm would not use the network.
_ON_HOST = """#!/bin/sh
host=$1; shift
exec ip netns exec "$host" unshare --uts --ipc --mount sh -c '
  hostname "$0"; mount -t tmpfs none /dev/shm; exec "$@"' "$host" "$@"
"""
_AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
address=$1; shift
case $address in {cases} esac
echo "no host $address" >&2
exit 255
"""


class NoHosts(Exception):
    """Raised if two hosts cannot be made; the message has the reason."""


@dataclass(frozen=True)
class TwoHosts:
    """Two running hosts.

    Attributes:
        names: Names of the hosts and of their network namespaces.
        addresses: Addresses of the hosts.
        hostfile: mpirun's hostfile, one slot per host.
        agent: The script that replaces ssh.
    """

    names: tuple[str, str]
    addresses: tuple[str, str]
    hostfile: Path
    agent: Path
    _on_host: Path

    @property
    def mpirun_arguments(self) -> list[str]:
        """Return mpirun's arguments for the two hosts."""
        return ["--hostfile", str(self.hostfile), "--prtemca", "plm_ssh_agent", str(self.agent)]

    def on_first(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on the first host."""
        return [str(self._on_host), self.names[0], *command]


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Make two hosts for the duration of the `with`; raises NoHosts. Scripts are written to `folder`."""
    _check()
    pid = os.getpid()
    names = (f"inflight-{pid}-a", f"inflight-{pid}-b")
    addresses = ("10.213.7.1", "10.213.7.2")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip(
            "link",
            "add",
            "cable",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            names[1],
        )
        for name, address in zip(names, addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for link in ("lo", "cable"):
                _ip("-n", name, "link", "set", link, "up")
        yield _write_scripts(folder, names, addresses)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _write_scripts(folder: Path, names: tuple[str, str], addresses: tuple[str, str]) -> TwoHosts:
    on_host, agent, hostfile = folder / "on_host", folder / "agent", folder / "hosts"
    on_host.write_text(_ON_HOST)
    cases = " ".join(
        f'{address}) exec {shlex.quote(str(on_host))} {name} sh -c "$*";;'
        for name, address in zip(names, addresses, strict=True)
    )
    agent.write_text(_AGENT.format(cases=cases))
    for script in (on_host, agent):
        script.chmod(0o755)
    hostfile.write_text("".join(f"{address} slots=1\n" for address in addresses))
    return TwoHosts(names, addresses, hostfile, agent, on_host)


def _check() -> None:
    if os.geteuid() != 0:
        raise NoHosts("network namespaces need root")
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            raise NoHosts(f"there is no `{program}`")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHosts(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
