"""Oracle of one scheduler's KV cache: a plain set of the prefixes that were computed, which never shrinks.

A prefix is known once an update has confirmed that its last block is computed. A sequence must never find more
blocks than those of its longest known prefix. It must find exactly these until the pool first runs out of empty
blocks, because nothing has been evicted until then. A block is promised if a running sequence will compute it;
sequences that need it wait. The oracle uses neither digests nor block ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping

from inflight.config import SchedulingConfig
from inflight.core.kv.kv_cache_manager import PrefixMatch
from inflight.core.request.llm_request import LlmRequest, RequestState
from inflight.core.schedule.batch import ScheduledBatch
from inflight.core.scheduler import Scheduler

_Prefix = tuple[Hashable, tuple[Hashable, ...]]
"""Key of the beginning before a block, and what is known of each token in it: id, extra id and picture span."""


class CacheOracle:
    """Oracle of computed and reused blocks.

    Attributes:
        adapters: By request id, the digest of its adapter's content.
        num_reused, num_missed: Full blocks by (request id, sequence index), over all its starts.
        num_copied: Blocks of which a beginning was found, by the same keys.
        num_tokens: Tokens found by all starts.
        is_complete: False once computed blocks were dropped, or not published, for a reason other than eviction.
        num_exact: Starts whose number of found blocks was certain.
    """

    def __init__(self, scheduler: Scheduler, config: SchedulingConfig, adapters: Mapping[int, bytes]) -> None:
        self.adapters = adapters
        self.num_reused: Counter[tuple[int, int]] = Counter()
        self.num_missed: Counter[tuple[int, int]] = Counter()
        self.num_copied: Counter[tuple[int, int]] = Counter()
        self.num_tokens = 0
        self.num_exact = 0
        self.is_complete = True
        self._kv_cache = scheduler.kv_cache
        self._scheduler = scheduler
        self._shares_all = config.enable_kv_cache_reuse
        limits = scheduler.limits
        self._has_spans, self._vocab_size = bool(limits.max_span_length), limits.vocab_size
        self._size = scheduler.kv_cache.tokens_per_block
        self._numbers: dict[_Prefix, int] = {}  # one for every prefix seen so far
        self._known: set[int] = set()
        self._chains: dict[int, list[int]] = {}  # prefix numbers of all full blocks, by sequence key
        self._num_promised: dict[int, int] = {}  # promised blocks by sequence key
        self._num_known: Counter[int] = Counter()  # by sequence key: its full blocks in _known
        self._num_taken = 0

    # ---------------------------------------------------------------- prefixes

    def _scope(self, llm_request: LlmRequest) -> Hashable:
        """Return a key that sequences which may share blocks have in common; None if it shares with none."""
        request = llm_request.request
        if self._shares_all:
            adapter = self.adapters.get(request.request_id)
            return (
                request.identity.cache_salt_id,
                adapter,
                request.prompt_table and request.prompt_table.digest,
            )
        return (llm_request.request_id,) if request.sampling.num_sequences > 1 else None

    def _prefixes(self, llm_request: LlmRequest, num_tokens: int) -> list[int]:
        """Return the number of the prefix that ends with each full block of the first `num_tokens` tokens."""
        chain = self._chains.setdefault(llm_request.key, [])
        size = self._size
        for end in range((len(chain) + 1) * size, num_tokens + 1, size):
            before = chain[-1] if chain else self._scope(llm_request)
            prefix = (before, tuple(self._token(llm_request, at) for at in range(end - size, end)))
            chain.append(self._numbers.setdefault(prefix, len(self._numbers)))
        return chain[: num_tokens // size]

    def _token(self, llm_request: LlmRequest, position: int) -> Hashable:
        """Return everything that a token's keys and values depend on, beside the tokens before it."""
        begin, end = position, position + 1
        if self._has_spans and self._is_virtual(llm_request, position):
            while begin and self._is_virtual(llm_request, begin - 1):
                begin -= 1
            while self._is_virtual(llm_request, end):
                end += 1
        extra_ids = llm_request.request.identity.extra_ids
        seen = [(llm_request.tokens[i], extra_ids[i] if i < len(extra_ids) else 0) for i in range(begin, end)]
        return position - begin, tuple(seen)

    def _is_virtual(self, llm_request: LlmRequest, position: int) -> bool:
        ids = llm_request.request.input_token_ids
        return position < len(ids) and ids[position] >= self._vocab_size

    def _looks(self, llm_request: LlmRequest) -> bool:
        """Whether a request's prefix is looked up: not for context logits, which need every row computed."""
        return self._scope(llm_request) is not None and not llm_request.gives_context

    def _num_found(self, llm_request: LlmRequest) -> tuple[int, int]:
        """Return how many of the sequence's first blocks are known, and how many could be reused at most."""
        prefixes = self._prefixes(llm_request, len(llm_request.tokens) - 1)
        return next((i for i, p in enumerate(prefixes) if p not in self._known), len(prefixes)), len(prefixes)

    # ---------------------------------------------------------------- events

    def is_promised(self, llm_request: LlmRequest) -> bool:
        """Whether a running sequence will compute the first block that the cache lacks for this sequence."""
        return self._looks(llm_request) and self._is_promised(llm_request, self._match(llm_request))

    def _match(self, llm_request: LlmRequest) -> PrefixMatch:
        return self._kv_cache.match_prefix(llm_request.key, llm_request.tokens, llm_request.rules)

    def _is_promised(self, llm_request: LlmRequest, match: PrefixMatch) -> bool:
        prefixes = self._prefixes(llm_request, len(llm_request.tokens) - 1)
        place = len(match.block_ids)
        return place < len(prefixes) and any(
            self._num_known[runner.key] <= place < self._num_promised[runner.key]
            and self._chains[runner.key][place] == prefixes[place]
            for runner in self._scheduler.running_sequences
        )

    def check_promises(self, waiting: Iterable[LlmRequest]) -> None:
        """Check between admissions that the manager and this oracle agree on promised blocks."""
        for llm_request in waiting:
            if self._looks(llm_request):
                match = self._match(llm_request)
                assert match.is_promised == self._is_promised(llm_request, match), (
                    f"request {llm_request.request_id}: the manager is wrong about a promised block"
                )

    def _longest_beginning(self, llm_request: LlmRequest, place: int) -> int:
        """Return how many tokens of a sequence's block `place` some known block begins with, at most."""
        chain = self._prefixes(llm_request, place * self._size)
        before = chain[-1] if chain else self._scope(llm_request)
        rest = range(place * self._size, min((place + 1) * self._size, len(llm_request.tokens) - 1))
        wanted = [self._token(llm_request, at) for at in rest]
        longest = 0
        for (parent, tokens), number in self._numbers.items():
            if parent == before and number in self._known:
                count = 0
                for token, other in zip(wanted, tokens):
                    if token != other:
                        break
                    count += 1
                longest = max(longest, count)
        return longest

    def admitted(self, llm_request: LlmRequest, num_tokens: int) -> None:
        """Check the numbers of blocks and tokens that an admitted sequence has found."""
        counts = self._kv_cache.block_counts(llm_request.key)
        num_full, num_begun = divmod(num_tokens, self._size)
        self._num_known[llm_request.key] = num_full
        assert counts.reused == num_full + (num_begun > 0)
        assert counts.new == -(-len(llm_request.tokens) // self._size) - num_full
        self._num_promised[llm_request.key] = 0
        if not self._looks(llm_request):
            assert counts.reused == counts.missed == 0
            return
        found, sought = self._num_found(llm_request)
        self._num_promised[llm_request.key] = len(self._prefixes(llm_request, len(llm_request.tokens)))
        assert num_full <= found, f"request {llm_request.request_id} found blocks that were not computed"
        self._check_found(llm_request, num_full, num_begun, found)
        assert counts.missed == sought - num_full
        name = llm_request.request_id, llm_request.sequence_index
        self.num_tokens += num_tokens
        self.num_copied[name] += num_begun > 0
        self.num_reused[name] += num_full
        self.num_missed[name] += counts.missed

    def _check_found(self, llm_request: LlmRequest, num_full: int, num_begun: int, found: int) -> None:
        """Check the full blocks, and the tokens of a block's beginning, that a sequence has found.

        `found`: number of full blocks of its prefix that have been computed.
        """
        longest = self._longest_beginning(llm_request, num_full)
        assert num_begun <= longest, (
            f"request {llm_request.request_id} found the beginning of a block that was not computed"
        )
        # Requests admitted together with this one have taken blocks, too.
        if self.is_complete and self._kv_cache.num_taken_blocks <= self._kv_cache.pool.num_blocks:
            self.num_exact += 1
            assert num_full == found, f"request {llm_request.request_id} did not find all known blocks"
            assert num_begun == longest, "the beginning of a known block was not found"

    def scheduled(self, batch: ScheduledBatch, starts: Iterable[LlmRequest]) -> None:
        """Count the blocks that a batch takes from the pool."""
        shared = sum(self._num_known[llm_request.key] for llm_request in starts)
        named = sum(len(block_ids) for _, block_ids in batch.new_blocks)
        self._num_taken += named - shared + len(batch.replaced_blocks)
        assert self._num_taken == self._kv_cache.num_taken_blocks

    def updated(self, rows: Collection[LlmRequest]) -> None:
        """Record an update that has confirmed rows of these sequences, which had not ended before."""
        for llm_request in rows:
            if self._scope(llm_request) is None or llm_request.state is RequestState.PAUSED:
                continue
            known = llm_request.tokens
            if llm_request.request.sampling.uses_beams:
                known = known[: llm_request.prompt_length]
            num_tokens = min(llm_request.num_computed_tokens, len(known))
            prefixes = self._prefixes(llm_request, num_tokens)
            self._known.update(prefixes[self._num_known[llm_request.key] :])
            self._num_known[llm_request.key] = max(self._num_known[llm_request.key], len(prefixes))

    def check(self) -> None:
        """Check at the end that the manager's totals are the sums over all starts."""
        assert self._kv_cache.num_reused_blocks == self.num_reused.total() + self.num_copied.total()
        assert self._kv_cache.num_missed_blocks == sum(self.num_missed.values())
