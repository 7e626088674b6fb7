"""A serving model between Triton and an engine client: admits requests, and ends in order.

Owns the life of the threads of one model instance that send, notice cancellations and tokenize long texts. Does
not know where the engine runs. `execute` runs on Triton's thread, never blocks and never raises: one bad request
is answered alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from inflight.config import Parameters
from inflight.core.ports import EngineClient
from inflight.core.request.request import EngineDescription
from inflight.errors import InflightError, StepFailed, Unsupported
from inflight.serving.client_lanes import ClientLanes
from inflight.serving.completion_text import CompletionText, TokenizerFinder
from inflight.serving.response_size import ResponseBudget
from inflight.serving.text_encoder import ModelTextEncoder
from inflight.text.stop_strings import StopStrings
from inflight.triton.cancellation import CancellationWatcher
from inflight.triton.client_stream import ClientStream
from inflight.triton.in_flight import Ending, InFlight, InFlightRequest, error_of_ending
from inflight.triton.reply import NewText, PromptReply, Repetition, Reply
from inflight.triton.request_parameters import RequestParameters, read_request_parameters
from inflight.triton.requests import Prompt, ServingContext, client_of, convert, wants_state, wants_stop
from inflight.triton.responses import ResponseBuilder
from inflight.triton.sender import Sender
from inflight.triton.state_requests import StateRequests
from inflight.triton.tensor_reader import TensorReader
from inflight.triton.tensor_spec import Vocabulary
from inflight.triton.tensors import INPUTS
from inflight.triton.text_limits import check_texts, tokenizing_cost
from inflight.triton.wanted_outputs import Naming

_MOST_INLINE = 4096
"""Bytes of text that are tokenized in execute: about two milliseconds' worth."""

_TOKENIZING_THREADS = 2


@dataclass(frozen=True, slots=True)
class ServingModel:
    """Which face a front end shows.

    Attributes:
        vocabulary: Whose tensor names its clients use.
        decoupled: Whether a request may have more than one response.
        parameters: From its config.pbtxt.
        outputs: The data type of each output that config.pbtxt declares; without any, those of the table.
    """

    vocabulary: Vocabulary
    decoupled: bool
    parameters: Parameters
    outputs: Mapping[str, str] = field(default_factory=dict)


