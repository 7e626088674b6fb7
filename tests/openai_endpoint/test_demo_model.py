"""The demo model on the real engine: clients get the values of the engine and of transformers."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import peft
import pydantic
import pytest
import torch
from transformers import AutoModelForCausalLM

from inflight.core.ports import EngineClient
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.text.tokenizer import Tokenizer
from tests.openai_endpoint.serving import DEMO, PATIENCE_S, served
from tests.tiers import with_all

PROMPT = "def area(radius):"
ASKED: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
WITH_IDS: dict[str, Any] = {"return_token_ids": True}


def ids_of(answer: Any) -> list[int]:
    return answer.choices[0].model_extra["token_ids"]


@pytest.fixture(scope="module")
def log_softmax() -> Iterator[Any]:
    """Yield a function that returns transformers' log probs after each token."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)

    def of(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    yield of


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7, "top_k": 9, "min_p": 0.02, "repetition_penalty": 1.2}]
)
def test_tokens_equal_those_of_the_engine(
    demo: tuple[EngineClient, str], demo_client: openai.OpenAI, sampling: dict[str, Any]
) -> None:
    ids = tuple(Tokenizer.from_dir(DEMO).encode(PROMPT))
    config = SamplingConfig(**{"temperature": 0.0, **sampling}, top_p=1.0, random_seed=11)
    arrived: queue.SimpleQueue[Response] = queue.SimpleQueue()
    demo[0].submit(Request(0, ids, 12, sampling=config), arrived.put)
    result = arrived.get(timeout=PATIENCE_S).result
    assert result is not None
    asked = {**ASKED, "temperature": sampling.get("temperature", 0), "seed": 11}
    extra = {**WITH_IDS, **{name: value for name, value in sampling.items() if name != "temperature"}}
    answer = demo_client.completions.create(**asked, extra_body=extra)
    assert ids_of(answer) == list(result.output_token_ids[0][len(ids) :])


def test_log_probs_equal_transformers(demo_client: openai.OpenAI, log_softmax: Any) -> None:
    answer = demo_client.completions.create(**ASKED, echo=True, logprobs=3, extra_body=WITH_IDS)
    tokenizer = Tokenizer.from_dir(DEMO)
    ids = tokenizer.encode(PROMPT) + ids_of(answer)
    expected, told = log_softmax(ids), answer.choices[0].logprobs
    assert (
        told is not None
        and told.token_logprobs
        and told.top_logprobs
        and len(told.token_logprobs) == len(ids)
    )
    for place in range(1, len(ids)):
        row = expected[place - 1]
        assert told.token_logprobs[place] == pytest.approx(row[ids[place]].item(), abs=2e-3)
        best = row.topk(3).values.tolist()
        assert sorted(told.top_logprobs[place].values())[-3:] == pytest.approx(best[::-1], abs=2e-3)
    assert answer.choices[0].text == tokenizer.decode(ids)
    for token, offset in zip(told.tokens or (), told.text_offset or (), strict=True):
        assert answer.choices[0].text[offset : offset + len(token)] == token


def test_prompt_log_probs_equal_transformers(demo_client: openai.OpenAI, log_softmax: Any) -> None:
    ids = Tokenizer.from_dir(DEMO).encode(PROMPT)
    answer = demo_client.completions.create(**ASKED, extra_body={"prompt_logprobs": 2})
    first, *told = answer.choices[0].model_extra["prompt_logprobs"]  # type: ignore[index]
    assert first is None and len(told) == len(ids) - 1
    for place, entries in enumerate(told, 1):
        row = log_softmax(ids)[place - 1]
        for token_id in (ids[place], *row.topk(2).indices.tolist()):
            assert entries[str(token_id)]["logprob"] == pytest.approx(row[token_id].item(), abs=2e-3)
        rank = 1 + int((row > row[ids[place]]).sum())
        assert next(iter(entries)) == str(ids[place]) and entries[str(ids[place])]["rank"] == rank
    answer = demo_client.completions.create(**ASKED, extra_body={"prompt_logprobs": 0})
    alone = answer.choices[0].model_extra["prompt_logprobs"][1:]  # type: ignore[index]
    assert alone == [dict([next(iter(entries.items()))]) for entries in told]


