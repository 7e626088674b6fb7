"""Faults to plant in picture spans, whose tokens attend to each other in both directions."""

from __future__ import annotations

import dataclasses

import pytest

from inflight.core.kv import block_keys
from inflight.core.kv.block_keys import CacheRules
from inflight.core.schedule import micro_batch_scheduler
from inflight.testing.simulation.rows_oracle import RowsOracle

Patch = pytest.MonkeyPatch


def span_divided_among_chunks(patch: Patch) -> None:
    """Plant a fault that the device notices too: the oracle of rows expects it."""
    patch.setattr(micro_batch_scheduler, "span_at", lambda *_: None)
    patch.setattr(RowsOracle, "_spans", lambda *_: [])


def key_of_a_spans_beginning(patch: Patch) -> None:
    """Plant a fault: a block's key does not cover the tokens after the block that its own attend to."""
    patch.setattr(block_keys, "span_at", lambda *_: None)


def beginning_of_another_span_copied(patch: Patch) -> None:
    """Plant a fault: a copied beginning of a block may be that of a picture that goes on otherwise."""
    content = CacheRules.content
    patch.setattr(
        CacheRules, "content", lambda rules, *args: content(dataclasses.replace(rules, spans=()), *args)
    )


FAULTS_OF_SPANS = [span_divided_among_chunks, key_of_a_spans_beginning, beginning_of_another_span_copied]
