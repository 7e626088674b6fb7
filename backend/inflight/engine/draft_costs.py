"""Estimates what a draft head's work costs, by the bytes of weights that are read."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from inflight.models.loader import num_weight_bytes
from inflight.models.registry import ModelDescription

_logger = logging.getLogger(__name__)

_OVERHEAD_BYTES = {"cpu": 25e6, "cuda": 500e6}
"""Bytes of weights that are read in the time of a head's operations that are no products, for an entry or a guess:
measured on a CPU (0.7 ms), and guessed for a GPU (about 25 kernels)."""


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """Times of a draft head's work, relative to a forward pass; see `EngineLimits`."""

    guess: float = 0.0
    entry: float = 0.0


NO_COSTS = DraftCosts()


def find_draft_costs(model: ModelDescription, num_bytes: int, device: torch.device) -> DraftCosts:
    """Return the costs of a model with a draft head, whose weights take `num_bytes` on all ranks together."""
    decoder = model.decoder
    num_weights = num_weight_bytes(model, torch.int8, torch.int8)
    overhead = _OVERHEAD_BYTES[device.type] * num_weights / num_bytes
    costs = DraftCosts(decoder.guess_cost(overhead), decoder.entry_cost(overhead))
    _logger.info(
        "the draft head takes an estimated %.2f of a token's time for each guess, and %.2f to read a token",
        costs.guess,
        costs.entry,
    )
    return costs
