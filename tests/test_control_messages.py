"""Messages for bad values of each field of OpenAI's body, the Executor's SamplingConfig and the client's options.

Clients match these texts, which are stored in a file. After a deliberate change, rewrite the file with
`python -m tests.test_control_messages` and read its diff; `tests.triton.test_error_messages` does this for
tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest

import inflight.executor as trtllm
from inflight.core.request.engine_description import EngineDescription, ModelLimits
from inflight.errors import InflightError
from inflight.executor.convert import to_core_request
from inflight.openai.errors import describe_error, validation_error
from inflight.openai.protocol import ChatBody, CompletionBody, SamplingBody
from inflight.openai.sampling import BodySettings, choose_seed, make_prompt
from inflight.text.text_encoder import TextEncoder
from inflight.text.tokenizer import Tokenizer
from inflight_client.keywords import NAMES
from inflight_client.options import read_options
from tests.openai_endpoint.serving import DEMO

FILE = Path(__file__).with_name("control_messages.json")
ACCEPTED = "accepted"
LIMITS = ModelLimits(
    vocab_size=3072,
    max_sequence_length=256,
    max_input_length=255,
    num_blocks=12,
    tokens_per_block=16,
    max_beam_width=4,
)
VALUES: list[Any] = [
    "x", True, -1, 0, 0.5, 1.5, 99_999, 1 << 64, 1e-300, 1e300, -1e300, float("nan"), [], [-1], {"99999": 1.0},
]  # fmt: skip

# Bodies with several fields that are invalid together, or with special errors: (chat or completion, the body).
BODIES: list[tuple[str, dict[str, Any]]] = [
    (kind, body)
    for kind in ("completion", "chat")
    for body in (
        {"prompt_tokens": [9999]},
        {"prompt_tokens": [5] * 400},
        {"prompt_tokens": []},
        {"max_tokens": 100_000},
        {"max_tokens": 190, "n": 4, "use_beam_search": True},
        {"max_tokens": 0},
        {"min_tokens": 17},
        {"use_beam_search": True, "n": 8},
        {"use_beam_search": True, "n": 2, "length_penalty": 1e300, "early_stopping": "never"},
        {"use_beam_search": True, "n": 2, "prompt_lookup_num_tokens": 3},
        {"n": 1024},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"5": float("inf")}},
        {"num_top": 5000},
        {"logits_post_processor_name": "batched"},
        {"stop": ["x" * 40_000]},
        {"bad_words": ["x"] * 1025},
        {"stop_token_ids": [99_999]},
    )
]


@functools.cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(DEMO)


def said_of_a_body(kind: type[SamplingBody], changes: dict[str, Any]) -> str:
    """Return param, code and message as a client of /v1 gets them."""
    asked = dict(changes)
    ids, num_top = asked.pop("prompt_tokens", [5] * 9), asked.pop("num_top", None)
    given = {"messages": [{"role": "user", "content": "x"}]} if kind is ChatBody else {"prompt": "x"}
    try:
        body = kind.model_validate({**given, **asked})
        whole = BodySettings(body, body.max_tokens or 16, num_top=num_top, seed=choose_seed(body))
        if "max_tokens" in asked:
            whole = dataclasses.replace(whole, max_tokens=body.max_tokens)
        description = EngineDescription(LIMITS, eos_token_ids=(0,))
        make_prompt(whole, ids, None, description, TextEncoder(demo_tokenizer))
    except pydantic.ValidationError as error:
        return shown(validation_error(error))
    except InflightError as error:
        return shown(error)
    return ACCEPTED


def shown(error: Exception) -> str:
    _, answer = describe_error(error)
    told = answer["error"]
    return f"{told['param']} {told['code']}: {told['message']}"


def said_by_the_executor(name: str, value: object) -> str:
    try:
        request = trtllm.Request([1, 2, 3], 5, sampling_config=trtllm.SamplingConfig(**{name: value}))
        to_core_request(request, LIMITS)
    except (TypeError, RuntimeError, InflightError) as error:
        return f"{type(error).__name__}: {error}"
    return ACCEPTED


def said_by_the_client(name: str, value: object) -> str:
    """Return the text of the client's error, or the tensors if the client accepts the value, by both names of
    the field."""
    try:
        options = read_options({name: value})
    except (TypeError, ValueError, OverflowError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{tensors(options.text)} {tensors(options.ids)}"


def tensors(given: dict[str, np.ndarray]) -> str:
    return ", ".join(f"{name} {array.dtype}{list(array.shape)}" for name, array in given.items())


def all_messages() -> dict[str, dict[str, str]]:
    """Return messages by protocol and field, then by the given value."""
    found: dict[str, dict[str, str]] = {}
    for kind in (CompletionBody, ChatBody):
        for name in kind.model_fields.keys() - (SamplingBody.model_fields if kind is ChatBody else {}):
            found[f"{kind.__name__} {name}"] = {
                repr(value): said_of_a_body(kind, {name: value}) for value in VALUES
            }
    kinds: dict[str, type[SamplingBody]] = {"completion": CompletionBody, "chat": ChatBody}
    found["bodies"] = {f"{kind} {str(body)[:70]}": said_of_a_body(kinds[kind], body) for kind, body in BODIES}
    for each in dataclasses.fields(trtllm.SamplingConfig):
        found[f"SamplingConfig.{each.name}"] = {
            repr(value): said_by_the_executor(each.name, value) for value in VALUES
        }
    for name in NAMES:
        found[f"client {name}"] = {repr(value): said_by_the_client(name, value) for value in VALUES}
    return found


@pytest.fixture(scope="module")
def messages() -> dict[str, dict[str, str]]:
    return all_messages()


EXPECTED: dict[str, dict[str, str]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


@pytest.mark.parametrize("subject", EXPECTED)
def test_each_message_is_the_one_in_the_file(subject: str, messages: dict[str, dict[str, str]]) -> None:
    assert messages[subject] == EXPECTED[subject]


def test_every_field_is_in_the_file(messages: dict[str, dict[str, str]]) -> None:
    assert set(messages) == set(EXPECTED)


def test_every_field_is_refused_for_something_by_its_name() -> None:
    for subject, told in EXPECTED.items():
        kind, _, name = subject.partition(" ")
        if kind in ("CompletionBody", "ChatBody"):
            assert any(
                text.startswith(f"{name} ") and name in text.partition(": ")[2] for text in told.values()
            )


if __name__ == "__main__":
    FILE.write_text(
        json.dumps(all_messages(), indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8"
    )
