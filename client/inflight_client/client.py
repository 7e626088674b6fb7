"""The blocking client. May be used from several threads at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tritonclient.grpc as grpc

from inflight_client.results import Adapter, Completion, Delta, completion
from inflight_client.streams import Streams
from inflight_client.tensors import (
    IDS_MODEL,
    TEXT_MODEL,
    Call,
    Prompt,
    adapters_call,
    generate_call,
    name_or_id,
    read_adapters,
    read_delta,
    read_state,
    state_call,
    stop_call,
)

_T = TypeVar("_T")


class Client:
    """Talks to the server's gRPC port; also a context manager, which closes the connections.

    It keeps as many gRPC streams open as it has had requests in flight at a time: use one for many requests.

    Args:
        url: host:port.
        model: Serves all requests; by default `ensemble` does for text and `tensorrt_llm` for ids.
    """

    def __init__(self, url: str = "localhost:8001", model: str | None = None) -> None:
        self._model = model
        self._in_flight: set[Call] = set()
        self._streams = Streams(url)
        weakref.finalize(self, self._streams.cancel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connections that no request is in flight on. Idempotent; a later request opens another one."""
        self._streams.close()

    def generate(
        self, prompt: Prompt, max_tokens: int = 128, *, request_id: str | None = None, **options: Any
    ) -> Completion:
        """The whole answer to `prompt`, a text or a sequence of token ids.

        Args:
            prompt: What to continue.
            max_tokens: Most tokens to generate.
            request_id: Chosen by the caller where `cancel` is to be used; unique among requests in flight.
            options: None leaves one to the server. docs/tensors.md says what each of them does.

                Choosing tokens: temperature, top_k, top_p, seed and all others of
                `inflight_client.options.CHOOSING`; allowed_token_ids, a list; logit_bias, {token id: 2.5};
                embedding_bias, an array [vocab_size] or texts with their weights, {"word": -5.0};
                logits_post_processor_name, one of the server's functions.

                Ending: end_id, pad_id, min_length; stop_words, and bad_words that never come: texts, lists of
                token ids, or the array that the server takes, [2, n] or [1, 2, n]. What is generated ends before a
                stop word that is a text, and with one that is ids. A bad word that is a text is banned in its
                usual tokens.

                What the text has to look like: guide, a `Guide`.

                LoRA: lora, an adapter's name or its task id; lora_weights, (weights, config) of a task id that the
                server does not know yet: arrays [rows, width] and [rows, 3 or 4]. The weights are of the type that
                the server's parameter lora_weights_data_type says, float16 by default.

                Rows of embeddings, of an image for instance: prompt_table, an array or a tensor of torch [rows,
                hidden_size], in the type that the server declares, float16 by default. Token id vocab_size + i
                stands for row i; in front of a text stand all rows. prompt_table_extra_ids, one for each id.

                Several answers: num_return_sequences; beam_width with length_penalty, early_stopping and
                beam_search_diversity_rate.

                Drafts: prompt_lookup_num_tokens; draft_input_ids, draft_logits [n, vocab_size] and
                draft_acceptance_threshold.

                Waiting for a turn: priority, client_id, allotted_time_ms.

                KV cache: cache_salt_id; retention_token_ranges, [(start, end, priority)] or with a duration_ms,
                where None is no end and for ever; retention_decode_priority and retention_decode_duration_ms.

                What comes back beside the answer: return_log_probs, num_top_log_probs, return_prompt_log_probs,
                return_context_logits, return_generation_logits, return_perf_metrics.

        A text goes to `tensorrt_llm` instead of `ensemble` if it comes with options that `ensemble` has no tensor
        for: ids, arrays, and log probabilities of beams.

        Raises:
            ServerError: The server refuses or loses the request, or cannot be reached.
            ValueError: A value does not fit its tensor.
            TypeError: An option is unknown.
        """
        return completion(self._deltas(self._call(prompt, False, request_id, max_tokens, options)))

    def stream(
        self, prompt: Prompt, max_tokens: int = 128, *, request_id: str | None = None, **options: Any
    ) -> Iterator[Delta]:
        """The answer as it comes. The request is sent when the first delta is asked for.

        A delta adds to those before it of the same `sequence_index`. Those of a beam search are cumulative: each
        one says all that there is so far, and takes the last one's place. Closing the iterator, or leaving a `for`
        over it, cancels the request. Arguments and errors as in `generate`.
        """
        return self._deltas(self._call(prompt, True, request_id, max_tokens, options))

    def cancel(self, request_id: str, model: str | None = None) -> None:
        """End a request in flight, this client's or another's; it gets a last delta, CANCELLED.

        Args:
            request_id: What the request was given; nothing happens if it is not in flight.
            model: The model that serves it, if another client has sent it and it is not `ensemble`.
        """
        own = [call.model for call in list(self._in_flight) if call.request_id == request_id]
        model = model or (own[0] if own else self._model or TEXT_MODEL)
        completion(self._deltas(stop_call(model, request_id)))

    def state(self, model: str | None = None) -> dict[str, Any]:
        """Return the state of the server's batcher, for people; the server must have enabled state requests.

        Args:
            model: Whom to ask; `tensorrt_llm` by default.

        Raises:
            ServerError: UNIMPLEMENTED where parameter enable_state_requests is false.
        """
        (state,) = self._received(state_call(model or self._model or IDS_MODEL), read_state)
        return state

    def adapters(self, model: str | None = None) -> tuple[Adapter, ...]:
        """The server's LoRA adapters: those with names, loaded or not, and those that clients have sent.

        Args:
            model: Whom to ask; `tensorrt_llm` by default.

        Raises:
            ServerError: UNIMPLEMENTED where parameter enable_adapter_commands is false.
        """
        return self._command(model, command="list")

    def load_adapter(
        self, name: str, path: str | None = None, model: str | None = None
    ) -> tuple[Adapter, ...]:
        """Have an adapter read now rather than with its first request; returns all adapters.

        Args:
            name: What requests call it.
            path: Its folder below the server's lora_dir, if the server does not know the name yet.
            model: As in `adapters`.

        Raises:
            ServerError: As in `adapters`; NOT_FOUND where there is no such adapter, INVALID_ARGUMENT where it does
                not fit the model.
        """
        return self._command(model, command="load", name=name, path=path)

    def unload_adapter(self, adapter: str | int, model: str | None = None) -> tuple[Adapter, ...]:
        """Free what an adapter takes once no request uses it; returns all others and those that are read again.

        Args:
            adapter: Its name or its task id.
            model: As in `adapters`.

        Raises:
            ServerError: As in `adapters`; NOT_FOUND where there is no such adapter.
        """
        return self._command(model, command="unload", **name_or_id(adapter))

    def _command(self, model: str | None, **command: Any) -> tuple[Adapter, ...]:
        call = adapters_call(model or self._model or IDS_MODEL, **command)
        (adapters,) = self._received(call, read_adapters)
        return adapters

    def _call(
        self,
        prompt: Prompt,
        streaming: bool,
        request_id: str | None,
        max_tokens: int,
        options: dict[str, Any],
    ) -> Call:
        return generate_call(
            prompt, streaming, {"max_tokens": max_tokens, **options}, self._model, request_id
        )

    def _deltas(self, call: Call) -> Iterator[Delta]:
        return self._received(call, lambda result: read_delta(result, call))

    def _received(self, call: Call, read: Callable[[grpc.InferResult], _T | None]) -> Iterator[_T]:
        """Yield the result of `read` for each response; closing the generator early cancels the request."""
        self._in_flight.add(call)
        responses = self._streams.ask(call)
        try:
            for result in responses:
                said = read(result)
                if said is not None:
                    yield said
        finally:
            responses.close()  # also where `read` has raised
            self._in_flight.discard(call)