def test_chat_log_probs_equal_transformers(demo_client: openai.OpenAI, log_softmax: Any) -> None:
    answer = demo_client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": PROMPT}],
        max_completion_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body=WITH_IDS,
    )
    choice = answer.choices[0]
    prompt: list[int] = answer.model_extra["prompt_token_ids"]  # type: ignore[index]
    expected = log_softmax(prompt + ids_of(answer))[len(prompt) - 1 :]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    raw = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
    assert raw.decode() == choice.message.content
    for row, token_id, entry in zip(expected, ids_of(answer), choice.logprobs.content):
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=2e-3)
        best = row.topk(2).values.tolist()
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best, abs=2e-3)


def test_min_tokens_keeps_a_text_from_ending(demo_client: openai.OpenAI) -> None:
    first = ids_of(demo_client.completions.create(**ASKED, extra_body=WITH_IDS))[0]
    extra: dict[str, Any] = {**WITH_IDS, "stop_token_ids": [first]}
    assert ids_of(demo_client.completions.create(**ASKED, extra_body=extra)) == []
    assert len(ids_of(demo_client.completions.create(**ASKED, extra_body={**extra, "min_tokens": 3}))) >= 3


def test_a_bias_chooses_tokens_and_bans_them(demo_client: openai.OpenAI) -> None:
    def ids(**changes: Any) -> list[int]:
        extra = {**WITH_IDS, **changes.pop("extra", {})}
        return ids_of(
            demo_client.completions.create(**{**ASKED, "max_tokens": 3}, **changes, extra_body=extra)
        )

    usual = ids()
    assert ids(logit_bias={"77": 100}) == [77] * 3
    assert ids(extra={"allowed_token_ids": [78]}) == [78] * 3
    assert usual[0] not in ids(logit_bias={str(usual[0]): -100})
    word = Tokenizer.from_dir(DEMO).decode(usual[:1])
    assert ids(extra={"bad_words": [word]})[0] != usual[0]


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square"]}, "exact": {"type": "boolean"}},
    "required": ["shape", "exact"],
    "additionalProperties": False,
}
GUIDED: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 80, "temperature": 0.3, "seed": 3}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
def test_a_text_is_valid_by_its_schema(demo_client: openai.OpenAI, fields: dict[str, Any]) -> None:
    # Without spaces, JSON cannot be padded up to max_tokens.
    bias = {str(token_id): -100 for token_id in spaces()}
    answer = demo_client.completions.create(**GUIDED, logit_bias=bias, extra_body=fields)
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].text), SCHEMA)


def spaces() -> list[int]:
    """Return the tokens that are only white space."""
    table = Tokenizer.from_dir(DEMO).token_bytes()
    return [token_id for token_id, text in enumerate(table) if text and not text.strip()]


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"guided_choice": ["yes", 'no, "never"\n']}, {"yes", 'no, "never"\n'}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"a", "b"}),
        ({"guided_regex": "(19|20)00"}, {"1900", "2000"}),
        ({"response_format": {"type": "regex", "pattern": "x{2}"}}, {"xx"}),
        ({"guided_grammar": 'root ::= "one" | "two"'}, {"one", "two"}),
    ],
)
def test_a_text_follows_its_guide(
    demo_client: openai.OpenAI, fields: dict[str, Any], texts: set[str]
) -> None:
    answer = demo_client.completions.create(**GUIDED, extra_body=fields)
    assert answer.choices[0].text in texts and answer.choices[0].finish_reason == "stop"


def test_response_format_json_object_gives_an_object(demo_client: openai.OpenAI) -> None:
    answer = demo_client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "JSON"}],
        response_format={"type": "json_object"},
        max_tokens=100,
        logit_bias={str(token_id): -100 for token_id in spaces()},
        seed=1,
    )
    content = answer.choices[0].message.content or ""
    assert content.startswith("{")
    assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(content), dict)


