"""Requests whose answer is computed from the last position of each prompt: embeddings, classes and scores.

The engine computes a prompt, and one token that is dropped, like any other request: in the same batches, in
chunks, and with the reuse of KV blocks, which always leaves a prompt's last token to be computed.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from fastapi import Request as HttpRequest
from numpy.typing import NDArray

from inflight.additional_outputs import WantedOutput
from inflight.core.kv.block_keys import id_of_text
from inflight.core.request.adapter import LoraRequest
from inflight.core.request.engine_description import ModelLimits
from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.response import SequenceResult
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason
from inflight.errors import Cancelled, InvalidArgument, Unsupported
from inflight.openai.context import Context, open_stream, start_stream
from inflight.openai.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, in_fields, invalid
from inflight.openai.prepared_body import check_number_of_sequences
from inflight.openai.protocol import PoolingBody
from inflight.openai.request_ids import request_id_of
from inflight.openai.sampling import identity_of, priority_of
from inflight.openai.serving_model import ServingModel
from inflight.openai.streaming import Watcher
from inflight.pooling import POOLED_OUTPUT
from inflight.prompt import Prompt, ReplyOptions
from inflight.text.tokenizer import Tokenizer

_T = TypeVar("_T")
POOLED = OutputOptions(additional_outputs=(WantedOutput(POOLED_OUTPUT),))
"""The outputs of prompts whose last hidden states are needed."""


@dataclass(frozen=True, slots=True)
class PreparedPrompts:
    """The prompts of a body.

    Attributes:
        body: The body.
        field: Name of the body's field that has the prompts, for errors.
        prompts: The prompts, for the engine.
        model_name: Name of the model in the answer.
    """

    body: PoolingBody
    field: str
    prompts: Sequence[Prompt]
    model_name: str

    def envelope(self, prefix: str, request: HttpRequest) -> dict[str, Any]:
        """Return the fields of an answer that do not depend on its results; `prefix` begins the answer's id."""
        count = sum(prompt.request.prompt_length for prompt in self.prompts)
        return {
            "id": f"{prefix}-{self.body.request_id or request_id_of(request)}",
            "created": int(time.time()),
            "model": self.model_name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }


def prepare(
    model: ServingModel,
    body: PoolingBody,
    field: str,
    ids: Sequence[Sequence[int]],
    output: OutputOptions,
    adapter: str,
) -> PreparedPrompts:
    """Return validated prompts; errors name `field`.

    Args:
        model: The served model.
        body: The body.
        field: The body's field that has the prompts.
        ids: Token ids of each prompt.
        output: The outputs of the engine that the answer needs.
        adapter: Name of the LoRA adapter; "": the bare model.
    """
    limits = model.describe().limits
    try:
        prompts = [
            Prompt(_request(body, each, output, adapter, limits, field), ReplyOptions(frozenset()))
            for each in ids
        ]
    except (InvalidArgument, Unsupported) as error:
        raise in_fields(error, {"input_ids": field}) from None
    return PreparedPrompts(body, field, prompts, body.model or model.names[0])


def longest_prompt(limits: ModelLimits) -> int:
    """Return the number of tokens of the longest prompt that leaves room for the token that is dropped."""
    lengths = range(1, limits.max_input_length + 1)
    return bisect_left(lengths, True, key=lambda length: not limits.fits(length, 1))


def truncation(body: PoolingBody, limits: ModelLimits) -> int | None:
    """Return the number of tokens to which `body` cuts each prompt; None if it cuts none."""
    most = body.truncate_prompt_tokens
    if most == 0:
        raise invalid(
            "truncate_prompt_tokens",
            "truncate_prompt_tokens is 0, which leaves no prompt; -1 keeps what fits",
        )
    return longest_prompt(limits) if most == -1 else most


def encode(
    model: ServingModel, texts: Sequence[str], add_special_tokens: bool, field: str, most: int | None
) -> list[list[int]]:
    """Return the token ids of each text; an error about one that is too long names `field`.

    Texts that will be cut to `most` tokens may be of any length.
    """
    if most is None:
        return model.encode(texts, add_special_tokens, field)
    return model.tokenizer().encode_batch(texts, add_special_tokens)


