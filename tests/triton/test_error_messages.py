"""The code and text of the error that a client gets for each invalid value of each tensor, kept in a file.

Clients match these texts. After a deliberate change, rewrite the file with
`python -m tests.triton.test_error_messages` and review its diff.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from inflight.errors import ERROR_CODES, InflightError
from inflight.serving.completion_text import TokenizerFinder
from inflight.tensors.inference_request import InferenceRequest
from inflight.tensors.input_table import INPUTS
from inflight.tensors.reader import NUMPY_TYPES
from inflight.tensors.spec import TensorSpec, Vocabulary
from inflight.triton.models.text_models import Postprocessing, Preprocessing, TextModel
from tests.tensors.factories import as_inputs, make_description, make_limits, text_inputs, token_inputs
from tests.triton.factories import make_parameters, make_triton_request, response_of
from tests.triton.fake_pb_utils import FakePbUtils, InferenceResponse, TritonError
from tests.triton.letters import letter_tokenizer
from tests.triton.stage import Stage

FILE = Path(__file__).with_name("error_messages.json")
ACCEPTED = "accepted"
WEIGHTS = np.ones([1, 2, 6], np.float16)
CONFIG = np.array([[[1, 0, 2], [3, 1, 1]]], np.int32)
TABLE = np.ones([1, 2, 8], np.float16)
LOGITS = np.zeros([1, 1, 1000], np.float32)
NONE: dict[str, object] = {"input_ids": None, "request_output_len": None}

TEXT_MODELS: dict[type[TextModel], dict[str, np.ndarray]] = {
    Preprocessing: {"QUERY": np.array([[b"abc"]], np.object_)},
    Postprocessing: {"TOKENS_BATCH": np.array([[[0, 1, 2]]], np.int32)},
}
"""Models, with the tensors that a request needs."""

# Tensors, by their names in tensorrt_llm, that are invalid together or in a special way.
COMPANIONS: list[dict[str, object]] = [
    {"input_ids": None},
    {"request_output_len": None},
    {"text_input": b"hi"},
    {"input_ids": None, "text_input": b"hi", "input_lengths": 2},
    {"input_ids": None, "text_input": b"x" * 61},
    {"input_ids": [list(range(61))]},
    {"input_ids": [[1, 2], [3, 4]]},
    {"input_ids": [[1, 2], [3, 4]], "request_output_len": [[4], [4]], "temperature": [[1.0], [-1.0]]},
    {"request_output_len": 62},
    {"seed": 1, "random_seed": 2},
    {"stop_words_list": [[[5, 6], [2, 1]]]},
    {"stop_words_list": [[[5], [2]]]},
    {"stop_words_list": [[[5, 6], [-1, 2]]]},
    {"bad_words_list": [[[1000], [1]]]},
    {"bad_words": [[b"x"] * 1025]},
    {"stop_words": [[b"x" * 40_000]]},
    {"embedding_bias": np.zeros([1, 7], np.float32)},
    {"embedding_bias": np.full([1, 1000], np.nan, np.float32)},
    {"embedding_bias_words": [[b"a", b"b"]], "embedding_bias_weights": [[1.0]]},
    {"embedding_bias_words": [[b"a", b"a"]], "embedding_bias_weights": [[3e38, 3e38]]},
    {"logit_bias_ids": [[-1]], "logit_bias_values": [[2.0]]},
    {"logit_bias_ids": [[3, 4]], "logit_bias_values": [[1.0, np.inf]]},
    {"beam_width": 2, "num_return_sequences": 3},
    {"streaming": True, "beam_width": 2, "return_generation_logits": True},
    {"draft_input_ids": [[1]], "draft_logits": LOGITS * np.nan},
    {"draft_input_ids": [[1, 2]], "draft_logits": LOGITS},
    {"draft_input_ids": [[1]], "beam_width": 2},
    {"guided_decoding_guide_type": b"regex", "guided_decoding_guide": b""},
    {"decoder_input_ids": [[7]]},
    {"prompt_embedding_table": TABLE, "prompt_vocab_size": 3},
    {"prompt_embedding_table": TABLE * np.float16(np.nan)},
    {"prompt_table_extra_ids": [[1, 2]], "prompt_embedding_table": TABLE, "input_ids": [[1000, 5, 6]]},
    {"lora_weights": WEIGHTS, "lora_config": CONFIG},
    {"lora_task_id": 1, "lora_weights": WEIGHTS},
    {"lora_task_id": 1, "lora_config": CONFIG},
    {"lora_task_id": 1, "lora_name": b"sql"},
    {"lora_path": b"x", "lora_weights": WEIGHTS, "lora_config": CONFIG},
    {"lora_task_id": 1, "lora_weights": WEIGHTS, "lora_config": CONFIG[:, :1]},
    {"lora_task_id": 1, "lora_weights": WEIGHTS, "lora_config": CONFIG[:, :, :2]},
    {"lora_command": b'{"command": "load"}'},
    {"lora_command": b'{"command": "list", "name": "a"}'},
    {"lora_command": b'{"command": "unload", "task_id": -1}'},
    {"lora_command": np.array([b"{}"] * 2, np.object_), **NONE},
    {"retention_token_range_starts": [[0, 2]]},
    {"retention_token_range_ends": [[2]]},
    {
        "retention_token_range_starts": [[0, 2]],
        "retention_token_range_ends": [[2]],
        "retention_token_range_priorities": [[1, 2]],
    },
    {"additional_outputs": [[b"context_hidden"]]},
    {"stop": np.array([True, False]), "request_output_len": np.array([1, 2, 3], np.int32)},
    {"stop": True, "state": np.array([1.5])},
    {"state": True, "lora_command": b"x"},
    {"xyzzy": np.zeros([1, 1], np.int32)},
]

PARAMETERS: list[dict[str, object]] = [
    {"request_priority": 2},
    {"client_id": -1},
    {"allotted_time_ms": 1.5},
    {"timeout": "soon"},
    {"end_ids": "1,x"},
    {"end_ids": [1, 2]},
    {"error_codes": "yes"},
    {"temperature": 0.5},
    {"top_k": 3},
    {"temprature": 0.5},
    {"triton_trtllm_request_type": "context_only"},
]

# A GptManager's own errors for an InferenceRequest.
OF_A_MANAGER: list[dict[str, object]] = [
    {"stop": True},
    {"state": True},
    {"lora_command": b"x"},
    {"stop_words": [[b"x"]]},
    {"temprature": np.zeros(1, np.float32)},
    {"input_ids": [[1, 2], [3, 4]], "request_output_len": [[4], [4]]},
]


def bad_values(spec: TensorSpec) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (description of the defect, the tensor)."""
    dtype, length = NUMPY_TYPES[spec.dtype], 2
    shape = [1, *(length if each == -1 else each for each in spec.dims)]
    yield "float64", np.ones(shape, np.float64)
    yield "two rows", np.full([2, *shape[1:]], b"x" if spec.dtype == "BYTES" else 1, dtype)
    if spec.dims:
        yield "a dimension too many", np.full([1, 1, *shape], b"x" if spec.dtype == "BYTES" else 1, dtype)
    if spec.dtype == "BYTES":
        yield "no UTF-8", np.full(shape, b"a\xff", np.object_)
        yield "x", np.full(shape, b"x", np.object_)
    elif spec.dtype == "BOOL":
        yield "true", np.ones(shape, np.bool_)
    elif np.issubdtype(dtype, np.floating):
        for value in (-1.0, 1.5, np.nan, np.inf):
            yield str(value), np.full(shape, value, dtype)
    else:
        limits = np.iinfo(dtype)
        yield "smallest", np.full(shape, limits.min, dtype)
        yield "-1" if limits.min else "1", np.full(shape, -1 if limits.min else 1, dtype)
        yield "largest", np.full(shape, limits.max, dtype)


