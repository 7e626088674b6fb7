"""Compiles guides beside the loop: `inflight.core.ports.GuideCompiler` over a process that can be killed.

Owns which guides wait, what became of those that are known, and the process. The loop thread calls `submit` and
`events`, which never block; a thread of this object waits for the process.
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

import msgspec

from inflight.core.request.guide import Guide, GuideEvent
from inflight.errors import InflightError, InvalidArgument, StepFailed, error_from_code
from inflight.guided.child import CompileAnswer, CompileJob, read_frame, write_frame
from inflight.guided.grammars import Grammars
from inflight.guided.vocabulary import GuideVocabulary

_log = logging.getLogger(__name__)

_START_S = 120.0
"""How long the process may take to import its library and read the vocabulary."""
_SHARE_OF_TIME = 0.1
"""How much of its time a guide gets before those behind it, if there are any, get their turns first."""
_MOST_FAILURES = 256
_ANSWER = msgspec.msgpack.Decoder(CompileAnswer)


@dataclass(frozen=True, slots=True)
class GuideBounds:
    """The bounds of a guide's size and compile time.

    Attributes:
        max_bytes: Longest guide, in bytes of UTF-8.
        timeout_s: Longest time to compile it, in seconds.
    """

    max_bytes: int = 65536
    timeout_s: float = 5.0


class ChildCompiler:
    """Has guides compiled one after another, and the result put where tokens are chosen.

    A guide that takes longer than a tenth of its time while others wait is stopped, and tried again, with all of
    its time, when no guide waits for its first try. So a new guide waits for one slow guide at most, and for a
    tenth of that time, and a start of the process, for each guide that is new too. One that was asked for by
    requests that have all ended since is not compiled. The guides of requests that have not ended are kept.

    A guide that is known to be wrong is refused at once the next time. One that took too long is tried again: the
    machine may have been busy.

    Args:
        grammars: Takes compiled guides.
        backend_name: The library.
        bounds: What a guide may take.
        notify: Called when there are events; on this object's thread.
        command: Starts the process.
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
        self._guides: dict[int, Guide] = {}  # of the requests that have not ended
        self._jobs: queue.SimpleQueue[Guide | None] = queue.SimpleQueue()
        self._slow: deque[Guide] = deque()  # to be tried again; of the thread alone
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="guide-compiler", daemon=True)
        self._thread.start()

    def submit(self, request_id: int, guide: Guide) -> None:
        num_bytes = len(guide.text.encode(errors="surrogatepass"))
        with self._lock:
            failure = self._failures.get(guide)
            if num_bytes > self._bounds.max_bytes:
                failure = InvalidArgument(
                    f"guided_decoding_guide has {num_bytes} bytes, expected at most {self._bounds.max_bytes} "
                    "(guided_decoding_max_guide_bytes)"
                )
            if failure is not None:
                self._events.append(GuideEvent(request_id, failure.code, str(failure)))
                return
            self._guides[request_id] = guide
            self._grammars.pin(guide)
            if guide in self._waiting:
                self._waiting[guide].append(request_id)
            elif guide in self._grammars:
                self._events.append(GuideEvent(request_id))
            else:
                self._waiting[guide] = [request_id]
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

    def close(self) -> None:
        """Kill the process and end the thread. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._child is not None:
                self._child.kill()
        self._jobs.put(None)
        self._thread.join()

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._is_closed:
            is_slow = bool(self._slow) and self._jobs.empty()
            guide = self._slow.popleft() if is_slow else self._jobs.get()
            if guide is None:
                break
            if self._is_unwanted(guide):
                continue
            error: InflightError | None = None
            try:
                self._grammars.add(guide, self._compile(guide, is_slow))
            except _LetOthersFirst:
                self._slow.append(guide)
                continue
            except InflightError as failure:
                error = failure
            except Exception as failure:  # a library may raise anything; its guide alone fails
                _log.warning("a guide of type %s could not be compiled", guide.type.value, exc_info=True)
                error = StepFailed(f"guided_decoding_guide could not be compiled: {failure!r}")
            self._tell(guide, error)
        self._end_child()

    def _is_unwanted(self, guide: Guide) -> bool:
        """Whether all requests that have asked for a guide have ended; then it is dropped."""
        with self._lock:
            is_unwanted = not self._waiting[guide]
            if is_unwanted:
                del self._waiting[guide]
            return is_unwanted

    def _tell(self, guide: Guide, error: InflightError | None) -> None:
        code, message = ("", "") if error is None else (error.code, str(error))
        with self._lock:
            told = [GuideEvent(each, code, message) for each in self._waiting.pop(guide)]
            self._events += told
            if isinstance(error, InvalidArgument) and not isinstance(error, _OutOfBounds):
                self._failures[guide] = error
                while len(self._failures) > _MOST_FAILURES:
                    self._failures.popitem(last=False)
        if told:
            self._notify()

    def _compile(self, guide: Guide, is_slow: bool) -> bytes:
        """The child process's answer to a guide; the process is killed if it takes too long."""
        child = self._started()
        may_go_on = (lambda: True) if is_slow else self._jobs.empty
        try:
            answer = child.ask(CompileJob(guide), self._bounds.timeout_s, may_go_on)
        except _LetOthersFirst:
            self._end_child()
            raise
        except (TimeoutError, OSError) as error:
            self._end_child()
            raise _out_of_bounds(guide, child, error, self._bounds) from None
        if answer.error_code:
            raise error_from_code(answer.error_code, answer.error)
        return answer.compiled

    def _started(self) -> _Child:
        """The process, which is started again if it has ended."""
        if self._child is not None:
            if not self._child.has_ended:
                return self._child
            _log.warning(
                "the process that compiles guides ended with %s while it had nothing to do",
                self._child.status,
            )
            self._end_child()
        child = _Child(self._command)
        with self._lock:
            self._child = child
            if self._is_closed:
                child.kill()
        try:
            child.ask(self._grammars.vocabulary, _START_S, lambda: True)
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


