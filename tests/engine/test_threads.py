"""The number of threads of torch and of compiled layers."""

from __future__ import annotations

import logging

import pytest

from inflight.engine import capacity
from inflight.engine.capacity import default_threads, set_threads
from inflight.processors import Processors

CPUS = tuple(range(8))


@pytest.mark.parametrize(
    ("of_torch", "processors", "expected"),
    [
        (8, Processors(CPUS, CPUS), 8),
        (8, Processors(CPUS, CPUS[:4]), 4),
        (8, Processors(CPUS, CPUS, quota=3.5), 3),
        (1, Processors(CPUS, CPUS), 1),
    ],
    ids=["cores", "two processors a core", "quota", "torch's own setting"],
)
def test_threads_follow_torch_the_cores_and_the_quota(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    of_torch: int,
    processors: Processors,
    expected: int,
) -> None:
    was_set = [of_torch]
    monkeypatch.setattr(Processors, "here", lambda: processors)
    monkeypatch.setattr(capacity.torch, "get_num_threads", lambda: was_set[-1])
    monkeypatch.setattr(capacity.torch, "set_num_threads", was_set.append)
    assert default_threads() == expected
    with caplog.at_level(logging.INFO):
        set_threads(None)
        set_threads(9)
        set_threads(2)
    assert list(dict.fromkeys(was_set)) == list(dict.fromkeys([of_torch, expected, 9, 2]))
    assert caplog.messages == [
        f"{expected} threads on the CPU: {processors}",
        f"engine_threads is 9, but this process may use {processors}: "
        "more threads than processors slow each other down",
        f"2 threads on the CPU: {processors}",
    ]
