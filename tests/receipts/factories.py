"""Receipts and engines for the tests of receipts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from inflight.core.ports import EngineClient
from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.response import Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import StopReason
from inflight.endpoint.delivery import Delivery
from inflight.prompt import Prompt, ReplyOptions, engine_streams
from inflight.receipts.document import (
    EngineForm,
    Model,
    OutputForm,
    Receipt,
    finished,
    parse,
    request_form,
    to_request,
)
from inflight.serving.reply import Reply, new_text
from inflight.text.tokenizer import Tokenizer
from tests.openai_endpoint.serving import DEMO, demo_engine

TOKENIZER = Tokenizer.from_dir(DEMO)


def make_request(prompt: Sequence[int] = (1, 2, 3), new: int = 4, **fields: Any) -> Request:
    return Request(0, tuple(prompt), new, **fields)


def make_receipt(**fields: Any) -> Receipt:
    """Return a receipt of the demo model with two tokens."""
    values: dict[str, Any] = {
        "format": 1,
        "software": {"inflight": "0.1.0", "torch": "2.13.0"},
        "model": Model(name="demo_model", files={"config.json": "0" * 64}),
        "engine": EngineForm(dtype="float32", kernels="native", device="x86_64", instruction_set="avx2"),
        "request": request_form(make_request()),
        "outputs": (OutputForm(token_ids=(7, 8), finish_reason="LENGTH"),),
    }
    return Receipt(**{**values, **fields})


def make_document(key_file: str = "", **fields: Any) -> dict[str, Any]:
    return json.loads(finished(make_receipt(**fields), key_file))


@contextmanager
def engine(**parameters: str) -> Iterator[EngineClient]:
    """The demo checkpoint on the real engine, with a small KV cache."""
    with demo_engine(**{"max_tokens_in_paged_kv_cache": "8192", **parameters}) as client:
        yield client


Asked = tuple[Request, ReplyOptions]
"""A request, and the options of its reply."""


def stopping(*stop_strings: str, **options: Any) -> ReplyOptions:
    """Return the options of a reply that ends at stop strings."""
    return ReplyOptions(frozenset(), stop_strings=stop_strings, **options)


def asked_again(receipt: Receipt) -> Asked:
    form = receipt.request
    options = stopping(
        *form.stop_strings, min_tokens=form.min_tokens, skip_special_tokens=form.skip_special_tokens
    )
    return to_request(form), options


def run_together(client: EngineClient, several: Sequence[Asked], streaming: bool = False) -> list[Receipt]:
    """Run requests side by side, as front ends do; return their receipts."""
    delivery: Delivery[Response] = Delivery()
    running: dict[int, tuple[int, Any, Reply]] = {}
    for number, (request, options) in enumerate(several):
        streams = engine_streams(streaming, options.stop_strings, request.sampling.uses_beams)
        request = replace(request, streaming=streams, output=OutputOptions(return_receipt=True))
        prompt = Prompt(request, replace(options, streaming=streaming))
        reply = Reply([(prompt, new_text(prompt, TOKENIZER))], in_one=not streaming)
        handle = client.submit(request, delivery.put)
        running[handle.request_id] = number, handle, reply
    receipts: dict[int, Receipt] = {}
    while len(receipts) < len(several):
        for response in delivery.take():
            assert response.result is not None, response.error
            number, handle, reply = running[response.request_id]
            outputs = reply.add(0, response.result, response.is_final)
            if reply.has_just_stopped and not response.is_final:
                handle.stop(StopReason.STOP_WORDS, response.result.sequence_index)
            if response.is_final:
                receipts[number] = parse(json.loads(str(outputs[-1].result.receipt)))
    return [receipts[number] for number in sorted(receipts)]


def sampled(**controls: Any) -> SamplingConfig:
    return SamplingConfig(**{"temperature": 0.9, "top_p": 0.95, **controls})
