"""Outputs that the parameter additional_model_outputs adds: declared, requested and sent."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from inflight.additional_outputs import OfferedOutput, WantedOutput
from inflight.config import Role
from inflight.core.request.request import FloatTensor
from inflight.core.request.response import ReturnedOutput
from inflight.core.request.stop import FinishReason
from inflight.errors import ConfigError
from inflight.serving.completion_text import TokenizerFinder
from inflight.serving.response_size import ResponseBudget
from inflight.tensors.output_table import OUTPUTS
from inflight.tensors.spec import Vocabulary
from inflight.triton.front_end import FrontEnd
from inflight.triton.host import ModelArgs, complete_config, read_model_args
from inflight.triton.models.engine import TritonPythonModel
from inflight.triton.models.remote import Ensemble, Infer
from tests.tensors.factories import make_description, make_limits, token_inputs
from tests.triton.factories import FakeEngineClient, make_model_config, make_response, make_triton_request
from tests.triton.fake_pb_utils import FakePbUtils, TritonError
from tests.triton.stage import error_of

WIDTH = 3
PARAMETER = "last_hidden_state:context, top_2_logits"
NAMES = ("context_last_hidden_state", "generation_last_hidden_state", "generation_top_2_logits")
ALL = frozenset(name for name, _ in OUTPUTS.declared(Vocabulary.TOKENS)).union(NAMES)
OFFERED = (OfferedOutput("last_hidden_state", True, WIDTH), OfferedOutput("top_2_logits", False, 2))


def declared(*names: str, dtype: str = "TYPE_FP32") -> list[dict[str, object]]:
    """Return the outputs of every config.pbtxt and these."""
    own = [(name, f"TYPE_{spec.dtype}") for name, spec in OUTPUTS.declared(Vocabulary.TOKENS)]
    added = [(name, dtype) for name in names]
    return [{"name": name, "data_type": data_type} for name, data_type in own + added]


def model_args(parameter: str = PARAMETER, names: tuple[str, ...] = NAMES, **changes: object) -> ModelArgs:
    parameters = {"additional_model_outputs": parameter} if parameter else {}
    config = {**make_model_config(**parameters), "output": declared(*names), **changes}
    args = {
        "model_config": json.dumps(config),
        "model_name": "a_model",
        "model_repository": "/models/a_model",
        "model_version": "1",
    }
    return read_model_args(args, Role.FRONT_END)


class Stage:
    """A front end of an engine with additional outputs."""

    def __init__(self, args: ModelArgs) -> None:
        self.client = FakeEngineClient(make_description(limits=make_limits(additional_outputs=OFFERED)))
        self.front_end = FrontEnd(
            FakePbUtils(), self.client, self.client.close, args, TokenizerFinder("nowhere", lambda _: 1 / 0)
        )

    def take(self, outputs: frozenset[str] = ALL, **inputs: object):
        request = make_triton_request(token_inputs(**inputs), outputs=outputs)
        self.front_end.execute([request])
        return request.sender

    @property
    def asked(self) -> tuple[WantedOutput, ...]:
        return self.client.submitted[self.client.last_id].output.additional_outputs


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage(model_args())
    yield made
    made.front_end.close()


def rows(count: int, width: int = WIDTH) -> FloatTensor:
    return FloatTensor((count, width), np.arange(count * width, dtype=np.float32).tobytes())


def test_additional_outputs_are_sent_only_on_request(stage: Stage) -> None:
    stage.take()
    assert stage.asked == ()


@pytest.mark.parametrize(
    ("names", "asked"),
    [
        (NAMES, (WantedOutput("last_hidden_state", True), WantedOutput("top_2_logits"))),
        (NAMES[:1], (WantedOutput("last_hidden_state", True),)),
        (NAMES[1:2], (WantedOutput("last_hidden_state"),)),
    ],
)
def test_naming_an_additional_output_requests_it(stage: Stage, names: tuple[str, ...], asked: object) -> None:
    stage.take(frozenset(names))
    assert stage.asked == asked


def test_additional_outputs_can_be_requested_by_a_tensor(stage: Stage) -> None:
    stage.take(additional_outputs=[[b"generation_top_2_logits", b"context_last_hidden_state"]])
    assert {*stage.asked} == {
        WantedOutput("last_hidden_state", True),
        WantedOutput("top_2_logits"),
    }


def test_an_undeclared_output_is_refused_with_the_declared_names(stage: Stage) -> None:
    (sent,) = stage.take(additional_outputs=[[b"generation_top_3_logits"]]).wait_final()
    code, message = error_of(sent)
    assert code == TritonError.INVALID_ARG
    assert message.startswith("additional_outputs has 'generation_top_3_logits', expected names of")
    assert ", ".join(sorted(NAMES)) in message
    assert not stage.client.submitted


def test_additional_outputs_that_the_engine_lacks_are_refused() -> None:
    stage = Stage(model_args(PARAMETER + ", top_3_logits", (*NAMES, "generation_top_3_logits")))
    (sent,) = stage.take(frozenset({"generation_top_3_logits"})).wait_final()
    assert "this engine has no output 'top_3_logits'" in error_of(sent)[1]
    stage.front_end.close()


def test_a_request_whose_response_is_too_large_is_refused_at_once(stage: Stage) -> None:
    wide = (OfferedOutput("last_hidden_state", True, 1 << 20), OFFERED[1])
    stage.client.description = make_description(limits=make_limits(additional_outputs=wide))
    stage.front_end._budget = ResponseBudget(lambda: (16 << 20, 16 << 20))
    (sent,) = stage.take(frozenset(NAMES[:2])).wait_final()
    code, message = error_of(sent)
    assert code == TritonError.INVALID_ARG
    assert "context_last_hidden_state 12.0 MiB, generation_last_hidden_state 16.0 MiB" in message
    assert not stage.client.submitted


def test_each_response_has_new_rows_and_the_first_also_the_prompts_rows(stage: Stage) -> None:
    sender = stage.take(frozenset(NAMES), streaming=True)
    engine_id = stage.client.last_id
    first = (
        ReturnedOutput(NAMES[0], (rows(3),)),
        ReturnedOutput(NAMES[1], (rows(1),)),
        ReturnedOutput(NAMES[2], (rows(1, 2),)),
    )
    nothing = FloatTensor((0, 0), b"")
    stage.client.respond(make_response(engine_id, (8,), additional_outputs=first))
    assert stage.client.outboxes[0](30.0)
    last = tuple(ReturnedOutput(name, (nothing,)) for name in NAMES[1:])
    stage.client.respond(make_response(engine_id, (), FinishReason.END_ID, additional_outputs=last))
    sent = [each.response.arrays() for each in sender.wait_final()]
    assert [{name: array.shape for name, array in arrays.items()} for arrays in sent] == [
        {NAMES[0]: (1, 3, WIDTH), NAMES[1]: (1, 1, 1, WIDTH), NAMES[2]: (1, 1, 1, 2)},
        {NAMES[1]: (1, 1, 0, WIDTH), NAMES[2]: (1, 1, 0, 2)},
    ]
    assert all(array.dtype == np.float32 for arrays in sent for array in arrays.values())
    assert sent[0][NAMES[0]][0].tolist() == np.arange(9).reshape(3, 3).tolist()


# ---------------------------------------------------------------- config.pbtxt


@pytest.mark.parametrize(
    ("parameter", "names", "message"),
    [
        (PARAMETER, NAMES[:2], "does not declare: generation_top_2_logits"),
        ("", NAMES[:1], "outputs that additional_model_outputs does not have: context_last_hidden_state"),
    ],
)
def test_the_parameter_and_the_declared_outputs_must_agree(
    parameter: str, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        model_args(parameter, names)


def test_an_unsupported_type_of_an_additional_output_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_last_hidden_state as TYPE_INT32, expected TYPE_FP32 or"):
        model_args(output=declared(*NAMES, dtype="TYPE_INT32"))


class ModelConfig:
    """Stand-in for the stub's class of this name, with the methods that are used."""

    def __init__(self, **parameters: str) -> None:
        self.outputs: list[dict[str, object]] = []
        self._config = make_model_config(**parameters)

    def as_dict(self) -> dict[str, object]:
        return self._config

    def add_output(self, output: dict[str, object]) -> None:
        assert set(output) == {"name", "data_type", "dims"}
        self.outputs.append(output)


