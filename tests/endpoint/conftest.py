from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.endpoint.client import SocketEngineClient
from inflight.endpoint.server import EndpointServer
from tests.endpoint.factories import Batcher


@pytest.fixture
def path() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="endpoint-")  # pytest's own folders can be too deep for a socket
    yield str(Path(folder, "engine.sock"))
    shutil.rmtree(folder)


@pytest.fixture
def batcher() -> Batcher:
    return Batcher()


@pytest.fixture
def server(batcher: Batcher, path: str) -> Iterator[EndpointServer]:
    server = EndpointServer(batcher.client, path)
    yield server
    server.close()


@pytest.fixture
def front_end(server: EndpointServer, path: str) -> Iterator[SocketEngineClient]:
    client = SocketEngineClient(path)
    yield client
    client.close()
