"""A whole server on a simulated machine: an engine's process and front ends, with faults of every kind.

The engine's process is what `inflight.build` makes, with the fake engine: loop, scheduler, local client and
endpoint. Front ends are processes with the endpoint's client, of one or several kinds (`front_ends.py`). A seed
chooses everything. `run` returns what happened; it raises AssertionError if a promise was broken.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import patch
from zlib import crc32

from inflight import batch_manager, build
from inflight.adapters.commands import AdapterCommands
from inflight.build import RunningEngine, build_engine
from inflight.config import Parameters, SchedulingConfig
from inflight.core.request.adapter import LoraRequest
from inflight.core.request.engine_description import ModelLimits
from inflight.core.request.guide import Guide
from inflight.core.request.request import Request
from inflight.endpoint.client import SocketEngineClient
from inflight.errors import ConfigError, InflightError, StepFailed, Unavailable
from inflight.load_model import LoadedModel
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.simulation.host_cache import NUM_TASKS
from inflight.testing.simulation.scenario import draw

from . import modules, rare_branches
from .adapters import AdapterReader, weights_of
from .answers import Ticket, check_ticket
from .closed_engine import FailingDevice, check_closed
from .disk import Disk, EngineBlocks
from .endpoint_front_ends import EndpointFrontEnds
from .front_ends import FrontEnds
from .invariants import check_waits, checked
from .kernel import Kernel
from .run import ALL_FAULTS, MOST_FAULTS, PATH, RunReport, SimulatedRun
from .scheduler import Machine, Process
from .sockets import Network
from .threads import Lock

_IDLE_S = 20.0  # until nothing of a request is left, once all front ends have their answers


class WholeServer(SimulatedRun):
    """One run of a whole server, with its engine, front ends, users and faults.

    Args:
        seed: Chooses the requests, the settings, the faults, and the order of all threads.
        kept_faults: See `SimulatedRun`.
    """

    _longest_s, _longest_end_s = 900.0, 120.0
    _kernel: Kernel | None = None
    _close_timeouts_s = (0.0, 0.5, 30.0)

    def __init__(self, seed: int, kept_faults: Collection[int] = ALL_FAULTS) -> None:
        scenario = draw(seed)
        self.machine = Machine(seed)
        self.network = Network(self.machine)
        self.rng = random.Random(seed + 1)
        overlaps = self.rng.random() < 0.3
        self._adapters = AdapterReader(self.machine) if self._has_adapters() else None
        self.limits = replace(
            scenario.limits,
            num_adapter_pages=scenario.limits.num_adapter_pages if self._adapters else 0,
            overlaps_iterations=overlaps,
            takes_all_processors=self.rng.random() < 0.4,
        )
        self.requests = [
            request if self._adapters else replace(request, lora=None)
            for request in scenario.requests.values()
        ]
        self.invalid = scenario.invalid
        self.tickets: list[Ticket] = []
        self.numbers = count(1)  # of requests, with which their clients name them
        self.faults: Counter[str] = Counter()
        self._seed = seed
        self._config = self._adapt(replace(scenario.config, max_num_requests=self.rng.choice([-1, -1, 3])))
        self._disk = (
            Disk(self.machine) if self._config.enable_kv_cache_reuse and self._saves_blocks() else None
        )
        self._largest_on_disk = self.rng.choice([1000, 100_000])
        self._host_bytes = self.rng.choice([0, 0, 500, 100_000])
        self._memories: list[EngineBlocks] = []
        self._step_s = self.rng.choice([0.0, 0.001, 0.02, 0.2])
        self._fails = self.rng.choice([0.0, 0.0, 0.02, 0.2])
        self.has_slow_readers = self.rng.random() < 0.4
        has_faults, num_faults = self.rng.random() < 0.8, self.rng.randint(1, MOST_FAULTS)
        self._num_faults, self._kept_faults = num_faults * has_faults, kept_faults
        self._fault_times: list[tuple[int, float]] = []
        self._failures_ns: list[int] = []
        self._devices: list[FailingDevice] = []
        self._engine: RunningEngine | None = None
        self._engine_process: Process | None = None
        self._front_ends: dict[Process, FrontEnds] = {}
        self.users_left: Counter[Process] = Counter()  # users of live front ends who still have requests
        self._chaos_is_over = False
        self._kinds = self._make_kinds()

    def run(self) -> RunReport:
        """Run to the end, and check all promises."""
        try:
            with ExitStack() as stack:
                for kind in self._kinds:
                    stack.enter_context(kind.replaced())
                report = self._run()
                for kind in self._kinds:
                    kind.check_end()
                return report
        finally:
            if self._disk is not None:
                self._disk.remove()

    def _run(self) -> RunReport:
        machine, make = self.machine, self._make_adapters
        with (
            rare_branches.chosen_by(self._seed),
            modules.on(machine, self.network, self._disk, self._kernel),
            patch.object(build, "make_adapters", make),
            patch.object(batch_manager, "GptManager", checked(batch_manager.GptManager, machine)),
        ):
            machine.when_all_wait = self._check_waits
            operator = machine.start_process("operator")
            machine.spawn(operator, self._operate, "operator")
            machine.run_until(self._is_done, self._longest_s)
            self._check_answers()
            machine.run_until(self._is_idle, _IDLE_S)
            self._abandon_request()
            ending = machine.spawn(operator, self._end, "ending")
            machine.run_until(lambda: ending.has_ended, self._longest_end_s)
            self._check_threads()
            answers = [
                (ticket.answered_ns, len(ticket.responses), self._ending(ticket)) for ticket in self.tickets
            ]
            return RunReport(
                len(self.tickets),
                Counter(map(self._ending, self.tickets)),
                self.faults,
                (machine.now_ns - 10**9) / 1e9,
                machine.num_switches,
                crc32(str(answers).encode()),
                self._count_work(),
            )

    def _count_work(self) -> Counter[str]:
        """Return what the parts of the server have done."""
        work = Counter({f"requests of {kind.name}": kind.num_served for kind in self._kinds})
        work["ranks"] = 1
        work["blocks loaded"] = sum(memory.num_loaded for memory in self._memories)
        work["adapters read"] = 0 if self._adapters is None else self._adapters.num_read
        return work

    @property
    def all_faults(self) -> Mapping[str, Callable[[Any], None]]:
        """The faults that may be caused, by name."""
        return FAULTS

    @property
    def has_adapters(self) -> bool:
        """Whether the engine has a cache of adapters."""
        return self._adapters is not None

    @property
    def model_limits(self) -> ModelLimits:
        """The limits of requests that front ends know."""
        return self.limits.model_limits(self._config)

    def _adapt(self, config: SchedulingConfig) -> SchedulingConfig:
        """Return the scheduler's settings for this server, from those that the seed has chosen."""
        return config

    def _has_adapters(self) -> bool:
        """Choose whether requests have adapters."""
        return self.rng.random() < 0.4

    def _saves_blocks(self) -> bool:
        """Choose whether KV blocks are saved in files."""
        return self.rng.random() < 0.5

    def _is_done(self) -> bool:
        return self._chaos_is_over and not self.users_left.total()

    def _is_idle(self) -> bool:
        """Whether the engine holds nothing of requests and of connections that have ended."""
        assert self._engine is not None and self._engine._endpoint is not None
        saved = self._engine._manager._scheduler.kv_cache.saved
        connections = list(self._engine._endpoint._connections)
        num_alive = sum(process.is_alive for process in self._front_ends)
        return (
            not self._engine._manager._scheduler.num_active
            and not self._engine.client._targets
            and len(connections) <= num_alive
            and not any(each._handles or each._delivery._waiting for each in connections)
            and not (saved is not None and saved.loads)
            and not (self._engine._adapters is not None and self._engine._adapters.cache._used)
            and not any(kind.hold_something() for kind in self._kinds)
        )

    # ---------------------------------------------------------------- processes

    def _start_engine(self) -> None:
        """Start an engine's process; it takes a while until it listens."""
        self._run_engine(self.machine.start_process("engine"))

    def _run_engine(self, process: Process) -> None:
        self._engine_process = process
        self.machine.spawn(process, lambda: self._be_engine(process), "main")

    def _be_engine(self, process: Process) -> None:
        self.machine.sleep(self.rng.random() * 2)
        try:
            engine = build_engine(self._parameters(), "", PATH, load=self._load)
        except ConfigError as error:
            raise AssertionError(f"an engine cannot start: {error}") from error
        self._serve_with(engine, process)

    def _serve_with(self, engine: RunningEngine, process: Process) -> None:
        """Use an engine that has started from now on, unless its process has been replaced since."""
        object.__setattr__(engine, "_closing", Lock(self.machine))  # its own was made with the class
        if process is self._engine_process:
            self._engine = engine

    def _parameters(self) -> Parameters:
        given = replace(
            Parameters(), scheduler=self._config, enable_state_requests=True, stats_check_period_ms=0
        )
        if self._disk is None:
            return given
        return replace(
            given,
            kv_cache_dir=self._disk.path,
            kv_cache_disk_bytes=self._largest_on_disk,
            engine=replace(given.engine, kv_cache_host_memory_bytes=self._host_bytes),
        )

    def _load(self, parameters: Parameters, version_dir: str, rank_context: object) -> LoadedModel:
        device = FailingDevice(self.limits, self._step_s, self._step_failure)
        self._devices.append(device)
        blocks = None if self._disk is None else EngineBlocks(self.machine, device, not self._host_bytes)
        self._memories += [] if blocks is None else [blocks]
        return LoadedModel(device, "", "none", (), block_memory=blocks)

    def _make_adapters(
        self, parameters: Parameters, model: LoadedModel, notify: Callable[[], None]
    ) -> AdapterCommands | None:
        return None if self._adapters is None else self._adapters.make(notify)

    def _step_failure(self, iteration: int) -> Exception | None:
        """Return the error that the device raises in an iteration; None: it computes the batch."""
        is_refused = self.machine.refuses_memory()
        if self._chaos_is_over or not (is_refused or self.rng.random() < self._fails):
            return None
        self.faults["failed iteration"] += 1
        self._failures_ns.append(self.machine.now_ns)
        return MemoryError() if is_refused else RuntimeError("the simulated device failed")

    def _make_kinds(self) -> Sequence[FrontEnds]:
        """Return the kinds of front ends that the server has."""
        return (EndpointFrontEnds(self),)

    def _start_front_end(self) -> None:
        """Start a front end of one of the kinds, each of which the first ones have in turn."""
        kinds, number = self._kinds, len(self._front_ends)
        kind = kinds[number] if number < len(kinds) else kinds[0]
        if number >= len(kinds) > 1:
            kind = self.rng.choice(kinds)
        process = self.machine.start_process("front end")
        self._front_ends[process] = kind
        kind.start(process)

    # ---------------------------------------------------------------- requests

    def draw_request(self) -> Request:
        """Draw a request for a user of a front end."""
        return self._varied(self.rng.choice(self.requests))

    def draw_prompt(self, longest: int) -> list[int]:
        """Draw a prompt of up to `longest` tokens."""
        return [self.rng.randrange(self.limits.vocab_size) for _ in range(self.rng.randint(1, longest))]

    def draw_guide(self) -> Guide | None:
        """Draw a guide for a request, if requests have guides."""
        return None

    def draw_adapter(self) -> LoraRequest | None:
        """Draw an adapter for a request, if the engine takes adapters."""
        if self._adapters is None or self.rng.random() < 0.5:
            return None
        return LoraRequest(self.rng.randrange(NUM_TASKS))

    def _varied(self, request: Request) -> Request:
        """Return a request that perhaps has its adapter's weights with it, and perhaps is the first of several
        rounds."""
        lora = request.lora
        if lora is not None and self.rng.random() < 0.3:
            lora = replace(lora, weights=weights_of(lora))
        return replace(request, lora=lora, may_be_continued=self.rng.random() < 0.1)

    # ---------------------------------------------------------------- faults

    def _operate(self) -> None:
        """Start the server and its users, cause faults for a while, and repair everything."""
        self._start_engine()
        for _ in range(max(self.rng.randint(1, 3), len(self._kinds))):
            self.machine.sleep(self.rng.random() * 3)
            self._start_front_end()
        for number in range(self._num_faults):
            self.machine.sleep(self.rng.random() * self.rng.choice([0.1, 2.0, 10.0]))
            name = self.rng.choice(list(self.all_faults))
            if number in self._kept_faults:
                self._cause(name)
        while self._engine is None:
            self.machine.sleep(0.5)
        self._chaos_is_over = True
        if self._disk is not None:
            self._disk.is_full = False

    def _fill_disk(self) -> None:
        """Let writing to the disk fail for a while."""
        if self._disk is not None:
            self._disk.is_full = True
            self.machine.sleep(self.rng.random() * 10)
            self._disk.is_full = False

    def _refuse_memory(self) -> None:
        """Let some allocations be refused for a while, in all processes."""
        self.machine.is_short_of_memory = True
        self.machine.sleep(self.rng.random() * self.rng.choice([0.5, 10.0]))
        self.machine.is_short_of_memory = False

    def _cause(self, kind: str) -> None:
        self.faults[kind] += 1
        begun_ns = self.machine.now_ns
        self._fault_times.append((begun_ns, math.inf))
        self.all_faults[kind](self)
        self._fault_times[-1] = begun_ns, self.machine.now_ns

    def _kill_engine(self) -> None:
        assert self._engine_process is not None
        self._engine = None
        self._kill(self._engine_process)
        self._replace_engine()

    def _replace_engine(self) -> None:
        self.machine.sleep(self.rng.random() * self.rng.choice([0.1, 10.0]))
        self._start_engine()
        while self._engine is None:
            self.machine.sleep(0.1)

    def _stop_engine(self) -> None:
        assert self._engine_process is not None
        self._stop_process(self._engine_process)

    def _stop_process(self, process: Process) -> float:
        """Stop a process for a while, and return for how many seconds."""
        seconds = self.rng.choice([0.1, 3.0, 60.0])
        self._stop_for(process, seconds)
        self.machine.sleep(seconds + 0.1)
        return seconds

    def _stop_for(self, process: Process, seconds: float) -> None:
        self.machine.stop(process, seconds)

    def _unload_engine(self) -> None:
        """Close the engine as an unload does, with a short or a long time for requests in flight."""
        if self._engine is None:
            return
        self._close_engine()
        self._replace_engine()

    def _end_loop(self) -> None:
        """Let the next iteration end the loop, which answers all requests, and replace the engine."""
        if self._engine is None:
            return
        self._let_loop_die()
        self.machine.sleep(self.rng.random() * 5)
        self._close_engine()
        self._replace_engine()

    def _end(self) -> None:
        """End the server in order."""
        self._close_engine()

    def _let_loop_die(self) -> FailingDevice:
        assert self._engine is not None
        device = self._engine._manager._engine
        assert isinstance(device, FailingDevice)
        device.must_die = True
        return device

    def _close_engine(self) -> None:
        engine, process = self._engine, self._engine_process
        assert engine is not None and process is not None
        timeout_s = self.rng.choice(self._close_timeouts_s)
        closing = self.machine.spawn(process, lambda: self._has_closed(engine.close(timeout_s)), "unload")
        while not closing.has_ended:
            self.machine.sleep(0.05)
        check_closed(engine, self._memories)
        assert PATH not in self.network.files, "the socket's file is left"
        self._engine = None

    def _has_closed(self, has_ended: bool) -> None:
        assert has_ended, "the loop did not end"

    def _kill_front_end(self) -> None:
        process = self.rng.choice(list(self._front_ends))
        if process.is_alive:
            self._replace_front_end(process, self._front_ends[process])

    def _replace_front_end(self, process: Process, kind: FrontEnds) -> None:
        """Kill a front end, which is perhaps ended in order before, and start another one."""
        if kind.is_up(process) and self.rng.random() < kind.ended:
            kind.end(process)
        self._kill(process)
        del self.users_left[process]
        self._start_front_end()

    def _kill(self, process: Process) -> None:
        self.machine.kill(process)

    def _abandon_request(self) -> None:
        """Kill a front end that has submitted a request which would take much longer than _IDLE_S."""
        assert self._engine is not None
        device, client = self._engine._manager._engine, self._engine.client
        assert isinstance(device, FakeEngine)
        room = self.limits.num_blocks * self.limits.tokens_per_block
        num_tokens = min(self.limits.max_sequence_length, room) - 2
        usual_s, device._seconds_per_step = device._seconds_per_step, 3 * _IDLE_S / max(num_tokens, 12)
        process = self.machine.start_process("front end")

        def submit() -> None:
            SocketEngineClient(PATH).submit(Request(1, (0,), max(num_tokens, 1)), lambda response: None)

        submitting = self.machine.spawn(process, submit, "user")
        self.machine.run_until(lambda: submitting.has_ended and bool(client._targets), 30.0)
        self.machine.kill(process)
        self.machine.run_until(self._is_idle, _IDLE_S)
        device._seconds_per_step = usual_s

    def _stop_front_end(self) -> None:
        process = self.rng.choice(list(self._front_ends))
        if process.is_alive:
            self._stop_process(process)

    def _cut(self) -> None:
        if self.network.connections:
            self.network.cut(self.rng.choice(self.network.connections[-3:]))

    def _set_clock(self) -> None:
        self.machine.wall_ns += self.rng.randrange(-(10**12), 10**12)

    # ---------------------------------------------------------------- promises

    def was_disturbed(self, begin_ns: int, end_ns: int) -> bool:
        """Whether there was a fault between two times, or up to ten seconds before."""
        return begin_ns < 5 * 10**9 or any(
            begun <= end_ns and ended >= begin_ns - 10**10 for begun, ended in self._fault_times
        )

    def _check_answers(self) -> None:
        for ticket in self.tickets:
            if not ticket.is_answered:  # its front end was killed
                continue
            if ticket.error is not None:
                self._check_error(ticket, ticket.error)
            check_ticket(ticket, self.limits.vocab_size)
        for kind in self._kinds:
            kind.check_answers()

    def _check_error(self, ticket: Ticket, error: InflightError) -> None:
        if isinstance(error, Unavailable):
            is_full = self._config.max_queue_size and "queue" in str(error)
            has_adapter, said = ticket.request.lora is not None, str(error)
            is_full = is_full or (has_adapter and ("PEFT Cache is full" in said or "to be stored" in said))
            assert is_full or self.was_disturbed(ticket.submitted_ns, ticket.answered_ns), (
                f"refused without a fault: {error}"
            )
        elif self._adapter_failed(ticket):
            pass
        elif isinstance(error, StepFailed):
            assert any(ticket.submitted_ns <= each <= ticket.answered_ns for each in self._failures_ns), error
        else:
            assert ticket.request.request_id in self.invalid, f"an unexpected error: {error!r}"

    def _adapter_failed(self, ticket: Ticket) -> bool:
        """Whether the adapter of a request could not be read while the request was unanswered."""
        failures = [] if self._adapters is None else self._adapters.failures
        return any(
            _names_of(lora) == _names_of(ticket.request.lora)
            and ticket.submitted_ns <= at <= ticket.answered_ns
            for at, lora in failures
        )

    def _check_waits(self) -> None:
        """Check that no thread of the engine waits for something that has happened. No thread can run now."""
        engine, process = self._engine, self._engine_process
        if engine is not None and process is not None and not self.machine.is_amid_steps(process):
            check_waits(engine)

    def _check_threads(self) -> None:
        """Check that the engine's threads have ended."""
        self.machine.run_until(lambda: not self._threads_of_engine(), 30.0)

    def _threads_of_engine(self) -> list[str]:
        return [
            fiber.name
            for fiber in self.machine.fibers
            if fiber.process is self._engine_process and not fiber.has_ended
        ]

    @staticmethod
    def _ending(ticket: Ticket) -> str:
        if not ticket.is_answered:
            return "front end killed"
        if ticket.error is not None:
            return ticket.error.code
        result = ticket.responses[-1].result
        return "no result" if result is None else result.finish_reasons[0].name


def _names_of(lora: LoraRequest | None) -> LoraRequest | None:
    return None if lora is None else replace(lora, weights=None)


FAULTS: dict[str, Callable[[WholeServer], None]] = {
    "engine killed": lambda server: server._kill_engine(),
    "engine stopped": lambda server: server._stop_engine(),
    "engine unloaded": lambda server: server._unload_engine(),
    "loop died": lambda server: server._end_loop(),
    "front end killed": lambda server: server._kill_front_end(),
    "front end stopped": lambda server: server._stop_front_end(),
    "connection cut": lambda server: server._cut(),
    "clock set": lambda server: server._set_clock(),
    "disk full": lambda server: server._fill_disk(),
    "memory refused": lambda server: server._refuse_memory(),
}
"""The faults that an operator causes, by name."""


def run(seed: int) -> RunReport:
    """Run the whole server with a seed; raises AssertionError if a promise was broken."""
    return WholeServer(seed).run()
