"""max_attention_window_size and sink_token_length, compared with transformers' windows and with explicit masks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.core.request.request import ExternalDraft, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.attention import gathering_metadata
from inflight.engine.windows import AttentionWindow, layer_windows
from inflight.errors import ConfigError
from tests.engine.driver import Driver, alone, load_engine
from tests.engine.kernels import by_default_and
from tests.engine.serving import WAYS, config_of, load, serve
from tests.models.zoo import Zoo, ZooModel
from tests.models.zoo_configs import MAX_POSITIONS
from tests.tiers import examples, with_all

NUM_TOKENS = examples(24, all=40)
TOLERANCE = 1e-4
# (windows, one for all layers or one per layer; number of sinks)
SETTINGS = [
    ((9,), 0),
    ((9, 21), 0),
    ((1000, 13), 0),
    ((9, 21, 1), 0),
    ((12, 30), 5),
    ((19,), 9),
    ((40, 33), 32),
]
CASES = ["llama-gqa", "qwen3", "gpt2"]


def sees(position: int, key: int, window: int | None, num_sinks: int) -> bool:
    """Return whether a token attends to a key: the sinks, and the last tokens that fill the window."""
    if key > position:
        return False
    return window is None or key < num_sinks or key > position - (window - num_sinks)


def reconfigured(model: ZooModel, **changes: Any) -> ZooModel:
    """Return the model as transformers loads it with another configuration."""
    oracle = type(model.oracle).from_pretrained(model.folder, attn_implementation="eager", **changes)
    oracle.generation_config.use_cache = False  # in transformers 5, a cache for windows of 1 keeps everything
    return ZooModel(model.folder, oracle.eval())


@functools.cache
def masked(model: ZooModel, asked: tuple[int, ...], num_sinks: int = 0) -> ZooModel:
    """Return the model with replaced attention masks, as a copy of transformers' model without a cache."""
    found = reconfigured(model)
    oracle, config = found.oracle, found.oracle.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    for layer, kind in enumerate(kinds):
        own = config.sliding_window if kind == "sliding_attention" else None
        window = min(size for size in (own, asked[layer % len(asked)]) if size is not None)
        attention = oracle.transformer.h[layer].attn if config.model_type == "gpt2" else None
        attention = attention or oracle.model.layers[layer].self_attn
        attention.register_forward_pre_hook(_mask_hook(window, num_sinks), with_kwargs=True)
    return found


