"""The state of one sequence: the state machine as a table, and the progress counters.

    event      WAITING    RUNNING    PAUSED     FINISHED
    START      RUNNING    -          RUNNING    -
    PAUSE      -          PAUSED     -          -
    FINISH     FINISHED   FINISHED   FINISHED   -

A dash is an illegal transition, which raises and changes nothing. There is no context or generation state: the
phase follows from how many of the known tokens are computed. Only the scheduler and its parts change this state.

A request has one LlmRequest per sequence, num_return_sequences in all. A beam search is a single LlmRequest with
several slots. State that belongs to the whole request is in its RequestGroup.
"""

from __future__ import annotations

from enum import Enum, auto

from inflight.core.kv.block_keys import CacheRules
from inflight.core.request.adapter import StoredAdapter
from inflight.core.request.beam_search import BeamSearch
from inflight.core.request.prompt_lookup import PromptLookup
from inflight.core.request.request import Request
from inflight.core.request.response import TopLogProbs
from inflight.core.request.stop import FinishReason, StopWords
from inflight.errors import InflightError


class RequestState(Enum):
    """Whether a sequence waits for its first start, runs, was paused, or has ended."""

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
        sequences: Its sequences, by sequence index.
        num_unfinished: Sequences that still hold blocks or have not had their last response.
        error: Error of a failed request, which is then the request's only last response; otherwise None.
        context_log_probs: Log probabilities of the prompt tokens from the second one on, as far as computed.
        context_logits: Logits of the prompt's rows, as far as computed; float32 [rows, vocab_size] pieces.
        context_outputs: For each of `OutputConfig.gathered_outputs`, the prompt's rows as far as computed; float32
            [rows, width] pieces.
        num_context_rows: Number of prompt positions whose outputs are known.
        context_index: Index of the sequence that computes the prompt for all sequences, and gives the context
            outputs.
        has_context: Whether the prompt is computed, so that the other sequences may start.
        awaits_guide: Whether its guide is still being compiled.
        awaits_adapter: Whether its adapter is still being fetched.
        adapter: Its adapter, once it is stored; None if it has none.
        arrival_ns: When the request arrived.
        deadline_ns: When it times out; 0: never.
        stop_requested_ns: When a front end asked for it to end; 0: no front end did.
        is_to_end: Whether all its sequences are to end in one of the next iterations, so that none is started.
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
        """Choose another sequence to compute the prompt after the one chosen first has ended.

        Returns a sequence that never started, for which the others now wait; None if all context outputs are
        computed or no such sequence is left.
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
        group: The request it belongs to.
        request: The client's request.
        sequence_index: Index among the request's sequences.
        key: A number unique to this sequence since the start.
        rules: How its KV blocks are shared and kept; final once the request is no longer held.
        state: Its state, see the table above.
        prompt_length, max_length: Number of tokens of the prompt, and of the sequence at its length limit.
        streams_tokens_only: Whether its streamed responses carry nothing but new tokens.
        tokens: Prompt and generated tokens. For a beam search only the number of generated tokens is meaningful.
        slots: Its slots on the device, one per beam, while it is RUNNING and, after its end, until its batches in
            flight are back; else ().
        context_length: How many of `tokens` this run computes as context: the prompt, and after a pause also the
            tokens generated before it.
        num_computed_tokens: Tokens whose keys and values are confirmed to be in the cache.
        num_scheduled_tokens: Tokens in batches in flight, whose update has not come yet.
        is_void: Whether its rows in flight follow from a failed iteration, so that their tokens are dropped.
        retry_until: Number of computed tokens at which it has passed the point where an iteration failed.
        has_started: Whether it has ever run.
        last_turn: The micro-batch in which it last generated, as a count of micro-batches; 0 without pipeline
            stages.
        next_block_end: The number of computed tokens that fills the next block.
        num_streamed_tokens: Generated tokens that responses have already carried.
        has_draft: Whether the request's own draft is still to be verified.
        needs_host: Whether its next row depends on the outcome of its rows in flight.
        beams: Its beam search, if it is one.
        lookup: The index that guesses its draft tokens; None without prompt lookup.
        stop_words: Its stop words, if it has any; None for a beam search.
        finish_reason: Reason of its end.
        log_probs, drawn_log_probs, top_log_probs, logits, additional_outputs: Details (`TokenDetails`) of the
            generated tokens that no response has carried yet; empty unless the request wants them.
        cum_log_prob: Sum of the log probabilities of all generated tokens.
        first_scheduled_ns, first_token_ns, last_token_ns: Times of its first iteration, first token and latest
            token; 0 until then.
        first_iteration, last_iteration: The iterations that gave it its first and its latest token.
        num_iterations: Iterations that gave it tokens.
        num_new_blocks, num_reused_blocks, num_missed_blocks: Block counts of its runs before the current one.
        num_draft_tokens, num_accepted_tokens: Draft tokens verified, and draft tokens accepted and kept.
    """

    __slots__ = (
        "additional_outputs",
        "beams",
        "context_length",
        "cum_log_prob",
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
        "lookup",
        "max_length",
        "needs_host",
        "next_block_end",
        "num_accepted_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_iterations",
        "num_missed_blocks",
        "num_new_blocks",
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
        self.lookup = PromptLookup(self.tokens) if request.prompt_lookup_num_tokens else None
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
        """Number of generated tokens."""
        return len(self.tokens) - self.prompt_length

    @property
    def num_slots(self) -> int:
        """Number of slots that it needs: one per beam."""
        return self.request.sampling.beam_width

    @property
    def next_position(self) -> int:
        """Position of the next token to be computed."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def in_context(self) -> bool:
        """Whether known tokens are still to be scheduled. Otherwise the device feeds back its own last token."""
        return self.num_computed_tokens + self.num_scheduled_tokens < self.context_length

    @property
    def leads(self) -> bool:
        """Whether this sequence computes the prompt for all sequences of its request."""
        return self.group.context_index == self.sequence_index

    @property
    def gives_context(self) -> bool:
        """Whether its context rows must give context outputs."""
        return self.leads and self.group.lacks_context

    @property
    def draft_length(self) -> int:
        """Number of draft tokens that its last context chunk carries."""
        return self.request.draft_length if self.has_draft else 0

    def apply(self, event: RequestEvent) -> None:
        """Change the state as the table says.

        Raises IllegalTransition, and changes nothing, if it has no entry.
        """
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalTransition(f"request {self.request_id} is {self.state.name}: cannot {event.name}")
        self.state = target

    def start(self, slots: tuple[int, ...], num_reused_tokens: int) -> None:
        """Start or resume in `slots`; the first `num_reused_tokens` tokens are in its block table already."""
        self.apply(RequestEvent.START)
        self.slots = slots
        self.has_started = True
        self.context_length = len(self.tokens)
        self.num_computed_tokens = num_reused_tokens

    def pause(self) -> None:
        """Give up slots and blocks; on resumption every token known so far is computed again."""
        self.apply(RequestEvent.PAUSE)
        self.slots = ()
        self.num_computed_tokens = 0
        self.is_void = False

    def restart(self) -> None:
        """Give up slots and blocks after a failed iteration; the known tokens are computed again.

        The beams of a search cannot be recomputed from tokens alone: the search begins again, and tokens that were
        streamed before are not streamed twice.
        """
        self.pause()
        if self.beams is not None:
            self.beams = BeamSearch(self.request)
            del self.tokens[self.prompt_length :]

    def forget_details(self) -> None:
        """Drop the details that a response has carried.

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
