"""An engine that saves its KV blocks in a folder, and finds them after a restart: tokens, isolation, settings."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.block_store.files import is_in_use
from inflight.build import RunningEngine, check_parameters, start_engine
from inflight.config import Parameters, SchedulingConfig
from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.engine.block_memory import CacheBytes, Entries
from inflight.engine_parts import label_of_blocks, make_block_store
from inflight.errors import ConfigError
from tests.engine.pictures import Picture, expected_tokens, make_prompt, request_of
from tests.models.zoo import make_model
from tests.tiers import with_all

DEMO = Path(__file__).parents[2] / "model_repository" / "tensorrt_llm" / "1" / "demo_model"
SIZE = 32
PROMPT = tuple(300 + 7 * number % 2000 for number in range(5 * SIZE + 3))
NUM_BLOCKS = 5
TIMEOUT_S = 60


class Served:
    """A running engine."""

    def __init__(self, engine: RunningEngine) -> None:
        self.engine = engine
        self.saved = engine._manager._scheduler.kv_cache.saved

    def tokens(self, prompt: tuple[int, ...] = PROMPT, new: int = 12, **fields: Any) -> list[tuple[int, ...]]:
        """The new tokens of each sequence or beam of a request."""
        ended = threading.Event()
        responses: list[Response] = []

        def on_response(response: Response) -> None:
            responses.append(response)
            if response.is_final:
                ended.set()

        self.engine.client.submit(Request(0, prompt, new, **fields), on_response)
        assert ended.wait(TIMEOUT_S)
        assert responses[-1].error is None, responses[-1].error
        found = [response.result for response in responses if response.result]
        return [
            ids[len(ids) - count :]
            for result in found
            for ids, count in zip(result.output_token_ids, result.num_output_tokens, strict=True)
        ]

    @property
    def counts(self) -> tuple[int, int, int]:
        assert self.saved is not None
        return self.saved.num_saved, self.saved.num_loaded, self.saved.num_unread


def parameters_of(
    folder: Path | None, model: Path = DEMO, dtype: str = "float32", **fields: Any
) -> Parameters:
    """The parameters of an engine that saves its blocks in `folder`."""
    parameters = Parameters(kv_cache_dir=None if folder is None else str(folder))
    of_engine = {"gpt_model_path": str(model), "dtype": dtype, **fields.pop("engine", {})}
    of_scheduler = {"enable_chunked_context": True, **fields.pop("scheduler", {})}
    return replace(
        parameters,
        engine=replace(parameters.engine, **of_engine),
        scheduler=replace(parameters.scheduler, **of_scheduler),
        **fields,
    )


@contextmanager
def served(folder: Path | None, model: Path = DEMO, **fields: Any) -> Iterator[Served]:
    """A running engine that saves its blocks in `folder`."""
    engine = start_engine(parameters_of(folder, model, **fields), "")
    try:
        yield Served(engine)
    finally:
        assert engine.close()


def loads_after_a_restart(folder: Path, **fields: Any) -> int:
    """The number of blocks of PROMPT that an engine loads."""
    with served(folder, **fields) as second:
        second.tokens()
        return second.counts[1]


@pytest.mark.parametrize(
    ("dtype", "kernels", "kv_cache_dtype"),
    with_all(
        [
            ("float32", "native", "auto"),
            ("float32", "torch", "auto"),
            ("bfloat16", "native", "auto"),
            ("bfloat16", "native", "int8"),
            ("float32", "torch", "fp8"),
            ("int8", "native", "auto"),
        ],
        [("float32", "native", "auto"), ("bfloat16", "native", "int8"), ("float32", "torch", "fp8")],
    ),
)
def test_a_restarted_engine_gives_the_same_tokens_without_computing_the_prompt(
    tmp_path, dtype, kernels, kv_cache_dtype
):
    engine = {"kernels": kernels, "kv_cache_dtype": kv_cache_dtype}
    with served(tmp_path, dtype=dtype, engine=engine) as first:
        expected = first.tokens()
        assert first.counts[1:] == (0, 0)
    with served(tmp_path, dtype=dtype, engine=engine) as second:
        assert second.tokens() == expected
        assert second.counts[1:] == (NUM_BLOCKS, 0)
        longer = second.tokens((*PROMPT, *expected[0]), new=8)
    with served(None, dtype=dtype, engine=engine) as other:
        assert other.tokens((*PROMPT, *expected[0]), new=8) == longer
        assert other.saved is None


def test_beams_siblings_and_drafts_start_from_loaded_blocks(tmp_path):
    requests: list[dict[str, Any]] = [
        {"sampling": SamplingConfig(beam_width=3)},
        {"sampling": SamplingConfig(num_return_sequences=3, temperature=0.9, random_seed=5)},
        {"prompt_lookup_num_tokens": 3},
    ]
    expected = []
    for fields in requests:
        with served(tmp_path / str(len(expected))) as first:
            expected.append(sorted(first.tokens(**fields)))
    for number, fields in enumerate(requests):
        with served(tmp_path / str(number)) as second:
            assert sorted(second.tokens(**fields)) == expected[number]
            assert second.counts[1] == NUM_BLOCKS


def test_a_cache_that_is_too_small_for_a_conversation_finds_it_in_files(tmp_path):
    """Evicted blocks come back from the files, in the same process."""
    prompts = [tuple((token + 11 * number) % 3000 for token in PROMPT) for number in range(4)]
    engine = {"max_tokens_in_paged_kv_cache": 8 * SIZE, "max_num_sequences": 2}
    with served(None) as plenty:
        expected = [plenty.tokens(prompt) for prompt in prompts]
    with served(tmp_path, engine=engine) as small:
        for _ in range(3):
            assert [small.tokens(prompt) for prompt in prompts] == expected
        num_saved, num_loaded, num_unread = small.counts
        assert num_saved <= 4 * (NUM_BLOCKS + 1) and num_loaded + num_unread >= 4 * NUM_BLOCKS


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_file_is_computed_again_and_saved_again(tmp_path):
    with served(tmp_path) as first:
        expected = first.tokens()
        third = first.engine._manager._scheduler.kv_cache.pool._contents[2].digest.hex()
    damage(next(tmp_path.rglob(third)))
    with served(tmp_path) as second:
        assert second.tokens() == expected
        assert second.counts == (1, 2, 3)
    assert loads_after_a_restart(tmp_path) == NUM_BLOCKS


def test_damaged_files_change_no_tokens(tmp_path):
    with served(tmp_path) as first:
        expected = first.tokens()
    for path in tmp_path.rglob("*/*/*"):
        damage(path)
    with served(tmp_path) as second:
        assert second.tokens() == expected
        assert second.counts[1:] == (0, NUM_BLOCKS)


def test_a_salts_blocks_are_found_by_the_same_salt_only(tmp_path):
    with served(tmp_path) as first:
        expected = first.tokens(identity=PrefixIdentity(cache_salt_id=7))
    with served(tmp_path) as second:
        assert second.tokens() == expected
        assert second.tokens(identity=PrefixIdentity(cache_salt_id=8)) == expected
        assert second.counts[1] == 0
        assert second.tokens(identity=PrefixIdentity(cache_salt_id=7)) == expected
        assert second.counts[1] == NUM_BLOCKS


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"engine": {"kernels": "torch"}},
        {"engine": {"kv_cache_dtype": "int8"}},
        {"engine": {"tokens_per_block": 16}},
        {"engine": {"max_attention_window_size": (64,)}},
    ],
    ids=str,
)
def test_blocks_of_other_settings_are_not_found(tmp_path, change):
    with served(tmp_path, engine={"kernels": "native"}) as first:
        first.tokens()
    assert loads_after_a_restart(tmp_path, **change) == 0
    assert loads_after_a_restart(tmp_path, engine={"kernels": "native"}) == NUM_BLOCKS


def test_settings_on_which_blocks_do_not_depend_find_them(tmp_path):
    with served(tmp_path) as first:
        first.tokens()
    engine = {"max_num_sequences": 3, "max_tokens_in_paged_kv_cache": 1000}
    assert loads_after_a_restart(tmp_path, engine=engine, stream_interval=4) == NUM_BLOCKS


def test_what_is_saved_and_loaded_is_in_the_metrics(tmp_path):
    with served(tmp_path) as first:
        first.tokens()
    with served(tmp_path) as second:
        second.tokens()
        metrics = second.engine._manager._scheduler.metrics()
        assert (metrics.num_loaded_blocks, metrics.num_unread_blocks) == (NUM_BLOCKS, 0)
        (disk,) = metrics.block_store.tiers
        assert (disk.medium, disk.num_loaded, disk.num_dropped) == ("disk", NUM_BLOCKS, 0)
        assert disk.num_blocks >= NUM_BLOCKS


# ---------------------------------------------------------------------- settings


def refused(folder: Path | None, **fields: Any) -> str:
    with pytest.raises(ConfigError) as error, served(folder, **fields):
        pass
    return str(error.value)


def test_a_folder_without_prefix_reuse_is_refused(tmp_path):
    message = refused(tmp_path, scheduler={"enable_kv_cache_reuse": False})
    assert message == (
        "kv_cache_dir is given, but enable_kv_cache_reuse is false, so no request would find a saved KV block"
    )


@pytest.mark.parametrize(
    ("fields", "is_other"),
    [
        (
            {
                "engine": {
                    "max_tokens_in_paged_kv_cache": 3200,
                    "engine_threads": 1,
                    "max_sequence_length": 64,
                }
            },
            False,
        ),
        ({"scheduler": {"max_num_tokens": 64, "max_beam_width": 1}}, False),
        ({"kv_cache_disk_bytes": 1 << 27, "stream_interval": 2, "exclude_input_in_output": True}, False),
        ({"model": "link"}, False),
        ({"engine": {"tokens_per_block": 16}}, True),
        ({"dtype": "bfloat16"}, True),
    ],
)
def test_a_start_in_a_folder_in_use_is_foreseen(
    tmp_path: Path, fields: dict[str, Any], is_other: bool
) -> None:
    """Before a model is loaded, the label tells what the identity tells afterwards."""
    if "model" in fields:
        (tmp_path / "link").symlink_to(DEMO)
        fields = {"model": tmp_path / "link"}
    folder = tmp_path / "kv"
    with served(folder):
        assert is_in_use(folder, label_of_blocks(parameters_of(folder), str(DEMO)))
        parameters = parameters_of(folder, **fields)
        assert is_in_use(folder, label_of_blocks(parameters, str(fields.get("model", DEMO)))) is not is_other
        if is_other:
            with served(folder, **fields):
                pass
        else:
            assert "another server uses the blocks of this model there" in refused(folder, **fields)


def test_sizes_of_files_without_a_folder_are_refused():
    with pytest.raises(ConfigError, match="kv_cache_disk_bytes is given, but kv_cache_dir is not"):
        check_parameters(Parameters(kv_cache_disk_bytes=1 << 30))
    check_parameters(Parameters())


@pytest.mark.parametrize(("sizes", "missing"), [((0, 32), "attention"), ((32, 0), "recurrent")])
def test_a_pipeline_stage_without_a_kind_of_layers_is_refused(tmp_path, sizes, missing):
    """Its rank would have nothing of a block or of a snapshot, whose existence rank 0 decides."""
    memory = SimpleNamespace(block_bytes=sizes[0], state_bytes=sizes[1], is_on_host=True)
    engine = SimpleNamespace(limits=SimpleNamespace(num_state_snapshots=4))
    model: Any = SimpleNamespace(block_memory=memory, engine=engine)
    parameters = Parameters(kv_cache_dir=str(tmp_path), pipeline_parallel_size=2)
    message = f"one of its pipeline stages, has no {missing} layer; pipeline_parallel_size is 2"
    with pytest.raises(ConfigError, match=message):
        make_block_store(parameters, model, lambda: None, 1, 2)


def test_a_cache_without_layers_has_entries_without_bytes():
    assert Entries().num_bytes == 0 == len(CacheBytes(Entries(), None, is_on_host=False).read(0, True))


def test_a_priority_that_no_block_has_is_refused():
    scheduler = SchedulingConfig(secondary_offload_min_priority=101)
    with pytest.raises(ConfigError, match="secondary_offload_min_priority is 101, expected at most 100"):
        check_parameters(Parameters(scheduler=scheduler))


def test_an_engine_that_does_not_start_leaves_the_folder_to_the_next(tmp_path):
    with pytest.raises(ConfigError), served(tmp_path, lora_dir=str(tmp_path / "missing")):
        pass
    with served(tmp_path) as engine:
        assert engine.tokens()


def test_two_servers_with_one_folder_and_model_are_refused(tmp_path):
    with served(tmp_path):
        assert "another server uses the blocks of this model there" in refused(tmp_path)


def test_host_memory_is_added_to_the_cache_of_a_cpu(caplog):
    engine = {"max_tokens_in_paged_kv_cache": 8 * SIZE, "max_num_sequences": 2}
    with served(None, engine=engine) as small:
        num_blocks = small.engine._manager._scheduler.kv_cache.pool.num_blocks
        assert num_blocks == 8
    caplog.set_level(logging.INFO)
    with served(None, engine=engine | {"kv_cache_host_memory_bytes": 64 << 20}) as larger:
        pool = larger.engine._manager._scheduler.kv_cache.pool
        memory = larger.engine._manager._engine.runner.cache.as_bytes()
        assert pool.num_blocks == 8 + (64 << 20) // memory.block_bytes
        assert larger.saved is None
    assert "kv_cache_host_memory_bytes" in caplog.text


def test_host_memory_that_is_not_there_is_refused():
    message = refused(None, engine={"kv_cache_host_memory_bytes": 1 << 50})
    assert "kv_cache_host_memory_bytes is 1125899906842624: with it the KV cache takes " in message
    assert message.endswith(" MiB are free")


# ---------------------------------------------------------------------- models with recurrent state


@pytest.mark.parametrize("case", with_all(["qwen3.5", "granite-hybrid", "lfm2"], ["qwen3.5"]))
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_recurrent_states_are_saved_with_the_blocks(tmp_path, case, kernels):
    model = make_model(tmp_path / "model", case)
    prompt = tuple(number % 40 for number in range(9, 9 + 5 * 8 + 3))
    engine = {"tokens_per_block": 8, "kernels": kernels, "max_sequence_length": 96}
    expected = model.greedy(prompt, 24)

    def conversation(folder: Path | None) -> tuple[list[int], list[int], tuple[int, int, int]]:
        with served(folder, model.folder, engine=engine) as one:
            first = [*one.tokens(prompt, 24)[0]]
            second = [*one.tokens((*prompt, *first, 7), 8)[0]]
            return first, second, one.counts if folder else (0, 0, 0)

    first, second, _ = conversation(tmp_path / "kv")
    assert first == expected and second == model.greedy((*prompt, *first, 7), 8)
    for path in (tmp_path / "kv").rglob("*/*/*"):
        assert path.stat().st_size > 16
    again = conversation(tmp_path / "kv")
    assert again[:2] == (first, second)
    assert again[2][1] >= 5 + 1, "five blocks and a state"
    with served(tmp_path / "kv", model.folder, engine=engine) as one:
        assert [*one.tokens((*prompt, *first, 7), 8)[0]] == second
        assert one.counts[1:] == (8 + 1, 0), "the blocks of the whole first turn, and the state at its end"


# ---------------------------------------------------------------------- pictures


@pytest.mark.parametrize(
    ("case", "num_added"),
    with_all(
        [
            ("gemma3-vision", 0),
            ("gemma4-large", 0),
            ("gemma4-moe-vision", 0),
            ("qwen2.5-vl", 0),
            ("qwen3-vl", 2),
            ("qwen3.5-vision", 0),
        ],
        ["gemma3-vision"],
    ),
)
def test_blocks_of_pictures_are_found_after_a_restart(tmp_path, case, num_added):
    """By the same picture only; also if a block in the middle of a picture is lost."""
    model = make_model(tmp_path / "model", case)
    contents = [(6, Picture(4, 5, seed), 9, Picture(3, 4, 2), 4) for seed in (1, 3)]
    prompt, other = (make_prompt(model, parts, num_added) for parts in contents)
    engine = {"tokens_per_block": 8, "max_sequence_length": 96}

    def ask(one: Served, given: Any) -> list[int]:
        request = request_of(model, 0, given)
        tables = {name: getattr(request, name) for name in ("prompt_table", "rotary_table", "identity")}
        return [*one.tokens(given.token_ids, 12, **tables)[0]]

    expected = expected_tokens(model, prompt, 12)
    with served(tmp_path / "kv", model.folder, engine=engine) as first:
        assert ask(first, prompt) == expected
        contents_of_blocks = first.engine._manager._scheduler.kv_cache.pool._contents
        second_block = contents_of_blocks[1].digest.hex()
    with served(tmp_path / "kv", model.folder, engine=engine) as second:
        assert ask(second, other) == expected_tokens(model, other, 12)
        assert second.counts[1] == 0
        assert ask(second, prompt) == expected
        assert second.counts[1] >= 6
    damage(next((tmp_path / "kv").rglob(second_block)))
    with served(tmp_path / "kv", model.folder, engine=engine) as third:
        assert ask(third, prompt) == expected
        assert third.counts[2] > 0
