"""Handling of a GPU's libraries, and the log lines about them, on a machine without a GPU."""

from __future__ import annotations

import inspect
import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from inflight.config import EngineConfig
from inflight.engine.attention.check import CannotAttend
from inflight.engine.attention.find import torch_paged_attention
from inflight.engine.cuda.graph_capture import find_capture
from inflight.ranks.topology import Mapping

CUDA = torch.device("cuda")


def scores(**changes: Any) -> Any:
    """Return a model whose attention scores differ from Llama's in these settings."""
    return mock.Mock(
        **{
            "attention_scale": None,
            "attention_soft_cap": None,
            "alibi": None,
            "learned_sinks": False,
            **changes,
        }
    )


LLAMA = scores()


@pytest.mark.parametrize("error", [ImportError("undefined symbol"), RuntimeError("no FA3 forward kernels")])
def test_a_broken_flash_attention_3_is_replaced_by_2(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    installed = ModuleType("flash_attn_interface")
    installed.__spec__ = ModuleSpec(installed.__name__, None)
    monkeypatch.setitem(sys.modules, installed.__name__, installed)
    activate = mock.Mock(side_effect=error)
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", activate)
    with caplog.at_level(logging.WARNING):
        attention = torch_paged_attention(CUDA, LLAMA)
    activate.assert_called_once_with("FA3")
    assert attention._takes_key_bounds, "as 2 wants them"
    (record,) = caplog.records
    assert str(error) in record.message


@pytest.mark.parametrize(
    ("changes", "mapping", "reason"),
    [
        ({"cuda_graph_mode": False}, Mapping(), "turned off"),
        ({}, Mapping(pp_size=2), "pipeline stages"),
    ],
)
def test_where_nothing_is_recorded_the_log_says_why_once(
    changes: dict[str, Any], mapping: Mapping, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert find_capture(EngineConfig("", **changes), True, mapping, CUDA, False) is None
    (record,) = caplog.records
    assert "without CUDA graphs" in record.message and reason in record.message


@pytest.mark.parametrize("mapping", [Mapping(), Mapping(tp_size=2)])
def test_iterations_of_one_pipeline_stage_are_recorded(
    mapping: Mapping, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = object()
    monkeypatch.setattr("inflight.engine.cuda.graph_capture.GraphCapture", lambda device: recorder)
    assert find_capture(EngineConfig(""), True, mapping, CUDA, False) is recorder
    assert not caplog.records


def test_torchs_kernel_refuses_models_whose_scores_it_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    with pytest.raises(CannotAttend, match="no cap on scores"):
        torch_paged_attention(CUDA, scores(attention_soft_cap=50.0))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, *, window_size: query)
    with pytest.raises(CannotAttend, match="no argument for the scale"):
        torch_paged_attention(CUDA, scores(attention_scale=0.1))
    with pytest.raises(CannotAttend, match="does not return the sums of its softmaxes"):
        torch_paged_attention(CUDA, scores(learned_sinks=True))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, *, scale=None: query * scale)
    attention = torch_paged_attention(CUDA, scores(attention_scale=0.5))
    assert attention._varlen(torch.ones(1)).item() == 0.5


def test_learned_sinks_request_the_log_sums_of_torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    attention = torch_paged_attention(CUDA, scores(learned_sinks=True))
    asked = inspect.signature(varlen_attn).bind_partial(**attention._varlen.keywords).arguments
    assert asked == {"return_aux": AuxRequest(lse=True)}
