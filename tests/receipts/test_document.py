"""The document of a receipt: canonical form, digest, signature, and what cannot be re-run."""

from __future__ import annotations

import copy
import hashlib
import hmac
import json
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from inflight.core.request.adapter import LoraRequest, Matrix, RawBuffer
from inflight.core.request.drafted import DraftedRequest
from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.prompt_table import PromptTable, RotaryTable
from inflight.core.request.request import ExternalDraft, FloatTensor, Request
from inflight.core.request.sampling_config import CONTROLS, SamplingConfig
from inflight.errors import InvalidArgument
from inflight.prompt import ReplyOptions
from inflight.receipts.document import (
    canonical,
    digest_of,
    parse,
    request_form,
    to_request,
    why_not_rerun,
)
from inflight.receipts.verify import fault_of_seal, find_receipt
from tests.receipts.factories import make_document, make_receipt, make_request, stopping

ALTERED = "the receipt was altered: its digest is not that of its content"
FULL = make_request(
    sampling=SamplingConfig(temperature=0.5, top_p=0.9, random_seed=(1 << 64) - 1, beam_width=1),
    end_ids=(2,),
    stop_words=((5, 6),),
    stop_words_after=1,
    bad_words=((9,),),
    guide=Guide(GuideKind.REGEX, "a+"),
    lora=LoraRequest(name="sql"),
)


