"""Random bodies and bytes, the same in every run: all are answered, and other clients are not affected."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.openai_endpoint.serving import PATIENCE_S, fake_engine, served
from tests.tiers import examples

NUM_BODIES, NUM_CONNECTIONS = 400, 100  # for each of the seeds

VALID: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "def f(x):", "max_tokens": 2, "temperature": 0.5, "seed": 1, "stop": ["\n"], "n": 2},
        {
            "prompt": [[1, 2, 3], [4, 5]],
            "max_tokens": 1,
            "logprobs": 2,
            "echo": True,
            "logit_bias": {"5": 1.5},
        },
        {"prompt": ["a", "b"], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": [1, 2], "max_tokens": 1, "structured_outputs": {"regex": "a+"}, "return_token_ids": True},
        {
            "prompt": "x",
            "max_tokens": 1,
            "prompt_logprobs": 1,
            "truncate_prompt_tokens": 4,
            "bad_words": ["y"],
        },
    ],
    "/v1/chat/completions": [
        {
            "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
            "max_tokens": 2,
            "logprobs": True,
            "top_logprobs": 1,
        },
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "c"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            "tool_choice": "auto",
            "max_tokens": 1,
            "stream": True,
        },
        {
            "messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "max_completion_tokens": 1,
            "chat_template_kwargs": {},
        },
    ],
    "/v1/messages": [
        {
            "max_tokens": 2,
            "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": "b"}],
            "stop_sequences": ["c"],
            "stream": True,
        },
        {
            "max_tokens": 1,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": ""},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "c"}]},
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "adaptive"},
        },
    ],
    "/v1/messages/count_tokens": [{"messages": [{"role": "user", "content": "b"}], "system": "a"}],
    "/v1/responses": [
        {"input": "b", "instructions": "a", "max_output_tokens": 2, "metadata": {"a": "b"}, "stream": True},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
                {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "1", "output": "c"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "tool_choice": "auto",
            "reasoning": {"summary": "auto"},
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "truncation": "auto",
            "max_output_tokens": 1,
        },
    ],
    "/tokenize": [
        {"prompt": "some text", "return_token_strs": True},
        {"messages": [{"role": "user", "content": "b"}], "add_generation_prompt": True},
    ],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}
WRONG: list[Any] = [
    *(None, True, False, 0, 1, -1, 1 << 31, 1 << 63, 1 << 64, 10**40, -(10**40), 0.5, -0.5, 1e-300, 1e300),
    *("", "x", "\x00", "\n", "é", "\U0001f600", "\ud800", "null", "<|assistant|>", "{{ 7 * 7 }}", "x" * 5000),
    *([], {}, [[]], [{}], [None], [0], [""], [[1] * 300] * 30, ["x"] * 3000, [1 << 40], ["a", 1], [[1], "a"]),
    *({"": 1}, {"a": None}, {"type": "json_object"}, {"type": "json_schema"}, {"type": "function"}),
    *({str(each): each for each in range(3000)}, {"$ref": "#"}, {"regex": "("}, {"json": {}}, {"choice": []}),
]
DEEP = 3000


@pytest.fixture(scope="module")
def url(template: Path) -> Iterator[str]:
    """Address of a server whose chats are short by default."""
    with fake_engine() as engine, served(engine, chat_template=template, default_max_tokens=4) as found:
        yield found


def mutated(chance: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with some of its values, at any depth, changed, removed or renamed."""
    body = copy.deepcopy(body)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        place: Any = body
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(place[key], dict | list) and chance.random() < 0.7:
                place = place[key]
                continue
            what = chance.random()
            if what < 0.75:
                place[key] = copy.deepcopy(chance.choice(WRONG))
            elif what < 0.85:
                del place[key]
            elif isinstance(place, dict):
                place[f"{key}{chance.choice(['_', 's', 'X', ''])}"] = chance.choice(WRONG)
            else:
                place.extend(copy.deepcopy(place))
            break
    if chance.random() < 0.3:
        every = [name for bodies in VALID.values() for each in bodies for name in each]
        body[chance.choice(every)] = copy.deepcopy(chance.choice(WRONG))
    return body


