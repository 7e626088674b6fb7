"""Keys of blocks: they depend on everything that keys and values depend on, and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import inflight.core.kv.block_keys as block_keys
from inflight.core.kv.block_keys import ROOT_SCOPE, CacheRules, PrefixIdentity, block_digest, private_scope
from inflight.core.kv.kv_cache_manager import KvCacheManager, PrefixMatch
from inflight.errors import InvalidArgument
from inflight.testing.simulation.integrity import check_integrity
from tests.tiers import examples

SIZE = 4
TOKENS = (5, 6, 7, 8, 9, 10, 11, 12)


class Identity(NamedTuple):
    """Everything beside tokens that a prompt's keys and values depend on."""

    own: PrefixIdentity = PrefixIdentity()
    adapter: bytes = b""
    table: bytes = b""

    def scope(self, root: bytes) -> bytes:
        return self.own.scope(root, self.adapter, self.table)


def rules(identity: Identity | PrefixIdentity) -> CacheRules:
    extra_ids = identity.own.extra_ids if isinstance(identity, Identity) else identity.extra_ids
    return CacheRules(identity.scope(ROOT_SCOPE), extra_ids, prompt_length=len(TOKENS))


def shared_blocks(
    first: Identity | PrefixIdentity, second: Identity | PrefixIdentity, tokens: Sequence[int] = TOKENS
) -> int:
    """Number of full blocks of `tokens` that a request of the second identity reuses from the first."""
    cache = KvCacheManager(8, SIZE)
    cache.admit(1, cache.match_prefix(1, tokens, rules(first)), 3, rules(first))
    cache.extend(1, len(tokens))
    cache.publish(1, tokens, len(tokens))
    cache.release(1)
    return len(cache.match_prefix(2, [*tokens, 1], rules(second)).block_ids)


# ---------------------------------------------------------------------- scopes

IDENTITIES = (
    Identity(),
    Identity(PrefixIdentity(cache_salt_id=1)),
    Identity(PrefixIdentity(cache_salt_id=1 << 63)),
    Identity(adapter=b"\x00"),
    Identity(adapter=b"\x01"),
    Identity(PrefixIdentity(cache_salt_id=1), b"\x01"),
    Identity(table=b"\x01"),
    Identity(table=(1).to_bytes(8, "big")),
    Identity(table=b"a table's digest"),
    Identity(adapter=b"\x01", table=(1).to_bytes(8, "big")),
    Identity(PrefixIdentity(extra_ids=(1, *[0] * 7))),
    Identity(PrefixIdentity(extra_ids=(0, 1, *[0] * 6))),
    Identity(PrefixIdentity(extra_ids=(1 << 63, *[0] * 7))),
    Identity(PrefixIdentity(cache_salt_id=1, extra_ids=(1, *[0] * 7))),
)


def test_only_equal_identities_share_blocks():
    for first, second in product(IDENTITIES, repeat=2):
        expected = 2 if first == second else 0
        assert shared_blocks(first, second) == expected, f"{first} and {second}"


def test_a_plain_request_starts_from_the_root_scope():
    assert PrefixIdentity().scope(ROOT_SCOPE) == ROOT_SCOPE
    assert PrefixIdentity(extra_ids=(1, 2)).scope(ROOT_SCOPE) == ROOT_SCOPE


def test_scopes_derived_from_private_scopes_are_private():
    salted = PrefixIdentity(cache_salt_id=7)
    scopes = {
        identity.scope(root)
        for identity in (PrefixIdentity(), salted)
        for root in (ROOT_SCOPE, private_scope(1), private_scope(2))
    }
    assert len(scopes) == 6


def test_equal_identities_have_equal_scopes():
    whole = Identity(PrefixIdentity(3), b"adapter", b"table")
    assert whole.scope(ROOT_SCOPE) == Identity(PrefixIdentity(3), b"adapter", b"table").scope(ROOT_SCOPE)
    assert len(whole.scope(ROOT_SCOPE)) == len(ROOT_SCOPE) == 16


