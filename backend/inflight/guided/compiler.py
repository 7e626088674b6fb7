"""Compiles guides in the background: `inflight.core.ports.GuideCompiler` over a process that can be killed.

Owns the waiting guides, the results of compiled guides, and the process. The loop thread calls `submit` and
`events`, which never block; a thread of the ChildCompiler waits for the process.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from inflight.core.request.guide import Guide, GuideEvent
from inflight.core.request.request import Origin
from inflight.errors import (
    InflightError,
    InvalidArgument,
    Name,
    StepFailed,
    Unsupported,
    error_from_kind,
)
from inflight.guided.child import CompileAnswer, CompileJob, read_frame, write_frame
from inflight.guided.grammars import Grammars
from inflight.guided.vocabulary import GuideVocabulary
from inflight.log_lines import REQUEST_ID

_log = logging.getLogger(__name__)

_START_S = 120.0
"""How long the process may take to import its library and read the vocabulary, in seconds."""
_SHARE_OF_TIME = 0.1
"""Fraction of the time limit after which a guide is interrupted if new guides wait."""
_MAX_FAILURES = 256
_ANSWER = msgspec.msgpack.Decoder(CompileAnswer)


class _Order(Enum):
    """Commands in the compiler thread's queue, beside the guides to compile."""

    PREPARE = "prepare"
    END = "end"


@dataclass(frozen=True, slots=True)
class GuideBounds:
    """The limits of a guide's size and compile time.

    Attributes:
        max_bytes: Maximum size of a guide, in bytes of UTF-8.
        timeout_s: Maximum compile time, in seconds.
    """

    max_bytes: int = 65536
    timeout_s: float = 5.0


