"""Micro-batch scheduling: which requests run with how many tokens under every policy, without starvation."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.config import CapacityPolicy, ChunkingPolicy, SchedulingConfig
from inflight.core.request.llm_request import LlmRequest
from inflight.core.request.request import ExternalDraft
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.batch import EngineLimits
from inflight.core.schedule.micro_batch_scheduler import MicroBatch, MicroBatchScheduler

from .factories import Driver, make_request, make_scheduler, make_sequence

EQUAL_PROGRESS = ChunkingPolicy.EQUAL_PROGRESS


def in_context(prompt: int, done: int = 0, draft: int = 0, **fields) -> LlmRequest:
    """A running sequence with `done` of its prompt's tokens computed."""
    guess = ExternalDraft(tuple(range(draft))) if draft else None
    sequence = make_sequence(prompt=prompt, new=20, draft=guess, **fields)
    sequence.start((0,), num_reused_tokens=done)
    return sequence


def generating(slots: int = 1, **fields) -> LlmRequest:
    """A running sequence with its prompt and one more token."""
    sequence = make_sequence(prompt=4, new=20, **fields)
    sequence.start(tuple(range(slots)), num_reused_tokens=4)
    sequence.tokens.append(7)
    return sequence


def make(
    max_num_tokens: int,
    enable_chunked_context: bool = True,
    policy: ChunkingPolicy = ChunkingPolicy.FIRST_COME_FIRST_SERVED,
    num_micro_batches: int = 1,
) -> MicroBatchScheduler:
    """Make a scheduler with blocks of four tokens."""
    config = SchedulingConfig(
        max_num_tokens=max_num_tokens,
        enable_chunked_context=enable_chunked_context,
        context_chunking_policy=policy,
    )
    return MicroBatchScheduler(config, EngineLimits(100, 1000, 8, 100, 4, num_micro_batches))


def unchunked(max_num_tokens: int = 16) -> MicroBatchScheduler:
    return make(max_num_tokens, enable_chunked_context=False)


def chunked(max_num_tokens: int = 16) -> MicroBatchScheduler:
    return make(max_num_tokens)


def equal_progress(max_num_tokens: int = 16) -> MicroBatchScheduler:
    return make(max_num_tokens, policy=EQUAL_PROGRESS)


def sizes(selected: MicroBatch, running: list[LlmRequest]) -> list[int]:
    """Return the number of context rows of each sequence in `running`."""
    rows = {id(sequence): count for sequence, count in selected.context}
    return [rows.get(id(sequence), 0) for sequence in running]


# ---------------------------------------------------------------- whole contexts


def test_whole_contexts_go_first_and_generation_fills_the_remaining_rows():
    stream, other = generating(), generating()
    running = [stream, in_context(9), in_context(6), other]
    selected = unchunked().select(running)
    assert sizes(selected, running) == [0, 9, 6, 0]
    assert selected.generation == [stream] and selected.num_free_rows == 0


def test_no_context_overtakes_one_that_does_not_fit():
    running = [in_context(9), in_context(8), in_context(2)]
    selected = unchunked().select(running)
    assert sizes(selected, running) == [9, 0, 0] and selected.num_free_rows == 7


def test_without_chunks_a_context_and_its_draft_run_together_or_wait():
    running = [in_context(9), in_context(5, draft=3)]
    assert sizes(unchunked(17).select(running), running) == [9, 8]
    assert sizes(unchunked(16).select(running), running) == [9, 0]


def test_generating_sequences_without_a_row_go_first_in_the_next_iteration():
    scheduler = unchunked()
    streams, long = [generating(), generating()], in_context(16)
    first = scheduler.select([*streams, long])
    assert (first.context, first.generation) == ([(long, 16)], [])
    second = scheduler.select([*streams, long])
    assert (second.context, second.generation) == ([], streams)
    third = scheduler.select([*streams, long])
    assert (third.context, third.generation) == ([(long, 16)], [])


def test_contexts_that_fit_run_beside_generating_sequences_that_go_first():
    scheduler = unchunked()
    streams, long, short = [generating(), generating()], in_context(16), in_context(14)
    scheduler.select([*streams, long])
    selected = scheduler.select([*streams, short])
    assert (selected.context, selected.generation) == ([(short, 14)], streams)


