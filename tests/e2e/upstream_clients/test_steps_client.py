"""Preprocessing, the engine and postprocessing by hand give the ensemble's text, over unary HTTP and gRPC."""

from __future__ import annotations

import numpy as np
import pytest

from . import steps_client
from .steps_client import Flags, compare
from .wire import LIBRARIES, connect, integer, tensors, texts

PROMPTS = ["def read_lines(path):\n", "import os\n", "class Reader:\n    def __init__(self, path):\n"]
OUTPUT_LENS = [6, 12, 9]
VOCABULARY = 3072
ALL = {"return_log_probs": True, "return_context_logits": True, "return_generation_logits": True}


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("asked", [{}, ALL], ids=["text", "logits"])
def test_steps_by_hand_give_the_ensembles_text(unary_server, protocol, asked):
    for prompt, length in zip(PROMPTS, OUTPUT_LENS, strict=True):
        text = compare(unary_server, prompt, length, VOCABULARY, Flags(protocol, **asked))
        assert text.startswith(prompt) and len(text) > len(prompt)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_concurrent_requests_give_the_same_texts_as_single_ones(unary_server, protocol):
    apart = [
        compare(unary_server, prompt, length, VOCABULARY, Flags(protocol))
        for prompt, length in zip(PROMPTS, OUTPUT_LENS, strict=True)
    ]
    assert steps_client.measure(unary_server, PROMPTS, OUTPUT_LENS, protocol) == apart


def preprocess(server, **more: np.ndarray):
    library = LIBRARIES["http"]
    query = {"QUERY": texts(PROMPTS[0]), "REQUEST_OUTPUT_LEN": integer(8)}
    with connect(server, "http") as client:
        return client.infer("preprocessing", tensors(library, query | more))


def test_preprocessing_returns_the_outputs_that_clients_read(demo_server, tokenizer):
    prepared = preprocess(demo_server)
    ids = tokenizer.encode(PROMPTS[0])
    found = {
        name: prepared.as_numpy(name)
        for name in (
            "INPUT_ID",
            "REQUEST_INPUT_LEN",
            "REQUEST_OUTPUT_LEN",
            "DECODER_INPUT_ID",
            "REQUEST_DECODER_INPUT_LEN",
            "OUT_END_ID",
            "OUT_PAD_ID",
        )
    }
    assert {name: None if array is None else array.tolist() for name, array in found.items()} == {
        "INPUT_ID": [ids],
        "REQUEST_INPUT_LEN": [[len(ids)]],
        "REQUEST_OUTPUT_LEN": [[8]],
        "DECODER_INPUT_ID": [[0]],  # the padding id
        "REQUEST_DECODER_INPUT_LEN": [[1]],
        "OUT_END_ID": [[0]],
        "OUT_PAD_ID": [[0]],
    }
    for name in ("BAD_WORDS_IDS", "STOP_WORDS_IDS"):
        assert prepared.as_numpy(name).shape[:2] == (1, 2)


def test_given_end_and_pad_ids_are_passed_through(demo_server):
    prepared = preprocess(demo_server, END_ID=integer(7), PAD_ID=integer(9))
    assert prepared.as_numpy("OUT_END_ID").tolist() == [[7]]
    assert prepared.as_numpy("OUT_PAD_ID").tolist() == [[9]]
    assert prepared.as_numpy("DECODER_INPUT_ID").tolist() == [[9]]


def test_biased_words_become_a_bias_that_the_engine_accepts(unary_server):
    words, weights = texts("class"), np.array([[100.0]], np.float32)
    prepared = preprocess(unary_server, EMBEDDING_BIAS_WORDS=words, EMBEDDING_BIAS_WEIGHTS=weights)
    bias = prepared.as_numpy("EMBEDDING_BIAS")
    assert bias.dtype == np.float32 and bias.shape == (1, VOCABULARY)
    assert set(np.unique(bias)) == {0.0, 100.0}
    biased = {"embedding_bias_words": words, "embedding_bias_weights": weights}
    library = LIBRARIES["http"]
    with connect(unary_server, "http") as client:
        request = steps_client.engine_inputs(prepared) | {"embedding_bias": bias}
        by_hand = client.infer("tensorrt_llm", tensors(library, request))
        request = steps_client.postprocessing_inputs(by_hand)
        text = client.infer("postprocessing", tensors(library, request)).as_numpy("OUTPUT")
        request = steps_client.ensemble_inputs(PROMPTS[0], 8) | biased
        whole = client.infer("ensemble", tensors(library, request)).as_numpy("text_output")
    assert text == whole and b"class" in text[0]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_postprocessing_returns_a_text_for_each_beam(demo_server, tokenizer, protocol):
    ids = [tokenizer.encode("x = 1\n"), tokenizer.encode("y = 2\n")]
    assert len(ids[0]) == len(ids[1])
    arrays = {
        "TOKENS_BATCH": np.array([ids], np.int32),
        "SEQUENCE_LENGTH": np.array([[len(one) for one in ids]], np.int32),
    }
    with connect(demo_server, protocol) as client:
        output = client.infer("postprocessing", tensors(LIBRARIES[protocol], arrays)).as_numpy("OUTPUT")
    assert output.tolist() == [b"x = 1\n", b"y = 2\n"]
