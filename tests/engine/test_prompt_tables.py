"""Rows of prompt tables in prompts, in every way of serving, compared with transformers with inputs_embeds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from inflight.core.request.request import ExternalDraft, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.engine import ModelEngine
from inflight.engine.prompt_tables import PromptTables
from tests.engine.driver import Driver
from tests.engine.kernels import by_default_and
from tests.engine.ranks import TOPOLOGIES, ranks
from tests.engine.serving import WAYS, config_of, load, serve, to_torch
from tests.engine.tables import TableOracle, make_table, with_table
from tests.models.zoo import Zoo, ZooModel
from tests.models.zoo_configs import VOCAB_SIZE
from tests.tiers import with_all

LOGITS = OutputOptions(return_generation_logits=True, return_context_logits=True)
METRICS = OutputOptions(return_perf_metrics=True)
CASES = ["llama-gqa", "llama-gqa-tied", "qwen2", "gpt2"]
every_family = pytest.mark.parametrize(
    ("case", "kernels"), with_all(by_default_and(CASES, CASES), [("llama-gqa", None), ("gpt2", "torch")])
)
of_llama = pytest.mark.parametrize(
    ("case", "kernels"), with_all(by_default_and(["llama-gqa"], ["llama-gqa"]), [("llama-gqa", None)])
)
"""By default without torch's operators, which the tests of every family run."""


def a_prompt(model: ZooModel, seed: int, num_rows: int, length: int = 33) -> tuple[int, ...]:
    """Return tokens of the vocabulary and rows of the table in any order, some of them repeated."""
    numbers = random.Random(seed)
    virtual = [VOCAB_SIZE + numbers.randrange(num_rows) for _ in range(num_rows + 3)]
    ids = [*model.prompt(length - len(virtual), seed), *virtual]
    numbers.shuffle(ids)
    return tuple(ids)


def mixed_requests(
    model: ZooModel, new: int = 16, **options: object
) -> tuple[list[Request], list[torch.Tensor]]:
    """Return requests with different tables and without, and the table of each."""
    requests: list[Request] = []
    tables = []
    for number in range(8):
        rows = make_table(2 + number, number)
        ids = a_prompt(model, number, len(rows), 25 + 3 * number)
        tables.append(rows)
        if number % 3 == 2:
            requests.append(Request(number, model.prompt(20 + number, number), new, **options))
        else:
            requests.append(with_table(number, ids, rows, new, **options))
    return requests, tables


def assert_as_transformers(model: ZooModel, requests, tables, served) -> None:
    oracle = TableOracle(model)
    for request, rows in zip(requests, tables, strict=True):
        tokens = served.tokens(request)
        assert tokens == oracle.greedy(request.input_token_ids, rows, request.max_new_tokens)


@every_family
def test_logits_and_tokens_are_those_of_inputs_embeds(zoo: Zoo, case: str, kernels: str | None) -> None:
    model = zoo[case]
    requests, tables = mixed_requests(model, output=LOGITS)
    served = serve(
        load(model.folder, 200, 8, kernels=kernels), config_of("no-evict"), requests, per_iteration=8
    )
    assert_as_transformers(model, requests, tables, served)
    for request, rows in zip(requests, tables, strict=True):
        result, length = served.result(request), request.prompt_length
        assert result.output_token_ids[0][:length] == request.input_token_ids
        expected = TableOracle(model).logits(result.output_token_ids[0], rows)
        for found, wanted in (
            (to_torch(result.generation_logits[0]), expected[length - 1 : -1]),
            (to_torch(result.context_logits), expected[:length]),
        ):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@of_llama
@pytest.mark.parametrize("way", with_all(WAYS, ["utilization-chunked-no-reuse", "chunked"]))
def test_every_way_of_serving_gives_the_tokens_of_inputs_embeds(
    zoo: Zoo, case: str, kernels: str | None, way: str
) -> None:
    """Chunked, paused and recomputed, with and without shared blocks."""
    model = zoo[case]
    requests, tables = mixed_requests(model, 24)
    requests, tables = requests + [replace(r, request_id=10 + r.request_id) for r in requests], 2 * tables
    served = serve(load(model.folder, 24, kernels=kernels), config_of(way), requests)
    assert_as_transformers(model, requests, tables, served)
    assert served.num_pauses > 0 or not way.startswith("utilization")