def test_generating_sequences_run_every_second_iteration_beside_many_prompts():
    scheduler = make_scheduler(max_num_tokens=16, max_num_sequences=8, num_blocks=64)
    driver = Driver(scheduler)
    driver.accept(*(make_request(number, prompt=2, new=40) for number in range(4)))
    driver.step()
    with_stream, with_context = [], []
    for number in range(10, 30):
        driver.accept(make_request(number, prompt=16, new=1))
        batch, _ = driver.step()
        with_stream.append(batch.generation_slots == (0, 1, 2, 3))
        with_context.append([len(chunk.token_ids) for chunk in batch.context] == [16])
    assert with_context == [True, False] * 10
    assert with_stream == [False, True] * 10


def test_a_resumed_context_longer_than_an_iteration_is_computed_in_blocks():
    resumed = in_context(18)
    running = [resumed, in_context(3)]
    selected = unchunked(14).select(running)
    assert sizes(selected, running) == [12, 0] and selected.num_free_rows == 2
    resumed.num_computed_tokens = 12
    assert sizes(unchunked(14).select(running), running) == [6, 3]


# ---------------------------------------------------------------- chunks, first come, first served


def test_with_chunks_generation_goes_first_and_the_oldest_context_gets_the_rest():
    stream = generating()
    running = [in_context(20), stream, in_context(20)]
    selected = chunked().select(running)
    assert selected.generation == [stream]
    assert sizes(selected, running) == [12, 0, 0] and selected.num_free_rows == 3


def test_a_chunk_that_is_not_the_last_ends_on_a_block_boundary():
    running = [in_context(20, done=8)]
    assert sizes(chunked(11).select(running), running) == [8]
    assert sizes(chunked(12).select(running), running) == [12]
    assert sizes(chunked(3).select(running), running) == [0]


def test_a_short_context_does_not_overtake_longer_ones_before_it():
    running = [in_context(20, done=12), in_context(20), in_context(2)]
    selected = chunked().select(running)
    assert sizes(selected, running) == [8, 8, 0] and selected.num_free_rows == 0


def test_a_context_keeps_its_last_token_for_the_chunk_with_the_draft():
    """A budget of 10 has room for all 8 tokens, but the 3 draft tokens must follow a token of their chunk."""
    running = [in_context(8, draft=3)]
    assert sizes(chunked(11).select(running), running) == [11]
    assert sizes(chunked(10).select(running), running) == [4]
    running[0].num_computed_tokens = 4
    assert sizes(chunked(10).select(running), running) == [7]
    running[0].has_draft = False
    assert sizes(chunked(10).select(running), running) == [4]


# ---------------------------------------------------------------- chunks, equal progress


def test_equal_progress_gives_a_block_to_each_in_turn():
    running = [in_context(40), in_context(40), in_context(40)]
    selected = equal_progress(20).select(running)
    assert sizes(selected, running) == [8, 8, 4] and selected.num_free_rows == 0


def test_equal_progress_gives_unused_rows_to_longer_contexts():
    running = [in_context(40), in_context(3), in_context(5)]
    selected = equal_progress(24).select(running)
    assert sizes(selected, running) == [16, 3, 5] and selected.num_free_rows == 0


def test_equal_progress_continues_each_context_at_its_position():
    running = [in_context(40, done=8), in_context(40, done=4)]
    assert sizes(equal_progress(12).select(running), running) == [8, 4]


def test_equal_progress_ends_a_context_in_rows_that_no_whole_block_fits():
    running = [in_context(40), in_context(40), in_context(2)]
    assert sizes(equal_progress(10).select(running), running) == [4, 4, 2]
    assert sizes(equal_progress(11).select(running), running) == [4, 4, 2]
    running = [in_context(40), in_context(2), in_context(3)]
    assert sizes(equal_progress(7).select(running), running) == [4, 2, 0]


