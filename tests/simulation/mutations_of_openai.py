"""Faults to plant in the source of the front ends of /v1."""

from __future__ import annotations

from .mutations import Mutation

MUTATIONS_OF_OPENAI = (
    Mutation(
        "a client that leaves is not noticed",
        "openai.streaming",
        "            pass\n        self._stream.cancel()",
        "            pass",
        is_rare=True,
    ),
    Mutation(
        "a request that is submitted after its client has left goes on",
        "serving.engine_session",
        "            if is_closed:\n                handle.stop()",
        "            pass",
    ),
    Mutation(
        "of several streams with news one is woken",
        "serving.engine_session",
        "        for has_news in news:\n",
        "        for has_news in news[:1]:\n",
    ),
    Mutation(
        "threads do not end with the application",
        "openai.app",
        "            each.session.close()\n",
        "            pass\n",
    ),
    Mutation(
        "a stream does not tell its usage",
        "openai.completions",
        "        if last := prepared.of_last_chunk():",
        "        if False and (last := prepared.of_last_chunk()):",
    ),
    Mutation(
        "pieces are counted instead of tokens",
        "openai.answers",
        "        self._usage.completion_tokens += len(piece.token_ids)",
        "        self._usage.completion_tokens += bool(piece.token_ids)",
    ),
    Mutation(
        "choices of several prompts have the same index",
        "openai.answers",
        "output.batch_index * self._asked.body.n + result.sequence_index",
        "result.sequence_index",
    ),
    Mutation(
        "bytes of a body that was read stay counted",
        "openai.bodies",
        "            self._num_waiting_bytes -= num_counted",
        "            pass",
    ),
    Mutation(
        "a large body is taken if its length was not declared",
        "openai.bodies",
        "                if size > self._max_bytes:\n                    raise self._too_large()\n",
        "",
    ),
    Mutation(
        "the time for a body has no limit",
        "openai.http_protocol",
        "        self._receive_timer = self.loop.call_later(self.body_timeout_s, self._check_body)",
        "        self._receive_timer = None",
    ),
    Mutation(
        "the time for headers has no limit",
        "openai.http_protocol",
        "        self._receive_timer = self.loop.call_later(self.head_timeout_s, self._give_up_head)",
        "        self._receive_timer = None",
    ),
    Mutation(
        "a request that fails in the engine has two access lines",
        "openai.context",
        "        passage_of(request.scope).reaches_engine = stream.is_submitted",
        "        pass",
    ),
    Mutation(
        "a refused request has no access line",
        "openai.http_metrics",
        "status >= 400 and not passage.reaches_engine",
        "status >= 500 and not passage.reaches_engine",
    ),
    Mutation(
        "a request is counted again for each part of its answer",
        "openai.http_metrics",
        "            await send(message)\n",
        "            await send(message)\n            self._ended(scope, status, 0.0)\n",
    ),
    Mutation(
        "a full queue is told as a server that is away",
        "openai.errors",
        "429 if isinstance(error, QueueFull) else _STATUS",
        "_STATUS",
    ),
    Mutation(
        "a request that the end of the server cancels gets no JSON",
        "openai.request_ids",
        "(Exception, asyncio.CancelledError)",
        "Exception",
        is_rare=True,
    ),
    Mutation(
        "only the first text of a chat is sent",
        "openai.chat_completions",
        "        if delta.content:\n",
        "        if delta.content and piece.is_first:\n",
    ),
    Mutation(
        "a chat's tokens without text are lost",
        "openai.chat_completions",
        "        has_ids = self._body.return_token_ids and piece.token_ids",
        "        has_ids = False",
    ),
    Mutation(
        "each chunk of a chat has the role",
        "openai.chat_completions",
        "        if piece.is_first:\n            delta =",
        "        if True:\n            delta =",
    ),
    Mutation(
        "each chunk of a chat has the prompt's tokens",
        "openai.chat_completions",
        "                prompt_ids = {}  # only",
        "                pass  # only",
    ),
    Mutation(
        "a streamed chat has no usage",
        "openai.chat_completions",
        "        if last := self._prepared.of_last_chunk():\n            yield",
        "        if (last := self._prepared.of_last_chunk()) and not last:\n            yield",
    ),
    Mutation(
        "a chat begins with its last message",
        "openai.chat_prompts",
        "        body.messages,\n",
        "        body.messages[::-1],\n",
    ),
)
"""The mistakes, each of which some seeds must reveal."""
