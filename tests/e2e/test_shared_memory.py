"""A server with a small /dev/shm: responses that do not fit are refused without effect on others.

The server runs in a mount namespace of its own, where /dev/shm is a tmpfs of a container's default size.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from .clients import Answer, Stream, ask, unary, wait_until

SIZE_MIB = 48  # six models use 4 MiB each from the start
NEW_TOKENS = 900  # 10.5 MiB of logits
MOUNT = f'mount -t tmpfs -o size={SIZE_MIB}m tmpfs /dev/shm && exec "$0" "$@"'


@dataclass(frozen=True)
class SmallServer:
    grpc: str
    shared_memory: Path


def with_a_small_dev_shm(*command: str) -> list[str]:
    return ["unshare", "--mount", "sh", "-c", MOUNT, *command]


def permitted() -> bool:
    if not shutil.which("unshare"):
        return False
    return subprocess.run(with_a_small_dev_shm("true"), capture_output=True, timeout=10).returncode == 0


@pytest.fixture(scope="module")
def server() -> Iterator[SmallServer]:
    if not permitted():
        pytest.skip("mounting a small /dev/shm needs the right to: run as root")
    ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--no-openai"]
    options = [*ports, "--set", "enable_state_requests=true"]
    command = with_a_small_dev_shm(sys.executable, "-m", "inflight.server", *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
        reader.start()
        try:
            wait_until(lambda: process.poll() is not None or ready(lines), timeout=120)
            match = ready(lines)
            assert match, "".join(lines)
            yield SmallServer(match[1], Path("/proc", str(process.pid), "root", "dev", "shm"))
        finally:
            process.terminate()
            process.wait(60)
            reader.join(10)


def ready(lines: list[str]) -> re.Match[str] | None:
    return re.search(r"READY .*grpc=(\S+)", "".join(lines))


def request(new_tokens: int = NEW_TOKENS, prompt_tokens: int = 100, **tensors) -> dict[str, np.ndarray]:
    """Return a request that runs to its length limit; prompt and output have at most 1,024 tokens."""
    integers = {"request_output_len": new_tokens, "end_id": -1}
    made = {name: np.array([[value]], np.int32) for name, value in integers.items()}
    made["input_ids"] = np.arange(10, 10 + prompt_tokens, dtype=np.int32)[None]
    for name, value in tensors.items():
        made[name] = np.array([[value]], np.bool_ if isinstance(value, bool) else np.int32)
    return made


def fitting_request() -> dict[str, np.ndarray]:
    wanted = {"return_context_logits": True, "return_generation_logits": True, "return_log_probs": True}
    return request(300, prompt_tokens=600, **wanted)


def test_a_response_that_fits_is_sent_completely(server) -> None:
    answer = unary(server.grpc, **fitting_request())
    assert answer.as_numpy("context_logits").shape == (1, 600, 3072)
    assert answer.as_numpy("generation_logits").shape == (1, 1, 300, 3072)
    ids = answer.as_numpy("output_ids")[0, 0, -300:]
    logits = answer.as_numpy("generation_logits")[0, 0].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert log_probs.argmax(-1).tolist() == ids.tolist()
    np.testing.assert_allclose(
        log_probs[np.arange(300), ids], answer.as_numpy("output_log_probs")[0, 0], atol=1e-4
    )


@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_infer"])
def test_a_lack_of_shared_memory_at_sending_is_an_error_for_that_client_only(server, model: str) -> None:
    """Requests of higher priority take all places of the batch until /dev/shm is full."""
    names = [f"ahead {number}" for number in range(40)]
    filler = server.shared_memory / "filler"
    with Stream(server.grpc) as ahead, Stream(server.grpc) as stream:
        for name in names:
            ahead.send("tensorrt_llm", name, **request(100, num_return_sequences=64, streaming=True))
        ahead.receive()
        stream.send(model, **request(return_generation_logits=True), priority=0.0, client_id=9)
        wait_until(lambda: 9 in [waiting["client_id"] for waiting in waiting_requests(server)])
        try:
            with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(1 << 20)):
                    pass
            for name in names:
                ahead.send("tensorrt_llm", name, stop=True)
            assert [answer.error for _, answer in ahead.until_all_final() if answer.error] == []
            (error,) = [answer.error for _, answer in stream.until_all_final()]
        finally:
            filler.unlink()
    assert "--shm-size" in str(error)


def waiting_requests(server) -> list[dict]:
    (answer,) = ask(server.grpc, state=True)
    return json.loads(answer.outputs["state"].item())["batcher"]["state"]["waiting"]


def test_a_response_larger_than_shared_memory_is_refused_with_the_option_to_set(server) -> None:
    with pytest.raises(InferenceServerException) as caught:
        unary(server.grpc, **request(num_return_sequences=8, return_generation_logits=True))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    for word in ("84.4 MiB", "generation_logits", f"{SIZE_MIB}.0 MiB", "--shm-size", "request_output_len"):
        assert word in str(caught.value)


def test_a_response_larger_than_free_shared_memory_is_unavailable(server) -> None:
    with pytest.raises(InferenceServerException) as caught:
        unary(server.grpc, **request(num_return_sequences=3, return_generation_logits=True))
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    assert "free" in str(caught.value) and "--shm-size" in str(caught.value)


def test_a_response_larger_than_a_grpc_message_is_refused(server) -> None:
    with pytest.raises(InferenceServerException, match="2 GiB") as caught:
        unary(server.grpc, **request(num_return_sequences=256, return_generation_logits=True))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_logits_that_do_not_fit_at_once_can_be_streamed(server) -> None:
    answers = ask(
        server.grpc, streaming=True, **request(num_return_sequences=4, return_generation_logits=True)
    )
    assert not [answer.error for answer in answers if answer.error]
    rows = sum(a.outputs["generation_logits"].shape[2] for a in answers if "generation_logits" in a.outputs)
    assert rows == 4 * NEW_TOKENS


def test_requests_of_one_size_share_the_shared_memory(server) -> None:
    """Together they are larger than /dev/shm; they are sent one after another."""
    with Stream(server.grpc) as stream:
        for _ in range(6):
            stream.send("tensorrt_llm", **request(return_generation_logits=True))
        shapes = []
        while len(shapes) < 6:
            _, answer = stream.receive()
            assert answer.error is None
            if "generation_logits" in answer.outputs:
                shapes.append(answer.outputs["generation_logits"].shape)
    assert shapes == [(1, 1, NEW_TOKENS, 3072)] * 6


def test_streams_in_flight_continue_while_others_are_refused_and_answered(server) -> None:
    alone = tokens_of(ask(server.grpc, streaming=True, **request(400)))
    with Stream(server.grpc) as stream:
        stream.send("tensorrt_llm", **request(400, streaming=True))
        answers = [stream.receive()[1]]
        for sequences in (8, 3):
            with pytest.raises(InferenceServerException, match="--shm-size"):
                unary(server.grpc, **request(num_return_sequences=sequences, return_generation_logits=True))
        again = unary(server.grpc, **fitting_request())  # a response that fitted once fits again
        assert again.as_numpy("context_logits").shape == (1, 600, 3072)
        answers += [answer for _, answer in stream.until_all_final()]
    assert tokens_of(answers) == alone
    assert len(alone) == 400
    with grpc.InferenceServerClient(server.grpc) as client:
        assert client.is_server_live()


def tokens_of(answers: list[Answer]) -> list[int]:
    assert not [answer.error for answer in answers if answer.error]
    return [token for answer in answers for token in answer.ids]


def test_an_input_that_does_not_fit_is_an_error_without_the_regions_name(server) -> None:
    """tritonserver itself answers with the error, before a model gets the request."""
    tensors = request(new_tokens=1)
    tensors["draft_logits"] = np.zeros((1, 2, 16 << 20 >> 1), np.float32)
    with pytest.raises(InferenceServerException, match=r"shared memory pool size for key '…'"):
        unary(server.grpc, **tensors)
    assert unary(server.grpc, **request(new_tokens=3)).as_numpy("output_ids").shape[-1] == 103
