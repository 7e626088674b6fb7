"""The parameters that a torch engine is loaded with."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.errors import ConfigError
from inflight.models import DTYPES

INT8 = "int8"
KERNELS = ("native", "torch")


@dataclass(frozen=True, slots=True)
class TorchEngineConfig:
    """Everything that can be chosen at a load. Names in messages are those of config.pbtxt's parameters.

    Attributes:
        model_path: Hugging Face checkpoint folder.
        dtype: float32, bfloat16 or float16, of weights, activations and KV cache; None: the checkpoint's. int8:
            weights of linear layers are quantized, and by native kernels activations as they are multiplied; the
            rest is bfloat16.
        device: A torch device; None: cuda if there is one, else cpu.
        max_num_sequences: Slots, that is, sequences that can run at once.
        max_num_tokens: Most rows of one packed forward pass.
        max_sequence_length: Longest sequence, in tokens; None: the longest that the positions of the model reach.
        tokens_per_block: Tokens per KV cache block.
        max_tokens_in_paged_kv_cache: Most tokens of KV cache; None: as many as the fraction allows.
        kv_cache_free_gpu_mem_fraction: Share for the KV cache of the device memory that is free after the load.
        kv_cache_free_cpu_mem_fraction: The same on a CPU, of the memory this process may still use.
        ranks_on_host: How many ranks share the machine's memory; on a CPU, each counts on a share of what is free.
        kernels: "torch" for torch's operators, "native" for compiled code, which a CPU with AVX-512 can run; None:
            native where it can be had, else torch.
        num_threads: Threads on a CPU: of compiled layers and, in this whole process, of torch; None: its choice.
        attention_windows: `max_attention_window_size`: how many tokens a token sees, itself included; layer i has
            entry i % n. Empty: all before it. Where the checkpoint has a sliding window too, the smaller one
            holds. What no token sees any more stays in the cache: memory is not saved.
        cuda_graphs: Whether generation batches are recorded on a GPU; else every operation is launched by itself.
        sink_token_length: How many of a window's tokens are the first of the sequence instead of the last;
            means nothing in layers without a window. `layer_windows` says how TensorRT-LLM's differs.
        normalize_log_probs: Whether log probabilities of generated tokens are of the distribution that they were
            drawn from, and not the model's own. Their sum and those of the likeliest tokens are the model's own.
    """

    model_path: str
    dtype: str | None = None
    device: str | None = None
    max_num_sequences: int = 8
    max_num_tokens: int = 8192
    max_sequence_length: int | None = None
    tokens_per_block: int = 32
    max_tokens_in_paged_kv_cache: int | None = None
    kv_cache_free_gpu_mem_fraction: float = 0.9
    kv_cache_free_cpu_mem_fraction: float = 0.5
    ranks_on_host: int = 1
    kernels: str | None = None
    num_threads: int | None = None
    attention_windows: tuple[int, ...] = ()
    sink_token_length: int = 0
    normalize_log_probs: bool = False
    cuda_graphs: bool = True

    def validate(self) -> None:
        """Raise ConfigError naming parameter, value and what was expected."""
        if self.dtype not in (None, *DTYPES, INT8):
            raise ConfigError(f"dtype is {self.dtype!r}, expected one of {', '.join((*DTYPES, INT8))}")
        if self.kernels not in (None, *KERNELS):
            raise ConfigError(f"kernels is {self.kernels!r}, expected one of {', '.join(KERNELS)}")
        for name in (
            "max_num_sequences",
            "max_num_tokens",
            "max_sequence_length",
            "tokens_per_block",
            "max_tokens_in_paged_kv_cache",
            "ranks_on_host",
            "num_threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1")
        for name in ("kv_cache_free_gpu_mem_fraction", "kv_cache_free_cpu_mem_fraction"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected a number in (0, 1]")
        if any(type(window) is not int or window < 1 for window in self.attention_windows):
            windows = ",".join(map(str, self.attention_windows))
            raise ConfigError(f"max_attention_window_size is {windows}, expected integers of at least 1")
        if self.sink_token_length < 0:
            raise ConfigError(f"sink_token_length is {self.sink_token_length}, expected at least 0")
