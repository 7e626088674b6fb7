"""For all tests: which of them run alone or in pairs, which on one worker, and children that can be interrupted.

Workers run side by side (`scripts/test`), each with fixtures of its own. Tests that need the same server therefore
go to one worker, so that the server is started once; all others stay together by file.
"""

from __future__ import annotations

import functools
import re
import signal
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

SHARED_SERVERS = (
    "exact_server", "fake_server", "demo_server", "unary_server", "narrow_server", "short_queue_server",
    "pair_server",
    "playground_url",
)  # fmt: skip
"""Fixtures of servers that several files use. A file that uses two goes where the first of them is."""

ALONE = {
    "e2e/test_load.py": "processor time of an idle server",
    "ranks/test_idle.py": "processor time of idle ranks",
    "test_release.py": "memory of this process, in which other tests would leave some",
}
"""Files of tests that nothing else may run beside, and what they measure."""

IN_PAIRS = {
    "e2e/test_leader.py": "how soon a loss is noticed; each test starts a server and its ranks",
    "e2e/test_ranks.py": "how soon a loss is noticed; each test starts a server and its ranks",
    "e2e/test_shutdown.py": "how long a server takes to end",
    "e2e/test_supervision.py": "how long a server is away",
    "server/test_server_leader.py": "mpirun starts a server and its ranks",
}
"""Files of tests that measure seconds, of which two processors can run two but no more, and what they measure."""

_APART = {"alone": ALONE, "in_pairs": IN_PAIRS}
_TESTS = Path(__file__).parent

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background ignores SIGINT, and so would every child.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-requests",
        type=int,
        default=180,
        help="how many requests the soak test of adapters sends to a real server",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: nothing may run beside it (tests/conftest.py says why)")
    config.addinivalue_line("markers", "in_pairs: one more may run beside it (tests/conftest.py says why)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m alone` only the files that run alone are imported; most of the time would go into the others."""
    mark = config.getoption("markexpr")
    if mark in _APART and collection_path.name.startswith("test_"):
        return _mark_of(collection_path) != mark
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if mark := _mark_of(item.path):
            item.add_marker(mark)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    return ServerScheduling(config, log)


class ServerScheduling(LoadFileScheduling):
    """pytest-xdist's way to hand out work by file, with files that need the same server as if they were one."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(self.config.rootpath / nodeid.partition("::")[0])


@functools.cache
def _group(path: Path) -> str:
    """The shared server that a file names, the first one of several; of other files the file itself."""
    words = set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return next((server for server in SHARED_SERVERS if server in words), str(path))


@functools.cache
def _mark_of(path: Path) -> str | None:
    """The mark of a file of tests that do not run side by side with all others."""
    return next((mark for mark, names in _APART.items() for name in names if path == _TESTS / name), None)
