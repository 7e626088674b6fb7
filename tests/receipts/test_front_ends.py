"""Receipts as tensors, in bodies of /v1 and in the Executor API; and requests that cannot have one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, cast

import httpx
import numpy as np
import openai
import pytest

import inflight.executor as trtllm
from inflight.core.request.request import OutputOptions
from inflight.errors import ConfigError, Unsupported
from inflight.openai.kserve_tensors import input_tensors
from inflight.receipts.document import Receipt, parse
from inflight.receipts.verify import fault_of_seal, find_receipt
from inflight.testing import fake_server
from inflight.triton.models.remote import Bls, Ensemble
from tests.openai_endpoint.serving import DEMO, fake_engine, served
from tests.receipts.factories import TOKENIZER, make_request
from tests.tensors.factories import text_inputs
from tests.triton.factories import make_triton_request
from tests.triton.fake_pb_utils import FakePbUtils, Sent
from tests.triton.letters import save_letter_tokenizer
from tests.triton.logging_restored import logging_restored
from tests.triton.stage import error_of, value_of
from tests.triton.test_models import make_args

ENGINES = ("tensorrt_llm", "tensorrt_llm_draft")
KEY = b"secret"


def read(text: str | bytes) -> Receipt:
    """Return a receipt, whose digest must be right."""
    document = json.loads(text)
    assert fault_of_seal(document, None) == ""
    return parse(document)


# ---------------------------------------------------------------- tensors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    """`tensorrt_llm_bls` with two fake engines behind real endpoints; receipts are signed."""
    folder = tmp_path_factory.mktemp("receipts")
    save_letter_tokenizer(folder)
    (folder / "key").write_bytes(KEY)
    with pytest.MonkeyPatch.context() as patch, logging_restored():
        patch.setitem(sys.modules, "triton_python_backend_utils", FakePbUtils())
        engines = [fake_server.TritonPythonModel() for _ in ENGINES]
        for name, engine in zip(ENGINES, engines):
            args = {"fake_engine": "vocab=26,step_us=0", "tokenizer_dir": str(folder)}
            args |= {"engine_endpoint": str(folder / f"{name}.sock"), "receipt_key_file": str(folder / "key")}
            engine.initialize(make_args(**args))
        bls = Bls()
        paths = {"engine_endpoint": str(folder / "tensorrt_llm.sock"), "tokenizer_dir": str(folder)}
        paths |= {"tensorrt_llm_draft_model_name": ENGINES[1]}
        bls.initialize(make_args(**paths, draft_engine_endpoint=str(folder / f"{ENGINES[1]}.sock")))
        yield bls
        bls.finalize()
        for engine in engines:
            engine.finalize()


def ask(model: Ensemble, **tensors: object) -> list[Sent]:
    request = make_triton_request(text_inputs(**{"max_tokens": 12, "return_receipt": True} | tensors))
    model.execute([request])
    return list(request.sender.wait_final())


def values_of(sent: Sent, name: str) -> list[Any]:
    """Return the values of an output, in one dimension."""
    return cast("list[Any]", value_of(sent, name))


def receipt_of(sent: Sent) -> Receipt:
    (text,) = values_of(sent, "receipt")
    return read(text)


def test_a_response_has_the_receipt_as_a_tensor(model: Ensemble) -> None:
    (answer,) = ask(model, seed=7, top_p=0.5)
    assert answer.response is not None
    assert answer.response.arrays()["receipt"].shape == (1, 1)
    receipt = receipt_of(answer)
    assert receipt.request.sampling == {"top_p": 0.5, "random_seed": "7"}
    assert receipt.signature.startswith("hmac-sha256:")
    (output,) = receipt.outputs
    letters = "".join(chr(ord("a") + token_id) for token_id in output.token_ids)
    assert value_of(answer, "text_output") == [f"hello{letters}".encode()]
    assert value_of(answer, "finish_reason") == [output.finish_reason.encode()]


def test_only_the_last_response_of_a_stream_has_the_receipt(model: Ensemble) -> None:
    (whole,) = ask(model)
    *first, last = [sent for sent in ask(model, stream=True) if sent.response is not None]
    assert all("receipt" not in sent.response.arrays() for sent in first if sent.response)
    assert receipt_of(last) == receipt_of(whole)


def test_without_the_flag_there_is_no_receipt(model: Ensemble) -> None:
    (answer,) = ask(model, return_receipt=False)
    assert answer.response is not None and "receipt" not in answer.response.arrays()


def test_stop_strings_and_drafts_do_not_change_receipts(model: Ensemble) -> None:
    (plain,) = ask(model, exclude_input_in_output=True)
    text = values_of(plain, "text_output")[0]
    stop = text[5:7]
    for more in ({}, {"stop_words": [[stop]]}):
        several = [
            receipt_of(ask(model, **more, **asked)[-1 if "stream" in asked else 0])
            for asked in ({}, {"num_draft_tokens": 4}, {"num_draft_tokens": 3, "use_draft_logits": True})
        ]
        assert several[0] == several[1] == several[2]
    assert len(several[0].outputs[0].token_ids) == text.index(stop) + 2
    assert several[0].outputs[0].finish_reason == "STOP_WORDS"


def test_several_sequences_have_one_receipt(model: Ensemble) -> None:
    answers = [sent for sent in ask(model, num_return_sequences=3, top_p=0.9) if sent.response]
    receipts = [sent for sent in answers if sent.response and "receipt" in sent.response.arrays()]
    assert len(answers) == 3 and receipts == answers[-1:]
    found = {(values_of(sent, "sequence_index")[0], values_of(sent, "text_output")[0]) for sent in answers}
    for index, output in enumerate(receipt_of(answers[-1]).outputs):
        letters = "".join(chr(ord("a") + token_id) for token_id in output.token_ids)
        assert (index, f"hello{letters}".encode()) in found


def test_each_prompt_of_a_batch_has_a_receipt(model: Ensemble) -> None:
    texts = np.array([[b"hello"], [b"world"]], np.object_)
    tensors = {"text_input": texts, "return_receipt": np.array([[True], [False]])}
    request = make_triton_request({**tensors, "max_tokens": np.array([[3], [5]], np.int32)})
    model.execute([request])
    answers = [sent for sent in request.sender.wait_final() if sent.response]
    with_receipt = [sent for sent in answers if sent.response and "receipt" in sent.response.arrays()]
    (answer,) = with_receipt
    assert value_of(answer, "batch_index") == [0]
    assert len(receipt_of(answer).outputs[0].token_ids) == 3


def test_a_flag_of_another_type_is_refused(model: Ensemble) -> None:
    request = make_triton_request({**text_inputs(), "return_receipt": np.array([[1]], np.int32)})
    model.execute([request])
    (answer,) = request.sender.wait_final()
    assert "return_receipt must be BOOL" in error_of(answer)[1]


# ---------------------------------------------------------------- /v1


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_engine() as engine, served(engine) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


ASKED: dict[str, Any] = {"model": "demo", "prompt": "def area(radius):", "max_tokens": 12, "seed": 3}
RECEIPT = {"return_receipt": True, "return_token_ids": True}


def test_the_official_client_gets_a_receipt(client: openai.OpenAI) -> None:
    answer = client.completions.create(**ASKED, n=2, temperature=0.5, extra_body=RECEIPT)
    extra = answer.model_extra or {}
    receipt = read(json.dumps(extra["receipt"]))
    assert find_receipt(answer.to_json()) == extra["receipt"]
    told = [(choice.model_extra or {})["token_ids"] for choice in answer.choices]
    assert [list(output.token_ids) for output in receipt.outputs] == told
    assert receipt.request.input_ids == tuple(TOKENIZER.encode(ASKED["prompt"]))
    assert receipt.request.sampling["random_seed"] == "3"


def test_the_actual_seed_is_in_the_receipt(client: openai.OpenAI) -> None:
    answer = client.completions.create(**{**ASKED, "seed": None}, extra_body=RECEIPT)
    seed = read(json.dumps((answer.model_extra or {})["receipt"])).request.sampling["random_seed"]
    again = client.completions.create(**{**ASKED, "seed": int(seed) - (1 << 64) * (int(seed) >> 63)})
    assert again.choices[0].text == answer.choices[0].text


def test_equal_requests_with_a_seed_have_equal_receipts(client: openai.OpenAI) -> None:
    seeded, unseeded = (
        [client.completions.create(**{**ASKED, "seed": seed}, extra_body=RECEIPT) for _ in range(2)]
        for seed in (3, None)
    )
    one, other = ((answer.model_extra or {})["receipt"] for answer in seeded)
    assert one == other
    one, other = ((answer.model_extra or {})["receipt"]["request"] for answer in unseeded)
    assert one["sampling"].pop("random_seed") != other["sampling"].pop("random_seed")
    assert one == other


@pytest.mark.parametrize("usage", [False, True])
def test_the_last_chunk_has_the_receipt(client: openai.OpenAI, usage: bool) -> None:
    whole = client.completions.create(**ASKED, extra_body=RECEIPT)
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
    *first, last = client.completions.create(**ASKED, stream=True, extra_body=RECEIPT, **more)
    assert not any("receipt" in (chunk.model_extra or {}) for chunk in first)
    assert (last.choices, last.usage is not None) == ([], usage)
    assert (last.model_extra or {})["receipt"] == (whole.model_extra or {})["receipt"]


def test_chats_have_receipts_too(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 1}
    body |= {"return_receipt": True, "chat_template_kwargs": {}}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body).json()
    lines = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": True}).text.split("\n\n")
    last = json.loads(lines[-3].removeprefix("data: "))
    assert read(json.dumps(answer["receipt"])) == read(json.dumps(last["receipt"]))


def test_a_stop_string_ends_the_receipts_tokens(client: openai.OpenAI) -> None:
    text = client.completions.create(**{**ASKED, "max_tokens": 30}).choices[0].text
    answer = client.completions.create(
        **{**ASKED, "max_tokens": 30}, stop=[text[8:11]], extra_body=RECEIPT, n=2
    )
    receipt = read(json.dumps((answer.model_extra or {})["receipt"]))
    assert receipt.outputs[0].finish_reason == "STOP_WORDS"
    told = [(choice.model_extra or {})["token_ids"] for choice in answer.choices]
    assert [list(output.token_ids) for output in receipt.outputs] == told
    assert receipt.request.stop_strings == (text[8:11],)
    assert receipt.request.skip_special_tokens


def test_a_receipt_says_whether_special_tokens_were_shown_to_stop_strings(client: openai.OpenAI) -> None:
    shown = {**RECEIPT, "skip_special_tokens": False}
    answer = client.completions.create(**ASKED, stop=["never"], extra_body=shown)
    assert not read(json.dumps((answer.model_extra or {})["receipt"])).request.skip_special_tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ["a", "b"]}, "return_receipt is for one prompt, and prompt has 2: send them one by one"),
        ({"max_tokens": 0, "echo": True}, "return_receipt is for generated tokens, and max_tokens is 0"),
    ],
)
def test_bodies_that_cannot_have_a_receipt(url: str, change: dict[str, Any], message: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={**ASKED, "return_receipt": True, **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["message"], error["param"]) == (400, message, "return_receipt")


def test_an_endpoint_on_another_host_refuses_receipts() -> None:
    with pytest.raises(
        Unsupported, match="/v1 cannot send a request for a receipt to a Triton server on another host"
    ):
        input_tensors(make_request(output=OutputOptions(return_receipt=True)))


# ---------------------------------------------------------------- Executor API


@pytest.fixture(scope="module")
def executor() -> Iterator[trtllm.Executor]:
    config = trtllm.ExecutorConfig(kv_cache_config=trtllm.KvCacheConfig(max_tokens=8192))
    with trtllm.Executor(DEMO, trtllm.ModelType.DECODER_ONLY, config) as executor:
        yield executor


@pytest.mark.parametrize("streaming", [False, True])
def test_the_last_result_of_the_executor_has_the_receipt(executor: trtllm.Executor, streaming: bool) -> None:
    output = trtllm.OutputConfig(return_receipt=True)
    sampling = trtllm.SamplingConfig(top_p=0.9, seed=4)
    request = trtllm.Request(
        [1, 2, 3], 6, streaming=streaming, sampling_config=sampling, output_config=output
    )
    answers = []
    number = executor.enqueue_request(request)
    while not answers or not answers[-1].result.is_final:
        answers += executor.await_responses(number)
    receipts = [answer.result.receipt for answer in answers]
    assert all(receipt is None for receipt in receipts[:-1])
    made = read(receipts[-1])
    tokens = [token for answer in answers for token in answer.result.output_token_ids[0]]
    assert list(made.outputs[0].token_ids) == tokens[len(tokens) - 6 :]
    assert made.request.sampling["random_seed"] == "4"


def test_generate_returns_receipts(executor: trtllm.Executor) -> None:
    plain = executor.generate("def area(radius):", 8)
    found = executor.generate(["def area(radius):"], 8, return_receipt=True, stop=["\n"])
    assert plain.receipt is None
    made = read(found[0].receipt)
    assert made.outputs[0].token_ids == found[0].token_ids and made.request.stop_strings == ("\n",)


# ---------------------------------------------------------------- the key


def test_a_key_that_cannot_be_read_fails_the_load() -> None:
    message = r"receipt_key_file is '/nowhere': the key file .* No such file"
    with pytest.raises(ConfigError, match=message), fake_engine(receipt_key_file="/nowhere"):
        pass
