"""Settings for all tests: which run by default, which share a worker, and children that can be interrupted.

Workers run side by side (`scripts/test`), each with its own fixtures. Tests that need the same server run on
one worker, so that the server is started once; other tests stay together by file.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import re
import signal
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests import tiers

# Examples take milliseconds; on a busy machine one may still take longer than the default deadline.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

FOLDER = Path(__file__).parent
ALL_TIMEOUT_S = 3600
"""Time limit of a test with `--all`. Some of these tests run hundreds of seeds, or kernels in an interpreter."""
SHARED_SERVERS = (
    ("exact_server",),
    ("fake_server", "narrow_server"),
    ("demo_server", "unary_server", "short_queue_server"),
    ("pair_server",),
    ("fuzzed_server",),
    ("playground_url",),
)
"""Fixtures of servers that several files use, by worker. A file that uses several is with the first of them."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background ignores SIGINT, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_certificate_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let HTTP clients know no authorities: each new client would read all of them, and no test needs one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("authorities")))
        yield


def import_share(worker: Mapping[str, Any]) -> None:
    """Import this worker's share of all test files before collection imports the rest.

    pytest rewrites the assertions of a file when it is first imported, and caches the result. Without shares, all
    workers would rewrite the same files at the same time. The collection imports files again whose import fails
    here, for example because a marker is unknown before its conftest.py is read, and reports real errors.
    """
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in sorted(FOLDER.rglob("test_*.py"))[number::count]:
        with contextlib.suppress(Exception, pytest.skip.Exception, pytest.fail.Exception):
            importlib.import_module(".".join(path.relative_to(FOLDER.parent).with_suffix("").parts))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-requests",
        type=int,
        default=180,
        help="how many requests the soak test of adapters sends to a real server",
    )
    parser.addoption("--all", action="store_true", help="run the tests that are marked exhaustive too")


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads its option
def pytest_configure(config: pytest.Config) -> None:
    tiers.choose(config)
    if config.getoption("--all") and config.option.timeout is None:
        config.option.timeout = ALL_TIMEOUT_S


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep the garbage collector from searching modules and tests, which stay to the end, again and again."""
    gc.disable()
    try:
        if hasattr(session.config, "workerinput") and session.config.args == [str(FOLDER)]:
            import_share(session.config.workerinput)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect exhaustive tests unless --all is given."""
    if config.getoption("--all"):
        return
    exhaustive = [item for item in items if item.get_closest_marker("exhaustive")]
    if exhaustive:
        config.hook.pytest_deselected(items=exhaustive)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    return ServerScheduling(config, log)


class ServerScheduling(LoadFileScheduling):
    """pytest-xdist's scheduling by file, with files that need the same server as one.

    Tests of a GPU are distributed one by one, as they compile kernels, which takes minutes on one processor.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _group(self.config.rootpath / nodeid.partition("::")[0]) or nodeid


@functools.cache
def _group(path: Path) -> str | None:
    """Return the first shared server that a file's functions take, or else the file; None for tests of a GPU."""
    text = path.read_text(encoding="utf-8")
    if re.search(r"^pytestmark = \[\s*pytest\.mark\.gpu", text, re.MULTILINE):
        return None
    taken = set(re.findall(r"(?<![\w.])\w+(?=[,:)\"])", text))
    return next((servers[0] for servers in SHARED_SERVERS if not taken.isdisjoint(servers)), str(path))