def read_input(
    model: ServingModel,
    given: str | list[str] | list[int] | list[list[int]],
    add_special: bool,
    most: int | None,
) -> Sequence[Sequence[int]]:
    """Return the token ids of each prompt of a body's field `input`.

    Args:
        model: The served model.
        given: The field: a text, token ids, or a list of either.
        add_special: Whether texts get the tokenizer's special tokens.
        most: Number of tokens to which prompts are cut; None: they are not cut.
    """
    if not given:
        raise invalid("input", "input is empty: send a text, token ids, or a list of either")
    if isinstance(given, str):
        given = [given]
    check_number_of_sequences(model, 1 if isinstance(given[0], int) else len(given), 1, "input")
    if isinstance(given[0], str):
        return encode_cut(
            model, [text for text in given if isinstance(text, str)], add_special, "input", most
        )
    ids = [each for each in given if isinstance(each, int)]
    rows = [ids] if ids else [row for row in given if isinstance(row, list)]
    return [_cut(row, most, 0) for row in rows]


def encode_cut(
    model: ServingModel, texts: Sequence[str], add_special: bool, field: str, most: int | None
) -> list[list[int]]:
    """Return the token ids of each text, cut to `most` tokens unless that is None; see `encode`.

    The special tokens that the tokenizer appends to a text are kept.
    """
    tail = _num_appended(model.tokenizer()) if add_special else 0
    return [_cut(each, most, tail) for each in encode(model, texts, add_special, field, most)]


def _cut(ids: list[int], most: int | None, tail: int) -> list[int]:
    """Return the first tokens of a prompt, and its last `tail` ones, which the tokenizer has appended."""
    if most is None or len(ids) <= most:
        return ids
    tail = min(tail, most)
    return ids[: most - tail] + ids[len(ids) - tail :]


def _num_appended(tokenizer: Tokenizer) -> int:
    """Return how many special tokens the tokenizer appends to a text."""
    bare, whole = (tokenizer.encode("a", added) for added in (False, True))
    return len(whole) - len(bare) - len(tokenizer.prefix_ids)


def pooled_state(result: SequenceResult) -> NDArray[np.float32]:
    """Return the last hidden state of a prompt's last token, float32 [hidden size]."""
    return np.frombuffer(result.additional_outputs[0].tensors[0].data, np.float32)


async def compute(
    context: Context, request: HttpRequest, prepared: PreparedPrompts, take: Callable[[SequenceResult], _T]
) -> list[_T]:
    """Run the prompts; return `take` of each result, in the order of the prompts."""
    prompts = [(prompt, None) for prompt in prepared.prompts]
    stream = open_stream(context, request, prompts, prepared.model_name)
    watcher = Watcher(request, stream)
    found: dict[int, _T] = {}
    try:
        await start_stream(request, stream)
        async for outputs in stream:
            for output in outputs:
                if output.result.finish_reasons[0] is not FinishReason.LENGTH:
                    raise Cancelled("the request was cancelled")
                found[output.batch_index] = take(output.result)
    except (InvalidArgument, Unsupported) as error:
        raise in_fields(error, {"input_ids": prepared.field}) from None
    finally:
        watcher.close()
    return [found[index] for index in range(len(prompts))]


def _request(
    body: PoolingBody,
    ids: Sequence[int],
    output: OutputOptions,
    adapter: str,
    limits: ModelLimits,
    field: str,
) -> Request:
    if not ids:
        raise invalid(field, f"{field} has an empty text: a prompt needs at least one token")
    if not limits.fits(len(ids), 1):
        raise ApiError(
            f"{field} has a prompt of {len(ids)} tokens; this server takes at most {longest_prompt(limits)} here: "
            "send a shorter text, or truncate_prompt_tokens",
            400,
            field,
            CONTEXT_LENGTH_EXCEEDED,
        )
    made = Request(
        request_id=0,
        input_token_ids=tuple(ids),
        max_new_tokens=1,
        sampling=SamplingConfig(temperature=0.0),
        output=replace(output, exclude_input_from_output=True),
        identity=identity_of(body.cache_salt),
        priority=priority_of(body.priority),
        client_id=id_of_text(body.user) if body.user else 0,
        lora=LoraRequest(name=adapter) if adapter else None,
    )
    made.validate(limits)
    return made