class _LetOthersFirst(Exception):
    """A guide has had its share of time, and others wait; the process has been killed."""


class _OutOfBounds(InvalidArgument):
    """A guide took too much time or memory; it may be tried again."""


def _out_of_bounds(guide: Guide, child: _Child, error: Exception, bounds: GuideBounds) -> InflightError:
    what = f"guided_decoding_guide of type {guide.type.value} with {len(guide.text)} characters"
    if isinstance(error, TimeoutError):
        milliseconds = round(bounds.timeout_s * 1000)
        return _OutOfBounds(
            f"{what} takes longer to compile than {milliseconds} ms (guided_decoding_compile_timeout_ms): "
            "send a simpler one"
        )
    _log.warning("the process that compiles guides ended with %s", child.status)
    return _OutOfBounds(
        f"{what} was not compiled: the process that did so ended with {child.status}. It may have taken more "
        "memory than there may be: send a simpler one"
    )


class _Child:
    """The process, from its start to its end, and the pipes to it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", close_fds=True
        )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def status(self) -> int | None:
        """How it ended, as `Popen.returncode`."""
        return self._process.wait()

    def ask(
        self, message: GuideVocabulary | CompileJob, timeout_s: float, may_go_on: Callable[[], bool]
    ) -> CompileAnswer:
        """Send a message and wait for the answer.

        Args:
            message: The vocabulary first, then jobs.
            timeout_s: How long to wait, in seconds.
            may_go_on: Called after a tenth of that, on another thread: whether to wait for the rest.

        Raises:
            _LetOthersFirst: It may not; the process has been killed.
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
            if not may_go_on():
                reasons.append(_LetOthersFirst())
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
            self._process.wait()  # it may have answered in its last moment
        if body is None:
            raise reasons[0] if reasons else OSError("the process has ended")
        return _ANSWER.decode(body)

    def kill(self) -> None:
        """End it, whatever it does. Idempotent; any thread."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pipes, once it has ended and nobody asks any more."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what it did not read
                if pipe is not None:
                    pipe.close()
