"""Dynamo's `LLMEngine` over the engine endpoint of a running server.

Runs on Dynamo's event loop. Responses arrive on the engine client's thread and are passed to the loop; requests
are sent from the loop, which takes microseconds.
"""

# Dynamo is not installed where types are checked, as it excludes our version of pydantic: its types are unknown.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.utils.runtime import parse_endpoint
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm import exceptions

from inflight.arguments import Parser
from inflight.core.report.reports import ReportKind
from inflight.core.report.stats import IterationCounts
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.handle import RequestHandle
from inflight.core.request.response import Response
from inflight.dynamo.chunks import Chunks
from inflight.dynamo.requests import in_fields, read_request
from inflight.endpoint.client import SocketEngineClient
from inflight.errors import (
    Cancelled,
    InflightError,
    InvalidArgument,
    NotFound,
    RequestError,
    Unavailable,
    Unsupported,
)

_log = logging.getLogger(__name__)
_TICK_S = 1.0
"""Seconds between two attempts to reach the engine, and between two reports of its load."""
_REPORT_TIMEOUT_S = 5.0
_RANK = 0  # in data parallelism, which the engine does not have


class DynamoEngine(LLMEngine):
    """A worker's engine: the engine of the server that listens at `--engine-endpoint`.

    Args:
        given: The options of the command line.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._client: SocketEngineClient | None = None
        self._handles: dict[str, RequestHandle] = {}
        self._reporting: asyncio.Task[None] | None = None
        self._publisher: Any = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DynamoEngine, WorkerConfig]:
        """Return the engine, not yet started, and the worker's configuration."""
        given = _parser().parse_args(argv)
        config = DynamoRuntimeConfig.from_cli_args(given)
        config.validate()
        place = config.endpoint or f"dyn://{config.namespace}.backend.generate"
        config.namespace, config.component, config.endpoint = parse_endpoint(place)
        worker_config = WorkerConfig.from_runtime_config(
            config, model_name=given.model, served_model_name=given.served_model_name
        )
        return cls(given), worker_config

    async def start(self, worker_id: int) -> EngineConfig:
        """Wait for the server's engine, and return its limits, with which the worker registers."""
        self._client = client = SocketEngineClient(self._given.engine_endpoint)
        description, counts = await _reach(client)
        self._reporting = asyncio.create_task(self._report(client))
        limits = description.limits
        return EngineConfig(
            model=self._given.model,
            served_model_name=self._given.served_model_name,
            llm=LlmRegistration(
                context_length=limits.max_sequence_length,
                kv_cache_block_size=limits.tokens_per_block,
                total_kv_blocks=limits.num_blocks,
                max_num_seqs=counts.max_num_requests,
                max_num_batched_tokens=counts.max_num_tokens,
            ),
        )

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of one request.

        Raises Dynamo's exceptions: InvalidArgument if the engine refuses the request, EngineShutdown if the
        engine is not reachable or ends, so that the frontend migrates the request to another worker.
        """
        assert self._client is not None, "start was called"
        normalize_request_token_ids(request)
        loop, responses = asyncio.get_running_loop(), asyncio.Queue[Response]()

        def on_response(response: Response) -> None:
            loop.call_soon_threadsafe(responses.put_nowait, response)

        handle: RequestHandle | None = None
        try:
            description = self._client.describe()
            asked = read_request(request, description, context.id())
            handle = self._handles[context.id()] = self._client.submit(asked, on_response)
            chunks = Chunks(asked.prompt_length, description.limits.tokens_per_block)
            while True:
                response = await responses.get()
                if response.error is not None:
                    raise response.error
                yield chunks.take(response)
                if response.is_final:
                    return
        except InflightError as error:
            raise _in_dynamo(error) from error
        finally:
            self._handles.pop(context.id(), None)
            if handle is not None:
                handle.stop()  # does nothing if the request has ended

    async def abort(self, context: Any) -> None:
        """Stop the engine's work on a request whose client has gone."""
        if handle := self._handles.get(context.id()):
            handle.stop()

    async def cleanup(self) -> None:
        """Close the connection to the engine; requests in flight migrate. Idempotent."""
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        if self._client is not None:
            await asyncio.to_thread(self._client.close)

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Return the address of the server's KV events; without one the router estimates what is cached."""
        address = self._given.kv_events_endpoint
        return [ZmqSource(endpoint=address, dp_rank=_RANK)] if address else []

    async def health_check_payload(self) -> dict[str, Any]:
        """Return a request for one token, by which Dynamo checks an idle worker."""
        return build_health_check_payload(bos_token_id=1)

    def component_metrics_dp_ranks(self) -> list[int]:
        """Return the data-parallel ranks whose load is published: this worker has only one."""
        return [_RANK]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Take the publisher of the engine's load."""
        self._publisher = publisher

    async def _report(self, client: SocketEngineClient) -> None:
        """Publish once a second how many KV blocks are in use, for the router and Dynamo's metrics."""
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                counts = await asyncio.to_thread(_read_counts, client)
            except Unavailable:
                continue  # the client logs it; a request raises it
            if self._publisher is not None:
                self._publisher.publish(_RANK, _snapshot(counts))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m inflight.dynamo",
        description="A worker of NVIDIA Dynamo for the engine of a running server.",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--engine-endpoint",
        required=True,
        metavar="SOCKET",
        help="the engine's Unix socket: the server's parameter engine_endpoint",
    )
    add(
        "--model",
        required=True,
        metavar="PATH_OR_NAME",
        help="the checkpoint whose tokenizer and chat template Dynamo's frontend uses (no weights are read)",
    )
    add("--served-model-name", metavar="NAME", help="the model's name in requests (default: --model)")
    add(
        "--kv-events-endpoint",
        metavar="ADDRESS",
        help="ZeroMQ address of the server's KV events, such as tcp://127.0.0.1:5557 (--kv-events-config)",
    )
    DynamoRuntimeArgGroup().add_arguments(parser)
    return parser


