"""Where each rank runs: which machine, which network, which cores. Reads the system, keeps nothing; any thread."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path

import msgspec

from inflight.ranks.world import World

_SIOCGIFADDR = 0x8915  # ask for an interface's IPv4 address; Linux
_INTERFACE_REQUEST = struct.Struct("256s")
_ADDRESS_IN_ANSWER = slice(20, 24)


class Host(msgspec.Struct, frozen=True):
    """One rank's surroundings.

    Attributes:
        name: The machine's host name.
        boot_id: The running kernel's, which no two machines share.
        network: The inode of its network namespace; processes with the same one share all interfaces.
        pid: The rank's process.
        cores: The cores that it may run on.
    """

    name: str
    boot_id: str
    network: int
    pid: int
    cores: tuple[int, ...]

    def shares_machine_with(self, other: Host) -> bool:
        """Whether both have the same cores, memory and GPUs. Containers with host names of their own do not."""
        return (self.name, self.boot_id) == (other.name, other.boot_id)

    def shares_network_with(self, other: Host) -> bool:
        """Whether one reaches the other at 127.0.0.1."""
        return (self.boot_id, self.network) == (other.boot_id, other.network)


def this_host() -> Host:
    """This process's."""
    return Host(
        socket.gethostname(),
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        os.stat("/proc/self/ns/net").st_ino,
        os.getpid(),
        tuple(sorted(os.sched_getaffinity(0))),
    )


def gather_hosts(world: World) -> list[Host]:
    """Every rank's, by rank."""
    said = world.all_gather(msgspec.msgpack.encode(this_host()))
    return [msgspec.msgpack.decode(one, type=Host) for one in said]


def own_addresses() -> list[str]:
    """The IPv4 addresses of this network namespace's interfaces, one each, without the loopback's."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, _INTERFACE_REQUEST.pack(os.fsencode(name)))
            except OSError:  # it has none
                continue
            addresses.append(socket.inet_ntoa(answer[_ADDRESS_IN_ANSWER]))
    return [address for address in addresses if not address.startswith("127.")]
