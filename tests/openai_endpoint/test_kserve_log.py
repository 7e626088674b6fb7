"""An endpoint in front of a tritonserver that cannot be reached says so in its log."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from inflight.errors import Unavailable
from inflight.openai.kserve_client import KServeEngineClient

DEMO_MODEL = Path(__file__).parents[2] / "model_repository/tensorrt_llm/1/demo_model"


def test_a_server_that_cannot_be_reached_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    client = KServeEngineClient(f"127.0.0.1:{port}", str(DEMO_MODEL))
    try:
        with caplog.at_level(logging.INFO):
            for _ in range(2):
                with pytest.raises(Unavailable, match="cannot be reached"):
                    client.describe()
    finally:
        client.close()
    (record,) = caplog.records
    assert f"the tritonserver at 127.0.0.1:{port} cannot be reached" in record.getMessage()
