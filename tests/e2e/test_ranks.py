"""Several ranks of a real tritonserver answer like one, and clients get errors when a process is lost.

In orchestrator mode the model is unready until its engine is back; in leader mode the server ends.
"""

from __future__ import annotations

import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from inflight.server.config_text import set_parameters
from inflight.server.errors import ServeError
from inflight.server.launch import ServerOptions, TritonServer, serve
from inflight.server.repository import Wanted

from .clients import CONTROL, CONTROLLED, Answer, Stream, ask, completion, infer, wait_until
from .conftest import POST_PROCESSORS
from .rank_processes import Processes, shared_memory
from .retrying_clients import RetryingClients, ask_ranks

ENGINE = "tensorrt_llm"
SETTINGS = {
    "max_tokens_in_paged_kv_cache": "65536",
    "rank_timeout_ms": "20000",  # on a busy machine, a live process may be silent for seconds
    "logits_post_processor_module": str(POST_PROCESSORS),
}
PROMPT = [3, 1, 4, 1, 5]
PATIENCE_S = 300.0
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.fixture(scope="module")
def server(elsewhere, long_model) -> Iterator[TritonServer]:
    """Two ranks of the demo model, started by the model itself."""
    options = ServerOptions(tp=2, mode="orchestrator", client_apis=CONTROLLED)
    with serve(model=long_model, dtype="float32", settings=SETTINGS, options=options) as running:
        yield running


@pytest.fixture
def rested(server) -> None:
    """Reload the model before pauses get long: the pause before a restart grows with every loss in a row.

    The model is reloaded too if an earlier test has left it without an engine.
    """
    assert server.returncode is None, f"tritonserver has ended: {server.log_text()[-5000:]}"
    if server.log_text().count("the engine is lost") % 3 == 2 or not Readiness(server).is_ready():
        reload(server)


class Readiness:
    """Polls whether the model is ready."""

    def __init__(self, server: TritonServer) -> None:
        self.was_unready = threading.Event()
        self._url = f"http://{server.http}/v2/models/{ENGINE}/ready"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Readiness:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._closing.set()
        self._thread.join()

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self._url, timeout=5) as answer:
                return answer.status == 200
        except (OSError, urllib.error.HTTPError):
            return False

    def _ask(self) -> None:
        while not self._closing.wait(0.02):
            if not self.is_ready():
                self.was_unready.set()


class Clients:
    """Streams in flight, one to the engine's model and one through a front end."""

    def __init__(self, server: TritonServer) -> None:
        self._streams = [Stream(server.grpc), Stream(server.grpc)]
        direct, by_front_end = self._streams
        # The front end is first: its first response may be slow, while the engine's never is.
        by_front_end.send("ensemble", text_input="def f", max_tokens=30000, end_id=-1, stream=True)
        by_front_end.receive()
        direct.send(ENGINE, input_ids=PROMPT, request_output_len=30000, end_id=-1, streaming=True)
        direct.receive()

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_) -> None:
        for stream in self._streams:
            stream.client.stop_stream()
            stream.client.close()

    def finals(self) -> list[Answer]:
        """Return the final response of each stream."""
        return [self._final(stream) for stream in self._streams]

    @staticmethod
    def _final(stream: Stream) -> Answer:
        while True:
            _, answer = stream.receive(timeout=PATIENCE_S)
            if answer.final:
                return answer


def tokens(server: TritonServer) -> list[int]:
    return completion(server.grpc, input_ids=PROMPT, request_output_len=12).ids


def retrying_client(server: TritonServer) -> RetryingClients:
    return RetryingClients({"triton": lambda: ask_ranks(server.http)})


def unload(server: TritonServer) -> None:
    with grpc.InferenceServerClient(server.grpc) as client:
        client.unload_model(ENGINE, headers=CONTROL)
    wait_until(lambda: not {"mpirun", "rank 0", "rank 1", "stub"} & set(Processes.of(server).by_name))


def load(server: TritonServer) -> None:
    with grpc.InferenceServerClient(server.grpc) as client:
        client.load_model(ENGINE, headers=CONTROL)


def reload(server: TritonServer) -> None:
    unload(server)
    load(server)


def test_two_ranks_answer_like_one(server, exact_server):
    assert tokens(server) == tokens(exact_server)
    by_http = [
        infer(one.http, input_ids=PROMPT, request_output_len=12).as_numpy("output_ids").tolist()
        for one in (server, exact_server)
    ]
    assert by_http[0] == by_http[1]


