"""The three steps by hand, beside `ensemble`, with unary requests, as end_to_end_test.py sends them."""

from __future__ import annotations

import queue
from dataclasses import dataclass

import numpy as np

from inflight.server.launch import TritonServer

from .wire import LIBRARIES, TIMEOUT_S, connect, flag, integer, requested, tensors, texts


@dataclass(frozen=True)
class Flags:
    """Command line options."""

    protocol: str = "http"
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False

    def asked(self) -> dict[str, np.ndarray]:
        """Return the tensors that request more outputs."""
        names = ("return_log_probs", "return_context_logits", "return_generation_logits")
        return {name: flag(True) for name in names if getattr(self, name)}

    def outputs(self) -> list[str]:
        """Return the names of the outputs to read from the ensemble's response."""
        names = ["text_output"]
        if self.return_log_probs:
            names += ["cum_log_probs", "output_log_probs"]
        if self.return_context_logits:
            names.append("context_logits")
        if self.return_generation_logits:
            names.append("generation_logits")
        return names


def ensemble_inputs(prompt: str, output_len: int) -> dict[str, np.ndarray]:
    """Return text and number of tokens; an empty string means no words."""
    return {
        "text_input": texts(prompt),
        "max_tokens": integer(output_len),
        "bad_words": texts(""),
        "stop_words": texts(""),
    }


def compare(server: TritonServer, prompt: str, output_len: int, vocab_size: int, flags: Flags) -> str:
    """Check that the steps and the ensemble give the same text, and return it."""
    with connect(server, flags.protocol) as client:

        def infer(model: str, arrays: dict[str, np.ndarray], outputs: list[str] | None = None):
            library = LIBRARIES[flags.protocol]
            wanted = requested(library, outputs or ())
            return client.infer(model, tensors(library, arrays), outputs=wanted, request_id="0")

        prepared = infer("preprocessing", preprocessing_inputs(prompt, output_len))
        by_hand = infer("tensorrt_llm", engine_inputs(prepared) | flags.asked())
        text = infer("postprocessing", postprocessing_inputs(by_hand)).as_numpy("OUTPUT")
        whole = infer("ensemble", ensemble_inputs(prompt, output_len) | flags.asked(), flags.outputs())
    assert text.shape == whole.as_numpy("text_output").shape == (1,)
    assert text == whole.as_numpy("text_output")
    num_prompt_tokens = prepared.as_numpy("INPUT_ID").size
    shapes = {
        "cum_log_probs": (1, 1),
        "output_log_probs": (1, 1, output_len),
        "context_logits": (1, num_prompt_tokens, vocab_size),
        "generation_logits": (1, 1, output_len, vocab_size),
    }
    for name in flags.outputs()[1:]:
        assert whole.as_numpy(name).shape == shapes[name], name
        np.testing.assert_allclose(by_hand.as_numpy(name), whole.as_numpy(name), rtol=1e-2, atol=1e-2)
    return text[0].decode("utf-8")


def preprocessing_inputs(prompt: str, output_len: int) -> dict[str, np.ndarray]:
    """Return the inputs, with two empty dictionaries like most requests."""
    return {
        "QUERY": texts(prompt),
        "BAD_WORDS_DICT": texts(""),
        "STOP_WORDS_DICT": texts(""),
        "REQUEST_OUTPUT_LEN": integer(output_len),
    }


def engine_inputs(prepared) -> dict[str, np.ndarray]:
    """Return the inputs; `decoder_input_ids` is sent to models without an encoder too."""
    names = {
        "input_ids": "INPUT_ID",
        "decoder_input_ids": "DECODER_INPUT_ID",
        "input_lengths": "REQUEST_INPUT_LEN",
        "request_output_len": "REQUEST_OUTPUT_LEN",
        "end_id": "OUT_END_ID",
        "pad_id": "OUT_PAD_ID",
    }
    arrays = {name: prepared.as_numpy(source) for name, source in names.items()}
    missing = [names[name] for name, array in arrays.items() if array is None]
    assert not missing, f"preprocessing did not return {missing}"
    return arrays


def postprocessing_inputs(answer) -> dict[str, np.ndarray]:
    """Return the ids and their number."""
    return {
        "TOKENS_BATCH": answer.as_numpy("output_ids").astype(np.int32),
        "SEQUENCE_LENGTH": answer.as_numpy("sequence_length"),
    }


def measure(server: TritonServer, prompts: list[str], output_lens: list[int], protocol: str) -> list[str]:
    """Send up to ten requests one by one, then all at once; return the texts of the latter in order."""
    library = LIBRARIES[protocol]
    with connect(server, protocol, concurrency=128) as client:
        outputs = requested(library, ["text_output"])
        for number in range(min(10, len(prompts))):
            inputs = tensors(library, ensemble_inputs(prompts[0], output_lens[0]))
            client.infer("ensemble", inputs, outputs=outputs, request_id=str(number))
        answers: queue.Queue = queue.Queue()
        calls = []
        for number, (prompt, length) in enumerate(zip(prompts, output_lens, strict=True)):
            inputs = tensors(library, ensemble_inputs(prompt, length))
            common = {"outputs": outputs, "request_id": str(number)}
            if protocol == "grpc":
                common["callback"] = lambda result, error: answers.put(error or result)
            calls.append(client.async_infer("ensemble", inputs, **common))
        if protocol == "grpc":
            results = [answers.get(timeout=TIMEOUT_S) for _ in calls]
            for result in results:
                if isinstance(result, Exception):
                    raise result
            results.sort(key=lambda result: int(result.get_response().id))
        else:
            results = [call.get_result() for call in calls]
    return [result.as_numpy("text_output")[0].decode() for result in results]
