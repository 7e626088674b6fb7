"""Evaluates TensorRT's networks in torch on a CPU, following the documentation of TensorRT's layers.

A network is read back from TensorRT's own definition, layer by layer, so that the evaluated network is the
one that a plan is built from. A copy can be written to bytes, which can be evaluated without TensorRT and
without the checkpoint. This checks how operations are connected, not NVIDIA's kernels. Unknown layers raise
NotImplementedError.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.engine.tensorrt.build import Definition
from inflight.engine.tensorrt.graph import Constant

TORCH_TYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "FP8": torch.float8_e4m3fn,
    "INT64": torch.int64,
    "INT32": torch.int32,
    "INT8": torch.int8,
    "BOOL": torch.bool,
}


class Communicator(Protocol):
    """The ranks of a network, as used by a collective layer."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x."""
        ...


@dataclass(frozen=True)
class Node:
    """A layer: its kind, the names of its tensors, and its attributes by name."""

    kind: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class NetworkCopy:
    """A network in the order of computation.

    Attributes:
        nodes: Its layers.
        inputs: Type and shape of each input by name; -1 for dynamic dimensions.
        outputs: Names of the outputs.
        aliases: For outputs in place of an input, the input's name.
    """

    nodes: tuple[Node, ...]
    inputs: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    outputs: tuple[str, ...]
    aliases: dict[str, str]


def dump(definition: Definition) -> bytes:
    """Return a network as bytes, which replace a plan."""
    copy, buffer = copy_network(definition), io.BytesIO()
    nodes = [(node.kind, node.inputs, node.outputs, node.attributes) for node in copy.nodes]
    torch.save((nodes, copy.inputs, copy.outputs, copy.aliases), buffer)
    return buffer.getvalue()


def load(data: bytes) -> NetworkCopy:
    """Load a network that `dump` has written."""
    nodes, inputs, outputs, aliases = torch.load(io.BytesIO(data), weights_only=True)
    return NetworkCopy(tuple(Node(*node) for node in nodes), inputs, outputs, aliases)


def copy_network(definition: Definition) -> NetworkCopy:
    """Read a network back from TensorRT."""
    graph = definition.graph
    network, reader = graph.network, _Reader(definition)
    read = [reader.node(network.get_layer(index)) for index in range(network.num_layers)]
    inputs = {
        tensor.name: (_input_type(tensor), tuple(tensor.shape))
        for tensor in (network.get_input(index) for index in range(network.num_inputs))
    }
    outputs = tuple(network.get_output(index).name for index in range(network.num_outputs))
    aliases = {
        node.outputs[0]: str(node.inputs[0])
        for node in read
        if node is not None and node.kind == "KV_CACHE_UPDATE"
    }
    nodes = _sorted([node for node in read if node is not None], outputs, inputs)
    return NetworkCopy(nodes, inputs, outputs, aliases)


def _input_type(tensor: Any) -> torch.dtype:
    # int4 has two values per byte
    return torch.uint8 if tensor.dtype.name == "INT4" else TORCH_TYPES[tensor.dtype.name]