def refusal(
    inputs: Mapping[str, np.ndarray], vocabulary: Vocabulary, parameters: Mapping[str, object] | None = None
) -> str:
    """Return "CODE: text" as the client gets it."""
    stage = Stage(vocabulary)
    stage.client.description = make_description(tokenizer_dir="letters", adapter_commands_enabled=True)
    try:
        request = make_triton_request(dict(inputs))
        given = json.dumps(parameters or {})
        request.parameters = lambda: given
        sender = stage.take(request)
        lanes = stage.front_end._lanes
        for pool in (lanes._pool_of_waits, lanes._pool):  # wait for what is converted on another thread
            pool.shutdown()
        sent = sender.sent
        return error_in(sent[0].response if sent else None)
    finally:
        stage.front_end.close()


def error_in(response: InferenceResponse | None) -> str:
    error = None if response is None else response.error()
    if error is None:
        return ACCEPTED
    code = next(name for name in ERROR_CODES if getattr(TritonError, name) == error.code())
    return f"{code}: {error.message()}"


def refusal_by_a_text_model(made: type[TextModel], inputs: dict[str, np.ndarray]) -> str:
    """Let `preprocessing` or `postprocessing` answer, as if Triton had initialized it."""
    model = made()
    model._pb_utils = FakePbUtils()
    model.parameters = make_parameters(made.role)
    model.tokenizers = TokenizerFinder(None, lambda directory: letter_tokenizer())
    model.tokenizers.find("letters")
    wanted = frozenset(spec.name for spec in made.outputs.specs)
    return error_in(response_of(model, make_triton_request(inputs, outputs=wanted)))


