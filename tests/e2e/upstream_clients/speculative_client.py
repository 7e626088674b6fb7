"""Drafts from one model, verified by another, coordinated by the client, as in speculative_decoding_test.py.

Every step is a unary request: preprocessing, then drafts and verifications in turn, then postprocessing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tritonclient.grpc as grpc

from inflight.server.launch import TritonServer

from .wire import connect, flag, integer, real, tensors, texts


class Coordinator:
    """A client for one prompt; the same server drafts and verifies."""

    def __init__(self, server: TritonServer, stop_words: Sequence[str] = (), return_logits: str = "") -> None:
        """`return_logits` is "draft", "target" or "": the model whose logits are requested too."""
        self._server = server
        self._stop_words = stop_words
        self._return_logits = return_logits
        self.num_verified: list[int] = []

    def run(self, prompt: str, output_len: int, num_draft_tokens: int, request_id: str) -> str:
        """Return the text of prompt and completion."""
        with connect(self._server, "grpc") as client:

            def infer(model: str, arrays: dict[str, np.ndarray]):
                return client.infer(model, tensors(grpc, arrays), request_id=request_id)

            words = {"STOP_WORDS_DICT": texts(*self._stop_words)} if self._stop_words else {}
            query = {"QUERY": texts(prompt), "REQUEST_OUTPUT_LEN": integer(output_len)}
            prepared = infer("preprocessing", query | words)
            ids = self._complete(infer, prepared, output_len, num_draft_tokens)
            steps = {"TOKENS_BATCH": ids[np.newaxis, np.newaxis], "SEQUENCE_LENGTH": integer(len(ids))}
            return infer("postprocessing", steps).as_numpy("OUTPUT")[0].decode("utf8")

    def _complete(self, infer, prepared, output_len: int, num_draft_tokens: int) -> np.ndarray:
        ids = np.squeeze(prepared.as_numpy("INPUT_ID"), axis=0)
        whole = len(ids) + output_len
        drafted = None
        while True:
            draft_len = min(num_draft_tokens, whole - len(ids) - 1)
            draft = None
            if draft_len > 0:
                answer = infer("tensorrt_llm", self._inputs(prepared, ids, draft_len, None, "draft"))
                drafted, length = self._read(answer, "draft")
                draft = drafted[len(ids) : length]
            length = len(draft) + 1 if draft is not None else 1
            verified, _ = self._read(
                infer("tensorrt_llm", self._inputs(prepared, ids, length, draft, "target")), "target"
            )
            before, ids = ids, verified
            self.num_verified.append(len(ids) - len(before))
            if len(ids) >= whole or np.array_equal(drafted, ids) or np.array_equal(before, ids):
                return ids
            if any(np.array_equal(ids[-len(row) :], row) for row in prepared.as_numpy("STOP_WORDS_IDS")[0]):
                return ids

    def _inputs(self, prepared, ids: np.ndarray, output_len: int, draft, role: str) -> dict[str, np.ndarray]:
        arrays = {
            "input_ids": ids[np.newaxis],
            "input_lengths": integer(len(ids)),
            "request_output_len": integer(output_len),
            "bad_words_list": prepared.as_numpy("BAD_WORDS_IDS"),
            "stop_words_list": prepared.as_numpy("STOP_WORDS_IDS"),
            "beam_width": integer(1),
            "temperature": real(1.0),
        }
        if draft is not None:
            arrays["draft_input_ids"] = np.array([draft], np.int32)
        arrays["end_id"] = prepared.as_numpy("OUT_END_ID")
        arrays["pad_id"] = prepared.as_numpy("OUT_PAD_ID")
        if role == self._return_logits:
            arrays["return_generation_logits"] = flag(True)
        return arrays

    def _read(self, answer, role: str) -> tuple[np.ndarray, int]:
        lengths = answer.as_numpy("sequence_length")
        assert lengths.shape == (1, 1)
        if role == self._return_logits:
            assert answer.as_numpy("generation_logits").squeeze(0).ndim == 3
        return np.squeeze(answer.as_numpy("output_ids"), axis=(0, 1)), lengths[0, 0]
