"""Convert a body and one prompt's ids to an engine request.

Owns the meaning of body fields for the engine, and the checks that need the model. Runs on the tokenizing
threads.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight.core.kv.block_keys import PrefixIdentity, id_of_text
from inflight.core.request.adapter import LoraRequest
from inflight.core.request.engine_description import EngineDescription, ModelLimits
from inflight.core.request.guide import Guide
from inflight.core.request.prompt_table import TABLE_TENSORS
from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.sampling_config import CONTROLS, SamplingConfig
from inflight.errors import InvalidArgument, Unsupported
from inflight.openai.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, in_fields, invalid, unsupported
from inflight.openai.protocol import MAX_INT32, ChatBody, SamplingBody
from inflight.pictures.encoded_prompt import EncodedPrompt
from inflight.prompt import Prompt, ReplyOptions, engine_streams
from inflight.text.text_encoder import TextEncoder, check_words

MAX_CONTEXT_LOGITS_BYTES = 1 << 30
"""Largest size in bytes of a prompt's logits, from which its likeliest tokens are computed."""


@dataclass(frozen=True, slots=True)
class BodySettings:
    """Settings of a body that apply to all of its prompts.

    Attributes:
        body: The body.
        max_tokens: Largest number of tokens to generate; None: not given.
        default_max_tokens: Largest number of tokens if `max_tokens` is None; None: as many as fit.
        num_top: How many of the likeliest tokens to return at each generated position; None: no log probs.
        num_prompt_top: How many of the likeliest tokens to return at each prompt position; None: no log
            probs.
        echo: Whether the text begins with the prompt.
        guide: Guide of the text; None: none.
        adapter: Name of the LoRA adapter; "": the bare model.
        seed: Seed of the random numbers.
        skip_special_tokens: Whether texts leave special tokens out.
    """

    body: SamplingBody
    max_tokens: int | None
    default_max_tokens: int | None = None
    num_top: int | None = None
    num_prompt_top: int | None = None
    echo: bool = False
    guide: Guide | None = None
    adapter: str = ""
    seed: int = 0
    skip_special_tokens: bool = True

    @property
    def fields(self) -> dict[str, str]:
        """For each tensor that several fields can set, the name of the field that this body used."""
        body = self.body
        guides = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format")
        guide = next((name for name in guides if getattr(body, name) is not None), "structured_outputs")
        if (
            self.guide is not None
            and isinstance(body, ChatBody)
            and body.response_format is None
            and body.tools
        ):
            guide = "tools"
        is_chat = isinstance(body, ChatBody)
        return {
            "input_ids": "messages" if is_chat else "prompt",
            "num_top_log_probs": "top_logprobs" if is_chat else "logprobs",
            "guided_decoding_guide": guide,
            "guided_decoding_guide_type": guide,
        }


def choose_seed(body: SamplingBody) -> int:
    """Return the body's seed as an unsigned 64-bit number; a random one if the body has none."""
    return secrets.randbits(64) if body.seed is None else body.seed % (1 << 64)


_OF_PICTURES = dict.fromkeys(TABLE_TENSORS, "messages")
"""The fields of the tensors that are made from pictures."""


