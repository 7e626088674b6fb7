"""The size of the KV cache and of adapter memory, from given figures; the figures from a fake /proc and /sys."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.config import EngineConfig
from inflight.engine import capacity, load, memory
from inflight.engine.kv_cache import KvCache, block_bytes
from inflight.engine.layers import transformers_model
from inflight.engine.load import load_stage
from inflight.engine.memory import (
    KvCacheSize,
    available_cpu_memory,
    check_adapter_pages,
    check_room,
    choose_kv_cache_size,
    choose_num_adapter_pages,
    free_memory,
)
from inflight.errors import ConfigError
from inflight.models import read_model_description
from inflight.models.loader import num_weight_bytes
from inflight.ranks.topology import Mapping
from tests.engine.driver import load_engine
from tests.models.sparse_files import (
    GROUP,
    MAX_READ,
    bytes_in_memory,
    write_35b_mixture,
    write_for_transformers,
)
from tests.models.zoo import Zoo

GPU_FRACTION, CPU_FRACTION = "kv_cache_free_gpu_mem_fraction", "kv_cache_free_cpu_mem_fraction"
MAX_TOKENS = "max_tokens_in_paged_kv_cache"


def _size(free_bytes: int = 100_000, on_gpu: bool = True, **changes: Any) -> KvCacheSize:
    """Plan for blocks of 1,000 bytes, sequences of 100 tokens and half of the memory, unless `changes` differ."""
    halves = {"kv_cache_free_gpu_mem_fraction": 0.5, "kv_cache_free_cpu_mem_fraction": 0.5}
    config = EngineConfig(**{"max_num_sequences": 4, "tokens_per_block": 32, **halves, **changes})
    return choose_kv_cache_size(config, 100, 1000, free_bytes, on_gpu)


@pytest.mark.parametrize(
    ("changes", "num_blocks", "decided_by"),
    [
        # One of the blocks is the null block.
        ({}, 49, GPU_FRACTION),
        ({GPU_FRACTION: 1.0}, 99, GPU_FRACTION),
        ({MAX_TOKENS: 400}, 12, MAX_TOKENS),
        ({MAX_TOKENS: 32 * 51}, 49, GPU_FRACTION),
        # 100 tokens take 4 blocks; 4 sequences; times 2.
        ({"on_gpu": False}, 32, "2 times the tokens of max_num_sequences"),
        ({"on_gpu": False, MAX_TOKENS: 128}, 4, MAX_TOKENS),
        ({"on_gpu": False, CPU_FRACTION: 0.2}, 19, CPU_FRACTION),
        ({"free_bytes": 10_000}, 4, GPU_FRACTION),
    ],
)
def test_the_smallest_limit_decides_the_number_of_blocks(
    changes: dict[str, Any], num_blocks: int, decided_by: str
) -> None:
    size = _size(**changes)
    assert (size.num_blocks, size.decided_by) == (num_blocks, decided_by)


@pytest.mark.parametrize(
    "changes",
    [{"free_bytes": 9999}, {MAX_TOKENS: 127}, {"free_bytes": 0}, {"free_bytes": 9999, "on_gpu": False}],
)
def test_fewer_blocks_than_slots_fail_the_load(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="fewer than one for each of 4 sequences") as error:
        _size(**changes)
    assert f"{CPU_FRACTION if 'on_gpu' in changes else GPU_FRACTION} is 0.5" in str(error.value)
    assert f"{MAX_TOKENS} is {changes.get(MAX_TOKENS, 'unset')}" in str(error.value)


@pytest.mark.parametrize("case", ["llama-gqa", "gpt2", "deepseek-v3", "gemma4"])
def test_block_bytes_is_the_memory_that_a_block_takes(zoo: Zoo, case: str) -> None:
    decoder = read_model_description(zoo[case].folder).decoder
    cache = KvCache(decoder, 5, 16, torch.bfloat16, torch.device("cpu"))
    stored = sum(blocks.nbytes for blocks in cache._blocks)
    assert stored == block_bytes(decoder, 16, torch.bfloat16) * 6, "five blocks and the null block"


def test_an_engines_limits_follow_from_its_parameters_and_model(zoo: Zoo) -> None:
    limits = load_engine(zoo["llama"].folder, max_tokens_in_paged_kv_cache=100, max_sequence_length=90).limits
    assert (limits.num_blocks, limits.max_sequence_length, limits.vocab_size) == (12, 90, 211)
    limits = load_engine(zoo["llama"].folder).limits
    assert limits.max_sequence_length == 256, "the model has no more positions"
    assert limits.num_blocks == 2 * 6 * 256 // 8


@pytest.mark.parametrize(
    ("case", "longest", "reason"),
    [
        ("llama", 256, ""),
        ("gpt2", 256, ""),
        ("llama-rope-yarn", 256, ""),  # already scaled
        ("llama-rope-linear", 4 * 256, ""),
        ("llama-rope-dynamic", 256, "of type dynamic"),
    ],
)
def test_a_length_beyond_the_positions_fails_the_load(zoo: Zoo, case: str, longest: int, reason: str) -> None:
    limits = load_engine(zoo[case].folder, max_sequence_length=longest).limits
    assert limits.max_sequence_length == longest
    with pytest.raises(ConfigError) as error:
        load_engine(zoo[case].folder, max_sequence_length=longest + 1)
    says = f"max_sequence_length is {longest + 1}, expected at most {longest}"
    assert str(error.value).startswith(says) and reason in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens_in_paged_kv_cache": 16}, "the KV cache would have 2 blocks of 8 tokens"),
        ({"dtype": "int4"}, "dtype is 'int4', expected float32 or"),
        (
            {"dtype": "float16", "kernels": "native"},
            "there is no compiled code: it computes in float32 and bfl",
        ),
        ({"kernels": "fast"}, "kernels is 'fast', expected native or torch"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"max_num_sequences": 0}, "max_num_sequences is 0, expected at least 1"),
        ({"ranks_on_host": 0}, "ranks_on_host is 0, expected at least 1"),
        ({"kv_cache_free_cpu_mem_fraction": 1.5}, "kv_cache_free_cpu_mem_fraction is 1.5"),
    ],
)
def test_unusable_parameters_are_refused(zoo: Zoo, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_engine(zoo["llama"].folder, **changes)
    assert message in str(error.value)


LORA_FRACTION = "lora_cache_gpu_memory_fraction"


@pytest.mark.parametrize(
    ("changes", "num_pages"),
    [
        ({}, 5),  # a twentieth
        ({LORA_FRACTION: 0.2}, 20),
        # Four sequences with adapters of rank 64, each of which takes eight pages.
        ({LORA_FRACTION: 1.0}, 32),
        ({LORA_FRACTION: 1.0, "lora_cache_max_adapter_size": 9}, 8),
        ({LORA_FRACTION: 1.0, "lora_cache_optimal_adapter_size": 64}, 4),
        ({LORA_FRACTION: 0.2, "free_bytes": 0}, 0),
        ({LORA_FRACTION: 1.0, "max_adapter_pages": 7}, 7),
        ({LORA_FRACTION: 0.1, "max_adapter_pages": 20}, 10),
    ],
)
def test_the_number_of_adapter_pages_follows_from_memory_and_adapter_sizes(
    changes: dict[str, Any], num_pages: int
) -> None:
    """Pages have 1,000 bytes."""
    values = {"max_num_sequences": 4, "free_bytes": 100_000, **changes}
    free_bytes = values.pop("free_bytes")
    assert choose_num_adapter_pages(EngineConfig(**values), 1000, free_bytes) == num_pages


def test_too_little_room_for_the_largest_adapter_is_an_error_if_a_fraction_is_given() -> None:
    config = EngineConfig(lora_cache_gpu_memory_fraction=0.1, lora_cache_max_adapter_size=20)
    assert check_adapter_pages(config, 3, 2**20) == 3
    with pytest.raises(ConfigError) as error:
        check_adapter_pages(config, 2, 2**20)
    assert str(error.value).startswith(
        "Not enough space allocated to device LoRA cache to hold 1 max sized LoRA: one of rank 20 takes 3.0 MiB, "
        "and there are 2.0 MiB with a lora_cache_gpu_memory_fraction of 0.1"
    )
    assert check_adapter_pages(EngineConfig(lora_cache_max_adapter_size=20), 2, 2**20) == 0
    waking = replace(config, lora_cache_gpu_memory_fraction=1.0, max_adapter_pages=3)
    assert check_adapter_pages(waking, 2, 2**20) == 0


@pytest.mark.parametrize(
    ("free_kib", "changes", "num_pages", "said"),
    [
        (1 << 30, {}, 48, "48 pages of 8 ranks"),
        (1 << 30, {LORA_FRACTION: 0}, 0, ""),
        (64, {}, 0, "LoRA adapters are not accepted: there is no memory for one of rank 64"),
        (
            1 << 30,
            {"lora_cache_optimal_adapter_size": 16},
            24,
            "enough for 6 adapters of rank 64, the maximum",
        ),
    ],
)
def test_an_engine_logs_how_many_adapters_fit(
    zoo: Zoo,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free_kib: int,
    changes: dict[str, Any],
    num_pages: int,
    said: str,
) -> None:
    decoder = read_model_description(zoo["llama"].folder).decoder
    blocks = 2 * 10 * block_bytes(decoder, 8, torch.float32)
    answers = iter([free_kib * 1024] if changes.get(LORA_FRACTION) != 0 else [])
    monkeypatch.setattr(capacity, "free_memory", lambda device: next(answers, blocks))
    with caplog.at_level("INFO"):
        limits = load_engine(zoo["llama"].folder, **changes).limits
    assert (limits.num_adapter_pages, limits.max_adapter_rank) == (num_pages, 64 if num_pages else 0)
    assert limits.adapter_page_rank == changes.get("lora_cache_optimal_adapter_size", 8)
    assert said in caplog.text and ("LoRA" in caplog.text) == bool(said)


def test_an_engine_without_the_requested_room_for_adapters_does_not_load(zoo: Zoo) -> None:
    with pytest.raises(ConfigError, match="to hold 1 max sized LoRA"):
        load_engine(zoo["llama"].folder, lora_cache_gpu_memory_fraction=1e-12)


def test_ranks_agree_on_the_smallest_capacity(zoo: Zoo) -> None:
    asked = []

    def agree(number: int) -> int:
        asked.append(number)
        return 7

    config = EngineConfig(
        str(zoo["llama"].folder),
        device="cpu",
        tokens_per_block=8,
        max_num_sequences=2,
        max_tokens_in_paged_kv_cache=100,
    )
    stage = load_stage(config, Mapping(1, 2, 1), min_over_ranks=agree)
    assert asked[1:] == [2 * 8, 12], (
        "after free memory: pages for adapters, of which one of the largest rank takes eight, and blocks"
    )
    assert stage.limits.num_adapter_pages == 0, "fewer than eight"
    assert (stage.limits.num_blocks, stage.limits.num_micro_batches) == (7, 2)
    assert stage.runner.cache._blocks[0].shape[:3] == (1, 2, 8), (
        "one layer of three; seven blocks and the null block"
    )


def test_ranks_on_a_host_share_its_memory(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = read_model_description(zoo["llama"].folder).decoder
    size = block_bytes(decoder, 8, torch.float32)
    monkeypatch.setattr(capacity, "free_memory", lambda device: 601 * size)
    counts = [
        load_engine(
            zoo["llama"].folder, ranks_on_host=ranks, kv_cache_free_cpu_mem_fraction=0.5
        ).limits.num_blocks
        for ranks in (1, 2, 3)
    ]
    assert counts == [299, 149, 99]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_weights_that_do_not_fit_are_refused(on_gpu: bool) -> None:
    with pytest.raises(ConfigError) as error:
        check_room(EngineConfig(), 3 << 20, 100, 1000, 2 << 20, on_gpu)
    said = str(error.value)
    assert said.startswith("the weights do not fit: they take 3.0 MiB, and 2.0 MiB are free on the ")
    assert "smaller dtype" in said and "--tp" in said and ("--weights mmap" in said) == (not on_gpu)


def test_the_kv_cache_has_to_fit_beside_the_weights() -> None:
    config = EngineConfig(max_num_sequences=4, kv_cache_free_cpu_mem_fraction=0.5)
    assert check_room(config, 50_000, 100, 1000, 60_000, on_gpu=False).num_blocks == 4
    with pytest.raises(ConfigError, match=r"beside 0.0 MiB of weights the KV cache would have 3 blocks"):
        check_room(config, 50_000, 100, 1000, 59_000, on_gpu=False)


@pytest.mark.parametrize(("mapped", "num_blocks"), [(0, 49), (40_000, 29), (75_000, 11), (1_000_000, 11)])
def test_mapped_weights_leave_a_quarter_of_the_memory_for_the_kv_cache(mapped: int, num_blocks: int) -> None:
    config = EngineConfig(max_num_sequences=8, kv_cache_free_cpu_mem_fraction=0.5)
    found = check_room(config, mapped, 10_000, 1000, 100_000, on_gpu=False, are_mapped=True)
    assert found.num_blocks == num_blocks


@pytest.mark.parametrize("kernels", [None, "torch"])
def test_a_load_without_room_for_the_weights_reads_none_of_them(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, kernels: str | None
) -> None:
    folder = zoo["llama"].folder
    weights = num_weight_bytes(read_model_description(folder), torch.float32, torch.float32)

    def refuse(*_: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(load, "load_decoder", refuse)
    monkeypatch.setattr(load, "free_memory", lambda device: weights)
    with pytest.raises(
        ConfigError, match=f"they take {weights / 2**20:.1f} MiB, and {weights / 2**20:.1f} MiB"
    ):
        load_engine(folder, kernels=kernels)
    monkeypatch.setattr(load, "free_memory", lambda device: weights + 1000)
    with pytest.raises(ConfigError, match=r"beside .* MiB of weights the KV cache would have 0 blocks"):
        load_engine(folder, kernels=kernels)


class _WeightsAreRead(Exception):
    """All checks before it have passed."""


@pytest.fixture
def on_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that loads a checkpoint, up to the first weight, on a machine with the given free memory."""

    def refuse(*_: Any) -> None:
        raise _WeightsAreRead

    monkeypatch.setattr(load, "load_decoder", refuse)

    def check(free_bytes: int, folder: Path, **settings: Any) -> None:
        monkeypatch.setattr(memory, "available_cpu_memory", lambda: free_bytes)
        load.load_engine(EngineConfig(str(folder), device="cpu", **settings))

    return check


