"""The parts of layers in TensorRT's operations: norms, products, activations, experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inflight.engine.tensorrt.graph import Graph
from inflight.engine.tensorrt.weights import NetworkMatrix
from inflight.models import DecoderConfig
from inflight.models.decoder_config import ExpertsConfig
from inflight.models.decoder_weights import ExpertWeights, Norm

_MIN_SUM = 1e-20  # lower bound of the sum by which probabilities are divided


class Components:
    """The operations of one model's layers.

    Args:
        graph: The graph in which they are defined.
        config: The model, as this rank computes it.
        dtype: Data type of activations.
        num_ranks: Number of tensor-parallel ranks.
    """

    def __init__(self, graph: Graph, config: DecoderConfig, dtype: str, num_ranks: int) -> None:
        self.graph, self.config, self.dtype, self.num_ranks = graph, config, dtype, num_ranks

    def number(self, value: float, rank: int, dtype: str | None = None) -> Any:
        """Return a constant, shaped to be broadcast to tensors with `rank` axes."""
        return self.graph.constant(value, dtype or self.dtype, rank)

    def norm(self, x: Any, norm: Norm | None, name: str) -> Any:
        """Apply an RMSNorm or a LayerNorm to the last axis, in float32; without a norm, return x."""
        return x if norm is None else self.graph.cast(self.wide_norm(x, norm, name), self.dtype)

    def wide_norm(self, x: Any, norm: Norm, name: str) -> Any:
        """Apply a norm like `norm`, but leave the result in float32."""
        graph, wide, rank = self.graph, self.graph.cast(x, "float32"), len(x.shape)
        if norm.bias is not None:
            wide = graph.subtract(wide, graph.mean(wide))
        mean = graph.mean(graph.multiply(wide, wide))
        deviation = graph.sqrt(graph.add(mean, self.number(self.config.norm_eps, rank, "float32")))
        found = graph.multiply(
            graph.divide(wide, deviation), self.vector(norm.weight, f"{name}.weight", rank)
        )
        if norm.bias is not None:
            found = graph.add(found, self.vector(norm.bias, f"{name}.bias", rank))
        return found

    def vector(self, values: Tensor, name: str, rank: int, dtype: str = "float32") -> Any:
        """Return a weight vector, shaped to be broadcast along the last of `rank` axes."""
        wide = values.to(getattr(torch, dtype)).reshape((1,) * (rank - 1) + (-1,))
        return self.graph.weight(name, wide)

    def product(self, x: Any, matrix: NetworkMatrix, name: str) -> Any:
        """Return x Wᵀ, without the bias."""
        graph = self.graph
        if matrix.weight.dtype is torch.uint8:
            return self._int4_product(x, matrix, name)
        weight = graph.weight(f"{name}.weight", matrix.weight)
        if matrix.scales is not None:
            scales = graph.weight(f"{name}.scales", matrix.scales.float())
            weight = graph.dequantize(weight, scales, self.dtype, axis=0)
        return graph.multiply_matrices(x, weight)

    def _int4_product(self, x: Any, matrix: NetworkMatrix, name: str) -> Any:
        """Return x Wᵀ for 4-bit levels, where each group of levels may have an offset."""
        graph, scales, offsets = self.graph, matrix.scales, matrix.offsets
        assert scales is not None, "4-bit matrices have scales"
        (num_outputs, num_inputs), num_groups = (matrix.weight.shape[0], x.shape[-1]), scales.shape[1]
        if matrix.order is not None:
            x = graph.gather(x, graph.weight(f"{name}.order", matrix.order), axis=1)
        levels = graph.weight(f"{name}.weight", matrix.weight, "int4", (num_outputs, num_inputs))
        weight = graph.dequantize(levels, graph.weight(f"{name}.scales", scales), self.dtype, axis=None)
        y = graph.multiply_matrices(x, weight)
        if offsets is None:
            return y
        groups = graph.reshape(graph.cast(x, "float32"), -1, num_groups, num_inputs // num_groups)
        sums = graph.cast(graph.sum(groups, 2, keep=False), self.dtype)
        return graph.add(y, graph.multiply_matrices(sums, graph.weight(f"{name}.offsets", offsets)))

    def biased(self, y: Any, matrix: NetworkMatrix, name: str) -> Any:
        """Return y plus the matrix's bias."""
        if matrix.bias is None:
            return y
        return self.graph.add(y, self.vector(matrix.bias, f"{name}.bias", 2, self.dtype))

    def summed(self, x: Any) -> Any:
        """Return the sum over ranks."""
        return x if self.num_ranks == 1 else self.graph.all_reduce(x, self.num_ranks)

    def activate(self, inner: Any) -> Any:
        """Return the input of an MLP's second projection, given the first projection's output [..., columns]."""
        width = inner.shape[-1]
        if not self.config.gated_mlp:
            return self._activation(inner)
        graph, half = self.graph, width // 2
        gate, up = graph.columns(inner, 0, half), graph.columns(inner, half, width)
        return graph.multiply(self._activation(gate), up)

    def _activation(self, x: Any) -> Any:
        graph, kind = self.graph, self.config.activation
        if kind == "silu":
            return graph.multiply(x, graph.activation(x, "SIGMOID"))
        if kind == "relu2":
            positive = graph.activation(x, "RELU")
            return graph.multiply(positive, positive)
        return graph.activation(x, {"gelu": "GELU_ERF", "gelu_tanh": "GELU_TANH", "relu": "RELU"}[kind])

    def experts(self, x: Any, experts: ExpertWeights[NetworkMatrix], config: ExpertsConfig, name: str) -> Any:
        """Return the sum of all experts' outputs, weighted by the router, [rows, hidden_size]; most weights are 0.

        All experts form one wide MLP, whose inner values are multiplied by the weight of their expert: two
        products, which compute every expert for every row. Inner values of unused experts may be infinite, so they
        are replaced by 0 instead of multiplied by 0.
        """
        graph, held = self.graph, _num_held(config)
        inner = self.product(x, experts.up, f"{name}.up")
        inner = graph.reshape(inner, -1, held, 2 * config.intermediate_size)
        weighed = graph.unsqueeze(self._route(x, experts, config, name), 2)
        zero = self.number(0, 3, "float32")
        inner = graph.multiply(graph.cast(self.activate(inner), "float32"), weighed)
        inner = graph.select(graph.is_greater(weighed, zero), inner, zero)
        flat = graph.reshape(graph.cast(inner, self.dtype), -1, held * config.intermediate_size)
        return self.product(flat, experts.down, f"{name}.down")

    def _route(self, x: Any, experts: ExpertWeights[NetworkMatrix], config: ExpertsConfig, name: str) -> Any:
        """Return the weight of each expert for each row, float32 [rows, count]."""
        graph = self.graph
        router = NetworkMatrix(experts.router.weight, experts.router.bias)
        logits = self.biased(self.product(x, router, f"{name}.router"), router, f"{name}.router")
        chances = graph.softmax(graph.cast(logits, "float32"))
        _, chosen = graph.top_k(chances, config.num_per_token)
        is_chosen = graph.sum(graph.one_hot(chosen, config.count, "float32"), 1, keep=False)
        chances = graph.multiply(chances, is_chosen)
        if config.is_normalized:
            total = graph.maximum(graph.sum(chances, 1), self.number(_MIN_SUM, 2, "float32"))
            chances = graph.divide(chances, total)
        if config.result_scale != 1:
            chances = graph.multiply(chances, self.number(config.result_scale, 2, "float32"))
        return chances


def _num_held(config: ExpertsConfig) -> int:
    first, last = config.held or (0, config.count)
    return last - first