def test_equal_progress_keeps_the_end_of_a_context_with_its_draft():
    running = [in_context(40), in_context(6, draft=3)]
    assert sizes(equal_progress(13).select(running), running) == [8, 4]
    assert sizes(equal_progress(14).select(running), running) == [8, 4]
    running[1].num_computed_tokens = 4
    assert sizes(equal_progress(9).select(running), running) == [4, 5]
    assert sizes(equal_progress(8).select(running), running) == [8, 0]


def test_equal_progress_schedules_a_contexts_last_block_and_its_draft_together():
    running = [in_context(8, done=4, draft=3), in_context(40)]
    assert sizes(equal_progress(11).select(running), running) == [7, 4]
    assert sizes(equal_progress(6).select(running), running) == [0, 4]


def test_a_single_context_gets_all_rows_under_either_policy():
    running = [in_context(40)]
    assert sizes(equal_progress(15).select(running), running) == [12]
    assert sizes(chunked(15).select(running), running) == [12]


def test_equal_progress_has_no_effect_without_chunks():
    scheduler = make(16, enable_chunked_context=False, policy=EQUAL_PROGRESS)
    running = [in_context(9), in_context(9)]
    assert sizes(scheduler.select(running), running) == [9, 0]


@settings(deadline=None, derandomize=True)
@given(
    contexts=st.lists(
        st.tuples(st.integers(1, 30), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=5
    ),
    policy=st.sampled_from(ChunkingPolicy),
    max_num_tokens=st.integers(8, 40),
)
def test_chunks_fill_the_budget_and_the_oldest_context_progresses(contexts, policy, max_num_tokens):
    running = [in_context(4 * done + rest, 4 * done, draft) for rest, done, draft in contexts]
    selected = make(max_num_tokens, policy=policy).select(running)
    given_rows = sizes(selected, running)
    assert sum(given_rows) + selected.num_free_rows == max_num_tokens and selected.num_free_rows >= 0
    for sequence, rows in zip(running, given_rows):
        end, whole = sequence.next_position + rows, sequence.context_length + sequence.draft_length
        assert end == whole or (end % 4 == 0 and end < sequence.context_length)
    assert given_rows[0] > 0, "the oldest needs a block and its draft at most: 8 rows"


# ---------------------------------------------------------------- generation


def test_a_search_takes_a_row_per_beam_or_blocks_the_requests_after_it():
    three = generating(3, sampling=SamplingConfig(beam_width=3))
    first, last = generating(), generating()
    assert unchunked(5).select([first, three, last]).generation == [first, three, last]
    selected = unchunked(4).select([first, three, last])
    assert selected.generation == [first, three] and selected.num_free_rows == 0
    selected = unchunked(3).select([first, three, last])
    assert selected.generation == [first] and selected.num_free_rows == 2


def test_a_search_in_context_has_one_row_per_token():
    search = in_context(6, sampling=SamplingConfig(beam_width=3))
    assert unchunked().select([search]).context == [(search, 6)]


def test_a_request_that_needs_the_host_waits_for_batches_in_flight():
    search, plain = generating(2, sampling=SamplingConfig(beam_width=2)), generating()
    guessing = generating(prompt_lookup_num_tokens=2)
    for sequence in (search, plain, guessing):
        sequence.num_scheduled_tokens = 1
    assert unchunked().select([search, plain, guessing]).generation == [plain]


def test_no_row_is_scheduled_for_the_last_token():
    last = make_sequence(prompt=4, new=2)
    last.start((0,), num_reused_tokens=4)
    last.tokens.append(7)
    assert unchunked().select([last]).generation == [last]
    last.num_scheduled_tokens = 1  # this row gives the second and last token
    assert unchunked().select([last]).generation == []


def test_an_ended_request_is_in_no_further_batch():
    ended = generating()
    ended.num_scheduled_tokens = 1
    ended.finish(FinishReason.CANCELLED)
    selected = unchunked().select([ended])
    assert (selected.context, selected.generation) == ([], [])


# ---------------------------------------------------------------- several micro-batches


def pipelined(num_stages: int, max_num_tokens: int = 64) -> MicroBatchScheduler:
    return make(max_num_tokens, num_micro_batches=num_stages)


def in_flight(sequence: LlmRequest) -> LlmRequest:
    """A sequence in generation whose next token is in flight."""
    sequence.num_scheduled_tokens += 1
    return sequence


def test_sequences_in_generation_share_the_micro_batches_evenly():
    for num_stages, share in ((1, 7), (2, 4), (3, 3), (9, 1)):
        running = [generating() for _ in range(7)]
        assert pipelined(num_stages).select(running).generation == running[:share]


def test_the_last_free_micro_batch_takes_only_its_share():
    ready, busy = [generating() for _ in range(5)], [in_flight(generating())]
    assert pipelined(2).select([*busy, *ready], num_in_flight=1).generation == ready[:3]


def test_every_free_micro_batch_gets_a_share_of_the_sequences():
    running = [generating() for _ in range(4)]
    scheduler = pipelined(3)
    parts = []
    for count in range(3):
        parts.append(scheduler.select(running, count).generation)
        for sequence in parts[-1]:
            in_flight(sequence)
    assert parts == [running[:2], [running[2]], [running[3]]]


def test_a_search_counts_as_one_sequence_in_micro_batches():
    searches = [generating(slots=3, sampling=SamplingConfig(beam_width=3)) for _ in range(2)]
    running = [searches[0], generating(), searches[1], generating()]
    assert pipelined(2).select(running).generation == running[:2]


def test_a_sequence_in_flight_waits_for_its_token_and_a_context_does_not():
    context, first_token = in_context(12), in_context(4)
    context.num_scheduled_tokens, first_token.num_scheduled_tokens = 4, 4
    busy, ready = in_flight(generating()), generating()
    selected = pipelined(2).select([context, first_token, busy, ready], num_in_flight=1)
    assert selected.generation == [ready] and selected.context == [(context, 8)]


def test_a_sequence_whose_last_token_is_in_flight_takes_no_share():
    ending = generating()
    ending.num_computed_tokens = ending.request.max_kv_tokens - 1
    ready = [generating() for _ in range(2)]
    assert pipelined(2).select([in_flight(ending), *ready], num_in_flight=1).generation == ready[:1]


@given(num_stages=st.integers(2, 4), count=st.integers(1, 9), alone=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_request_that_waited_goes_before_requests_that_ran_since(num_stages, count, alone):
    """The order holds even if each batch comes back before the next is made, so that all are ready."""
    running = [generating() for _ in range(count)]
    scheduler, since = pipelined(num_stages), [0] * count
    parts: list[list[LlmRequest]] = []
    for _ in range(40):
        while len(parts) >= (1 if alone else num_stages):
            for sequence in parts.pop(0):
                sequence.num_scheduled_tokens = 0
        parts.append(scheduler.select(running, len(parts)).generation)
        for place, sequence in enumerate(running):
            since[place] = 0 if sequence in parts[-1] else since[place] + 1
        for sequence in parts[-1]:
            in_flight(sequence)
        assert max(since) <= 2 * num_stages


def test_micro_batches_are_numbered_in_turn():
    scheduler = make_scheduler(num_micro_batches=3)
    driver = Driver(scheduler)
    driver.accept(*(make_request(i, new=6) for i in range(3)))
    batches = [driver.step()[0] for _ in range(5)]
    assert [batch.micro_batch_id for batch in batches] == [0, 1, 2, 0, 1]
    assert scheduler.stats(batches[-1]).micro_batch_id == 1


def test_a_static_batch_divides_the_slots_over_micro_batches():
    scheduler = make_scheduler(CapacityPolicy.STATIC_BATCH, num_micro_batches=2)
    driver = Driver(scheduler)
    driver.accept(make_request(1, new=2), *(make_request(i, new=9) for i in range(2, 5)))
    driver.step()
    driver.accept(make_request(5))
    rows, empty = [], []
    for _ in range(6):
        batch, _ = driver.step()
        rows.append(batch.num_rows)
        empty.append(scheduler.stats(batch).static_batch.num_empty_slots)
    assert rows == [2, 2, 2, 2, 2, 2] and empty == [0] * 6
    while scheduler.num_active > 1:
        batch, _ = driver.step()
    assert [r.request_id for r in scheduler.running_sequences] == []
    assert scheduler.stats(batch).static_batch.num_empty_slots > 0
    assert driver.step()[0].starts[0].request.request_id == 5
