"""Fields of SamplingConfig that are sampling controls.

Written by scripts/write_configs from inflight/core/request/sampling_config.py: change that.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from inflight.executor.typed import Typed, of_control


@dataclass
class SamplingControls(Typed):
    """The sampling controls that requests may have.

    Attributes:
        beam_width: number of beams of a beam search; 1: no beam search. In this API: 1 by default.
        num_return_sequences: number of sequences to sample; in a beam search, number of best beams to
            return. In this API: 1 by default; in a beam search, the default is the number of beams.
        temperature: number by which the logits are divided; 0: greedy decoding; 1 by default. In this API:
            1 by default; 0 makes decoding greedy.
        top_k: number of likeliest tokens to keep; 0: keep all tokens. In this API: 0 by default; 0 keeps
            all tokens if top_p or min_p is set, and makes decoding greedy if neither is set.
        top_p: keep the likeliest tokens, in order, until their total probability reaches this number in (0,
            1]; <= 0: unset. In this API: unset by default.
        top_p_min: smallest value to which top_p_decay can reduce top_p; 1e-6 by default. In this API: 1e-6
            by default.
        top_p_decay: factor by which top_p is multiplied after each token; 1 by default. In this API: 1 by
            default.
        top_p_reset_ids: id of a token after which top_p has its initial value again; -1: none. In this API:
            none by default.
        min_p: keep tokens whose probability is at least this number times the largest probability; 0: keep
            all tokens. In this API: 0 by default.
        seed: seed of the random numbers; identical requests with the same seed get the same tokens; 0 by
            default. In this API: 0 by default; equal requests with equal seeds get equal tokens.
        repetition_penalty: number for tokens that the prompt or the output already has; their positive
            logits are divided by it, and their negative logits are multiplied by it; 1: no penalty. In this
            API: 1 by default; also applies to tokens of the prompt.
        presence_penalty: number subtracted once from the logit of each token that the prompt or the output
            already has; 0: no penalty. In this API: 0 by default; also applies to tokens of the prompt.
        frequency_penalty: number subtracted from a token's logit for each occurrence of the token in the
            prompt and in the output so far; 0: no penalty. In this API: 0 by default; also applies to
            tokens of the prompt.
        min_tokens: number of tokens that must be generated before an end id can be generated; 0 by default.
            In this API: 1 by default.
        no_repeat_ngram_size: length n of n-grams; an n-gram that the prompt or the output already has is
            not generated again; 0 or 2**30: off. In this API: off by default; 0 and 1 << 30 mean off.
        length_penalty: a beam's length is raised to this power, and the beam's score is its log probability
            divided by the result; 0 by default. In this API: 0 by default.
        early_stopping: determines when to end a beam search in which beam_width beams have finished. 1: at
            once; 0: as soon as no running beam has a score among the beam_width best; other values: as soon
            as no running beam can still reach such a score. In this API: 1 by default: a beam search ends
            once enough beams have finished.
        beam_search_diversity_rate: in a beam search, this number times a beam's index is added to the
            scores of the tokens that may continue the beam; 0 by default. In this API: 0 by default.
    """

    beam_width: int = of_control("beam_width", 1)
    _: KW_ONLY
    num_return_sequences: int | None = of_control("num_return_sequences", None)
    temperature: float | None = of_control("temperature", None)
    top_k: int | None = of_control("top_k", None)
    top_p: float | None = of_control("top_p", None)
    top_p_min: float | None = of_control("top_p_min", None)
    top_p_decay: float | None = of_control("top_p_decay", None)
    top_p_reset_ids: int | None = of_control("top_p_reset_id", None)
    min_p: float | None = of_control("min_p", None)
    seed: int | None = of_control("random_seed", None)
    repetition_penalty: float | None = of_control("repetition_penalty", None)
    presence_penalty: float | None = of_control("presence_penalty", None)
    frequency_penalty: float | None = of_control("frequency_penalty", None)
    min_tokens: int | None = of_control("min_length", None)
    no_repeat_ngram_size: int | None = of_control("no_repeat_ngram_size", None)
    length_penalty: float | None = of_control("length_penalty", None)
    early_stopping: int | None = of_control("early_stopping", None)
    beam_search_diversity_rate: float | None = of_control("beam_search_diversity_rate", None)
