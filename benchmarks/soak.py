"""Send requests of every kind to a server for hours, and watch its processes' memory, files and threads.

Starts the same server as `scripts/serve --openai-port`, with a LoRA adapter, saved KV blocks, batches, a chat
template with tools and reasoning, and the model as its own draft model. The prompts are few, and each kind of
request must have the same answer every time; soak_kinds.py has the kinds, and says what is left out. Every
`--interval` seconds a line for each process is appended to `--csv`. Prints one line of JSON last: how many
requests there were, and each process's figures after the first sixth of the time and at the end. The exit status
is 1 if an answer was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import save_file

from benchmarks.measuring.options import duration, new_parser
from benchmarks.soak_kinds import ADAPTER, EQUAL_KINDS, all_kinds, kinds_openai_options, kinds_settings
from inflight.arguments import output_file, positive
from inflight.server import runtime_directory
from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.server.option_types import setting
from inflight.server.ports import Ports
from inflight.server.repository import default_repository
from inflight_client import Client

_MIB = 1 << 20
_RANK = 8
_PROMPTS = tuple("def " * (4 * n) + name for n, name in enumerate(("add(a, b):", "main():", "read(path):")))


@dataclass(frozen=True)
class Sample:
    """Figures of one process at one moment.

    Attributes:
        second: Seconds since the start.
        process: Its name, the same after a restart.
        pid: Its id.
        resident_mib, private_mib: Resident memory, and the part of it that no other process has.
        descriptors, threads: How many it has open.
        shm_mib, shm_files: Shared memory of the whole server in /dev/shm, and its files.
        requests: Requests that have ended.
    """

    second: int
    process: str
    pid: int
    resident_mib: float
    private_mib: float
    descriptors: int
    threads: int
    shm_mib: float
    shm_files: int
    requests: int


WATCHED = ("resident_mib", "private_mib", "descriptors", "threads", "shm_mib", "shm_files")
"""The figures that must stay flat."""


class Load:
    """Clients that send one request after another, all kinds equally often, in random order.

    Args:
        server: The server, with /v1.
        rate: Requests per second of all clients together.

    Attributes:
        ended: How many requests ended, by kind.
        wrong: Texts of wrong answers and errors, at most 20.
    """

    def __init__(self, server: TritonServer, rate: float) -> None:
        self._server, self._rate = server, rate
        self._client = Client(server.grpc)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._known: dict[str, object] = {}
        self.ended: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.kinds = all_kinds(server, self._client)
        self._next_kinds: list[str] = []

    def run(self, seconds: float, watch: Callable[[], None]) -> None:
        """Send requests for this many seconds; calls `watch` in between, in this thread."""
        num_clients = 8
        clients = [
            threading.Thread(target=self._send_on, args=(random.Random(n), num_clients / self._rate))
            for n in range(num_clients)
        ]
        for client in clients:
            client.start()
        end_s = time.monotonic() + seconds
        try:
            while time.monotonic() < end_s and self._server.returncode is None:
                watch()
        finally:
            self._is_over.set()
            for client in clients:
                client.join()
            self._client.close()

    def _send_on(self, chance: random.Random, every_s: float) -> None:
        while not self._is_over.wait(chance.expovariate(1 / every_s)):
            self.send(self._next_kind(chance), chance.randrange(len(_PROMPTS)), chance)

    def _next_kind(self, chance: random.Random) -> str:
        """Return a kind at random, but none a second time before all the others."""
        with self._lock:
            if not self._next_kinds:
                self._next_kinds = list(self.kinds)
                chance.shuffle(self._next_kinds)
            return self._next_kinds.pop()

    def send(self, kind: str, number: int, chance: random.Random) -> None:
        """Send a request of a kind with the prompt of this number, and check and count the answer."""
        try:
            answer = self.kinds[kind](chance, _PROMPTS[number])
        except Exception as error:
            self._note_wrong(f"{kind}: {type(error).__name__}: {error}")
            return
        self._check(kind, number, answer)
        with self._lock:
            self.ended[kind] += 1

    def _check(self, kind: str, number: int, answer: object) -> None:
        """Compare an answer with the first one of its kind, or of an equal kind; None is not compared."""
        name = f"{EQUAL_KINDS.get(kind, kind)} {number}"
        with self._lock:
            known = self._known.setdefault(name, answer)
        if answer is not None and answer != known:
            self._note_wrong(f"{kind} {number}: {answer!r}, {name} before {known!r}")

    def _note_wrong(self, text: str) -> None:
        with self._lock:
            self.ended["wrong"] += 1
            if len(self.wrong) < 20:
                self.wrong.append(text)


def watch(server: TritonServer, begun_s: float, num_requests: int) -> Iterator[Sample]:
    """Yield the present figures of each process of a server.

    Args:
        server: The server.
        begun_s: When the load began, by `time.monotonic`.
        num_requests: Requests that have ended.
    """
    folder = server.repository.path.parent
    shared = [path.stat().st_size for path in runtime_directory.shared_memory_files(folder) if path.is_file()]
    names: Counter[str] = Counter()
    for pid in sorted({server.pid, *(each.pid for each in runtime_directory.find_processes(folder))}):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            name = _name(process, server.pid)
            names[name] += 1
            memory = process.memory_full_info()
            yield Sample(
                round(time.monotonic() - begun_s),
                f"{name} {names[name]}" if names[name] > 1 else name,
                pid,
                round(memory.rss / _MIB, 2),
                round(memory.uss / _MIB, 2),
                process.num_fds(),
                process.num_threads(),
                round(sum(shared) / _MIB, 2),
                len(shared),
                num_requests,
            )


def _name(process: psutil.Process, server_pid: int) -> str:
    """Return a name that distinguishes a process from the others of the server."""
    if process.pid == server_pid:
        return "tritonserver"
    words = process.cmdline()
    for word in words:
        if word.endswith("/model.py"):
            return f"stub {Path(word).parents[1].name}"
    return next((word for word in words if word.startswith("inflight.")), process.name())


def judge(samples: list[Sample]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return each process's medians of each figure, in the second sixth of the time and in the last one."""
    by_process: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_process[sample.process].append(sample)
    end = max(sample.second for sample in samples)
    result: dict[str, dict[str, tuple[float, float]]] = {}
    for name, mine in by_process.items():
        early = [each for each in mine if end / 6 <= each.second <= end / 3] or mine
        late = [each for each in mine if each.second >= end * 5 / 6] or mine
        result[name] = {figure: (_median(early, figure), _median(late, figure)) for figure in WATCHED}
    return result


