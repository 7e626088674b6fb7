"""LoRA adapters and prompt tables as requests bring them, and what an iteration is told of adapters. Pure.

The core knows an adapter by its **handle**, a number that rank 0's adapter cache gives whenever it stores one:
the same adapter stored again has another handle. What a client calls it, a task id or a name, stays with the
cache. The weights go through the core to the device as bytes that nobody here looks into.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import prod

from inflight.errors import InvalidArgument, Name, Unsupported, joined

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number, by the data type of weights and tables."""


class RawBuffer:
    """Bytes that travel beside messages between processes, and not in them: each is copied no more than need be.

    Attributes:
        data: bytes, or anything else with a contiguous buffer, as a memoryview of a Triton tensor.
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
    """A tensor of two dimensions in any of the data types that weights come in.

    Attributes:
        shape: Rows and columns.
        dtype: float32, float16 or bfloat16.
        buffer: The numbers, row-major, in the machine's byte order.
    """

    shape: tuple[int, int]
    dtype: str
    buffer: RawBuffer

    def __post_init__(self) -> None:
        if len(self.buffer) != ITEM_SIZES[self.dtype] * prod(self.shape):
            raise ValueError(f"{len(self.buffer)} bytes for {self.dtype} of shape {list(self.shape)}")


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The low-rank matrices of an adapter, a row for each module of each layer that it changes.

    Attributes:
        weights: [rows, width]: A [rank, in], then B [out, rank] with its scale, then for DoRA the magnitudes
            [out], then zeros. Tensor `lora_weights`.
        config: Per row, module id, layer, rank, and if it has a fourth number, whether magnitudes follow. Tensor
            `lora_config`.
    """

    weights: Matrix
    config: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LoraRequest:
    """The adapter that a request wants: by an id, a name or a folder; with weights, to be stored first.

    Attributes:
        task_id: Tensor `lora_task_id`, 0 .. 2**64 - 1.
        name: Tensor `lora_name`: of an adapter that the server's operator has named.
        path: Tensor `lora_path`: a folder below the server's `lora_dir`.
        weights: Stored under `task_id` unless there is one of that id. They leave the request as soon as the
            adapter cache has them: no iteration and no other rank sees them here.
    """

    task_id: int | None = None
    name: str = ""
    path: str = ""
    weights: LoraWeights | None = None

    def validate(self, max_rank: int) -> None:
        """Raise Unsupported if the engine takes no adapters, InvalidArgument unless exactly one is named.

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
        """Raise InvalidArgument unless exactly one of id, name and path is given, and the id with weights."""
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
        """The size of the weights that the request brings, 0 if it brings none."""
        return 0 if self.weights is None else len(self.weights.weights.buffer)

    @property
    def label(self) -> str:
        """The name, folder or id that people know the adapter by."""
        return self.name or self.path or str(self.task_id)


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter that the cache has: from this iteration on requests may use it, on every rank.

    Attributes:
        handle: Its number, of no other.
        digest: Of its content, 16 bytes: equal adapters have equal digests, whose KV blocks may be shared.
        task_id: The id it is stored under; None for one with a name.
        rank: Its largest rank; decides how many pages it takes on the device.
        weights: Checked against the model.
    """

    handle: int
    digest: bytes
    task_id: int | None
    rank: int
    weights: LoraWeights


@dataclass(frozen=True, slots=True)
class AdapterEvent:
    """A request's adapter is there, or will never be.

    Attributes:
        request_id: The request that waits for it.
        handle: Of the adapter, which stays stored until this request has ended; -1 with an error.
        error_kind: Why it failed, as the kind of an error of `inflight.errors`; "": it is ready.
        error: The message of that error, its names marked.
    """

    request_id: int
    handle: int = -1
    error_kind: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class AdapterUpdate:
    """The news of adapters for an iteration, in the order in which it applies them: stored, ready, dropped.

    Attributes:
        stored: New ones.
        events: Requests whose adapters are ready or have failed.
        dropped: Handles of adapters that the cache has evicted or unloaded; no active request uses them.
    """

    stored: tuple[StoredAdapter, ...] = ()
    events: tuple[AdapterEvent, ...] = ()
    dropped: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.stored or self.events or self.dropped)


@dataclass(frozen=True, slots=True)
class PromptTable:
    """The embeddings of a request's virtual tokens: token id vocab_size + i stands for row i.

    Attributes:
        rows: [rows, hidden_size]. Tensor `prompt_embedding_table`.
        digest: Of the numbers, their type and shape, 16 bytes: a part of what KV blocks are found by.
    """

    rows: Matrix
    digest: bytes

    @classmethod
    def of(cls, rows: Matrix) -> PromptTable:
        """The table with its digest, which takes some milliseconds for a megabyte."""
        digest = blake2b(rows.buffer.data, digest_size=16, key=f"{rows.dtype} {rows.shape}".encode())
        return cls(rows, digest.digest())

    @property
    def num_rows(self) -> int:
        """How many virtual tokens there are."""
        return self.rows.shape[0]

    def validate(self, hidden_size: int) -> None:
        """Raise InvalidArgument unless a row is as wide as the model, Unsupported if `hidden_size` is 0."""
        if not hidden_size:
            raise Unsupported(
                Name("prompt_embedding_table"), " is not available: this engine takes no prompt tables"
            )
        if self.rows.shape[1] != hidden_size or not self.num_rows:
            raise InvalidArgument(
                Name("prompt_embedding_table"),
                f" must have shape [1, rows, {hidden_size}] with at least one row, got {[1, *self.rows.shape]}",
            )
