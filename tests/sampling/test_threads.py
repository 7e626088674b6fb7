"""The number of torch's threads while tokens are chosen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from inflight.sampling.threads import threads_for


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_few_logits_have_one_thread_and_many_have_all() -> None:
    with threads_for(torch.empty(32, 49152)):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with threads_for(torch.empty(64, 128_000)):
        assert torch.get_num_threads() == 3


def test_threads_are_restored_after_an_error() -> None:
    with pytest.raises(FloatingPointError), threads_for(torch.empty(1, 8)):
        raise FloatingPointError
    assert torch.get_num_threads() == 3


def test_sampling_on_another_device_does_not_change_threads() -> None:
    with threads_for(torch.empty(1, 8, device="meta")):
        assert torch.get_num_threads() == 3
