"""Refuse requests whose responses would be too large to send, before they are computed.

Computes how large a response can get, and the space in /dev/shm that the requests of this process may need.
`reserve` and `release` may be called on any thread.

There are two limits. First, a gRPC message has at most 2 GiB; tritonserver answers with an error beyond
that. Second, a response reaches tritonserver through a pool of shared memory: each process has one, a file
in /dev/shm (whose size is a container's `--shm-size`). The pool places a tensor in a hole that is large
enough, or else grows by the tensor's size, rounded up; it never shrinks. If /dev/shm does not have that much
free space, sending fails with "Failed to increase the shared memory pool size". The file's space is
allocated before use, so there is no SIGBUS, and other responses continue, but all computation for this
response is lost. (Observed with tritonserver 2.51.)

For a model that is not decoupled, the stub accepts no other response after a failed one, so the client would
wait forever. Free space is therefore checked again just before a large response is sent: other processes,
such as other models of this server, may have taken it since the request arrived.

A pool holds one response at a time, because one thread sends them, and a send returns when tritonserver no
longer needs the memory. All responses therefore use the same space, and a response that is no larger than an
earlier one fits without growth.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from inflight.additional_outputs import CONTEXT, GENERATION, OfferedOutput
from inflight.core.request.request import Request
from inflight.endpoint.delivery import MAX_MERGED_LOGITS_BYTES
from inflight.endpoint.frames import MAX_FRAME_BYTES
from inflight.errors import InvalidArgument, Unavailable

# The rest of 2 GiB is for names, shapes and the smallest outputs.
MAX_RESPONSE_BYTES = (1 << 31) - 1 - (1 << 20)
MAX_LISTED_BYTES = MAX_FRAME_BYTES // 4
"""Largest size in bytes of a response's outputs other than logits.

