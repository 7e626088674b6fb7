"""In how many parts a model can be cut: for who loads it, and for who checks beforehand. Standard library only."""

from __future__ import annotations


def tensor_parallel_sizes(num_heads: int, num_kv_heads: int, intermediate_size: int) -> list[int]:
    """Numbers of ranks that can share every layer: each has whole heads, and an equal slice of the MLP.

    Where there are fewer key heads than ranks, several ranks hold the same one.
    """
    return [
        size
        for size in range(1, num_heads + 1)
        if num_heads % size == 0
        and intermediate_size % size == 0
        and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
    ]