@pytest.mark.parametrize("model", [TritonPythonModel, Infer, Ensemble])
def test_auto_complete_adds_the_additional_outputs(model: type) -> None:
    config = model.auto_complete_config(ModelConfig(additional_model_outputs=PARAMETER))
    assert [each["name"] for each in config.outputs] == list(NAMES)
    assert [each["dims"] for each in config.outputs] == [[-1, -1], [-1, -1, -1], [-1, -1, -1]]


@pytest.mark.parametrize(
    ("text", "expected"), [("TYPE_FP32", "TYPE_FP32"), ("", "TYPE_FP16"), ("X", "TYPE_FP16")]
)
def test_auto_complete_sets_the_type_of_an_input(text: str, expected: str) -> None:
    config = ModelConfig(lora_weights_data_type=text)
    config.as_dict()["input"] = [
        {"name": name, "data_type": "TYPE_FP16"} for name in ("lora_weights", "draft_logits")
    ]
    completed = complete_config(config).as_dict()["input"]
    assert [each["data_type"] for each in completed] == [expected, "TYPE_FP16"]


@pytest.mark.parametrize("text", ["", "${additional_model_outputs}", "no such output"])
def test_auto_complete_changes_no_config_without_additional_outputs(text: str) -> None:
    assert complete_config(ModelConfig(additional_model_outputs=text)).outputs == []
