"""Division of a machine's cores, memory and GPUs among ranks."""

from __future__ import annotations

import pytest

from inflight.errors import ConfigError
from inflight.ranks.topology import Placement
from tests.ranks.peers import make_host


def of_all(*hosts, **more) -> list[Placement]:
    return [Placement.of(rank, hosts, **more) for rank in range(len(hosts))]


def test_ranks_are_numbered_in_order_on_each_machine():
    places = of_all(*(make_host(rank, name) for rank, name in enumerate(("ant", "bee", "ant", "bee", "ant"))))
    assert [place.local_rank for place in places] == [0, 0, 1, 1, 2]
    assert [place.ranks_on_host for place in places] == [3, 2, 3, 2, 3]


def test_network_namespaces_do_not_multiply_a_machine():
    assert [place.local_rank for place in of_all(make_host(network=1), make_host(network=2))] == [0, 1]


@pytest.mark.parametrize(
    ("cores", "threads"),
    [
        ([range(16)] * 2, [8, 8]),
        ([range(16)] * 3, [5, 5, 5]),
        ([range(3)] * 3, [1, 1, 1]),
        ([range(2)] * 4, [1, 1, 1, 1]),
        ([range(8), range(8, 16)], [8, 8]),
        ([range(1), range(1, 2)], [1, 1]),
        ([range(4), range(8)], [2, 6]),
    ],
)
def test_a_core_is_divided_among_the_ranks_that_may_use_it(cores, threads):
    hosts = [make_host(rank, cores=tuple(own)) for rank, own in enumerate(cores)]
    assert [place.num_threads for place in of_all(*hosts)] == threads
    assert [place.num_threads for place in of_all(*hosts, engine_threads=3)] == [3] * len(hosts)


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (20, 8), (10, 5), (3.5, 1), (0.5, 1)])
def test_a_quota_is_divided_among_the_ranks_of_a_machine(quota, threads):
    hosts = [make_host(rank, cores=tuple(range(16)), quota=quota) for rank in range(2)]
    assert [place.num_threads for place in of_all(*hosts)] == [threads] * 2


def test_cores_of_other_machines_are_ignored():
    assert [place.num_threads for place in of_all(make_host(name="ant"), make_host(name="bee"))] == [2, 2]


@pytest.mark.parametrize(
    ("num_gpus", "ids", "devices"),
    [
        (0, (), ["cpu", "cpu"]),
        (4, (), ["cuda:0", "cuda:1"]),
        (4, (3, 1), ["cuda:3", "cuda:1"]),
        (4, (3, 1, 2), ["cuda:3", "cuda:1"]),
    ],
)
def test_every_rank_has_a_gpu_of_its_own(num_gpus, ids, devices):
    assert [place.device(num_gpus, ids) for place in of_all(make_host(), make_host())] == devices


@pytest.mark.parametrize(
    ("num_gpus", "ids", "message"),
    [
        (1, (), "the machine has 1 GPUs for 2 ranks"),
        (4, (2,), "gpu_device_ids has 1 GPUs for 2 ranks"),
        (4, (2, 2), r"gpu_device_ids is \[2, 2\]: every rank needs a GPU of its own"),
        (2, (0, 2), "gpu_device_ids has 2, but the machine's GPUs are 0 to 1"),
        (0, (0, 1), "gpu_device_ids has 0, but the machine has no GPU"),
    ],
)
def test_too_few_gpus_are_refused(num_gpus, ids, message):
    with pytest.raises(ConfigError, match=message):
        of_all(make_host(), make_host())[0].device(num_gpus, ids)
