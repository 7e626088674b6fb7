"""LoRA adapters of requests, and the adapter changes of an iteration. Pure.

The core identifies an adapter by its **handle**, a number that rank 0's adapter cache assigns whenever it
stores an adapter: an adapter that is stored again gets another handle. Task ids and names are known to the
cache only. The core passes the weights on to the device as bytes, without reading them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from inflight.errors import InvalidArgument, Name, Unsupported, joined

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per element, by data type of weights and tables."""


class RawBuffer:
    """Bytes that are sent to another process after a message instead of inside it, to save copies.

    Attributes:
        data: The bytes, or another object with a contiguous buffer, such as a memoryview of a Triton tensor.
    """

    __slots__ = ("data",)

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = data

    def __len__(self) -> int:
        return memoryview(self.data).nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RawBuffer) and memoryview(self.data) == memoryview(other.data)

    def __hash__(self) -> int:
        return hash(len(self))

    def __reduce__(self) -> tuple[type[RawBuffer], tuple[bytes]]:
        return RawBuffer, (bytes(self.data),)  # a memoryview can be neither copied nor pickled

    def __repr__(self) -> str:
        return f"RawBuffer({len(self)} bytes)"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A two-dimensional tensor of float32, float16 or bfloat16.

    Attributes:
        shape: Numbers of rows and columns.
        dtype: float32, float16 or bfloat16.
        buffer: The elements, row-major, in the machine's byte order.
    """

    shape: tuple[int, int]
    dtype: str
    buffer: RawBuffer

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise ValueError(f"expected {', '.join(ITEM_SIZES)}, got {self.dtype!r}")
        if min(self.shape) < 0 or len(self.buffer) != ITEM_SIZES[self.dtype] * prod(self.shape):
            raise ValueError(f"{len(self.buffer)} bytes for {self.dtype} of shape {list(self.shape)}")


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The low-rank matrices of an adapter, one row per adapted module of a layer.

    Attributes:
        weights: [rows, width]. A row has A [rank, in], then B [out, rank] with the scale multiplied in, then for
            DoRA the magnitudes [out], then padding zeros. Tensor `lora_weights`.
        config: For each row: module id, layer, rank, and optionally whether the row has magnitudes. Tensor
            `lora_config`.
    """

    weights: Matrix
    config: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LoraRequest:
    """The adapter that a request uses: its id, its name or its folder, or an id and the weights to store.

    Attributes:
        task_id: The adapter's id, 0 .. 2**64 - 1. Tensor `lora_task_id`.
        name: The name of an adapter that the operator has configured. Tensor `lora_name`.
        path: A folder below the server's `lora_dir`. Tensor `lora_path`.
        weights: Weights to store under `task_id`, unless an adapter with this id exists. The adapter cache removes
            them from the request, so that they are not broadcast to the other ranks with it.
    """

    task_id: int | None = None
    name: str = ""
    path: str = ""
    weights: LoraWeights | None = None

    def validate(self, max_rank: int) -> None:
        """Raise Unsupported if the engine accepts no adapters, InvalidArgument unless exactly one adapter is
        named.

        Args:
            max_rank: `ModelLimits.max_adapter_rank`.
        """
        if not max_rank:
            raise Unsupported(
                Name("lora_task_id"),
                ": this engine takes no LoRA adapters: lora_cache_gpu_memory_fraction is 0, or leaves no room for "
                "one, as the log says",
            )
        self.check_names()

    def check_names(self) -> None:
        """Raise InvalidArgument unless exactly one of id, name and path is given; with weights it must be the
        id."""
        given = {"lora_task_id": self.task_id, "lora_name": self.name, "lora_path": self.path}
        names = [name for name, value in given.items() if value not in (None, "")]
        if not names or (self.weights is not None and self.task_id is None):
            raise InvalidArgument(Name("lora_task_id"), " must be set for LoRA inference")
        if len(names) > 1:
            raise InvalidArgument(
                "expected one of ",
                Name("lora_task_id"),
                ", ",
                Name("lora_name"),
                " and ",
                Name("lora_path"),
                ", got ",
                *joined(names, " and "),
                " at once: send one of them",
            )
        if self.task_id is not None and not 0 <= self.task_id < 1 << 64:
            raise InvalidArgument(Name("lora_task_id"), f" must be in [0, 2**64), got {self.task_id}")

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the weights in the request; 0 without weights."""
        return 0 if self.weights is None else len(self.weights.weights.buffer)

    @property
    def label(self) -> str:
        """The adapter's name, folder or id, for messages."""
        return self.name or self.path or str(self.task_id)


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter that was added to the cache; from this iteration on, requests may use it on every rank.

    Attributes:
        handle: The adapter's unique number.
        digest: 16-byte digest of the content. Sequences whose adapters have equal digests may share KV blocks.
        task_id: The adapter's id; None for a named adapter.
        rank: The adapter's largest rank, which determines how many pages it takes on the device.
        weights: The adapter's weights, already checked against the model.
    """

    handle: int
    digest: bytes
    task_id: int | None
    rank: int
    weights: LoraWeights


@dataclass(frozen=True, slots=True)
class AdapterEvent:
    """The event that a request's adapter is stored or could not be stored.

    Attributes:
        request_id: The request that waits for the adapter.
        handle: The adapter's handle, or -1 with an error. The adapter stays stored until this request has ended.
        error_kind: The kind of error (`inflight.errors`) if storing failed; "": the adapter is stored.
        error: The error's message, in which names are marked.
    """

    request_id: int
    handle: int = -1
    error_kind: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class AdapterUpdate:
    """The adapter changes of an iteration, which are applied in the order stored, events, dropped.

    Attributes:
        stored: Newly stored adapters.
        events: Requests whose adapters are ready or have failed.
        dropped: Handles of evicted and unloaded adapters, which no active request uses.
    """

    stored: tuple[StoredAdapter, ...] = ()
    events: tuple[AdapterEvent, ...] = ()
    dropped: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.stored or self.events or self.dropped)
