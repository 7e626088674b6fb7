"""Options as sent to the server, and the results that they add."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from inflight.core.request.sampling_config import CONTROLS
from inflight.tensors.input_table import INPUTS
from inflight.tensors.output_table import OUTPUTS
from inflight.tensors.spec import Vocabulary
from inflight_client import Client, Completion, Guide, PerfMetrics, Sequence, TopLogProb
from inflight_client.keywords import NAMES
from inflight_client.options import read_options
from inflight_client.tensors import generate_call
from tests.client.fake_server import Asked, FakeServer, Response, as_texts, response_of

LISTS = ("allowed_token_ids",)
OF_CONTROLS = {control.client: control for control in CONTROLS.values() if control.client}
NUMBERS = {
    **{name: control.example for name, control in OF_CONTROLS.items() if control.tensor not in LISTS},
    "pad_id": 7,
    "prompt_lookup_num_tokens": 5,
    "priority": 0.75,
    "client_id": 2**64 - 1,
    "allotted_time_ms": 900,
    "cache_salt_id": 2**63,
    "retention_decode_priority": 60,
    "retention_decode_duration_ms": 500,
}
IDS_NAMES = {name: control.tensor for name, control in OF_CONTROLS.items()}
TEXT_NAMES = {"top_p_reset_id": "top_p_reset_ids"}
# One value of each, for a vocabulary of four.
ARRAYS = {
    "embedding_bias": [0.0, 1.0, -1.0, 0.5],
    "allowed_token_ids": [3, 9],
    "logit_bias": {3: 1.5, 9: float("-inf")},
    "draft_input_ids": [1, 2],
    "draft_logits": np.zeros((2, 4)),
    "draft_acceptance_threshold": 0.5,
    "stop_words": [[5, 7], "end"],
    "bad_words": np.array([[5], [1]]),
    "retention_token_ranges": [(0, 2, 90)],
    "guide": Guide("regex", "[ab]+"),
    "lora": 7,
    "lora_weights": (np.zeros((2, 6), np.float16), [[0, 0, 1], [4, 1, 1]]),
    "prompt_table": np.zeros((2, 3), np.float16),
    "prompt_table_extra_ids": [2**64 - 1, 0],
}
RANGE_PARTS = ("starts", "ends", "priorities", "durations_ms")
FLAGS = {
    "return_log_probs": True,
    "num_top_log_probs": 2,
    "return_prompt_log_probs": True,
    "return_context_logits": True,
    "return_generation_logits": True,
    "return_perf_metrics": True,
    "return_receipt": True,
}
ADDITIONAL = {"additional_outputs": ["context_last_hidden_state", "generation_top_2_logits"]}
OTHERS = {
    "max_tokens": 1,
    "end_id": 1,
    "logits_post_processor_name": "upper",
}


@pytest.fixture
def client(server: FakeServer) -> Client:
    return Client(server.url)


# -------------------------------------------------------------------- requests


def test_numbers_are_sent_under_the_text_models_names(server, client) -> None:
    client.generate("x", **NUMBERS)
    (asked,) = server.asked
    assert asked.model == "ensemble"
    for name, value in NUMBERS.items():
        assert asked.inputs[TEXT_NAMES.get(name, name)] == [value]


def test_numbers_are_sent_under_the_id_models_names(server, client) -> None:
    client.generate([5], **NUMBERS)
    (asked,) = server.asked
    assert asked.model == "tensorrt_llm"
    for name, value in NUMBERS.items():
        assert asked.inputs[IDS_NAMES.get(name, name)] == [value]
    assert all(shape == [1, 1] for shape in asked.shapes.values())


TABLE = [[0.5, -1.0, 3.0], [2.0, 0.25, -4.0]]
"""Values that are exact in every floating-point type."""


@pytest.mark.parametrize(
    ("table", "data_type"),
    [
        (np.array(TABLE, np.float16), "FP16"),
        (np.array(TABLE, np.float32), "FP32"),
        (torch.tensor(TABLE), "FP32"),
        (torch.tensor(TABLE).half().requires_grad_(), "FP16"),
        (torch.tensor(TABLE).bfloat16(), "BF16"),
        (torch.tensor(TABLE).bfloat16().T.contiguous().T, "BF16"),
        (TABLE, "FP16"),
        (np.array([TABLE], np.float64), "FP16"),
    ],
)
@pytest.mark.parametrize("prompt", ["x", [5, 1000]])
def test_a_prompt_table_is_sent_in_its_own_type(prompt, table, data_type) -> None:
    call = generate_call(prompt, False, {"prompt_table": table})
    sent = {tensor.name(): tensor for tensor in call.inputs}
    assert call.model == ("ensemble" if prompt == "x" else "tensorrt_llm")
    tensor = sent["prompt_embedding_table"]
    assert (tensor.datatype(), tensor.shape()) == (data_type, [1, 2, 3])
    bits = np.array(TABLE, np.float32).view(np.uint32) >> 16
    expected = {
        "FP16": np.array(TABLE, np.float16), "FP32": np.array(TABLE, np.float32), "BF16": bits.astype(np.uint16),
    }  # fmt: skip
    assert tensor._get_content() == expected[data_type].tobytes()
    assert sent["prompt_vocab_size"]._get_content() == np.int32(2).tobytes()


@pytest.mark.parametrize("table", [[1.0, 2.0], [[1.0], [2.0, 3.0]], "x", np.zeros((2, 3, 4)), 5])
def test_a_malformed_prompt_table_is_refused(table) -> None:
    with pytest.raises(ValueError, match="prompt_table"):
        read_options({"prompt_table": table})


def test_the_tables_here_have_every_option() -> None:
    assert set(NAMES) == {*NUMBERS, *ARRAYS, *FLAGS, *OTHERS, *ADDITIONAL}


def test_options_have_the_types_and_shapes_that_the_server_declares() -> None:
    read = read_options({**NUMBERS, **ARRAYS, **FLAGS, **OTHERS})
    kinds = {
        "FP16": "float16",
        "INT32": "int32",
        "FP32": "float32",
        "UINT64": "uint64",
        "BOOL": "bool",
        "BYTES": "object",
    }
    for tensors, vocabulary in ((read.text, Vocabulary.TEXT), (read.ids, Vocabulary.TOKENS)):
        declared = dict(INPUTS.declared(vocabulary))
        for name, array in tensors.items():
            assert array.dtype == kinds[declared[name].dtype], name
            dims = declared[name].dims or (1,)
            assert all(want in (-1, got) for want, got in zip(dims, array.shape[1:])), name
    names = {name for vocabulary in Vocabulary for name, _ in OUTPUTS.declared(vocabulary)}
    assert set(read.outputs) <= names


@pytest.mark.parametrize(("other", "name"), [("len_penalty", "length_penalty"), ("min_tokens", "min_length")])
def test_the_servers_aliases_of_options_are_accepted(other: str, name: str) -> None:
    assert read_options({other: 2}).text.keys() == read_options({name: 2}).text.keys()


@pytest.mark.parametrize("prompt", ["x", [5]])
def test_lora_is_sent_as_a_name_or_an_id(server, client, prompt) -> None:
    client.generate(prompt, lora="sql")
    client.generate(prompt, lora=2**64 - 1)
    by_name, by_id = server.asked
    assert by_name.inputs["lora_name"] == ["sql"] and "lora_task_id" not in by_name.inputs
    assert by_id.inputs["lora_task_id"] == [2**64 - 1] and "lora_name" not in by_id.inputs
    for lora in (1.5, True, ["sql"], -1, 2**64):
        with pytest.raises(ValueError, match="lora"):
            client.generate(prompt, lora=lora)


WEIGHTS, ROWS = np.arange(12, dtype=np.float32).reshape(2, 6) / 8, np.array([[0, 0, 1], [4, 1, 1]])


@pytest.mark.parametrize(("dtype", "datatype"), [(np.float32, "FP32"), (np.float16, "FP16")])
def test_lora_weights_are_sent_in_their_own_type(server, client, dtype, datatype) -> None:
    client.generate("x", lora=7, lora_weights=(WEIGHTS.astype(dtype), ROWS))
    (asked,) = server.asked
    assert asked.dtypes["lora_weights"] == datatype and asked.shapes["lora_weights"] == [1, 2, 6]
    assert asked.inputs["lora_weights"] == WEIGHTS.ravel().tolist()
    assert (asked.shapes["lora_config"], asked.inputs["lora_config"]) == ([1, 2, 3], ROWS.ravel().tolist())


def test_bfloat16_weights_are_sent_unchanged() -> None:
    bits = (WEIGHTS.view(np.uint32) >> 16).astype(np.uint16)  # exact: the values have few digits
    call = generate_call([5], False, {"lora": 7, "lora_weights": (bits.view("V2"), ROWS[None])})
    (tensor,) = [each for each in call.inputs if each.name() == "lora_weights"]
    assert (tensor.datatype(), tensor.shape()) == ("BF16", [1, 2, 6])
    assert tensor._get_content() == bits.tobytes()


@pytest.mark.parametrize(
    ("lora", "weights", "message"),
    [
        ("sql", (WEIGHTS, ROWS), "lora must be one, got 'sql'"),
        (None, (WEIGHTS, ROWS), "lora must be one, got None"),
        (7, WEIGHTS, "must be two arrays"),
        (7, (WEIGHTS.astype(np.float64), ROWS), "must be float16, float32 or bfloat16, got float64"),
        (7, (WEIGHTS[0], ROWS), "lora_weights must be a 2-dimensional array"),
        (7, (WEIGHTS, ROWS[0]), "lora_config must be a 2-dimensional array"),
        (7, (WEIGHTS, ROWS + 0.5), "lora_config must be"),
    ],
)
def test_invalid_adapter_weights_are_refused(client, lora, weights, message) -> None:
    with pytest.raises(ValueError, match=message):
        client.generate("x", lora=lora, lora_weights=weights)


@pytest.mark.parametrize("prompt", ["x", [5]])
def test_a_guide_is_sent_as_its_type_and_an_optional_text(server, client, prompt) -> None:
    client.generate(prompt, guide=Guide.json_schema({"type": "null"}))
    client.generate(prompt, guide=Guide("json"))
    schema, json = (asked.inputs for asked in server.asked)
    assert schema["guided_decoding_guide_type"] == ["json_schema"]
    assert schema["guided_decoding_guide"] == ['{"type": "null"}']
    assert json["guided_decoding_guide_type"] == ["json"] and "guided_decoding_guide" not in json
    with pytest.raises(ValueError, match=r"one of json, json_schema, .*, got 'xml'"):
        Guide("xml")


@pytest.mark.parametrize("prompt", ["x", [5]])
@pytest.mark.parametrize("words", ["end", ["end", "\n\n"]])
def test_stop_and_bad_words_may_be_strings(server, client, prompt, words) -> None:
    client.generate(prompt, stop_words=words, bad_words=words)
    (asked,) = server.asked
    wanted = [words] if isinstance(words, str) else words
    assert asked.inputs["stop_words"] == asked.inputs["bad_words"] == wanted
    assert asked.shapes["stop_words"] == [1, len(wanted)]


LAYOUT = [[5, 7, 3, 9, 2], [3, 5, -1, -1, -1]]


@pytest.mark.parametrize(
    "words",
    [[[5, 7, 3], (9, 2)], [[5, 7, 3], np.array([9, 2])], np.array(LAYOUT), np.array([LAYOUT])],
    ids=["lists", "arrays", "[2, n]", "[1, 2, n]"],
)
def test_stop_words_may_be_lists_or_arrays_of_ids(server, client, words) -> None:
    client.generate([5], stop_words=words)
    (asked,) = server.asked
    assert asked.inputs["stop_words_list"] == LAYOUT[0] + LAYOUT[1]
    assert (asked.shapes["stop_words_list"], asked.dtypes["stop_words_list"]) == ([1, 2, 5], "INT32")
    assert "stop_words" not in asked.inputs


def test_bad_words_may_mix_strings_and_ids(server, client) -> None:
    client.generate([5], bad_words=["no", [7]])
    (asked,) = server.asked
    assert asked.inputs["bad_words"] == ["no"]
    assert asked.inputs["bad_words_list"] == [7, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([5, 7], r"texts or lists of token ids, such as \['word', \[5, 7\]\], got \[5, 7\]"),
        ([[5], []], "has an empty word"),
        ([[5.5]], "must be integers|must be an integer"),
        ([b"end"], "must be texts or lists of token ids"),
        (LAYOUT, r"has \[3, 5, -1, -1, -1\] for a word, .* has to be a numpy array here"),
        ([LAYOUT], r"for a word, .* has to be a numpy array here"),
        (np.zeros((3, 4), np.int32), r"two rows, shape \[2, n\] or \[1, 2, n\], got \[3, 4\]"),
        (np.zeros(4, np.int32), r"2-dimensional array, got the shape \[4\]"),
    ],
)
def test_invalid_words_are_not_sent(server, client, words, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        client.generate("x", stop_words=words)
    assert not server.asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": 1e39}, r"temperature must be in \[-3.403e\+38, 3.403e\+38\], got \[1e\+39\]"),
        ({"logit_bias": {5: 1e39}}, r"logit_bias_values must be in \[-3.403e\+38"),
        ({"stop_words": 5}, r"stop_words must be texts or lists of token ids, .*got 5"),
        ({"additional_outputs": 5}, "additional_outputs must be names of outputs, .*got 5"),
        ({"temperature": [0.5, 1.0]}, r"temperature must be a number, got \[0.5, 1.0\]"),
        ({"end_id": [1, 2]}, "end_id must be a number"),
        ({"logits_post_processor_name": 5}, "logits_post_processor_name must be a text, got 5"),
        ({"return_log_probs": "no"}, "return_log_probs must be True or False, got 'no'"),
        ({"return_log_probs": 2}, "return_log_probs must be True or False, got 2"),
        ({"logit_bias": [5, 1.0]}, "logit_bias must be a dict by token id of what is added to the logits"),
        ({"logit_bias": {"yes": 1.0}}, "logit_bias_ids must be an integer, got 'yes'"),
        ({"logit_bias": {2**31: 1.0}}, "logit_bias_ids must be in"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be"),
        ({"embedding_bias": {5: 1.0}}, "embedding_bias must be a dict of weights by text"),
        ({"embedding_bias": {"yes": "much"}}, "embedding_bias_weights must be made of numbers"),
        (
            {"retention_token_ranges": [(0, 2)]},
            r"retention_token_ranges must be ranges \(start, end, priority\)",
        ),
        ({"retention_token_ranges": 5}, "retention_token_ranges must be ranges"),
        ({"retention_token_ranges": [0, 2, 90]}, "retention_token_ranges must be ranges"),
        ({"retention_token_ranges": [(0, 2, 0.5)]}, "retention_token_range_priorities must be an integer"),
        ({"client_id": -1}, "client_id must be in"),
        ({"guide": "[ab]+"}, "guide must be a Guide such as"),
        (
            {"draft_logits": [[0.0], [0.0, 1.0]]},
            "draft_logits must be made of numbers, in rows of one length",
        ),
    ],
)
def test_invalid_values_are_not_sent(server, client, options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        client.generate("x", **options)
    assert not server.asked


def test_drafts_and_an_embedding_bias_are_sent_with_their_shapes(server, client) -> None:
    logits = np.arange(8, dtype=np.float64).reshape(2, 4)
    client.generate(
        [5],
        embedding_bias=[0, 1, -1, 0.5],
        draft_input_ids=[1, 2],
        draft_logits=logits,
        draft_acceptance_threshold=0.5,
    )
    (asked,) = server.asked
    assert asked.inputs["embedding_bias"] == [0.0, 1.0, -1.0, 0.5]
    assert asked.inputs["draft_logits"] == list(range(8))
    names = ("embedding_bias", "draft_input_ids", "draft_logits", "draft_acceptance_threshold")
    assert [asked.shapes[name] for name in names] == [[1, 4], [1, 2], [1, 2, 4], [1, 1]]


@pytest.mark.parametrize(("prompt", "model"), [("x", "ensemble"), ([5], "tensorrt_llm")])
def test_allowed_tokens_and_a_logit_bias_are_sent_as_ids(server, client, prompt, model) -> None:
    client.generate(prompt, allowed_token_ids=(7, 3), logit_bias={9: 2.5, 4: float("-inf")})
    (asked,) = server.asked
    assert asked.model == model
    assert asked.inputs["allowed_token_ids"] == [7, 3]
    assert asked.inputs["logit_bias_ids"] == [9, 4]
    assert asked.inputs["logit_bias_values"] == [2.5, float("-inf")]


@pytest.mark.parametrize("prompt", ["x", [5]])
def test_retention_has_a_tensor_for_each_part_of_a_range(server, client, prompt) -> None:
    client.generate(prompt, retention_token_ranges=[(0, 32, 90), (32, None, 10, 5000)])
    (asked,) = server.asked
    sent = {name: asked.inputs[f"retention_token_range_{name}"] for name in RANGE_PARTS}
    assert sent == {"starts": [0, 32], "ends": [32, -1], "priorities": [90, 10], "durations_ms": [-1, 5000]}
    assert asked.shapes["retention_token_range_starts"] == [1, 2]


def test_empty_ranges_send_no_tensors(server, client) -> None:
    client.generate("x", retention_token_ranges=[])
    assert not any(name.startswith("retention") for name in server.asked[0].inputs)


def test_a_bias_of_words_is_sent_to_the_ensemble(server, client) -> None:
    client.generate("x", embedding_bias={"yes": 2.0, "no": -2.0})
    (asked,) = server.asked
    assert asked.model == "ensemble"
    assert asked.inputs["embedding_bias_words"] == ["yes", "no"]
    assert asked.inputs["embedding_bias_weights"] == [2.0, -2.0]


@pytest.mark.parametrize(
    "options",
    [
        {"stop_words": [[5]]},
        {"embedding_bias": [0.0] * 4},
        {"draft_input_ids": [1]},
        {"beam_width": 2, "return_log_probs": True},
    ],
)
def test_a_text_with_tensors_that_ensemble_lacks_goes_to_the_id_model(server, client, options) -> None:
    assert client.generate("x", **options).text == "abc"
    (asked,) = server.asked
    assert asked.model == "tensorrt_llm"
    assert asked.inputs["text_input"] == ["x"] and "request_output_len" in asked.inputs


def test_a_model_that_lacks_a_tensor_gets_no_request(server) -> None:
    text_client = Client(server.url, model="ensemble")
    with pytest.raises(ValueError, match="ensemble does not take draft_input_ids: tensorrt_llm does"):
        text_client.generate("x", draft_input_ids=[1])
    with pytest.raises(
        ValueError, match="ensemble does not return the length of each beam: tensorrt_llm does"
    ):
        text_client.generate("x", beam_width=2, return_log_probs=True)
    assert not server.asked


@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        ({}, []),
        ({"return_log_probs": True}, ["output_log_probs", "cum_log_probs"]),
        ({"return_log_probs": False}, []),
        ({"num_top_log_probs": 2}, ["top_log_prob_ids", "top_log_probs"]),
        ({"num_top_log_probs": 0}, []),
        ({"return_prompt_log_probs": True}, ["prompt_log_probs"]),
        ({"return_context_logits": True}, ["context_logits"]),
        ({"return_generation_logits": True}, ["generation_logits"]),
        ({"num_return_sequences": 2}, ["sequence_index"]),
        ({"num_return_sequences": 1}, []),
        ({"num_return_sequences": 2, "beam_width": 2}, []),
    ],
)
def test_options_add_their_outputs_to_the_requested_ones(server, client, options, outputs: list[str]) -> None:
    client.generate([5], **options)
    assert server.asked[0].outputs == ["output_ids", "sequence_length", "finish_reason", *outputs]


# -------------------------------------------------------------------- responses


def answer(asked: Asked, *responses: dict[str, np.ndarray]) -> Iterator[Response]:
    for outputs in responses:
        yield response_of(asked, **outputs)
    yield response_of(asked, final=True)


def ids_of(*rows: list[int], reason: str = "NOT_FINISHED", **more: np.ndarray) -> dict[str, np.ndarray]:
    """Return rows of ids, padded with -1 to the longest."""
    longest = max(map(len, rows))
    padded = [[*row, *[-1] * (longest - len(row))] for row in rows]
    return {
        "output_ids": np.array([padded], np.int32),
        "sequence_length": np.array([[len(row) for row in rows]], np.int32),
        "finish_reason": as_texts(*[reason] * len(rows)),
        **more,
    }


def floats(values: list) -> np.ndarray:
    """Return float32 values with the batch dimension, which are exact."""
    return np.array([values], np.float32)


def test_streamed_log_probs_are_concatenated(server, client) -> None:
    server.answer = lambda asked: answer(
        asked,
        ids_of([5, 6], output_log_probs=floats([[-0.5, -1.0]]), cum_log_probs=floats([-1.5])),
        ids_of([7], output_log_probs=floats([[-2.0]]), cum_log_probs=floats([-3.5]), reason="LENGTH"),
    )
    assert client.generate([1], return_log_probs=True) == Completion(
        (Sequence("", (5, 6, 7), "LENGTH", (-0.5, -1.0, -2.0), -3.5),)
    )
    deltas = list(client.stream([1], return_log_probs=True))
    assert [(d.log_probs, d.cum_log_prob) for d in deltas] == [((-0.5, -1.0), -1.5), ((-2.0,), -3.5)]


def test_top_log_probs_are_pairs_of_token_and_log_prob(server, client) -> None:
    top_ids = np.array([[[[5, 6], [7, 8]]]], np.int32)
    top = {"top_log_prob_ids": top_ids, "top_log_probs": floats([[[-0.5, -1.0], [-0.25, -2.0]]])}
    server.answer = lambda asked: answer(asked, ids_of([5, 8], reason="LENGTH", **top))
    first, second = client.generate([1], num_top_log_probs=2).top_log_probs
    assert first == (TopLogProb(5, -0.5), TopLogProb(6, -1.0))
    assert second[1].token_id == 8


def test_logits_and_prompt_log_probs_are_returned(server, client) -> None:
    context, rows = floats([[1, 2], [3, 4], [5, 6]]), floats([[[1, 2], [3, 4]]])
    prompt = {"prompt_log_probs": floats([0.0, -0.5, -1.0]), "context_logits": context}
    server.answer = lambda asked: answer(
        asked,
        ids_of([5, 6], generation_logits=rows, **prompt),
        ids_of([7], generation_logits=rows[:, :, :1], reason="LENGTH"),
    )
    done = client.generate([1, 2, 3], return_context_logits=True, return_generation_logits=True)
    assert done.prompt_log_probs == (0.0, -0.5, -1.0)
    assert done.context_logits.tolist() == context[0].tolist()
    assert done.generation_logits.tolist() == [[1, 2], [3, 4], [1, 2]]


def test_the_last_perf_metrics_of_a_stream_are_returned(server, client) -> None:
    def metrics(last: int) -> dict[str, np.ndarray]:
        numbers = {"arrival_time_ns": 5, "last_token_time_ns": last}
        made = {name: np.array([[value]], np.int64) for name, value in numbers.items()}
        return {**made, "acceptance_rate": floats([0.5])}

    server.answer = lambda asked: answer(
        asked, ids_of([5], **metrics(0)), ids_of([6], reason="LENGTH", **metrics(9))
    )
    wanted = PerfMetrics(arrival_time_ns=5, last_token_time_ns=9, acceptance_rate=0.5)
    assert client.generate([1], return_perf_metrics=True).perf_metrics == wanted


def test_responses_are_separated_by_sequence_index(server, client) -> None:
    def part(index: int, *ids: int, reason: str = "NOT_FINISHED") -> dict[str, np.ndarray]:
        return ids_of(list(ids), reason=reason, sequence_index=np.array([[index]], np.int32))

    server.answer = lambda asked: answer(
        asked, part(1, 5), part(0, 6), part(1, 7, reason="END_ID"), part(0, 8, reason="LENGTH")
    )
    done = client.generate([1], num_return_sequences=2)
    assert [(s.token_ids, s.finish_reason) for s in done.sequences] == [
        ((6, 8), "LENGTH"),
        ((5, 7), "END_ID"),
    ]
    assert done.token_ids == (6, 8)
    assert [d.sequence_index for d in client.stream([1], num_return_sequences=2)] == [1, 0, 1, 0]


def test_padding_of_shorter_beams_is_removed(server, client) -> None:
    server.answer = lambda asked: answer(
        asked,
        ids_of(
            [5, 6, 7],
            [8],
            reason="END_ID",
            output_log_probs=floats([[-0.5, -0.5, -0.5], [-2.0, 0, 0]]),
            cum_log_probs=floats([-1.5, -2.0]),
        ),
    )
    done = client.generate([1], beam_width=2, return_log_probs=True)
    assert done.sequences == (
        Sequence("", (5, 6, 7), "END_ID", (-0.5, -0.5, -0.5), -1.5),
        Sequence("", (8,), "END_ID", (-2.0,), -2.0),
    )


def test_streamed_beams_replace_one_another(server, client) -> None:
    parts = [ids_of([5], [6]), ids_of([6, 7], [5, 9], reason="LENGTH")]
    server.answer = lambda asked: answer(asked, *parts)
    deltas = list(client.stream([1], beam_width=2))
    assert all(delta.is_cumulative for delta in deltas)
    assert [[s.token_ids for s in delta.sequences] for delta in deltas] == [[(5,), (6,)], [(6, 7), (5, 9)]]
    assert deltas[-1].token_ids == (6, 7)


def test_every_beam_has_its_own_text(server, client) -> None:
    text = {"text_output": as_texts("one", "zwei")[0], "finish_reason": as_texts("END_ID", "LENGTH")}
    server.answer = lambda asked: answer(asked, text)
    assert [s.text for s in client.generate("x", beam_width=2).sequences] == ["one", "zwei"]


def test_sequences_in_one_response_are_separated(server) -> None:
    server.answer = lambda asked: answer(asked, ids_of([5, 6], [7], reason="LENGTH"))
    done = Client(server.url, model="tensorrt_llm_infer").generate([1], num_return_sequences=2)
    assert [s.token_ids for s in done.sequences] == [(5, 6), (7,)]


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("prompt", ["x", [1]])
def test_repeated_log_probs_of_a_stream_are_read_once(server, client, prompt, repeats) -> None:
    """A server may repeat the log probs of all tokens so far in every response, or not."""
    parts = [(-0.5,), (-0.25, -1.0), ()]
    so_far = [(-0.5,), (-0.5, -0.25, -1.0), (-0.5, -0.25, -1.0)]

    def tell(part: tuple[float, ...], said: tuple[float, ...], reason: str) -> dict[str, np.ndarray]:
        count = np.array([[len(part)]], np.int32)
        lengths = {"num_output_tokens": count} if prompt == "x" else {"sequence_length": count}
        log_probs = np.array([[said]], np.float32)
        return {"finish_reason": as_texts(reason), "output_log_probs": log_probs, **lengths}

    reasons = ("NOT_FINISHED", "NOT_FINISHED", "LENGTH")
    told = [tell(*each) for each in zip(parts, so_far if repeats else parts, reasons)]
    server.answer = lambda asked: answer(asked, *told)
    deltas = list(client.stream(prompt, return_log_probs=True))
    assert [delta.log_probs for delta in deltas] == parts


# -------------------------------------------------------------------- additional outputs


@pytest.mark.parametrize("prompt", ["x", [5]])
def test_additional_outputs_are_requested_by_name(server, client, prompt) -> None:
    client.generate(prompt, **ADDITIONAL)
    (asked,) = server.asked
    assert set(ADDITIONAL["additional_outputs"]) <= set(asked.outputs)
    assert "additional_outputs" not in asked.inputs


@pytest.mark.parametrize("names", [["last_hidden_state"], "logits", [3]])
def test_an_invalid_additional_output_name_is_not_sent(names) -> None:
    with pytest.raises(ValueError, match="additional_outputs must be names of outputs, context_<name> or"):
        read_options({"additional_outputs": names})
