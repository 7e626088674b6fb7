"""Servers for the endpoint's tests: an engine and the application in this process, on a port of their own."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from inflight.build import start_engine
from inflight.core.ports import EngineClient
from inflight.load_model import load_model
from inflight.openai.app import create_app
from inflight.openai.http_protocol import HttpProtocol
from inflight.openai.options import OpenAiOptions
from inflight.openai.pictures import PicturesEncoder
from inflight.testing.fake_server import load_fake
from tests.triton.factories import make_parameters

DEMO = Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1" / "demo_model"
DEMO_VOCABULARY = 3072
PATIENCE_S = 30


@contextmanager
def fake_engine(step_us: int = 0, **parameters: str) -> Iterator[EngineClient]:
    """The fake engine with the demo model's tokenizer."""
    values = {
        "tokenizer_dir": str(DEMO),
        "max_beam_width": "4",
        "enable_kv_cache_reuse": "true",
        **parameters,
    }
    name = f"vocab={DEMO_VOCABULARY},step_us={step_us}"
    engine = start_engine(make_parameters(gpt_model_path=name, **values), "", load=load_fake)
    try:
        yield engine.client
    finally:
        engine.close(0.0)


@contextmanager
def demo_engine(**parameters: str) -> Iterator[EngineClient]:
    """The demo checkpoint on the real engine."""
    values = {"gpt_model_path": str(DEMO), "dtype": "float32", "max_beam_width": "4", **parameters}
    engine = start_engine(make_parameters(**values), "", load=load_model)
    try:
        yield engine.client
    finally:
        engine.close(0.0)


@contextmanager
def served(
    client: EngineClient,
    protocol: type[HttpProtocol] = HttpProtocol,
    picture_encoder: PicturesEncoder | None = None,
    others: Sequence[EngineClient] = (),
    **options: Any,
) -> Iterator[str]:
    """The application in front of `client`, and of other engines; yields its URL, without a path."""
    given = OpenAiOptions(**{"served_model_names": ("demo",), **options})
    app = create_app(client, given, picture_encoder, others)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=protocol, ws="none", log_level="warning", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="uvicorn")
    thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "uvicorn has not started"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def make_certificate(folder: Path, name: str = "localhost", passphrase: str = "") -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 and its key as PEM files to `folder`, which is created if missing."""
    folder.mkdir(exist_ok=True)
    certificate, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
    locked = ["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *locked]
        + ["-days", "1", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
        + ["-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    return certificate, key