def values_in(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (object or list, key or index) of every value that is neither."""
    pairs = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in pairs:
        if isinstance(value, dict | list):
            yield from values_in(value)
        else:
            yield document, key


def test_tampering_with_any_value_is_detected() -> None:
    form = request_form(FULL, stopping("stop", min_tokens=1, skip_special_tokens=False), "blake2b:00")
    document = make_document(request=form, cannot_rerun="why")
    assert fault_of_seal(document, None) == ""
    for number in range(len(list(values_in(document)))):
        altered = copy.deepcopy(document)
        owner, key = list(values_in(altered))[number]
        value = owner[key]
        owner[key] = value + 1 if isinstance(value, int | float) else value + "x"
        assert fault_of_seal(altered, None) == ALTERED, key


@pytest.mark.parametrize("name", ["software", "model", "engine", "request", "outputs", "digest"])
def test_a_missing_field_is_detected(name: str) -> None:
    document = make_document()
    del document[name]
    assert fault_of_seal(document, None) == ALTERED


def test_an_additional_field_is_detected() -> None:
    assert fault_of_seal({**make_document(), "note": ""}, None) == ALTERED


def test_a_signature_needs_the_key(tmp_path: Path) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_bytes(b"secret")
    other.write_bytes(b"another")
    signed = make_document(str(key))
    assert fault_of_seal(signed, key) == fault_of_seal(signed, None) == ""
    assert fault_of_seal(signed, other) == "the receipt was not signed with this key"
    assert fault_of_seal(make_document(), key) == "the receipt is not signed"
    forged = {**signed, "software": {}}
    forged["digest"] = digest_of(canonical(forged))
    assert fault_of_seal(forged, key) == "the receipt was not signed with this key"


def test_the_signature_is_hmac_sha256(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"secret")
    signed = make_document(str(tmp_path / "key"))
    covered = {name: value for name, value in signed.items() if name not in ("digest", "signature")}
    content = json.dumps(covered, sort_keys=True, separators=(",", ":")).encode()
    assert signed["signature"] == "hmac-sha256:" + hmac.new(b"secret", content, hashlib.sha256).hexdigest()
    assert signed["digest"] == "sha256:" + hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("content", [None, b""])
def test_an_unusable_key_is_an_error(content: bytes | None, tmp_path: Path) -> None:
    key = tmp_path / "key"
    if content is not None:
        key.write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"^the key file of receipts ('.*' cannot be read|is empty)"):
        make_document(str(key))


def test_numbers_survive_double_precision() -> None:
    request = make_request(sampling=SamplingConfig(temperature=2.0, random_seed=(1 << 64) - 1))
    document = make_document(request=request_form(request))
    # As JavaScript and jq write it: every number is a double, and 2.0 is 2.
    again = json.loads(json.dumps(document).replace("2.0,", "2,"), parse_int=lambda text: int(float(text)))
    assert again["request"]["sampling"]["temperature"] == 2
    assert fault_of_seal(again, None) == ""
    assert to_request(parse(again).request).sampling == request.sampling


@pytest.mark.parametrize("name", CONTROLS)
def test_every_sampling_control_survives(name: str) -> None:
    value = CONTROLS[name].example
    controls = {name: value}
    if name.startswith("logit_bias"):
        controls = {"logit_bias_ids": (4, 9), "logit_bias_values": (1.5, -math.inf)}
    request = make_request(sampling=SamplingConfig(**controls))
    document = json.loads(json.dumps(make_document(request=request_form(request))))
    assert to_request(parse(document).request) == request


def test_everything_else_survives() -> None:
    request = to_request(parse(make_document(request=request_form(FULL))).request)
    assert request == replace(FULL, lora=None)


NO_EFFECT: dict[type[Any], str] = {
    Request: "request_id streaming pad_id output prompt_lookup_num_tokens identity retention priority client_id "
    "allotted_time_ms arrival_time_ns is_continuation may_be_continued origin",
    DraftedRequest: "num_draft_tokens",
    # The engine's own rounds of drafts alone set ends_sequence; the receipt is the whole request's.
    ExternalDraft: "token_ids acceptance_threshold ends_sequence",
    # Only a request with a prompt table, which cannot be re-run, has ids from vocab_size on.
    ReplyOptions: "outputs named streaming prompt_text include_prompt vocab_size offered",
}
"""The fields on which no token depends."""
ROTARY = RotaryTable.of(Matrix((1, 2), "float32", RawBuffer(bytes(8))), 0)
TABLE = PromptTable.of(Matrix((1, 2), "float32", RawBuffer(bytes(8))))
LOGITS = FloatTensor((1, 2), bytes(8))
EXAMPLES: dict[type[Any], dict[str, Any]] = {
    Request: {
        "input_token_ids": (9,),
        "max_new_tokens": 9,
        "end_ids": (9,),
        "sampling": SamplingConfig(top_k=9),
        "stop_words": ((9,),),
        "stop_words_after": 9,
        "bad_words": ((8,),),
        "embedding_bias": LOGITS,
        "draft": ExternalDraft((5,), LOGITS),
        "logits_post_processor_name": "mine",
        "guide": Guide(GuideKind.JSON),
        "lora": LoraRequest(name="other"),
        "prompt_table": TABLE,
        "rotary_table": ROTARY,
    },
    DraftedRequest: {"use_draft_logits": True},
    ExternalDraft: {"logits": LOGITS},
    ReplyOptions: {"stop_strings": ("x",), "min_tokens": 9, "skip_special_tokens": False},
}
"""Another value of every other field."""


@pytest.mark.parametrize("owner", EXAMPLES)
def test_every_field_on_which_tokens_depend_is_in_the_receipt_or_prevents_the_rerun(owner: type[Any]) -> None:
    inherited = fields(Request) if owner is DraftedRequest else ()
    names = {each.name for each in fields(owner)} - {each.name for each in inherited}
    assert names == {*NO_EFFECT[owner].split(), *EXAMPLES[owner]}
    options = stopping("stop")
    drafted = DraftedRequest(**{each.name: getattr(FULL, each.name) for each in fields(Request)})
    before = request_form(FULL, options)
    for name, value in EXAMPLES[owner].items():
        request, chosen = FULL, options
        if owner is ReplyOptions:
            chosen = replace(options, **{name: value})
        elif owner is ExternalDraft:
            request = replace(FULL, draft=replace(ExternalDraft((5,)), **{name: value}))
        else:
            request = replace(FULL if owner is Request else drafted, **{name: value})
        assert request_form(request, chosen) != before or why_not_rerun(request), name


def test_what_has_no_effect_is_left_out() -> None:
    plain = request_form(make_request())
    other = make_request(
        streaming=True,
        priority=1.0,
        client_id=7,
        allotted_time_ms=9,
        prompt_lookup_num_tokens=3,
        draft=ExternalDraft((5,)),
        pad_id=3,
    )
    without_stop_strings = stopping(min_tokens=3, skip_special_tokens=False)
    assert request_form(other, without_stop_strings) == plain


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (
            make_request(embedding_bias=FloatTensor((2,), bytes(8))),
            "of embedding_bias there are digests only",
        ),
        (
            make_request(prompt_table=TABLE),
            "of prompt_embedding_table there are digests only",
        ),
        (make_request(rotary_table=ROTARY), "of mrope_rotary_cos_sin there are digests only"),
        (
            make_request(draft=ExternalDraft((5,), FloatTensor((1, 2), bytes(8)))),
            "tokens depend on the draft's logits",
        ),
        (
            DraftedRequest(0, (1,), 4, sampling=SamplingConfig(top_k=4), use_draft_logits=True),
            "tokens depend on the draft model's logits",
        ),
        (make_request(logits_post_processor_name="mine"), "a logits post-processor is the operator's code"),
        (make_request(), ""),
        (FULL, ""),
    ],
)
def test_why_a_request_cannot_be_rerun(request_: Request, reason: str) -> None:
    assert why_not_rerun(request_).startswith(reason) and bool(reason) == bool(why_not_rerun(request_))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format is 2: this version reads receipts of format 1"),
        ({"outputs": 5}, "not a receipt: Expected `array`, got `int` - at `$.outputs`"),
        ({"note": 5}, "not a receipt: Object contains unknown field `note`"),
    ],
)
def test_another_document_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parse({**make_document(), **change})
    assert str(raised.value) == message


def test_unknown_controls_and_guides_are_refused() -> None:
    form = make_receipt().request
    for change, message in [
        ({"sampling": {"mirostat": 1}}, "no sampling control 'mirostat'"),
        ({"guide": {"type": "haiku"}}, "no guide of type 'haiku'"),
        ({"sampling": {"top_k": "x"}}, "a sampling control is not valid"),
    ]:
        document = make_document(request=form)
        document["request"] |= change
        with pytest.raises(InvalidArgument, match=message):
            to_request(parse(document).request)


def test_a_receipt_is_found_in_an_answer() -> None:
    document = make_document()
    text = json.dumps(document)
    for answer in (document, {"receipt": document}, {"receipt": text, "text_output": "x"}):
        assert find_receipt(json.dumps(answer)) == document
    for wrong in ("[]", "{}", "5", '{"receipt": null}', '{"receipt": "5"}', "", "{"):
        with pytest.raises(ValueError):
            find_receipt(wrong)
