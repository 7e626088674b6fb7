"""The document of a receipt: its fields, its canonical JSON, its digest and its signature.

Numbers survive JSON libraries that have only double precision, as in JavaScript and jq: 64-bit numbers are texts,
and 1.0 and 1 are the same in canonical JSON. Any thread.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import msgspec

from inflight.core.request.adapter import LoraRequest
from inflight.core.request.drafted import DraftedRequest
from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.request import Request
from inflight.core.request.sampling_config import NEUTRAL, SamplingConfig
from inflight.errors import InvalidArgument
from inflight.prompt import ReplyOptions

FORMAT = 1
"""Version of the document's format."""
NO_TEXT = ReplyOptions(frozenset())
"""Options of a reply without stop strings."""
_SEED = "random_seed"
_LARGEST_EXACT = 1 << 53
_DIGEST, _SIGNATURE = "digest", "signature"


class Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An object of the document. Fields with their default are left out; a field with another name is an error."""


class Model(Struct, frozen=True):
    """The checkpoint that computed the tokens.

    Attributes:
        name: Name of its folder.
        files: SHA-256 digest of each file, by name.
    """

    name: str
    files: dict[str, str]


class EngineForm(Struct, frozen=True):
    """The code and the settings that computed the tokens.

    Attributes:
        dtype: Data type of the weights.
        kernels: The implementation of the layers: native, torch, transformers or tensorrt.
        device: Architecture of the processor, or name of the GPU.
        instruction_set: The target of compiled layers, or the instruction set of torch's operators; "" on a GPU.
        parameters: The parameters with an effect on tokens that differ from their defaults, as in config.pbtxt.
    """

    dtype: str
    kernels: str
    device: str
    instruction_set: str = ""
    parameters: dict[str, str] = {}


class EnginePart(Struct, frozen=True):
    """The engine's part of a receipt, which a front end completes.

    Attributes:
        software: Versions by package.
        model: The checkpoint.
        engine: The code and the settings.
        adapter: Digest of the request's adapter; "" without one.
        key_file: File with the key of the signature; "": the receipt is not signed.
    """

    software: dict[str, str]
    model: Model
    engine: EngineForm
    adapter: str = ""
    key_file: str = ""


class Adapter(Struct, frozen=True):
    """The LoRA adapter that a request names by one of id, name and path.

    Attributes:
        task_id: The id, as text.
        name: The name.
        path: The folder.
        digest: Digest of the adapter's content.
    """

    task_id: str = ""
    name: str = ""
    path: str = ""
    digest: str = ""


class GuideForm(Struct, frozen=True):
    """The guide of a request, as in the tensors `guided_decoding_guide_type` and `guided_decoding_guide`."""

    type: str
    text: str = ""


class RequestForm(Struct, frozen=True):
    """A request in canonical form: everything on which its tokens depend, and nothing else.

    Attributes:
        input_ids: The prompt.
        max_new_tokens: Maximum number of tokens to generate.
        sampling: The sampling controls that have an effect, and the seed.
        end_ids: Token ids that end the sequence.
        stop_strings: Texts that end the output.
        min_tokens: A stop string is ignored if one of the first `min_tokens` tokens completes it.
        skip_special_tokens: Whether stop strings are searched in the text without its special tokens, too; true
            without stop strings.
        stop_words: Token sequences that end the output.
        stop_words_after: A stop word is ignored if it is complete within this many tokens.
        bad_words: Token sequences that are never generated.
        guide: Format of the generated text.
        adapter: LoRA adapter.
        digests: Digests of large inputs, by tensor.
        logits_post_processor_name: Name of the operator's function that changes logits.
    """

    input_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: dict[str, Any] = {}
    end_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    stop_words: tuple[tuple[int, ...], ...] = ()
    stop_words_after: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    guide: GuideForm | None = None
    adapter: Adapter | None = None
    digests: dict[str, str] = {}
    logits_post_processor_name: str = ""


class OutputForm(Struct, frozen=True):
    """The output of one sequence or beam.

    Attributes:
        token_ids: The generated tokens, without an end id.
        finish_reason: END_ID, STOP_WORDS, LENGTH, TIMED_OUT or CANCELLED.
    """

    token_ids: tuple[int, ...]
    finish_reason: str


class Receipt(Struct, frozen=True):
    """A record of one request, its tokens, and the model, code and settings that computed them.

    Attributes:
        format: Version of the format.
        software: Versions by package.
        model: The checkpoint.
        engine: The code and the settings.
        request: The request.
        outputs: The output of each sequence, or of each beam, best first.
        cannot_rerun: Reason why the request cannot be run again from the receipt; "": it can.
        digest: Digest of all fields except `digest` and `signature`, as `sha256:` and hexadecimal digits.
        signature: HMAC of the same bytes, as `hmac-sha256:` and hexadecimal digits; "": not signed.
    """

    format: int
    software: dict[str, str]
    model: Model
    engine: EngineForm
    request: RequestForm
    outputs: tuple[OutputForm, ...]
    cannot_rerun: str = ""
    digest: str = ""
    signature: str = ""


# ---------------------------------------------------------------------- canonical JSON, digest, signature


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return the bytes that digest and signature cover: canonical JSON of all fields except these two.

    Canonical JSON is ASCII with sorted keys, without white space, and without a fraction in whole numbers.
    """
    covered = {name: value for name, value in document.items() if name not in (_DIGEST, _SIGNATURE)}
    return json.dumps(_plain(covered), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_of(content: bytes) -> str:
    """Return the digest of these bytes, as in the field `digest`."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def signature_of(content: bytes, key: bytes) -> str:
    """Return the signature of these bytes, as in the field `signature`."""
    return f"hmac-sha256:{hmac.new(key, content, hashlib.sha256).hexdigest()}"


def read_key(file: Path) -> bytes:
    """Return the bytes of a key file; raise InvalidArgument if it is empty or cannot be read."""
    try:
        key = file.read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"the key file of receipts {str(file)!r} cannot be read: {error.strerror}"
        ) from error
    if not key:
        raise InvalidArgument("the key file of receipts is empty")
    return key


def finished(receipt: Receipt, key_file: str) -> str:
    """Return a receipt as JSON, with its digest and, if `key_file` is not "", its signature."""
    document = cast("dict[str, Any]", msgspec.to_builtins(receipt))
    content = canonical(document)
    document[_DIGEST] = digest_of(content)
    if key_file:
        document[_SIGNATURE] = signature_of(content, read_key(Path(key_file)))
    return json.dumps(document, allow_nan=False)


def parse(document: Mapping[str, Any]) -> Receipt:
    """Return a document's receipt; raise InvalidArgument, with the reason, if it has another format."""
    if document.get("format") != FORMAT:
        raise InvalidArgument(
            f"format is {document.get('format')!r}: this version reads receipts of format {FORMAT}"
        )
    try:
        return msgspec.convert(document, Receipt)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"not a receipt: {error}") from error


