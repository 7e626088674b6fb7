"""A whole server with guides: the engine's compiler of guides and its process, which is slow and dies.

The compiler (`guided.compiler`) and the loop of its process (`guided.child`) are the real ones. The grammar
library is a small one that crashes and takes its time.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast
from unittest.mock import patch

from inflight.config import Parameters
from inflight.core.request.guide import Guide, GuideEvent
from inflight.core.request.request import Origin, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason
from inflight.errors import InflightError, InvalidArgument, StepFailed, Unavailable
from inflight.guided import budget, child, compiler
from inflight.guided.compiler import ChildCompiler
from inflight.guided.grammars import GrammarLibrary, Grammars
from inflight.guided.vocabulary import GuideVocabulary
from inflight.load_model import LoadedModel
from inflight.ranks.rank_context import RankContext

from .answers import Ticket
from .child_processes import ChildProcess
from .guides import (
    BROKEN,
    CRASHING,
    FAST,
    INVALID,
    SLOW,
    GuidedDevice,
    LibraryOfRank,
    SmallLibrary,
    allows,
    draw_guide,
    kind_of,
)
from .invariants import is_resting
from .run import ALL_FAULTS, RunReport
from .threads import SimulatedModule
from .whole_server import WholeServer

_TIMEOUT_MS = 5000
_LONGEST_CALL_NS = 2 * 10**9  # of the loop, with pauses of its thread
_RESTART_S = 3.5  # of the process, with pauses

if TYPE_CHECKING:
    _Compiler = ChildCompiler
else:
    _Compiler = object


class _TimedCompiler(_Compiler):
    """Checks how long the loop and new guides wait for the compiler with which it is combined."""

    server: ServerWithGuides

    def submit(self, request_id: int, guide: Guide, origin: Origin | None = None) -> None:
        server, begun_ns = self.server, self.server.machine.now_ns
        timeout_s = _TIMEOUT_MS / 1000
        longest_s = timeout_s + (len(self._waiting) + 2) * (timeout_s / 10 + _RESTART_S)
        server.waits[request_id, id(self)] = begun_ns, int(longest_s * 1e9), guide
        super().submit(request_id, guide, origin)
        server.check_call(begun_ns)

    def events(self) -> tuple[GuideEvent, ...]:
        begun_ns = self.server.machine.now_ns
        found = super().events()
        self.server.check_call(begun_ns)
        for event in found:
            self.server.check_wait(self.server.waits[event.request_id, id(self)])
        return found

    def _compile(self, guide: Guide, is_slow: bool) -> bytes:
        server, timeout_s = self.server, _TIMEOUT_MS / 1000
        if is_slow:
            server.interrupted.add(guide)
        others_wait = not is_slow and not self._jobs.empty()
        longest_s = _RESTART_S + (timeout_s / 10 if others_wait else timeout_s)
        begun_ns = server.machine.now_ns
        try:
            compiled = super()._compile(guide, is_slow)
            server.num_compiled += 1
            return compiled
        finally:
            server.check_compilation(begun_ns, longest_s)


class ServerWithGuides(WholeServer):
    """One run of a server whose requests have guides."""

    def __init__(self, seed: int, kept_faults: Collection[int] = ALL_FAULTS) -> None:
        super().__init__(seed, kept_faults)
        self.waits: dict[tuple[int, int], tuple[int, int, Guide]] = {}
        self.interrupted: set[Guide] = set()  # guides that were compiled again
        self.num_compiled = 0
        self._children: list[ChildProcess] = []
        self._kills_ns: list[int] = []
        self._max_guides = self.rng.choice([1, 256])

    def _run(self) -> RunReport:
        start = partial(self._start_child, self._be_child)
        watched: Any = type(
            "WatchedCompiler",
            (_TimedCompiler, compiler.ChildCompiler),
            {"server": self, "__module__": compiler.__name__},
        )
        with ExitStack() as stack:
            replaced = SimulatedModule(subprocess, {"Popen": start})
            stack.enter_context(patch.object(compiler, "subprocess", replaced))
            stack.enter_context(patch.object(compiler, "ChildCompiler", watched))
            make = partial(self._make_library, may_compile=True)
            stack.enter_context(patch.object(child, "make_backend", make))
            # Real processor time would depend on the machine that simulates.
            stack.enter_context(patch.object(budget, "work_time", lambda: 0.0))
            return super()._run()

    # ---------------------------------------------------------------- processes

    def _start_child(self, program: Any, command: Sequence[str], **options: Any) -> ChildProcess:
        self._children.append(ChildProcess(self.network, program, command, **options))
        return self._children[-1]

    def _be_child(self, command: Sequence[str], jobs: IO[bytes], answers: IO[bytes]) -> None:
        child.compile_jobs(command[-1], jobs, answers)

    def _make_library(self, name: str, vocabulary: GuideVocabulary, may_compile: bool) -> SmallLibrary:
        return SmallLibrary(self.machine, vocabulary, may_compile)

    def _parameters(self) -> Parameters:
        return replace(super()._parameters(), guided_decoding_compile_timeout_ms=_TIMEOUT_MS)

    def _load(self, parameters: Parameters, version_dir: str, rank_context: object) -> LoadedModel:
        loaded = super()._load(parameters, version_dir, rank_context)
        vocabulary = GuideVocabulary(
            tuple(bytes((ord("a") + token,)) for token in range(self.limits.vocab_size)), frozenset()
        )

        is_follower = rank_context is not None and cast(RankContext, rank_context).world.rank > 0

        def set_up() -> GrammarLibrary:
            self.machine.sleep(self.machine.rng.random())
            if is_follower:
                return GrammarLibrary(LibraryOfRank(self.machine, vocabulary), vocabulary)
            return GrammarLibrary(self._make_library("", vocabulary, False), vocabulary)

        grammars = Grammars(set_up, self._max_guides)
        device = GuidedDevice(self.limits, self._step_s, self._step_failure, grammars)
        self._devices[-1] = device
        if self._memories and loaded.block_memory is self._memories[-1]:
            self._memories[-1]._engine = device
        return replace(loaded, engine=device, grammars=grammars)

    def _kill_front_end(self) -> None:
        """Kill a front end, or the process that compiles guides."""
        if self.rng.random() < 0.5 and (running := self._running_child()):
            self._kills_ns.append(self.machine.now_ns)
            running.kill()
        else:
            super()._kill_front_end()

    def _stop_front_end(self) -> None:
        """Stop a front end, or the process that compiles guides."""
        if self.rng.random() < 0.5 and (running := self._running_child()):
            self._stop_process(running.process)
        else:
            super()._stop_front_end()

    def _running_child(self) -> ChildProcess | None:
        return next((each for each in reversed(self._children) if each.returncode is None), None)

    def _count_work(self) -> Counter[str]:
        return super()._count_work() + Counter({"guides compiled": self.num_compiled})

    def _close_engine(self) -> None:
        process = self._engine_process
        super()._close_engine()
        left = [each for each in self._children if each._parent is process and each.returncode is None]
        assert not left, "a process that compiles guides goes on after its engine"

    # ---------------------------------------------------------------- requests

    def draw_guide(self) -> Guide | None:
        return None if self.rng.random() < 0.4 else draw_guide(self.rng, self.limits.vocab_size)

    def _varied(self, request: Request) -> Request:
        rng, limits = self.rng, self.limits.model_limits(self._config)
        room = min(limits.max_sequence_length, limits.num_blocks * limits.tokens_per_block) - 1
        half = min(8, room // 2, limits.max_input_length, limits.max_context_tokens)
        guide = None if half < 1 else self.draw_guide()
        if guide is None:
            return super()._varied(request)
        return Request(
            0,
            tuple(self.draw_prompt(half)),
            rng.randint(1, half),
            streaming=rng.random() < 0.5,
            sampling=SamplingConfig(random_seed=rng.randrange(100)),
            guide=guide,
            lora=request.lora,
            allotted_time_ms=rng.choice([0, 0, 0, 3000]),
        )

    # ---------------------------------------------------------------- promises

    def check_call(self, begun_ns: int) -> None:
        """Check that a call by the engine's loop was short."""
        now_ns = self.machine.now_ns
        is_excused = now_ns - begun_ns < _LONGEST_CALL_NS or self.was_disturbed(begun_ns, now_ns)
        self._require(is_excused, "the loop waits for the compiler of guides")

    def check_compilation(self, begun_ns: int, longest_s: float) -> None:
        """Check that compiling a guide took no longer than is allowed."""
        now_ns = self.machine.now_ns
        is_excused = now_ns - begun_ns < longest_s * 1e9 or self.was_disturbed(begun_ns, now_ns)
        self._require(is_excused, f"a guide was compiled for {(now_ns - begun_ns) / 1e9:.1f} s")

    def check_wait(self, wait: tuple[int, int, Guide]) -> None:
        """Check that a guide that compiles quickly did not wait longer than for those before it."""
        begun_ns, longest_ns, guide = wait
        now_ns = self.machine.now_ns
        is_excused = (
            now_ns - begun_ns < longest_ns
            or kind_of(guide) == SLOW
            or guide in self.interrupted
            or self.was_disturbed(begun_ns, now_ns)
        )
        self._require(is_excused, f"a guide waited {(now_ns - begun_ns) / 1e9:.1f} s for others")

    def _require(self, is_true: bool, message: str) -> None:
        """Note a failure, which the engine's loop would take for one of its own."""
        if not is_true and self.machine.failure is None:
            self.machine.failure = self.machine.current, AssertionError(message), message

    def _check_waits(self) -> None:
        super()._check_waits()
        engine, process = self._engine, self._engine_process
        if engine is None or process is None or self.machine.is_amid_steps(process):
            return
        guides, manager = engine._guides, engine._manager
        if guides is None or not is_resting(manager):
            return
        assert not guides._events, "a guide is ready, and the loop rests"
        held = manager._scheduler._admission.held
        awaiting = {request_id for request_id, group in held.items() if group.awaits_guide}
        compiled = {request_id for waiting in guides._waiting.values() for request_id in waiting}
        assert awaiting <= compiled, "a request waits for a guide that nobody compiles"

    def _is_idle(self) -> bool:
        guides = self._engine and self._engine._guides
        return super()._is_idle() and not (guides and (guides._waiting or guides._slow))

    def _check_answers(self) -> None:
        guided = [each for each in self.tickets if each.request.guide is not None]
        everything, self.tickets = self.tickets, [each for each in self.tickets if each.request.guide is None]
        super()._check_answers()
        self.tickets = everything
        for ticket in guided:
            if ticket.is_answered:
                self._check_guided(ticket, cast(Guide, ticket.request.guide))

    def _check_guided(self, ticket: Ticket, guide: Guide) -> None:
        if ticket.error is not None:
            self._check_guides_error(ticket, guide, ticket.error)
        tokens, reason = ticket.made()
        if reason is None:
            return
        is_whole = ticket.error is None and reason is FinishReason.END_ID
        assert allows(guide, tokens, is_whole), f"{tokens} by {guide.text}, ended for {reason.name}"
        assert not tokens or kind_of(guide) in (FAST, SLOW), f"an answer by the guide {guide.text}"
        assert reason is not FinishReason.LENGTH or len(tokens) == ticket.request.max_new_tokens

    def _check_guides_error(self, ticket: Ticket, guide: Guide, error: InflightError) -> None:
        """Check that there is a reason for an error, and that it is the one that the error names."""
        kind, said = kind_of(guide), str(error)
        if self._adapter_failed(ticket):
            is_expected = True
        elif isinstance(error, InvalidArgument) and "the compiling process ended" in said:
            is_expected = kind == CRASHING or self._was_killed(ticket)
        elif isinstance(error, InvalidArgument) and "takes longer to compile" in said:
            is_expected = kind == SLOW or self.was_disturbed(ticket.submitted_ns, ticket.answered_ns)
        elif isinstance(error, InvalidArgument):
            is_expected = kind == INVALID and "one of the invalid ones" in said
        elif isinstance(error, StepFailed) and "the library failed" in said:
            is_expected = kind == BROKEN
        elif isinstance(error, StepFailed) and "did not start" in said:
            is_expected = self._was_killed(ticket)
        else:
            assert isinstance(error, (StepFailed, Unavailable)), f"an unexpected error: {error!r}"
            self._check_error(ticket, error)
            is_expected = True
        assert is_expected, f"{guide.text} failed: {said}"

    def _was_killed(self, ticket: Ticket) -> bool:
        """Whether the compiling process may have died for a reason of its own while a request was unanswered."""
        if any(ticket.submitted_ns <= each <= ticket.answered_ns for each in self._kills_ns):
            return True
        return self.faults["memory refused"] > 0 and self.was_disturbed(
            ticket.submitted_ns, ticket.answered_ns
        )


def run(seed: int) -> RunReport:
    """Run a server with guides; raises AssertionError if a promise was broken."""
    return ServerWithGuides(seed).run()