They are sent over the engine endpoint as lists, with up to 9 bytes for a value of 4 bytes.
"""

SMALL_BYTES = 256 * 1024
"""Largest size in bytes of responses that are not counted. Every pool has more space than this from the start."""

_VALUE_BYTES = 4  # ids are INT32, all other counted values FP32
_RECEIPT_BYTES, _DIGITS_OF_ID = 16 << 10, 9  # without ids; an id with its separator
_TEXT_BYTES_PER_TOKEN = 32  # more than nearly every token needs
# A pool grows in steps of this many bytes, which the launcher sets; tritonserver's default is smaller.
_POOL_STEP_BYTES = 4 << 20


def shared_memory_space() -> tuple[int, int]:
    """Return the size of /dev/shm and its free space, in bytes."""
    status = os.statvfs("/dev/shm")
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


class ResponseBudget:
    """Shared memory that the responses of one process may need. Every `reserve` must be followed by a `release`.

    Args:
        space: Function that returns the total and the free bytes of shared memory.
    """

    def __init__(self, space: Callable[[], tuple[int, int]] = shared_memory_space) -> None:
        self._space = space
        self._lock = threading.Lock()
        self._tickets = itertools.count(1)
        self._reserved: dict[int, ResponseSize] = {}  # of all requests in flight, by ticket
        # Responses that the pool is known to have held, without those that fit after another of them.
        self._held: tuple[ResponseSize, ...] = ()

    def reserve(
        self,
        requests: Sequence[Request],
        vocab_size: int,
        streaming: bool,
        in_one: bool,
        offered: tuple[OfferedOutput, ...] = (),
    ) -> int:
        """Reserve shared memory for the responses to a client's request.

        Args:
            requests: The engine's requests, one for each prompt of the batch. Their field `output`
                determines the sizes.
            vocab_size: Number of values in a row of logits.
            streaming: Whether the client gets a stream of responses.
            in_one: Whether one response returns all sequences of all prompts.
            offered: The engine's additional outputs.

        Returns:
            A ticket, which must be passed to `release` after the answer; 0 for a request with small
            responses only.

        Raises:
            InvalidArgument: A response can exceed gRPC's limit or the whole of /dev/shm.
            Unavailable: A response can exceed the free space of /dev/shm.
        """
        sizes = [response_size(request, vocab_size, streaming, in_one, offered) for request in requests]
        largest = _sum(sizes) if in_one else max(sizes, key=lambda size: size.num_bytes)
        if largest.num_bytes <= SMALL_BYTES:
            return 0
        _refuse_impossible(largest)
        with self._lock:
            self._check_space(largest, list(self._reserved.values()))
            ticket = next(self._tickets)
            self._reserved[ticket] = largest
        return ticket

    def sending(self, ticket: int, sizes: Iterable[tuple[str, int]]) -> AbstractContextManager[None]:
        """Return a context manager in which to send a response; entering it checks the free space of /dev/shm.

        Args:
            ticket: Ticket from `reserve`; with 0 nothing is checked.
            sizes: (name, bytes) of the response's tensors; read only if the ticket is not 0.

        Raises:
            Unavailable: There is not enough space for the response now; nothing was sent.
        """
        return self._sending(sizes) if ticket else nullcontext()  # nearly every response

    @contextmanager
    def _sending(self, sizes: Iterable[tuple[str, int]]) -> Generator[None]:
        size = ResponseSize(tuple(sizes))
        if size.num_bytes > SMALL_BYTES:
            with self._lock:
                self._check_space(size, [])
        yield
        with self._lock:
            if not size.fits_after(*self._held):
                self._held = _add(size, self._held)

    def release(self, ticket: int) -> None:
        """Release the memory reserved for an answered request. Does nothing for 0, or for a released ticket."""
        if ticket:
            with self._lock:
                self._reserved.pop(ticket, None)

    def _check_space(self, size: ResponseSize, in_flight: list[ResponseSize]) -> None:
        total, free = self._space()
        if size.pool_growth > total:
            raise InvalidArgument(
                f"a response to this request can take {size}, and goes through /dev/shm, which has "
                f"{_shown(total)} in all: give the container a larger --shm-size (at least "
                f"{-(-size.pool_growth // (1 << 20)) + 64}m), or {_LESS}"
            )
        if self._growth([*in_flight, size]) > free:
            others = _shown(min(self._growth(in_flight), free))
            raise Unavailable(
                f"a response to this request can take {size}, and goes through /dev/shm, of which "
                f"{_shown(free)} are free and {others} may be needed by requests in flight: try again later, "
                f"give the container a larger --shm-size, or {_LESS}"
            )

    def _growth(self, sizes: list[ResponseSize]) -> int:
        """Return the pool's largest growth in bytes for these responses, which is for ascending sizes."""
        held, growth = self._held, 0
        for size in sorted(sizes, key=lambda size: size.num_bytes):
            if not size.fits_after(*held):
                growth += size.pool_growth
                held = _add(size, held)
        return growth


def _add(size: ResponseSize, held: tuple[ResponseSize, ...]) -> tuple[ResponseSize, ...]:
    """Return `held` with `size` in place of the responses that fit after it."""
    return *(each for each in held if not each.fits_after(size)), size


_LESS = (
    "ask for less (request_output_len, num_top_log_probs, return_context_logits, return_generation_logits, "
    "additional_outputs; streamed, generation_logits and the like take little)"
)


@dataclass(frozen=True, slots=True)
class ResponseSize:
    """The largest sizes of the outputs of one response.

    Attributes:
        outputs: (name, bytes) of each output.
    """

    outputs: tuple[tuple[str, int], ...]

    @property
    def num_bytes(self) -> int:
        """Return the size of all outputs together, in bytes."""
        return sum(size for _, size in self.outputs)

    @property
    def listed_bytes(self) -> int:
        """Return the total size in bytes of the outputs other than context and generation outputs."""
        return sum(size for name, size in self.outputs if not name.startswith((CONTEXT, GENERATION)))

    @property
    def pool_growth(self) -> int:
        """Return the pool's largest growth in bytes for this response: the pool may grow for each tensor."""
        return self.num_bytes + _POOL_STEP_BYTES * sum(size > SMALL_BYTES for _, size in self.outputs)

    def fits_after(self, *held: ResponseSize) -> bool:
        """Return whether a pool that has held one of the responses `held` can hold this one without growing."""
        largest = max((size for _, size in self.outputs), default=0)
        # Small tensors always fit beside large ones, and need not be compared.
        return any(
            self.num_bytes <= other.num_bytes + 2 * SMALL_BYTES
            and any(size >= largest for _, size in other.outputs)
            for other in held
        )

    def __str__(self) -> str:
        large = [f"{name} {_shown(size)}" for name, size in self.outputs if 20 * size >= self.num_bytes]
        return f"{_shown(self.num_bytes)} ({', '.join(large)})"


