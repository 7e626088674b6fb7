"""The requests for every system never change."""

from __future__ import annotations

import hashlib

import pytest

from benchmarks.measuring.workload import draw, warm_up


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "vocab_size", "count", "digest"),
    [
        ("w", 49_152, 64, "5e8b2ecddbf2c315"),
        ("w", 128_256, 16, "b56a1e8ae3dab8d2"),
        ("lone", 49_152, 4, "4e2afdcc1bef9744"),
        ("lone", 128_256, 4, "711d46519b4fa131"),
    ],
)
def test_the_requests_of_published_figures_do_not_change(name, vocab_size, count, digest):
    drawn = [(list(request.prompt), request.num_output_tokens) for request in draw(name, vocab_size, count)]
    assert hashlib.sha256(repr(drawn).encode()).hexdigest()[:16] == digest


def test_fewer_requests_are_a_prefix_of_more():
    assert draw("w", 512, 16) == draw("w", 512, 64)[:16]


def test_lengths_are_within_their_bounds_and_ids_within_the_vocabulary():
    requests = draw("w", 512, 200)
    assert all(32 <= len(request.prompt) <= 512 for request in requests)
    assert all(16 <= request.num_output_tokens <= 128 for request in requests)
    assert {token for request in requests for token in request.prompt} == set(range(10, 512))


def test_warm_up_is_all_requests_or_one_of_lone_requests():
    requests = draw("w", 512, 5)
    assert warm_up(requests, 5) == requests
    assert warm_up(requests, 1) == requests[:1]
