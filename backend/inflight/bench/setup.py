"""What a figure was measured with: the model's shape, the engine's settings, versions, the machine."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version

from inflight.bench.options import Options, kv_cache_tokens
from inflight.bench.workload import BenchRequest
from inflight.models import DecoderConfig


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder, and what its matrices hold.

    Attributes:
        layer_weights: Of the linear layers of all decoder layers.
        head_weights: Of the output projection.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    layer_weights: int
    head_weights: int

    @classmethod
    def of(cls, config: DecoderConfig) -> ModelShape:
        """Of any family."""
        hidden, ffn = config.hidden_size, config.intermediate_size
        attention = hidden * (config.query_size + 2 * config.kv_size) + config.query_size * hidden
        mlp = (3 if config.gated_mlp else 2) * hidden * ffn
        return cls(
            layers=config.num_layers,
            hidden=hidden,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            ffn=ffn,
            vocabulary=config.vocab_size,
            layer_weights=config.num_layers * (attention + mlp),
            head_weights=config.vocab_size * hidden,
        )

    def gflop(self, num_rows: float, num_sampled: float) -> float:
        """Multiplications and additions of matrices for tokens computed and tokens chosen, in 1e9."""
        return 2e-9 * (self.layer_weights * num_rows + self.head_weights * num_sampled)


@dataclass(frozen=True, slots=True)
class Versions:
    """Of what computes."""

    python: str
    torch: str
    inflight: str

    @classmethod
    def here(cls) -> Versions:
        """In this environment."""
        return cls(platform.python_version(), version("torch"), version("inflight"))


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that a figure depends on and that can be known.

    Attributes:
        model: The checkpoint's folder, by name.
        kernels: What was asked for; "default" is the engine's choice.
        kv_cache_tokens: Room in the KV cache.
    """

    model: str
    shape: ModelShape
    dtype: str
    kernels: str
    threads: int
    workload: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    max_num_tokens: int
    kv_cache_tokens: int
    rounds: int
    versions: Versions
    cpu: str

    @classmethod
    def of(cls, options: Options, config: DecoderConfig, requests: list[BenchRequest]) -> Setup:
        """Of a run with these options, of this model and these requests."""
        return cls(
            model=options.model.resolve().name,
            shape=ModelShape.of(config),
            dtype=options.dtype or config.dtype or "float32",
            kernels=options.kernels or "default",
            threads=options.num_threads,
            workload=options.workload,
            requests=len(requests),
            prompt_tokens=sum(len(request.prompt) for request in requests),
            output_tokens=sum(request.num_output_tokens for request in requests),
            concurrency=options.concurrency,
            max_num_tokens=options.max_num_tokens,
            kv_cache_tokens=kv_cache_tokens(requests, options.concurrency),
            rounds=options.num_rounds,
            versions=Versions.here(),
            cpu=cpu_name(),
        )


def cpu_name() -> str:
    """Of the first core; the architecture where the kernel does not say."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()
