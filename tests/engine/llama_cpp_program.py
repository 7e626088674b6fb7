"""Prints llama.cpp's greedy tokens for prompts, with GGUF files of several types: see test_gguf.py.

Runs in an environment with llama-cpp-python. The first argument is JSON: `source`, a GGUF file in F32; `files`, to
be quantized from it, each with the number of its type; `prompts`, lists of token ids; and `num_tokens`. Prints the
tokens of each prompt, by file.
"""

from __future__ import annotations

import json
import sys
from ctypes import byref, c_void_p
from typing import Any

import llama_cpp as library

_FLOAT32 = 0  # ggml's number of the type


def main() -> None:
    """Quantize the files, and print JSON."""
    given = json.loads(sys.argv[1])
    library.llama_backend_init()
    for path, kind in given["files"].items():
        parameters = library.llama_model_quantize_default_params()
        parameters.ftype, parameters.nthread = kind, 1
        status = library.llama_model_quantize(given["source"].encode(), path.encode(), byref(parameters))
        assert status == 0, path
    paths = [given["source"], *given["files"]]
    print(json.dumps({path: _answers(path, given["prompts"], given["num_tokens"]) for path in paths}))


def _answers(path: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
    assert model, path
    parameters = library.llama_context_default_params()
    parameters.n_ctx, parameters.n_threads, parameters.n_threads_batch = 512, 1, 1
    parameters.type_k = parameters.type_v = _FLOAT32
    parameters.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = library.llama_init_from_model(model, parameters)
    size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    found = [_generate(context, size, prompt, num_tokens) for prompt in prompts]
    library.llama_free(context)
    library.llama_model_free(model)
    return found


def _generate(context: c_void_p, vocab_size: int, prompt: list[int], num_tokens: int) -> list[int]:
    library.llama_memory_clear(library.llama_get_memory(context), True)
    found: list[int] = []
    given: list[int] = prompt
    while len(found) < num_tokens:
        ids: Any = (library.llama_token * len(given))(*given)
        assert library.llama_decode(context, library.llama_batch_get_one(ids, len(given))) == 0
        logits = library.llama_get_logits_ith(context, -1)
        found.append(max(range(vocab_size), key=logits.__getitem__))
        given = found[-1:]
    return found


main()