def _median(samples: list[Sample], figure: str) -> float:
    return statistics.median(float(getattr(each, figure)) for each in samples)


def write_adapter(folder: Path, checkpoint: Path) -> None:
    """Write a PEFT folder with random weights for the queries of all layers of a checkpoint."""
    config = json.loads((checkpoint / "config.json").read_text())
    hidden, width = config["hidden_size"], config["head_dim"] * config["num_attention_heads"]
    generator = np.random.default_rng(0)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = generator.standard_normal((_RANK, hidden), np.float32) * 0.05
        weights[f"{name}.lora_B.weight"] = generator.standard_normal((width, _RANK), np.float32) * 0.05
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def report(given: argparse.Namespace, load: Load, samples: list[Sample]) -> dict[str, object]:
    """Return the line of JSON."""
    return {
        "bench": "soak",
        "minutes": round(max(sample.second for sample in samples) / 60, 1),
        "requests": dict(sorted(load.ended.items())),
        "wrong": load.wrong,
        "processes": judge(samples),
        "setup": {
            "rate": given.rate,
            "minutes": given.minutes,
            "tp": given.tp or 1,
            "set": dict(given.set),
        },
    }


def soak(given: argparse.Namespace, folder: Path) -> tuple[Load, list[Sample]]:
    """Run a server under load; return the load and all figures.

    Args:
        given: The command line.
        folder: An empty folder for files of the server: the adapter, batches, the template, saved KV blocks.
    """
    write_adapter(folder / "adapters" / ADAPTER, default_repository() / "tensorrt_llm/1/demo_model")
    settings = {
        **kinds_settings(folder),
        "kv_cache_dir": str(folder / "blocks"),
        "kv_cache_disk_bytes": str(256 * _MIB),
        "max_tokens_in_paged_kv_cache": "8192",
        **dict(given.set),
    }
    samples: list[Sample] = []
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(open(given.csv, "w", newline="")) if given.csv else None
        table = output and csv.DictWriter(output, [each.name for each in fields(Sample)])
        if table:
            table.writeheader()
        options = ServerOptions(ports=Ports(openai=0), openai=kinds_openai_options(folder), tp=given.tp)
        server = stack.enter_context(serve(settings=settings, options=options))
        load, begun_s = Load(server, given.rate), time.monotonic()

        def look() -> None:
            time.sleep(min(given.interval, given.minutes * 60))
            now = list(watch(server, begun_s, load.ended.total()))
            samples.extend(now)
            if table and output:
                table.writerows([asdict(each) for each in now])
                output.flush()

        load.run(given.minutes * 60, look)
        if server.returncode is not None:
            load.wrong.append(f"the server ended: {server.log_text()[-2000:]}")
    return load, samples


def main() -> int:
    """Run the command line; return 1 if an answer was wrong."""
    parser = new_parser("soak", __doc__)
    parser.add_argument("--minutes", type=duration, default=120.0, help="how long (default: %(default)g)")
    parser.add_argument("--rate", type=positive, default=4, help="requests per second (default: %(default)s)")
    parser.add_argument(
        "--interval", type=duration, default=60.0, help="seconds between figures (default: %(default)g)"
    )
    parser.add_argument("--csv", type=output_file, help="file for the figures of all processes")
    parser.add_argument("--tp", type=positive, help="ranks of tensor parallelism, as for scripts/serve")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", type=setting, action="append", default=[], help="as for scripts/serve"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="inflight-soak-") as folder:
        load, samples = soak(given, Path(folder))
    print(json.dumps(report(given, load, samples)))
    return 1 if load.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
