"""The error of logits against the exact ones."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import accuracy
from benchmarks.accuracy import EXACT, Way, compare, compute_logits, held_out_tokens
from inflight.testing.make_model import make_model

WINDOWS = [[1, 2, 3, 4, 5], [7, 8, 9]]


def logits(probabilities: list[float]) -> torch.Tensor:
    """Return logits [2, 2] with the same distribution at two positions."""
    return torch.tensor(probabilities).log().repeat(2, 1)


@pytest.mark.smoke
def test_equal_logits_have_no_error():
    exact = [logits([0.25, 0.75])]
    error = compare(exact, exact, [[0, 1]])
    assert (error.kl_mean, error.kl_max, error.top1_agreement) == (0, 0, 1)
    assert error.loss == error.exact_loss == pytest.approx(-math.log(0.75))


def test_divergence_is_from_the_exact_logits():
    error = compare([logits([0.25, 0.75])], [logits([0.5, 0.5])], [[0, 0]])
    assert error.kl_mean == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert (error.loss, error.exact_loss) == (pytest.approx(-math.log(0.5)), pytest.approx(-math.log(0.25)))


def test_agreement_counts_the_likeliest_tokens_over_all_windows():
    exact = [logits([0.25, 0.75]), logits([0.75, 0.25])]
    found = [logits([0.4, 0.6]), logits([0.4, 0.6])]
    assert compare(exact, found, [[0, 1], [0, 1]]).top1_agreement == 0.5


def test_every_window_has_the_logits_of_its_own_tokens(monkeypatch, tmp_path):
    monkeypatch.setattr(accuracy, "_DEMO_MODEL", make_model(tmp_path, shape="tiny"))
    together = compute_logits(EXACT, WINDOWS)
    assert [tuple(each.shape) for each in together] == [(5, 512), (3, 512)]
    (alone,) = compute_logits(EXACT, WINDOWS[1:])
    torch.testing.assert_close(together[1], alone)
    rounded = compute_logits(Way("bfloat16", "torch"), WINDOWS)
    error = compare(together, rounded, WINDOWS)
    assert 0 < error.kl_max < 0.01


def test_on_a_gpu_only_supported_ways_are_compared(monkeypatch, capsys):
    asked = []

    def compute(way, windows, folder=None, device="cpu"):
        asked.append((way, device))
        return [logits([0.25, 0.75])]

    monkeypatch.setattr(accuracy, "compute_logits", compute)
    monkeypatch.setattr(accuracy, "held_out_tokens", lambda: [0, 1])
    accuracy.main(["--device", "cuda", "--formats"])
    ways = [EXACT, *(Way(dtype, "torch") for dtype in ("bfloat16", "int8", "fp8"))]
    ways += [Way(dtype, "torch", kv) for kv in ("int8", "fp8") for dtype in ("float32", "bfloat16")]
    assert asked == [(way, "cuda") for way in ways]
    assert '"device": "cuda"' in capsys.readouterr().out


def test_the_text_is_encoded_with_the_demo_models_tokenizer():
    tokens = held_out_tokens()
    assert len(tokens) > 4 * accuracy._WINDOW
    assert max(tokens) < 8192
