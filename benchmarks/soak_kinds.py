"""The kinds of requests of the soak benchmark, and the settings of the server that they need.

A kind is a function of a random generator and a prompt. It sends one request or several, and returns an answer
that must be the same every time, or None. It raises an error if an answer is wrong in itself.

Left out are embeddings, classes, scores and pictures, which need a server with another model or another task,
and /sleep and /wake_up, because a sleeping engine refuses the requests of all other clients.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from http.client import HTTPResponse
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from inflight.openai.options import OpenAiOptions
from inflight.server.launch import TritonServer
from inflight_client import Client, Guide

ADAPTER = "soak"
_TIMEOUT_S = 300.0
_TOKENS = 24
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
_ARGUMENTS = {**_SCHEMA, "properties": {"n": {"enum": [1, 2, 30]}}, "additionalProperties": False}
_FUNCTION = {"name": "count", "description": "Count", "parameters": _ARGUMENTS}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_OUTPUTS = ("context_last_hidden_state", "generation_last_hidden_state", "generation_top_3_logits")
_TEMPLATE = r"""
{%- for tool in tools or [] %}{{- (tool | tojson) + '\n' }}{% endfor %}
{%- for message in messages %}
    {{- (message.content or '') + '\n' }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}\n</tool_call>\n' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt and enable_thinking %}{{- '<think>\n' }}{% endif %}
