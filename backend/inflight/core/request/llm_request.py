"""The state of one sequence: the state machine as a table, and the progress counters.

    event      WAITING    RUNNING    PAUSED     FINISHED
    START      RUNNING    -          RUNNING    -
    PAUSE      -          PAUSED     -          -
    FINISH     FINISHED   FINISHED   FINISHED   -

A dash is an illegal transition, which raises and changes nothing. There is no state for context or generation: the
phase follows from how many of the known tokens are computed. Only the scheduler and its parts change the state.

A request has one LlmRequest per sequence, num_return_sequences in total. A beam search is a single LlmRequest with
several slots. State that belongs to the whole request is in its RequestGroup.
"""

from __future__ import annotations

from enum import Enum, auto

from inflight.core.kv.block_keys import CacheRules
from inflight.core.request.adapter import StoredAdapter
from inflight.core.request.beam_search import BeamSearch
from inflight.core.request.drafters import Drafter
from inflight.core.request.request import Request
from inflight.core.request.response import TopLogProbs
from inflight.core.request.stop import FinishReason, StopWords
from inflight.errors import InflightError


class RequestState(Enum):
    """The state of a sequence: it waits for its first start, runs, is paused, or has ended."""

    WAITING = auto()
    RUNNING = auto()
    PAUSED = auto()
    FINISHED = auto()


class RequestEvent(Enum):
    """The events that change a sequence's state."""

    START = auto()
    PAUSE = auto()
    FINISH = auto()


TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.WAITING, RequestEvent.START): RequestState.RUNNING,
    (RequestState.PAUSED, RequestEvent.START): RequestState.RUNNING,
    (RequestState.RUNNING, RequestEvent.PAUSE): RequestState.PAUSED,
    (RequestState.WAITING, RequestEvent.FINISH): RequestState.FINISHED,
    (RequestState.RUNNING, RequestEvent.FINISH): RequestState.FINISHED,
    (RequestState.PAUSED, RequestEvent.FINISH): RequestState.FINISHED,
}


class IllegalTransition(AssertionError):
    """The scheduler asked for a transition that the table does not have: a defect, not a user error."""


class RequestGroup:
    """A request and its sequences.

    Attributes:
        request: The client's request.
        sequences: The request's sequences, by sequence index.
        num_unfinished: Number of sequences that still hold blocks or whose last response has not been made.
        error: The error if the request has failed; then its only final response has this error.
        context_log_probs: Log probabilities of the prompt tokens from the second one on, as far as computed.
        context_logits: Logits of the prompt's rows, as far as computed; float32 [rows, vocab_size] pieces.
        context_outputs: For each of `OutputConfig.gathered_outputs`, the prompt's rows as far as computed; float32
            [rows, width] pieces.
        num_context_rows: Number of prompt positions whose outputs are known.
        context_index: Index of the sequence that computes the prompt for all sequences, and gives the context
            outputs.
        has_context: Whether the prompt is computed, so that the other sequences may start.
        awaits_guide: Whether the request's guide is still being compiled.
        awaits_adapter: Whether the request's adapter is still being fetched.
        adapter: The request's adapter, once it is stored; None without an adapter.
        arrival_ns: Time when the request arrived, like all times in monotonic nanoseconds.
        deadline_ns: Time when the request times out; 0: never.
        stop_requested_ns: Time when a front end asked to end the request; 0: none has asked.
        is_to_end: Whether all sequences will be ended in one of the next iterations, so that none is started.
    """

    def __init__(self, request: Request, first_key: int, rules: CacheRules, now_ns: int) -> None:
        count = request.sampling.num_sequences
        self.request = request
        self.arrival_ns = request.arrival_time_ns or now_ns
        allotted_ns = request.allotted_time_ms * 1_000_000
        self.deadline_ns = self.arrival_ns + allotted_ns if allotted_ns else 0
        self.stop_requested_ns = 0
        self.is_to_end = False
        self.sequences = [LlmRequest(self, index, first_key + index, rules) for index in range(count)]
        self.num_unfinished = count
        self.error: InflightError | None = None
        self.context_log_probs: list[float] = []
        self.context_logits: list[bytes] = []
        self.context_outputs: list[list[bytes]] = [[] for _ in request.output.gathered_outputs]
        self.num_context_rows = 0
        self.context_index = 0
        self.has_context = False
        self.awaits_guide = request.guide is not None
        self.awaits_adapter = request.lora is not None
        self.adapter: StoredAdapter | None = None

    @property
    def is_held(self) -> bool:
        """Whether the request waits for its guide or its adapter, so that none of its sequences may start."""
        return self.awaits_guide or self.awaits_adapter

    @property
    def lacks_context(self) -> bool:
        """Whether context outputs are wanted and some are still missing."""
        return self.request.output.wants_context and self.num_context_rows < self.request.prompt_length

    def pass_context_on(self) -> LlmRequest | None:
        """Choose another sequence to compute the prompt after the first one has ended.

        Returns a sequence that never started, for which the other sequences now wait; None if all context
        outputs are computed or no such sequence is left.
        """
        behind = self.sequences[self.context_index :]  # no sequence before it is waiting
        waiting = (s for s in behind if s.state is RequestState.WAITING)
        successor = next(waiting, None) if self.lacks_context else None
        if successor is not None:
            self.context_index = successor.sequence_index
        return successor


