"""Describe the setup of a figure: model shape, engine settings, versions and machine."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version

from benchmarks.measuring.options import Options, kv_cache_tokens
from benchmarks.measuring.workload import BenchRequest
from inflight.engine.kv_quantization import SCALE_BYTES
from inflight.models import DecoderConfig

_BYTES = {"int4": 0.5, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


def value_bytes(dtype: str) -> int:
    """Return the bytes of one element of activations, keys and values in a model with weights of this dtype."""
    return int(_BYTES["bfloat16" if dtype in ("int8", "int4") else dtype])


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder, and the numbers of its weights.

    Attributes:
        layer_weights: Number of weights of the linear layers of all decoder layers; of experts, only those
            that one token uses.
        head_weights: Number of weights of the output projection.
        num_weights: Number of weights of all matrices, with all experts, and with the embedding if it is not
            also the output projection.
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
    num_weights: int
    cached: int

    @classmethod
    def of(cls, config: DecoderConfig) -> ModelShape:
        """Compute the shape of a model of any family."""
        hidden, ffn = config.hidden_size, config.intermediate_size
        attention = hidden * (config.query_size + 2 * config.kv_size) + config.query_size * hidden
        mlp = (3 if config.gated_mlp else 2) * hidden
        layers, idle, head = config.num_layers * attention, 0, config.vocab_size * hidden
        for index in range(config.num_layers):
            experts = config.experts
            if experts is None or not experts.layers[index]:
                layers += mlp * ffn
                continue
            layers += hidden * (experts.count + experts.has_shared_gate)
            layers += mlp * (
                experts.num_per_token * experts.intermediate_size + experts.shared_intermediate_size
            )
            idle += mlp * (experts.count - experts.num_per_token) * experts.intermediate_size
        return cls(
            layers=config.num_layers,
            hidden=hidden,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            ffn=ffn,
            vocabulary=config.vocab_size,
            layer_weights=layers,
            head_weights=head,
            num_weights=layers + idle + (head if config.tied_embeddings else 2 * head),
            cached=config.num_layers * config.cached_size,
        )

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of all matrices, without scales."""
        return int(self.num_weights * _BYTES[dtype])

    def kv_cache_bytes(self, num_tokens: int, value_bytes: int, scale_bytes: int = 0) -> int:
        """Return the bytes of the keys and values of `num_tokens` tokens.

        Each head's scale has `scale_bytes` bytes.
        """
        return num_tokens * (self.cached * value_bytes + self.cached // self.head_dim * scale_bytes)

    def gflop(self, num_rows: float, num_sampled: float) -> float:
        """Return the GFLOP of matrix products for `num_rows` computed and `num_sampled` sampled tokens."""
        return 2e-9 * (self.layer_weights * num_rows + self.head_weights * num_sampled)


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of the relevant software."""

    python: str
    torch: str
    inflight: str

    @classmethod
    def here(cls) -> Versions:
        """Return the versions in this environment."""
        return cls(platform.python_version(), version("torch"), version("inflight"))


@dataclass(frozen=True, slots=True)
class Kernels:
    """Implementation of the layers.

    Attributes:
        asked: Value of the parameter in config.pbtxt; "default" is the engine's choice.
        ran: Kernels that were used, "native" or "torch"; None for an engine in another process, whose log
            has it.
        instruction_sets: Instruction sets that native code was compiled for.
        int8_products: With 8-bit or 4-bit weights, how products are computed: "vnni", "avx2", or "bfloat16"
            if weights are converted to bfloat16.
    """

    asked: str
    ran: str | None = None
    instruction_sets: tuple[str, ...] = ()
    int8_products: str | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """The known conditions on which a figure depends.

    Attributes:
        model: Name of the checkpoint's folder.
        dtype: Data type of the weights; if a checkpoint's quantized weights are kept, the quantization.
        kernels: Implementation of the layers.
        kv_cache_tokens: Size of the KV cache in tokens.
        kv_cache_bytes: Size of the KV cache in bytes.
        kv_cache_dtype: Value of the parameter in config.pbtxt.
        weight_bytes: Bytes of the matrices. If quantized weights are kept, bytes of all weights with scales,
            and of both forms of an embedding that is also the output projection.
    """

    model: str
    shape: ModelShape
    dtype: str
    kernels: Kernels
    threads: int
    workload: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    max_num_tokens: int
    kv_cache_tokens: int
    kv_cache_bytes: int
    weight_bytes: int
    rounds: int
    versions: Versions
    cpu: str
    kv_cache_dtype: str = "auto"

    @classmethod
    def of(
        cls,
        options: Options,
        config: DecoderConfig,
        requests: list[BenchRequest],
        kernels: Kernels | None = None,
    ) -> Setup:
        """Describe a run with these options and requests. `kernels` is given for an engine in this process."""
        shape, dtype = ModelShape.of(config), options.dtype or config.dtype or "float32"
        num_kv_tokens = kv_cache_tokens(requests, options.concurrency)
        kv_cache_dtype = dict(options.more).get("kv_cache_dtype", "auto")
        is_rounded = kv_cache_dtype != "auto"
        bytes_of_a_number = (1, SCALE_BYTES) if is_rounded else (value_bytes(dtype),)
        return cls(
            model=options.model.resolve().name,
            shape=shape,
            dtype=dtype,
            kernels=kernels or Kernels(options.kernels or "default"),
            threads=options.num_threads,
            workload=options.workload,
            requests=len(requests),
            prompt_tokens=sum(len(request.prompt) for request in requests),
            output_tokens=sum(request.num_output_tokens for request in requests),
            concurrency=options.concurrency,
            max_num_tokens=options.max_num_tokens,
            kv_cache_tokens=num_kv_tokens,
            kv_cache_bytes=shape.kv_cache_bytes(num_kv_tokens, *bytes_of_a_number),
            weight_bytes=shape.weight_bytes(dtype),
            rounds=options.num_rounds,
            versions=Versions.here(),
            cpu=cpu_name(),
            kv_cache_dtype=kv_cache_dtype,
        )


def cpu_name() -> str:
    """Return the name of the first core's model, or the architecture if the kernel does not report it."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()
