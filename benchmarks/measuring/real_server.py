"""Code shared by benchmarks of a real server: endless streams, the server's log with times, and its trace."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc

from inflight.batch_manager.recording import Begin, End, Header, decode
from inflight.server.launch import TritonServer

_LINE = re.compile(r"^I(\d\d)(\d\d) (\d\d):(\d\d):(\d\d\.\d+) (.*)$", re.M)


def open_streams(url: str, num_requests: int) -> tuple[grpc.InferenceServerClient, list[int]]:
    """Start endless requests on a stream; return the client, and a list that gets one item for each response."""
    responses: list[int] = []
    client = grpc.InferenceServerClient(url)
    client.start_stream(lambda result, error: responses.append(1))
    for number in range(num_requests):
        tensors = {
            "input_ids": np.array([[number + 1, 2, 3]], np.int32),
            "request_output_len": np.array([[4000]], np.int32),
            "streaming": np.array([[True]]),
        }
        inputs = []
        for name, value in tensors.items():
            inputs.append(grpc.InferInput(name, value.shape, "BOOL" if value.dtype == bool else "INT32"))
            inputs[-1].set_data_from_numpy(value)
        client.async_stream_infer("tensorrt_llm", inputs)
    return client, responses


def log_since(server: TritonServer, started: float) -> list[tuple[float, str]]:
    """Return (seconds since `started`, text) of the log's lines since this time, with quotes unescaped."""
    log = server.log_text().replace('\\"', '"')
    base = time.localtime(started)
    midnight = time.mktime((base.tm_year, base.tm_mon, base.tm_mday, 0, 0, 0, 0, 0, -1))
    lines = []
    for _, _, hours, minutes, seconds, text in _LINE.findall(log):
        when = midnight + 3600 * int(hours) + 60 * int(minutes) + float(seconds) - started
        if when >= 0:
            lines.append((when, text))
    return lines


class GrowingTrace:
    """A trace that is read while a server writes it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""

    def new_records(self, containing: bytes = b"") -> Iterator[Begin | End]:
        """Yield the records completed since the last call, decoding only lines that contain these bytes."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            if containing in line and not isinstance(record := decode(line), Header):
                yield record