"""

Kind = Callable[[random.Random, str], object]

EQUAL_KINDS = {
    **dict.fromkeys(("drafts", "own drafts", "priority", "salt", "retention"), "grpc"),
    "draft model": "http",
    "v1 priority": "completions",
}
"""Kinds by the kind whose answers theirs must equal, because their options change no token."""


def kinds_settings(folder: Path) -> dict[str, str]:
    """Return the settings that the kinds need. `folder` is for sockets and the adapter, which is in adapters/."""
    engine = str(folder / "engine.sock")
    return {
        "lora_dir": str(folder / "adapters"),
        "enable_adapter_commands": "true",
        "enable_state_requests": "true",
        "additional_model_outputs": "last_hidden_state:context, top_3_logits",
        # The engine drafts for itself: a draft model that guesses every token.
        "tensorrt_llm_draft_model_name": "draft",
        "engine_endpoint": engine,
        "draft_engine_endpoint": engine,
    }


def kinds_openai_options(folder: Path) -> OpenAiOptions:
    """Return the options of /v1 that the kinds need: batches, and a template with tools and reasoning."""
    template = folder / "template.jinja"
    template.write_text(_TEMPLATE)
    return OpenAiOptions(chat_template=template, reasoning_parser="think", batch_dir=folder / "batches")


def all_kinds(server: TritonServer, client: Client) -> Mapping[str, Kind]:
    """Return all kinds by name."""
    return {**_Triton(server, client).kinds(), **_V1(server).kinds()}


class _Triton:
    """Requests to Triton's endpoints, by gRPC and HTTP."""

    def __init__(self, server: TritonServer, client: Client) -> None:
        self._server, self._client = server, client

    def kinds(self) -> dict[str, Kind]:
        """Return the kinds by name."""
        return {
            "grpc": lambda chance, text: self._generate(text),
            "ids": lambda chance, text: self._generate(text.encode()),
            "seed": lambda chance, text: self._generate(text, temperature=1.0, top_k=20, seed=7),
            "sequences": lambda chance, text: self._generate(text, num_return_sequences=3, top_k=5, seed=1),
            "beams": lambda chance, text: self._generate(text, beam_width=3),
            "stop words": lambda chance, text: self._generate(text, stop_words=["return", "("]),
            "biases": lambda chance, text: self._generate(
                text, bad_words=["self"], logit_bias={40: 2.5}, embedding_bias={"if": 1.5}
            ),
            "log probs": lambda chance, text: self._generate(
                text, return_log_probs=True, num_top_log_probs=2, return_prompt_log_probs=True
            ),
            "logits": lambda chance, text: self._generate(
                text, return_context_logits=True, return_generation_logits=True
            ),
            "additional outputs": lambda chance, text: self._generate(text, additional_outputs=_OUTPUTS),
            "guide": lambda chance, text: self._generate(text, guide=Guide.json_schema(_SCHEMA)),
            "new guide": self._new_guide,
            "lora": lambda chance, text: self._generate(text, lora=ADAPTER),
            "prompt table": self._prompt_table,
            "drafts": lambda chance, text: self._generate(text, prompt_lookup_num_tokens=4),
            "own drafts": lambda chance, text: self._generate(
                text, draft_input_ids=[3, chance.randrange(3000)]
            ),
            "draft model": partial(self._http, model="tensorrt_llm_bls", num_draft_tokens=4),
            "receipt": lambda chance, text: (
                self._client.generate(text, max_tokens=_TOKENS, return_receipt=True).receipt
            ),
            "priority": lambda chance, text: self._generate(
                text, priority=chance.random(), client_id=chance.randrange(1, 4)
            ),
            "salt": lambda chance, text: self._generate(text, cache_salt_id=chance.randrange(1, 4)),
            "retention": self._retention,
            "stream": self._stream,
            "left stream": self._left_stream,
            "cancel": partial(self._stop, model="ensemble"),
            "stop of ids": partial(self._stop, model="tensorrt_llm"),
            "deadline": self._deadline,
            "refused": self._refused,
            "http": self._http,
            "http batch": self._http_batch,
            "closed http": self._closed_http,
            "metrics": self._metrics,
            "state": lambda chance, text: self._client.state() and None,
            "adapter commands": self._adapter_commands,
        }

    def _generate(self, prompt: str | bytes, **options: Any) -> object:
        """Return all of an answer, with a digest of its arrays."""
        given = list(prompt) if isinstance(prompt, bytes) else prompt
        done = self._client.generate(given, max_tokens=_TOKENS, **options)
        arrays = [done.context_logits, *done.context_outputs.values()]
        for each in done.sequences:
            arrays += [each.generation_logits, *each.additional_outputs.values()]
        return [*done.sequences, done.prompt_log_probs, _digest(arrays)]

    def _deadline(self, chance: random.Random, text: str) -> None:
        limit_ms = chance.randint(1, 50)
        done = self._client.generate(text, max_tokens=400, end_id=-1, allotted_time_ms=limit_ms)
        assert done.finish_reason in ("LENGTH", "TIMED_OUT"), done

    def _new_guide(self, chance: random.Random, text: str) -> None:
        word = f"{chance.randrange(10**9):x}"
        assert self._client.generate(text, max_tokens=30, guide=Guide("regex", word)).text.strip() == word

    def _prompt_table(self, chance: random.Random, text: str) -> object:
        table = np.random.default_rng(len(text)).standard_normal((5, 256), np.float32).astype(np.float16)
        return self._generate(text, prompt_table=table, return_log_probs=True)

    def _retention(self, chance: random.Random, text: str) -> object:
        ranges = [(0, 16, chance.randrange(101), 500), (16, None, 20)]
        return self._generate(
            text,
            retention_token_ranges=ranges,
            retention_decode_priority=90,
            retention_decode_duration_ms=200,
        )

    def _stream(self, chance: random.Random, text: str) -> object:
        return "".join(delta.text for delta in self._client.stream(text, max_tokens=40))

    def _left_stream(self, chance: random.Random, text: str) -> None:
        with contextlib.closing(self._client.stream(text, max_tokens=900, end_id=-1)) as deltas:
            assert list(islice(deltas, chance.randint(1, 9)))

    def _stop(self, chance: random.Random, text: str, model: str) -> None:
        request_id = f"soak-{chance.randrange(10**12)}"
        prompt = text if model == "ensemble" else list(text.encode())
        timer = threading.Timer(chance.random() * 0.2, self._client.cancel, (request_id, model))
        timer.start()
        done = self._client.generate(prompt, max_tokens=800, end_id=-1, request_id=request_id)
        timer.join()
        assert done.finish_reason in ("CANCELLED", "LENGTH"), done

    def _refused(self, chance: random.Random, text: str) -> None:
        try:
            self._client.generate(text, max_tokens=5, top_p=2.0)
        except Exception as error:
            assert "top_p" in str(error), error
        else:
            raise AssertionError("top_p of 2 was accepted")

    def _http(self, chance: random.Random, text: str, model: str = "ensemble", **body: Any) -> object:
        with self._post("generate", model, text_input=text, max_tokens=_TOKENS, **body) as answer:
            return json.loads(answer.read())["text_output"]

    def _http_batch(self, chance: random.Random, text: str) -> object:
        prompts, numbers = [text, text[4:] + " ", "class A"], [_TOKENS, 9, 5]
        with self._post("generate", "tensorrt_llm_infer", text_input=prompts, max_tokens=numbers) as answer:
            return json.loads(answer.read())["text_output"]

    def _closed_http(self, chance: random.Random, text: str) -> None:
        body = {"text_input": text, "max_tokens": 900, "stream": True}
        with self._post("generate_stream", "ensemble", **body) as answer:
            assert answer.readline()

    def _metrics(self, chance: random.Random, text: str) -> None:
        with _open(f"http://{self._server.metrics}/metrics") as page:
            assert b"nv_trt_llm_" in page.read()

    def _adapter_commands(self, chance: random.Random, text: str) -> None:
        with contextlib.suppress(Exception):  # the adapter is not loaded, or another client's request uses it
            self._client.unload_adapter(ADAPTER)
        self._client.load_adapter(ADAPTER)

    def _post(self, path: str, model: str, **body: Any) -> HTTPResponse:
        return _open(f"http://{self._server.http}/v2/models/{model}/{path}", body)