@given(
    st.lists(
        st.builds(
            Identity,
            st.builds(PrefixIdentity, st.sampled_from((0, 1, 1 << 32, (1 << 64) - 1))),
            st.binary(max_size=17),
            st.binary(max_size=17),
        ),
        min_size=2,
        max_size=8,
        unique=True,
    )
)
@settings(deadline=None)
def test_different_identities_have_different_scopes(identities: list[Identity]):
    assert len({identity.scope(ROOT_SCOPE) for identity in identities}) == len(identities)


# ---------------------------------------------------------------------- extra ids


def test_extra_ids_of_zeros_count_as_none():
    assert shared_blocks(PrefixIdentity(), PrefixIdentity(extra_ids=(0,) * 8)) == 2
    assert block_digest(ROOT_SCOPE, TOKENS) == block_digest(ROOT_SCOPE, TOKENS, (0,) * 8)


def test_blocks_before_the_first_different_extra_id_are_shared():
    text, image = PrefixIdentity(), PrefixIdentity(extra_ids=(0, 0, 0, 0, 0, 0, 3, 3))
    other_image = PrefixIdentity(extra_ids=(0, 0, 0, 0, 0, 0, 4, 4))
    assert shared_blocks(text, image) == shared_blocks(image, text) == 1
    assert shared_blocks(image, other_image) == 1
    assert shared_blocks(image, image) == 2


def test_generated_tokens_have_no_extra_ids():
    """The prompt's last block has extra ids for its prompt tokens only."""
    prompt_ids = PrefixIdentity(extra_ids=(0, 0, 0, 0, 9, 9))
    padded = PrefixIdentity(extra_ids=(0, 0, 0, 0, 9, 9, 0, 0))
    assert shared_blocks(prompt_ids, padded) == 2
    assert shared_blocks(prompt_ids, PrefixIdentity()) == 1
    longer = (*TOKENS, 13, 14, 15, 16)
    assert shared_blocks(prompt_ids, prompt_ids, longer) == 3
    assert shared_blocks(prompt_ids, PrefixIdentity(), longer) == 1


def test_digests_at_admission_and_at_publication_agree():
    """At admission they are computed while a sequence waits, at publication as generated tokens fill blocks."""
    cache, identity = KvCacheManager(8, SIZE), PrefixIdentity(2, extra_ids=(0, 0, 1, 0, 0, 5))
    say = rules(Identity(identity, b"a", b"t"))
    cache.admit(1, cache.match_prefix(1, TOKENS[:6], say), 3, say)
    cache.extend(1, 8)
    cache.publish(1, TOKENS, 8)
    assert cache.match_prefix(2, [*TOKENS, 1], say) == PrefixMatch((0, 1), 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (([1, 2], [3, 4]), ([1, 2, 3, 4], [])),  # extra ids are no tokens
        (([1], [(1 << 64) - 1]), ([1, -1], [])),
        (([1, 2], [3, 4]), ([3, 4], [1, 2])),
        (([1, 2], [0, 1]), ([1, 2], [1, 0])),
        (([1, 2], [0, 1]), ([1, 2], [])),
        (([-1], []), ([-2], [])),  # hash(-1) == hash(-2)
        (([1, 2], []), ([2, 1], [])),
    ],
)
def test_different_prefixes_have_different_keys(first, second):
    assert block_digest(ROOT_SCOPE, *first) != block_digest(ROOT_SCOPE, *second)


def _padded(block: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    tokens, extra_ids = block
    return tokens, extra_ids or (0,) * len(tokens)


SMALL = st.integers(0, 2)
BLOCKS = st.integers(1, 3).flatmap(
    lambda count: st.tuples(
        st.tuples(*[SMALL] * count), st.one_of(st.just(()), st.tuples(*[st.sampled_from((0, 1, 2))] * count))
    )
)


@given(BLOCKS, BLOCKS)
@example(((1, 2), (1, 2)), ((1, 2), ()))
@settings(deadline=None, max_examples=examples(fast=100, all=300))
def test_keys_are_equal_exactly_if_tokens_and_extra_ids_are(first, second):
    equal = block_digest(ROOT_SCOPE, *first) == block_digest(ROOT_SCOPE, *second)
    assert equal == (_padded(first) == _padded(second))


def test_a_key_depends_on_its_parent():
    assert block_digest(ROOT_SCOPE, TOKENS) != block_digest(private_scope(1), TOKENS)


def test_extra_ids_for_only_some_tokens_raise_an_assertion_error():
    with pytest.raises(AssertionError):
        block_digest(ROOT_SCOPE, (1, 2, 3), (1, 2))


# ---------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (PrefixIdentity(cache_salt_id=-1), r"cache_salt_id must be in \[0, 2\*\*64\), got -1"),
        (PrefixIdentity(cache_salt_id=1 << 64), "cache_salt_id must be in"),
        (PrefixIdentity(extra_ids=(1, 2)), "one id for each of the 3 prompt tokens, got 2"),
        (PrefixIdentity(extra_ids=(0, -7, 0)), "prompt_table_extra_ids must be in .* got -7"),
        (PrefixIdentity(extra_ids=(0, 1 << 64, 0)), "prompt_table_extra_ids must be in"),
    ],
)
def test_salts_and_extra_ids_out_of_range_are_refused(identity: PrefixIdentity, message: str):
    with pytest.raises(InvalidArgument, match=message):
        identity.validate(prompt_length=3)


