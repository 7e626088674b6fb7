"""The description of an engine for front ends: limits for requests, and facts from checkpoint and parameters.
Pure."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.additional_outputs import OfferedOutput
from inflight.core.request.sampling_config import MAX_RETURN_SEQUENCES
from inflight.errors import InvalidArgument, Name


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
            otherwise a number so large that it is no limit.
        logits_post_processors: Names that a request may give as its logits post-processor.
        additional_outputs: The outputs besides tokens and logits that a request may ask for.
        hidden_size: Row width of prompt tables; 0: the engine does not support prompt tables.
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
    max_adapter_rank: int = 0
    max_sequences_per_request: int = MAX_RETURN_SEQUENCES

    def kv_room(self, prompt_length: int, beam_width: int = 1) -> int:
        """Return how many tokens can be generated after a prompt before the KV cache is full; negative if the
        prompt does not fit.

        Beams share the prompt's full blocks. The last generated token takes no KV entry, as it is never an input.
        """
        size = self.tokens_per_block
        shared = min(prompt_length // size, self.num_blocks) if beam_width > 1 else 0
        return (shared + (self.num_blocks - shared) // beam_width) * size + 1 - prompt_length

    def room(self, prompt_length: int, beam_width: int = 1) -> int:
        """Return how many tokens can be generated after a prompt, limited by sequence length and KV cache."""
        return min(self.max_sequence_length - prompt_length, self.kv_room(prompt_length, beam_width))

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
