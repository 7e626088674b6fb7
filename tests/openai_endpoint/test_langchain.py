"""LangChain's ChatOpenAI, on the demo model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

import pytest

from inflight.core.ports import EngineClient
from inflight.text.tokenizer import Tokenizer
from tests.openai_endpoint.serving import DEMO
from tests.openai_endpoint.test_demo_model import Shape, spaces

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI


@pytest.fixture
def chat(demo: tuple[EngineClient, str]) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI  # takes long, for every worker that collects this file

    return ChatOpenAI(model="demo", base_url=f"{demo[1]}/v1", api_key="none", temperature=0, max_tokens=12)  # type: ignore[call-arg, arg-type]


def test_invoke_stream_and_ainvoke_agree(chat: ChatOpenAI) -> None:
    message = chat.invoke("def area(")
    assert isinstance(message.content, str) and message.content
    assert message.usage_metadata is not None and message.usage_metadata["output_tokens"] == 12
    chunks = list(chat.stream("def area("))
    assert "".join(str(chunk.content) for chunk in chunks) == message.content

    async def ask() -> tuple[Any, str]:
        streamed = [str(chunk.content) async for chunk in chat.astream("def area(")]
        return (await chat.ainvoke("def area(")).content, "".join(streamed)

    assert asyncio.run(ask()) == (message.content, message.content)


def test_a_batch_gives_the_answers_of_single_calls(chat: ChatOpenAI) -> None:
    conversation: list[Any] = [("system", "Be brief."), ("human", "hello"), ("ai", "hi"), ("human", "import")]
    first, second = chat.batch([conversation, "def"])
    assert first.content == chat.invoke(conversation).content != second.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_instance_of_the_class(chat: ChatOpenAI, method: Any) -> None:
    biased = chat.model_copy(
        update={"max_tokens": 120, "model_kwargs": {"logit_bias": {str(each): -100 for each in spaces()}}}
    )
    shape = biased.with_structured_output(Shape, method=method).invoke("Which shape?")
    assert isinstance(shape, Shape)


def draw(shape: Literal["circle", "square"], exact: bool) -> str:
    """Draw a shape."""
    return f"{shape} {exact}"


def move(to: Literal["left", "right"]) -> str:
    """Move the pen."""
    return to


@pytest.fixture
def calling(chat: ChatOpenAI) -> ChatOpenAI:
    """A chat without white-space tokens, with which a model not trained for calls would fill them."""
    bias = {str(each): -100 for each in spaces()}
    return chat.model_copy(update={"max_tokens": 120, "model_kwargs": {"logit_bias": bias}})


@pytest.mark.parametrize("choice", ["draw", "any"])
def test_a_bound_tool_is_called_and_its_result_answered(calling: ChatOpenAI, choice: str) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    bound = calling.bind_tools([draw, move], tool_choice=choice, strict=True, parallel_tool_calls=False)
    message = bound.invoke("Which shape?")
    assert isinstance(message, AIMessage) and not message.invalid_tool_calls
    (call,) = message.tool_calls
    tool: Any = {"draw": draw, "move": move}[call["name"]]
    assert choice in (call["name"], "any") and call["id"]
    told = tool(**call["args"])  # the arguments match the function's parameters
    assert told in (
        "left",
        "right",
        *(f"{shape} {exact}" for shape in ("circle", "square") for exact in (True, False)),
    )

    whole: Any = None
    for chunk in bound.stream("Which shape?"):
        whole = chunk if whole is None else whole + chunk
    (streamed,) = whole.tool_calls
    assert (streamed["name"], streamed["args"]) == (call["name"], call["args"])

    conversation = [HumanMessage("Which shape?"), message, ToolMessage(told, tool_call_id=call["id"])]
    answer = bound.bind(tool_choice="none", max_tokens=5).invoke(conversation)
    assert isinstance(answer, AIMessage) and answer.content and not answer.tool_calls


def test_a_model_may_choose_to_call_bound_tools(chat: ChatOpenAI) -> None:
    """A guide replaces a model trained to write calls; the parser does not know of it."""
    from langchain_core.messages import AIMessage

    written = "".join(
        f'<tool_call>{{"name": "move", "arguments": {{"to": "{to}"}}}}</tool_call>'
        for to in ("left", "right")
    )
    bound = chat.bind_tools([draw, move]).bind(max_tokens=120, extra_body={"guided_choice": [written]})
    message = bound.invoke("Go!")
    assert isinstance(message, AIMessage)
    calls = [(call["name"], call["args"]) for call in message.tool_calls]
    assert calls == [("move", {"to": "left"}), ("move", {"to": "right"})]
    assert len({call["id"] for call in message.tool_calls}) == 2


def test_prompt_tokens_are_counted_like_the_tokenizer(chat: ChatOpenAI) -> None:
    message = chat.invoke("one two three")
    rendered = "<|user|>one two three\n<|assistant|>"
    expected = len(Tokenizer.from_dir(DEMO).encode(rendered, add_special_tokens=False))
    assert message.usage_metadata is not None and message.usage_metadata["input_tokens"] == expected