def make_prompt(
    asked: BodySettings,
    ids: Sequence[int],
    text: str | None,
    description: EngineDescription,
    encoder: TextEncoder,
    encoded: EncodedPrompt | None = None,
) -> Prompt:
    """Return one validated prompt for the engine; raise errors that name fields of the body.

    Args:
        asked: Settings of the body.
        ids: The prompt's token ids.
        text: The prompt's text; None for a prompt given as ids.
        description: Description of the engine.
        encoder: Encoder of stop strings and bad words.
        encoded: The prompt's pictures; None: it has none.
    """
    body, limits = asked.body, description.limits
    uses_beams = body.use_beam_search and body.n > 1
    stop_strings = body.stop_strings
    check_words([len(word.encode()) for word in stop_strings], "stop")
    check_words([len(word.encode()) for word in body.bad_words], "bad_words")
    request = Request(
        request_id=0,
        input_token_ids=tuple(ids),
        max_new_tokens=_max_new_tokens(asked, len(ids), limits),
        streaming=engine_streams(body.stream and not uses_beams, stop_strings, uses_beams),
        end_ids=_end_ids(body, description),
        sampling=read_sampling(body, asked.seed),
        output=_output(asked, len(ids), limits),
        stop_words=_stop_words(stop_strings, encoder) if uses_beams else (),
        stop_words_after=body.min_tokens if uses_beams else 0,
        bad_words=tuple(word for text in body.bad_words if text for word in encoder.spellings(text)),
        prompt_lookup_num_tokens=body.prompt_lookup_num_tokens,
        logits_post_processor_name=body.logits_post_processor_name,
        identity=identity_of(body.cache_salt, encoded),
        priority=priority_of(body.priority),
        client_id=id_of_text(user) if (user := body.safety_identifier or body.user) else 0,
        guide=asked.guide,
        lora=LoraRequest(name=asked.adapter) if asked.adapter else None,
        prompt_table=encoded.table if encoded else None,
        rotary_table=encoded.rotary if encoded else None,
    )
    try:
        request.validate(limits)
    except (InvalidArgument, Unsupported) as error:
        raise in_fields(error, asked.fields | (_OF_PICTURES if encoded else {})) from None
    return Prompt(
        request,
        ReplyOptions(
            outputs=frozenset(),
            streaming=body.stream and not uses_beams,
            prompt_text=text,
            include_prompt=asked.echo,
            stop_strings=stop_strings,
            min_tokens=body.min_tokens,
            skip_special_tokens=asked.skip_special_tokens,
            vocab_size=limits.vocab_size,
        ),
    )


def identity_of(cache_salt: str | None, encoded: EncodedPrompt | None = None) -> PrefixIdentity:
    """Return what a prompt's KV blocks depend on beside its tokens; `encoded` has its pictures."""
    salt = id_of_text(cache_salt) if cache_salt else 0
    return PrefixIdentity(salt, encoded.extra_ids if encoded else ())


def _stop_words(stop_strings: Sequence[str], encoder: TextEncoder) -> tuple[tuple[int, ...], ...]:
    """Return all spellings of the stop strings as token ids, as stop words with which the engine ends beams."""
    return tuple(word for text in stop_strings for word in encoder.spellings(text))


def read_sampling(body: SamplingBody, seed: int) -> SamplingConfig:
    """Return a body's sampling config. Fields whose meaning differs from the engine's are converted here."""
    uses_beams = body.use_beam_search and body.n > 1
    greedy = body.use_beam_search if body.n == 1 else False  # a beam search with one beam
    values: dict[str, Any] = {
        name: getattr(body, control.body.name)
        for name, control in CONTROLS.items()
        if control.body is not None and control.body.is_number
    }
    values |= {
        "beam_width": body.n if uses_beams else 1,
        "num_return_sequences": None if uses_beams else body.n,
        # top_p 0 means only the likeliest token; for the engine, it would mean no limit.
        "temperature": 0.0 if greedy or (body.top_p == 0.0 and not uses_beams) else body.temperature,
        "top_k": max(body.top_k, 0),
        "top_p": body.top_p or 1.0,
        "random_seed": seed,
        "allowed_token_ids": tuple(body.allowed_token_ids or ()),
        "logit_bias_ids": tuple(map(_token_id, body.logit_bias)),
        "logit_bias_values": tuple(body.logit_bias.values()),
        "length_penalty": body.length_penalty if uses_beams else 0.0,
        "early_stopping": _early_stopping(body) if uses_beams else 0,
    }
    return SamplingConfig(**values)


def longest_prompt(asked: BodySettings, prompt_length: int, limits: ModelLimits) -> int:
    """Return how long a prompt may be so that the answer fits; 1 if it cannot fit, which is refused later."""
    wanted, width = max(asked.max_tokens or 1, 1), _num_beams(asked.body)
    longest = min(prompt_length, limits.max_input_length, limits.room(0) - wanted)
    fitting = (length for length in range(longest, 0, -1) if limits.fits(length, wanted, width))
    return next(fitting, 1)


