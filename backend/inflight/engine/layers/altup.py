"""AltUp, LAuReL and sparse gates, components of Gemma 3n's layers, in torch's operators.

A decoder with AltUp has several residual streams. Each of its layers reads and changes one of them, the active
stream, and the others follow by learned mixtures (Baykal et al., "Alternating Updates for Efficient Transformers",
2023). Every rank computes all streams.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import Tensor

from inflight.engine.collectives import Collectives
from inflight.engine.layers.layer_operations import apply_norm
from inflight.models import DecoderConfig
from inflight.models.decoder_config import AltUpConfig
from inflight.models.decoder_weights import AltUpWeights, LaurelWeights, Linear

_SMALLEST_SQUARE = 1e-5  # of a stream that is scaled to another's magnitude


class ResidualStreams:
    """The residual streams of a batch's rows, during one forward pass of a pipeline stage.

    Args:
        decoder: The decoder's configuration.
        layers: Weights of each layer of the stage.
        streams: All streams before the stage's first layer [rows, streams, hidden_size]: those of
            `split_streams`, or `all` of the previous stage.
    """

    def __init__(self, decoder: DecoderConfig, layers: list[AltUpWeights], streams: Tensor) -> None:
        assert decoder.altup is not None, "the decoder has several residual streams"
        self._config: AltUpConfig = decoder.altup
        self._decoder, self._streams = decoder, streams
        self._layers, self._index = layers, 0
        self._predict()

    @property
    def all(self) -> Tensor:
        """All streams [rows, streams, hidden_size]."""
        return self._streams

    @property
    def active(self) -> Tensor:
        """The active stream, the next layer's input [rows, hidden_size]; contiguous, as kernels need it."""
        return self._streams[:, self._config.active].contiguous()

    def end_layer(self, computed: Tensor, contribution: Callable[[Tensor], Tensor]) -> Tensor:
        """Correct all streams by a layer's output `computed` [rows, hidden_size]; return the next layer's input.

        `contribution` returns what is added to every stream but the first, given the corrected active stream.
        """
        weights = self._layers[self._index]
        active = self._config.active
        factors = weights.correction(self._route(computed, weights)) + 1
        self._streams = self._streams + factors[:, :, None] * (computed - self._streams[:, active])[:, None]
        scale = weights.output_scale if self._config.has_output_scale else 1
        self._streams[:, 1:] += contribution(self._streams[:, active] * scale)[:, None]
        self._index += 1
        self._predict()
        return self.active

    def join(self, projections: Linear) -> Tensor:
        """Return the mean of all streams after their projections, the decoder's output [rows, hidden_size]."""
        first, others = self._streams[:, :1], self._streams[:, 1:]
        matrices = torch.unflatten(projections.weight, 0, (-1, self._decoder.hidden_size))
        projected = torch.bmm(others.transpose(0, 1), matrices.transpose(1, 2)).transpose(0, 1)
        return torch.cat((first, _scaled_like(projected, first)), dim=1).mean(dim=1)

    def _predict(self) -> None:
        """Replace each stream by a mixture of all streams, before the next layer, if there is one."""
        if self._index == len(self._layers):
            return
        weights, count = self._layers[self._index], self._config.num_streams
        routed = self._route(self._streams[:, self._config.active], weights)
        mixtures = torch.unflatten(weights.prediction(routed), 1, (count, count))
        self._streams = torch.baddbmm(self._streams, mixtures, self._streams)

    def _route(self, x: Tensor, weights: AltUpWeights) -> Tensor:
        """Return the inputs of a layer's mixtures, [rows, streams], made from the active stream x."""
        normed = apply_norm(x, weights.router_norm, self._decoder.norm_eps) * self._decoder.hidden_size**-1
        return torch.tanh(weights.router(normed).float()).to(x.dtype)


def split_streams(embedded: Tensor, projections: Linear) -> Tensor:
    """Return all residual streams [rows, streams, hidden_size], made from token embeddings [rows, hidden_size]."""
    others = torch.unflatten(projections(embedded), 1, (-1, embedded.shape[1]))
    first = embedded[:, None]
    return torch.cat((first, _scaled_like(others, first)), dim=1)


def add_low_rank(x: Tensor, weights: LaurelWeights, eps: float) -> Tensor:
    """Return x [rows, hidden_size] plus its low-rank projection, after a norm (LAuReL)."""
    return x + apply_norm(weights.up(weights.down(x)), weights.norm, eps)


def drop_small_gates(gates: Tensor, sparsity: float, collectives: Collectives) -> None:
    """Subtract a threshold from an MLP's gates [rows, width], in place; negative results become 0.

    The threshold is the quantile `sparsity` of a normal distribution with mean and deviation of all gates of the
    row, of which each rank has an equal part.
    """

    def mean(values: Tensor) -> Tensor:
        total = values.sum(dim=1, keepdim=True)
        total = total if collectives.size == 1 else collectives.all_reduce(total)
        return total / (gates.shape[1] * collectives.size)

    wide = gates.float()
    center = mean(wide)
    deviation = mean((wide - center).square()).sqrt()
    gates.sub_(center + deviation * NormalDist().inv_cdf(sparsity)).relu_()


def _scaled_like(x: Tensor, model: Tensor) -> Tensor:
    """Return vectors [rows, n, hidden_size] scaled to the magnitude of their row's vector in `model` [rows, 1,
    hidden_size]."""
    magnitude = model.square().mean(dim=-1, keepdim=True).sqrt()
    own = x.square().mean(dim=-1, keepdim=True).clamp(min=_SMALLEST_SQUARE).sqrt()
    return x * magnitude / own