async def _reach(client: SocketEngineClient) -> tuple[EngineDescription, IterationCounts]:
    """Return the engine's description and counters as soon as it can be reached."""
    while True:
        try:
            return await asyncio.to_thread(lambda: (client.describe(), _read_counts(client)))
        except Unavailable:  # the client logs the first one
            await asyncio.sleep(_TICK_S)


def _read_counts(client: SocketEngineClient) -> IterationCounts:
    """Return the engine's present counters. Blocks. Raises Unavailable if the engine does not report them."""
    metrics = client.reports(ReportKind.METRICS, _REPORT_TIMEOUT_S).metrics
    if metrics is None:
        raise Unavailable(f"the engine did not report its counters within {_REPORT_TIMEOUT_S:g} s")
    return metrics[0]


def _snapshot(counts: IterationCounts) -> ComponentSnapshot:
    has_looked_up = counts.num_reused_blocks + counts.num_missed_blocks > 0
    return ComponentSnapshot(
        kv_used_blocks=counts.num_used_blocks,
        kv_total_blocks=counts.max_num_blocks,
        gpu_cache_usage=counts.used_fraction,
        dp_rank=_RANK,
        kv_cache_hit_rate=counts.cache_hit_rate if has_looked_up else None,
    )


def _in_dynamo(error: InflightError) -> Exception:
    """Return Dynamo's exception for an error of the engine."""
    text = str(in_fields(error) if isinstance(error, RequestError) else error)
    match error:
        case InvalidArgument() | Unsupported() | NotFound():
            return exceptions.InvalidArgument(text)
        case Unavailable():
            return exceptions.EngineShutdown(text)
        case Cancelled():
            return exceptions.Cancelled(text)
        case _:
            return exceptions.Unknown(text)


def main() -> None:
    """Run the worker until a signal ends it."""
    run(DynamoEngine)
