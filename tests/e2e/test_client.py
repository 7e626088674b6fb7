"""The client library on the real server: options have their effect, and requested outputs are returned."""

from __future__ import annotations

import numpy as np
import pytest

from inflight_client import Client, Completion

TEXT = "def area(width, height):\n"
IDS = list(range(10, 40))


@pytest.fixture(scope="module")
def client(demo_server) -> Client:
    return Client(demo_server.grpc)


def test_log_probs_are_consistent_with_their_sum_and_the_logits(client):
    done = client.generate(
        IDS, 12, end_id=-1, return_log_probs=True, num_top_log_probs=3, return_generation_logits=True
    )
    logits = done.generation_logits.astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(done.log_probs, log_probs[np.arange(12), done.token_ids], atol=1e-4)
    assert done.cum_log_prob == pytest.approx(sum(done.log_probs), abs=1e-4)
    for token, log_prob, top in zip(done.token_ids, done.log_probs, done.top_log_probs, strict=True):
        assert len(top) == 3 and top[0] == (token, pytest.approx(log_prob, abs=1e-5))


def test_a_clients_stream_adds_up_to_the_completion(client):
    options = {"return_log_probs": True, "return_prompt_log_probs": True, "top_k": 20, "seed": 3}
    whole = client.generate(IDS, 20, **options)
    deltas = list(client.stream(IDS, 20, **options))
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert [value for delta in deltas for value in delta.log_probs] == pytest.approx(
        whole.log_probs, abs=1e-5
    )
    assert deltas[0].prompt_log_probs == pytest.approx(whole.prompt_log_probs, abs=1e-5)
    assert len(whole.prompt_log_probs) == len(IDS)


@pytest.mark.parametrize("prompt", [TEXT, IDS], ids=["text", "ids"])
def test_beams_are_sorted_and_the_last_streamed_ones_are_the_same(client, prompt):
    options = {"beam_width": 3, "return_log_probs": True, "end_id": -1}
    whole = client.generate(prompt, 10, **options)
    sums = [beam.cum_log_prob for beam in whole.sequences]
    assert len(sums) == 3 and sums == sorted(sums, reverse=True)
    assert [sum(beam.log_probs) for beam in whole.sequences] == pytest.approx(sums, abs=1e-4)
    last = list(client.stream(prompt, 10, **options))[-1]
    assert last.is_cumulative
    assert [(s.text, s.token_ids) for s in last.sequences] == [(s.text, s.token_ids) for s in whole.sequences]


def test_sequences_are_the_same_from_either_model(client, demo_server):
    options = {"num_return_sequences": 3, "top_k": 50, "seed": 1, "end_id": -1}
    apart = client.generate(IDS, 8, **options)
    together = Client(demo_server.grpc, model="tensorrt_llm_infer").generate(IDS, 8, **options)
    assert ids_of(apart) == ids_of(together)
    assert len(set(ids_of(apart))) > 1


def test_words_may_be_ids_or_arrays(client):
    plain = client.generate(IDS, 16, end_id=-1).token_ids
    word = list(plain[6:8])
    stopped = client.generate(IDS, 16, end_id=-1, stop_words=[word])
    assert stopped.token_ids == plain[: ends_of(plain, word)]
    assert stopped.finish_reason == "STOP_WORDS"
    layout = np.array([[word, [2, -1]]])
    assert client.generate(IDS, 16, end_id=-1, stop_words=layout).token_ids == stopped.token_ids
    banned = client.generate(IDS, 16, end_id=-1, bad_words=[[plain[0]]])
    assert plain[0] not in banned.token_ids


def test_drafts_do_not_change_the_completion(client):
    plain = client.generate(IDS, 24, end_id=-1)
    looked_up = client.generate(IDS, 24, end_id=-1, prompt_lookup_num_tokens=5)
    guess = [*plain.token_ids[:3], 1]
    drafted = client.generate(IDS, 24, end_id=-1, draft_input_ids=guess, return_perf_metrics=True)
    assert looked_up.token_ids == drafted.token_ids == plain.token_ids
    metrics = drafted.perf_metrics
    assert metrics.total_draft_tokens == 4 and metrics.total_accepted_draft_tokens >= 3
    assert metrics.arrival_time_ns <= metrics.first_token_time_ns <= metrics.last_token_time_ns


def test_a_bias_may_be_given_by_ids_or_words(client):
    bias = np.zeros(3072, np.float32)
    bias[77] = 100.0
    assert client.generate(IDS, 4, end_id=-1, embedding_bias=bias).token_ids == (77,) * 4
    plain = client.generate(TEXT, 20).text
    assert " list" in plain
    assert " list" not in client.generate(TEXT, 20, embedding_bias={" list": -100.0}).text


def ids_of(done: Completion) -> list[tuple[int, ...]]:
    return [sequence.token_ids for sequence in done.sequences]


def ends_of(ids: tuple[int, ...], word: list[int]) -> int:
    """Return the index just after the first occurrence of `word`."""
    return next(end for end in range(len(word), len(ids) + 1) if list(ids[end - len(word) : end]) == word)
