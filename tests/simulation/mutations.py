"""Faults to plant in the source of the server: each replaces one text in one module."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from inflight.testing.simulation.integrity import check_integrity

NUM_SEEDS = 2000
"""Number of seeds of a simulation, one of which has to fail with a planted mistake."""


def fails(run: Callable[[int], object], seed: int) -> bool:
    """Return whether a simulation reports a broken promise."""
    try:
        run(seed)
    except AssertionError:
        return True
    return False


@dataclass(frozen=True)
class Mutation:
    """A plausible mistake.

    Attributes:
        name: Description of the mistake.
        module: Name of the module, without the package.
        old, new: The text that occurs once in the module, and its replacement.
        is_rare: Whether it takes dozens of seeds or more to reveal it, so that it is planted with `--all` only.
    """

    name: str
    module: str
    old: str
    new: str
    is_rare: bool = False

    @contextlib.contextmanager
    def planted(self) -> Generator[None]:
        """Run the package with the mistake in this context."""
        module = importlib.import_module(f"inflight.{self.module}")
        path = module.__file__
        assert path is not None
        source = Path(path).read_text(encoding="utf-8")
        assert source.count(self.old) == 1, (
            f"{self.name}: {self.module} has the text {source.count(self.old)} times"
        )
        users = [each for name, each in sorted(sys.modules.items()) if name.startswith("inflight.")]
        before = {each: dict(vars(each)) for each in users}
        exec(compile(source.replace(self.old, self.new), path, "exec"), vars(module))
        defined = [
            (before[module][name], value)
            for name, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__ and name in before[module]
        ]
        for old, new in defined:
            if isinstance(old, type) and isinstance(new, type):
                check_integrity.register(new, check_integrity.dispatch(old))
        for each in users:
            for name, value in list(vars(each).items()):
                for old, new in defined:
                    if value is old:
                        setattr(each, name, new)
        heirs = [
            (heir, heir.__bases__)
            for old, _ in defined
            if isinstance(old, type)
            for heir in old.__subclasses__()
            if heir.__module__ != module.__name__
        ]
        for heir, bases in heirs:
            heir.__bases__ = tuple(dict(defined).get(base, base) for base in bases)
        try:
            yield
        finally:
            for heir, bases in heirs:
                heir.__bases__ = bases
            # Threads of real servers use these modules meanwhile, so no name may be missing for a moment.
            for each, names in before.items():
                vars(each).update(names)
                for name in vars(each).keys() - names.keys():
                    del vars(each)[name]

    def is_revealed_by(self, run: Callable[[int], object]) -> bool:
        """Return whether a simulation fails with the mistake, for one of NUM_SEEDS seeds."""
        with self.planted():
            return any(fails(run, seed) for seed in range(NUM_SEEDS))


def every(step: int, mutations: Sequence[Mutation]) -> list[Mutation]:
    """Return the mistakes of the default tier: one of `step` in a row, without the rare ones."""
    return [each for each in mutations[::step] if not each.is_rare]


MUTATIONS = (
    Mutation(
        "a new request does not wake the loop",
        "endpoint.local",
        "        self._notify()\n        return RequestHandle",
        "        return RequestHandle",
    ),
    Mutation(
        "an answered request is not forgotten",
        "endpoint.local",
        "                target = self._targets.pop(response.request_id, None)\n                self._expect",
        "                target = self._targets.get(response.request_id)\n                self._expect",
    ),
    Mutation(
        "a draining engine waits for nobody",
        "endpoint.local",
        "            if self._wait_for_all(timeout_s):\n                return",
        "            return",
    ),
    Mutation(
        "stop signals are polled before they are stored",
        "endpoint.local",
        "signals, self._stop_signals = self._stop_signals, []",
        "signals, self._stop_signals = [], []",
    ),
    Mutation(
        "the response of the wrong request",
        "endpoint.server",
        "self._delivery.put(replace(response, request_id=local_id))",
        "self._delivery.put(response)",
    ),
    Mutation(
        "answers of two threads are mixed",
        "endpoint.server",
        "        with self._send_lock:\n            for is_large",
        "        if True:\n            for is_large",
    ),
    Mutation(
        "requests of a lost front end go on",
        "endpoint.server",
        "        for handle in left:\n            handle.stop()\n",
        "",
    ),
    Mutation(
        "an ended connection is not forgotten",
        "endpoint.server",
        "        self._server.forget(self)\n",
        "",
    ),
    Mutation(
        "an ended request stays in its connection",
        "endpoint.server",
        "                    self._handles.pop(local_id, None)\n",
        "                    pass\n",
    ),
    Mutation(
        "a request that ended before it was noted stays in its connection",
        "endpoint.server",
        "            if not finished.is_set():\n                self._handles[local_id] = handle",
        "            self._handles[local_id] = handle",
    ),
    Mutation(
        "no more connections after descriptors ran out",
        "endpoint.server",
        "                    return\n                continue",
        "                    return\n                return",
    ),
    Mutation("the socket's file is left", "endpoint.server", "        remove(self._path)\n", ""),
    Mutation(
        "a writer does not end with its connection",
        "endpoint.server",
        "        self._delivery.close()\n        self._disconnect()\n        with self._lock:",
        "        self._disconnect()\n        with self._lock:",
    ),
    Mutation(
        "a lost connection does not answer its requests",
        "endpoint.client",
        "        for request_id, target in unanswered:",
        "        for request_id, target in []:",
    ),
    Mutation(
        "a lost connection is used again",
        "endpoint.client",
        "if self._connection is None or self._connection.ended:",
        "if self._connection is None:",
    ),
    Mutation(
        "an answered request is answered again when the connection ends",
        "endpoint.client",
        "                target = self._targets.pop(response.request_id, None)\n            else:",
        "                target = self._targets.get(response.request_id)\n            else:",
    ),
    Mutation(
        "messages of two threads are mixed",
        "endpoint.client",
        "            with self._send_lock:\n                for part",
        "            if True:\n                for part",
    ),
    Mutation(
        "a request is noted after it was sent",
        "endpoint.client",
        "            self._targets[request_id] = target\n        if self._send(*parts):\n            return True",
        "            pass\n        if self._send(*parts):\n            self._targets[request_id] = target\n"
        "            return True",
    ),
    Mutation(
        "a reader that fails does not shut its connection",
        "endpoint.client",
        "            self.ended = True\n            unanswered",
        "            unanswered",
    ),
    Mutation(
        "a sleeping consumer is not woken",
        "endpoint.delivery",
        "        if self._num_consumers_asleep:\n            self._changed.notify_all()",
        "        pass",
    ),
    Mutation(
        "the last response overtakes other sequences",
        "endpoint.delivery",
        "if backlog[-1].is_final and self._waits(key[0]):",
        "if False:",
    ),
    Mutation(
        "a closed delivery wakes nobody",
        "endpoint.delivery",
        "            self._closed = True\n            self._changed.notify_all()",
        "            self._closed = True",
    ),
    Mutation(
        "responses of two sequences are merged",
        "endpoint.delivery",
        "response.sequence_index if self._merges else 0",
        "0",
    ),
    Mutation(
        "a wake-up is lost between an iteration and the wait",
        "batch_manager.gpt_manager",
        "                self._work.clear()\n                if self.step() or self._work.is_set():",
        "                is_busy = self.step()\n                self._work.clear()\n                if is_busy:",
    ),
    Mutation(
        "shutting down does not wake the loop",
        "batch_manager.gpt_manager",
        "        self._shutting_down = True\n        self.notify()",
        "        self._shutting_down = True",
    ),
    Mutation(
        "the requests of a failed iteration are dropped",
        "batch_manager.gpt_manager",
        "            return self._scheduler.fail(batch, outcome)",
        "            return []",
    ),
    Mutation(
        "the loop rests although sequences run",
        "batch_manager.gpt_manager",
        "        can_rest = not had_work or (",
        "        can_rest = batch is None or not had_work or (",
    ),
    Mutation(
        "responses are sent twice",
        "batch_manager.send_window",
        "        responses_by_request, self._kept = self._kept, {}",
        "        responses_by_request, self._kept = self._kept, dict(self._kept)",
    ),
    Mutation(
        "a last response is sent before those kept",
        "batch_manager.send_window",
        "            self._hand_over(self._kept.pop(request_id))",
        "            self._hand_over(self._kept.pop(request_id)[-1:])",
    ),
    Mutation(
        "the socket of a dead engine is not replaced",
        "endpoint.path",
        "    remove(path)  # its server is dead",
        "    raise ConnectionRefusedError",
    ),
    Mutation(
        "a message is cut where it arrives in pieces",
        "endpoint.frames",
        "            count -= len(part)\n",
        "            count = 0\n",
    ),
)
"""The mistakes, each of which some seeds must reveal."""