_EXPERTS, _VOCABULARY = 40 * 256 * 3 * 512 * 2048, 248_320 * 2048
"""Numbers of weights of the experts, and of the embedding or the output projection."""
_OTHERS = 34_660_610_688 - _EXPERTS - 2 * _VOCABULARY


def test_a_mixture_of_35b_in_bfloat16_is_refused_on_24_gib(
    tmp_path: Path, on_machine: Callable[..., None]
) -> None:
    paths = write_35b_mixture(tmp_path, None)
    with pytest.raises(ConfigError) as error:
        on_machine(24 << 30, tmp_path)
    found = re.match(
        r"the weights do not fit: they take (.*) MiB, and 24576.0 MiB are free on", str(error.value)
    )
    assert found is not None
    assert float(found[1]) == pytest.approx((_EXPERTS + _OTHERS + 2 * _VOCABULARY) / 2**19, rel=1e-3)
    assert all(bytes_in_memory(path) < MAX_READ for path in paths)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("format", "group_bits"), [("gptq", 20), ("awq", 20), ("int4", 16)])
@pytest.mark.parametrize("kernels", [None, "torch"])
def test_a_mixture_of_35b_in_4_bits_fits_24_gib_but_not_20(
    tmp_path: Path, on_machine: Callable[..., None], format: str, group_bits: int, kernels: str | None
) -> None:
    """Experts have 4 bits and `group_bits` for each group; other matrices have 16, but compiled layers' output
    projection has 8."""
    paths = write_35b_mixture(tmp_path, format)
    with pytest.raises(_WeightsAreRead):
        on_machine(24 << 30, tmp_path, kernels=kernels)
    with pytest.raises(ConfigError) as error:
        on_machine(20 << 30, tmp_path, kernels=kernels)
    in_16_bits = _OTHERS + (2 if kernels == "torch" else 1.5) * _VOCABULARY
    wanted = _EXPERTS * (4 + group_bits / GROUP) / 8 + 2 * in_16_bits
    # Beside compiled layers' smaller weights there is no memory for the recurrent states.
    found = re.match(
        r"the weights do not fit: they take ([\d.]+) MiB, and|"
        r"beside ([\d.]+) MiB of weights the recurrent states of \d+ sequences do not fit",
        str(error.value),
    )
    assert found is not None
    assert float(found[1] or found[2]) == pytest.approx(wanted / 2**20, rel=1e-3)
    assert all(bytes_in_memory(path) < MAX_READ for path in paths)


