"""Logits post-processors, guides, outputs of the model and debug tensors, through an Executor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import inflight.executor as trtllm
from inflight.config import EngineConfig, Parameters
from inflight.engine import draft_costs
from tests.executor.conftest import PROMPT, make_config, make_executor, responses_of, results_of
from tests.models.draft_heads import make_drafting_model

NUM_TOKENS = 6
DEMO = Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1" / "demo_model"
GuideType = trtllm.GuidedDecodingParams.GuideType
Backend = trtllm.GuidedDecodingConfig.GuidedDecodingBackend


def request(**fields) -> trtllm.Request:
    output = fields.pop("output_config", trtllm.OutputConfig(exclude_input_from_output=True))
    return trtllm.Request(PROMPT, NUM_TOKENS, output_config=output, **fields)


def tokens_of(executor: trtllm.Executor, **fields) -> list[int]:
    return results_of(executor, request(**fields))[-1].output_token_ids[0]


# ---------------------------------------------------------------------- logits post-processors


def only(token: int):
    def process(request_id, logits, token_ids, stream, client_id) -> None:
        logits[:] = float("-inf")
        logits[:, :, token] = 0.0

    return process


def fails(request_id, logits, token_ids, stream, client_id) -> None:
    raise ValueError("no")


def of_client(request_ids, logits_list, token_ids, stream, client_ids) -> None:
    for logits, client_id in zip(logits_list, client_ids, strict=True):
        only(client_id)(0, logits, [], 0, 0)


@pytest.fixture(scope="module")
def processing(checkpoint: Path) -> Iterator[trtllm.Executor]:
    config = trtllm.LogitsPostProcessorConfig({"three": only(3), "fails": fails}, of_client)
    with make_executor(checkpoint, logits_post_processor_config=config) as shared:
        yield shared


def test_a_post_processor_is_used_by_name(processing, reference) -> None:
    ids = processing.enqueue_requests([request(logits_post_processor_name="three"), request()])
    found = [responses_of(processing, each)[-1].result.output_token_ids[0] for each in ids]
    assert found == [[3] * NUM_TOKENS, reference(PROMPT, NUM_TOKENS)]


def test_the_batched_post_processor_is_used_by_its_name(processing) -> None:
    name = trtllm.Request.BATCHED_POST_PROCESSOR_NAME
    ids = processing.enqueue_requests([request(logits_post_processor_name=name, client_id=n) for n in (4, 5)])
    found = [responses_of(processing, each)[-1].result.output_token_ids[0] for each in ids]
    assert found == [[4] * NUM_TOKENS, [5] * NUM_TOKENS]


def test_a_request_may_have_a_callable_as_its_post_processor(processing) -> None:
    seen: list[tuple] = []

    def without_client_id(request_id, logits, token_ids, stream) -> None:
        seen.append((request_id, len(token_ids[0])))
        only(8)(request_id, logits, token_ids, stream, None)

    sequences = trtllm.SamplingConfig(num_return_sequences=2, top_k=5)
    ids = processing.enqueue_requests(
        [
            request(logits_post_processor=only(7)),
            request(logits_post_processor=without_client_id, sampling_config=sequences),
        ]
    )
    responses = [responses_of(processing, each) for each in ids]
    found = [[each.result.output_token_ids[0] for each in of_one] for of_one in responses]
    assert found == [[[7] * NUM_TOKENS], [[8] * NUM_TOKENS] * 2]
    assert sorted(seen) == sorted([(ids[1], len(PROMPT) + n) for n in range(NUM_TOKENS)] * 2)
    assert len(processing._own_post_processors) == 0, "they are forgotten with their requests"


def test_a_post_processor_that_raises_ends_only_its_request(processing, reference) -> None:
    given = [request(logits_post_processor_name="fails"), request(logits_post_processor=fails), request()]
    ids = processing.enqueue_requests(given)
    *failed, good = [responses_of(processing, each)[-1] for each in ids]
    assert all("raised ValueError: no" in each.error_msg for each in failed)
    assert good.result.output_token_ids == [reference(PROMPT, NUM_TOKENS)]
    assert len(processing._own_post_processors) == 0


def test_a_callable_with_other_arguments_is_refused(processing) -> None:
    with pytest.raises(trtllm.ExecutorError, match="expected \\(request id, logits"):
        processing.enqueue_request(request(logits_post_processor=lambda logits: None))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"logits_post_processor_config": trtllm.LogitsPostProcessorConfig({"three": only(3)})},
            "logits_post_processor_module names a module",
        ),
        (
            {"guided_decoding_config": trtllm.GuidedDecodingConfig(Backend.LLGUIDANCE, ["a"])},
            "or that of the parameter tokenizer_dir",
        ),
    ],
)
def test_callables_and_vocabularies_are_refused_with_an_orchestrator(
    checkpoint: Path, fields: dict, message: str
) -> None:
    parallel = trtllm.ParallelConfig(communication_mode=trtllm.CommunicationMode.ORCHESTRATOR)
    with pytest.raises(trtllm.NotSupported, match=message):
        make_executor(checkpoint, parallel_config=parallel, **fields)


# ---------------------------------------------------------------------- guides


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["area", "volume"]}, "exact": {"type": "boolean"}},
    "required": ["kind", "exact"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def guided(executor: trtllm.Executor, tokenizer, kind: GuideType, guide: str | None) -> str:
    params = trtllm.GuidedDecodingParams(kind, guide)
    prompt, output = tokenizer("x = ").input_ids, trtllm.OutputConfig(exclude_input_from_output=True)
    asked = trtllm.Request(
        prompt, 60, output_config=output, guided_decoding_params=params, end_id=tokenizer.eos_token_id
    )
    result = results_of(executor, asked)[-1]
    assert result.finish_reasons == [trtllm.FinishReason.END_ID]
    return tokenizer.decode(result.output_token_ids[0])


def test_guides_use_the_checkpoints_tokenizer(tokenizer) -> None:
    with make_executor(DEMO) as executor:
        text = guided(executor, tokenizer, GuideType.JSON_SCHEMA, json.dumps(SCHEMA))
        jsonschema.validate(json.loads(text), SCHEMA)
        assert re.fullmatch("(yes|no)", guided(executor, tokenizer, GuideType.REGEX, "(yes|no)"))
        params = trtllm.GuidedDecodingParams(GuideType.REGEX, "(")
        (bad,) = responses_of(executor, executor.enqueue_request(request(guided_decoding_params=params)))
        assert bad.has_error()


def test_guides_use_a_configured_vocabulary(tokenizer) -> None:
    vocabulary = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    config = trtllm.GuidedDecodingConfig(
        Backend.LLGUIDANCE, vocabulary, tokenizer.backend_tokenizer.to_str(), [tokenizer.eos_token_id]
    )
    with make_executor(DEMO, guided_decoding_config=config) as executor:
        text = guided(executor, tokenizer, GuideType.JSON_SCHEMA, json.dumps(SCHEMA))
        jsonschema.validate(json.loads(text), SCHEMA)


# ---------------------------------------------------------------------- tensors


def test_outputs_of_the_model_equal_transformers(checkpoint: Path, reference) -> None:
    outputs = [
        trtllm.AdditionalModelOutput("last_hidden_state", True),
        trtllm.AdditionalModelOutput("hidden_states_1"),
    ]
    config = trtllm.OutputConfig(exclude_input_from_output=True, additional_model_outputs=outputs)
    ids = torch.tensor([PROMPT + reference(PROMPT, NUM_TOKENS)[:-1]])
    with torch.inference_mode():
        states = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)(
            ids, output_hidden_states=True
        ).hidden_states
    last, first = states[-1][0], states[1][0]
    behind = len(PROMPT) - 1
    expected = {
        "context_last_hidden_state": last[: len(PROMPT)],
        "generation_last_hidden_state": last[None, behind:],
        "generation_hidden_states_1": first[None, behind:],
    }
    with make_executor(checkpoint, additional_model_outputs=outputs) as executor:
        (whole,) = results_of(executor, request(output_config=config))
        streamed = results_of(executor, request(output_config=config, streaming=True))
        repeated = results_of(
            executor, request(output_config=config, streaming=True, return_all_generated_tokens=True)
        )
        plain = results_of(executor, request())
    parts = [{each.name: each.output for each in result.additional_outputs} for result in streamed]
    joined = {
        name: torch.cat([part[name] for part in parts if name in part], dim=0 if "context" in name else 1)
        for name in expected
    }
    for found in (
        {each.name: each.output for each in whole.additional_outputs},
        joined,
        {each.name: each.output for each in repeated[-1].additional_outputs},
    ):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-4)
    assert parts[1]["generation_hidden_states_1"].shape[:2] == (1, 1)
    assert plain[-1].additional_outputs == []


def test_debug_tensors_of_the_last_iterations_are_returned_once(checkpoint: Path) -> None:
    debug = trtllm.DebugConfig(
        debug_tensor_names=["sequence_length", "logits"], debug_tensors_max_iterations=2
    )
    with make_executor(checkpoint, debug_config=debug) as executor:
        tokens = tokens_of(executor)
        kept = executor.get_latest_debug_tensors()
        assert executor.get_latest_debug_tensors() == []
    assert [each.debug_tensors["sequence_length"].tolist() for each in kept] == [[9], [10]]
    assert kept[1].iter == kept[0].iter + 1
    assert [int(each.debug_tensors["logits"].argmax()) for each in kept] == tokens[-2:]


def test_debug_tensors_are_written_to_files(checkpoint: Path, tmp_path: Path) -> None:
    base = Parameters(engine=EngineConfig(gpt_model_path="", debug_tensors_dir=str(tmp_path)))
    config = make_config(debug_config=trtllm.DebugConfig(debug_tensor_names=["sequence_length"]))
    with trtllm.Executor(checkpoint, trtllm.ModelType.DECODER_ONLY, config, parameters=base) as executor:
        tokens_of(executor)
        assert executor.get_latest_debug_tensors() == []
    found = sorted(int(np.load(path).item()) for path in tmp_path.glob("PP_1/TP_1/*/sequence_length.npy"))
    assert found == list(range(len(PROMPT), len(PROMPT) + NUM_TOKENS))


def test_a_chain_of_eagle_choices_drafts_with_the_checkpoints_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        draft_costs._OVERHEAD_BYTES, "cpu", 0.0
    )  # otherwise a tiny head takes too long to be used
    model = make_drafting_model(tmp_path, "qwen3.5", agrees=True)
    prompt, decoding = model.prompt(9), trtllm.DecodingConfig()
    decoding.eagle_config = trtllm.EagleConfig([[0, 0], [0]])
    config = make_config(decoding_config=decoding)
    output = trtllm.OutputConfig(exclude_input_from_output=True, return_perf_metrics=True)
    base = Parameters(engine=EngineConfig(dtype="float32"))
    with trtllm.Executor(model.folder, trtllm.ModelType.DECODER_ONLY, config, parameters=base) as executor:
        (result,) = results_of(executor, trtllm.Request(list(prompt), 20, output_config=output))
    assert result.output_token_ids == [model.greedy(prompt, 20)]
    assert result.request_perf_metrics.speculative_decoding.total_accepted_draft_tokens > 3
