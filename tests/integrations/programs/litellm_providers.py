"""A text, a stream and a call of a tool, by the providers `openai`, `hosted_vllm` and `anthropic`."""

import json
import os

import litellm

TURN = {
    "type": "function",
    "function": {
        "name": "turn",
        "description": "Turn the pen.",
        "parameters": {
            "type": "object",
            "properties": {"to": {"enum": ["left", "right"]}},
            "required": ["to"],
        },
    },
}
litellm.telemetry = False
for provider, base in (("openai", "/v1"), ("hosted_vllm", "/v1"), ("anthropic", "")):
    model = {"model": f"{provider}/demo", "api_base": os.environ["URL"] + base, "api_key": "none"}
    hello = [{"role": "user", "content": "Say hello."}]
    answer = litellm.completion(**model, messages=hello)
    assert answer.choices[0].message.content == "Hello, world!", answer
    assert answer.usage.completion_tokens > 1, answer
    chunks = [
        each.choices[0].delta.content or ""
        for each in litellm.completion(**model, messages=hello, stream=True)
    ]
    assert len(chunks) > 2 and "".join(chunks) == "Hello, world!", chunks
    called = litellm.completion(
        **model, messages=[{"role": "user", "content": "Turn the pen, please."}], tools=[TURN]
    )
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "turn" and json.loads(call.function.arguments) == {"to": "left"}, called
    assert called.choices[0].finish_reason == "tool_calls", called