def _mask_hook(window: int | None, num_sinks: int) -> Any:
    lowest = torch.finfo(torch.float32).min
    whole = torch.tensor(
        [
            [0.0 if sees(position, key, window, num_sinks) else lowest for key in range(MAX_POSITIONS)]
            for position in range(MAX_POSITIONS)
        ]
    )

    def replace_mask(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        length = (args[0] if args else kwargs["hidden_states"]).shape[1]
        assert "attention_mask" in kwargs
        return args, {**kwargs, "attention_mask": whole[None, None, :length, :length]}

    return replace_mask


def assert_same(folder: Path, oracle: ZooModel, **settings: Any) -> None:
    """Compare greedy tokens and their logits."""
    prompt = oracle.prompt(37)
    row = alone(load_engine(folder, **settings), prompt, NUM_TOKENS)
    assert row.generated == oracle.greedy(prompt, NUM_TOKENS)
    expected = oracle.logits(row.tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("size", with_all([1, 7, 8, 19, 50], [1, 8, 19]))
def test_a_window_equals_the_sliding_window_of_transformers(zoo: Zoo, size: int) -> None:
    model = zoo["mistral-no-window"]
    assert_same(model.folder, reconfigured(model, sliding_window=size), max_attention_window_size=(size,))


def test_windows_in_some_layers_equal_the_layer_types_of_transformers(zoo: Zoo) -> None:
    model = zoo["qwen2"]
    oracle = reconfigured(
        model,
        use_sliding_window=True,
        sliding_window=13,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )
    assert_same(model.folder, oracle, max_attention_window_size=(MAX_POSITIONS, 13))


@pytest.mark.parametrize(
    ("size", "same_as"), with_all([(9, 9), (19, 19), (40, 19), (100_000, 19)], [(9, 9), (40, 19)])
)
def test_the_smaller_of_the_checkpoints_and_the_parameters_window_applies(
    zoo: Zoo, size: int, same_as: int
) -> None:
    model = zoo["mistral-window"]
    assert_same(model.folder, reconfigured(model, sliding_window=same_as), max_attention_window_size=(size,))


@pytest.mark.parametrize(
    ("case", "asked", "num_sinks"),
    with_all(
        [(case, *setting) for case in CASES for setting in SETTINGS]
        + [("qwen2-window", (9,), 0), ("qwen2-window", (40, 9, 50), 0), ("qwen2-window", (40, 30), 5)],
        [("gpt2", (9, 21, 1), 0), ("qwen2-window", (40, 30), 5)],
    ),
)
def test_windows_and_sinks_have_the_effect_of_masks(
    zoo: Zoo, case: str, asked: tuple[int, ...], num_sinks: int
) -> None:
    model = zoo[case]
    oracle = masked(model, asked, num_sinks)
    for kernels in (None, "torch"):  # both compared with one run of the oracle, the slowest part
        settings = {"max_attention_window_size": asked, "sink_token_length": num_sinks, "kernels": kernels}
        assert_same(model.folder, oracle, **settings)
    prompt = model.prompt(90)
    assert not torch.equal(oracle.logits(prompt), model.logits(prompt)), "the windows hide nothing"


@pytest.mark.parametrize("case", with_all(CASES, ["llama-gqa"]))
@pytest.mark.parametrize("chunk", with_all([1, 7, 8, 33, 90], [7, 33]))
def test_a_context_in_chunks_gives_the_logits_of_a_whole_one(
    zoo: Zoo, case: str, chunk: int, kernels: str | None
) -> None:
    assert_chunks_are_whole(zoo[case], chunk, kernels)


@pytest.mark.parametrize("case", with_all(CASES, ["gpt2"]))
@pytest.mark.parametrize("chunk", with_all([7, 33, 90], [33]))
@pytest.mark.parametrize("piece_rows", [1, 5])
def test_a_chunk_attended_in_pieces_gives_the_logits_of_a_whole_one(
    zoo: Zoo, case: str, chunk: int, piece_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's operators take a chunk in pieces."""
    monkeypatch.setattr(gathering_metadata, "_PIECE_ROWS", piece_rows)
    assert_chunks_are_whole(zoo[case], chunk, "torch")


def assert_chunks_are_whole(model: ZooModel, chunk: int, kernels: str | None) -> None:
    """Compare a prompt in chunks, with windows and sinks, with the oracle's logits."""
    oracle = masked(model, (12, 4, 30), 3)
    settings = {"max_attention_window_size": (12, 4, 30), "sink_token_length": 3, "kernels": kernels}
    driver = Driver(load_engine(model.folder, **settings))
    row = driver.start(prompt := model.prompt(90))
    driver.generate(row, 4, chunk)
    expected = oracle.logits(row.tokens)[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(row.logits), expected, rtol=0, atol=TOLERANCE)


def test_rows_of_different_lengths_give_the_masked_models_tokens(zoo: Zoo, kernels: str | None) -> None:
    """Rows shorter than the sinks, shorter than a window, or much longer, in one group of generation rows."""
    model = zoo["llama-gqa"]
    oracle = masked(model, (27, 40), 19)
    settings = {"max_attention_window_size": (27, 40), "sink_token_length": 19, "max_num_sequences": 8}
    driver = Driver(load_engine(model.folder, **settings, kernels=kernels))
    prompts = [model.prompt(length, length) for length in (2, 9, 16, 25, 33, 61, 79)]
    rows = [driver.start(prompt) for prompt in prompts]
    driver.step({row: len(row.tokens) for row in rows})
    for _ in range(12):
        driver.step(generation=rows)
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.generated == oracle.greedy(prompt, 13)


@pytest.mark.parametrize(("num_sinks", "most_blocks"), [(0, 3), (3, 4)])
def test_blocks_outside_a_window_are_not_read(
    zoo: Zoo, num_sinks: int, most_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering_metadata, "_PIECE_ROWS", 1)
    model = zoo["llama-gqa"]
    engine = load_engine(
        model.folder, max_attention_window_size=(12,), sink_token_length=num_sinks, kernels="torch"
    )
    read = []
    gather = engine.runner.cache.gather

    def spy(layer: int, block_ids: torch.Tensor) -> Any:
        read.append(len(block_ids))
        return gather(layer, block_ids)

    monkeypatch.setattr(engine.runner.cache, "gather", spy)
    driver = Driver(engine)
    row = driver.start(model.prompt(150))
    driver.generate(row, 20)
    of_generation = 3 * 19  # layers, tokens after the first
    assert max(read[-of_generation:]) <= most_blocks
    # A piece has as many rows as a window has tokens, so it reads up to two more blocks.
    assert len(read) > of_generation
    assert max(read[:-of_generation]) <= most_blocks + 2


def make_requests(model: ZooModel) -> list[Request]:
    """Return requests of which half share a prefix; some have looked-up or external drafts, some beam searches."""
    shared = model.prompt(30)
    requests = []
    for number in range(12):
        prompt = (*(shared if number % 2 else ()), *model.prompt(5 + 5 * number, number))
        values: dict[str, Any] = {}
        if number % 4 == 0:
            values = {"prompt_lookup_num_tokens": 4}
        elif number % 4 == 1:
            values = {"sampling": SamplingConfig(beam_width=3)}
        elif number % 4 == 2:
            values = {"draft": ExternalDraft(model.prompt(4, 99))}
        requests.append(Request(number, prompt, 14 if number % 4 == 1 else 30, **values))
    return requests


@pytest.mark.parametrize(
    ("way", "kernels"),
    with_all(
        by_default_and(["utilization-chunked-no-reuse"], list(WAYS)),
        ["utilization-chunked-no-reuse"],
    ),
)
@pytest.mark.parametrize(("asked", "num_sinks"), with_all([((9, 21), 0), ((30, 17), 6)], [((30, 17), 6)]))
def test_requests_with_windows_give_the_masked_models_tokens(
    zoo: Zoo, way: str, kernels: str | None, asked: tuple[int, ...], num_sinks: int
) -> None:
    """Chunks, shared prefixes, pauses, drafts and beams together, compared with the masked model alone."""
    model = zoo["llama-gqa"]
    oracle = masked(model, asked, num_sinks)
    requests = make_requests(model)
    settings = {"max_attention_window_size": asked, "sink_token_length": num_sinks, "kernels": kernels}
    engine = load(model.folder, 27, 6, **settings)
    served = serve(engine, config_of(way, max_beam_width=3), requests)
    if way.startswith("utilization"):
        assert served.num_pauses > 0
    for request in requests:
        prompt, count = request.input_token_ids, request.max_new_tokens
        if request.sampling.uses_beams:
            found = oracle.beams(prompt, count, num_beams=3, num_return_sequences=3)
            assert served.beams(request) == [tokens for tokens, _ in found]
        else:
            assert served.tokens(request) == oracle.greedy(prompt, count)


def test_accepted_drafts_in_windows_change_no_token(zoo: Zoo, kernels: str | None) -> None:
    """Right, partly right and wrong drafts; each row of a draft has its own window."""
    model = zoo["llama-gqa"]
    oracle = masked(model, (9, 21), 2)
    settings = {"max_attention_window_size": (9, 21), "sink_token_length": 2, "kernels": kernels}
    driver = Driver(load_engine(model.folder, **settings))
    prompts = [model.prompt(40, seed) for seed in range(3)]
    expected = [oracle.greedy(prompt, 20) for prompt in prompts]
    rows = [driver.start(prompt) for prompt in prompts]
    driver.step(dict.fromkeys(rows, 40))
    for right in (5, 2, 0):
        drafts = {}
        for row, tokens in zip(rows, expected, strict=True):
            known = len(row.generated)
            drafts[row] = [*tokens[known : known + right], *([3] * (5 - right))]
        driver.step(dict.fromkeys(rows, 1), drafts=drafts)
    for row, tokens in zip(rows, expected, strict=True):
        assert row.num_accepted >= 7
        assert row.generated == tokens[: len(row.generated)]


def test_layer_windows_combine_the_checkpoints_and_the_parameters() -> None:
    assert layer_windows((None,) * 3, (), 4, 100) == (None,) * 3
    assert layer_windows((None, 20, 100), (), 0, 100) == (None, AttentionWindow(20), None)
    assert layer_windows((None,) * 5, (8, 100, 99), 0, 100) == (
        AttentionWindow(8),
        None,
        AttentionWindow(99),
        AttentionWindow(8),
        None,
    )
    assert layer_windows((None, 20), (30,), 4, 100) == (AttentionWindow(26, 4), AttentionWindow(16, 4))


def test_layer_windows_include_the_checkpoints_chunks() -> None:
    chunk = AttentionWindow(20, is_chunk=True)
    assert layer_windows((None,) * 3, (), 4, 100, (20, None, 100)) == (chunk, None, None)
    assert layer_windows((None,) * 2, (100,), 0, 100, (20, None)) == (chunk, None)
    with pytest.raises(ConfigError) as error:
        layer_windows((None,) * 2, (50,), 0, 100, (None, 20))
    assert "max_attention_window_size is [50], expected at least the longest sequence, 100" in str(
        error.value
    )


def test_more_window_entries_than_layers_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert layer_windows((None,), (8, 9), 0, 100) == (AttentionWindow(8),)
    assert "max_attention_window_size has 2 entries, but the model has 1 layers" in caplog.text


def test_windows_that_all_layers_share_are_prepared_once(zoo: Zoo) -> None:
    folder, kernels = zoo["llama"].folder, "torch"
    engine = load_engine(folder, max_attention_window_size=(MAX_POSITIONS, 100_000), kernels=kernels)
    assert engine.runner.decoder._attention.windows == (None,)
    engine = load_engine(folder, max_attention_window_size=(9, 300), max_sequence_length=64, kernels=kernels)
    assert engine.runner.decoder._attention.windows == (AttentionWindow(9), None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_attention_window_size": (16, 0)},
            "max_attention_window_size is (16, 0), expected integers >= 1, separated by commas",
        ),
        (
            {"max_attention_window_size": (-1,)},
            "max_attention_window_size is (-1,), expected integers >= 1, separated by commas",
        ),
        (
            {"max_attention_window_size": (1.5,)},
            "max_attention_window_size is (1.5,), expected integers >= 1, separated by commas",
        ),
        ({"sink_token_length": -1}, "sink_token_length is -1, expected an integer >= 0"),
        (
            {"max_attention_window_size": (100, 8), "sink_token_length": 8},
            "sink_token_length is 8, expected less than 8: max_attention_window_size has a window of 8",
        ),
    ],
)
def test_unusable_windows_are_refused(zoo: Zoo, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_engine(zoo["llama"].folder, **settings)
    assert message in str(error.value)


def test_sinks_that_fill_the_checkpoints_window_are_refused(zoo: Zoo) -> None:
    with pytest.raises(ConfigError, match="the checkpoint has layers with a window of 19"):
        load_engine(zoo["mistral-window"].folder, sink_token_length=19)