@torch.inference_mode()
def evaluate(
    network: NetworkCopy, inputs: Mapping[str, Tensor], communicator: Communicator | None = None
) -> dict[str, Tensor]:
    """Return the outputs; outputs in place of inputs are these inputs' own tensors.

    Raises ValueError if an input is missing, unexpected, or of another type or shape.
    """
    if inputs.keys() != network.inputs.keys():
        raise ValueError(f"inputs differ in {sorted(inputs.keys() ^ network.inputs.keys())}")
    for name, (dtype, shape) in network.inputs.items():
        given = inputs[name]
        if dtype is torch.uint8:
            shape = (*shape[:-1], shape[-1] // 2)
        fits = len(shape) == given.dim() and all(a in (-1, b) for a, b in zip(shape, given.shape))
        if given.dtype != dtype or not fits:
            raise ValueError(f"{name} is {given.dtype} {list(given.shape)}, expected {dtype} {list(shape)}")
    values: dict[str, Tensor] = dict(inputs)
    last_use = {name: index for index, node in enumerate(network.nodes) for name in node.inputs if name}
    for index, node in enumerate(network.nodes):
        given = [None if name is None else values[name] for name in node.inputs]
        found = _EVALUATE[node.kind](node.attributes, given, communicator)
        values.update(zip(node.outputs, found, strict=False))
        for name in node.inputs:
            if name and last_use[name] == index and name not in network.outputs and name not in inputs:
                values.pop(name, None)
    return {name: values[name] for name in network.outputs}


def _sorted(nodes: list[Node], outputs: tuple[str, ...], inputs: Mapping[str, Any]) -> tuple[Node, ...]:
    """Sort the nodes that the outputs need, each after its inputs; TensorRT's order is that of definition."""
    makers = {name: node for node in nodes for name in node.outputs}
    assert len(makers) == sum(len(node.outputs) for node in nodes), "two tensors have the same name"
    found: dict[int, Node] = {}
    for output in outputs:
        stack = [(makers[output], False)]
        while stack:
            node, is_ready = stack.pop()
            if id(node) in found:
                continue
            if is_ready:
                found[id(node)] = node
                continue
            stack.append((node, True))
            stack += [(makers[name], False) for name in node.inputs if name and name not in inputs]
    return tuple(found.values())


class _Reader:
    """Reads layers of one network."""

    def __init__(self, definition: Definition) -> None:
        self._trt, self._graph = definition.graph.module, definition.graph

    def node(self, layer: Any) -> Node | None:
        """Return a layer as a node; None for the half of an attention that computes nothing."""
        trt, kind, name = self._trt, layer.type.name, layer.name  # the subclass may hide `type`
        inputs = tuple(self._name(layer.get_input(index)) for index in range(layer.num_inputs))
        outputs = tuple(layer.get_output(index).name for index in range(layer.num_outputs))
        attributes: dict[str, Any] = {}
        if kind == "ATTENTION_INPUT":
            return None
        if kind == "ATTENTION_OUTPUT":
            layer.__class__ = trt.IAttentionOutputLayer
            return self._attention(layer.attention, outputs)
        if kind == "CONSTANT":
            attributes["value"] = _value(self._graph.constants[name])
        elif kind == "KV_CACHE_UPDATE":
            layer.__class__ = trt.IKVCacheUpdateLayer
            if (
                layer.update_form != trt.AttentionIOForm.PACKED_NHD
                or layer.cache_mode != trt.KVCacheMode.LINEAR
            ):
                raise NotImplementedError("an update of a cache that is not packed and linear")
            inputs = (*inputs[:3], layer.update_lengths.name)
        elif kind == "SHUFFLE":
            layer.__class__ = trt.IShuffleLayer
            attributes = _shuffle(layer)
        elif kind in _CLASSES:
            class_name, names = _CLASSES[kind]
            layer.__class__ = getattr(trt, class_name)
            attributes = {each: _plain(getattr(layer, each)) for each in names}
        elif kind not in ("DIST_COLLECTIVE", "SELECT", "SHAPE", "UNSQUEEZE"):
            raise NotImplementedError(f"a layer {kind}")
        return Node(kind, inputs, outputs, attributes)

    def _attention(self, attention: Any, outputs: tuple[str, ...]) -> Node:
        forms = self._trt.AttentionIOForm
        if attention.key_value_form != forms.PADDED_BHND or attention.num_ranks != 1:
            raise NotImplementedError("attention to packed keys, or of several ranks")
        attributes = {
            "causal": attention.causal_kind.name,
            "is_packed": attention.query_form == forms.PACKED_NHD,
        }
        optional = attention.mask, attention.key_value_lengths, attention.query_lengths
        three = (attention.get_input(index) for index in range(3))
        return Node("ATTENTION", tuple(map(self._name, (*three, *optional))), outputs, attributes)

    def _name(self, tensor: Any) -> str | None:
        return None if tensor is None else tensor.name


_CLASSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ACTIVATION": ("IActivationLayer", ("type",)),
    "CAST": ("ICastLayer", ("to_type",)),
    "CONCATENATION": ("IConcatenationLayer", ("axis",)),
    "DEQUANTIZE": ("IDequantizeLayer", ("axis", "to_type")),
    "ELEMENTWISE": ("IElementWiseLayer", ("op",)),
    "GATHER": ("IGatherLayer", ("axis", "mode", "num_elementwise_dims")),
    "MATRIX_MULTIPLY": ("IMatrixMultiplyLayer", ("op0", "op1")),
    "ONE_HOT": ("IOneHotLayer", ("axis",)),
    "REDUCE": ("IReduceLayer", ("op", "axes", "keep_dims")),
    "ROTARY_EMBEDDING": ("IRotaryEmbeddingLayer", ("interleaved", "rotary_embedding_dim")),
    "SLICE": ("ISliceLayer", ("start", "shape", "stride", "mode")),
    "SOFTMAX": ("ISoftMaxLayer", ("axes",)),
    "TOPK": ("ITopKLayer", ("op", "k", "axes")),
    "UNARY": ("IUnaryLayer", ("op",)),
}
"""TensorRT's class, and the attributes that are read, for each kind of layer."""


def _shuffle(layer: Any) -> dict[str, Any]:
    """Return its transpositions, and the shape between them, None if it has none."""
    try:
        shape = tuple(layer.reshape_dims)
    except (TypeError, ValueError):  # the layer has no shape, or the shape is an input
        shape = None
    first, second = (tuple(order) for order in (layer.first_transpose, layer.second_transpose))
    if shape is not None and layer.zero_is_placeholder and 0 in shape:
        raise NotImplementedError("zeros in a shape that stand for other sizes")
    return {"first": first, "shape": shape, "second": second}


