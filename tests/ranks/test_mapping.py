"""Ranks, stages and layers, as TensorRT-LLM numbers them."""

from __future__ import annotations

import pytest

from inflight.errors import ConfigError
from inflight.ranks.topology import Mapping


def test_ranks_of_a_stage_have_consecutive_numbers():
    places = [(m.pp_rank, m.tp_rank) for m in (Mapping(2, 3, rank) for rank in range(6))]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [Mapping(2, 3, rank).is_first_stage for rank in range(6)] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    assert [Mapping(2, 3, rank).is_last_stage for rank in range(6)] == [
        False,
        False,
        False,
        False,
        True,
        True,
    ]


def test_each_layer_is_on_exactly_one_stage():
    assert [Mapping(1, 3, rank).layers(8) for rank in range(3)] == [(0, 3), (3, 6), (6, 8)]
    assert Mapping().layers(5) == (0, 5)


@pytest.mark.parametrize(
    ("num_layers", "first_undivided", "stages"),
    [
        (6, 3, [(0, 3), (3, 6)]),
        (6, 5, [(0, 3), (3, 6)]),
        (6, 2, [(0, 2), (2, 6)]),
        (9, 5, [(0, 3), (3, 5), (5, 9)]),
        (9, 6, [(0, 3), (3, 6), (6, 9)]),
        (9, 2, [(0, 1), (1, 2), (2, 9)]),
        (6, 0, [(0, 6)]),
    ],
)
def test_layers_that_cannot_be_divided_are_on_the_last_stage(
    num_layers: int, first_undivided: int, stages: list[tuple[int, int]]
) -> None:
    ranks = [Mapping(1, len(stages), rank) for rank in range(len(stages))]
    assert [rank.layers(num_layers, first_undivided) for rank in ranks] == stages


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "rank", "message"),
    [
        (0, 1, 0, "tensor_parallel_size is 0, expected at least 1"),
        (1, -1, 0, "pipeline_parallel_size is -1, expected at least 1"),
        (2, 2, 4, "rank is 4, expected 0 to 3: .*_size 2 times pipeline_parallel_size 2 makes 4 ranks"),
    ],
)
def test_impossible_mappings_are_refused(tp_size: int, pp_size: int, rank: int, message: str):
    with pytest.raises(ConfigError, match=message):
        Mapping(tp_size, pp_size, rank)


def test_a_stage_without_layers_is_refused():
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 4, but the model has 3 layers only"):
        Mapping(1, 4, 0).layers(3)
    with pytest.raises(
        ConfigError, match=r"pipeline_parallel_size is 4, expected at most 3: layers 2 to 5 must"
    ):
        Mapping(1, 4, 0).layers(6, 2)
