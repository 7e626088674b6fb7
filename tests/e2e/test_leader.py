"""Leader mode with a real engine: rank 0 is Triton's process of the model, under mpirun with the workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from inflight.server import runtime_directory
from inflight.server.launch import ServerOptions, TritonServer, serve
from tests.commands import command

from .clients import Stream, ask, completion
from .conftest import REPOSITORY
from .footprint import folder_of, left_of
from .rank_processes import Processes

LEADER = ServerOptions(tp=2, mode="leader", exit_timeout_s=300)
SETTINGS = {"max_tokens_in_paged_kv_cache": "16384"}
PROMPTS = ([3, 1, 4, 1, 5], list(range(40, 90)))


def workers(folder: Path) -> list[int]:
    """Return process ids of the other ranks of a server, by its private folder."""
    found = []
    for process in runtime_directory.find_processes(folder):
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        if words[1:3] == [b"-m", b"inflight.worker"]:
            found.append(process.pid)
    return found


def test_ranks_under_one_mpirun_answer_like_one_rank_and_end_in_order(elsewhere, exact_server):
    with serve(dtype="float32", settings=SETTINGS, options=LEADER) as leader:
        assert len(workers(folder_of(leader))) == 1
        outputs = {os.readlink(f"/proc/{leader.pid}/fd/{number}") for number in (1, 2)}
        assert outputs == {Processes.of(leader).outputs["mpirun"]}  # mpirun does not copy the log
        assert_equal_answers(leader, exact_server)
        with Stream(leader.grpc) as stream:
            stream.send(
                "tensorrt_llm", input_ids=[1, 2, 3], request_output_len=100, end_id=-1, streaming=True
            )
            stream.receive()
            assert leader.shut_down() is True
            *_, last = stream.until_final()
        assert last.finish_reason == "LENGTH"
    assert left_of(folder_of(leader)) == []


def assert_equal_answers(leader: TritonServer, exact_server: TritonServer) -> None:
    for prompt in PROMPTS:
        request = {"input_ids": prompt, "request_output_len": 24, "end_id": -1}
        assert completion(leader.grpc, **request).ids == completion(exact_server.grpc, **request).ids
    text = {"text_input": "Once upon a time", "max_tokens": 12}
    answers = [ask(server.grpc, "ensemble", **text)[-1] for server in (leader, exact_server)]
    assert answers[0].text == answers[1].text


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_ends_the_server_after_all_requests_are_answered(elsewhere, long_model, number):
    settings = ("--set", "max_tokens_in_paged_kv_cache=65536", "--set", "rank_timeout_ms=20000")
    ranks = ("--model", str(long_model), "--tp", "2", "--mode", "leader", "--restarts", "0")
    with command(REPOSITORY, *ranks, *settings) as serving:
        ready, folder = serving.ready_line(), serving.folder()
        (worker,) = workers(folder)
        with Stream(ready["grpc"]) as direct, Stream(ready["grpc"]) as by_front_end:
            direct.send("tensorrt_llm", input_ids=[1, 2], request_output_len=30000, end_id=-1, streaming=True)
            by_front_end.send("ensemble", text_input="def f", max_tokens=30000, end_id=-1, stream=True)
            for stream in (direct, by_front_end):
                stream.receive()
            os.kill(worker, number)
            finals = [list(stream.until_final())[-1] for stream in (direct, by_front_end)]
        assert all("rank 1 of 2" in str(last.error) for last in finals), finals
        _, errors = serving.process.communicate(timeout=300)
    assert serving.process.returncode == 1
    assert "serve: tritonserver ended" in errors
    assert left_of(folder) == []
