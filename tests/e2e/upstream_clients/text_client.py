"""Text to `ensemble` on a gRPC stream, as end_to_end_grpc_client.py sends it."""

from __future__ import annotations

import queue
from dataclasses import dataclass

import numpy as np
import tritonclient.grpc as grpc

from inflight.server.launch import TritonServer

from .wire import TENSORS_OF_PERF_METRICS, connect, flag, integer, real, requested, tensors, texts


@dataclass(frozen=True)
class Flags:
    """Command line options, with their defaults.

    Attributes:
        embedding_bias_words, embedding_bias_weights: None: not sent. The program that compares speculative
            decoding with a control sends empty ones, [1, 0].
        batch_inputs: Whether all prompts are sent in one request.
    """

    output_len: int = 100
    streaming: bool = False
    beam_width: int = 1
    temperature: float = 1.0
    num_return_sequences: int | None = None
    bad_words: tuple[str, ...] = ()
    stop_words: tuple[str, ...] = ()
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    embedding_bias_words: tuple[str, ...] | None = None
    embedding_bias_weights: tuple[float, ...] | None = None
    end_id: int | None = None
    pad_id: int | None = None
    exclude_input_in_output: bool = False
    return_perf_metrics: bool = False
    batch_inputs: bool = False
    request_id: str = ""
    model_name: str = "ensemble"


@dataclass
class Answers:
    """Texts [prompts × sequences] in order, and the optional outputs of each response as they arrived."""

    texts: list[str]
    outputs: list[dict[str, np.ndarray]]


def inputs_of(prompt: str, flags: Flags) -> dict[str, np.ndarray]:
    """Return the tensors of a request with one prompt."""
    arrays = {
        "text_input": texts(prompt),
        "max_tokens": integer(flags.output_len),
        "stream": flag(flags.streaming),
        "beam_width": integer(flags.beam_width),
        "temperature": real(flags.temperature),
    }
    if flags.num_return_sequences is not None:
        arrays["num_return_sequences"] = integer(flags.num_return_sequences)
    for name in ("bad_words", "stop_words"):
        if getattr(flags, name):
            arrays[name] = texts(*getattr(flags, name))
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(flags, name) is not None:
            arrays[name] = real(getattr(flags, name))
    for name in ("return_log_probs", "return_context_logits", "return_generation_logits"):
        if getattr(flags, name):
            arrays[name] = flag(True)
    if flags.embedding_bias_words is not None:
        arrays["embedding_bias_words"] = texts(*flags.embedding_bias_words)
        arrays["embedding_bias_weights"] = np.array([flags.embedding_bias_weights], np.float32)
    for name in ("end_id", "pad_id"):
        if getattr(flags, name) is not None:
            arrays[name] = integer(getattr(flags, name))
    arrays["exclude_input_in_output"] = flag(flags.exclude_input_in_output)
    if flags.return_perf_metrics:
        arrays["return_perf_metrics"] = flag(True)
    return arrays


def outputs_of(flags: Flags) -> list[str]:
    """Return the names of the outputs to request."""
    names = ["text_output"]
    if flags.return_log_probs:
        names += ["cum_log_probs", "output_log_probs"]
    if flags.return_context_logits:
        names.append("context_logits")
    if flags.return_generation_logits:
        names.append("generation_logits")
    if (flags.num_return_sequences or 1) > 1:
        names.append("sequence_index")
    if flags.batch_inputs:
        names.append("batch_index")
    if flags.return_perf_metrics:
        names += TENSORS_OF_PERF_METRICS
    return names


def run(server: TritonServer, prompts: list[str], flags: Flags) -> Answers:
    """Send one request for each prompt, or one for all; raises an error response."""
    requests = [inputs_of(prompt, flags) for prompt in prompts]
    if flags.batch_inputs:
        requests = [{name: np.concatenate([one[name] for one in requests]) for name in requests[0]}]
    answers = Answers([], [])
    with connect(server, "grpc") as client:
        for arrays in requests:
            received: queue.Queue = queue.Queue()
            client.start_stream(callback=lambda result, error, into=received: into.put(error or result))
            client.async_stream_infer(
                flags.model_name,
                tensors(grpc, arrays),
                outputs=requested(grpc, outputs_of(flags)),
                request_id=flags.request_id,
            )
            client.stop_stream()
            _read(answers, flags, received, len(arrays["text_input"]))
    return answers


def _read(answers: Answers, flags: Flags, received: queue.Queue, batch_size: int) -> None:
    found = [[""] * (flags.num_return_sequences or flags.beam_width) for _ in range(batch_size)]
    while not received.empty():
        result = received.get()
        if isinstance(result, Exception):
            raise result
        batch, sequence = (_index(result, name) for name in ("batch_index", "sequence_index"))
        text = result.as_numpy("text_output")[0].decode("utf-8")
        is_delta = flags.streaming and flags.beam_width == 1
        found[batch][sequence] = found[batch][sequence] + text if is_delta else text
        answers.outputs.append(
            {
                o.name: result.as_numpy(o.name)
                for o in result.get_response().outputs
                if o.name != "text_output"
            }
        )
        if flags.return_perf_metrics:
            for name in TENSORS_OF_PERF_METRICS:
                assert np.isscalar(result.as_numpy(name)[0][0]), name
    answers.texts += [text for of_prompt in found for text in of_prompt]


def _index(result, name: str) -> int:
    values = result.as_numpy(name)
    return 0 if values is None else values[0][0]