def test_two_ranks_apply_post_processors_like_one(server, exact_server):
    """Both ranks call the post-processors; an error on both ends only the request at fault."""
    request = {"input_ids": PROMPT, "request_output_len": 12}
    for name in ("no_echo", "even_ids", "batched"):
        by_ranks, by_one = (
            completion(one.grpc, logits_post_processor_name=name, **request) for one in (server, exact_server)
        )
        assert by_ranks.ids == by_one.ids
    (failed,) = ask(server.grpc, logits_post_processor_name="raise_later", **request)
    assert "raised ValueError: client None has 10 tokens" in str(failed.error)
    assert tokens(server) == tokens(exact_server)


def test_two_ranks_follow_guides_and_wait_for_them_together(server, exact_server):
    """A failing guide ends its request on both ranks, and a held request starts on both."""
    request = {"input_ids": PROMPT, "request_output_len": 30, "runtime_top_p": 1.0, "random_seed": 3}
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "([a-f]{2,4} ){3}end"}
    by_ranks, by_one = (completion(one.grpc, **guide, **request) for one in (server, exact_server))
    assert by_ranks.ids == by_one.ids
    (refused,) = ask(server.grpc, **request, **{**guide, "guided_decoding_guide": "(a"})
    assert "unclosed group" in str(refused.error)
    assert tokens(server) == tokens(exact_server)


def test_ranks_write_their_log_past_mpirun(server):
    """mpirun never frees the output that it copies."""
    outputs = Processes.of(server).outputs
    assert outputs["rank 0"] == outputs["rank 1"] == outputs["mpirun"]


def test_statistics_of_the_ranks_are_on_the_metrics_page(server):
    def num_seen() -> float:
        page = urllib.request.urlopen(f"http://{server.metrics}/metrics").read().decode()
        lines = [line for line in page.splitlines() if line.startswith("inflight_output_tokens_count")]
        return sum(float(line.split()[-1]) for line in lines)

    before = num_seen()
    tokens(server)
    wait_until(lambda: num_seen() > before)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("rested")
@pytest.mark.parametrize(
    ("victim", "number", "is_busy"),
    [
        ("rank 1", KILL, True),
        ("rank 1", KILL, False),
        ("rank 0", KILL, True),
        ("mpirun", KILL, True),
        ("rank 1", STOP, True),
        ("rank 1", STOP, False),
        ("rank 0", STOP, True),
    ],
)
def test_an_orchestrated_engine_is_restarted_after_a_loss(server, victim, number, is_busy):
    before, tokens_before = Processes.of(server), tokens(server)
    num_before, memory_before = len(before.always_there), len(shared_memory(server))
    lost = [before.by_name[name] for name in ("rank 0", "rank 1", "mpirun", "stub")]
    lost += [before.by_name["guides"]] if "guides" in before.by_name else []
    retrying = retrying_client(server)
    with Readiness(server) as readiness:
        if is_busy:
            with Clients(server) as clients, retrying:
                retrying.wait_answered()
                before.signal(victim, number)
                finals = clients.finals()
                assert readiness.was_unready.wait(PATIENCE_S)
                retrying.wait_answered()
            assert all("lost" in str(answer.error) for answer in finals), finals
        else:
            before.signal(victim, number)
            assert readiness.was_unready.wait(PATIENCE_S)
            with retrying:  # a request before would have made the ranks busy
                retrying.wait_answered()
        wait_until(readiness.is_ready, timeout=PATIENCE_S)
    assert not retrying.wrong
    retrying.report(f"{victim} {number.name} {'busy' if is_busy else 'idle'}")
    assert tokens(server) == tokens_before
    wait_until(lambda: not set(lost) & Processes.of(server).all)
    wait_until(lambda: len(Processes.of(server).always_there) == num_before)
    wait_until(lambda: len(shared_memory(server)) == memory_before)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("rested")
