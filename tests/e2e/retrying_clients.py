"""Clients that send one request after another to a server and repeat those that fail."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any

from .clients import wait_until

PATIENCE_S = 120.0
TIMEOUT_S = 10.0
"""After this a client repeats a request."""
PROMPT = [3, 1, 4, 1, 5]


class RetryingClients:
    """A thread for each function that sends a request and returns its answer.

    The answers to be expected are asked for when an object is made; the threads begin with the `with` block.

    Attributes:
        wrong: Answers that differ from the first ones.
        num_repeated: Requests that failed and were sent again.
        last_error: The client and the error of the last of these requests.
        longest_s: The longest time from a request's first attempt to its answer, in seconds.
    """

    def __init__(self, asking: Mapping[str, Callable[[], object]]) -> None:
        self._asking = asking
        self._expected = {name: ask() for name, ask in self._asking.items()}
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._send_on, args=(name,)) for name in self._asking]
        self.wrong: list[object] = []
        self.num_repeated = 0
        self.last_error = ""
        self.num_answers = dict.fromkeys(self._asking, 0)
        self.longest_s = 0.0

    def __enter__(self) -> RetryingClients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def wait_answered(self) -> None:
        """Wait until each client has had two more answers: the second request was sent after the call."""
        before = dict(self.num_answers)
        wait_until(lambda: all(self.num_answers[each] > before[each] + 1 for each in before), PATIENCE_S)

    def report(self, fault: str) -> None:
        """Print how long requests waited because of a fault."""
        print_longest(f"{fault}: repeated {self.num_repeated}", self.longest_s)

    def _send_on(self, name: str) -> None:
        while not self._is_over.wait(0.02):
            begun_s = time.monotonic()
            while not self._is_over.is_set():
                try:
                    answer = self._asking[name]()
                except (OSError, HTTPException) as error:
                    self.last_error = f"{name}: {error!r}"
                    self.num_repeated += 1
                    time.sleep(0.1)
                else:
                    if answer != self._expected[name]:
                        self.wrong.append((name, answer))
                    self.num_answers[name] += 1
                    break
            self.longest_s = max(self.longest_s, time.monotonic() - begun_s)


def print_longest(what: str, longest_s: float) -> None:
    print(f"{what}, longest {longest_s:.1f} s")


def ask_triton(address: str, num_tokens: int = 20, timeout_s: float = TIMEOUT_S) -> list[int]:
    url = f"http://{address}/v2/models/tensorrt_llm/generate"
    with post(url, timeout_s, input_ids=PROMPT, request_output_len=num_tokens) as answer:
        return json.loads(answer.read())["output_ids"]


def ask_ranks(address: str) -> list[int]:
    """Ask a server with several ranks, whose iterations may take a second on a busy machine."""
    return ask_triton(address, num_tokens=5, timeout_s=PATIENCE_S)


def post(url: str, timeout_s: float = TIMEOUT_S, /, **body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=timeout_s)
