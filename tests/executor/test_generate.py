"""`Executor.generate`: one or several prompts, as text or ids, to texts."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import AutoTokenizer

import inflight.executor as trtllm
from inflight.core.request.adapter import LoraRequest
from inflight.core.request.request import Request as CoreRequest
from inflight.errors import Unavailable
from inflight.executor import executor as executor_module
from tests.executor.conftest import PROMPT, make_executor

FINISHED = trtllm.FinishReason


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path):
    return AutoTokenizer.from_pretrained(checkpoint)


def test_a_prompt_of_ids_is_answered_by_ids_and_their_text(executor, reference, tokenizer) -> None:
    answer = executor.generate(PROMPT, max_tokens=8, end_id=-1)
    assert answer.token_ids == tuple(reference(PROMPT, 8))
    assert answer.prompt_token_ids == tuple(PROMPT)
    assert answer.sequences[0].finish_reason is FINISHED.LENGTH
    whole = tokenizer.decode([*PROMPT, *answer.token_ids], skip_special_tokens=True)
    assert whole == tokenizer.decode(PROMPT, skip_special_tokens=True) + answer.text


def test_several_prompts_are_answered_in_order(executor, reference, tokenizer) -> None:
    texts = ["some words here", "others", "more of them and more"]
    answers = executor.generate(texts, max_tokens=5, end_id=-1)
    ids = [tokenizer.encode(text) for text in texts]
    assert [list(answer.prompt_token_ids) for answer in answers] == ids
    assert [list(answer.token_ids) for answer in answers] == [reference(each, 5) for each in ids]
    (alone,) = executor.generate([ids[0]], max_tokens=5, end_id=-1)
    assert alone == answers[0]
    mixed = executor.generate([texts[0], ids[1]], max_tokens=5, end_id=-1)
    assert mixed == answers[:2]
    assert executor.await_responses(timedelta(0)) == []


def test_generation_stops_at_the_end_ids_of_the_checkpoint(executor, reference) -> None:
    eos = executor._description.eos_token_ids
    assert eos
    prompt = next(each for each in ([n, n + 1] for n in range(5, 400)) if eos[0] in reference(each, 40))
    tokens = reference(prompt, 40)
    answer = executor.generate(prompt, max_tokens=40)
    assert list(answer.token_ids) == tokens[: tokens.index(eos[0])]
    assert answer.sequences[0].finish_reason is FINISHED.END_ID


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(executor) -> None:
    whole = executor.generate(PROMPT, max_tokens=30, end_id=-1)
    stop = whole.text[10:13]
    answer = executor.generate(PROMPT, max_tokens=30, end_id=-1, stop=[stop])
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert answer.sequences[0].finish_reason is FINISHED.STOP_WORDS


def test_several_sequences_differ_and_beams_are_sorted(executor) -> None:
    sampling = trtllm.SamplingConfig(num_return_sequences=3, top_k=50, seed=5)
    answer = executor.generate(
        PROMPT, max_tokens=6, sampling_config=sampling, end_id=-1, return_log_probs=True
    )
    assert len({each.token_ids for each in answer.sequences}) == 3
    assert all(each.cum_log_prob < 0 for each in answer.sequences)
    beams = executor.generate(
        PROMPT, max_tokens=6, sampling_config=trtllm.SamplingConfig(2), return_log_probs=True
    )
    scores = [each.cum_log_prob for each in beams.sequences]
    assert len(scores) == 2 and scores[0] >= scores[1]


def test_a_stop_string_cuts_the_texts_of_beams(executor) -> None:
    beams = {"max_tokens": 12, "sampling_config": trtllm.SamplingConfig(2), "end_id": -1}
    whole = [each.text for each in executor.generate(PROMPT, **beams).sequences]
    stop = whole[0][10:13]
    answer = executor.generate(PROMPT, **beams, stop=[stop])
    assert [each.text for each in answer.sequences] == [text.partition(stop)[0] for text in whole]


class _Handed:
    """A replacement of Generating that stores its requests."""

    requests: ClassVar[list[CoreRequest]] = []

    def __init__(self, client, requests, *rest) -> None:
        self.requests[:] = requests

    def run(self, *rest) -> list[object]:
        return [None] * len(self.requests)


def test_adapters_are_given_for_all_prompts_or_for_each(executor, monkeypatch) -> None:
    monkeypatch.setattr(executor_module, "Generating", _Handed)
    prompts, adapter = [PROMPT, PROMPT], trtllm.LoraConfig(7)
    for lora, expected in (
        (None, [None, None]),
        ("sql", [LoraRequest(name="sql")] * 2),
        (adapter, [LoraRequest(7)] * 2),
        (["sql", None], [LoraRequest(name="sql"), None]),
        ([adapter, "sql"], [LoraRequest(7), LoraRequest(name="sql")]),
    ):
        executor.generate(prompts, lora=lora)
        assert [request.lora for request in _Handed.requests] == expected
    weights, rows = torch.ones(1, 6), torch.ones(1, 3, dtype=torch.int32)
    executor.generate(prompts, lora=trtllm.LoraConfig(7, weights, rows))
    first, second = _Handed.requests
    assert first.lora is second.lora and first.lora.weights is not None
    with pytest.raises(RuntimeError, match="lora has 1 adapters for 2 prompts"):
        executor.generate(prompts, lora=["sql"])
    with pytest.raises(trtllm.ExecutorError, match="lora weights must be one of"):
        executor.generate(prompts, lora=trtllm.LoraConfig(7, weights.double(), rows))


def test_more_prompts_than_the_queue_takes_are_generated(checkpoint: Path, reference) -> None:
    with make_executor(checkpoint, max_batch_size=1, max_beam_width=1, max_queue_size=1) as executor:
        prompts = [[n, n] for n in range(5, 12)]
        answers = executor.generate(prompts, max_tokens=3, end_id=-1)
        assert [list(answer.token_ids) for answer in answers] == [reference(each, 3) for each in prompts]


def test_one_prompt_that_cannot_be_served_fails_the_call(executor) -> None:
    with pytest.raises(trtllm.ExecutorError, match=r"prompt 1: .*40000"):
        executor.generate([[5], [5] * 40_000], max_tokens=3)


def test_a_prompt_that_the_engine_does_not_take_fails_the_call(executor, monkeypatch) -> None:
    def refuse(*_) -> None:
        raise Unavailable("the engine is gone")

    monkeypatch.setattr(executor._engine.client, "submit", refuse)
    with pytest.raises(trtllm.ExecutorError, match="prompt 0: the engine is gone"):
        executor.generate(PROMPT)


@pytest.mark.parametrize("prompts", [[], [[5], 5], [5, [5]], ["text", 5]])
def test_invalid_prompts_are_refused(executor, prompts) -> None:
    with pytest.raises(trtllm.InvalidValue, match="prompts is"):
        executor.generate(prompts)


def test_text_needs_a_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(checkpoint / name)
    with make_executor(tmp_path) as executor:
        assert executor.generate(PROMPT, max_tokens=2).text == ""
        with pytest.raises(trtllm.ExecutorError, match=r"no tokenizer\.json"):
            executor.generate("text")


@pytest.mark.parametrize(("is_terminal", "progress", "is_shown"), [
    (True, None, True), (False, None, False), (True, False, False), (False, True, True),
])  # fmt: skip
def test_a_long_call_shows_a_progress_bar(
    executor, capsys, monkeypatch, is_terminal: bool, progress: bool | None, is_shown: bool
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    executor.generate([PROMPT] * 10, max_tokens=100, progress=progress)
    assert ("generating" in capsys.readouterr().err) == is_shown


def test_a_short_call_shows_no_progress_bar(executor, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    executor.generate(PROMPT, max_tokens=5)
    assert capsys.readouterr().err == ""
