"""Ranks on two hosts, which are two network namespaces of this machine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inflight.ranks.launch import find_mpirun
from inflight.server.launch import serve
from tests.commands import read_line
from tests.ranks.two_hosts import NoHosts, TwoHosts, two_hosts

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120

WHERE = """
import json, os, socket
from mpi4py import MPI
world = MPI.COMM_WORLD
message = world.bcast(b"x" * 1_000_000 if world.rank == 0 else None)
total = world.allreduce(world.rank + 1)
network = os.readlink("/proc/self/ns/net")
print(json.dumps([world.rank, socket.gethostname(), network, len(message), total]), flush=True)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    if " " in find_mpirun():
        pytest.skip(
            f"mpirun does not quote the paths that it sends to hosts, and {find_mpirun()} has a space"
        )
    try:
        with two_hosts(tmp_path) as made:
            yield made
    except NoHosts as reason:
        pytest.skip(str(reason))


def mpirun(hosts: TwoHosts, *program: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run one rank on each host."""
    command = [find_mpirun(), "--allow-run-as-root", *hosts.mpirun_arguments, "-n", "2", *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        hosts.on_first(command),
        env=environment,
        input=input,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_ranks_meet_over_the_network(hosts: TwoHosts) -> None:
    done = mpirun(hosts, sys.executable, "-c", WHERE)
    assert done.returncode == 0, done.stderr
    said = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert [(rank, name) for rank, name, *_ in said] == list(enumerate(hosts.names))
    assert said[0][2] != said[1][2]  # network namespaces
    assert [rank[3:] for rank in said] == [[1_000_000, 3]] * 2


CLIENT = """
import sys
from tests.e2e.clients import completion
print(completion(sys.argv[1], input_ids=[3, 1, 4, 1, 5], request_output_len=24, end_id=-1).ids)
"""


def ask(url: str, *on_host: str) -> list[int]:
    """Return the greedy tokens that a client on that host gets."""
    command = [*on_host, sys.executable, "-c", CLIENT, url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextmanager
def serve_on(hosts: TwoHosts, mode: str) -> Iterator[subprocess.Popen[str]]:
    """Start `scripts/serve` on the first host, with two ranks."""
    ports = [word for service in ("http", "grpc", "metrics") for word in (f"--{service}-port", "0")]
    arguments = ["--tp", "2", "--mode", mode, "--dtype", "float32", *ports, "--no-openai"]
    cache = ["--set", "max_tokens_in_paged_kv_cache=4096"]
    over_hosts = ["--mpirun-arguments", shlex.join(hosts.mpirun_arguments)]
    command = [sys.executable, "-m", "inflight.server", *arguments, *cache, *over_hosts]
    with subprocess.Popen(
        hosts.on_first(command), cwd="/", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)


def workers_of(host: str) -> list[int]:
    """Return the process ids of a host's ranks, by its network namespace."""
    listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=True)
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in listed.stdout.split()}
    return [pid for pid, words in commands.items() if words.split(b"\0")[1:3] == [b"-m", b"inflight.worker"]]


@pytest.mark.exhaustive
@pytest.mark.e2e
@pytest.mark.parametrize(("mode", "ranks"), [("orchestrator", (1, 1)), ("leader", (0, 1))])
def test_a_model_on_two_hosts_gives_the_tokens_of_one(
    hosts: TwoHosts, mode: str, ranks: tuple[int, int]
) -> None:
    with serve(dtype="float32") as alone:
        expected = ask(alone.grpc)
    with serve_on(hosts, mode) as process:
        ready = read_line(process)
        assert ready.startswith("READY"), ready
        assert tuple(len(workers_of(name)) for name in hosts.names) == ranks
        assert ask(ready.split("grpc=")[1].split()[0], *hosts.on_first([])) == expected
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0
    assert [workers_of(name) for name in hosts.names] == [[], []]


JOIN = """
import os
from inflight.ranks.mpi import MpiWorld
world = MpiWorld()
print(len(world.all_gather(b"")), flush=True)
world.leave()
"""


def test_a_shared_memory_folder_of_another_host_is_ignored(tmp_path: Path) -> None:
    environment = {**os.environ, "OMPI_MCA_btl_sm_backing_directory": str(tmp_path / "elsewhere")}
    done = subprocess.run(
        [find_mpirun(), "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-c", JOIN],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "2"]
    assert "could be created" not in done.stderr
