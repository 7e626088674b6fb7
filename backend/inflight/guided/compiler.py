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
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from inflight.core.request.guide import Guide, GuideEvent
from inflight.errors import InflightError, InvalidArgument, StepFailed, error_from_code
from inflight.guided.child import Answer, Job, read_frame, write_frame
from inflight.guided.grammars import Grammars
from inflight.guided.vocabulary import GuideVocabulary

_log = logging.getLogger(__name__)

_START_S = 120.0
"""How long the process may take to import its library and read the vocabulary."""
_MOST_FAILURES = 256
_ANSWER = msgspec.msgpack.Decoder(Answer)


@dataclass(frozen=True, slots=True)
class GuideBounds:
    """What a guide may take.

    Attributes:
        max_bytes: Longest guide, in bytes of UTF-8.
        timeout_s: Longest time to compile it, in seconds.
    """

    max_bytes: int = 65536
    timeout_s: float = 5.0


class ChildCompiler:
    """Has guides compiled one after another, and the result put where tokens are chosen.

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
        self._jobs: queue.SimpleQueue[Guide | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="guide-compiler", daemon=True)
        self._thread.start()

    def submit(self, request_id: int, guide: Guide) -> None:
        """As `GuideCompiler.submit`."""
        num_bytes = len(guide.text.encode(errors="surrogatepass"))
        if num_bytes > self._bounds.max_bytes:
            error = InvalidArgument(
                f"guided_decoding_guide has {num_bytes} bytes, expected at most {self._bounds.max_bytes} "
                "(guided_decoding_max_guide_bytes)"
            )
            self._events.append(GuideEvent(request_id, error.code, str(error)))
            return
        with self._lock:
            failure = self._failures.get(guide)
            if failure is not None:
                self._events.append(GuideEvent(request_id, failure.code, str(failure)))
            elif guide in self._waiting:
                self._waiting[guide].append(request_id)
            elif guide in self._grammars:
                self._events.append(GuideEvent(request_id))
            else:
                self._waiting[guide] = [request_id]
                self._jobs.put(guide)

    def events(self) -> tuple[GuideEvent, ...]:
        """As `GuideCompiler.events`."""
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
        while (guide := self._jobs.get()) is not None and not self._is_closed:
            error: InflightError | None = None
            try:
                self._grammars.add(guide, self._compile(guide))
            except InflightError as failure:
                error = failure
            except Exception as failure:  # of a library: its guide alone fails
                _log.exception("a guide of type %s could not be compiled", guide.type.value)
                error = StepFailed(f"guided_decoding_guide could not be compiled: {failure!r}")
            self._tell(guide, error)
        self._end_child()

    def _tell(self, guide: Guide, error: InflightError | None) -> None:
        code, message = ("", "") if error is None else (error.code, str(error))
        with self._lock:
            self._events += [GuideEvent(each, code, message) for each in self._waiting.pop(guide)]
            if isinstance(error, InvalidArgument) and not isinstance(error, _OutOfBounds):
                self._failures[guide] = error
                while len(self._failures) > _MOST_FAILURES:
                    self._failures.popitem(last=False)
        self._notify()

    def _compile(self, guide: Guide) -> bytes:
        """What the process makes of a guide; it is killed if that takes too long."""
        child = self._started()
        try:
            answer = child.ask(Job(guide), self._bounds.timeout_s)
        except (TimeoutError, OSError) as error:
            self._end_child()
            raise _out_of_bounds(guide, child, error, self._bounds) from None
        if answer.error_code:
            raise error_from_code(answer.error_code, answer.error)
        return answer.compiled

    def _started(self) -> _Child:
        """The process, which is started again if it was killed."""
        if self._child is not None:
            return self._child
        child = _Child(self._command)
        with self._lock:
            self._child = child
            if self._is_closed:
                child.kill()
        try:
            child.ask(self._grammars.vocabulary, _START_S)
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
    return _OutOfBounds(f"{what} takes more memory to compile than there may be: send a simpler one")


class _Child:
    """The process, from its start to its end, and the pipes to it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", close_fds=True
        )

    @property
    def status(self) -> int | None:
        """How it ended, as `Popen.returncode`."""
        return self._process.wait()

    def ask(self, message: GuideVocabulary | Job, timeout_s: float) -> Answer:
        """Send a message and wait for the answer.

        Raises:
            TimeoutError: It took too long; the process has been killed.
            OSError: The process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        has_expired = threading.Event()

        def expire() -> None:
            has_expired.set()
            self._process.kill()

        timer = threading.Timer(timeout_s, expire)
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                write_frame(self._process.stdin, message)
            body = read_frame(self._process.stdout)
        finally:
            timer.cancel()
        if body is None:
            if has_expired.is_set():
                raise TimeoutError(f"no answer in {timeout_s} s")
            raise OSError("the process has ended")
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
