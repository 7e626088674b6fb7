"""A Ray Serve application whose replicas are servers of this project; see docs/scaling.md.

Each replica starts `inflight serve --no-triton` on its node and passes HTTP requests on to it, streams included.
Needs `ray[serve]` in the environment of Ray, and the command `inflight` in this or another one.

    serve run --app-dir examples ray_serve:app model=/models/llama max_replicas=4 num_gpus=1

With a configuration file, the folder of this program has to be on PYTHONPATH.
"""

import asyncio
import contextlib
import re
import shlex
import subprocess
from collections.abc import AsyncIterator

import aiohttp
from pydantic import BaseModel
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

# Headers of one connection, which a proxy does not pass on, and those that Serve's own proxy adds to answers.
_OF_CONNECTION = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}
_OF_SERVE = {"date", "server", "x-request-id"}
_UNAVAILABLE = {"message": "the server of this replica is lost; a later attempt may succeed"}


class Options(BaseModel):
    """Arguments of `serve run`.

    Attributes:
        model: The checkpoint's folder or its name on the Hugging Face hub.
        command: The command that starts a server, with any flags of its own.
        min_replicas: Fewest replicas.
        max_replicas: Most replicas.
        target_requests: Number of requests in flight, on average over the replicas, above which one is added.
        num_gpus: Number of GPUs of a replica.
        num_cpus: Number of processors that Ray sets aside for a replica.
    """

    model: str
    command: str = "inflight serve --no-triton"
    min_replicas: int = 1
    max_replicas: int = 1
    target_requests: float = 48
    num_gpus: float = 0
    num_cpus: float = 1


@serve.deployment(max_ongoing_requests=1024, health_check_period_s=5, graceful_shutdown_timeout_s=60)
class Server:
    """A replica: the process of a server, and the way to it."""

    def __init__(self, options: Options) -> None:
        command = [*shlex.split(options.command), "--model", options.model, "--openai-port", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        ready = next((found for line in self._process.stdout if (found := _ready(line))), None)
        if ready is None:  # Ray shows the server's log with this error, and starts another replica
            raise RuntimeError(f"the server ended with status {self._process.wait()} before it was ready")
        self._url = ready
        self._session = aiohttp.ClientSession(
            auto_decompress=False, timeout=aiohttp.ClientTimeout(), connector=aiohttp.TCPConnector(limit=0)
        )

    async def __call__(self, request: Request) -> Response:
        """Pass a request on, and its answer back as it comes."""
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: value for name, value in request.headers.items() if name not in _OF_CONNECTION}
        body = await request.body()
        try:
            answer = await self._session.request(request.method, self._url + path, headers=headers, data=body)
        except aiohttp.ClientConnectionError:  # until a health check notices that the server has ended
            return JSONResponse({"error": _UNAVAILABLE}, 503)
        return StreamingResponse(_content(answer), answer.status, _passed_on(answer))

    async def check_health(self) -> None:
        """Raise if the server has ended or its engine is lost: Ray then replaces this replica."""
        async with self._session.get(f"{self._url}/health") as answer:
            answer.raise_for_status()

    async def __del__(self) -> None:
        """End the server, which first finishes its requests."""
        self._process.terminate()
        await asyncio.to_thread(self._process.wait)
        await self._session.close()


def _ready(line: str) -> str | None:
    found = re.match(r"READY .*?openai=(\S+)", line)
    return found and found[1].removesuffix("/v1")


def _passed_on(answer: aiohttp.ClientResponse) -> dict[str, str]:
    left_out = _OF_CONNECTION | _OF_SERVE
    return {name: value for name, value in answer.headers.items() if name.lower() not in left_out}


async def _content(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the answer in the parts that the server sends. If the client disconnects, the request is
    cancelled."""
    with contextlib.closing(answer):
        async for part in answer.content.iter_any():
            yield part


def app(options: Options) -> serve.Application:
    """Return the application, for `serve run` and Serve's configuration files."""
    deployment = Server.options(
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_requests,
        },
        ray_actor_options={"num_gpus": options.num_gpus, "num_cpus": options.num_cpus},
    )
    return deployment.bind(options)
