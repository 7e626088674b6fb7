"""The description of an engine for front ends: limits for requests, and facts from checkpoint and parameters.
Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from inflight.additional_outputs import OfferedOutput
from inflight.core.request.sampling_config import MAX_RETURN_SEQUENCES
from inflight.errors import InvalidArgument, Name


def kv_blocks(prompt_length: int, num_new: int, beam_width: int, tokens_per_block: int) -> int:
    """Return the KV blocks of a sequence, or of a beam search, once `num_new` tokens are generated.

    Beams are certain to share only the prompt's full blocks. The last generated token is never fed back.
    """
    shared = prompt_length // tokens_per_block if beam_width > 1 else 0
    of_each = -(-(prompt_length + num_new - 1) // tokens_per_block)
    return shared + beam_width * (of_each - shared)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits that a model sets for requests. Every front end knows them.

    Attributes:
        vocab_size: Number of token ids; valid ids are 0 .. vocab_size - 1.
        max_sequence_length: Maximum number of prompt and generated tokens together.
        max_input_length: Longest prompt, in tokens.
        num_blocks: Number of KV cache blocks, which is the maximum for one request.
        tokens_per_block: Tokens per KV cache block.
        max_beam_width: Maximum beam width.
        max_draft_length: Maximum number of draft tokens verified at a time.
        max_context_tokens: Maximum number of prompt and draft tokens together if contexts are not chunked;
            otherwise a number so large that it is not a limit.
        logits_post_processors: Names that a request may give as its logits post-processor.
        additional_outputs: The outputs besides tokens and logits that a request may ask for.
        hidden_size: Row width of prompt tables; 0: the engine does not support prompt tables.
        num_added_layers: Number of first layers after which a wider prompt table's rows are added (DeepStack).
        rotary_dim: Row width of rotary tables; 0: the model has no multimodal rotary embedding (mRoPE).
        max_span_length: Maximum number of consecutive virtual tokens, for a model in which they attend to each
            other in both directions (`picture_spans.py`); 0: its attention is causal.
        max_adapter_rank: Maximum rank of LoRA adapters; 0: the engine accepts no adapters.
        max_sequences_per_request: Maximum number of sequences of one request. If a front end accepts
            several prompts in one request, the sequences of all prompts are counted.
    """

    vocab_size: int
    max_sequence_length: int
    max_input_length: int
    num_blocks: int
    tokens_per_block: int
    max_beam_width: int = 1
    max_draft_length: int = 0
    max_context_tokens: int = 1 << 62
    logits_post_processors: tuple[str, ...] = ()
    additional_outputs: tuple[OfferedOutput, ...] = ()
    hidden_size: int = 0
    num_added_layers: int = 0
    rotary_dim: int = 0
    max_span_length: int = 0
    max_adapter_rank: int = 0
    max_sequences_per_request: int = MAX_RETURN_SEQUENCES

    def fits(self, prompt_length: int, num_new: int, beam_width: int = 1) -> bool:
        """Return whether this many tokens can be generated after a prompt."""
        return (
            prompt_length <= self.max_input_length
            and prompt_length + num_new <= self.max_sequence_length
            and kv_blocks(prompt_length, num_new, beam_width, self.tokens_per_block) <= self.num_blocks
        )

    def room(self, prompt_length: int, beam_width: int = 1) -> int:
        """Return the largest number of tokens that can be generated after a prompt; 0 if it does not fit."""
        counts = range(1, max(self.max_sequence_length - prompt_length, 0) + 1)
        return bisect_left(counts, True, key=lambda count: not self.fits(prompt_length, count, beam_width))

    def draft_room(self, prompt_length: int) -> int:
        """Return the largest number of draft tokens that can be verified with a prompt; not positive if none."""
        return min(self.max_draft_length, self.max_context_tokens - prompt_length)

    def check_sequences(self, num_prompts: int, num_sequences: int, name: str) -> None:
        """Raise InvalidArgument if the prompts of one request ask for too many sequences in total.

        Args:
            num_prompts: Number of prompts in the request.
            num_sequences: Number of sequences that all prompts together ask for.
            name: The input that sets the number of sequences, for the error.
        """
        if num_sequences > self.max_sequences_per_request:
            raise InvalidArgument(
                Name(name),
                f": {num_prompts} prompt{'s' if num_prompts > 1 else ''} asked for {num_sequences} "
                f"sequences in one request, expected at most {self.max_sequences_per_request} "
                "(max_sequences_per_request): send several requests",
            )


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """The facts about an engine that a front end needs to check and build requests; constant while the engine
    lives.

    Attributes:
        limits: The limits for requests.
        model_path: The checkpoint folder.
        tokenizer_dir: Folder with tokenizer.json; "" if there is none, so that only token ids are served.
        eos_token_ids: End ids of the checkpoint's generation_config.json (else config.json): the default end ids
            of requests that come as text.
        default_end_ids: Default end ids of requests that come as token ids; by specification there are none.
        exclude_input_from_output: Server-wide default of the `exclude_input_in_output` tensor.
        dtype: Type of the weights: float32, bfloat16, float16 or int8.
        state_enabled: Whether front ends answer `state` requests in full.
        adapter_commands_enabled: Whether `lora_command` requests are answered.
        sleep_enabled: Whether clients may make the engine sleep.
    """

    limits: ModelLimits
    model_path: str = ""
    tokenizer_dir: str = ""
    eos_token_ids: tuple[int, ...] = ()
    default_end_ids: tuple[int, ...] = ()
    exclude_input_from_output: bool = False
    dtype: str = "float32"
    state_enabled: bool = False
    adapter_commands_enabled: bool = False
    sleep_enabled: bool = False