def test_the_largest_salts_and_extra_ids_are_valid():
    largest = (1 << 64) - 1
    identity = PrefixIdentity(largest, (largest,) * 3)
    identity.validate(prompt_length=3)
    assert len(rules(identity).digest(identity.scope(ROOT_SCOPE), (1, 2, 3), 0, 3)) == 16


# ---------------------------------------------------------------------- collisions


class WrongContent(Exception):
    """A sequence was given a block with the content of another prefix."""


def _play(seed: int) -> int:
    """Run random sequences over one cache and record each block's content.

    Return the number of reused blocks.

    Raises WrongContent for a block that is found by another prefix than the one it was computed for.
    """
    random, cache = Random(seed), KvCacheManager(12, SIZE)
    content: dict[int, tuple] = {}
    running: list[int] = []
    num_reused = 0
    for key in range(60):
        identity = random.choice(IDENTITIES[:2] + IDENTITIES[3:5] + IDENTITIES[10:12])
        tokens = random.choices((0, 1), weights=(6, 1), k=random.randrange(5, 14))
        extra_ids = (*identity.own.extra_ids, *[0] * 16)[: len(tokens)]
        identity = identity._replace(own=PrefixIdentity(identity.own.cache_salt_id, extra_ids))
        match = cache.match_prefix(key, tokens, rules(identity))
        while cache.blocks_for(len(tokens)) - match.num_held > cache.num_unreserved:
            cache.release(running.pop(0))
            match = cache.match_prefix(key, tokens, rules(identity))
        meant = [_meaning(tokens, identity, index) for index in range(len(tokens) // SIZE)]
        if [content[block_id] for block_id in match.block_ids] != meant[: len(match.block_ids)]:
            raise WrongContent(f"sequence {key} of seed {seed}")
        num_reused += len(match.block_ids)
        cache.admit(key, match, cache.blocks_for(len(tokens)), rules(identity))
        cache.extend(key, len(tokens))
        content.update(zip(cache.block_table(key), meant))
        cache.publish(key, tokens, len(tokens))
        check_integrity(cache)
        running.append(key)
    return num_reused


def _meaning(tokens: list[int], identity: Identity, index: int) -> tuple:
    """Return everything that the keys and values of a block depend on."""
    end = (index + 1) * SIZE
    return (
        identity.own.cache_salt_id,
        identity.adapter,
        tuple(tokens[:end]),
        identity.own.extra_ids[:end],
    )


def test_matched_blocks_hold_the_tokens_that_were_computed():
    assert sum(_play(seed) for seed in range(40)) > 500


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda parent, tokens, extra_ids=(): block_digest(parent, tokens, extra_ids)[:1] * 16,
        lambda parent, tokens, extra_ids=(): block_digest(parent, tokens),
        lambda parent, tokens, extra_ids=(): block_digest(ROOT_SCOPE, tokens, extra_ids),
        lambda parent, tokens, extra_ids=(): block_digest(parent, sorted(tokens), extra_ids),
    ],
    ids=["8 bits", "without extra ids", "unchained", "unordered"],
)
def test_colliding_keys_are_detected(spoilt, monkeypatch):
    monkeypatch.setattr(block_keys, "block_digest", spoilt)
    with pytest.raises(WrongContent):
        for seed in range(40):
            _play(seed)
