"""Estimates what a draft head's work costs, by the bytes of weights that are read."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from inflight.models import DecoderConfig
from inflight.models.loader import num_weight_bytes
from inflight.models.registry import ModelDescription

_logger = logging.getLogger(__name__)

_OVERHEAD_BYTES = {"cpu": 25e6, "cuda": 500e6}
"""Bytes of weights that are read in the time of a head's operations that are not products, for an entry or a
guess: measured on a CPU (0.7 ms), and guessed for a GPU (about 25 kernels)."""


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
    costs = DraftCosts(guess_cost(decoder, overhead), entry_cost(decoder, overhead))
    _logger.info(
        "the draft head takes an estimated %.2f of a token's time for each guess, and %.2f to read a token",
        costs.guess,
        costs.entry,
    )
    return costs


def guess_cost(decoder: DecoderConfig, overhead: float) -> float:
    """Return the time that the draft head takes to guess a token, relative to the model's forward pass.

    Estimated by the numbers of weights that a token uses, in layers and output projections.

    Args:
        decoder: The model with the head.
        overhead: Number of weights that are read in the time of a layer's operations that are not products.
    """
    width = decoder.hidden_size
    if (gemma4 := decoder.gemma4_head) is not None:
        layers = gemma4.layers
        products = _weights_of_layers(layers) + layers.hidden_size * (3 * width + gemma4.num_logits)
        return (products + layers.num_layers * overhead) / _weights_of_model(decoder)
    head = decoder.draft_layer
    return (_weights_of_layers(head) + width * head.vocab_size + overhead) / _weights_of_model(decoder)


def entry_cost(decoder: DecoderConfig, overhead: float) -> float:
    """Return the time that the draft head takes to store its entries for a token, relative to the model's forward
    pass.

    Estimated as `guess_cost`, for the projections of hidden states, queries, keys and values.
    """
    width = decoder.hidden_size
    if decoder.gemma4_head is not None:  # only the final norm of the model's output, some of the operations
        return (width + overhead / 4) / _weights_of_model(decoder)
    head = decoder.draft_layer
    num_joined, read_width = (2, width) if decoder.eagle is None else (3, 2 * width)
    products = num_joined * width * width + read_width * (head.query_size + 2 * head.kv_size)
    return (products + overhead) / _weights_of_model(decoder)


def _weights_of_model(decoder: DecoderConfig) -> int:
    """Return about how many weights a token uses, in layers and output projection."""
    return _weights_of_layers(decoder) + decoder.hidden_size * decoder.vocab_size


def _weights_of_layers(decoder: DecoderConfig) -> int:
    """Return about how many weights of the layers a token uses, as if attention and states were ordinary."""
    return sum(_weights_of_layer(decoder.at(layer), layer) for layer in range(decoder.num_layers))


def _weights_of_layer(sizes: DecoderConfig, layer: int) -> int:
    inner, experts = sizes.intermediate_size, sizes.experts
    kv_size = 0 if sizes.read_kv else sizes.kv_size
    if experts is not None and experts.layers[layer]:
        inner = experts.num_per_token * experts.intermediate_size + experts.shared_intermediate_size
    return sizes.hidden_size * (2 * sizes.query_size + 2 * kv_size + (2 + sizes.gated_mlp) * inner)
