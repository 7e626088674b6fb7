"""Command lines of the benchmarks, and the engine parameters made from them."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.measuring.options import Options, add_options, engine_settings, kv_cache_tokens
from benchmarks.measuring.setup import ModelShape
from benchmarks.measuring.workload import BenchRequest, draw
from inflight.build import check_parameters
from inflight.config import Role
from inflight.models import read_model_description
from inflight.parameter_reader import read_parameters
from inflight.testing.make_model import make_model


def options(*arguments: str, concurrency: int = 0) -> Options:
    parser = argparse.ArgumentParser()
    add_options(parser, concurrency)
    return Options.of(parser.parse_args(["--model", "folder", *arguments]))


def test_by_default_all_requests_are_in_flight_at_once():
    assert options("--requests", "7").concurrency == 7
    assert options("--requests", "40", "--concurrency", "16").concurrency == 16
    assert options("--requests", "40", concurrency=16).concurrency == 16


def test_a_negative_concurrency_is_refused(capsys):
    with pytest.raises(SystemExit):
        options("--concurrency", "-1")
    assert "--concurrency: expected a whole number from 0, got '-1'" in capsys.readouterr().err


def test_lone_requests_are_one_at_a_time_whatever_the_concurrency():
    lone = options("--workload", "lone", "--concurrency", "16")
    assert (lone.num_requests, lone.concurrency) == (4, 1)


def test_the_cache_holds_the_largest_requests_in_blocks_of_any_sides_size():
    requests = [BenchRequest((1,) * length, 10) for length in (118, 119, 400)]  # 1, 2 and 4 blocks of 128
    assert kv_cache_tokens(requests, 1) == 4 * 128
    assert kv_cache_tokens(requests, 2) == 6 * 128
    assert kv_cache_tokens(requests, 3) == 7 * 128


def test_other_parameters_are_given_by_set(capsys):
    chosen = options("--set", "kv_cache_dtype=int8", "--set", "tokens_per_block=16")
    settings = engine_settings(chosen, draw("w", 512, 64))
    assert (settings["kv_cache_dtype"], settings["tokens_per_block"]) == ("int8", "16")
    with pytest.raises(SystemExit):
        options("--set", "kv_cache_dtype")
    assert "expected KEY=VALUE, got 'kv_cache_dtype'" in capsys.readouterr().err


@pytest.mark.smoke
def test_the_settings_are_valid_parameters_of_a_server():
    chosen = options("--concurrency", "16", "--dtype", "bfloat16", "--kernels", "torch", "--threads", "3")
    settings = engine_settings(chosen, draw("w", 512, 64))
    batch_size = settings.pop("max_batch_size")
    given = {key: {"string_value": value} for key, value in settings.items()}
    parameters = read_parameters({"max_batch_size": batch_size, "parameters": given}, Role.ENGINE)
    check_parameters(parameters)
    engine = parameters.engine
    assert (engine.max_num_sequences, engine.engine_threads) == (16, 3)
    assert (engine.dtype, engine.kernels) == ("bfloat16", "torch")
    assert not parameters.scheduler.enable_kv_cache_reuse


def test_only_the_weights_of_matrices_are_counted(tmp_path):
    config = read_model_description(make_model(tmp_path, shape="tiny")).decoder
    shape = ModelShape.of(config)
    # 64 wide, 4 heads and 2 KV heads of 16, an MLP of 128 with a gate, 2 layers, 512 tokens
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    assert shape.layer_weights == 2 * (attention + 3 * 64 * 128)
    assert shape.head_weights == 512 * 64
    embedding = 0 if config.tied_embeddings else 512 * 64
    assert shape.weight_bytes("bfloat16") == 2 * (shape.layer_weights + 512 * 64 + embedding)
    assert shape.kv_cache_bytes(10, value_bytes=2) == 2 * 2 * 2 * 16 * 10 * 2
