"""Search random seeds for a fault: `inflight simulate [--minutes N] [--seed S] [--debug]`.

Every seed makes scenarios of requests, stops and failures of the device for the scheduler. Each runs on four
kinds of device and with three kinds of models. Then a whole server runs on a simulated machine, with its threads,
processes and sockets, one with several ranks, one with Triton's front ends, one with those of /v1, one with
guides, and one with all of these parts and its launcher. Every request must get the result that it gets alone.
Last, a server's processes and an engine's ranks are killed and stopped, and the supervision restarts and ends
them.
"""

from __future__ import annotations

import contextlib
import pdb
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, product
from typing import TYPE_CHECKING

from inflight.arguments import Parser, program_name

from .scenario import DEVICES, DRAWS, MODELS, Scenario, time_of
from .simulated_server import run

if TYPE_CHECKING:
    from inflight.testing.machine.run import SimulatedRun

_MAX_SEED = 2**32
_REPORT_EVERY_S = 10.0
_NS_PER_S = 10**9
_NS_PER_HOUR = 3600 * _NS_PER_S
_MAX_SHOWN = 20  # failures
_SERVERS = (
    "whole server",
    "server with several ranks",
    "server with Triton's front ends",
    "server with the front ends of /v1",
    "server with guides",
    "server with all parts",
    "supervision",
    "orchestrator of ranks",
)


def scenarios(seed: int) -> Iterator[tuple[str, Callable[[], int]]]:
    """Yield the name of each scenario of a seed, and a function that runs it and returns its simulated time in
    nanoseconds."""
    for names in product(DRAWS, DEVICES, MODELS):
        yield ", ".join(names), partial(_run, seed, *names)
    for name in _SERVERS:
        yield name, partial(_run_server, name, seed)


def _run(seed: int, drawn: str, device: str, model: str) -> int:
    return time_of(run(_scenario(seed, drawn, device, model)).num_iterations) - time_of(0)


def _scenario(seed: int, drawn: str, device: str, model: str) -> Scenario:
    return MODELS[model](DEVICES[device](DRAWS[drawn](seed)))


def _shrink(name: str, seed: int, error: Exception) -> str:
    """Return what the failing scenario of this name needs in order to fail."""
    if name in _SERVERS:
        return _server(name).fewest_faults(seed)
    return fewest_requests(_scenario(seed, *name.split(", ")), error)


def fewest_requests(scenario: Scenario, error: Exception) -> str:
    """Return the requests that a failing scenario needs: without any one of them the error does not occur."""
    needed = list(scenario.requests)
    for request_id in scenario.requests:
        fewer = [each for each in needed if each != request_id]
        if fewer and _fails_like(scenario.only(fewer), error):
            needed = fewer
    return f"with {len(needed)} of its {len(scenario.requests)} requests: {', '.join(map(str, needed))}"


def _fails_like(scenario: Scenario, error: Exception) -> bool:
    try:
        run(scenario)
    except Exception as other:
        return type(other) is type(error)
    return False


def _run_server(name: str, seed: int) -> int:
    return int(_server(name)(seed).run().simulated_s * _NS_PER_S)


def _server(name: str) -> type[SimulatedRun]:
    from inflight.testing.machine.complete_server import CompleteServer
    from inflight.testing.machine.guided_server import ServerWithGuides
    from inflight.testing.machine.openai_server import ServerForOpenAi
    from inflight.testing.machine.orchestrated_ranks import OrchestratedRanks
    from inflight.testing.machine.ranked_server import RankedServer
    from inflight.testing.machine.supervised_server import SupervisedServer
    from inflight.testing.machine.triton_server import ServerForTriton
    from inflight.testing.machine.whole_server import WholeServer

    servers = (
        WholeServer,
        RankedServer,
        ServerForTriton,
        ServerForOpenAi,
        ServerWithGuides,
        CompleteServer,
        SupervisedServer,
        OrchestratedRanks,
    )
    return servers[_SERVERS.index(name)]


class Search:
    """Runs the scenarios of one seed after another, and counts them.

    Args:
        debugs: Whether to stop in a debugger where a scenario failed.
    """

    def __init__(self, debugs: bool = False) -> None:
        self._debugs = debugs
        self.num_seeds = self.num_runs = self.num_failed = 0
        self._simulated_ns = 0
        self._begun_s = time.monotonic()

    def try_seed(self, seed: int) -> None:
        """Run all scenarios of a seed; print those that fail, with the error's traceback for the first one."""
        for name, run_scenario in scenarios(seed):
            try:
                self._simulated_ns += run_scenario()
            except Exception as error:  # an oracle's AssertionError, or an error of the code under test
                self.num_failed += 1
                if self.num_failed == 1:
                    traceback.print_exc()
                if self.num_failed <= _MAX_SHOWN:
                    _say(f"seed {seed} failed ({name}): {type(error).__name__}: {error}")
                    _say(f"seed {seed} fails {_shrink(name, seed, error)}")
                if self._debugs:
                    # A simulated thread's own error is the cause of the machine's.
                    pdb.post_mortem((error.__cause__ or error).__traceback__)
            self.num_runs += 1
        self.num_seeds += 1

    def report(self) -> str:
        """Return the counts so far, in one line."""
        minutes = (time.monotonic() - self._begun_s) / 60
        return (
            f"seeds {self.num_seeds}, runs {self.num_runs}, failed runs {self.num_failed}, "
            f"simulated hours {self._simulated_ns / _NS_PER_HOUR:.2f}, "
            f"seeds a minute {self.num_seeds / minutes:.0f}"
        )


def main() -> int:
    """Run the command line; return 1 if a scenario failed."""
    parser = Parser(prog=program_name("scripts/simulate"), description=__doc__)
    parser.add_argument("--minutes", type=float, metavar="N", help="end after N minutes (default: at Ctrl-C)")
    parser.add_argument("--seed", type=int, metavar="S", help="run this seed only, to repeat a failure")
    parser.add_argument(
        "--debug", action="store_true", help="stop in Python's debugger where a scenario fails"
    )
    options = parser.parse_args()
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: expected a number above 0")
    if options.seed is not None and options.seed < 0:
        parser.error(f"--seed {options.seed}: expected 0 or more")
    if not __debug__:
        parser.error("python -O removes the assertions that find faults: run it without -O")
    search = Search(options.debug)
    with contextlib.suppress(KeyboardInterrupt):
        _search(search, options.seed, options.minutes)
    _say(search.report())
    return 1 if search.num_failed else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _search(search: Search, seed: int | None, minutes: float | None) -> None:
    if seed is not None:
        search.try_seed(seed)
        return
    first = random.SystemRandom().randrange(_MAX_SEED)
    _say(f"seeds from {first} on; Ctrl-C ends the search")
    begun_s = reported_s = time.monotonic()
    for number in count(first):
        search.try_seed(number)
        now_s = time.monotonic()
        if minutes is not None and now_s - begun_s >= 60 * minutes:
            return
        if now_s - reported_s >= _REPORT_EVERY_S:
            _say(search.report())
            reported_s = now_s


if __name__ == "__main__":
    sys.exit(main())