class Shape(pydantic.BaseModel):
    """The object that the model is constrained to generate."""

    shape: Literal["circle", "square"]
    exact: bool


def test_parse_returns_an_object_of_the_clients_class(demo_client: openai.OpenAI) -> None:
    answer = demo_client.chat.completions.parse(
        model="demo",
        messages=[{"role": "user", "content": "Which shape?"}],
        response_format=Shape,
        logit_bias={str(token_id): -100 for token_id in spaces()},
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Shape) and parsed.shape in ("circle", "square")


def test_an_invalid_guide_is_refused_with_its_field(demo_client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            demo_client.completions.create(**GUIDED, stream=stream, extra_body={"guided_regex": "("})
        assert caught.value.param == "guided_regex"


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Draws it.",
            "parameters": {**SCHEMA, "properties": {**SCHEMA["properties"], "shape": {"enum": [name, "x"]}}},
        },
    }
    for name in ("draw_circle", "draw_square")
]
CALLING: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Draw!"}],
    "tools": TOOLS,
    "max_completion_tokens": 120,
    "seed": 4,
}


@pytest.mark.parametrize("name", with_all(["draw_circle", "draw_square"], ["draw_square"]))
def test_a_named_tool_is_called(demo_client: openai.OpenAI, name: str) -> None:
    asked: dict[str, Any] = {**CALLING, "tool_choice": {"type": "function", "function": {"name": name}}}
    asked["logit_bias"] = {str(token_id): -100 for token_id in spaces()}
    answer = demo_client.chat.completions.create(**asked)
    choice = answer.choices[0]
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function" and call.function.name == name and call.id
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    parameters = next(tool for tool in TOOLS if tool["function"]["name"] == name)["function"]["parameters"]
    jsonschema.validate(json.loads(call.function.arguments), parameters)
    with demo_client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    (same,) = streamed.message.tool_calls or ()
    assert (same.function.name, same.function.arguments) == (name, call.function.arguments)
    assert streamed.finish_reason == "tool_calls"


def test_a_tool_is_called_if_tool_choice_is_required(demo_client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**CALLING, "tool_choice": "required", "parallel_tool_calls": False, "n": 3}
    asked["logit_bias"] = {str(token_id): -100 for token_id in spaces()}
    for choice in demo_client.chat.completions.create(**asked).choices:
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function" and call.function.name in ("draw_circle", "draw_square")


WRITTEN = "".join(
    f'<tool_call>{{"name": "{name}", "arguments": {{"shape": "x", "exact": true}}}}</tool_call>'
    for name in ("draw_circle", "draw_square")
)


@pytest.mark.parametrize(
    ("parallel", "names"),
    with_all([(True, ["draw_circle", "draw_square"]), (False, ["draw_circle"])], [True]),
)
def test_calls_are_parsed_without_a_tool_choice(
    demo_client: openai.OpenAI, parallel: bool, names: list[str]
) -> None:
    """A guide replaces a model trained to write calls; the parser does not know of it."""
    asked: dict[str, Any] = {
        **CALLING,
        "max_completion_tokens": 400,  # any tokens that spell the text may be sampled, single bytes included
        "tool_choice": "auto",
        "parallel_tool_calls": parallel,
        "extra_body": {"guided_choice": [WRITTEN]},
    }
    whole = demo_client.chat.completions.create(**asked).choices[0]
    with demo_client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        calls: list[Any] = list(choice.message.tool_calls or ())
        assert [call.function.name for call in calls] == names
        for call in calls:
            assert call.id and json.loads(call.function.arguments) == {"shape": "x", "exact": True}


