"""Sizes of the KV cache and of the memory for LoRA adapters.

Each is the minimum of the configured size, the size that fits, and the size that could ever be used.
`choose_kv_cache_size` and `choose_num_adapter_pages` are pure functions. `free_memory` returns how much more
memory this process may use, on a CPU from /proc and /sys: a container sees its host's /proc/meminfo, so the
container's limit must be read too, and the nodes that memory is bound to (numactl --membind). If memory runs out
nevertheless, `allocating` and `computing` raise clear errors.
"""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.config import EngineConfig
from inflight.control_groups import control_groups
from inflight.errors import ConfigError, StepFailed

if TYPE_CHECKING:
    import torch

LESS_WEIGHTS = (
    "take a smaller dtype (bfloat16, int8, fp8), several ranks (--tp, --pp), or end what else uses memory"
)
"""Ways to use less memory for weights, for error messages."""
LESS_WEIGHTS_OF_TRANSFORMERS = "take --dtype bfloat16 or float16, or end what else uses memory"
"""The same for weights that transformers' own code reads."""
LESS_STATES = "lower recurrent_state_snapshots or max_batch_size"
"""Ways to use less memory for recurrent states, for error messages."""
REUSE_ROOM = 2
"""Maximum size of the cache on a CPU, as a multiple of the tokens of all slots; more than 1, so that blocks of
ended sequences can be reused."""
_MAPPED_SHARE = 0.75  # the largest share of free memory that is left to the pages of mapped weights
_LORA_FRACTION = 0.05  # share of free memory for adapters, by default
_NO_LIMIT = 2**60  # control groups of version 1 have a huge number for no limit
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""For each version of control groups: the files with limit and usage, and memory.stat's line for cached files."""


@dataclass(frozen=True, slots=True)
class KvCacheSize:
    """The chosen number of blocks, and the parameter or fact that decided it, for the log."""

    num_blocks: int
    decided_by: str


