"""The workload on llama.cpp's library through llama-cpp-python. See peer_program.py for options and output.

`--model` is a GGUF file (convert_to_gguf.py writes one), which already has weights of `--dtype`. The library
computes batches of several sequences, but the caller must fill them. Every batch has the next token of each
generating sequence, and as many tokens of the waiting prompts as fit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import llama_cpp
import numpy
from peer_program import KvCache, Request, Setting, System, main

_MAX_TOKENS_AN_ITERATION = 2048


@dataclass
class _Sequence:
    number: int
    request: Request
    waiting: list[int]
    num_computed: int = 0
    moments: list[float] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.moments) == self.request.max_tokens


class _LlamaCpp(System):
    def __init__(self, setting: Setting) -> None:
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(setting.model.encode(), parameters)
        if not self._model:
            raise SystemExit(f"--model {setting.model}: llama.cpp cannot load it; expected a GGUF file")
        self._context = llama_cpp.llama_init_from_model(self._model, _context_parameters(setting))
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.kv_cache = KvCache(llama_cpp.llama_n_ctx(self._context), value_bytes=2)
        self._batch = llama_cpp.llama_batch_init(_MAX_TOKENS_AN_ITERATION, 0, 1)

    def run(self, requests: Sequence[Request]) -> list[list[float]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        sequences = [_Sequence(number, request, request.prompt) for number, request in enumerate(requests)]
        while running := [sequence for sequence in sequences if not sequence.is_done]:
            self._step(running)
        return [sequence.moments for sequence in sequences]

    def _step(self, running: list[_Sequence]) -> None:
        rows = self._fill(running)
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status} for a batch of {self._batch.n_tokens} tokens")
        for sequence, row in rows:
            logits = llama_cpp.llama_get_logits_ith(self._context, row)
            sequence.waiting = [int(numpy.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())]
        now = time.perf_counter()
        for sequence, _ in rows:
            sequence.moments.append(now)

    def _fill(self, running: list[_Sequence]) -> list[tuple[_Sequence, int]]:
        """Fill the batch; return the sequences that get a token from it, and their rows."""
        self._batch.n_tokens = 0
        rows = []
        # Generating sequences are first, with one token each.
        for sequence in sorted(running, key=lambda sequence: not sequence.moments):
            room = _MAX_TOKENS_AN_ITERATION - self._batch.n_tokens
            tokens, sequence.waiting = sequence.waiting[:room], sequence.waiting[room:]
            for token in tokens:
                self._append(token, sequence)
            if tokens and not sequence.waiting:
                last = self._batch.n_tokens - 1
                self._batch.logits[last] = True
                rows.append((sequence, last))
        return rows

    def _append(self, token: int, sequence: _Sequence) -> None:
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row] = token
        batch.pos[row] = sequence.num_computed
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = sequence.number
        batch.logits[row] = False
        batch.n_tokens += 1
        sequence.num_computed += 1


def _context_parameters(setting: Setting):
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_seq_max = setting.max_together
    # Each sequence gets an equal part of the context, in multiples of 256 tokens.
    parameters.n_ctx = setting.max_together * -(-setting.longest // 256) * 256
    parameters.n_batch = _MAX_TOKENS_AN_ITERATION
    parameters.n_threads = parameters.n_threads_batch = setting.threads
    return parameters


if __name__ == "__main__":
    main(_LlamaCpp, "llama-cpp-python")
