"""Logits post-processors on the real server: the page's example as written, refusals, single failures."""

from __future__ import annotations

import re

import pytest

from inflight_client import Client, ServerError

from .clients import ask, completion
from .post_processors import PAGE
from .test_readme import here

PROMPT = [5, 9, 5, 9, 3]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.S | re.M)


@pytest.fixture(scope="module")
def client(exact_server) -> Client:
    return Client(exact_server.grpc)


@pytest.mark.covers("logits_post_processor_name")
@pytest.mark.parametrize("beam_width", [1, 3])
@pytest.mark.parametrize("controls", [{}, {"prompt_lookup_num_tokens": 4}], ids=["plain", "lookup"])
def test_the_even_ids_post_processor_allows_only_even_ids(exact_server, controls, beam_width):
    if controls and beam_width > 1:
        controls = {"repetition_penalty": 0.5}
    answer = completion(
        exact_server.grpc,
        input_ids=PROMPT,
        request_output_len=24,
        beam_width=beam_width,
        logits_post_processor_name="even_ids",
        **controls,
    )
    assert len(answer.beams) == beam_width
    assert all(len(ids) == 24 and not any(token % 2 for token in ids) for ids in answer.beams)


@pytest.mark.parametrize("name", ["no_echo", "batched"])
def test_tokens_equal_transformers_with_the_same_post_processor(exact_server, oracle, name):
    answer = completion(
        exact_server.grpc,
        input_ids=PROMPT,
        request_output_len=20,
        logits_post_processor_name=name,
    )
    tokens = list(PROMPT)
    for _ in range(20):
        logits = oracle.logits(tokens)[-1].clone()
        logits[tokens[-1]] = float("-inf")
        tokens.append(int(logits.argmax()))
    assert answer.ids == tokens[len(PROMPT) :]


def test_post_processors_apply_to_text_requests(exact_server, tokenizer):
    prompt = "def area(width, height):\n"
    request = {"request_output_len": 24, "logits_post_processor_name": "even_ids"}
    by_ids = completion(exact_server.grpc, input_ids=tokenizer.encode(prompt), end_id=-1, **request)
    texts = {"text_input": prompt, "max_tokens": 24, "end_id": -1, "exclude_input_in_output": True}
    (answer,) = ask(exact_server.grpc, "ensemble", logits_post_processor_name="even_ids", **texts)
    assert answer.text == tokenizer.decode([*tokenizer.encode(prompt), *by_ids.ids])[len(prompt) :]


def test_an_unknown_post_processor_is_refused(client):
    with pytest.raises(
        ServerError, match="LogitsPostProcessor odd not found: logits_post_processor_name is 'odd', expe"
    ):
        client.generate(PROMPT, 4, logits_post_processor_name="odd")


def test_a_post_processor_that_raises_ends_only_its_request(client):
    expected = client.generate(PROMPT, 30)
    stream = client.stream(PROMPT, 30)
    begun = next(stream)
    with pytest.raises(ServerError, match="'raise_later' raised ValueError: client 7 has 10 tokens") as error:
        client.generate(PROMPT, 30, logits_post_processor_name="raise_later", client_id=7)
    assert "INTERNAL" in str(error.value.status)
    rest = [token for delta in stream for token in delta.token_ids]
    assert [*begun.token_ids, *rest] == list(expected.token_ids)


def test_a_post_processor_that_bans_every_token_is_reported(client):
    with pytest.raises(ServerError, match="logits_post_processor_name must leave a token that may come next"):
        client.generate(PROMPT, 4, logits_post_processor_name="ban_all")


def test_the_programs_of_the_post_processors_page_run(exact_server):
    programs = [text for kind, text in BLOCKS if kind == "python" and not text.startswith("# rules.py")]
    assert len(programs) == 2
    for program in programs:
        exec(compile(here(program, exact_server), "<program>", "exec"), {"__name__": "__main__"})
    tokens = (
        Client(exact_server.grpc).generate([10, 11, 12], 12, logits_post_processor_name="even_ids").token_ids
    )
    assert tokens and not any(token % 2 for token in tokens)
