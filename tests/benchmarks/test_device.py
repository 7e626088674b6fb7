"""The device benchmark runs on a CPU too, and its figures are consistent."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.device import bytes_read, main
from inflight.engine.layers.torch_sink import load_weights
from inflight.models import read_model_description
from inflight.testing.make_model import make_model

ARGUMENTS = "--shape tiny --device cpu --context 40 --iterations 5 --copy-mib 8 --rows 1 3".split()  # noqa: SIM905


def test_each_number_of_sequences_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = main([*ARGUMENTS, "--dtype", "float32"])
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"] == lines
    assert [line["rows"] for line in lines] == [1, 3]
    for line in lines:
        assert line["tokens_per_s"] == pytest.approx(1e3 * line["rows"] / line["iteration_ms"], rel=0.01)
        # A difference of two times, which may be negative on a busy machine.
        assert line["of_limit"] > 0 and isinstance(line["transformers_tokens_per_s"], float)
        assert not line["recorded"]


def test_transformers_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = main([*ARGUMENTS[:-1], "--without-transformers", "--dtype", "bfloat16"])
    assert "transformers_tokens_per_s" not in line
    capsys.readouterr()


@pytest.mark.smoke
def test_an_iteration_reads_every_matrix_once(tmp_path) -> None:
    model = read_model_description(make_model(tmp_path / "tiny"))
    weights = load_weights(model, torch.bfloat16, torch.device("cpu"))
    matrices = [
        linear.weight
        for layer in weights.layers
        for linear in (layer.qkv, layer.output, layer.up, layer.down)
    ]
    expected = sum(matrix.nbytes for matrix in (*matrices, weights.lm_head.weight))
    assert bytes_read(model.decoder, torch.bfloat16, 0, 0) == expected
    a_token = 2 * model.decoder.num_layers * model.decoder.kv_size * 2  # keys and values, two bytes each
    assert bytes_read(model.decoder, torch.bfloat16, 3, 7) == expected + 21 * a_token
