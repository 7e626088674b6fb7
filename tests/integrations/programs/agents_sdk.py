"""An agent calls a tool and reads its result, gives a typed answer, and streams a text."""

import asyncio
import os
from typing import Literal

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel


class Shape(BaseModel):
    kind: Literal["circle", "square"]
    is_filled: bool


@function_tool
def turn(to: Literal["left", "right"]) -> str:
    """Turn the pen."""
    return f"turned {to}"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{os.environ['URL']}/v1", api_key="none")
    model = OpenAIResponsesModel(model="demo", openai_client=client)
    answer = await Runner.run(Agent(name="pen", model=model, tools=[turn]), "Turn the pen, please.")
    assert answer.final_output == "I turned left.", answer
    assert len(answer.raw_responses) == 2
    answer = await Runner.run(Agent(name="typed", model=model, output_type=Shape), "Which shape?")
    assert answer.final_output == Shape(kind="circle", is_filled=True), answer
    streamed = Runner.run_streamed(Agent(name="plain", model=model), "Say hello.")
    events = [each.data async for each in streamed.stream_events() if each.type == "raw_response_event"]
    parts = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert len(parts) > 1 and "".join(parts) == streamed.final_output == "Hello, world!", parts


asyncio.run(main())
