"""The blocking client.

Owns one gRPC stream for each request in flight, because that is what can be cancelled alone. May be used from
several threads at a time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from inflight_client.errors import ServerError, server_error
from inflight_client.results import Completion, Delta, completion
from inflight_client.tensors import (
    IDS_MODEL,
    TEXT_MODEL,
    Call,
    Prompt,
    generate_call,
    is_final,
    read_delta,
    read_state,
    state_call,
    stop_call,
)

# Without it an error in a stream is a bare text; with it, it has a status and ends the stream. tritonserver 2.51
# has crashed when such a stream had other requests in flight: here every request has a stream of its own.
STREAM_HEADERS = {"triton_grpc_error": "true"}

_T = TypeVar("_T")
Responses = queue.SimpleQueue[tuple[grpc.InferResult | None, Exception | None]]


class Client:
    """Talks to the server's gRPC port.

    Args:
        url: host:port.
        model: Serves all requests; by default `ensemble` does for text and `tensorrt_llm` for ids.
    """

    def __init__(self, url: str = "localhost:8001", model: str | None = None) -> None:
        self._url = url
        self._model = model
        self._in_flight: set[Call] = set()

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
        """What the server's batcher is doing, for people; the server must have been told to tell.

        Args:
            model: Whom to ask; `tensorrt_llm` by default.

        Raises:
            ServerError: UNIMPLEMENTED where parameter enable_state_requests is false.
        """
        (state,) = self._received(state_call(model or self._model or IDS_MODEL), read_state)
        return state

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
        """What `read` makes of each response, as they come."""
        responses: Responses = queue.SimpleQueue()
        self._in_flight.add(call)
        connection = grpc.InferenceServerClient(self._url)
        try:
            _start_stream(connection, responses)
            connection.async_stream_infer(
                call.model,
                call.inputs,
                outputs=call.outputs,
                request_id=call.request_id,
                enable_empty_final_response=True,
            )
            yield from self._until_final(read, responses)
            connection.stop_stream()
        except InferenceServerException as error:
            connection.stop_stream(cancel_requests=True)
            # A stream that broke before the request was sent has reported why, and that is the better reason.
            _, reported = (None, None) if responses.empty() else responses.get()
            raise server_error(reported or error, self._url) from error
        finally:
            self._in_flight.discard(call)
            connection.stop_stream(cancel_requests=True)
            connection.close()

    def _until_final(
        self, read: Callable[[grpc.InferResult], _T | None], responses: Responses
    ) -> Iterator[_T]:
        while True:
            result, error = responses.get()
            if result is None:
                raise server_error(error, self._url) if error else ServerError("UNKNOWN", "an empty response")
            said = read(result)
            if said is not None:
                yield said
            if is_final(result):
                return


def _start_stream(connection: grpc.InferenceServerClient, responses: Responses) -> None:
    """Start the connection's stream so that nobody has to close it for the program to end.

    tritonclient's thread inherits whether it is a daemon. If it were not, an exception that leaves a loop over
    `stream`, and so keeps the iterator alive in its traceback, would stop the interpreter from exiting for ever.
    """
    starter = threading.Thread(
        target=connection.start_stream,
        args=(lambda result, error: responses.put((result, error)),),
        kwargs={"headers": STREAM_HEADERS},
        daemon=True,
    )
    starter.start()
    starter.join()
