"""Requests with an adapter and a guide, an adapter and a prompt table, or all three, against PEFT's model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import regex
import torch

from inflight.batch_manager.gpt_manager import GptManager
from inflight.core.ports import Engine
from inflight.core.request.adapter import LoraRequest
from inflight.core.request.guide import Guide, GuideEvent, GuideKind
from inflight.core.request.request import Origin, Request
from inflight.core.request.response import Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.scheduler import Scheduler
from inflight.testing.simulation.integrity import check_integrity
from tests.engine.kernels import DEFAULT, TORCH
from tests.engine.serving import Served, config_of
from tests.engine.tables import TableOracle, make_table, with_table
from tests.engine.test_served_adapters import HostAdapters, adapters_of
from tests.guided.factories import END_ID, load, tiny_vocabulary
from tests.models.zoo import Zoo, ZooModel
from tests.models.zoo_configs import VOCAB_SIZE
from tests.tiers import with_all

PATTERNS = ["([a-d]{2,4} ){3,6}end", r"[0-9]{2,5}(\+[0-9]{1,3}){2,5}=\?"]
NUM_TOKENS = 20
GREEDY = SamplingConfig(top_k=1)
every_kernel = pytest.mark.parametrize("kernels", with_all([DEFAULT, TORCH], [None]))


class ReadyGuides:
    """A GuideCompiler whose guides are compiled at once."""

    def __init__(self) -> None:
        self._asked: list[int] = []

    def submit(self, request_id: int, guide: Guide, origin: Origin | None = None) -> None:
        self._asked.append(request_id)

    def events(self) -> tuple[GuideEvent, ...]:
        asked, self._asked = self._asked, []
        return tuple(map(GuideEvent, asked))

    def forget(self, request_id: int) -> None:
        pass


@dataclass(frozen=True)
class Case:
    """A request and its parts.

    Attributes:
        rows: The rows of its prompt table; None without one.
        pattern: A regular expression for its text; "" without a guide.
    """

    request: Request
    rows: torch.Tensor | None
    pattern: str

    def expected(self, model: ZooModel) -> list[int]:
        """Return the tokens of PEFT's model's `generate`, including the end id."""
        request = self.request
        oracle = adapters_of(model)[request.lora.task_id].oracle if request.lora else model
        prompt = torch.tensor([request.input_token_ids])
        inputs: dict[str, Any] = {"input_ids": prompt}
        if self.rows is not None:
            inputs = {"inputs_embeds": TableOracle(oracle).embeddings(request.input_token_ids, self.rows)}
        start = 0 if "inputs_embeds" in inputs else prompt.shape[1]
        allowed = allowed_by(self.pattern, start) if self.pattern else None
        with torch.inference_mode():
            ids = oracle.oracle.generate(
                **inputs,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=END_ID if self.pattern else None,
                pad_token_id=0,
                prefix_allowed_tokens_fn=allowed,
            )
        return ids[0, start:].tolist()


def allowed_by(pattern: str, start: int) -> Callable[[int, torch.Tensor], list[int]]:
    """Return a function for `generate` that allows tokens after which a match is possible, and the end at one."""
    tokens, compiled = tiny_vocabulary().tokens, regex.compile(pattern.encode())

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        text = b"".join(tokens[token] for token in ids[start:].tolist())
        found = [
            token for token, spelled in enumerate(tokens)
            if spelled and token not in tiny_vocabulary().special_ids
            and compiled.fullmatch(text + spelled, partial=True)
        ]  # fmt: skip
        return found + [END_ID] * bool(compiled.fullmatch(text))

    return allowed


@cache
def expected_of(model: ZooModel) -> dict[int, list[int]]:
    """Return the expected tokens by request id, without end ids."""
    return {case.request.request_id: without_end(case.expected(model)) for case in cases_of(model)}


def cases_of(model: ZooModel) -> list[Case]:
    """Return requests with an adapter, one with magnitudes and none; with and without a table or a guide."""
    cases: list[Case] = []
    for task in (1, 3, None):
        for has_table in (False, True):
            for pattern in (*PATTERNS, ""):
                number = len(cases)
                prompt, rows = model.prompt(9 + number % 5, number), None
                options: dict[str, Any] = {
                    "lora": None if task is None else LoraRequest(task_id=task),
                    "guide": Guide(GuideKind.REGEX, pattern) if pattern else None,
                    "end_ids": (END_ID,) if pattern else (),
                    "sampling": GREEDY,
                }
                if has_table:
                    rows = make_table(3, number)
                    ids = (*prompt[:3], VOCAB_SIZE + 2, VOCAB_SIZE, *prompt[3:], VOCAB_SIZE + 1)
                    request = with_table(number, ids, rows, NUM_TOKENS, **options)
                else:
                    request = Request(number, prompt, NUM_TOKENS, **options)
                cases.append(Case(request, rows, pattern))
    return cases


def serve(engine: Engine, model: ZooModel, requests: Sequence[Request], per_step: int) -> Served:
    """Serve with a GptManager; `per_step` requests arrive in each iteration."""
    scheduler, served, waiting = Scheduler(config_of("no-evict"), engine.limits), Served(), list(requests)

    def get(room: int) -> list[Request]:
        arriving = waiting[:per_step]
        del waiting[:per_step]
        return arriving

    def send(response: Response) -> None:
        assert response.error is None, response.error
        served.responses.setdefault((response.request_id, response.sequence_index), []).append(response)

    adapters = HostAdapters({task: adapter.weights for task, adapter in enumerate(adapters_of(model))})
    manager = GptManager(engine, scheduler, get, send, guides=ReadyGuides(), adapters=adapters, start=False)
    while manager.step() or scheduler.num_active:
        check_integrity(scheduler)
    return served


def without_end(tokens: list[int]) -> list[int]:
    return tokens[:-1] if tokens[-1:] == [END_ID] else tokens


@every_kernel
@pytest.mark.parametrize("name", with_all(["llama-gqa", "gpt2"], ["gpt2"]))
def test_each_request_alone_and_in_one_batch_gives_pefts_tokens(
    zoo: Zoo, name: str, kernels: str | None
) -> None:
    model = zoo[name]
    cases, expected = cases_of(model), expected_of(model)
    assert len(set(map(tuple, expected.values()))) > len(cases) // 2, "they differ"
    requests = [case.request for case in cases]
    together = serve(load(model.folder, 256, len(cases), kernels=kernels), model, requests, len(cases))
    alone = serve(load(model.folder, 256, 1, kernels=kernels), model, requests, len(cases))
    for case in cases:
        number = case.request.request_id
        assert without_end(together.tokens(number)) == expected[number], case
        assert without_end(alone.tokens(number)) == expected[number], case
    plain = [replace(case.request, lora=None) for case in cases]
    changed = serve(load(model.folder, 256, len(cases), kernels=kernels), model, plain, len(cases))
    num_same = sum(changed.tokens(each) == together.tokens(each) for each in plain if each.guide)
    assert num_same < len(plain) // 2, "adapters make a difference beside guides"