_COMMAND_R = 256_000 * 8192 + 40 * (4 * 8192 * 8192 + 3 * 8192 * 22528 + 8192) + 8192
"""Number of weights of Command R, 35B, whose output projection is the embedding."""


@pytest.mark.parametrize(("dtype", "size"), [(None, 2), ("float32", 4)])
def test_a_model_of_transformers_code_that_does_not_fit_is_refused_by_its_headers(
    tmp_path: Path,
    on_machine: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    dtype: str | None,
    size: int,
) -> None:
    paths = write_for_transformers(tmp_path, "CohereForAI/c4ai-command-r-v01")

    def read(*_: Any) -> None:
        raise _WeightsAreRead

    monkeypatch.setattr(transformers_model, "_read", read)
    with pytest.raises(ConfigError) as error:
        on_machine(24 << 30, tmp_path, dtype=dtype)
    found = re.match(
        r"the weights do not fit: they take (.*) MiB, and 24576.0 MiB are free on the CPU; take --dtype "
        "bfloat16 or float16, or end what else uses memory$",
        str(error.value),
    )
    assert found is not None and float(found[1]) == pytest.approx(size * _COMMAND_R / 2**20, rel=1e-3)
    assert all(bytes_in_memory(path) < MAX_READ for path in paths)
    with pytest.raises(_WeightsAreRead):
        on_machine(size * _COMMAND_R + 1, tmp_path, dtype=dtype)


