"""Allocation of large memory, and of memory that is reused."""

from __future__ import annotations

import torch

from inflight.engine.host_memory import Arena, Recycled, zeros


def test_each_tensor_of_zeros_has_memory_of_its_own():
    first, second = zeros((3, 5), torch.bfloat16), zeros((3, 5), torch.bfloat16)
    first += 1
    assert first.shape == (3, 5) and not second.any()
    assert zeros((0, 5), torch.float32).shape == (0, 5)


def test_tensors_of_an_arena_are_aligned_to_cache_lines():
    arena = Arena()
    tensors = [arena.empty(count, torch.int8) for count in (1, 64, 65, 100 << 20, 7)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [tensor.data_ptr() % 64 for tensor in tensors] == [0] * 5
    assert [bool((tensor == number).all()) for number, tensor in enumerate(tensors)] == [True] * 5


def test_memory_is_reused_when_no_view_is_left():
    recycled = Recycled()
    first = recycled.empty((4, 5), torch.float32)
    place, view = first.data_ptr(), first[1:2]
    assert recycled.empty((4, 5), torch.float32).data_ptr() != place
    del first
    assert recycled.empty((2, 5), torch.float32).data_ptr() != place
    del view
    assert recycled.empty((2, 5), torch.float32).data_ptr() == place
    assert recycled.empty((0, 5), torch.float32).shape == (0, 5)


def test_memory_that_is_too_small_is_replaced():
    recycled = Recycled()
    for size in (10, 1000, 100_000, 1000, 10):
        recycled.empty((size,), torch.float32)
    assert len(recycled._memories) == 1