@every_family
@pytest.mark.parametrize(
    "topology", with_all([pytest.param(sizes, id=name) for name, sizes in TOPOLOGIES.items()], [(2, 2)])
)
def test_several_ranks_give_the_tokens_of_inputs_embeds(
    zoo: Zoo, case: str, kernels: str | None, topology: tuple[int, int]
) -> None:
    model = zoo[case]
    requests, tables = mixed_requests(model)
    with ranks(model.folder, topology, kernels=kernels) as engine:
        served = serve(engine, config_of("chunked"), requests)
        of_stages = [getattr(stage, "runner", stage).prompt_tables for stage in engine.stages]
    assert_as_transformers(model, requests, tables, served)
    tp_size = topology[0]
    assert not any(tables._tables for tables in of_stages[tp_size:]), "the first stage alone needs them"


# ---------------------------------------------------------------------- the KV cache


def reused(served, request: Request) -> int:
    return served.result(request).perf_metrics.num_reused_blocks


@of_llama
def test_equal_tables_share_blocks_and_different_ones_never(zoo: Zoo, case: str, kernels: str | None) -> None:
    model = zoo[case]
    rows, other = make_table(4), make_table(4, seed=1)
    prompt = a_prompt(model, 1, 4, 40)
    nearly = rows.clone()
    nearly[3, 5] += 0.5
    engine = load(model.folder, 200, kernels=kernels)
    requests = [
        with_table(1, prompt, rows, output=METRICS),
        with_table(2, prompt, rows.clone(), output=METRICS),
        with_table(3, prompt, other, output=METRICS),
        with_table(4, prompt, nearly, output=METRICS),
        with_table(5, prompt, rows, output=METRICS, extra_ids=(7,) * 40),
        with_table(6, prompt, rows, output=METRICS, extra_ids=(7,) * 40),
    ]
    served = serve(engine, config_of("no-evict"), requests, per_iteration=1)
    assert_as_transformers(model, requests, [rows, rows, other, nearly, rows, rows], served)
    assert [reused(served, request) for request in requests] == [0, 5, 0, 0, 0, 5], "the last one begun"


def test_a_planted_reuse_of_another_tables_blocks_is_detected(zoo: Zoo) -> None:
    """A planted fault: the identity does not include the table."""
    model = zoo["llama-gqa"]
    prompt, tables = a_prompt(model, 1, 4, 40), [make_table(4), make_table(4, seed=1)]
    requests = [with_table(number, prompt, rows) for number, rows in enumerate(tables)]
    same = requests[0].prompt_table.digest
    forged = replace(requests[1].prompt_table, digest=same)
    requests[1] = replace(requests[1], prompt_table=forged, identity=requests[0].identity)
    served = serve(load(model.folder, 200), config_of("no-evict"), requests, per_iteration=1)
    with pytest.raises(AssertionError):
        assert_as_transformers(model, requests, tables, served)


# ---------------------------------------------------------------------- sequences, beams, drafts, controls


@of_llama
def test_beams_are_those_of_transformers(zoo: Zoo, case: str, kernels: str | None) -> None:
    model = zoo[case]
    requests, tables = mixed_requests(model, 10, sampling=SamplingConfig(beam_width=3))
    served = serve(load(model.folder, 200, 8, kernels=kernels), config_of("chunked"), requests)
    for request, rows in zip(requests, tables, strict=True):
        assert served.beams(request) == TableOracle(model).beams(request.input_token_ids, rows, 10, 3)


@of_llama
def test_sequences_of_a_request_share_a_table_and_release_it(
    zoo: Zoo, case: str, kernels: str | None
) -> None:
    model = zoo[case]
    sampling = SamplingConfig(temperature=0.9, top_k=9, random_seed=2, num_return_sequences=3)
    several = with_table(1, a_prompt(model, 1, 4), make_table(4), sampling=sampling)
    served = serve(load(model.folder, 200, kernels=kernels), config_of("no-evict"), [several])
    alone = serve(load(model.folder, 200), config_of("no-reuse"), [several])
    for index in range(3):
        assert served.tokens(several, index) == alone.tokens(several, index)
    driver = Driver(engine := load(model.folder, 200, kernels=kernels))
    sequences = [
        driver.start(several.input_token_ids, prompt_table=several.prompt_table, identity=several.identity)
        for _ in range(2)
    ]
    driver.step(dict.fromkeys(sequences, 33))
    tables: PromptTables = engine.runner.prompt_tables
    assert tables.num_tables == 1 and len({id(table) for _, table in tables._tables.values()}) == 1
    driver.release(sequences[0])
    driver.step(generation=[sequences[1]])
    assert tables.num_tables == 1
    driver.release(sequences[1])
    another = driver.start(model.prompt(5))
    driver.step({another: 5})
    assert tables.num_tables == 0


