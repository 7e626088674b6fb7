"""Publishes KV cache events by ZeroMQ, in vLLM's format, for routers that send requests to a cached prefix.

A batch has the events of one iteration. It is a message of three frames: the topic, the batch's number (8 bytes,
big endian) and msgpack. A subscriber that misses a number can ask for it at the replay address: it sends the first
number that it misses, and gets the batches from there on, each with its number; -1 and an empty frame end the
answer. Format: vllm/distributed/kv_events.py of vLLM 0.32.

The loop thread sends; ZeroMQ keeps `hwm` batches for a slow subscriber, and drops further ones. A thread answers
requests for past batches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import zmq

from inflight.core.kv.kv_events import KvEvent, StoredBlock
from inflight.errors import ConfigError
from inflight.parameter_spec import KvEventsConfig

_log = logging.getLogger(__name__)
_CACHE = "GPU"
"""The medium of blocks in the cache: routers know this name only, whatever the device is."""
_NUMBER_BYTES = 8
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 500
"""How long the last batches may take to be sent when the server ends."""


class _Event(msgspec.Struct, tag=True, omit_defaults=True):
    pass


class BlockStored(_Event):
    """Blocks that can now be found. Without tokens: blocks that are now saved in another medium.

    Attributes:
        block_hashes: The blocks, each following the one before it.
        parent_block_hash: The block before the first; None: the first begins a prompt, or there are no tokens.
        token_ids: The tokens of all blocks.
        block_size: Number of tokens of a block.
        lora_id: The adapter's `lora_task_id`; None: the adapter has none, or it is the base model.
        medium: GPU (the cache), CPU (host memory beside a GPU's cache) or DISK (files, or files and host memory).
        lora_name: The adapter's name, folder or id; None: the base model.
        extra_keys: Other properties on which each block's hash depends, as texts: the extra ids of its tokens, the
            adapter, and for a prompt's first block its salt and tables; None for a block with nothing else.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(_Event):
    """Blocks that can no longer be found in a medium."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(_Event):
    """The cache is empty. The first event of every server."""


class KvEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The events of an iteration.

    Attributes:
        ts: Seconds since 1970.
        events: The events, oldest first.
        data_parallel_rank: Always 0: every replica is a server of its own.
    """

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KvEventPublisher:
    """A ZeroMQ publisher of the cache's events.

    Args:
        config: Addresses and sizes.
        tokens_per_block: Number of tokens of a block.
        saved_medium: The medium of all saved blocks: DISK if there is a tier in files, otherwise CPU.

    Raises:
        ConfigError: An address cannot be used.
    """

    def __init__(self, config: KvEventsConfig, tokens_per_block: int, saved_medium: str) -> None:
        self._topic, self._size, self._saved_medium = config.topic.encode(), tokens_per_block, saved_medium
        self._saved: dict[int, bool] = {}  # published as saved; whether the block is in the cache again
        self._next = 0
        self._past: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._past_lock = threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._replay_thread: threading.Thread | None = None
        try:
            self._pub = self._open(zmq.PUB, "endpoint", config.endpoint, config.hwm)
            if config.replay_endpoint is not None:
                replay = self._open(zmq.ROUTER, "replay_endpoint", config.replay_endpoint, config.hwm)
                self._replay_thread = threading.Thread(
                    target=self._answer, args=(replay,), name="kv-events-replay", daemon=True
                )
                self._replay_thread.start()
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    def add(self, events: Iterable[KvEvent]) -> None:
        """Publish the events of an iteration, oldest first. Loop thread."""
        found = [each for event in events for each in self._converted(event)]
        if not found:
            return
        number = self._next.to_bytes(_NUMBER_BYTES, "big")
        self._next += 1
        payload = self._encode(KvEventBatch(time.time(), found, 0))
        with self._past_lock:
            self._past.append((number, payload))
        self._pub.send_multipart((self._topic, number, payload))

    def close(self) -> None:
        """Send what is left for at most half a second, and close all sockets. Idempotent; not during `add`."""
        self._pub.close(linger=_LINGER_MS)
        self._context.term()  # ends the thread, whose calls raise ContextTerminated
        if self._replay_thread is not None:
            self._replay_thread.join()

    def _open(self, kind: int, name: str, address: str, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        is_bound = kind == zmq.ROUTER or "*" in address or "::" in address
        try:
            if is_bound or address.startswith(("ipc://", "inproc://")):
                socket.bind(address)
            else:
                socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config: {name} {address!r} cannot be used: {error.strerror}"
            ) from error
        return socket

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Answer requests for past batches until the publisher is closed."""
        try:
            while True:
                identity, *rest = replay.recv_multipart()
                if not rest or len(rest[-1]) != _NUMBER_BYTES:
                    _log.warning("a request for past KV cache events is not the number of a batch in 8 bytes")
                    continue
                with self._past_lock:
                    past = list(self._past)
                for number, payload in past:
                    if number >= rest[-1]:
                        replay.send_multipart((identity, b"", number, payload))
                replay.send_multipart((identity, b"", _END_OF_REPLAY, b""))
        except zmq.ContextTerminated:
            replay.close(linger=0)

    def _converted(self, event: KvEvent) -> Iterator[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Yield the events of vLLM's format for one of ours: none for a changed priority.

        A block that is in the cache has an event of ours only when it leaves the cache. If its file was removed
        before, the event says that the block is removed, and then it is removed from both media.
        """
        if event.num_blocks is not None:
            yield AllBlocksCleared()
        if event.updated is not None and event.levels == (0, 1):
            yield BlockRemoved([event.updated], _CACHE)
            if event.updated not in self._saved:
                yield BlockStored([event.updated], None, [], self._size, None, self._saved_medium, None)
            self._saved[event.updated] = False
        if event.updated in self._saved and event.levels == (1, 0):
            self._saved[event.updated] = True  # a loaded block stays saved
        if event.stored:
            yield self._stored(event.stored, event.parent_hash)
        if of_cache := [each for each in event.removed if self._saved.get(each, True)]:
            yield BlockRemoved(of_cache, _CACHE)
        if of_saved := [each for each in event.removed if self._saved.pop(each, None) is not None]:
            yield BlockRemoved(of_saved, self._saved_medium)

    def _stored(self, blocks: Sequence[StoredBlock], parent: int | None) -> BlockStored:
        keys = [_extra_keys(block, is_first=parent is None and block is blocks[0]) for block in blocks]
        return BlockStored(
            [block.block_hash for block in blocks],
            parent,
            [token_id for block in blocks for token_id in block.token_ids],
            self._size,
            blocks[0].lora_task_id,
            _CACHE,
            blocks[0].lora_label or None,
            keys if any(keys) else None,
        )


def _extra_keys(block: StoredBlock, is_first: bool) -> tuple[str, ...] | None:
    ids = dict.fromkeys(f"{extra_id:016x}" for extra_id in block.extra_ids if extra_id)
    adapter = (block.lora_label,) if block.lora_label else ()
    return (*ids, *adapter, *(block.namespace if is_first else ())) or None
