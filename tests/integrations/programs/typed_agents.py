"""By chat completions, responses and Anthropic's messages: a tool, a typed answer, and a stream."""

import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Shape(BaseModel):
    kind: Literal["circle", "square"]
    is_filled: bool


def turn(to: Literal["left", "right"]) -> str:
    """Turn the pen."""
    return f"turned {to}"


openai = OpenAIProvider(base_url=f"{os.environ['URL']}/v1", api_key="none")
anthropic = AnthropicProvider(base_url=os.environ["URL"], api_key="none")
for model in (
    OpenAIChatModel("demo", provider=openai),
    OpenAIResponsesModel("demo", provider=openai),
    AnthropicModel("demo", provider=anthropic),
):
    answer = Agent(model, tools=[turn]).run_sync("Turn the pen, please.")
    assert answer.output == "I turned left." and answer.usage.requests == 2, answer
    if model.system != "anthropic":  # its typed answers are calls of a tool
        typed = Agent(model, output_type=NativeOutput(Shape)).run_sync("Which shape?")
        assert typed.output == Shape(kind="circle", is_filled=True), typed
    streamed = Agent(model).run_stream_sync("Say hello.")
    parts = list(streamed.stream_text(delta=True, debounce_by=None))
    assert len(parts) > 1 and "".join(parts) == "Hello, world!", parts
    assert streamed.usage.output_tokens > 1, streamed.usage
