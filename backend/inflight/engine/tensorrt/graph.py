"""A thin layer over TensorRT's network definition: operations on tensors, and all that a plan is built with.

Tensors are TensorRT's ITensor, here Any. Shapes are those of the networks: a dimension by name differs from batch
to batch. TensorRT does not copy weights: what a graph is given lives as long as the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from inflight.engine.tensorrt.sidecar import Alias, PlanTensor, Profile, ShapeRange
from inflight.errors import ConfigError

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
"""Names of torch's types, and int4, to TensorRT's."""

Dimension = int | str
"""A size, or the name of one that an optimization profile bounds."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How large a dimension by name may be."""

    dimension: str
    min: int
    opt: int
    max: int


@dataclass(frozen=True, slots=True)
class Constant:
    """The memory of a constant, as TensorRT reads it.

    Attributes:
        memory: On the CPU and contiguous; of int4 uint8, two to a byte, the lower half first.
        dtype: As in `PlanTensor.dtype`.
        shape: In elements.
    """

    memory: torch.Tensor
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Graph:
    """A network that is being defined.

    Args:
        module: TensorRT.
        logger: Its logger, `module.make_logger`.
        has_weight_inputs: Whether `weight` makes inputs instead of constants.

    Attributes:
        builder: TensorRT's.
        network: Likewise.
        constants: By the name of its layer; TensorRT does not tell bfloat16, float8 and int4 ones again.
        weights: What was made inputs, by their names.
        inputs: In the order of their definition, as are outputs.
        shapes: Of the inputs, dimensions by name among them.
        aliases: Which outputs are inputs that are changed in place.
    """

    module: Any
    logger: Any
    has_weight_inputs: bool = False
    constants: dict[str, Constant] = field(default_factory=dict)
    weights: dict[str, Constant] = field(default_factory=dict)
    inputs: list[PlanTensor] = field(default_factory=list)
    outputs: list[PlanTensor] = field(default_factory=list)
    shapes: dict[str, tuple[Dimension, ...]] = field(default_factory=dict)
    aliases: list[Alias] = field(default_factory=list)

    def __post_init__(self) -> None:
        trt = self.module
        self.builder = trt.Builder(self.logger)
        flags = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        self.network = self.builder.create_network(0 if flags is None else 1 << int(flags))
        self._small: dict[tuple[Any, ...], Any] = {}

    # Inputs, outputs, constants

    def input(self, name: str, dtype: str, shape: Sequence[Dimension]) -> Any:
        """An input of the network."""
        fixed = tuple(-1 if isinstance(size, str) else size for size in shape)
        self.inputs.append(PlanTensor(name, dtype, fixed))
        self.shapes[name] = tuple(shape)
        return self._checked(self.network.add_input(name, self.type(dtype), fixed), name)

    def output(self, name: str, tensor: Any, alias_of: str | None = None) -> None:
        """Make a tensor an output; `alias_of` is the input that it is in place of."""
        tensor.name = name
        self.network.mark_output(tensor)
        self.outputs.append(PlanTensor(name, self.type_name(tensor.dtype), tuple(tensor.shape)))
        if alias_of is not None:
            self.aliases.append(Alias(alias_of, name))

    def weight(
        self, name: str, tensor: torch.Tensor, dtype: str | None = None, shape: Sequence[int] | None = None
    ) -> Any:
        """A weight of the model: a constant, or an input named weight.NAME.

        Of int4, `tensor` is uint8 [..., columns / 2], and `dtype` and `shape` are given.
        """
        constant = _constant(tensor, dtype, shape)
        if not self.has_weight_inputs:
            return self._add_constant(name, constant)
        name = f"weight.{name}"
        self.weights[name] = constant
        return self.input(name, constant.dtype, constant.shape)

    def constant(self, value: torch.Tensor | Iterable[Any] | float, dtype: str, rank: int = 0) -> Any:
        """Numbers that are no weights. A single one has `rank` axes of size 1, to be broadcast."""
        tensor = (
            value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=getattr(torch, dtype))
        )
        if tensor.dim() == 0:
            tensor = tensor.reshape((1,) * rank)
        if tensor.numel() > 16:
            return self._add_constant(f"constant_{len(self.constants)}", _constant(tensor))
        key = (dtype, tuple(tensor.shape), *tensor.flatten().tolist())
        if key not in self._small:
            self._small[key] = self._add_constant(f"constant_{len(self.constants)}", _constant(tensor))
        return self._small[key]

    def _add_constant(self, name: str, constant: Constant) -> Any:
        trt, memory = self.module, constant.memory
        count = int(np.prod(constant.shape, dtype=np.int64))
        if count == 0:
            raise ConfigError(f"{name} is empty: this rank has none of it, expected fewer ranks")
        weights = trt.Weights(self.type(constant.dtype), memory.data_ptr(), count)
        layer = self._checked(self.network.add_constant(constant.shape, weights), name)
        layer.name = name
        self.constants[name] = constant
        return layer.get_output(0)

    # Shapes

    def reshape(self, x: Any, *shape: int) -> Any:
        """At most one of the sizes is -1."""
        layer = self._checked(self.network.add_shuffle(x), "reshape")
        layer.zero_is_placeholder = False  # a batch may have no chunks
        layer.reshape_dims = shape
        return layer.get_output(0)

    def transpose(self, x: Any, *axes: int) -> Any:
        """The axes in another order."""
        layer = self._checked(self.network.add_shuffle(x), "transpose")
        layer.first_transpose = axes
        return layer.get_output(0)

    def unsqueeze(self, x: Any, *axes: int) -> Any:
        """New axes of size 1, numbered as in the result."""
        return self._out(self.network.add_unsqueeze(x, self.constant(axes, "int64")), "unsqueeze")

    def concat(self, tensors: Sequence[Any], axis: int) -> Any:
        """Behind each other."""
        if len(tensors) == 1:
            return tensors[0]
        layer = self._checked(self.network.add_concatenation(list(tensors)), "concatenation")
        layer.axis = axis
        return layer.get_output(0)

    def columns(self, x: Any, begin: int, end: int) -> Any:
        """A slice of the last axis."""
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
        """int64 [rank]."""
        return self._out(self.network.add_shape(x), "shape")

    def gather(self, x: Any, indices: Any, axis: int = 0) -> Any:
        """`indices` of one axis, whose axes take its place."""
        return self._out(self.network.add_gather(x, indices, axis), "gather")

    # Arithmetic

    def cast(self, x: Any, dtype: str) -> Any:
        """The same numbers in another type."""
        if x.dtype == self.type(dtype):
            return x
        return self._out(self.network.add_cast(x, self.type(dtype)), "cast")

    def add(self, x: Any, y: Any) -> Any:
        """x + y; as in all of these, axes of size 1 are broadcast, and both have as many."""
        return self._elementwise(x, y, "SUM")

    def subtract(self, x: Any, y: Any) -> Any:
        """x - y."""
        return self._elementwise(x, y, "SUB")

    def multiply(self, x: Any, y: Any) -> Any:
        """x * y."""
        return self._elementwise(x, y, "PROD")

    def divide(self, x: Any, y: Any) -> Any:
        """x / y."""
        return self._elementwise(x, y, "DIV")

    def maximum(self, x: Any, y: Any) -> Any:
        """The larger one."""
        return self._elementwise(x, y, "MAX")

    def minimum(self, x: Any, y: Any) -> Any:
        """The smaller one."""
        return self._elementwise(x, y, "MIN")

    def is_greater(self, x: Any, y: Any) -> Any:
        """x > y, bool."""
        return self._elementwise(x, y, "GREATER")

    def equal(self, x: Any, y: Any) -> Any:
        """Whether both are the same number, bool."""
        return self._elementwise(x, y, "EQUAL")

    def both(self, x: Any, y: Any) -> Any:
        """x and y, bool."""
        return self._elementwise(x, y, "AND")

    def invert(self, x: Any) -> Any:
        """not x, bool."""
        return self._unary(x, "NOT")

    def select(self, condition: Any, x: Any, y: Any) -> Any:
        """x where the condition, a bool, is true, else y."""
        return self._out(self.network.add_select(condition, x, y), "select")

    def sqrt(self, x: Any) -> Any:
        """The square root of each number."""
        return self._unary(x, "SQRT")

    def activation(self, x: Any, kind: str) -> Any:
        """SIGMOID, TANH, RELU, GELU_ERF or GELU_TANH."""
        kinds = self.module.ActivationType
        return self._out(self.network.add_activation(x, getattr(kinds, kind)), kind)

    def softmax(self, x: Any) -> Any:
        """Over the last axis."""
        layer = self._checked(self.network.add_softmax(x), "softmax")
        layer.axes = 1 << (len(x.shape) - 1)
        return layer.get_output(0)

    def mean(self, x: Any) -> Any:
        """Over the last axis, which stays with size 1."""
        return self._reduce(x, "AVG", len(x.shape) - 1, True)

    def sum(self, x: Any, axis: int, keep: bool = True) -> Any:
        """Over one axis."""
        return self._reduce(x, "SUM", axis, keep)

    def top_k(self, x: Any, count: int) -> tuple[Any, Any]:
        """The largest of the last axis, and where they are, int32."""
        kinds, axes = self.module.TopKOperation, 1 << (len(x.shape) - 1)
        layer = self._checked(self.network.add_topk(x, kinds.MAX, count, axes), "top k")
        return layer.get_output(0), layer.get_output(1)

    def one_hot(self, indices: Any, depth: int, dtype: str) -> Any:
        """1 at each index and 0 elsewhere, [..., depth]."""
        values, depth_of = self.constant([0, 1], dtype), self.constant(depth, "int32")
        return self._out(self.network.add_one_hot(indices, values, depth_of, len(indices.shape)), "one hot")

    def multiply_matrices(self, x: Any, weight: Any) -> Any:
        """x Wᵀ of x [rows, in] and W [out, in]."""
        operation = self.module.MatrixOperation
        layer = self.network.add_matrix_multiply(x, operation.NONE, weight, operation.TRANSPOSE)
        return self._out(layer, "matrix product")

    def dequantize(self, levels: Any, scales: Any, dtype: str, axis: int | None) -> Any:
        """levels * scales; `axis`: which one the scales are for, None: they are for blocks of the last axis."""
        layer = self._checked(self.network.add_dequantize(levels, scales, self.type(dtype)), "dequantize")
        if axis is not None:
            layer.axis = axis
        return layer.get_output(0)

    # Attention and ranks

    def rotate(self, x: Any, cos: Any, sin: Any, positions: Any, rotary_dim: int) -> Any:
        """Rotary positions of x [rows, heads, 1, head_dim], by tables [positions, rotary_dim / 2] of its type.

        `positions`: [rows, 1] int32. Pairs are i and i + rotary_dim / 2.
        """
        dim = 0 if rotary_dim == x.shape[-1] else rotary_dim
        layer = self._checked(self.network.add_rotary_embedding(x, cos, sin, False, dim), "rotary embedding")
        layer.set_input(3, positions)
        return layer.get_output(0)

    def update_cache(self, cache: Any, update: Any, write_indices: Any, lengths: Any) -> Any:
        """A cache [slots, heads, length, head_dim] that has been written to in place.

        Args:
            cache: An input, whose result has to be an output.
            update: [rows, heads, head_dim], slot after slot.
            write_indices: [slots] int32, where each slot's first row goes.
            lengths: [slots + 1] int32, rows before each slot's.
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
        """Attention of queries [batch, heads, rows, head_dim], which have their scale, to keys and values.

        Args:
            queries: Padded.
            keys: [batch, kv_heads, length, head_dim].
            values: Likewise.
            lengths: [batch] int32, how many of them are read.
            mask: bool [batch, 1, rows, length], what is read.
            may_decompose: Whether products and a softmax will do where there is no kernel.
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
        """Causal attention of queries [rows, heads, head_dim], slot after slot, to slots' keys and values.

        Args:
            queries: With their scale.
            keys: [slots, kv_heads, length, head_dim].
            values: Likewise.
            query_lengths: [slots + 1] int32, rows before each slot's.
            key_lengths: [slots] int32.
        """
        layer = self._attention(queries, keys, values, "LOWER_RIGHT", False)
        layer.query_form = self.module.AttentionIOForm.PACKED_NHD
        layer.query_lengths = query_lengths
        layer.key_value_lengths = key_lengths
        return layer.get_output(0)

    def all_reduce(self, x: Any, num_ranks: int) -> Any:
        """The sum over ranks."""
        trt = self.module
        kinds, reduce = trt.CollectiveOperation, trt.ReduceOperation.SUM
        layer = self.network.add_dist_collective(x, kinds.ALL_REDUCE, reduce, -1, list(range(num_ranks)))
        layer = self._checked(layer, "a sum over ranks")
        layer.num_ranks = num_ranks
        return layer.get_output(0)

    # Plans

    def profile(self, name: str, extents: Iterable[Extent]) -> Profile:
        """The optimization profile: the shapes of the inputs where each named dimension is within its extent."""
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
        """TensorRT's type of that name."""
        return getattr(self.module.DataType, _TYPES[dtype])

    def type_name(self, dtype: Any) -> str:
        """The name of one of TensorRT's types."""
        return next(name for name, theirs in _TYPES.items() if theirs == dtype.name)

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
