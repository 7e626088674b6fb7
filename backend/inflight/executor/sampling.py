"""How tokens are chosen and what comes back: the parts of a `Request` that every request has."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from inflight.executor.errors import InvalidValue
from inflight.executor.typed import (
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    Range,
    Typed,
    also_called,
    within,
)

_POSITIVE_NUMBER = Range("> 0", lambda value: value > 0)
_SEED = Range("a 64-bit unsigned integer", lambda value: 0 <= value < 1 << 64)


@also_called(random_seed="seed", min_length="min_tokens")
@dataclass
class SamplingConfig(Typed):
    """How the next token is chosen. None stands for the default in brackets.

    Attributes:
        beam_width: Beams of a beam search; 1 samples, or is greedy.
        top_k: Keep the k likeliest tokens; 0 keeps all (0). With top_k, top_p and min_p unset a request is greedy.
        top_p: Keep the smallest set of likeliest tokens whose probability reaches p (unset).
        top_p_min: Floor of a decaying top_p (1e-6).
        top_p_reset_ids: Token that sets a decayed top_p back (none).
        top_p_decay: Factor of top_p for every generated token (1).
        seed: Of the random numbers (0).
        temperature: Divides the logits; 0 is greedy (1).
        min_tokens: End ids are banned until so many tokens are generated (1).
        beam_search_diversity_rate: Times a beam's index, added to its candidates (0).
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen (1).
        presence_penalty: Taken once from the logits of tokens seen (0).
        frequency_penalty: Taken from a token's logit for each time it was seen (0).
        prompt_ignore_length: First tokens of the prompt that penalties do not count (0).
        length_penalty: Exponent of the length that a beam's score is divided by (0).
        early_stopping: When a search with enough finished beams ends; 1: at once (1).
        no_repeat_ngram_size: No n-gram of this size occurs twice (1 << 30, which is off).
        num_return_sequences: Sequences to generate, or how many of the best beams come back (1, or all beams).
        min_p: Keep tokens of at least min_p times the largest probability (0).
        beam_width_array: A beam width for every step.
    """

    beam_width: int = within(1, POSITIVE)
    _: KW_ONLY
    top_k: int | None = within(None, NOT_NEGATIVE)
    top_p: float | None = within(None, POSITIVE_SHARE)
    top_p_min: float | None = within(None, SHARE)
    top_p_reset_ids: int | None = within(None, NOT_NEGATIVE)
    top_p_decay: float | None = within(None, POSITIVE_SHARE)
    seed: int | None = within(None, _SEED)
    temperature: float | None = within(None, NOT_NEGATIVE)
    min_tokens: int | None = within(None, NOT_NEGATIVE)
    beam_search_diversity_rate: float | None = within(None, NOT_NEGATIVE)
    repetition_penalty: float | None = within(None, _POSITIVE_NUMBER)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = within(None, NOT_NEGATIVE)
    length_penalty: float | None = within(None, NOT_NEGATIVE)
    early_stopping: int | None = within(None, NOT_NEGATIVE)
    no_repeat_ngram_size: int | None = within(None, NOT_NEGATIVE)
    num_return_sequences: int | None = within(None, POSITIVE)
    min_p: float | None = within(None, SHARE)
    beam_width_array: list[int] | None = None

    def __post_init__(self) -> None:
        returned = self.num_return_sequences
        if returned is not None and 1 < self.beam_width < returned:
            raise InvalidValue(
                f"SamplingConfig.num_return_sequences must be at most beam_width ({self.beam_width}) where there "
                f"are beams, got {returned}"
            )


@dataclass
class AdditionalModelOutput(Typed):
    """A tensor of the model that is to come back.

    Attributes:
        name: Of the tensor.
        gather_context: Whether it comes back for the prompt's positions too.
    """

    name: str
    gather_context: bool = False


@dataclass
class OutputConfig(Typed):
    """What comes back beside token ids.

    Attributes:
        return_log_probs: Log probabilities of generated tokens, and their sum.
        return_context_logits: Logits after each prompt token.
        return_generation_logits: Logits that each generated token was chosen from.
        exclude_input_from_output: Leave the prompt out of the output of a request that is not streamed.
        return_encoder_output: Hidden states of an encoder.
        return_perf_metrics: Times and counts.
        additional_model_outputs: Tensors of the model.
    """

    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = False
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: list[AdditionalModelOutput] | None = None