def choose_kv_cache_size(
    config: EngineConfig, max_sequence_length: int, block_bytes: int, free_bytes: int, on_gpu: bool
) -> KvCacheSize:
    """Return the number of blocks of the KV cache. Raises ConfigError if there is less than one block per slot.

    Args:
        config: The configuration.
        max_sequence_length: Maximum sequence length in tokens.
        block_bytes: Bytes of one block, over all layers; 0 in a pipeline stage without attention.
        free_bytes: Memory that this process may still use on the device.
        on_gpu: Whether the device is a GPU. On a CPU the cache has at most REUSE_ROOM times the tokens of all
            slots.
    """
    slots, size, max_tokens = (
        config.max_num_sequences,
        config.tokens_per_block,
        config.max_tokens_in_paged_kv_cache,
    )
    name = "kv_cache_free_gpu_mem_fraction" if on_gpu else "kv_cache_free_cpu_mem_fraction"
    fraction: float = getattr(config, name)
    in_memory = int(free_bytes * fraction) // max(1, block_bytes) - 1  # without the null block
    bounds = [KvCacheSize(max(0, in_memory), name)]
    if max_tokens is not None:
        bounds.append(KvCacheSize(max_tokens // size, "max_tokens_in_paged_kv_cache"))
    if not on_gpu:
        useful = slots * -(-max_sequence_length // size) * REUSE_ROOM
        bounds.append(KvCacheSize(useful, f"{REUSE_ROOM} times the tokens of max_num_sequences"))
    chosen = min(bounds, key=lambda bound: bound.num_blocks)
    if not on_gpu and config.kv_cache_host_memory_bytes:
        chosen = _with_host_memory(chosen, config.kv_cache_host_memory_bytes, block_bytes, free_bytes)
    if chosen.num_blocks < slots:
        raise ConfigError(
            f"the KV cache would have {chosen.num_blocks} blocks of {size} tokens "
            f"({block_bytes / 2**20:.2f} MiB each), fewer than one for each of {slots} sequences; "
            f"{chosen.decided_by} decides. "
            f"Free memory is {free_bytes / 2**20:.0f} MiB, {name} is {fraction}, "
            f"max_tokens_in_paged_kv_cache is {max_tokens or 'unset'}. "
            "Raise them, or lower max_num_sequences or tokens_per_block"
        )
    return chosen


def _with_host_memory(chosen: KvCacheSize, more_bytes: int, block_bytes: int, free_bytes: int) -> KvCacheSize:
    """Return the size of a cache on a CPU with `more_bytes` of memory in addition; raise ConfigError if they do
    not fit."""
    num_blocks = chosen.num_blocks + more_bytes // max(1, block_bytes)
    if (num_blocks + 1) * block_bytes > free_bytes:
        raise ConfigError(
            f"kv_cache_host_memory_bytes is {more_bytes}: with it the KV cache takes "
            f"{(num_blocks + 1) * block_bytes / 2**20:.0f} MiB, and {free_bytes / 2**20:.0f} MiB are free"
        )
    return KvCacheSize(num_blocks, f"{chosen.decided_by} and kv_cache_host_memory_bytes")


def check_room(
    config: EngineConfig,
    weight_bytes: int,
    max_sequence_length: int,
    block_bytes: int,
    free_bytes: int,
    on_gpu: bool,
    are_mapped: bool = False,
    state_bytes: int = 0,
) -> KvCacheSize:
    """Return the size of the KV cache that will fit beside weights that are not read yet.

    Memory that is neither for weights nor for the KV cache is for intermediate results.

    Args:
        config: The configuration.
        weight_bytes: Bytes of the weights in memory.
        max_sequence_length: As for `choose_kv_cache_size`.
        block_bytes: As for `choose_kv_cache_size`.
        free_bytes: Memory that this process may still use on the device.
        on_gpu: As for `choose_kv_cache_size`.
        are_mapped: Whether the weights are mapped from a file, which may be larger than the memory.
        state_bytes: Bytes of the recurrent states.

    Raises:
        ConfigError: The weights do not fit, or leave less than the states and a block for each slot.
    """
    if are_mapped:
        left = beside_mapped(free_bytes, weight_bytes)
    else:
        or_mapped = "" if on_gpu else "; compiled layers can also map them from a file: --weights mmap"
        left = left_by_weights(weight_bytes, free_bytes, on_gpu, LESS_WEIGHTS + or_mapped)
    beside = f"beside {weight_bytes / 2**20:.1f} MiB of weights"
    if state_bytes:
        if left < state_bytes:
            sequences = config.max_num_sequences * left // (2 * state_bytes)
            advice = f" (max_batch_size={sequences} leaves half to the KV cache)" if sequences else ""
            raise ConfigError(
                f"{beside} the recurrent states of {config.max_num_sequences} sequences do not fit: they take "
                f"{state_bytes / 2**20:.1f} MiB, and {left / 2**20:.1f} MiB are left; {LESS_STATES}{advice}"
            )
        beside += f" and {state_bytes / 2**20:.1f} MiB of recurrent states"
    try:
        return choose_kv_cache_size(config, max_sequence_length, block_bytes, left - state_bytes, on_gpu)
    except ConfigError as error:
        raise ConfigError(f"{beside} {error}") from None


def left_by_weights(weight_bytes: int, free_bytes: int, on_gpu: bool, mend: str) -> int:
    """Return the memory that will be free once the weights are loaded; raise ConfigError if they do not fit.

    `mend`: how to use less memory, for the error.
    """
    if free_bytes <= weight_bytes:
        raise ConfigError(
            f"the weights do not fit: they take {weight_bytes / 2**20:.1f} MiB, and {free_bytes / 2**20:.1f} MiB "
            f"are free on the {'GPU' if on_gpu else 'CPU'}; {mend}"
        )
    return free_bytes - weight_bytes


def beside_mapped(free_bytes: int, mapped_bytes: int) -> int:
    """Return how many bytes of the free memory are not for the pages of mapped weights.

    The kernel counts these pages as free. At most three quarters of the free memory are left to them; weights
    beyond that are read from the file again when they are needed.
    """
    return free_bytes - min(mapped_bytes, int(free_bytes * _MAPPED_SHARE))


def choose_num_adapter_pages(config: EngineConfig, page_bytes: int, free_bytes: int) -> int:
    """Return the number of pages of `page_bytes` for LoRA adapters, at most what all slots can use at once
    and `max_adapter_pages`.

    Args:
        config: The configuration.
        page_bytes: Bytes of one page, over all layers; 0 in a pipeline stage that adapters cannot change.
        free_bytes: Memory that this process may still use on the device.
    """
    fraction = config.lora_cache_gpu_memory_fraction
    share = _LORA_FRACTION if fraction is None else fraction
    useful = config.max_num_sequences * largest_adapter_pages(config)
    if config.max_adapter_pages is not None:
        useful = min(useful, config.max_adapter_pages)
    return min(useful, int(free_bytes * share) // max(1, page_bytes))


def check_adapter_pages(config: EngineConfig, num_pages: int, page_bytes: int) -> int:
    """Return the number of pages, or 0 if the largest adapter does not fit.

    Raises ConfigError if the largest adapter does not fit although adapters are configured, unless
    `max_adapter_pages` is set: an engine that wakes up compares the number with the one before.
    """
    fraction, needed = config.lora_cache_gpu_memory_fraction, largest_adapter_pages(config)
    if num_pages >= needed:
        return num_pages
    if fraction and config.max_adapter_pages is None:
        raise ConfigError(
            "Not enough space allocated to device LoRA cache to hold 1 max sized LoRA: one of rank "
            f"{config.lora_cache_max_adapter_size} takes {needed * page_bytes / 2**20:.1f} MiB, and there are "
            f"{num_pages * page_bytes / 2**20:.1f} MiB with a lora_cache_gpu_memory_fraction of {fraction}. Raise "
            "that, or lower lora_cache_max_adapter_size"
        )
    return 0


def largest_adapter_pages(config: EngineConfig) -> int:
    """Return the number of pages of an adapter of the largest rank."""
    return -(-config.lora_cache_max_adapter_size // config.lora_cache_optimal_adapter_size)


def free_memory(device: torch.device) -> int:
    """Return the memory that this process may still use on `device`, in bytes."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return available_cpu_memory()


@contextmanager
def allocating(what: str, num_bytes: Callable[[], int], device: torch.device, mend: str) -> Generator[None]:
    """Guard an allocation while a model is loaded: an out-of-memory error becomes a ConfigError.

    Args:
        what: Name of the allocated memory, for the error.
        num_bytes: Returns an estimate of the allocation's size in bytes; called if there is too little memory.
        device: The device of the memory.
        mend: How to use less memory, for the error.

    Raises:
        ConfigError: There is too little memory.
    """
    free = free_memory(device)
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"there is too little memory for {what}: about {num_bytes() / 2**20:.1f} MiB are needed, and "
            f"{free / 2**20:.1f} MiB were free on {device} before; {mend} ({_release_frames(error)})"
        ) from None


@contextmanager
def computing(num_rows: int) -> Generator[None]:
    """Guard an iteration of `num_rows` rows: an out-of-memory error becomes a StepFailed.

    The failed iteration's memory is freed, so that a smaller iteration can use it.

    Raises:
        StepFailed: There was too little memory. The scheduler then retries halves of the batch, so that only a
            request that needs too much memory by itself ends with this error.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise StepFailed(
            f"there was too little memory for an iteration of {num_rows} rows: a shorter prompt or fewer outputs "
            "of this request take less, and the server leaves more memory free with a lower max_num_tokens or "
            f"kv_cache_free_gpu_mem_fraction ({_release_frames(error)})"
        ) from None


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error, on any device, means that memory ran out."""
    import torch

    if isinstance(error, OSError):  # mapped memory
        return error.errno == errno.ENOMEM
    # On a CPU torch raises a plain RuntimeError.
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _release_frames(error: Exception) -> str:
    """Return an error's message on one line, and release what its traceback's frames have allocated."""
    import torch

    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return f"{type(error).__name__}: {error}".split("\n")[0]


def available_cpu_memory(root: Path = Path("/")) -> int:
    """Return the bytes of main memory that this process may still use: the least of the machine's available
    memory, of the limits of its control groups, and of the memory nodes that it is bound to."""
    return min([_machine(root), *_control_groups(root), *_nodes(root)])


def _machine(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _control_groups(root: Path) -> list[int]:
    """Return the bytes left in each of this process's memory control groups, of both versions, and in their
    parents."""
    left: list[int] = []
    for group in control_groups("memory", root):
        limit_name, usage_name, cache_name = _NAMES[group.version]
        limit, usage = _number(group.folder / limit_name), _number(group.folder / usage_name)
        if limit is not None and usage is not None and limit < _NO_LIMIT:
            left.append(max(0, limit - usage + _reclaimable(group.folder / "memory.stat", cache_name)))
    return left


def _nodes(root: Path) -> list[int]:
    """Return the bytes available on the memory nodes that this process may use; empty if it may use all nodes."""
    nodes = {int(folder.name[4:]): folder for folder in (root / "sys/devices/system/node").glob("node[0-9]*")}
    if len(nodes) < 2:
        return []  # without reading numa_maps, which takes the kernel milliseconds
    used = nodes.keys() & _allowed_nodes(root)
    if not used or len(used) == len(nodes):
        return []
    texts = [(nodes[node] / "meminfo").read_text() for node in used]
    found = [re.findall(r"(?:MemFree|Inactive\(file\)): +(\d+) kB", text) for text in texts]
    return [sum(int(size) * 1024 for sizes in found for size in sizes)]


def _allowed_nodes(root: Path) -> set[int]:
    """Return the memory nodes that cpusets and this process's policy allow; empty if unknown."""
    try:
        status = (root / "proc/self/status").read_text()
        with (root / "proc/self/numa_maps").open() as file:
            first = file.readline()
    except OSError:  # a kernel without nodes
        return set()
    of_cpuset = re.search(r"^Mems_allowed_list:\s*(\S+)", status, re.MULTILINE)
    bound = re.match(r"\S+ bind(?:=\w+)?:(\S+)", first)
    lists = [_parse_list(match[1]) for match in (of_cpuset, bound) if match is not None]
    return lists[0].intersection(*lists[1:]) if lists else set()


def _parse_list(text: str) -> set[int]:
    """Return the numbers of a list in the kernel's format, such as 0-2,5."""
    ranges = [part.split("-") for part in text.split(",")]
    return {number for ends in ranges for number in range(int(ends[0]), int(ends[-1]) + 1)}


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # version 2 has "max" for no limit


def _reclaimable(file: Path, name: str) -> int:
    """Return the bytes of cached files, such as the checkpoint just read: a control group's usage includes
    them, but the kernel can drop them."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
