"""Unloading and loading models on a running server answers each request once and leaves nothing behind.

Triton refuses new requests of an unloaded model at once, and lets those in flight finish. The model's process
lives on while a client holds a gRPC stream that used it.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from inflight.server import runtime_directory
from inflight.server.config_text import set_parameters
from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.testing.fake_server import serve_fake
from tests.tiers import examples, with_all

from .clients import CONTROL, CONTROLLED, TIMEOUT_S, Answer, Stream, ask, completion, infer, wait_until
from .footprint import Footprint, folder_of

DEMO_MODEL = Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1" / "demo_model"
EXPLICIT = ServerOptions(model_control="explicit", client_apis=CONTROLLED)
ENGINE, FRONT_ENDS = "tensorrt_llm", ("ensemble", "tensorrt_llm_infer")
PROMPT = [3, 1, 4]
# Two long requests fill the KV cache.
FAKE = {
    "fake_engine": "vocab=1000,step_us=1000",
    "max_sequence_length": "2048",
    "max_tokens_in_paged_kv_cache": "1024",
    "max_beam_width": "2",
    "tokenizer_dir": str(DEMO_MODEL),
}
SLOW = {**FAKE, "fake_engine": "vocab=1000,step_us=100000"}
HANGING = {**FAKE, "fake_engine": "vocab=1000,step_us=3600000000"}
LONG = 400


@pytest.fixture(scope="module")
def server(elsewhere) -> Iterator[TritonServer]:
    with serve_fake(settings=FAKE, options=EXPLICIT) as running:
        yield running


def test_only_this_user_can_read_the_models_shared_memory(server) -> None:
    regions = runtime_directory.shared_memory_files(folder_of(server))
    assert len(regions) == 6 and not any(region.stat().st_mode & 0o077 for region in regions)


def unload(server: TritonServer, model: str = ENGINE) -> None:
    """Unload a model: Triton removes it at once, and ends its process when it is not used any more."""
    with grpc.InferenceServerClient(server.grpc) as client:
        client.unload_model(model, headers=CONTROL)
        wait_until(lambda: not client.is_model_ready(model))


def load(server: TritonServer, model: str = ENGINE) -> None:
    with grpc.InferenceServerClient(server.grpc) as client:
        client.load_model(model, headers=CONTROL)
        assert client.is_model_ready(model)


def has_no_engine(server: TritonServer) -> bool:
    now = Footprint.of(server)
    return (now.stubs, now.endpoints, len(now.shared_memory)) == (5, 0, 5)


def is_complete(server: TritonServer) -> bool:
    now = Footprint.of(server)
    return (now.stubs, now.endpoints, len(now.shared_memory)) == (6, 1, 6)


def set_engine(server: TritonServer, value: str) -> None:
    path = server.repository.path / ENGINE / "config.pbtxt"
    path.write_text(set_parameters(path.read_text(), {"fake_engine": value}))


class Client(Stream):
    """A stream that keeps the final responses of all its requests."""

    def __init__(self, server: TritonServer, model: str = ENGINE) -> None:
        super().__init__(server.grpc)
        self._model = model
        self._finals: list[Answer] = []

    def ask(self, length: int = LONG, **tensors) -> None:
        """Send a request for `length` tokens, with `streaming` under the model's name of it."""
        if self._model == ENGINE:
            self.send(ENGINE, input_ids=PROMPT, request_output_len=length, end_id=-1, **tensors)
        else:
            if "streaming" in tensors:
                tensors["stream"] = tensors.pop("streaming")
            self.send(self._model, text_input="def f", max_tokens=length, end_id=-1, **tensors)

    def until_taken(self) -> None:
        """Wait until the model has received all requests: it answers a stop of an unknown id after them."""
        self.send(self._model, "the last", stop=True)
        while self._next()[0] != "the last":
            pass
        self._finals.pop()

    def until_running(self) -> None:
        """Wait until a streamed request has its first tokens."""
        while not self._next()[1].outputs:
            pass

    def finals(self, count: int) -> list[Answer]:
        """Return the final responses of all requests so far, exactly one for each."""
        while len(self._finals) < count:
            self._next()
        with pytest.raises(queue.Empty):
            self.receive(timeout=0)
        found, self._finals = self._finals, []
        return found

    def _next(self) -> tuple[str, Answer]:
        name, answer = self.receive()
        self._finals += [answer] if answer.final else []
        return name, answer


