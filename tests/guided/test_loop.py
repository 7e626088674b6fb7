"""Guides in a running loop: other requests get tokens while a guide compiles."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import pytest

from inflight.batch_manager import GptManager
from inflight.core.request.request import Request
from inflight.core.request.response import Response, merge_responses
from inflight.core.request.stop import FinishReason, StopReason, StopSignal
from inflight.core.scheduler import Scheduler
from inflight.guided.compiler import ChildCompiler, GuideBounds
from tests.engine.serving import config_of
from tests.guided.at_random import make_bomb
from tests.guided.factories import load, make_request, text_of, tiny_grammars, tiny_vocabulary
from tests.guided.test_served import WORDS
from tests.models.zoo import Zoo, ZooModel


class Loop:
    """A loop over a small random model, and its responses."""

    def __init__(self, model: ZooModel, bounds: GuideBounds) -> None:
        grammars = tiny_grammars()
        engine = load(model.folder, make_grammars=lambda size: grammars)
        self.model = model
        self.responses: queue.SimpleQueue[Response] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._stops: list[StopSignal] = []
        self.compiler = ChildCompiler(grammars, "llguidance", bounds, lambda: self.manager.notify())
        self.manager = GptManager(
            engine,
            Scheduler(config_of("no-evict"), engine.limits),
            lambda room: [self._requests.get() for _ in range(self._requests.qsize())],
            self.responses.put,
            self._take_stops,
            guides=self.compiler,
            start=False,
        )
        self.manager._thread.start()

    def send(self, *requests: Request) -> None:
        for request in requests:
            self._requests.put(request)
        self.manager.notify()

    def stop(self, request_id: int) -> None:
        self._stops.append(StopSignal(request_id, StopReason.CANCELLED))
        self.manager.notify()

    def final(self, request_id: int) -> Response:
        """Merge all responses of a request, of which exactly one must be final."""
        own: list[Response] = []
        while not (own and own[-1].is_final):
            response = self.responses.get(timeout=120)
            assert response.request_id == request_id
            own.append(response)
        return own[0] if len(own) == 1 else merge_responses(own)

    def _take_stops(self) -> list[StopSignal]:
        stops, self._stops = self._stops, []
        return stops

    def close(self) -> None:
        self.compiler.close()
        assert self.manager.shutdown(60)


@pytest.fixture
def make_loop(zoo: Zoo) -> Iterator[Callable[[GuideBounds], Loop]]:
    loops: list[Loop] = []

    def make(bounds: GuideBounds) -> Loop:
        loops.append(Loop(zoo["llama-gqa"], bounds))
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()


def test_other_requests_get_their_tokens_while_a_guide_compiles(
    make_loop: Callable[[GuideBounds], Loop],
) -> None:
    loop = make_loop(GuideBounds(timeout_s=600))
    prompt = loop.model.prompt(5)
    loop.send(make_request(0, prompt, WORDS, 24))
    assert loop.final(0).error is None
    loop.send(make_request(1, prompt, make_bomb()))
    for number in range(2, 6):  # one without a guide, one with a known guide; the slow guide still compiles
        loop.send(make_request(number, prompt, WORDS if number % 2 else None, 24, streaming=True))
        assert loop.final(number).error is None
    loop.stop(1)
    assert loop.final(1).result.finish_reasons == (FinishReason.CANCELLED,)


def test_a_guide_that_takes_too_long_ends_its_request(make_loop: Callable[[GuideBounds], Loop]) -> None:
    loop = make_loop(GuideBounds(timeout_s=2))
    loop.send(make_request(1, loop.model.prompt(5), make_bomb()))
    assert "longer to compile than 2000 ms" in str(loop.final(1).error)
    request = make_request(2, loop.model.prompt(5), WORDS, 40)
    loop.send(request)
    response = loop.final(2)
    assert text_of(tiny_vocabulary(), response.result.output_token_ids[0][5:]).endswith("end")


def test_a_request_times_out_while_its_guide_compiles(make_loop: Callable[[GuideBounds], Loop]) -> None:
    loop = make_loop(GuideBounds(timeout_s=600))
    loop.send(make_request(1, loop.model.prompt(5), make_bomb(), allotted_time_ms=50))
    assert loop.final(1).result.finish_reasons == (FinishReason.TIMED_OUT,)
