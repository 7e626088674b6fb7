"""A thin layer over TensorRT's network definition: operations on tensors, inputs, outputs and weights.

Tensors are TensorRT's ITensor, with the type Any. A named dimension differs from batch to batch. TensorRT does not
copy weights, so the graph keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from inflight.engine.tensorrt.sidecar import Alias, PlanTensor, Profile, ShapeRange
from inflight.errors import ConfigError
from inflight.sampling.transfer import to_list

_TYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "float8_e4m3fn": "FP8",
    "int64": "INT64",
    "int32": "INT32",
    "int8": "INT8",
    "int4": "INT4",
    "bool": "BOOL",
}
"""TensorRT's names of torch's types and of int4."""

Dimension = int | str
"""A size, or the name of a dimension that an optimization profile bounds."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The range of a named dimension."""

    dimension: str
    min: int
    opt: int
    max: int


@dataclass(frozen=True, slots=True)
class Constant:
    """The memory of a constant, which TensorRT reads.

    Attributes:
        memory: A contiguous CPU tensor; for int4 uint8, two values per byte, the lower half first.
        dtype: See `PlanTensor.dtype`.
        shape: Shape in elements.
    """

    memory: torch.Tensor
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Graph:
    """A network under construction.

    Args:
        module: The TensorRT module.
        logger: The result of `module.make_logger`.
        has_weight_inputs: Whether `weight` makes inputs instead of constants.

    Attributes:
        builder: TensorRT's builder.
        network: TensorRT's network definition.
        constants: Constants by the name of their layer, as TensorRT does not return constants of bfloat16, float8
            and int4.
        weights: Weights that are inputs, by name.
        inputs: The inputs in the order of their definition.
        outputs: The outputs in the order of their definition.
        shapes: Shapes of the inputs, with named dimensions.
        aliases: Outputs that share the memory of an input, which the network changes in place.
    """

    module: Any
    logger: Any
    has_weight_inputs: bool = False
    constants: dict[str, Constant] = field(default_factory=dict[str, Constant])
    weights: dict[str, Constant] = field(default_factory=dict[str, Constant])
    inputs: list[PlanTensor] = field(default_factory=list[PlanTensor])
    outputs: list[PlanTensor] = field(default_factory=list[PlanTensor])
    shapes: dict[str, tuple[Dimension, ...]] = field(default_factory=dict[str, tuple[Dimension, ...]])
    aliases: list[Alias] = field(default_factory=list[Alias])

    def __post_init__(self) -> None:
        trt = self.module
        self.builder = trt.Builder(self.logger)
        flags = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        self.network = self.builder.create_network(0 if flags is None else 1 << int(flags))
        self._small: dict[tuple[Any, ...], Any] = {}

    # Inputs, outputs, constants

    def input(self, name: str, dtype: str, shape: Sequence[Dimension]) -> Any:
        """Define an input of the network."""
        fixed = tuple(-1 if isinstance(size, str) else size for size in shape)
        self.inputs.append(PlanTensor(name, dtype, fixed))
        self.shapes[name] = tuple(shape)
        return self._checked(self.network.add_input(name, self.type(dtype), fixed), name)

    def output(self, name: str, tensor: Any, alias_of: str | None = None) -> None:
        """Define a tensor as an output; `alias_of` is the input whose memory it shares."""
        tensor.name = name
        self.network.mark_output(tensor)
        self.outputs.append(PlanTensor(name, self.type_name(tensor.dtype), tuple(tensor.shape)))
        if alias_of is not None:
            self.aliases.append(Alias(alias_of, name))

    def weight(
        self, name: str, tensor: torch.Tensor, dtype: str | None = None, shape: Sequence[int] | None = None
    ) -> Any:
        """Define a weight of the model: a constant, or an input named weight.NAME.

        For int4, `tensor` is uint8 [..., columns / 2], and `dtype` and `shape` must be given.
        """
        constant = _constant(tensor, dtype, shape)
        if not self.has_weight_inputs:
            return self._add_constant(name, constant)
        name = f"weight.{name}"
        self.weights[name] = constant
        return self.input(name, constant.dtype, constant.shape)

    def constant(self, value: torch.Tensor | Iterable[Any] | float, dtype: str, rank: int = 0) -> Any:
        """Define a constant that is not a weight; a single number gets `rank` axes of size 1, for broadcasting."""
        tensor = (
            value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=getattr(torch, dtype))
        )
        if tensor.dim() == 0:
            tensor = tensor.reshape((1,) * rank)
        if tensor.numel() > 16:
            return self._add_constant(f"constant_{len(self.constants)}", _constant(tensor))
        key = (dtype, tuple(tensor.shape), *to_list(tensor.flatten()))
        if key not in self._small:
            self._small[key] = self._add_constant(f"constant_{len(self.constants)}", _constant(tensor))
        return self._small[key]

    def _add_constant(self, name: str, constant: Constant) -> Any:
        trt, memory = self.module, constant.memory
        count = int(np.prod(constant.shape, dtype=np.int64))
        if count == 0:
            raise ConfigError(f"{name} is empty on this rank, expected fewer ranks")
        weights = trt.Weights(self.type(constant.dtype), memory.data_ptr(), count)
        layer = self._checked(self.network.add_constant(constant.shape, weights), name)
        layer.name = name
        self.constants[name] = constant
        return layer.get_output(0)

    # Shapes

    def reshape(self, x: Any, *shape: int) -> Any:
        """Change the shape; at most one of the sizes is -1."""
        layer = self._checked(self.network.add_shuffle(x), "reshape")
        layer.zero_is_placeholder = False  # a batch may have no chunks
        layer.reshape_dims = shape
        return layer.get_output(0)

    def transpose(self, x: Any, *axes: int) -> Any:
        """Permute the axes."""
        layer = self._checked(self.network.add_shuffle(x), "transpose")
        layer.first_transpose = axes
        return layer.get_output(0)

    def unsqueeze(self, x: Any, *axes: int) -> Any:
        """Insert axes of size 1 at these positions of the result."""
        return self._out(self.network.add_unsqueeze(x, self.constant(axes, "int64")), "unsqueeze")

    def concat(self, tensors: Sequence[Any], axis: int) -> Any:
        """Concatenate along an axis."""
        if len(tensors) == 1:
            return tensors[0]
        layer = self._checked(self.network.add_concatenation(list(tensors)), "concatenation")
        layer.axis = axis
        return layer.get_output(0)

    def columns(self, x: Any, begin: int, end: int) -> Any:
        """Return a slice of the last axis."""
        rank = len(x.shape)
        if (begin, end) == (0, x.shape[-1]):
            return x
        is_kept = self.constant([1] * (rank - 1) + [0], "int64")
        width = self.constant([0] * (rank - 1) + [end - begin], "int64")
        shape = self.add(self.multiply(self.shape(x), is_kept), width)
        start = (0,) * (rank - 1) + (begin,)
        layer = self._checked(self.network.add_slice(x, start, (1,) * rank, (1,) * rank), "slice")
        layer.set_input(2, shape)
        return layer.get_output(0)

    def shape(self, x: Any) -> Any:
        """Return the shape, int64 [rank]."""
        return self._out(self.network.add_shape(x), "shape")

    def gather(self, x: Any, indices: Any, axis: int = 0) -> Any:
        """Gather `indices` along one axis, which is replaced by the axes of `indices`."""
        return self._out(self.network.add_gather(x, indices, axis), "gather")

    # Arithmetic

    def cast(self, x: Any, dtype: str) -> Any:
        """Convert to another data type."""
        if x.dtype == self.type(dtype):
            return x
        return self._out(self.network.add_cast(x, self.type(dtype)), "cast")

    def add(self, x: Any, y: Any) -> Any:
        """Return x + y.

        In all operations, axes of size 1 are broadcast, and both operands have the same number of axes.
        """
        return self._elementwise(x, y, "SUM")

    def subtract(self, x: Any, y: Any) -> Any:
        """Return x - y."""
        return self._elementwise(x, y, "SUB")

    def multiply(self, x: Any, y: Any) -> Any:
        """Return x * y."""
        return self._elementwise(x, y, "PROD")

    def divide(self, x: Any, y: Any) -> Any:
        """Return x / y."""
        return self._elementwise(x, y, "DIV")

    def maximum(self, x: Any, y: Any) -> Any:
        """Return the elementwise maximum."""
        return self._elementwise(x, y, "MAX")

    def minimum(self, x: Any, y: Any) -> Any:
        """Return the elementwise minimum."""
        return self._elementwise(x, y, "MIN")

    def is_greater(self, x: Any, y: Any) -> Any:
        """Return whether x > y, bool."""
        return self._elementwise(x, y, "GREATER")

    def equal(self, x: Any, y: Any) -> Any:
        """Return whether x and y are equal, bool."""
        return self._elementwise(x, y, "EQUAL")

    def both(self, x: Any, y: Any) -> Any:
        """Return x and y, bool."""
        return self._elementwise(x, y, "AND")

    def invert(self, x: Any) -> Any:
        """Return not x, bool."""
        return self._unary(x, "NOT")

    def select(self, condition: Any, x: Any, y: Any) -> Any:
        """Return x where the condition, a bool, is true, else y."""
        return self._out(self.network.add_select(condition, x, y), "select")

    def sqrt(self, x: Any) -> Any:
        """Return the elementwise square root."""
        return self._unary(x, "SQRT")

    def activation(self, x: Any, kind: str) -> Any:
        """Apply SIGMOID, TANH, RELU, GELU_ERF or GELU_TANH."""
        kinds = self.module.ActivationType
        return self._out(self.network.add_activation(x, getattr(kinds, kind)), kind)

    def softmax(self, x: Any) -> Any:
        """Apply softmax to the last axis."""
        layer = self._checked(self.network.add_softmax(x), "softmax")
        layer.axes = 1 << (len(x.shape) - 1)
        return layer.get_output(0)

    def mean(self, x: Any) -> Any:
        """Return the mean over the last axis, which is kept with size 1."""
        return self._reduce(x, "AVG", len(x.shape) - 1, True)

    def sum(self, x: Any, axis: int, keep: bool = True) -> Any:
        """Return the sum over one axis."""
        return self._reduce(x, "SUM", axis, keep)

    def top_k(self, x: Any, count: int) -> tuple[Any, Any]:
        """Return the largest values of the last axis, and their indices, int32."""
        kinds, axes = self.module.TopKOperation, 1 << (len(x.shape) - 1)
        layer = self._checked(self.network.add_topk(x, kinds.MAX, count, axes), "top k")
        return layer.get_output(0), layer.get_output(1)

    def one_hot(self, indices: Any, depth: int, dtype: str) -> Any:
        """Return 1 at each index and 0 elsewhere, [..., depth]."""
        values, depth_of = self.constant([0, 1], dtype), self.constant(depth, "int32")
        return self._out(self.network.add_one_hot(indices, values, depth_of, len(indices.shape)), "one hot")

    def multiply_matrices(self, x: Any, weight: Any) -> Any:
        """Return x Wᵀ for x [rows, in] and W [out, in]."""
        operation = self.module.MatrixOperation
        layer = self.network.add_matrix_multiply(x, operation.NONE, weight, operation.TRANSPOSE)
        return self._out(layer, "matrix product")

    def dequantize(self, levels: Any, scales: Any, dtype: str, axis: int | None) -> Any:
        """Return levels * scales. `axis` is the axis with one scale per index; None: a scale per block of the last
        axis."""
        layer = self._checked(self.network.add_dequantize(levels, scales, self.type(dtype)), "dequantize")
        if axis is not None:
            layer.axis = axis
        return layer.get_output(0)

    # Attention and ranks

    def rotate(self, x: Any, cos: Any, sin: Any, positions: Any, rotary_dim: int) -> Any:
        """Apply rotary positions to x [rows, heads, 1, head_dim], with tables [positions, rotary_dim / 2] of its
        type.

        `positions`: [rows, 1] int32. Pairs are i and i + rotary_dim / 2.
        """
        dim = 0 if rotary_dim == x.shape[-1] else rotary_dim
        layer = self._checked(self.network.add_rotary_embedding(x, cos, sin, False, dim), "rotary embedding")
        layer.set_input(3, positions)
        return layer.get_output(0)

    def update_cache(self, cache: Any, update: Any, write_indices: Any, lengths: Any) -> Any:
        """Write to a cache [slots, heads, length, head_dim] in place; return the cache.

        Args:
            cache: An input; the result must be an output.
            update: [rows, heads, head_dim], in the order of slots.
            write_indices: [slots] int32, position of each slot's first row.
            lengths: [slots + 1] int32, number of rows of all slots before each slot.
        """
        trt = self.module
        mode, packed = trt.KVCacheMode.LINEAR, trt.AttentionIOForm.PACKED_NHD
        layer = self._checked(self.network.add_kv_cache_update(cache, update, write_indices, mode), "cache")
        layer.update_form = packed
        layer.update_lengths = lengths
        return layer.get_output(0)

    def attention(
        self,
        queries: Any,
        keys: Any,
        values: Any,
        lengths: Any | None = None,
        mask: Any | None = None,
        may_decompose: bool = False,
    ) -> Any:
        """Attend with scaled queries [batch, heads, rows, head_dim] to keys and values.

        Args:
            queries: The padded queries.
            keys: [batch, kv_heads, length, head_dim].
            values: [batch, kv_heads, length, head_dim].
            lengths: [batch] int32, number of keys that are read.
            mask: bool [batch, 1, rows, length], the keys that are read.
            may_decompose: Whether TensorRT may use products and a softmax if it has no attention kernel.
        """
        layer = self._attention(queries, keys, values, "NONE", may_decompose)
        if lengths is not None:
            layer.key_value_lengths = lengths
        if mask is not None:
            layer.mask = mask
        return layer.get_output(0)

    def packed_attention(
        self, queries: Any, keys: Any, values: Any, query_lengths: Any, key_lengths: Any
    ) -> Any:
        """Attend causally with queries [rows, heads, head_dim], in the order of slots, to the slots' keys and
        values.

        Args:
            queries: The scaled queries.
            keys: [slots, kv_heads, length, head_dim].
            values: [slots, kv_heads, length, head_dim].
            query_lengths: [slots + 1] int32, number of rows of all slots before each slot.
            key_lengths: [slots] int32, number of keys.
        """
        layer = self._attention(queries, keys, values, "LOWER_RIGHT", False)
        layer.query_form = self.module.AttentionIOForm.PACKED_NHD
        layer.query_lengths = query_lengths
        layer.key_value_lengths = key_lengths
        return layer.get_output(0)

    def all_reduce(self, x: Any, num_ranks: int) -> Any:
        """Return the sum over ranks."""
        trt = self.module
        kinds, reduce = trt.CollectiveOperation, trt.ReduceOperation.SUM
        layer = self.network.add_dist_collective(x, kinds.ALL_REDUCE, reduce, -1, list(range(num_ranks)))
        layer = self._checked(layer, "a sum over ranks")
        layer.num_ranks = num_ranks
        return layer.get_output(0)

    # Plans

    def profile(self, name: str, extents: Iterable[Extent]) -> Profile:
        """Add an optimization profile, which allows for the inputs' named dimensions the sizes in their
        extents."""
        of = {extent.dimension: extent for extent in extents}

        def sizes(shape: tuple[Dimension, ...], bound: str) -> tuple[int, ...]:
            return tuple(getattr(of[size], bound) if isinstance(size, str) else size for size in shape)

        ranges = (
            ShapeRange(each, sizes(shape, "min"), sizes(shape, "opt"), sizes(shape, "max"))
            for each, shape in self.shapes.items()
            if any(isinstance(size, str) for size in shape)
        )
        return Profile(name, tuple(ranges))

    def type(self, dtype: str) -> Any:
        """Return TensorRT's type for a name in `PlanTensor.dtype`."""
        return getattr(self.module.DataType, _TYPES[dtype])

    def type_name(self, dtype: Any) -> str:
        """Return the name of a TensorRT type, as in `PlanTensor.dtype`."""
        return next(name for name, trt_name in _TYPES.items() if trt_name == dtype.name)

    def _attention(self, queries: Any, keys: Any, values: Any, causal: str, may_decompose: bool) -> Any:
        trt = self.module
        layer = self.network.add_attention_v2(
            queries,
            keys,
            values,
            trt.AttentionNormalizationOp.SOFTMAX,
            getattr(trt.CausalMaskKind, causal),
        )
        layer = self._checked(layer, "attention")
        layer.decomposable = may_decompose
        return layer

    def _elementwise(self, x: Any, y: Any, operation: str) -> Any:
        kinds = self.module.ElementWiseOperation
        return self._out(self.network.add_elementwise(x, y, getattr(kinds, operation)), operation)

    def _unary(self, x: Any, operation: str) -> Any:
        return self._out(self.network.add_unary(x, getattr(self.module.UnaryOperation, operation)), operation)

    def _reduce(self, x: Any, operation: str, axis: int, keep: bool) -> Any:
        kinds = self.module.ReduceOperation
        return self._out(self.network.add_reduce(x, getattr(kinds, operation), 1 << axis, keep), operation)

    def _checked(self, made: Any, what: str) -> Any:
        if made is None:
            reason = self.logger.errors[-1] if self.logger.errors else "it gives no reason"
            raise ConfigError(f"TensorRT does not define {what}: {reason}")
        return made

    def _out(self, layer: Any, what: str) -> Any:
        return self._checked(layer, what).get_output(0)


def _constant(tensor: torch.Tensor, dtype: str | None = None, shape: Sequence[int] | None = None) -> Constant:
    memory = tensor.detach().contiguous()
    name = dtype or str(memory.dtype).removeprefix("torch.")
    return Constant(memory, name, tuple(memory.shape if shape is None else shape))