def errors_without_engine(server: TritonServer) -> list[str]:
    """Return the errors that clients of all three models get while there is no engine."""
    with pytest.raises(InferenceServerException) as over_http:
        infer(server.http, input_ids=PROMPT, request_output_len=3)
    (of_ensemble,) = ask(server.grpc, "ensemble", text_input="def f", max_tokens=3)
    (direct,) = ask(server.grpc, input_ids=PROMPT, request_output_len=3)
    assert over_http.value.status() == "503"
    return [str(over_http.value), str(of_ensemble.error), str(direct.error)]


def tokens_of_all(server: TritonServer) -> list[object]:
    unary = infer(server.http, input_ids=PROMPT, request_output_len=8).as_numpy("output_ids").tolist()
    (text,) = ask(server.grpc, "ensemble", text_input="def f", max_tokens=8)
    return [unary, completion(server.grpc, input_ids=PROMPT, request_output_len=8).ids, text.text]


def busy_round(server: TritonServer) -> None:
    """Unload with streams, a beam search and waiting requests in flight, some by a front end; then load."""
    with Client(server) as direct, Client(server, "ensemble") as by_front_end:
        for client in (direct, by_front_end):
            client.ask(streaming=True)
            client.until_running()
        direct.ask(length=50, beam_width=2)
        direct.ask(length=50)
        by_front_end.ask(length=50)
        direct.until_taken()
        by_front_end.until_taken()
        unload(server)
        (refused,) = ask(server.grpc, input_ids=PROMPT, request_output_len=3)
        assert "tensorrt_llm" in str(refused.error)
        answers = direct.finals(3) + by_front_end.finals(2)
    assert errors_of(answers) == set()
    assert {answer.finish_reason for answer in answers if "finish_reason" in answer.outputs} == {"LENGTH"}
    wait_until(lambda: has_no_engine(server))
    by_http, of_ensemble, of_engine = errors_without_engine(server)
    assert "cannot be reached" in by_http and "cannot be reached" in of_ensemble
    assert "tensorrt_llm" in of_engine
    load(server)


def errors_of(answers: list[Answer]) -> set[str]:
    return {str(answer.error) for answer in answers if answer.error}


def test_unloading_under_load_leaves_nothing_behind(server):
    """Resources of the first rounds are kept for reuse; later rounds take no more."""
    tokens = tokens_of_all(server)
    footprints = []
    for _ in range(3):
        busy_round(server)
        assert tokens_of_all(server) == tokens
        wait_until(lambda: is_complete(server))
        footprints.append(Footprint.of(server))
    wait_until(lambda: Footprint.of(server).fits(footprints[1]))


@pytest.mark.exhaustive
def test_idle_unloading_leaves_nothing_behind(server):
    footprints = []
    for _ in range(3):
        unload(server)
        wait_until(lambda: has_no_engine(server))
        load(server)
        wait_until(lambda: is_complete(server))
        footprints.append(Footprint.of(server))
    wait_until(lambda: Footprint.of(server).fits(footprints[1]))


def test_an_open_stream_does_not_keep_the_next_engine_from_loading(server):
    """The previous engine has ended, although Triton keeps its process until the stream is closed."""
    with Client(server) as held:
        held.ask(length=3)
        held.finals(1)
        unload(server)
        load(server)
        assert completion(server.grpc, input_ids=PROMPT, request_output_len=3).ids
        assert Footprint.of(server).stubs == 7
        held.ask(length=3)
        assert errors_of(held.finals(1)) == set()
    wait_until(lambda: is_complete(server))


def test_loading_right_after_unloading_lets_requests_in_flight_finish(server):
    with Client(server) as direct, Client(server, "ensemble") as by_front_end:
        for client in (direct, by_front_end):
            client.ask(streaming=True)
            client.until_running()
        unload(server)
        load(server)
        assert errors_of(direct.finals(1) + by_front_end.finals(1)) == set()
        tokens_of_all(server)
    wait_until(lambda: is_complete(server))


def test_a_changed_config_is_served_by_the_next_load(server):
    set_engine(server, "vocab=500,step_us=1000")
    with Client(server) as client:
        client.ask(streaming=True)
        client.until_running()
        load(server)
        assert errors_of(client.finals(1)) == set()
    assert max(completion(server.grpc, input_ids=PROMPT, request_output_len=200).ids) < 500
    set_engine(server, FAKE["fake_engine"])
    load(server)
    wait_until(lambda: is_complete(server))
    assert max(completion(server.grpc, input_ids=PROMPT, request_output_len=200).ids) >= 500


