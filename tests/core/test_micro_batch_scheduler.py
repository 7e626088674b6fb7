"""Who runs and with how many tokens, row by row, for every policy; and that nobody starves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.config import ContextChunkingPolicy
from inflight.core.llm_request import LlmRequest
from inflight.core.micro_batch_scheduler import MicroBatch, MicroBatchScheduler
from inflight.core.request import ExternalDraft
from inflight.core.sampling_config import SamplingConfig
from inflight.core.stop import FinishReason

from .factories import Driver, make_request, make_scheduler, make_sequence

EQUAL_PROGRESS = ContextChunkingPolicy.EQUAL_PROGRESS


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


def unchunked(max_num_tokens: int = 16) -> MicroBatchScheduler:
    return MicroBatchScheduler(max_num_tokens, tokens_per_block=4, enable_chunked_context=False)


def chunked(max_num_tokens: int = 16) -> MicroBatchScheduler:
    return MicroBatchScheduler(max_num_tokens, tokens_per_block=4, enable_chunked_context=True)


def equal_progress(max_num_tokens: int = 16) -> MicroBatchScheduler:
    return MicroBatchScheduler(max_num_tokens, 4, True, EQUAL_PROGRESS)


def sizes(selected: MicroBatch, running: list[LlmRequest]) -> list[int]:
    """Rows of context of each of `running`."""
    rows = {id(sequence): count for sequence, count in selected.context}
    return [rows.get(id(sequence), 0) for sequence in running]


# ---------------------------------------------------------------- whole contexts


def test_whole_contexts_come_first_then_as_many_streams_as_there_are_rows():
    stream, other = generating(), generating()
    running = [stream, in_context(9), in_context(6), other]
    selected = unchunked().select(running)
    assert sizes(selected, running) == [0, 9, 6, 0]
    assert selected.generation == [stream] and selected.num_free_rows == 0


def test_no_context_overtakes_one_that_does_not_fit():
    running = [in_context(9), in_context(8), in_context(2)]
    selected = unchunked().select(running)
    assert sizes(selected, running) == [9, 0, 0] and selected.num_free_rows == 7


def test_a_context_with_its_draft_is_whole_or_waits():
    running = [in_context(9), in_context(5, draft=3)]
    assert sizes(unchunked(17).select(running), running) == [9, 8]
    assert sizes(unchunked(16).select(running), running) == [9, 0]


def test_streams_that_got_no_row_go_first_the_next_time():
    scheduler = unchunked()
    streams, long = [generating(), generating()], in_context(16)
    first = scheduler.select([*streams, long])
    assert (first.context, first.generation) == ([(long, 16)], [])
    second = scheduler.select([*streams, long])
    assert (second.context, second.generation) == ([], streams)
    third = scheduler.select([*streams, long])
    assert (third.context, third.generation) == ([(long, 16)], [])


def test_streams_that_go_first_leave_the_rest_to_contexts_that_fit():
    scheduler = unchunked()
    streams, long, short = [generating(), generating()], in_context(16), in_context(14)
    scheduler.select([*streams, long])
    selected = scheduler.select([*streams, short])
    assert (selected.context, selected.generation) == ([(short, 14)], streams)


def test_prompts_that_fill_an_iteration_and_keep_coming_leave_a_stream_every_second_one():
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


def test_with_chunks_streams_come_first_and_the_oldest_context_gets_what_is_left():
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


def test_a_short_context_behind_the_last_chunk_of_a_long_one():
    running = [in_context(20, done=12), in_context(20), in_context(2)]
    selected = chunked().select(running)
    assert sizes(selected, running) == [8, 8, 0] and selected.num_free_rows == 0


def test_the_last_token_stays_with_the_draft_behind_it():
    """Of 8 tokens and a draft of 3 the first 8 would fit; then nothing was left for the draft to stand behind."""
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


def test_equal_progress_gives_what_the_short_ones_leave_to_the_long_ones():
    running = [in_context(40), in_context(3), in_context(5)]
    selected = equal_progress(24).select(running)
    assert sizes(selected, running) == [16, 3, 5] and selected.num_free_rows == 0


def test_equal_progress_goes_on_from_where_each_is():
    running = [in_context(40, done=8), in_context(40, done=4)]
    assert sizes(equal_progress(12).select(running), running) == [8, 4]


def test_a_short_end_takes_the_rows_that_a_block_does_not_fit_into():
    running = [in_context(40), in_context(40), in_context(2)]
    assert sizes(equal_progress(10).select(running), running) == [4, 4, 2]
    assert sizes(equal_progress(11).select(running), running) == [4, 4, 2]
    running = [in_context(40), in_context(2), in_context(3)]
    assert sizes(equal_progress(7).select(running), running) == [4, 2, 0]


def test_equal_progress_does_not_divide_an_end_and_its_draft():
    running = [in_context(40), in_context(6, draft=3)]
    assert sizes(equal_progress(13).select(running), running) == [8, 4]
    assert sizes(equal_progress(14).select(running), running) == [8, 4]
    running[1].num_computed_tokens = 4
    assert sizes(equal_progress(9).select(running), running) == [4, 5]
    assert sizes(equal_progress(8).select(running), running) == [8, 0]


def test_a_draft_behind_a_full_block_goes_with_that_block():
    running = [in_context(8, done=4, draft=3), in_context(40)]
    assert sizes(equal_progress(11).select(running), running) == [7, 4]
    assert sizes(equal_progress(6).select(running), running) == [0, 4]


def test_a_context_alone_gets_everything_under_either_policy():
    running = [in_context(40)]
    assert sizes(equal_progress(15).select(running), running) == [12]
    assert sizes(chunked(15).select(running), running) == [12]


def test_equal_progress_means_nothing_without_chunks():
    scheduler = MicroBatchScheduler(16, 4, enable_chunked_context=False, chunking_policy=EQUAL_PROGRESS)
    running = [in_context(9), in_context(9)]
    assert sizes(scheduler.select(running), running) == [9, 0]


@settings(deadline=None, derandomize=True)
@given(
    contexts=st.lists(
        st.tuples(st.integers(1, 30), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=5
    ),
    policy=st.sampled_from(ContextChunkingPolicy),
    max_num_tokens=st.integers(8, 40),
)
def test_chunks_fill_an_iteration_without_overdrawing_it_and_the_oldest_gets_on(
    contexts, policy, max_num_tokens
):
    running = [in_context(4 * done + rest, 4 * done, draft) for rest, done, draft in contexts]
    selected = MicroBatchScheduler(max_num_tokens, 4, True, policy).select(running)
    given_rows = sizes(selected, running)
    assert sum(given_rows) + selected.num_free_rows == max_num_tokens and selected.num_free_rows >= 0
    for sequence, rows in zip(running, given_rows):
        end, whole = sequence.next_position + rows, sequence.context_length + sequence.draft_length
        assert end == whole or (end % 4 == 0 and end < sequence.context_length)
    assert given_rows[0] > 0, "the oldest needs a block and its draft at most: 8 rows"


# ---------------------------------------------------------------- generation


def test_a_search_takes_a_row_for_each_beam_or_waits_with_all_behind_it():
    three = generating(3, sampling=SamplingConfig(beam_width=3))
    first, last = generating(), generating()
    assert unchunked(5).select([first, three, last]).generation == [first, three, last]
    selected = unchunked(4).select([first, three, last])
    assert selected.generation == [first, three] and selected.num_free_rows == 0
    selected = unchunked(3).select([first, three, last])
    assert selected.generation == [first] and selected.num_free_rows == 2


def test_in_its_context_a_search_is_one_row_a_token():
    search = in_context(6, sampling=SamplingConfig(beam_width=3))
    assert unchunked().select([search]).context == [(search, 6)]


def test_who_needs_the_host_waits_for_what_is_in_flight():
    search, plain = generating(2, sampling=SamplingConfig(beam_width=2)), generating()
    guessing = generating(prompt_lookup_num_tokens=2)
    for sequence in (search, plain, guessing):
        sequence.num_scheduled_tokens = 1
    assert unchunked().select([search, plain, guessing]).generation == [plain]


def test_nothing_is_computed_beyond_the_last_token_that_is_fed_back():
    last = make_sequence(prompt=4, new=2)
    last.start((0,), num_reused_tokens=4)
    last.tokens.append(7)
    assert unchunked().select([last]).generation == [last]
    last.num_scheduled_tokens = 1  # the second and last token comes of it
    assert unchunked().select([last]).generation == []


def test_who_has_ended_only_waits_for_its_batches():
    ended = generating()
    ended.num_scheduled_tokens = 1
    ended.finish(FinishReason.CANCELLED)
    selected = unchunked().select([ended])
    assert (selected.context, selected.generation) == ([], [])