def test_recurrent_states_have_to_fit_beside_the_weights() -> None:
    config = EngineConfig(max_num_sequences=4, kv_cache_free_cpu_mem_fraction=0.5)
    with_states = partial(check_room, config, 50 << 20, 100, 1000, on_gpu=False)
    assert with_states((60 << 20) + 10_000, state_bytes=10 << 20).num_blocks == 4
    with pytest.raises(
        ConfigError, match=r"beside 50\.0 MiB of weights and 10\.0 MiB of recurrent states the KV"
    ):
        with_states((60 << 20) + 9_000, state_bytes=10 << 20)
    message = (
        r"states of 4 sequences do not fit: they take 10\.0 MiB, and 9\.0 MiB are left; "
        r"lower .* max_batch_size \(max_batch_size=1 leaves half to the KV cache\)"
    )
    with pytest.raises(ConfigError, match=message):
        with_states(59 << 20, state_bytes=10 << 20)


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 8000 kB"}
V2 = {"proc/self/cgroup": "0::/pod/box"}
V1 = {"proc/self/cgroup": "5:cpu:/pod\n4:memory,hugetlb:/pod/box"}


def _node(number: int, free_kb: int, cached_kb: int) -> dict[str, str]:
    lines = (("MemTotal", 9000), ("MemFree", free_kb), ("Active(file)", 7), ("Inactive(file)", cached_kb))
    text = "\n".join(f"Node {number} {name}:       {size} kB" for name, size in lines)
    return {f"sys/devices/system/node/node{number}/meminfo": text}