def _plain(value: Any) -> Any:
    if hasattr(value, "name"):
        return value.name
    return tuple(value) if hasattr(value, "__len__") else value


def _value(constant: Constant) -> Tensor:
    return (
        constant.memory.clone()
        if constant.dtype == "int4"
        else constant.memory.reshape(constant.shape).clone()
    )


# The function of each kind of layer: (attributes, inputs, communicator) -> outputs

_Given = list[Any]


def _activation(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "SIGMOID": torch.sigmoid,
        "TANH": torch.tanh,
        "RELU": F.relu,
        "GELU_ERF": F.gelu,
        "GELU_TANH": lambda x: F.gelu(x, approximate="tanh"),
    }
    return [kinds[attributes["type"]](given[0])]


def _attention(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    queries, keys, values, mask, key_lengths, query_lengths = given
    if attributes["is_packed"]:
        return [_packed_attention(attributes, queries, keys, values, key_lengths, query_lengths)]
    if attributes["causal"] != "NONE":
        raise NotImplementedError("padded causal attention")
    seen = torch.ones((1, 1, 1, keys.shape[2]), dtype=torch.bool)
    if mask is not None:
        seen = seen & mask
    if key_lengths is not None:
        seen = seen & (torch.arange(keys.shape[2]) < key_lengths[:, None])[:, None, None]
    return [_attend(queries, keys, values, seen)]


def _packed_attention(
    attributes: dict[str, Any], queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, begins: Tensor
) -> Tensor:
    if attributes["causal"] != "LOWER_RIGHT":
        raise NotImplementedError("packed attention that is not causal from the lower right")
    read = torch.zeros_like(queries)
    for slot, (begin, end) in enumerate(pairwise(begins.tolist())):
        last = torch.arange(begin - end, 0) + lengths[slot]
        seen = torch.arange(keys.shape[2]) <= last[:, None]
        rows = queries[begin:end].transpose(0, 1)[None]
        if begin < end:
            found = _attend(rows, keys[slot : slot + 1], values[slot : slot + 1], seen[None, None])
            read[begin:end] = found[0].transpose(0, 1)
    return read


def _attend(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1).float() for x in (keys, values))
    scores = (queries.float() @ keys.transpose(-1, -2)).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ values).to(queries.dtype)


def _collective(attributes: dict[str, Any], given: _Given, communicator: Any) -> list[Tensor]:
    # A layer does not tell its operation; networks have sums only.
    return [communicator.all_reduce(given[0])]


