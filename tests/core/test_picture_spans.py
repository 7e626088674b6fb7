"""Picture spans: where they are, where chunks may end, which requests fit, and which blocks are shared."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.config import SchedulingConfig
from inflight.core.kv.block_keys import ROOT_SCOPE, CacheRules
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.kv.picture_spans import find_spans, span_at
from inflight.core.request.llm_request import LlmRequest
from inflight.core.request.request import ExternalDraft
from inflight.core.schedule.micro_batch_scheduler import MicroBatchScheduler
from inflight.errors import TooLong, Unsupported

from .factories import make_limits, make_prompt_table, make_request, make_sequence, with_table

TEXT, ROW = 5, 1000  # a token of text, and the first virtual token
SIZE = 4
LIMITS = replace(make_limits(hidden_size=2, max_sequence_length=1000, num_blocks=200), has_spans=True)


def prompt(*parts: int) -> tuple[int, ...]:
    """Texts of so many tokens, and pictures of so many tokens (negative), whose rows are all different."""
    ids: list[int] = []
    for part in parts:
        ids += [TEXT] * part if part > 0 else range(ROW + len(ids), ROW + len(ids) - part)
    return tuple(ids)


def test_spans_are_runs_of_virtual_tokens():
    assert find_spans((), ROW) == find_spans(prompt(3), ROW) == ()
    assert find_spans(prompt(-2, 1, -3, 2, -1), ROW) == ((0, 2), (3, 6), (8, 9))
    assert find_spans(prompt(-2, -3, 1), ROW) == ((0, 5),)


def test_a_cut_divides_a_span_only_inside_of_it():
    spans = ((0, 2), (3, 6), (8, 9))
    assert [span_at(spans, at) for at in range(11)] == [
        *(None, (0, 2), None, None, (3, 6), (3, 6), None, None, None, None, None),
    ]


# ---------------------------------------------------------------- requests


def has_room(max_num_tokens: int, chunked: bool = True, draft: int = 0, length: int = 20) -> bool:
    config = SchedulingConfig(max_num_tokens=max_num_tokens, enable_chunked_context=chunked)
    request = with_table(
        make_prompt_table(100),
        prompt=prompt(2, -length, 1),
        new=20,
        draft=ExternalDraft((TEXT,) * draft) if draft else None,
    )
    try:
        request.validate(LIMITS.model_limits(config))
    except TooLong as error:
        assert f"a picture of {length} tokens" in str(error) and "raise max_num_tokens" in str(error)
        return False
    return True


def test_a_picture_must_fit_beside_a_token_of_every_other_sequence():
    assert LIMITS.max_num_sequences == 4
    assert [has_room(size) for size in (22, 23)] == [False, True]
    assert [has_room(size, draft=3) for size in (25, 26)] == [False, True]
    assert has_room(23, chunked=False)
    assert make_request(prompt=20).spans(LIMITS.model_limits(SchedulingConfig())) == ()


def test_in_models_with_causal_attention_a_picture_may_be_longer_than_a_chunk():
    causal = replace(LIMITS, has_spans=False).model_limits(SchedulingConfig(max_num_tokens=16))
    assert with_table(make_prompt_table(100), prompt=prompt(-60)).spans(causal) == ()
    assert causal.max_span_length == 0


def test_an_engine_without_bidirectional_attention_takes_no_pictures():
    limits = replace(LIMITS, hidden_size=0).model_limits(SchedulingConfig())
    with pytest.raises(Unsupported, match="attend to each other in both directions"):
        with_table().validate(limits)


# ---------------------------------------------------------------- chunks


def in_context(*parts: int, done: int = 0) -> LlmRequest:
    sequence = make_sequence(prompt=prompt(*parts), new=20)
    sequence.rules = CacheRules(None, spans=find_spans(sequence.tokens, ROW))
    sequence.start((0,), num_reused_tokens=done)
    return sequence


def rows(sequence: LlmRequest, max_num_tokens: int, is_equal: bool) -> int:
    """Return the number of rows of the next chunk of a sequence that is alone."""
    config = SchedulingConfig(max_num_tokens=max_num_tokens, enable_chunked_context=True)
    scheduler = MicroBatchScheduler(config, LIMITS)
    select = scheduler._share_equally if is_equal else scheduler._select_context
    chunks, _ = select([sequence], max_num_tokens)
    return chunks[0][1] if chunks else 0


@pytest.mark.parametrize("is_equal", [False, True])
def test_a_chunk_ends_before_or_after_a_picture_but_not_inside(is_equal):
    def sizes(*parts: int, done: int = 0) -> list[int]:
        return [rows(in_context(*parts, done=done), size, is_equal) for size in range(4, 14)]

    assert sizes(6, -5, 20) == [4, 4, 6, 6, 6, 6, 6, 11, 12, 12]
    assert sizes(6, -5, 20, done=6) == [0, 5, 6, 6, 6, 6, 10, 10, 10, 10]
    assert sizes(6, -5, 20, done=8) == [4, 4, 4, 4, 8, 8, 8, 8, 12, 12]  # begins inside of it
    assert sizes(2, -9) == [2, 2, 2, 2, 2, 2, 2, 11, 11, 11]  # ends the prompt


@settings(deadline=None, derandomize=True)
@given(
    parts=st.lists(st.integers(1, 9) | st.integers(-9, -1), min_size=1, max_size=6),
    is_equal=st.booleans(),
    max_num_tokens=st.integers(SIZE, 20),
    done=st.integers(0, 8),
)
def test_every_context_is_computed_with_room_for_its_longest_picture(parts, is_equal, max_num_tokens, done):
    sequence = in_context(*parts)
    spans = sequence.rules.spans
    room = max(max_num_tokens, *(end - begin for begin, end in spans), SIZE)
    sequence.num_computed_tokens = min(done, sequence.context_length - 1)
    while sequence.in_context:
        count = rows(sequence, room, is_equal)
        assert count > 0
        sequence.num_computed_tokens += count
        assert span_at(spans, sequence.num_computed_tokens) is None


# ---------------------------------------------------------------- keys of blocks


def reused(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Number of tokens of the second prompt whose keys and values are those of the first."""
    cache = KvCacheManager(20, SIZE)
    of_first, of_second = (CacheRules(ROOT_SCOPE, spans=find_spans(ids, ROW)) for ids in (first, second))
    cache.admit(1, cache.match_prefix(1, first, of_first), 10, of_first)
    cache.extend(1, len(first))
    cache.publish(1, first, len(first))
    match = cache.match_prefix(2, second, of_second)
    return len(match.block_ids) * SIZE + match.num_copied_tokens


def test_blocks_of_a_picture_are_shared_only_with_the_whole_picture():
    whole = prompt(6, -8, 6)
    assert reused(whole, whole) == len(whole) - 1
    assert reused(whole, (*whole[:14], 6)) == 14
    assert reused(whole, whole[:14]) == 13  # a chunk may begin inside of the picture
    for other in ((*whole[:13], 6), (*whole[:14], 2000, 6), (*whole[:13], 2000, 6)):
        assert reused(whole, other) == reused(other, whole) == 6


def test_text_before_a_picture_is_shared_in_any_case():
    assert reused(prompt(10), prompt(8, -4, 2)) == 8
    assert reused(prompt(8, -4, 2), prompt(10)) == 8
