"""Scenario of one random seed: a configuration, requests of every kind, stops, and a device that fails."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from inflight.config import CapacityPolicy, ChunkingPolicy, SchedulePolicy, SchedulingConfig, Speculation
from inflight.core.kv.picture_spans import find_spans
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.stop import StopReason, StopSignal
from inflight.core.schedule.batch import EngineLimits

from .drawn_requests import Habits, draw_habits, draw_requests, with_pictures
from .host_cache import MAX_RANKS

_MS = 1_000_000
_ITERATION_NS = 5 * _MS
_BEGINNING_NS = 1000 * _MS


def time_of(iteration: int) -> int:
    """Return the time at which an iteration begins."""
    return _BEGINNING_NS + iteration * _ITERATION_NS


def time_of_answer(iteration: int) -> int:
    """Return the time at which the device answers in an iteration."""
    return time_of(iteration) + _ITERATION_NS // 2


@dataclass(frozen=True)
class Breakdowns:
    """The failures that the simulated device reports in a run, planned before it starts.

    Attributes:
        transient: Iterations whose batch fails regardless of its rows.
        unusable: Iterations in which the device reports itself as unusable.
        faulty: By request id, the first position whose row makes a batch fail.
        failing_rows: By request id, a number of generated tokens. Once it has generated this many, the device
            reports failures of its rows; other rows of the batch succeed.
    """

    transient: frozenset[int] = frozenset()
    unusable: frozenset[int] = frozenset()
    faulty: Mapping[int, int] = field(default_factory=dict[int, int])
    failing_rows: Mapping[int, int] = field(default_factory=dict[int, int])

    def __bool__(self) -> bool:
        return bool(self.transient or self.unusable or self.faulty or self.failing_rows)


@dataclass(frozen=True)
class Scenario:
    """The inputs of a whole run.

    Attributes:
        arrivals: The new requests of each iteration.
        stops: The stop signals of each iteration.
        invalid: Ids of the requests that must be refused as invalid.
    """

    seed: int
    limits: EngineLimits
    config: SchedulingConfig
    arrivals: dict[int, tuple[Request, ...]]
    stops: dict[int, tuple[StopSignal, ...]]
    breakdowns: Breakdowns = Breakdowns()
    invalid: frozenset[int] = frozenset()

    def only(self, request_ids: Collection[int]) -> Scenario:
        """Return the scenario with only these of its requests, and their stops."""
        arrivals = {
            at: kept
            for at, each in self.arrivals.items()
            if (kept := tuple(request for request in each if request.request_id in request_ids))
        }
        stops = {
            at: kept
            for at, each in self.stops.items()
            if (kept := tuple(stop for stop in each if stop.request_id in request_ids))
        }
        return replace(self, arrivals=arrivals, stops=stops, invalid=self.invalid & set(request_ids))

    def pipelined(self, num_micro_batches: int) -> Scenario:
        """Return the scenario for a device of `num_micro_batches` pipeline stages."""
        limits = replace(self.limits, num_micro_batches=num_micro_batches, overlaps_iterations=False)
        return replace(self, limits=limits)

    def with_state(self) -> Scenario:
        """Return the scenario for a model with recurrent state, with no, few or many snapshots."""
        num_snapshots = random.Random(self.seed).choice([0, 1, 2, 5, 500, 500])
        return replace(self, limits=replace(self.limits, has_state=True, num_state_snapshots=num_snapshots))

    def with_spans(self) -> Scenario:
        """Return the scenario for a model whose pictures have bidirectional attention, with pictures in prompts.

        An iteration has room for the longest picture, and for little more.
        """
        arrivals = {at: tuple(map(self._with_pictures, requests)) for at, requests in self.arrivals.items()}
        config, limits = self.config, replace(self.limits, has_spans=True)
        longest = max(
            end - begin + request.draft_length
            for requests in arrivals.values()
            for request in requests
            for begin, end in ((0, 0), *find_spans(request.input_token_ids, limits.vocab_size))
        )
        beside = limits.max_num_sequences - 1 if config.enable_chunked_context else 0
        config = replace(config, max_num_tokens=max(config.max_num_tokens, longest + beside))
        return replace(self, arrivals=arrivals, config=config, limits=limits)

    def _with_pictures(self, request: Request) -> Request:
        return with_pictures(request, self.limits.vocab_size, self.seed)

    def in_turn(self) -> Scenario:
        """Return the scenario for a device that has one batch in flight at a time."""
        return self.pipelined(1)

    def ahead(self) -> Scenario:
        """Return the scenario for a device that overlaps iterations."""
        return replace(self, limits=replace(self.limits, num_micro_batches=1, overlaps_iterations=True))

    def without_host_waits(self) -> Scenario:
        """Return the scenario without the options that make a request wait for the host between iterations."""
        arrivals = {at: tuple(map(_without_host, requests)) for at, requests in self.arrivals.items()}
        return replace(self, arrivals=arrivals, config=replace(self.config, speculative_decoding_mode=None))

    @property
    def depth(self) -> int:
        """Maximum number of batches in flight."""
        return self.limits.num_micro_batches + self.limits.overlaps_iterations

    @property
    def is_pipelined(self) -> bool:
        """Whether the device chooses tokens only when a batch comes back."""
        return self.limits.num_micro_batches > 1

    @property
    def requests(self) -> dict[int, Request]:
        """Return all requests by id."""
        return {request.request_id: request for each in self.arrivals.values() for request in each}

    @property
    def last_event(self) -> int:
        """Return the last iteration with requests or stops."""
        return max((*self.arrivals, *self.stops))

    def inputs(self, iteration: int) -> IterationInput:
        """Return the input of an iteration."""
        new, stops = self.arrivals.get(iteration, ()), self.stops.get(iteration, ())
        return IterationInput(iteration, time_of(iteration), new, stops)


def draw(seed: int) -> Scenario:
    """Draw a scenario in which every request can run, but rarely all at once."""
    rng = random.Random(seed)
    habits = draw_habits(rng)
    requests = draw_requests(rng, habits)
    limits = _draw_limits(rng, habits, requests)
    invalid = frozenset(request.request_id for request in requests if rng.random() < 0.02)
    arrivals: dict[int, tuple[Request, ...]] = {}
    stops: dict[int, tuple[StopSignal, ...]] = {}
    window = rng.choice([0, 0, 3, 15])
    for request in requests:
        at = rng.randint(0, window)
        if request.request_id in invalid:
            request = replace(request, max_new_tokens=limits.max_sequence_length)
        if rng.random() < 0.5:
            request = replace(request, arrival_time_ns=time_of(at) - rng.randint(1, 3 * _ITERATION_NS))
        arrivals[at] = (*arrivals.get(at, ()), request)
        if rng.random() < 0.2:
            stop_at = at + rng.randint(0, 20)
            stops[stop_at] = (*stops.get(stop_at, ()), _draw_stop(rng, request, stop_at))
    speculation = _draw_speculation(seed)
    config = replace(_draw_config(rng, limits, requests), speculative_decoding_mode=speculation)
    if speculation is not None and speculation.method == Speculation.MTP:
        # with odd seeds so large that some sequences stop to draft
        limits = replace(limits, guess_cost=0.25 if seed % 2 else 0.0, entry_cost=0.25)
    return Scenario(
        seed,
        replace(limits, overlaps_iterations=rng.choice([False, False, True])),
        config,
        arrivals,
        stops,
        _draw_breakdowns(rng, requests),
        invalid,
    )


def draw_with_a_bad_device(seed: int) -> Scenario:
    """Draw the same scenario with a device that fails repeatedly."""
    transient = random.Random(seed).sample(range(60), 20)
    return replace(draw(seed), breakdowns=Breakdowns(frozenset(transient)))


def draw_with_failing_rows(seed: int) -> Scenario:
    """Draw the same scenario with some requests whose rows fail while others in the batch succeed."""
    rng, scenario = random.Random(seed), draw(seed)
    requests = [request for request in scenario.requests.values() if rng.random() < 0.4]
    failing = {request.request_id: rng.randrange(request.max_new_tokens) for request in requests}
    return replace(scenario, breakdowns=replace(scenario.breakdowns, failing_rows=failing))


def draw_with_longest_prefix_first(seed: int) -> Scenario:
    """Draw the same scenario with the policy LPM and reuse, and with a later copy of each request."""
    rng, scenario = random.Random(seed), draw(seed)
    arrivals, count = dict(scenario.arrivals), len(scenario.requests)
    for request in scenario.requests.values():
        if request.request_id in scenario.invalid:
            continue
        at = rng.randint(0, 20)
        copy = replace(request, request_id=request.request_id + count, arrival_time_ns=0)
        arrivals[at] = (*arrivals.get(at, ()), copy)
    config = replace(
        scenario.config,
        schedule_policy=SchedulePolicy.LPM,
        max_overtaken=rng.choice([0, 1, 2, 5]),
        enable_kv_cache_reuse=True,
    )
    return replace(scenario, arrivals=arrivals, config=config)


def draw_with_everybody_leaving(seed: int) -> Scenario:
    """Draw the same scenario, with all requests stopped at once and a small bound of endings per iteration."""
    rng, scenario = random.Random(seed), draw(seed)
    at = max(scenario.arrivals) + rng.randint(0, 4)
    stops = tuple(StopSignal(request_id, StopReason.CANCELLED) for request_id in scenario.requests)
    config = replace(scenario.config, sequences_per_iteration=rng.randint(1, 3))
    return replace(scenario, config=config, stops={**scenario.stops, at: stops})


def one_in_flight(scenario: Scenario) -> Scenario:
    """Return the scenario with one batch in flight."""
    return scenario.in_turn()


def two_in_flight(scenario: Scenario) -> Scenario:
    """Return the scenario with two batches in flight. With every other seed, its requests never need the
    host."""
    ahead = scenario.ahead()
    return ahead.without_host_waits() if scenario.seed % 2 else ahead


def two_stages(scenario: Scenario) -> Scenario:
    """Return the scenario for a device of two pipeline stages."""
    return scenario.pipelined(2)


def three_stages(scenario: Scenario) -> Scenario:
    """Return the scenario for a device of three pipeline stages."""
    return scenario.pipelined(3)


DRAWS = {
    "usual": draw,
    "a bad device": draw_with_a_bad_device,
    "failing rows": draw_with_failing_rows,
    "everybody leaves": draw_with_everybody_leaving,
    "longest prefix first": draw_with_longest_prefix_first,
}
"""The ways to draw a scenario from a seed, by name."""

DEVICES = {
    "one batch in flight": one_in_flight,
    "two batches in flight": two_in_flight,
    "two stages": two_stages,
    "three stages": three_stages,
}
"""The kinds of devices that a scenario runs on, by name."""

MODELS = {
    "attention": replace,
    "recurrent states": Scenario.with_state,
    "pictures with bidirectional attention": Scenario.with_spans,
}
"""The kinds of models that a scenario runs with, by name."""


def _without_host(request: Request) -> Request:
    sampling = replace(request.sampling, beam_width=1, num_return_sequences=None, repetition_penalty=1.0)
    output = replace(
        request.output, return_log_probs=False, num_top_log_probs=0, return_generation_logits=False
    )
    return replace(request, sampling=sampling, output=output, draft=None, prompt_lookup_num_tokens=0)


def _draw_limits(rng: random.Random, habits: Habits, requests: list[Request]) -> EngineLimits:
    size = rng.choice([1, 2, 3, 4, 8])
    num_blocks = max(request.max_kv_blocks(size) for request in requests) + rng.choice([0, 1, 4, 15, 60])
    page_rank = rng.choice([1, 3, MAX_RANKS])
    return EngineLimits(
        habits.vocab_size,
        200,
        habits.num_slots,
        num_blocks,
        size,
        hidden_size=1,
        num_adapter_pages=-(-MAX_RANKS // page_rank) + rng.choice([0, 1, 3, 20]),
        adapter_page_rank=page_rank,
        max_adapter_rank=MAX_RANKS,
    )


def _draw_config(rng: random.Random, limits: EngineLimits, requests: list[Request]) -> SchedulingConfig:
    slots, size = limits.max_num_sequences, limits.tokens_per_block
    chunked = rng.random() < 0.6
    needed = slots - 1 + size + max(request.draft_length for request in requests)
    if not chunked:
        needed = max(slots, size, *(request.prompt_length + request.draft_length for request in requests))
    return SchedulingConfig(
        policy=rng.choice([*CapacityPolicy, CapacityPolicy.MAX_UTILIZATION]),
        max_num_tokens=needed + rng.choice([0, 5, 20, 100]),
        enable_chunked_context=chunked,
        enable_kv_cache_reuse=rng.random() < 0.7,
        max_queue_size=rng.choice([0, 0, 0, 0, 1, 2, 4]),
        context_chunking_policy=rng.choice(list(ChunkingPolicy)),
    )


def _draw_speculation(seed: int) -> Speculation | None:
    """Draw how the server drafts; each method has a quarter of the scenarios."""
    rng = random.Random(seed)
    method = rng.choice([None, Speculation.PROMPT_LOOKUP, Speculation.SUFFIX, Speculation.MTP])
    return None if method is None else Speculation(method, rng.choice([0, 1, 4]))


def _draw_stop(rng: random.Random, request: Request, iteration: int) -> StopSignal:
    sampling = request.sampling
    index = rng.choice([None, rng.randrange(sampling.num_sequences)])
    reasons = [StopReason.CANCELLED, StopReason.CANCELLED, StopReason.TIMED_OUT]
    if not sampling.uses_beams:
        reasons.append(StopReason.STOP_WORDS)
    requested_ns = rng.choice([0, time_of(iteration) - rng.randrange(_ITERATION_NS)])
    return StopSignal(request.request_id, rng.choice(reasons), index, requested_ns)


def _draw_breakdowns(rng: random.Random, requests: list[Request]) -> Breakdowns:
    if rng.random() < 0.6:
        return Breakdowns()
    transient = rng.sample(range(25), rng.choice([0, 2, 4]))
    unusable = rng.sample(range(40), rng.choice([0, 0, 0, 1]))
    faulty = rng.sample(requests, rng.choice([0, 1, 1, min(2, len(requests))]))
    return Breakdowns(
        frozenset(transient),
        frozenset(unusable),
        {r.request_id: rng.choice([0, rng.randrange(r.max_kv_tokens)]) for r in faulty},
    )
