"""A model's shape and a setup like those of a benchmark."""

from __future__ import annotations

from benchmarks.measuring.setup import Kernels, ModelShape, Setup, Versions

SHAPE = ModelShape(
    2, 8, 2, 1, 4, 16, 100, layer_weights=1_000_000, head_weights=50_000, num_weights=1_050_000, cached=16
)
SETUP = Setup(
    model="tiny",
    shape=SHAPE,
    dtype="bfloat16",
    kernels=Kernels("default"),
    threads=2,
    workload="w",
    requests=1,
    prompt_tokens=10,
    output_tokens=2,
    concurrency=1,
    max_num_tokens=2048,
    kv_cache_tokens=32,
    kv_cache_bytes=512,
    weight_bytes=2_100_000,
    rounds=1,
    versions=Versions("3.11", "2.13", "0.1"),
    cpu="a CPU",
)
