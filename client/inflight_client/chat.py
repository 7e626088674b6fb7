"""A chat on a terminal, over the server's `/v1/chat/completions`. Standard library only."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from typing import TextIO

_PROMPT = "> "
_MAX_SHOWN = 200  # bytes of an event that is not understood


def chat(url: str, system: str | None, max_tokens: int | None, lines: TextIO, answers: TextIO) -> None:
    """Send each line as a message, with the messages before it, and write the answers as they come.

    Raises ValueError, with the server's message, if a message is refused.
    """
    messages = [] if system is None else [{"role": "system", "content": system}]
    for line in _messages(lines):
        messages.append({"role": "user", "content": line})
        answer = ""
        for text in _ask(url, messages, max_tokens):
            answers.write(text)
            answers.flush()
            answer += text
        answers.write("\n")
        messages.append({"role": "assistant", "content": answer})


def _messages(lines: TextIO) -> Iterator[str]:
    """Yield the lines that are not empty, with a prompt before each on a terminal."""
    while True:
        if lines.isatty():
            sys.stderr.write(_PROMPT)
            sys.stderr.flush()
        line = lines.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _ask(url: str, messages: list[dict[str, str]], max_tokens: int | None) -> Iterator[str]:
    """Yield the parts of the answer."""
    body: dict[str, object] = {"messages": messages, "stream": True}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as response:
            yield from read_texts(response)
    except urllib.error.HTTPError as error:
        raise ValueError(_reason(error)) from None
    except urllib.error.URLError as error:
        reason = f"no server answers at {url}; inflight serve starts one ({error.reason})"
        raise ValueError(reason) from None
    except (HTTPException, ConnectionError):  # as of the port of gRPC
        raise ValueError(f"no HTTP server answers at {url}: --url is the address of /v1") from None


def read_texts(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the text of each event of a stream.

    Raises ValueError, with the server's message, if an event is an error, or if it is not an event of a chat.
    """
    for line in lines:
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        try:
            event = json.loads(data)
            error = event.get("error")
            text = error["message"] if error else _text(event)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            shown = data[:_MAX_SHOWN].decode(errors="replace")
            raise ValueError(f"expected an event of a chat, got {shown}") from None
        if error:
            raise ValueError(text)
        yield text


def _text(event: dict) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the message in the body of a refusal, else the HTTP status and the address."""
    try:
        return json.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{error} ({error.url}): --url is the address of /v1"