def _refuse_impossible(size: ResponseSize) -> None:
    if size.num_bytes > MAX_RESPONSE_BYTES:
        raise InvalidArgument(
            f"a response to this request can take {size}, but a gRPC message has at most 2 GiB: {_LESS}"
        )
    if size.listed_bytes > MAX_LISTED_BYTES:
        raise InvalidArgument(
            f"a response to this request can take {size}; ids, text and log probabilities can take at most "
            f"{_shown(MAX_LISTED_BYTES)}: {_LESS}"
        )


def response_size(
    request: Request,
    vocab_size: int,
    streaming: bool,
    in_one: bool,
    offered: tuple[OfferedOutput, ...] = (),
) -> ResponseSize:
    """Return the size of the largest response to one prompt.

    For a stream, this can be nearly the whole answer, because waiting responses are merged.
    """
    output, new, prompt = request.output, request.max_new_tokens, request.prompt_length
    rows = request.sampling.num_outputs * (request.sampling.num_sequences if in_one else 1)
    row_bytes = vocab_size * _VALUE_BYTES
    shown = 0 if streaming or output.exclude_input_from_output else prompt
    logits_rows = _logits_rows(request, row_bytes, streaming) if output.return_generation_logits else 0
    ids = rows * (shown + new)
    return ResponseSize(
        (
            ("output_ids and text", ids * (_VALUE_BYTES + _TEXT_BYTES_PER_TOKEN)),
            ("output_log_probs", rows * new * _VALUE_BYTES * output.return_log_probs),
            ("top_log_probs", rows * new * output.num_top_log_probs * 2 * _VALUE_BYTES),
            ("prompt_log_probs", prompt * _VALUE_BYTES * output.return_prompt_log_probs),
            ("context_logits", prompt * row_bytes * output.return_context_logits),
            ("generation_logits", rows * logits_rows * row_bytes),
            ("receipt", _receipt_bytes(request) * output.return_receipt),
            *(size for each in offered for size in _additional_sizes(request, each, streaming, rows)),
        )
    )


def _receipt_bytes(request: Request) -> int:
    """Return the largest usual size of a request's receipt."""
    generated = request.max_new_tokens * request.sampling.num_sequences * request.sampling.num_outputs
    return _RECEIPT_BYTES + (request.prompt_length + generated) * _DIGITS_OF_ID


def _additional_sizes(
    request: Request, offered: OfferedOutput, streaming: bool, num_sequences: int
) -> Generator[tuple[str, int]]:
    """Yield the sizes of an additional output's two tensors, 0 for a tensor that is not requested."""
    asked = next((each for each in request.output.additional_outputs if each.name == offered.name), None)
    row_bytes = offered.width * _VALUE_BYTES
    gathers = asked is not None and asked.gather_context
    yield CONTEXT + offered.name, request.prompt_length * row_bytes * gathers
    num_rows = 0 if asked is None else _logits_rows(request, row_bytes, streaming)
    yield GENERATION + offered.name, num_sequences * num_rows * row_bytes


def _logits_rows(request: Request, row_bytes: int, streaming: bool) -> int:
    if not streaming:
        return request.max_new_tokens
    if request.sampling.uses_beams:
        return 0  # a streamed beam search returns no generation logits
    at_once = 1 + max(request.draft_length, request.prompt_lookup_num_tokens)
    return min(request.max_new_tokens, max(at_once, MAX_MERGED_LOGITS_BYTES // row_bytes))


def _sum(sizes: Sequence[ResponseSize]) -> ResponseSize:
    """Return the size of one response with the outputs of several."""
    together = zip(*(size.outputs for size in sizes))
    return ResponseSize(tuple((output[0][0], sum(size for _, size in output)) for output in together))


def _shown(num_bytes: int) -> str:
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 30):.2f} GiB"
