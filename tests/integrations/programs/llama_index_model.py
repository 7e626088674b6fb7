"""A completion, a chat, a stream, and an agent that calls a tool."""

import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def turn(to: str) -> str:
    """Turn the pen."""
    return f"turned {to}"


async def main() -> None:
    model = OpenAILike(
        model="demo",
        api_base=f"{os.environ['URL']}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
    )
    hello = [ChatMessage("Say hello.")]
    assert model.complete("Say hello.").text == "Hello, world!"
    assert model.chat(hello).message.content == "Hello, world!"
    parts = [each.delta for each in model.stream_chat(hello)]
    assert len(parts) > 1 and "".join(parts) == "Hello, world!", parts
    answer = await FunctionAgent(tools=[turn], llm=model).run("Turn the pen, please.")
    assert str(answer) == "I turned left.", answer


asyncio.run(main())