@pytest.mark.parametrize("text", ["<tool_call>never closed", "\U0001f642\U0001f643"])
def test_a_stream_has_token_ids_while_text_is_held(demo_client: openai.OpenAI, text: str) -> None:
    """Text is held if it may become a call, or is an incomplete character."""
    guide: dict[str, Any] = {**WITH_IDS, "guided_choice": [text]}
    asked: dict[str, Any] = {**CALLING, "extra_body": guide}
    whole = demo_client.chat.completions.create(**asked)
    chunks = list(demo_client.chat.completions.create(**asked, stream=True))
    ids = [each for chunk in chunks for each in ids_of(chunk)]
    assert whole.choices[0].message.content == text and ids == ids_of(whole) and len(ids) > 3
    prompts = [
        extra["prompt_token_ids"] for c in chunks if "prompt_token_ids" in (extra := c.model_extra or {})
    ]
    assert prompts == [(whole.model_extra or {})["prompt_token_ids"]]

    plain: dict[str, Any] = {**GUIDED, "extra_body": guide}
    completion = demo_client.completions.create(**plain)
    parts = list(demo_client.completions.create(**plain, stream=True))
    assert [each for part in parts for each in ids_of(part)] == ids_of(completion)
    extras = [part.choices[0].model_extra or {} for part in parts]
    expected = (completion.choices[0].model_extra or {})["prompt_token_ids"]
    assert [extra["prompt_token_ids"] for extra in extras if "prompt_token_ids" in extra] == [expected]


def test_a_model_with_tools_may_answer_with_text(demo_client: openai.OpenAI) -> None:
    for tool_choice in ("auto", "none"):
        asked = {**CALLING, "tool_choice": tool_choice, "max_completion_tokens": 5}
        choice = demo_client.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "length" and not choice.message.tool_calls and choice.message.content


def test_an_adapter_is_served_as_a_model(demo_client: openai.OpenAI, adapter: Path) -> None:
    ids = Tokenizer.from_dir(DEMO).encode(PROMPT)
    base = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    adapted: Any = peft.PeftModel.from_pretrained(base, adapter)
    adapted.generation_config.eos_token_id = None
    tensor = torch.tensor([ids])
    expected = adapted.generate(
        input_ids=tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=12, do_sample=False
    )
    models = {model.id: model.model_extra or {} for model in demo_client.models.list()}
    assert set(models) == {"demo", "shouting"} and models["shouting"]["parent"] == "demo"
    assert models["shouting"]["root"] == str(adapter) and models["demo"]["root"] == "demo"
    answer = demo_client.completions.create(**{**ASKED, "model": "shouting"}, extra_body=WITH_IDS)
    assert answer.model == "shouting"
    assert ids_of(answer) == expected[0, len(ids) :].tolist()
    assert ids_of(answer) != ids_of(demo_client.completions.create(**ASKED, extra_body=WITH_IDS))


@pytest.fixture
def client_without_call_style(
    request: Any, demo: tuple[EngineClient, str], tmp_path: Path
) -> Iterator[openai.OpenAI]:
    """A client of an application whose template does not show how calls are written, and ends as given."""
    file = tmp_path / "template.jinja"
    messages = "{% for message in messages %}{{ message.content.split('</think>')[-1] }}{% endfor %}"
    file.write_text("{{ tools | tojson }}" + messages + request.param, encoding="utf-8")
    with (
        served(demo[0], chat_template=file) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize("client_without_call_style", [""], indirect=True)
def test_calls_can_be_forced_if_the_template_shows_no_style(client_without_call_style: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as caught:
        client_without_call_style.chat.completions.create(**CALLING)
    assert caught.value.param == "tools"
    bias = {str(token_id): -100 for token_id in spaces()}
    required: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "logit_bias": bias}
    choice = client_without_call_style.chat.completions.create(**CALLING, **required).choices[0]
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function" and json.loads(call.function.arguments)["shape"] in (
        call.function.name,
        "x",
    )


@pytest.mark.parametrize("client_without_call_style", ["<think>"], indirect=True)
def test_a_guide_ends_the_reasoning_first(client_without_call_style: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "yes?"}]
    extra: dict[str, Any] = {"guided_choice": ["yes", "no"]}
    message = (
        client_without_call_style.chat.completions.create(model="demo", messages=messages, extra_body=extra)
        .choices[0]
        .message
    )
    assert message.content in ("yes", "no") and not message.model_extra