def _plain(value: Any) -> Any:
    """Return a JSON value with whole numbers as int, so that 1.0 and 1 have one form."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST_EXACT:
        return int(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast("list[Any]", value)]
    return value


# ---------------------------------------------------------------------- requests


def request_form(request: Request, options: ReplyOptions = NO_TEXT, adapter: str = "") -> RequestForm:
    """Return a request in canonical form.

    Drafts without logits are left out, as they have no effect on tokens.

    Args:
        request: The request.
        options: Options of its reply. Tokens depend on those of the search for stop strings.
        adapter: Digest of the request's adapter.
    """
    guide, lora = request.guide, request.lora
    return RequestForm(
        input_ids=request.input_token_ids,
        max_new_tokens=request.max_new_tokens,
        sampling=_sampling_form(request.sampling),
        end_ids=request.end_ids,
        stop_strings=options.stop_strings,
        min_tokens=options.min_tokens if options.stop_strings else 0,
        skip_special_tokens=options.skip_special_tokens or not options.stop_strings,
        stop_words=request.stop_words,
        stop_words_after=request.stop_words_after if request.stop_words else 0,
        bad_words=request.bad_words,
        guide=None if guide is None else GuideForm(type=guide.type.value, text=guide.text),
        adapter=None if lora is None else _adapter_form(lora, adapter),
        digests=_digests(request),
        logits_post_processor_name=request.logits_post_processor_name,
    )


def why_not_rerun(request: Request) -> str:
    """Return the reason why a request cannot be run again from its receipt; "" if it can."""
    digests = _digests(request)
    if digests:
        return f"of {' and '.join(digests)} there are digests only"
    if request.draft is not None and request.draft.logits is not None:
        return "tokens depend on the draft's logits, which a receipt does not contain"
    if isinstance(request, DraftedRequest) and request.use_draft_logits and not request.sampling.greedy:
        return "tokens depend on the draft model's logits, which a receipt does not contain"
    if request.logits_post_processor_name:
        return "a logits post-processor is the operator's code, which a receipt does not contain"
    return ""


def to_request(form: RequestForm) -> Request:
    """Return the request of a canonical form, without its adapter.

    Raises InvalidArgument if the form has a control or a kind of guide that does not exist.
    """
    guide = form.guide
    if guide is not None and guide.type not in [kind.value for kind in GuideKind]:
        raise InvalidArgument(f"this version has no guide of type {guide.type!r}")
    return Request(
        request_id=0,
        input_token_ids=form.input_ids,
        max_new_tokens=form.max_new_tokens,
        end_ids=form.end_ids,
        sampling=_to_sampling(form.sampling),
        stop_words=form.stop_words,
        stop_words_after=form.stop_words_after,
        bad_words=form.bad_words,
        guide=None if guide is None else Guide(GuideKind(guide.type), guide.text),
    )


def _sampling_form(config: SamplingConfig) -> dict[str, Any]:
    """Return the controls that have an effect. Infinite numbers are texts, as JSON has none."""
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    form = {
        name: list(map(_number_form, value)) if isinstance(value, tuple) else value  # pyright: ignore
        for name, value in values.items()
        if value != NEUTRAL[name]
    }
    return {**form, _SEED: str(config.random_seed)}


def _number_form(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _to_sampling(form: Mapping[str, Any]) -> SamplingConfig:
    unknown = [name for name in form if name not in NEUTRAL]
    if unknown:
        raise InvalidArgument(f"this version has no sampling control {unknown[0]!r}")
    try:
        return SamplingConfig(**{name: _of_type(NEUTRAL[name], name, value) for name, value in form.items()})
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"a sampling control is not valid: {error}") from error


def _of_type(neutral: Any, name: str, value: Any) -> Any:
    """Return a control's value in the type of its neutral value: JSON has no tuples, and one type of number."""
    if isinstance(neutral, tuple):
        number = float if name == "logit_bias_values" else int
        return tuple(map(number, value))
    return float(value) if isinstance(neutral, float) else int(value)


def _adapter_form(lora: LoraRequest, digest: str) -> Adapter:
    task_id = "" if lora.task_id is None else str(lora.task_id)
    return Adapter(task_id=task_id, name=lora.name, path=lora.path, digest=digest)


def _digests(request: Request) -> dict[str, str]:
    """Return the digests of inputs that are too large for a receipt."""
    bias = request.embedding_bias
    found = {} if bias is None else {"embedding_bias": digest_of(bias.data)}
    tables = {"prompt_embedding_table": request.prompt_table, "mrope_rotary_cos_sin": request.rotary_table}
    return found | {name: f"blake2b:{table.digest.hex()}" for name, table in tables.items() if table}