class ChildCompiler:
    """Compiles guides one after another, and adds the results to `grammars`, which fills masks with them.

    If a guide takes longer than a tenth of the time limit while new guides wait, it is interrupted, and
    compiled again with the whole time limit when no new guide waits. So a new guide waits for one slow guide
    at most, and for each new guide before it a tenth of the limit and a start of the process. A guide whose
    requests have all ended is not compiled. Guides of unfinished requests are kept.

    A guide that is known to be invalid is refused at once the next time. A guide that took too long is tried
    again, because the machine may have been busy.

    Args:
        grammars: Receives the compiled guides.
        backend_name: The grammar library.
        bounds: The limits of each guide.
        notify: Called when there are events, on this object's thread.
        command: The command that starts the process.
    """

    def __init__(
        self,
        grammars: Grammars,
        backend_name: str,
        bounds: GuideBounds,
        notify: Callable[[], None],
        command: Sequence[str] = (sys.executable, "-I", "-m", "inflight.guided.child"),
    ) -> None:
        self._grammars = grammars
        self._bounds = bounds
        self._notify = notify
        self._command = (*command, backend_name)
        self._child: _Child | None = None
        self._lock = threading.Lock()
        self._waiting: dict[Guide, list[int]] = {}  # ids of the requests that wait for a guide
        self._failures: OrderedDict[Guide, InflightError] = OrderedDict()
        self._events: list[GuideEvent] = []
        self._guides: dict[int, Guide] = {}  # by id of each unfinished request
        self._origins: dict[
            Guide, Origin | None
        ] = {}  # the first waiting request of each guide, for log lines
        self._jobs: queue.SimpleQueue[Guide | _Order] = queue.SimpleQueue()
        self._slow: deque[Guide] = deque()  # interrupted guides to compile again; used by the thread only
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="guide-compiler", daemon=True)
        self._thread.start()

    def submit(self, request_id: int, guide: Guide, origin: Origin | None = None) -> None:
        num_bytes = len(guide.text.encode(errors="surrogatepass"))
        with self._lock:
            failure = self._failures.get(guide)
            if num_bytes > self._bounds.max_bytes:
                failure = InvalidArgument(
                    Name("guided_decoding_guide"),
                    f" has {num_bytes} bytes, expected at most {self._bounds.max_bytes} "
                    "(guided_decoding_max_guide_bytes)",
                )
            if failure is not None:
                self._events.append(GuideEvent(request_id, failure.kind, failure.marked))
                return
            self._guides[request_id] = guide
            self._grammars.pin(guide)
            if guide in self._waiting:
                self._waiting[guide].append(request_id)
            elif guide in self._grammars:
                self._events.append(GuideEvent(request_id))
            else:
                self._waiting[guide] = [request_id]
                self._origins[guide] = origin
                self._jobs.put(guide)

    def forget(self, request_id: int) -> None:
        with self._lock:
            guide = self._guides.pop(request_id, None)
            if guide is None:
                return
            self._grammars.unpin(guide)
            if request_id in self._waiting.get(guide, ()):
                self._waiting[guide].remove(request_id)
            self._events = [each for each in self._events if each.request_id != request_id]

    def events(self) -> tuple[GuideEvent, ...]:
        if not self._events:
            return ()
        with self._lock:
            events, self._events = tuple(self._events), []
        return events

    def prepare(self) -> None:
        """Set up the grammar library on this object's thread, so that the first guide need not wait for it."""
        self._jobs.put(_Order.PREPARE)

    def close(self) -> None:
        """Kill the process and end the thread. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._child is not None:
                self._child.kill()
        self._jobs.put(_Order.END)
        self._thread.join()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._is_closed:
            REQUEST_ID.set("")
            is_slow = bool(self._slow) and self._jobs.empty()
            guide = self._slow.popleft() if is_slow else self._jobs.get()
            if guide is _Order.END:
                break
            if guide is _Order.PREPARE:
                self._set_up_library()
                continue
            if self._is_unwanted(guide):
                continue
            origin = self._origins[guide]
            REQUEST_ID.set("" if origin is None else origin.request_id)
            error: InflightError | None = None
            try:
                self._grammars.add(guide, self._compile(guide, is_slow))
            except _Interrupted:
                self._slow.append(guide)
                continue
            except InflightError as failure:
                error = failure
            except Exception as failure:  # a library may raise anything; only its guide fails
                _log.warning("a guide of type %s could not be compiled", guide.type.value, exc_info=True)
                error = StepFailed(Name("guided_decoding_guide"), f" could not be compiled: {failure!r}")
            self._record_result(guide, error)
        self._end_child()

    def _set_up_library(self) -> None:
        try:
            self._grammars.library()
        except Unsupported:  # as the log says; guides will be refused
            pass
        except Exception:  # a library may raise anything; every guide will fail with the same error
            _log.warning("no guide can be compiled", exc_info=True)

    def _is_unwanted(self, guide: Guide) -> bool:
        """Return whether all requests for a guide have ended; if so, drop the guide."""
        with self._lock:
            is_unwanted = not self._waiting[guide]
            if is_unwanted:
                del self._waiting[guide], self._origins[guide]
            return is_unwanted

    def _record_result(self, guide: Guide, error: InflightError | None) -> None:
        kind, message = ("", "") if error is None else (error.kind, error.marked)
        with self._lock:
            events = [GuideEvent(each, kind, message) for each in self._waiting.pop(guide)]
            del self._origins[guide]
            self._events += events
            if isinstance(error, InvalidArgument) and not isinstance(error, _OutOfBounds):
                self._failures[guide] = error
                while len(self._failures) > _MAX_FAILURES:
                    self._failures.popitem(last=False)
        if events:
            self._notify()

    def _compile(self, guide: Guide, is_slow: bool) -> bytes:
        """Compile a guide in the child process, which is killed if it takes too long."""
        child = self._started()
        may_continue = (lambda: True) if is_slow else self._jobs.empty
        try:
            answer = child.ask(CompileJob(guide), self._bounds.timeout_s, may_continue)
        except _Interrupted:
            self._end_child()
            raise
        except (TimeoutError, OSError) as error:
            self._end_child()
            raise _out_of_bounds(guide, child, error, self._bounds) from None
        if answer.error_kind:
            raise error_from_kind(answer.error_kind, answer.error)
        return answer.compiled

    def _started(self) -> _Child:
        """Return the child process, after starting it again if it has ended."""
        if self._child is not None:
            if not self._child.has_ended:
                return self._child
            _log.warning(
                "the idle process that compiles guides ended with exit status %s",
                self._child.status,
            )
            self._end_child()
        vocabulary = self._grammars.library().vocabulary
        child = _Child(self._command)
        with self._lock:
            self._child = child
            if self._is_closed:
                child.kill()
        try:
            child.ask(vocabulary, _START_S, lambda: True)
        except (TimeoutError, OSError) as error:
            self._end_child()
            raise StepFailed(
                f"the process that compiles guides did not start ({error}); see the server's log"
            ) from None
        return child

    def _end_child(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.close()


class _Interrupted(Exception):
    """A guide was interrupted because new guides wait. The process has been killed."""


class _OutOfBounds(InvalidArgument):
    """A guide took too much time or memory. It may be compiled again later."""


def _out_of_bounds(guide: Guide, child: _Child, error: Exception, bounds: GuideBounds) -> InflightError:
    what = f" of type {guide.type.value} with {len(guide.text)} characters"
    if isinstance(error, TimeoutError):
        milliseconds = round(bounds.timeout_s * 1000)
        return _OutOfBounds(
            Name("guided_decoding_guide"),
            f"{what} takes longer to compile than {milliseconds} ms (guided_decoding_compile_timeout_ms): "
            "send a simpler one",
        )
    _log.warning("the process that compiles guides ended with %s", child.status)
    return _OutOfBounds(
        Name("guided_decoding_guide"),
        f"{what} was not compiled: the compiling process ended with {child.status}. It may have needed more "
        "memory than is allowed: send a simpler one",
    )


class _Child:
    """One child process, and the pipes to it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", close_fds=True
        )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def status(self) -> int | None:
        """The exit status, as `Popen.returncode`."""
        return self._process.wait()

    def ask(
        self, message: GuideVocabulary | CompileJob, timeout_s: float, may_continue: Callable[[], bool]
    ) -> CompileAnswer:
        """Send a message and wait for the answer.

        Args:
            message: The vocabulary first, then jobs.
            timeout_s: How long to wait, in seconds.
            may_continue: Called on another thread after a tenth of the timeout; returns whether to wait on.

        Raises:
            _Interrupted: `may_continue` returned false; the process has been killed.
            TimeoutError: It took too long; the process has been killed.
            OSError: The process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        has_answered = threading.Event()
        reasons: list[Exception] = []

        def watch() -> None:
            first_s = timeout_s * _SHARE_OF_TIME
            if has_answered.wait(first_s):
                return
            if not may_continue():
                reasons.append(_Interrupted())
            elif has_answered.wait(timeout_s - first_s):
                return
            else:
                reasons.append(TimeoutError(f"no answer in {timeout_s} s"))
            self._process.kill()

        watcher = threading.Thread(target=watch, name="guide-watcher", daemon=True)
        watcher.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                write_frame(self._process.stdin, message)
            body = read_frame(self._process.stdout)
        finally:
            has_answered.set()
            watcher.join()
        if reasons:
            self._process.wait()  # it may have answered at the last moment
        if body is None:
            raise reasons[0] if reasons else OSError("the process has ended")
        return _ANSWER.decode(body)

    def kill(self) -> None:
        """Kill the process. Idempotent; any thread."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pipes, after the process has ended and no call of `ask` is running."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # unread input
                if pipe is not None:
                    pipe.close()