class _V1:
    """Requests to /v1: OpenAI's, Anthropic's and vLLM's routes."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server

    def kinds(self) -> dict[str, Kind]:
        """Return the kinds by name."""
        answer_schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}
        return {
            "completions": self._completion,
            "v1 prompts": lambda chance, text: self._completion(
                chance, [text, "class A"], n=2, seed=3, echo=True
            ),
            "v1 prompt log probs": partial(self._completion, prompt_logprobs=2),
            "v1 receipt": partial(self._completion, return_receipt=True, seed=5),
            "v1 priority": lambda chance, text: self._completion(
                chance, text, priority=chance.randint(-9, 9), user=f"user {chance.randrange(3)}"
            ),
            "v1 lora": partial(self._completion, model=ADAPTER),
            "v1 stream": self._stream,
            "closed v1": self._closed,
            "chat": partial(self._chat, logprobs=True),
            "json schema": partial(self._chat, response_format=answer_schema),
            "tools": partial(self._chat, tools=_TOOLS),
            "tool call": self._tool_call,
            "reasoning": self._reasoning,
            "render": self._render,
            "responses": self._responses,
            "responses stream": self._responses_stream,
            "cancelled response": self._cancelled_response,
            "messages": self._messages,
            "messages stream": self._messages_stream,
            "count tokens": lambda chance, text: self._ask(
                "v1/messages/count_tokens", messages=[_user(text)]
            ),
            "tokenize": self._tokenize,
            "batches": self._batch,
            "models": self._models,
        }

    def _completion(self, chance: random.Random, prompt: str | list[str], **body: Any) -> object:
        done = self._ask("v1/completions", prompt=prompt, max_tokens=_TOKENS, **{"temperature": 0, **body})
        return done["choices"], done.get("receipt")

    def _stream(self, chance: random.Random, text: str) -> object:
        with self._post(
            "v1/completions", prompt=text, max_tokens=_TOKENS, temperature=0, stream=True
        ) as answer:
            lines = list(_events(answer))
        assert lines.pop() == "[DONE]"
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines)

    def _closed(self, chance: random.Random, text: str) -> None:
        with self._post("v1/completions", prompt=text, max_tokens=900, stream=True) as answer:
            assert answer.readline()

    def _chat(self, chance: random.Random, text: str, **body: Any) -> object:
        return without_ids(self._ask("v1/chat/completions", **{**_chat_body(text), **body})["choices"])

    def _tool_call(self, chance: random.Random, text: str) -> object:
        body = {"tools": _TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
        done = self._ask("v1/chat/completions", **{**_chat_body(text), **body})
        (call,) = done["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["n"] in (1, 2, 30), call
        return call["function"]

    def _reasoning(self, chance: random.Random, text: str) -> object:
        body = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 8}
        done = self._ask("v1/chat/completions", **{**_chat_body(text), **body})
        message = done["choices"][0]["message"]
        assert message["reasoning"] and message["content"], message
        return message

    def _render(self, chance: random.Random, text: str) -> object:
        """The three steps of a chat."""
        body = _chat_body(text)
        rendered = self._ask("v1/chat/completions/render", **body)
        made = self._ask("inference/v1/generate", **rendered)
        whole = {"chat_request": body, "generate_response": made}
        return without_ids(self._ask("v1/chat/completions/derender", **whole)["choices"])

    def _responses(self, chance: random.Random, text: str) -> object:
        """Two turns of a conversation that the server stores."""
        body = {"max_output_tokens": _TOKENS, "temperature": 0}
        first = self._ask("v1/responses", input=text, **body)
        second = self._ask("v1/responses", input="and now?", previous_response_id=first["id"], **body)
        kept = self._ask(f"v1/responses/{first['id']}")
        assert kept["output"] == first["output"], (kept, first)
        for each in (first, second):
            self._delete(f"v1/responses/{each['id']}")
        return without_ids([first["output"], second["output"]])

    def _responses_stream(self, chance: random.Random, text: str) -> object:
        body = {"input": text, "max_output_tokens": _TOKENS, "temperature": 0, "store": False, "stream": True}
        with self._post("v1/responses", **body) as answer:
            events = [json.loads(line) for line in _events(answer)]
        return "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")

    def _cancelled_response(self, chance: random.Random, text: str) -> None:
        body = {"input": text, "max_output_tokens": 900, "ignore_eos": True, "stream": True}
        with self._post("v1/responses", **body) as answer:
            events = map(json.loads, _events(answer))
            path = f"v1/responses/{next(events)['response']['id']}"
            with _open(self._url(f"{path}/cancel"), {}):
                pass
            *_, last = events
        assert last["type"] in ("response.incomplete", "response.completed"), last
        self._delete(path)

    def _messages(self, chance: random.Random, text: str) -> object:
        done = self._ask("v1/messages", **_message_body(text))
        return done["content"], done["stop_reason"]

    def _messages_stream(self, chance: random.Random, text: str) -> object:
        with self._post("v1/messages", stream=True, **_message_body(text)) as answer:
            events = [json.loads(line) for line in _events(answer)]
        assert events[-1]["type"] == "message_stop", events[-1]
        return "".join(each["delta"]["text"] for each in events if each["type"] == "content_block_delta")

    def _tokenize(self, chance: random.Random, text: str) -> object:
        tokens = self._ask("tokenize", prompt=text)["tokens"]
        assert self._ask("detokenize", tokens=tokens)["prompt"] == text, tokens
        return tokens

    def _batch(self, chance: random.Random, text: str) -> object:
        """A file of three requests, its batch to the end, and its answers."""
        bodies = [{"prompt": text + " " * n, "max_tokens": 8, "temperature": 0} for n in range(3)]
        request = {"method": "POST", "url": "/v1/completions"}
        lines = [json.dumps({"custom_id": str(n), **request, "body": body}) for n, body in enumerate(bodies)]
        given = self._upload("\n".join(lines))
        body = {"input_file_id": given, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = self._ask("v1/batches", **body)
        end_s = time.monotonic() + _TIMEOUT_S
        while batch["status"] in ("validating", "in_progress", "finalizing") and time.monotonic() < end_s:
            time.sleep(0.3)
            batch = self._ask(f"v1/batches/{batch['id']}")
        assert batch["status"] == "completed" and batch["request_counts"]["completed"] == 3, batch
        made = batch["output_file_id"]
        with _open(self._url(f"v1/files/{made}/content")) as answer:
            answers = [json.loads(line) for line in answer]
        for file in (given, made):
            self._delete(f"v1/files/{file}")
        return sorted((each["custom_id"], each["response"]["body"]["choices"][0]["text"]) for each in answers)

    def _upload(self, content: str) -> str:
        form = (
            '--soak\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            '--soak\r\nContent-Disposition: form-data; name="file"; filename="soak.jsonl"\r\n\r\n'
            f"{content}\r\n--soak--\r\n"
        )
        headers = {"Content-Type": "multipart/form-data; boundary=soak"}
        request = urllib.request.Request(self._url("v1/files"), form.encode(), headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.loads(answer.read())["id"]

    def _models(self, chance: random.Random, text: str) -> object:
        with _open(self._url("health")):
            pass
        return [each["id"] for each in self._ask("v1/models")["data"]], self._ask("version")

    def _ask(self, path: str, **body: Any) -> Any:
        """Return the JSON of an answer; without a body, to a GET."""
        with self._post(path, **body) if body else _open(self._url(path)) as answer:
            return json.loads(answer.read())

    def _delete(self, path: str) -> None:
        request = urllib.request.Request(self._url(path), method="DELETE")
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            assert json.loads(answer.read())["deleted"], path

    def _post(self, path: str, **body: Any) -> HTTPResponse:
        return _open(self._url(path), body)

    def _url(self, path: str) -> str:
        return f"{self._server.openai}/{path}"


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _chat_body(text: str) -> dict[str, Any]:
    return {"messages": [_user(text)], "max_tokens": _TOKENS, "temperature": 0}


def _message_body(text: str) -> dict[str, Any]:
    return {"system": "# code", **_chat_body(text)}


def without_ids(value: Any) -> Any:
    """Return JSON without the ids, which are new in every answer."""
    if isinstance(value, dict):
        return {key: without_ids(each) for key, each in value.items() if key not in ("id", "call_id")}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def _digest(arrays: Iterable[np.ndarray | None]) -> str:
    """Return a digest of the values and shapes of the arrays that are not None."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _events(answer: HTTPResponse) -> Iterator[str]:
    """Yield the data of server-sent events."""
    return (line[6:].decode().strip() for line in answer if line.startswith(b"data: "))


def _open(url: str, body: Mapping[str, Any] | None = None) -> HTTPResponse:
    """Send a GET, or with a body a POST of JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