def refusal_by_a_manager(tensors: Mapping[str, object]) -> str:
    try:
        InferenceRequest(1, token_inputs(**tensors)).to_prompt(make_limits())
    except InflightError as error:
        return f"{error.code}: {error}"
    return ACCEPTED


def shown(tensors: Mapping[str, object]) -> str:
    """Return the tensors in short, as a key of the file."""
    return ", ".join(f"{name}={_shown(value)}" for name, value in tensors.items())


def _shown(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}[{value.ravel()[0]}…]".replace(" ", "")
    return repr(value) if len(repr(value)) < 60 else f"{repr(value)[:20]}…({len(repr(value))})"


def all_messages() -> dict[str, dict[str, str]]:
    """Make every invalid request; return the messages by tensor and defect."""
    found: dict[str, dict[str, str]] = {}
    for vocabulary in Vocabulary:
        plain = token_inputs() if vocabulary is Vocabulary.TOKENS else text_inputs()
        for spec in INPUTS.specs:
            for name in spec.names(vocabulary)[:1]:
                found[f"{vocabulary.value} {name}"] = {
                    what: refusal(plain | {name: value}, vocabulary) for what, value in bad_values(spec)
                }
    found["tensors together"] = {
        shown(tensors): refusal(_inputs(tensors), Vocabulary.TOKENS) for tensors in COMPANIONS
    }
    for vocabulary in Vocabulary:
        plain = token_inputs() if vocabulary is Vocabulary.TOKENS else text_inputs()
        found[f"{vocabulary.value} request parameters"] = {
            json.dumps(given): refusal(plain, vocabulary, given) for given in PARAMETERS
        }
    for model, needed in TEXT_MODELS.items():
        for spec in model.inputs.specs:
            found[f"{model.role.value} {spec.name}"] = {
                what: refusal_by_a_text_model(model, needed | {spec.name: value})
                for what, value in bad_values(spec)
            }
    found["GptManager"] = {shown(tensors): refusal_by_a_manager(tensors) for tensors in OF_A_MANAGER}
    return found


def _inputs(tensors: Mapping[str, object]) -> dict[str, np.ndarray]:
    plain = {"input_ids": [[5, 6, 7]], "request_output_len": 4}
    return as_inputs({**plain, **tensors}, Vocabulary.TOKENS)


@pytest.fixture(scope="module")
def messages() -> dict[str, dict[str, str]]:
    return all_messages()


EXPECTED: dict[str, dict[str, str]] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


@pytest.mark.parametrize("subject", EXPECTED)
def test_each_message_is_the_one_in_the_file(subject: str, messages: dict[str, dict[str, str]]) -> None:
    assert messages[subject] == EXPECTED[subject]


def test_every_tensor_is_in_the_file(messages: dict[str, dict[str, str]]) -> None:
    assert list(messages) == list(EXPECTED)


def test_every_tensor_has_a_refused_value_and_an_error_that_names_it() -> None:
    for subject, told in EXPECTED.items():
        name = subject.rpartition(" ")[2]
        if subject.startswith(tuple(each.value for each in Vocabulary)) and "parameters" not in subject:
            assert any(name in text for text in told.values()), subject
            assert any(text != ACCEPTED for text in told.values()), subject


if __name__ == "__main__":
    FILE.write_text(json.dumps(all_messages(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