NODES = _node(0, 1000, 200) | _node(1, 2000, 300) | _node(2, 4000, 400)


def _bound(cpuset: str, policy: str) -> dict[str, str]:
    return NODES | {
        "proc/self/status": f"Name:\tpython\nMems_allowed:\t7\nMems_allowed_list:\t{cpuset}\nThreads:\t1",
        "proc/self/numa_maps": f"55d04000 {policy} file=/usr/bin/python mapped=3 N0=3\n7f010000 bind:2 anon=1",
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8_192_000),
        (NODES, 8_192_000),
        (_bound("0-2", "default"), 8_192_000),
        (_bound("0-2", "bind:0-2"), 8_192_000),
        (_bound("0-2", "bind:1"), 2300 * 1024),
        (_bound("0-2", "bind=static:0,2"), 5600 * 1024),
        (_bound("0-2", "interleave:0-1"), 8_192_000),
        (_bound("0,1", "default"), 3500 * 1024),
        (_bound("0-1", "bind:1-2"), 2300 * 1024),
        ({**V2}, 8_192_000),
        ({**V2, "sys/fs/cgroup/pod/box/memory.max": "max"}, 8_192_000),
        (
            {
                **V2,
                "sys/fs/cgroup/pod/box/memory.max": "3000",
                "sys/fs/cgroup/pod/box/memory.current": "1000",
                "sys/fs/cgroup/pod/box/memory.stat": "anon 700\ninactive_file 250",
            },
            2250,
        ),
        (
            {
                **V2,
                "sys/fs/cgroup/pod/box/memory.max": "max",
                "sys/fs/cgroup/pod/box/memory.current": "10",
                "sys/fs/cgroup/pod/memory.max": "500",
                "sys/fs/cgroup/pod/memory.current": "600",
            },
            0,
        ),
        ({**V2, "sys/fs/cgroup/memory.max": "700", "sys/fs/cgroup/memory.current": "100"}, 600),
        (
            {
                **V1,
                "sys/fs/cgroup/memory/pod/box/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/pod/box/memory.usage_in_bytes": "5000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 1500",
            },
            5500,
        ),
    ],
    ids=[
        "none",
        "nodes of unknown use",
        "all nodes",
        "bound to all",
        "bound",
        "bound to two",
        "interleaved",
        "cpuset",
        "bound within a cpuset",
        "no files",
        "v2 no limit",
        "v2",
        "v2 parent",
        "v2 in a container",
        "v1",
    ],
)
def test_free_memory_respects_memory_nodes_and_control_groups(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert available_cpu_memory(_write(tmp_path, {**MEMINFO, **files})) == expected


def test_free_memory_of_this_machine_is_more_than_a_mebibyte() -> None:
    assert free_memory(torch.device("cpu")) > 2**20