def spoiled(chance: random.Random, raw: bytes) -> bytes:
    """Return a body's bytes cut, flipped, doubled, or with insertions."""
    place = chance.randrange(len(raw) + 1)
    what = chance.randrange(5)
    if what == 0:
        return raw[:place]
    if what == 1:
        return raw[:place] + bytes([chance.randrange(256)]) + raw[place + 1 :]
    if what == 2:
        return raw[:place] + raw
    if what == 3:
        return raw[:place] + chance.choice([b"[", b"{", b'"', b"\\", b",", b'{"a":']) * DEEP + raw[place:]
    return (
        raw[:place]
        + chance.choice([b"NaN", b"1e999", b"\xff\xfe", b"\xef\xbb\xbf", b"\\u0000"])
        + raw[place:]
    )


class Client:
    """A client that uses one connection, and reconnects when the server has closed it."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self.address = (str(address.hostname), int(address.port or 0))
        self._connection = HTTPConnection(*self.address, timeout=PATIENCE_S)

    def post(self, route: str, raw: bytes) -> tuple[int, bytes]:
        """Return the status and the answer."""
        self._connection.request("POST", route, raw, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def usual(self) -> list[Any]:
        """Return the answer to an ordinary request."""
        asked = {"prompt": "def f(x):", "max_tokens": 4, "temperature": 0}
        status, answer = self.post("/v1/completions", json.dumps(asked).encode())
        assert status == 200, answer
        return json.loads(answer)["choices"]


def check_answer(status: int, answer: bytes, asked: bytes) -> None:
    """Assert that the answer is a success, or a client's error, short and in OpenAI's form."""
    assert status in (200, 400, 404, 501), (status, answer[:500], asked[:500])
    if status == 200:
        ends = (b"data: [DONE]\n\n", b'{"type":"message_stop"}\n\n')
        is_stream = answer.endswith(ends) or answer.startswith(b"event: response.created\n")
        assert is_stream or json.loads(answer), asked[:500]
        assert b'"server_error"' not in answer and b'"api_error"' not in answer, (answer[-500:], asked[:500])
        return
    told = json.loads(answer)
    error = told["error"]
    is_anthropics = told.get("type") == "error"
    assert set(error) == ({"message", "type"} if is_anthropics else {"message", "type", "param", "code"})
    assert error["message"] and len(error["message"]) < 2000, (error["message"][:500], asked[:500])
    assert "Traceback" not in error["message"] and "object at 0x" not in error["message"], error


@pytest.mark.parametrize("seed", range(examples(1, all=3)))
def test_every_body_is_answered(url: str, seed: int) -> None:
    chance, client = random.Random(seed), Client(url)
    usual = client.usual()
    for number in range(NUM_BODIES):
        route = chance.choice(list(VALID))
        raw = json.dumps(mutated(chance, chance.choice(VALID[route]))).encode()
        if chance.random() < 0.25:
            raw = spoiled(chance, raw)
        check_answer(*client.post(route, raw), raw)
        if number % 50 == 0:
            assert client.usual() == usual
    assert client.usual() == usual


HEADS = [
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAD /v1/models HTTP/1.0\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n"
    b'{"prompt": "x"}',
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'8\r\n{"prompt\r\n7\r\n": "x"}\r\n0\r\n\r\n',
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b'Content-Type: application/json\r\nContent-Length: 15\r\n\r\n{"prompt": "x"}',
    b"GET /%ff%00/..//v1/models/%2e%2e?a=%zz HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://other/health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
]


def exchange(address: tuple[str, int], sent: bytes) -> bytes:
    """Send bytes and return the immediate answer, before the client closes the connection."""
    answer = bytearray()
    with socket.create_connection(address, timeout=PATIENCE_S) as connection, contextlib.suppress(OSError):
        for part in (sent[: len(sent) // 2], sent[len(sent) // 2 :]):
            connection.sendall(part)
        connection.settimeout(0.02)
        while part := connection.recv(1 << 16):
            answer += part
    return bytes(answer)


@pytest.mark.parametrize("seed", range(examples(1, all=3)))
def test_every_connection_is_answered_or_closed(url: str, seed: int) -> None:
    chance, client = random.Random(1000 + seed), Client(url)
    usual = client.usual()
    for _ in range(NUM_CONNECTIONS):
        sent = b"".join(chance.choice(HEADS) for _ in range(chance.choice([1, 1, 2, 5])))
        for _ in range(chance.choice([0, 1, 1, 3])):
            sent = spoiled(chance, sent)
        answer = exchange(client.address, sent)
        assert not answer or answer.startswith(b"HTTP/1.1 "), (answer[:200], sent)
        assert b"HTTP/1.1 500" not in answer, (answer, sent)
    assert client.usual() == usual