def _dequantize(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    levels, scales = given[:2]
    if levels.dtype is torch.uint8:
        levels = _unpack_int4(levels)
    scales = scales.float()
    if scales.dim() == levels.dim() and scales.dim() > 1:  # blocks
        for axis, (size, count) in enumerate(zip(levels.shape, scales.shape, strict=True)):
            scales = scales.repeat_interleave(size // count, axis)
    else:
        shape = [1] * levels.dim()
        shape[attributes["axis"]] = -1
        scales = scales.reshape(shape)
    return [(levels.float() * scales).to(TORCH_TYPES[attributes["to_type"]])]


def _unpack_int4(packed: Tensor) -> Tensor:
    """Unpack int4 values: int8 [..., n] from uint8 [..., n / 2]."""
    halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(torch.int8)
    return torch.where(halves > 7, halves - 16, halves)


def _elementwise(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    x, y = given
    if x.dtype != y.dtype or x.dim() != y.dim():
        raise ValueError(f"{attributes['op']} of {x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}")
    operations: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "SUM": torch.add,
        "SUB": torch.sub,
        "PROD": torch.mul,
        "DIV": torch.div,
        "MAX": torch.maximum,
        "MIN": torch.minimum,
        "GREATER": torch.gt,
        "EQUAL": torch.eq,
        "AND": torch.logical_and,
    }
    return [operations[attributes["op"]](x, y)]


def _gather(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    if attributes["mode"] != "DEFAULT" or attributes["num_elementwise_dims"]:
        raise NotImplementedError("a gather of another mode")
    x, indices = given
    axis = attributes["axis"]
    found = x.index_select(axis, indices.flatten().long())
    return [found.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])]


def _update_cache(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    cache, update, write_indices, lengths = given
    if int(lengths[-1]) != len(update):
        raise ValueError(f"{int(lengths[-1])} rows are said to be written, and there are {len(update)}")
    bounds = lengths.tolist()
    for slot, (begin, end) in enumerate(pairwise(bounds)):
        first = int(write_indices[slot])
        if first + end - begin > cache.shape[2]:
            raise ValueError(f"slot {slot} is written beyond its end")
        cache[slot, :, first : first + end - begin] = update[begin:end].transpose(0, 1)
    return [cache]


def _matrix_multiply(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    x, y = (
        tensor.transpose(-1, -2) if attributes[op] == "TRANSPOSE" else tensor
        for tensor, op in zip(given, ("op0", "op1"))
    )
    return [x @ y]


def _one_hot(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    indices, (off, on), depth = given[0], given[1].unbind(), int(given[2])
    if attributes["axis"] != indices.dim():
        raise NotImplementedError("one hot of another axis")
    return [torch.where(F.one_hot(indices.long(), depth).bool(), on, off)]


def _reduce(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    axes = [axis for axis in range(given[0].dim()) if attributes["axes"] >> axis & 1]
    operation = {"AVG": torch.mean, "SUM": torch.sum}[attributes["op"]]
    return [operation(given[0], axes, keepdim=attributes["keep_dims"])]


def _rotate(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    """Rotate x [rows, heads, 1, head_dim] by positions [rows, 1]."""
    x, cos, sin, positions = given
    if attributes["interleaved"]:
        raise NotImplementedError("interleaved rotary positions")
    if not x.dtype == cos.dtype == sin.dtype:
        raise ValueError("the tables have another type than what is turned")
    width = attributes["rotary_embedding_dim"] or x.shape[-1]
    at = positions.long()
    cos, sin = cos[at][:, None], sin[at][:, None]
    first, second = x[..., : width // 2], x[..., width // 2 : width]
    return [torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., width:]], -1)]


def _shuffled(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    x = given[0]
    if len(given) > 1:
        raise NotImplementedError("a shape that is an input")
    x = x.permute(attributes["first"][: x.dim()])
    if attributes["shape"] is not None:
        known = -torch.Size(attributes["shape"]).numel() if -1 in attributes["shape"] else 1
        x = x.reshape([x.numel() // known if size == -1 else size for size in attributes["shape"]])
    return [x.permute(attributes["second"][: x.dim()])]


def _slice(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    x = given[0]
    shape = given[2].tolist() if len(given) > 2 and given[2] is not None else attributes["shape"]
    if any(each is not None for each in (given[1:2] + given[3:])) or attributes["mode"] != "STRICT_BOUNDS":
        raise NotImplementedError("a slice whose start is an input, or beyond the ends")
    for axis, (start, size, stride) in enumerate(zip(attributes["start"], shape, attributes["stride"])):
        if start + (size - 1) * stride >= x.shape[axis] or stride < 1:
            raise ValueError(f"a slice of {size} from {start} on, of {x.shape[axis]}")
        x = x.narrow(axis, start, (size - 1) * stride + 1 if size else 0)
        x = x[(slice(None),) * axis + (slice(None, None, stride),)]
    return [x]


def _softmax(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    return [given[0].softmax(attributes["axes"].bit_length() - 1)]


def _top_k(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    axis = attributes["axes"].bit_length() - 1
    values, indices = given[0].topk(attributes["k"], axis, largest=attributes["op"] == "MAX")
    return [values, indices.int()]


def _unary(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    return [{"SQRT": torch.sqrt, "NOT": torch.logical_not}[attributes["op"]](given[0])]


def _unsqueeze(attributes: dict[str, Any], given: _Given, _: Any) -> list[Tensor]:
    x = given[0]
    for axis in sorted(given[1].tolist()):
        x = x.unsqueeze(axis)
    return [x]


_EVALUATE: dict[str, Callable[[dict[str, Any], _Given, Any], list[Tensor]]] = {
    "ACTIVATION": _activation,
    "ATTENTION": _attention,
    "CAST": lambda attributes, given, _: [given[0].to(TORCH_TYPES[attributes["to_type"]])],
    "CONCATENATION": lambda attributes, given, _: [torch.cat(given, attributes["axis"])],
    "CONSTANT": lambda attributes, given, _: [attributes["value"]],
    "DEQUANTIZE": _dequantize,
    "DIST_COLLECTIVE": _collective,
    "ELEMENTWISE": _elementwise,
    "GATHER": _gather,
    "KV_CACHE_UPDATE": _update_cache,
    "MATRIX_MULTIPLY": _matrix_multiply,
    "ONE_HOT": _one_hot,
    "REDUCE": _reduce,
    "ROTARY_EMBEDDING": _rotate,
    "SELECT": lambda attributes, given, _: [torch.where(*given)],
    "SHAPE": lambda attributes, given, _: [torch.tensor(given[0].shape)],
    "SHUFFLE": _shuffled,
    "SLICE": _slice,
    "SOFTMAX": _softmax,
    "TOPK": _top_k,
    "UNARY": _unary,
    "UNSQUEEZE": _unsqueeze,
}
