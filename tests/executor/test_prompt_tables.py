"""PromptTuningConfig: its conversion, and tokens equal to those of transformers' inputs_embeds."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import inflight.executor as trtllm
from inflight.core.request.adapter import Matrix, RawBuffer
from inflight.core.request.engine_description import ModelLimits
from inflight.errors import InvalidArgument
from inflight.executor.convert import to_core_request
from inflight.executor.trtllm_gpt_manager import (
    GptManager,
    InferenceRequest,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from tests.engine.pictures import Picture, expected_tokens, make_prompt, rotary_table
from tests.executor.conftest import PROMPT, VOCABULARY, make_executor, responses_of, results_of
from tests.executor.test_trtllm_gpt_manager import Client
from tests.models.zoo import make_model

HIDDEN = 32
LIMITS = ModelLimits(
    VOCABULARY,
    max_sequence_length=64,
    max_input_length=63,
    num_blocks=32,
    tokens_per_block=4,
    hidden_size=HIDDEN,
)
IDS = [5, VOCABULARY + 2, 6, VOCABULARY, VOCABULARY + 2, 7]


def make_rows(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_request(rows: torch.Tensor, extra_ids: list[int] | None = None, **fields: Any) -> trtllm.Request:
    return trtllm.Request(IDS, 8, prompt_tuning_config=trtllm.PromptTuningConfig(rows, extra_ids), **fields)


@pytest.fixture(scope="module")
def with_rows(checkpoint):
    """Return a function for transformers' greedy tokens of IDS."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # a minimum length would ban the end id instead

    def greedy(rows: torch.Tensor, num_tokens: int = 8) -> list[int]:
        ids = torch.tensor(IDS)
        embeddings = model.get_input_embeddings()(ids.clamp(max=VOCABULARY - 1)).detach()
        embeddings[ids >= VOCABULARY] = rows.float()[ids[ids >= VOCABULARY] - VOCABULARY]
        with torch.inference_mode():
            return model.generate(
                inputs_embeds=embeddings[None],
                attention_mask=torch.ones(1, len(IDS), dtype=torch.long),
                max_new_tokens=num_tokens,
                do_sample=False,
            )[0].tolist()

    return greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_engine_gets_the_rows_and_the_extra_ids(dtype: torch.dtype) -> None:
    rows = make_rows(dtype=dtype)
    found = to_core_request(make_request(rows.T.contiguous().T, [0, 7, 0, 7, 7, 0]), LIMITS)
    data = RawBuffer(rows.view(torch.uint8).numpy().tobytes())
    assert found.prompt_table.rows == Matrix((3, HIDDEN), str(dtype).removeprefix("torch."), data)
    assert found.identity.extra_ids == (0, 7, 0, 7, 7, 0)


def test_a_prompt_tuning_config_survives_pickling() -> None:
    config = trtllm.PromptTuningConfig(make_rows(), [1] * 6)
    twin = pickle.loads(pickle.dumps(config))
    assert torch.equal(twin.embedding_table, config.embedding_table)
    assert twin.input_token_extra_ids == config.input_token_extra_ids


def test_a_table_has_two_dimensions() -> None:
    with pytest.raises(RuntimeError, match=r"table to have 2 dimensions.*got \[1, 3, 32\]"):
        trtllm.PromptTuningConfig(make_rows()[None])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request(make_rows().double()), "must be of float32, float16 or bfloat16, got torch.float64"),
        (make_request(make_rows() / 0), "must hold finite numbers"),
        (make_request(make_rows()[:, :8]), r"must have shape \[1, rows, 32\]"),
        (make_request(make_rows()[:2]), "got 514"),
        (make_request(make_rows(), [1, 2]), "one id for each of the 6 prompt tokens, got 2"),
    ],
)
def test_a_malformed_table_is_an_error_of_its_request(executor, request_, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        to_core_request(request_, LIMITS)
    (response,) = responses_of(executor, executor.enqueue_request(request_))
    assert response.has_error()


def test_tokens_equal_inputs_embeds_beside_requests_without_tables(executor, reference, with_rows) -> None:
    tables = [make_rows(seed) for seed in range(4)] + [make_rows(4, torch.bfloat16)]
    ids = executor.enqueue_requests([make_request(rows) for rows in tables] + [trtllm.Request(PROMPT, 8)])
    answers = [responses_of(executor, request_id)[-1].result.output_token_ids[0] for request_id in ids]
    assert answers[:-1] == [IDS + with_rows(rows) for rows in tables]
    assert answers[-1] == PROMPT + reference(PROMPT, 8)


def test_a_prompt_table_works_with_a_stream_and_beams(executor, with_rows) -> None:
    rows = make_rows()
    streamed = results_of(executor, make_request(rows, streaming=True))
    assert [token for result in streamed for token in result.output_token_ids[0]] == with_rows(rows)
    (searched,) = results_of(executor, make_request(rows, sampling_config=trtllm.SamplingConfig(2)))
    assert all(beam[: len(IDS)] == IDS for beam in searched.output_token_ids)


def test_a_gpt_manager_takes_a_prompt_table(checkpoint, with_rows) -> None:
    client = Client()
    rows = make_rows(1, torch.bfloat16)
    tensors = {
        "input_ids": torch.tensor([IDS], dtype=torch.int32),
        "request_output_len": torch.tensor([[8]], dtype=torch.int32),
        "prompt_embedding_table": rows[None],
        "prompt_vocab_size": torch.tensor([[3]], dtype=torch.int32),
        "prompt_table_extra_ids": torch.tensor([[0, 1, 0, 1, 1, 0]]),
    }
    client.pending.put(InferenceRequest(7, tensors))
    params = TrtGptModelOptionalParams(max_num_sequences=4)
    policy = SchedulerPolicy.GUARANTEED_NO_EVICT
    with GptManager(
        checkpoint,
        TrtGptModelType.InflightBatching,
        1,
        policy,
        client.get,
        client.send,
        optional_params=params,
    ):
        answer = client.answers.get(timeout=60)
    assert answer.error == "" and answer.ids == IDS + with_rows(rows)


def test_a_prompt_with_pictures_gives_transformers_tokens(tmp_path) -> None:
    """PromptTuningConfig has the pictures' rows, MropeConfig their positions."""
    model = make_model(tmp_path / "checkpoint", "qwen3-vl")
    prompt = make_prompt(model, (5, Picture(3, 4, 1), 6), 2)
    table = rotary_table(model, prompt)
    cos_sin = torch.frombuffer(bytearray(table.cos_sin.buffer.data), dtype=torch.float32)
    request = trtllm.Request(
        list(prompt.token_ids),
        12,
        prompt_tuning_config=trtllm.PromptTuningConfig(prompt.rows, list(prompt.extra_ids)),
        mrope_config=trtllm.MropeConfig(cos_sin[None], prompt.delta),
        output_config=trtllm.OutputConfig(exclude_input_from_output=True),
    )
    with make_executor(model.folder) as executor:
        (result,) = results_of(executor, request)
    assert result.output_token_ids[0] == expected_tokens(model, prompt, 12)
