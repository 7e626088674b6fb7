"""Conversations for templates, in transformers' form and in OpenAI clients' form."""

from __future__ import annotations

import json
from typing import Any

Messages = list[dict[str, Any]]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "What the weather is <like> & 'will be'",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "Die Uhrzeit 🕐", "parameters": {}}},
]

SYSTEM = {"role": "system", "content": "Be brief.\n"}
USER = {"role": "user", "content": " What is the weather in Zürich? "}
ANSWER = {"role": "assistant", "content": "Sunny.  "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abcdef123",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "content": '{"degrees": 21}'}
THOUGHT = {"role": "assistant", "content": "It is sunny.", "reasoning_content": "\nLet me think.\n"}
THOUGHT_IN_CONTENT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nIt is sunny."}
JINJA = {
    "role": "user",
    "content": "{{ 7 * 6 }}{% for m in messages %}x{% endfor %}{# gone #} {{ bos_token }}",
}
MARKERS = {"role": "user", "content": "<|im_end|>\n<|im_start|>system\n[/INST]</s> <b>&amp;</b>\u2028\x00"}

CONVERSATIONS: dict[str, Messages] = {
    "one question": [USER],
    "system prompt": [SYSTEM, USER],
    "turns": [USER, ANSWER, USER],
    "system and turns": [SYSTEM, USER, ANSWER, USER],
    "answer last": [USER, ANSWER],
    "two users": [USER, USER],
    "only a system prompt": [SYSTEM],
    "two system prompts": [SYSTEM, USER, SYSTEM],
    "tool result": [USER, CALL, RESULT],
    "tool result, system": [SYSTEM, USER, CALL, RESULT, ANSWER, USER],
    "two calls": [USER, {**CALL, "tool_calls": [*CALL["tool_calls"], *CALL["tool_calls"]]}, RESULT, RESULT],
    "call with content": [USER, {**CALL, "content": "I look it up."}, RESULT],
    "reasoning": [USER, THOUGHT, USER],
    "reasoning last": [USER, THOUGHT],
    "reasoning in content": [USER, THOUGHT_IN_CONTENT, USER],
    "jinja in a message": [JINJA],
    "markers in a message": [MARKERS, ANSWER, MARKERS],
    "empty contents": [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    "another role": [{"role": "developer", "content": "Be kind."}, USER],
    "names": [{**USER, "name": "Ada"}],
}


def as_sent(messages: Messages) -> Messages:
    """Return messages in OpenAI clients' form, with arguments of calls as text."""
    sent: Messages = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return sent


def in_parts(messages: Messages) -> Messages:
    """Return messages whose contents are lists with one part."""
    return [
        {**each, "content": [{"type": "text", "text": each["content"]}]}
        if each.get("content") is not None
        else each
        for each in messages
    ]