def _num_beams(body: SamplingBody) -> int:
    return body.n if body.use_beam_search else 1


def _max_new_tokens(asked: BodySettings, prompt_length: int, limits: ModelLimits) -> int:
    body = asked.body
    if not prompt_length:
        raise invalid("prompt", "prompt is empty: a request needs at least one token")
    room = limits.room(prompt_length, _num_beams(body))
    wanted = asked.max_tokens
    if wanted == 0 and isinstance(body, ChatBody):
        raise invalid("max_tokens", "max_tokens must be at least 1, got 0")
    if wanted == 0 and not asked.echo:
        raise invalid("max_tokens", "max_tokens is 0, which is only allowed with echo")
    if room < max(wanted or 1, 1):
        completion = f", and max_tokens is {wanted}" if wanted else ""
        raise ApiError(
            f"this model takes at most {limits.max_sequence_length} tokens together, and prompts of at most "
            f"{limits.max_input_length}; the KV cache has room for {limits.num_blocks * limits.tokens_per_block}. "
            f"The request has {prompt_length} in the prompt{completion}: at most {room} can be generated",
            400,
            "max_tokens" if wanted and room else asked.fields["input_ids"],
            CONTEXT_LENGTH_EXCEEDED,
        )
    most = min(room, asked.default_max_tokens or room) if wanted is None else max(wanted, 1)
    if body.min_tokens > most:
        raise invalid("min_tokens", f"min_tokens is {body.min_tokens}, and at most {most} can be generated")
    return most


def _end_ids(body: SamplingBody, description: EngineDescription) -> tuple[int, ...]:
    """Return the token ids that end a sequence and are not returned: the model's and the body's."""
    own = () if body.ignore_eos else description.eos_token_ids
    return tuple(dict.fromkeys((*own, *body.stop_token_ids)))


def _output(asked: BodySettings, prompt_length: int, limits: ModelLimits) -> OutputOptions:
    top, prompt_top = asked.num_top, asked.num_prompt_top
    num_bytes = 4 * prompt_length * limits.vocab_size
    fits = num_bytes <= MAX_CONTEXT_LOGITS_BYTES
    if prompt_top and not fits:
        name = "prompt_logprobs" if asked.body.prompt_logprobs else "logprobs"
        raise unsupported(
            name,
            f"{name} is {prompt_top}: the likeliest tokens beside {prompt_length} prompt tokens take "
            f"{num_bytes >> 20} MiB of logits, more than {MAX_CONTEXT_LOGITS_BYTES >> 20}; 0 needs none",
        )
    return OutputOptions(
        exclude_input_from_output=True,
        return_log_probs=top is not None,
        num_top_log_probs=top or 0,
        return_prompt_log_probs=prompt_top is not None,
        # Report the ranks of the prompt's tokens if the logits fit.
        return_context_logits=bool(prompt_top) or (asked.body.prompt_logprobs is not None and fits),
        # Only the usage needs the metrics, which would otherwise be sent with every token of a stream.
        return_perf_metrics=asked.body.includes_usage,
        return_receipt=asked.body.return_receipt,
    )


def _token_id(name: str) -> int:
    if not name.isdecimal() or len(name) > 10:
        raise invalid("logit_bias", f"logit_bias must name token ids, got {name[:100]!r}")
    return int(name)


def _early_stopping(body: SamplingBody) -> int:
    return 2 if body.early_stopping == "never" else int(body.early_stopping)


def priority_of(asked: int) -> float:
    """Convert vLLM's priority (0 is usual, lower goes first) to the engine's (0 to 1, higher goes first)."""
    asked = max(-MAX_INT32, min(asked, MAX_INT32))
    return 0.5 - 0.5 * asked / (1 + abs(asked))