def test_a_stopped_mpirun_disturbs_no_request_and_ends_with_its_ranks(server):
    before, expected = Processes.of(server), tokens(server)
    stream = Stream(server.grpc)
    stream.send(ENGINE, input_ids=PROMPT, request_output_len=200, end_id=-1, streaming=True)
    stream.receive()
    with retrying_client(server) as retrying:
        before.signal("mpirun", STOP)
        assert tokens(server) == expected
        assert list(stream.until_final())[-1].error is None
        retrying.wait_answered()
    assert not retrying.wrong and not retrying.num_repeated
    retrying.report("mpirun stopped")
    stream.client.close()
    reload(server)
    assert tokens(server) == expected
    old = {before.by_name[name] for name in ("rank 0", "rank 1", "mpirun")}
    wait_until(lambda: not old & Processes.of(server).all)


@pytest.mark.exhaustive
def test_loading_after_unloading_starts_other_ranks(server):
    before, expected = Processes.of(server), tokens(server)
    reload(server)
    assert tokens(server) == expected
    assert not set(before.by_name.values()) & set(Processes.of(server).by_name.values())


@pytest.mark.exhaustive
def test_a_load_over_a_loaded_model_replaces_its_ranks(server):
    before, expected = Processes.of(server), tokens(server)
    path = server.repository.path / ENGINE / "config.pbtxt"
    path.write_text(set_parameters(path.read_text(), {"iter_stats_max_iterations": "10"}))
    with grpc.InferenceServerClient(server.grpc) as client:
        client.load_model(ENGINE, headers=CONTROL)
    assert tokens(server) == expected
    wait_until(lambda: not set(before.by_name.values()) & Processes.of(server).all)


def test_unloading_ends_the_ranks(server):
    """It is the last test of this server: loading them again takes long."""
    ranks = {Processes.of(server).by_name[name] for name in ("rank 0", "rank 1", "mpirun")}
    unload(server)
    assert not ranks & Processes.of(server).all


# ---------------------------------------------------------------- tests with their own servers


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mode", "number"),
    [("orchestrator", KILL), ("orchestrator", STOP), ("leader", KILL), ("leader", STOP)],
)
def test_a_lost_stub_ends_the_server(elsewhere, mode, number):
    with serve(dtype="float32", settings=SETTINGS, options=ServerOptions(tp=2, mode=mode)) as server:
        processes = Processes.of(server)
        with Clients(server) as clients:
            processes.signal("stub", number)
            begun_s = time.monotonic()
            finals = clients.finals()
            print(f"stub {mode} {number.name}: errors after {time.monotonic() - begun_s:.1f} s")
        assert all(answer.error for answer in finals)
        wait_until(processes.have_ended, timeout=PATIENCE_S)
        wait_until(lambda: not shared_memory(server))
        wait_until(lambda: server.returncode is not None)
        print(f"stub {mode} {number.name}: ended after {time.monotonic() - begun_s:.1f} s")


@pytest.mark.exhaustive
def test_an_idle_leader_that_loses_a_rank_ends(elsewhere):
    """`test_leader` tests the same with requests in flight."""
    with serve(dtype="float32", settings=SETTINGS, options=ServerOptions(tp=2, mode="leader")) as server:
        processes = Processes.of(server)
        processes.signal("rank 1", KILL)
        wait_until(lambda: server.returncode is not None, timeout=PATIENCE_S)
        wait_until(processes.have_ended)
    assert not shared_memory(server)


@pytest.mark.exhaustive
def test_a_leaders_model_cannot_be_loaded_twice(elsewhere):
    options = ServerOptions(tp=2, mode="leader", model_control="explicit", client_apis=CONTROLLED)
    with (
        serve(dtype="float32", settings=SETTINGS, options=options) as server,
        grpc.InferenceServerClient(server.grpc) as client,
    ):
        client.unload_model(ENGINE, headers=CONTROL)
        wait_until(lambda: not {"rank 1", "stub"} & set(Processes.of(server).by_name))
        with pytest.raises(InferenceServerException, match="start the server again"):
            client.load_model(ENGINE, headers=CONTROL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["orchestrator", "leader"])
def test_a_failed_load_of_ranks_is_reported_and_leaves_no_process(elsewhere, mode):
    settings = Wanted(settings={"max_tokens_in_paged_kv_cache": "1"})
    server = TritonServer(ServerOptions(tp=2, mode=mode, wanted=settings))
    try:
        server.start()
        with pytest.raises(ServeError, match=r"ConfigError: .*max_tokens_in_paged_kv_cache"):
            server.wait_ready(60)
        wait_until(lambda: not Processes.of(server).all)
        wait_until(lambda: not shared_memory(server))
    finally:
        server.close()