@of_llama
def test_drafts_change_no_token_and_are_of_the_vocabulary(zoo: Zoo, case: str, kernels: str | None) -> None:
    """The looked-up n-gram is followed by rows of the table, which cannot be drafts."""
    model = zoo[case]
    requests, tables = [], []
    for number in range(4):
        rows = make_table(5, number)
        plain = model.prompt(8, number)
        prompt = (*plain, VOCAB_SIZE + 2, VOCAB_SIZE, *plain, VOCAB_SIZE + 4, *plain)
        greedy = TableOracle(model).greedy(prompt, rows, 8)
        # The next tokens are already in the prompt, followed by a row of the table.
        prompt = (
            *plain,
            *greedy[:4],
            VOCAB_SIZE + 2,
            VOCAB_SIZE,
            *plain,
            *greedy[:4],
            VOCAB_SIZE + 4,
            *plain,
        )
        requests.append(with_table(number, prompt, rows, 20, prompt_lookup_num_tokens=6, output=METRICS))
        tables.append(rows)
    drafts = (*TableOracle(model).greedy(requests[0].input_token_ids, tables[0], 3), 5)
    guessed = with_table(
        9, requests[0].input_token_ids, tables[0], 20, draft=ExternalDraft(drafts), output=METRICS
    )
    requests, tables = [*requests, guessed], [*tables, tables[0]]
    served = serve(load(model.folder, 200, 8, kernels=kernels), config_of("chunked"), requests)
    assert_as_transformers(model, requests, tables, served)
    assert served.result(guessed).perf_metrics.num_accepted_draft_tokens == 3


@of_llama
def test_controls_neither_read_nor_choose_ids_of_table_rows(zoo: Zoo, case: str, kernels: str | None) -> None:
    model = zoo[case]
    controls = [
        SamplingConfig(repetition_penalty=1.3, frequency_penalty=0.2, no_repeat_ngram_size=2),
        SamplingConfig(temperature=1.5, top_p=0.95, presence_penalty=0.4, random_seed=1),
        SamplingConfig(temperature=2.0, top_k=50, random_seed=2),
    ]
    requests = [
        with_table(
            number, a_prompt(model, number, 6), make_table(6, number), 24, sampling=controls[number % 3]
        )
        for number in range(9)
    ]
    served = serve(load(model.folder, 200, 8, kernels=kernels), config_of("chunked"), requests)
    engine = load(model.folder, 200, kernels=kernels)
    for request in requests:
        assert max(served.tokens(request)) < VOCAB_SIZE
        alone = serve(engine, config_of("no-reuse"), [request])
        assert served.tokens(request) == alone.tokens(request)


# ---------------------------------------------------------------------- data types, and what is without cost


@of_llama
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_table_may_be_of_another_type_than_the_model(
    zoo: Zoo, case: str, kernels: str | None, dtype: torch.dtype
) -> None:
    model = zoo[case]
    rows = make_table(4, dtype=dtype)
    request = with_table(1, a_prompt(model, 1, 4), rows)
    served = serve(load(model.folder, 200, kernels=kernels), config_of("no-evict"), [request])
    assert_as_transformers(model, [request], [rows.float()], served)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_models_in_other_dtypes_take_tables(zoo: Zoo, dtype: str) -> None:
    """The model's own embeddings, given as a table, have the same effect as the tokens."""
    model = zoo["llama-gqa"]
    engine = load(model.folder, 200, dtype=dtype)
    prompt = model.prompt(20)
    rows = model.oracle.get_input_embeddings().weight.detach()[list(prompt)]
    plain = Request(1, prompt, 12)
    virtual = with_table(2, range(VOCAB_SIZE, VOCAB_SIZE + 20), rows, 12)
    mixed = with_table(3, [*prompt[:9], *range(VOCAB_SIZE + 9, VOCAB_SIZE + 20)], rows, 12)
    served = serve(engine, config_of("no-evict"), [plain, virtual, mixed], per_iteration=3)
    assert served.tokens(virtual) == served.tokens(mixed) == served.tokens(plain)


def test_a_batch_without_rows_of_tables_has_no_extra_work(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo["llama-gqa"]
    engine: ModelEngine = load(model.folder, 200)
    monkeypatch.setattr(PromptTables, "_find", None)
    serve(engine, config_of("no-evict"), [Request(1, model.prompt(20), 12)])