@pytest.mark.parametrize("model", with_all(FRONT_ENDS, ["ensemble"]))
def test_loading_a_front_end_does_not_affect_streams_of_the_engine(server, model):
    with Stream(server.grpc) as stream:
        stream.send(ENGINE, input_ids=PROMPT, request_output_len=700, end_id=-1, streaming=True)
        stream.receive()
        for _ in range(examples(1, all=2)):
            unload(server, model)
            wait_until(lambda: Footprint.of(server).stubs == 5)
            load(server, model)
        answers = list(stream.until_final())
    assert errors_of(answers) == set() and answers[-1].finish_reason == "LENGTH"
    tokens_of_all(server)
    wait_until(lambda: is_complete(server))


def test_requests_in_flight_of_a_front_end_finish_before_it_is_unloaded(server):
    with Client(server, "ensemble") as client:
        client.ask(streaming=True)
        client.until_running()
        unload(server, "ensemble")
        assert errors_of(client.finals(1)) == set()
    wait_until(lambda: Footprint.of(server).stubs == 5)
    load(server, "ensemble")
    tokens_of_all(server)


# ---------------------------------------------------------------- tests with their own servers


def slow_and_hanging() -> None:
    """A slow engine, and on the same server one that hangs."""
    with serve_fake(settings=SLOW, options=EXPLICIT) as server:
        unload_slow(server)
        set_engine(server, HANGING["fake_engine"])
        load(server)
        replace_hanging(server)


def unload_slow(server: TritonServer) -> None:
    """Running requests, a beam search and a waiting request; 400 tokens would take 40 seconds."""
    with Client(server, "ensemble") as client:
        client.ask(streaming=True)
        client.until_running()
        client.ask(beam_width=2)
        client.ask()
        client.until_taken()
        unload(server)
        answers = client.finals(3)
    assert [str(answer.error) for answer in answers] == ["the model is being unloaded"] * 3
    wait_until(lambda: has_no_engine(server))
    load(server)
    tokens_of_all(server)


def replace_hanging(server: TritonServer) -> None:
    """Load over a hanging engine, because Triton waits for requests in flight before it unloads."""
    with Client(server) as direct, Client(server, "ensemble") as by_front_end:
        direct.ask(streaming=True)
        direct.ask()
        by_front_end.ask()
        direct.until_taken()
        by_front_end.until_taken()
        set_engine(server, FAKE["fake_engine"])
        load(server)
        answers = direct.finals(2) + by_front_end.finals(1)
    assert [str(answer.error) for answer in answers] == ["the model is being unloaded"] * 3
    assert "the generation loop hangs" in server.log_text()
    tokens_of_all(server)
    wait_until(lambda: is_complete(server), timeout=TIMEOUT_S)


def demo_model() -> None:
    settings = {"max_tokens_in_paged_kv_cache": "4096"}
    with serve(dtype="float32", settings=settings, options=EXPLICIT) as server:
        tokens = tokens_of_all(server)
        footprints = []
        for _ in range(3):
            with Client(server) as client:
                client.ask(length=100, streaming=True)
                client.until_running()
                unload(server)
                assert errors_of(client.finals(1)) == set()
            wait_until(lambda: has_no_engine(server))
            load(server)
            assert tokens_of_all(server) == tokens
            wait_until(lambda: is_complete(server))
            footprints.append(Footprint.of(server))
        wait_until(lambda: Footprint.of(server).fits(footprints[1]))


Case = Callable[[], None]


@pytest.fixture(scope="module", autouse=True)
def case_runs(request: pytest.FixtureRequest, elsewhere) -> Iterator[dict[Case, Future[None]]]:
    """Run the selected slow cases at the same time, beside the tests above, because they mostly wait."""
    selected = {
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function) and "case" in item.fixturenames
    }
    with ThreadPoolExecutor() as pool:
        yield {case: pool.submit(case) for case in selected}


@pytest.mark.parametrize(
    "case",
    with_all([slow_and_hanging, demo_model], [slow_and_hanging]),
    ids=lambda case: case.__name__,
)
def test_requests_of_a_busy_engine_are_answered_when_it_is_unloaded(case_runs, case):
    case_runs[case].result()
