"""Prompt tables on real servers, in every declared type, against transformers' inputs_embeds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inflight.server.launch import TritonServer, serve
from inflight_client import Client, ServerError
from tests.tiers import with_all

from .clients import ask, completion
from .conftest import DEMO_MODEL

ROOT = Path(__file__).parents[2]
VOCAB_SIZE, HIDDEN = 3072, 256
IDS = [70, VOCAB_SIZE + 2, 71, 72, VOCAB_SIZE, VOCAB_SIZE + 2, 73]
NUM_TOKENS = 12


def make_rows(seed: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 0.05).to(dtype)


@pytest.fixture(scope="module")
def greedy(oracle):
    """Return a function that generates tokens by transformers."""

    def generate(ids: list[int], rows: torch.Tensor) -> list[int]:
        tokens = torch.tensor(ids)
        embeddings = oracle.oracle.get_input_embeddings()(tokens.clamp(max=VOCAB_SIZE - 1)).detach()
        embeddings[tokens >= VOCAB_SIZE] = rows.float()[tokens[tokens >= VOCAB_SIZE] - VOCAB_SIZE]
        with torch.inference_mode():
            return oracle.oracle.generate(
                inputs_embeds=embeddings[None],
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
            )[0].tolist()

    return generate


@pytest.mark.covers("prompt_embedding_table", "prompt_vocab_size", "prompt_table_extra_ids")
def test_virtual_tokens_may_be_between_ids(exact_server, greedy) -> None:
    rows = make_rows(1)
    (answer,) = ask(
        exact_server.grpc,
        input_ids=IDS,
        request_output_len=NUM_TOKENS,
        prompt_embedding_table=rows[None].numpy(),
        prompt_vocab_size=3,
        prompt_table_extra_ids=[0, 5, 0, 0, 5, 5, 0],
        end_id=-1,
    )
    assert answer.error is None and answer.ids == IDS + greedy(IDS, rows)


@pytest.mark.covers("prompt_embedding_table")
def test_a_prompt_table_may_precede_a_text(exact_server, greedy, tokenizer) -> None:
    rows, text = make_rows(2), "import os\n"
    ids = [VOCAB_SIZE, VOCAB_SIZE + 1, VOCAB_SIZE + 2, *tokenizer.encode(text)]
    asked = {"text_input": text, "prompt_embedding_table": rows[None].numpy(), "end_id": -1}
    (answer,) = ask(exact_server.grpc, request_output_len=NUM_TOKENS, **asked)
    assert answer.error is None and answer.ids == ids + greedy(ids, rows)
    assert answer.text == text + tokenizer.decode(greedy(ids, rows))


@pytest.mark.covers("prompt_embedding_table", "prompt_table_extra_id")
def test_ensemble_accepts_prompt_tables(exact_server, greedy, tokenizer) -> None:
    rows, text = make_rows(2), "import os\n"
    ids = [VOCAB_SIZE, VOCAB_SIZE + 1, VOCAB_SIZE + 2, *tokenizer.encode(text)]
    answer = completion(
        exact_server.grpc,
        model="ensemble",
        text_input=text,
        max_tokens=NUM_TOKENS,
        prompt_embedding_table=rows[None].numpy(),
        prompt_table_extra_id=9,
        end_id=-1,
    )
    assert answer.text == tokenizer.decode(greedy(ids, rows))


def test_the_client_sends_prompt_tables(exact_server, greedy) -> None:
    client, tables = Client(exact_server.grpc), [make_rows(seed) for seed in range(3, 6)]
    for rows in (*tables, *tables):
        answer = client.generate(IDS, NUM_TOKENS, prompt_table=rows, end_id=-1)
        assert list(answer.token_ids) == greedy(IDS, rows)
    # A refused request does not affect others.
    with pytest.raises(ServerError, match=r"input_ids must be in \[0, 3074\], got 3075 at position 0"):
        client.generate([VOCAB_SIZE + 3], 5, prompt_table=tables[0])
    with pytest.raises(ServerError, match=r"must have shape \[1, rows, 256\]"):
        client.generate(IDS, 5, prompt_table=tables[0][:, :8])
    with pytest.raises(ServerError, match="FP16"):
        client.generate(IDS, 5, prompt_table=tables[0].float())


def test_the_prompt_table_example_runs(exact_server) -> None:
    command = [sys.executable, "examples/multimodal_rows.py", "--checkpoint", str(DEMO_MODEL)]
    done = subprocess.run(
        [*command, "--url", exact_server.grpc, "--rows", "64"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, again, _ = done.stdout.splitlines()
    assert first.removeprefix("first: ").split(", ")[0] == again.removeprefix("again: ").split(", ")[0]
    assert " 0 blocks" in first and " 0 blocks" not in again


# ---------------------------------------------------------------------- other declared types


@pytest.fixture(scope="module", params=with_all(["TYPE_BF16", "TYPE_FP32"], ["TYPE_BF16"]))
def typed_server(request: pytest.FixtureRequest, elsewhere: Path) -> Iterator[TritonServer]:
    settings = {"max_tokens_in_paged_kv_cache": "16384", "prompt_embedding_table_data_type": request.param}
    with serve(dtype="float32", settings=settings) as server:
        server.data_type = request.param
        yield server


@pytest.mark.exhaustive
def test_prompt_tables_work_in_another_declared_type(typed_server, greedy, tokenizer) -> None:
    rows = make_rows(7, torch.bfloat16 if typed_server.data_type == "TYPE_BF16" else torch.float32)
    client = Client(typed_server.grpc, "tensorrt_llm")
    assert list(client.generate(IDS, NUM_TOKENS, prompt_table=rows, end_id=-1).token_ids) == greedy(IDS, rows)
    ids = [VOCAB_SIZE, VOCAB_SIZE + 1, VOCAB_SIZE + 2, *tokenizer.encode("x = 1")]
    text = client.generate("x = 1", NUM_TOKENS, prompt_table=rows, end_id=-1).text
    assert text == tokenizer.decode([*tokenizer.encode("x = 1"), *greedy(ids, rows)])[len("x = 1") :]