class LlmRequest:
    """One sequence, or one beam search, from arrival to its last response.

    Attributes:
        group: The request to which the sequence belongs.
        request: The client's request.
        sequence_index: Index among the request's sequences.
        key: A number unique to this sequence since the start.
        rules: How the sequence's KV blocks are shared and kept; final once the request is no longer held.
        state: The state, see the table above.
        prompt_length, max_length: Number of tokens of the prompt, and of the sequence at its length limit.
        streams_tokens_only: Whether the streamed responses contain nothing but new tokens.
        tokens: Prompt and generated tokens. For a beam search only the number of generated tokens is meaningful.
        slots: The slots on the device, one per beam, while the state is RUNNING and, after the sequence has ended,
            until its batches in flight are back; otherwise ().
        context_length: Number of `tokens` to compute as context since the last start: the prompt, and after
            a pause also the tokens generated before.
        num_overtaken: Number of later sequences that were moved before this one in the waiting queue, because they
            had longer cached prefixes.
        num_computed_tokens: Tokens whose keys and values are confirmed to be in the cache.
        num_scheduled_tokens: Tokens in batches in flight, for which `update` was not called yet.
        is_void: Whether the rows in flight depend on a failed iteration, so that their tokens are dropped.
        retry_until: Number of computed tokens at which the sequence has passed the point where an iteration
            failed.
        has_started: Whether the sequence has ever run.
        last_turn: The micro-batch in which the sequence last generated, as a count of micro-batches; 0 without
            pipeline stages.
        next_block_end: The number of computed tokens that fills the next block.
        num_streamed_tokens: Number of generated tokens that were in earlier responses.
        has_draft: Whether the request's own draft is still to be verified.
        needs_host: Whether the next row depends on the outcome of the rows in flight.
        beams: The beam search; None for an ordinary sequence.
        drafter: Guesses draft tokens; None without such drafts, and until the request is queued.
        stop_words: The stop words; None if there are none, and for a beam search.
        finish_reason: The reason why the sequence ended.
        log_probs, drawn_log_probs, top_log_probs, logits, additional_outputs: Details (`TokenDetails`) of the
            generated tokens that were in no response yet; empty unless the request wants them.
        cum_log_prob: Sum of the log probabilities of all generated tokens.
        first_scheduled_ns, first_token_ns, last_token_ns: Times of the first iteration, the first token and
            the latest token, in monotonic nanoseconds; 0 until then.
        first_iteration, last_iteration: The iterations in which the sequence got its first and its latest token.
        num_iterations: Number of iterations in which the sequence got tokens.
        num_new_blocks, num_reused_blocks, num_missed_blocks: The sums of `BlockCounts` of earlier runs, before the
            last pause.
        num_draft_tokens, num_accepted_tokens: Numbers of verified draft tokens, and of accepted draft tokens that
            became part of the sequence.
    """

    __slots__ = (
        "additional_outputs",
        "beams",
        "context_length",
        "cum_log_prob",
        "drafter",
        "drawn_log_probs",
        "finish_reason",
        "first_iteration",
        "first_scheduled_ns",
        "first_token_ns",
        "group",
        "has_draft",
        "has_started",
        "is_void",
        "key",
        "last_iteration",
        "last_token_ns",
        "last_turn",
        "log_probs",
        "logits",
        "max_length",
        "needs_host",
        "next_block_end",
        "num_accepted_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_iterations",
        "num_missed_blocks",
        "num_new_blocks",
        "num_overtaken",
        "num_reused_blocks",
        "num_scheduled_tokens",
        "num_streamed_tokens",
        "prompt_length",
        "request",
        "retry_until",
        "rules",
        "sequence_index",
        "slots",
        "state",
        "stop_words",
        "streams_tokens_only",
        "tokens",
        "top_log_probs",
    )

    def __init__(self, group: RequestGroup, sequence_index: int, key: int, rules: CacheRules) -> None:
        request = group.request
        self.group = group
        self.request = request
        self.sequence_index = sequence_index
        self.key = key
        self.rules = rules
        self.state = RequestState.WAITING
        self.tokens = list(request.input_token_ids)
        self.slots: tuple[int, ...] = ()
        self.context_length = len(self.tokens)
        self.num_overtaken = 0
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.is_void = False
        self.retry_until = 0
        self.has_started = False
        self.last_turn = 0
        self.num_streamed_tokens = 0
        self.next_block_end = 0
        self.has_draft = request.draft is not None
        self.needs_host = request.needs_host
        output = request.output
        self.prompt_length = request.prompt_length
        self.max_length = request.max_sequence_length
        self.streams_tokens_only = request.streaming and not (
            request.sampling.uses_beams
            or output.wants_details
            or output.wants_context
            or output.return_perf_metrics
            or output.additional_outputs
        )
        self.beams = BeamSearch(request) if request.sampling.uses_beams else None
        self.drafter: Drafter | None = None
        has_stop_words = bool(request.stop_words) and not self.beams
        self.stop_words = StopWords(request.stop_words, request.stop_words_after) if has_stop_words else None
        self.finish_reason = FinishReason.NOT_FINISHED
        self.log_probs: list[float] = []
        self.drawn_log_probs: list[float] = []
        self.top_log_probs: list[TopLogProbs] = []
        self.logits: list[bytes] = []
        self.additional_outputs: list[tuple[bytes, ...]] = []
        self.cum_log_prob = 0.0
        self.first_scheduled_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0
        self.first_iteration = 0
        self.last_iteration = 0
        self.num_iterations = 0
        self.num_new_blocks = 0
        self.num_reused_blocks = 0
        self.num_missed_blocks = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    @property
    def request_id(self) -> int:
        """The request's id, which all its sequences share."""
        return self.request.request_id

    @property
    def num_generated(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - self.prompt_length

    @property
    def num_slots(self) -> int:
        """Number of slots that the sequence needs: one per beam."""
        return self.request.sampling.beam_width

    @property
    def next_position(self) -> int:
        """Position of the next token to be computed."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def in_context(self) -> bool:
        """Whether known tokens are still to be scheduled; otherwise the next input is the device's own last
        token."""
        return self.num_computed_tokens + self.num_scheduled_tokens < self.context_length

    @property
    def leads(self) -> bool:
        """Whether this sequence computes the prompt for all sequences of its request."""
        return self.group.context_index == self.sequence_index

    @property
    def gives_context(self) -> bool:
        """Whether context outputs must be computed with this sequence's context."""
        return self.leads and self.group.lacks_context

    @property
    def draft_length(self) -> int:
        """Number of draft tokens at the end of the sequence's last context chunk."""
        return self.request.draft_length if self.has_draft else 0

    def apply(self, event: RequestEvent) -> None:
        """Change the state according to the table.

        Raises IllegalTransition, and changes nothing, if the table has no entry.
        """
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalTransition(f"request {self.request_id} is {self.state.name}: cannot {event.name}")
        self.state = target

    def start(self, slots: tuple[int, ...], num_reused_tokens: int) -> None:
        """Start or resume in `slots`; the blocks of the first `num_reused_tokens` tokens were found in the
        cache."""
        self.apply(RequestEvent.START)
        self.slots = slots
        self.has_started = True
        self.context_length = len(self.tokens)
        self.num_computed_tokens = num_reused_tokens

    def pause(self) -> None:
        """Give up slots and blocks; after the pause, all known tokens are computed again."""
        self.apply(RequestEvent.PAUSE)
        self.slots = ()
        self.num_computed_tokens = 0
        self.is_void = False

    def restart(self) -> None:
        """Give up slots and blocks after a failed iteration; the known tokens are computed again.

        The beams of a search cannot be recomputed from tokens alone, so the search begins again; tokens that were
        streamed are not streamed twice.
        """
        self.pause()
        if self.beams is not None:
            self.beams = BeamSearch(self.request)
            del self.tokens[self.prompt_length :]

    def forget_details(self) -> None:
        """Drop the details that a response contains, after it was made.

        Otherwise the logits of a long stream would fill the memory.
        """
        self.log_probs.clear()
        self.drawn_log_probs.clear()
        self.top_log_probs.clear()
        self.logits.clear()
        self.additional_outputs.clear()

    def finish(self, reason: FinishReason) -> None:
        """End with `reason`. The slots stay until the batches in flight are back."""
        self.apply(RequestEvent.FINISH)
        self.is_void = False
        self.finish_reason = reason
