"""Hidden states and top logits of the real server against transformers, and the page that explains them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from inflight_client import Client, ServerError

from .clients import ask, completion, generate, unary

PAGE = (Path(__file__).parents[2] / "docs" / "additional-outputs.md").read_text()
PROMPT = list(range(300, 370))  # more than two KV blocks
NUM_TOKENS = 6
CONTEXT = ["context_last_hidden_state", "context_hidden_states_1"]
GENERATION = [
    f"generation_{name}"
    for name in ("last_hidden_state", "hidden_states_1", "top_3_logits", "top_3_logit_ids")
]


@pytest.fixture(scope="module")
def client(exact_server) -> Client:
    return Client(exact_server.grpc)


@torch.inference_mode()
def expected(oracle, tokens: list[int]) -> dict[str, np.ndarray]:
    found = oracle.oracle(torch.tensor([tokens]), output_hidden_states=True)
    top = found.logits[0].topk(3)
    return {
        "last_hidden_state": found.hidden_states[-1][0].numpy(),
        "hidden_states_1": found.hidden_states[1][0].numpy(),
        "top_3_logits": top.values.numpy(),
        "top_3_logit_ids": top.indices.numpy(),
    }


def assert_rows(found: dict[str, np.ndarray], oracle, tokens: tuple[int, ...]) -> None:
    """Check all rows of the prompt, and for each token the row of the position that it was sampled from."""
    wanted = expected(oracle, [*PROMPT, *tokens])
    for name, rows in found.items():
        part, _, plain = name.partition("_")
        length = len(PROMPT)
        where = slice(length) if part == "context" else slice(length - 1, length - 1 + len(tokens))
        np.testing.assert_allclose(rows, wanted[plain][where], atol=1e-3, err_msg=name)


@pytest.mark.parametrize("streaming", [True, False])
def test_additional_outputs_equal_those_of_transformers(client, oracle, streaming):
    options = {"end_id": -1, "additional_outputs": CONTEXT + GENERATION}
    if streaming:
        deltas = list(client.stream(PROMPT, NUM_TOKENS, **options))
        assert [bool(delta.context_outputs) for delta in deltas] == [True] + [False] * (len(deltas) - 1)
        for delta in deltas:
            assert {len(rows) for rows in delta.additional_outputs.values()} == {len(delta.token_ids)}
        tokens = tuple(token for delta in deltas for token in delta.token_ids)
        context = deltas[0].context_outputs
        generation = {
            name: np.concatenate([delta.additional_outputs[name] for delta in deltas]) for name in GENERATION
        }
    else:
        answer = client.generate(PROMPT, NUM_TOKENS, **options)
        tokens, context, generation = answer.token_ids, answer.context_outputs, answer.additional_outputs
    assert len(tokens) == NUM_TOKENS
    assert [*context] == CONTEXT and [*generation] == GENERATION
    assert_rows({**context, **generation}, oracle, tokens)


@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_infer"])
def test_every_sequence_has_its_rows_of_additional_outputs(exact_server, oracle, model):
    client = Client(exact_server.grpc, model=model)
    options = {"num_return_sequences": 2, "top_k": 30, "temperature": 1.5, "seed": 5, "end_id": -1}
    answer = client.generate(PROMPT, NUM_TOKENS, additional_outputs=[CONTEXT[0], *GENERATION], **options)
    assert answer.sequences[0].token_ids != answer.sequences[1].token_ids
    for sequence in answer.sequences:
        rows = {**answer.context_outputs, **sequence.additional_outputs}
        assert_rows(rows, oracle, sequence.token_ids)


def test_text_requests_have_additional_outputs_too(client):
    answer = client.generate("def f(", 4, end_id=-1, additional_outputs=GENERATION[:1])
    assert answer.text and answer.additional_outputs[GENERATION[0]].shape[0] == 4


@pytest.mark.covers("additional_outputs")
def test_additional_outputs_are_requested_by_a_tensor_without_an_output_list(exact_server, oracle):
    """This is tested with HTTP generate, whose response is flat, and gRPC without a list of outputs."""
    names = [CONTEXT[0], GENERATION[3]]
    answer = completion(
        exact_server.grpc,
        input_ids=PROMPT,
        request_output_len=2,
        end_id=-1,
        additional_outputs=names,
    )
    assert {name for name in answer.outputs if name.startswith(("context_", "generation_"))} == set(names)
    assert_rows(
        {names[0]: answer.outputs[names[0]][0], names[1]: answer.outputs[names[1]][0, 0]},
        oracle,
        tuple(answer.ids),
    )
    body = {"text_input": "def f(", "max_tokens": 3, "end_id": -1, "additional_outputs": [GENERATION[3]]}
    ids = generate(exact_server.http, **body)[GENERATION[3]]
    assert len(ids) == 3 * 3 and all(value == int(value) for value in ids)


def test_additional_outputs_are_not_sent_unless_requested(exact_server):
    answer = completion(exact_server.grpc, input_ids=PROMPT, request_output_len=2)
    assert not [name for name in answer.outputs if name.startswith(("context_", "generation_"))]


def test_unavailable_outputs_are_refused_and_others_are_served(exact_server):
    (answer,) = ask(
        exact_server.grpc,
        input_ids=[[*PROMPT]] * 2,
        request_output_len=[[2], [2]],
        beam_width=[[2], [2]],
        additional_outputs=[[GENERATION[0]]] * 2,
    )
    assert "additional_outputs needs beam_width 1" in str(answer.error)
    with pytest.raises(ServerError, match="generation_top_4_logits"):
        Client(exact_server.grpc).generate(PROMPT, 2, additional_outputs=["generation_top_4_logits"])
    result = unary(exact_server.grpc, outputs=["output_ids"], input_ids=PROMPT, request_output_len=2)
    assert result.as_numpy("output_ids").shape == (1, 1, len(PROMPT) + 2)


def test_the_pages_example_prints_additional_outputs(exact_server):
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
    program = program.replace("localhost:8001", exact_server.grpc)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "prompt: (4, 256)"
    assert lines[1:3] == [
        "generation_last_hidden_state (5, 256)",
        "generation_top_3_logit_ids (5, 3)",
    ]
    deltas = [ast.literal_eval(line.replace(") [", "), [")) for line in lines[3:]]
    tokens = [token for ids, _ in deltas for token in ids]
    likeliest = [row[0] for _, rows in deltas for row in rows]
    assert len(tokens) == 5 and tokens == likeliest
