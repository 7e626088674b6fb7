"""The blocking client. Several threads may use it at the same time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
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
    """A client of the server's gRPC port; as a context manager it closes the connections.

    It keeps as many gRPC streams open as it has had concurrent requests. Use one client for many requests.

    Args:
        url: host:port.
        model: The model for all requests; by default `ensemble` for text and `tensorrt_llm` for ids.
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
        """Close all connections without requests in flight. Idempotent; a later request opens a new connection."""
        self._streams.close()

    def generate(
        self, prompt: Prompt, max_tokens: int = 128, *, request_id: str | None = None, **options: Any
    ) -> Completion:
        """Return the whole answer to `prompt`, a text or a sequence of token ids.

        Args:
            prompt: The prompt to continue.
            max_tokens: Maximum number of tokens to generate.
            request_id: An id for `cancel`, chosen by the caller; unique among requests in flight.
            options: If an option is None, the server's default applies. docs/tensors.md describes each
                option's tensor.

                Sampling: temperature, top_k, top_p, seed and all other options in
                `inflight_client.keywords.CHOOSING`; allowed_token_ids, a list; logit_bias, {token id: 2.5};
                embedding_bias, an array [vocab_size] or texts with their weights, {"word": -5.0};
                logits_post_processor_name, a function of the server.

                Ending: end_id, pad_id, min_length; stop_words, which end the answer, and bad_words, which
                    are never
                generated: texts, lists of token ids, or an array in the server's layout, [2, n] or [1, 2,
                n]. The answer ends before a stop word given as text, but after one given as ids. A bad word
                given as text is banned in its usual tokenizations.

                Guided decoding: guide, a `Guide`.

                LoRA: lora, an adapter's name or task id; lora_weights, (weights, config) for a task id that
                    the
                server does not know yet: arrays [rows, width] and [rows, 3 or 4]. The weights must have the
                type of the server's parameter lora_weights_data_type, by default float16.

                Prompt tables, for example of an image: prompt_table, an array or a torch tensor [rows,
                hidden_size], in the type that the server declares, by default float16. Token id vocab_size +
                i stands for row i; if the prompt is a text, all rows precede it. prompt_table_extra_ids, one
                number per token id.

                Several answers: num_return_sequences; beam_width with length_penalty, early_stopping and
                beam_search_diversity_rate.

                Drafts: prompt_lookup_num_tokens; draft_input_ids, draft_logits [n, vocab_size] and
                draft_acceptance_threshold.

                Scheduling: priority, client_id, allotted_time_ms.

                KV cache: cache_salt_id; retention_token_ranges, [(start, end, priority)] or with a duration_ms,
                where None means no end or no time limit; retention_decode_priority and
                retention_decode_duration_ms.

                Further results: return_log_probs, num_top_log_probs, return_prompt_log_probs,
                return_context_logits, return_generation_logits, return_perf_metrics, return_receipt.

        A text goes to `tensorrt_llm` instead of `ensemble` if `ensemble` has no tensor for one of its options:
        ids, arrays, and log probabilities of beams.

        Raises:
            ServerError: The server refuses or loses the request, or cannot be reached.
            ValueError: A value does not fit its tensor.
            TypeError: An option is unknown.
        """
        return completion(self._deltas(self._call(prompt, False, request_id, max_tokens, options)))

    def stream(
        self, prompt: Prompt, max_tokens: int = 128, *, request_id: str | None = None, **options: Any
    ) -> Generator[Delta]:
        """Return the answer as a stream. The request is sent when the first delta is requested.

        A delta continues earlier deltas of the same `sequence_index`. Deltas of a beam search are
        cumulative: each delta has everything so far, and replaces the previous one. Closing the iterator, or
        leaving a `for` loop over it, cancels the request. Arguments and errors are as in `generate`.
        """
        return self._deltas(self._call(prompt, True, request_id, max_tokens, options))

    def cancel(self, request_id: str, model: str | None = None) -> None:
        """Cancel a request in flight, of this client or of another one.

        Its last delta has the finish reason CANCELLED.

        Args:
            request_id: The request's id. Nothing happens if no such request is in flight.
            model: The model that serves the request; required if another client sent it to a model other
                than `ensemble`.
        """
        own = [call.model for call in list(self._in_flight) if call.request_id == request_id]
        model = model or (own[0] if own else self._model or TEXT_MODEL)
        completion(self._deltas(stop_call(model, request_id)))

    def state(self, model: str | None = None) -> dict[str, Any]:
        """Return the state of the server's batcher, for diagnosis. The server must have enabled state requests.

        Args:
            model: The model to ask; `tensorrt_llm` by default.

        Raises:
            ServerError: UNIMPLEMENTED if the parameter enable_state_requests is false.
        """
        (state,) = self._received(state_call(model or self._model or IDS_MODEL), read_state)
        return state

    def adapters(self, model: str | None = None) -> tuple[Adapter, ...]:
        """Return the server's LoRA adapters: named adapters, loaded or not, and adapters sent by clients.

        Args:
            model: The model to ask; `tensorrt_llm` by default.

        Raises:
            ServerError: UNIMPLEMENTED if the parameter enable_adapter_commands is false.
        """
        return self._command(model, command="list")

    def load_adapter(
        self, name: str, path: str | None = None, model: str | None = None
    ) -> tuple[Adapter, ...]:
        """Load an adapter before the first request needs it; return all adapters.

        Args:
            name: The adapter's name in requests.
            path: The adapter's folder below the server's lora_dir, if the server does not know the name yet.
            model: See `adapters`.

        Raises:
            ServerError: See `adapters`; NOT_FOUND if there is no such adapter, INVALID_ARGUMENT if it does not fit
                the model.
        """
        return self._command(model, command="load", name=name, path=path)

    def unload_adapter(self, adapter: str | int, model: str | None = None) -> tuple[Adapter, ...]:
        """Free an adapter's memory as soon as no request uses it; return the remaining adapters.

        An adapter with a name is loaded again when a request needs it.

        Args:
            adapter: The adapter's name or task id.
            model: See `adapters`.

        Raises:
            ServerError: See `adapters`; NOT_FOUND if there is no such adapter.
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

    def _deltas(self, call: Call) -> Generator[Delta]:
        return self._received(call, lambda result: read_delta(result, call))

    def _received(self, call: Call, read: Callable[[grpc.InferResult], _T | None]) -> Generator[_T]:
        """Yield the result of `read` for each response; closing the generator early cancels the request."""
        self._in_flight.add(call)
        responses = self._streams.ask(call)
        try:
            for result in responses:
                said = read(result)
                if said is not None:
                    yield said
        finally:
            responses.close()  # even if `read` has raised an error
            self._in_flight.discard(call)