class FrontEnd:
    """Everything of a serving model but where its engine is."""

    def __init__(
        self,
        pb_utils: Any,
        client: EngineClient,
        close_client: Callable[[], None],
        model: ServingModel,
        tokenizers: TokenizerFinder,
    ) -> None:
        """Args:
        pb_utils: The `triton_python_backend_utils` module, or a fake of it.
        client: Way to the engine.
        close_client: Ends the client, or the engine with it, and has every request in flight answered.
        model: What is served.
        tokenizers: Where its tokenizer comes from.
        """
        self._pb_utils = pb_utils
        self._client = client
        self._close_client = close_client
        self._model = model
        self._tokenizers = tokenizers
        self._responses = ResponseBuilder(pb_utils, model.outputs)
        self._in_flight = InFlight(client)
        self._budget = ResponseBudget()
        self._sender = Sender(
            self._in_flight,
            self._responses,
            self._budget,
            pb_utils.Logger.log_verbose,
            model.parameters.stream_interval,
        )
        client.add_outbox(self._sender.wait_until_sent)
        self._lanes = ClientLanes(_TOKENIZING_THREADS)
        self._repetition = Repetition(
            model.parameters.repeat_log_probs, model.parameters.max_repeated_logits_bytes
        )
        self._states = StateRequests(client, self._responses)
        self._watcher = CancellationWatcher(
            self._in_flight, model.parameters.cancellation_check_period_ms / 1000
        )

    def execute(self, requests: Iterable[Any]) -> None:
        """Take Triton's requests; every one gets a final response, now or later."""
        for request in requests:
            stream = ClientStream(
                request.get_response_sender(), self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            )
            try:
                self._admit(request, stream)
            except InflightError as error:
                self._refuse(stream, error)
            except Exception as error:
                self._pb_utils.Logger.log_error(f"execute: {error!r}")
                self._refuse(stream, StepFailed(f"the front end failed: {error!r}"))

    def close(self) -> None:
        """Answer everything in flight, then release the client and the threads. Idempotent."""
        for entry in self._in_flight.close():
            self._in_flight.cancel(entry, Ending.UNLOAD)
        self._watcher.close()
        self._close_client()
        self._states.close()
        self._sender.close()
        # What is still being tokenized, and what the client broke its promise of a final response for.
        for entry in self._in_flight.close():
            self._refuse(entry.stream, error_of_ending(Ending.UNLOAD))
            self._budget.release(entry.ticket)
        self._lanes.close()

    def flush(self, timeout_s: float) -> None:
        """Hand what the engine has answered to Triton, for so long at most, and nothing later. Any thread."""
        flushing = threading.Thread(target=self._sender.close, name="inflight-flush", daemon=True)
        flushing.start()
        flushing.join(timeout_s)

    def _admit(self, triton_request: Any, stream: ClientStream) -> None:
        parameters = read_request_parameters(
            triton_request.parameters(),
            triton_request.timeout(),
            self._model.vocabulary,
            self._model.parameters.ignored_request_parameters,
        )
        reader = TensorReader(triton_request.inputs(), INPUTS, self._model.vocabulary)
        if wants_stop(reader):
            self._in_flight.stop(triton_request.request_id())
            stream.finish(self._responses.empty())
            return
        description = self._client.describe()
        if wants_state(reader):
            self._ask_state(description, stream)
            return
        requested = frozenset(triton_request.requested_output_names())
        naming = Naming.of(requested, self._model.vocabulary, self._model.outputs)
        encoder = ModelTextEncoder(self._tokenizers, description.tokenizer_dir)
        check_texts(reader, encoder, description.limits)
        entry = InFlightRequest(triton_request.request_id(), stream, Reply((), not self._model.decoupled))
        start = partial(
            self._start, entry, naming=naming, parameters=parameters, encoder=encoder, description=description
        )
        if not self._must_wait(reader, parameters):
            start(reader)
            return
        client, later = client_of(reader, parameters), partial(start, reader.detached())
        self._in_flight.register(entry)
        self._lanes.submit(client, partial(self._start_later, entry, later))

    def _must_wait(self, reader: TensorReader, parameters: RequestParameters) -> bool:
        """For its own text, or for that of an earlier request of the same client."""
        if tokenizing_cost(reader) > _MOST_INLINE:
            return True
        return not self._lanes.are_idle and self._lanes.is_busy(client_of(reader, parameters))

    def _start_later(self, entry: InFlightRequest, start: Callable[[], None]) -> None:
        """On a thread of the lanes, for a request that is registered."""
        try:
            if entry.ending is Ending.NONE:
                start()
                return
            error = error_of_ending(entry.ending)
        except InflightError as raised:
            error = raised
        except Exception as raised:
            self._pb_utils.Logger.log_error(f"a request could not be started: {raised!r}")
            error = StepFailed(f"the front end failed: {raised!r}")
        self._in_flight.withdraw(entry)
        self._refuse(entry.stream, error)

    def _start(
        self,
        entry: InFlightRequest,
        reader: TensorReader,
        *,
        naming: Naming,
        parameters: RequestParameters,
        encoder: ModelTextEncoder,
        description: EngineDescription,
    ) -> None:
        """Tokenize, and hand the request to the engine; whatever is wrong is raised, and nothing runs then."""
        prompts = convert(reader, naming, self._context(description), encoder, parameters)
        replies = [
            PromptReply(prompt, self._new_text(prompt, naming, description), index, self._repetition)
            for index, prompt in enumerate(prompts)
        ]
        in_one = not self._model.decoupled
        entry.reply = Reply(replies, in_one)
        requests = [prompt.request for prompt in prompts]
        # Prompts of one batch may differ in it; the response of one that is not streamed is the larger.
        streaming = all(prompt.options.streaming for prompt in prompts)
        entry.ticket = self._budget.reserve(requests, description.limits.vocab_size, streaming, in_one)
        try:
            self._in_flight.start(entry, requests, self._sender.put)
        except Exception:
            self._budget.release(entry.ticket)
            raise

    def _ask_state(self, description: EngineDescription, stream: ClientStream) -> None:
        if not description.state_enabled:
            raise Unsupported(
                "state is true, but this server does not tell its state: parameter enable_state_requests of the "
                "model that holds the engine is false"
            )
        self._states.ask(stream)

    def _context(self, description: EngineDescription) -> ServingContext:
        exclude = self._model.parameters.exclude_input_in_output
        return ServingContext(
            description=description,
            decoupled=self._model.decoupled,
            exclude_input_in_output=description.exclude_input_from_output if exclude is None else exclude,
        )

    def _new_text(self, prompt: Prompt, naming: Naming, description: EngineDescription) -> NewText | None:
        options, request = prompt.options, prompt.request
        if "text_output" not in options.outputs and not options.stop_strings:
            return None
        needed = naming.named or options.stop_strings
        find = self._tokenizers.require if needed else self._tokenizers.find
        tokenizer = find(description.tokenizer_dir)
        if tokenizer is None:
            return None
        stop_strings = StopStrings(options.stop_strings)  # one automaton for all sequences
        return lambda: CompletionText(
            tokenizer,
            request.input_token_ids,
            options.prompt_text,
            options.include_prompt,
            stop_strings,
            self._model.parameters.skip_special_tokens,
        )

    def _refuse(self, stream: ClientStream, error: InflightError) -> None:
        try:
            stream.finish(self._responses.error(error))
        except Exception as failure:
            self._pb_utils.Logger.log_verbose(f"a refusal could not be sent: {failure!r}")
