"""How far bfloat16, int8 and fp8, of weights and KV cache, are from float32 on text that was not trained on.

In this process, without a server. The text is modules of Python's standard library that were held out when the
demo model was trained, prepared as for the training, in windows of 512 tokens. Every position's logits are
compared with those of torch's operators in float32: KL divergence (of what float32 says, in nats), whether the
likeliest token is the same, and the loss on the token that does follow.
"""

from __future__ import annotations

import importlib.util
import json
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from benchmarks.long_context import Loop
from benchmarks.measuring.options import new_parser
from inflight.config import EngineConfig, SchedulerConfig
from inflight.core.request.request import OutputConfig, Request
from inflight.engine.torch import TorchEngine
from inflight.errors import ConfigError
from inflight.text.tokenizer import Tokenizer

_ROOT = Path(__file__).resolve().parents[1]
_DEMO_MODEL = _ROOT / "model_repository/tensorrt_llm/1/demo_model"
_TRAINING = _ROOT / "scripts/train_demo_model"
_HELD_OUT = ("email/quoprimime.py", "ntpath.py", "sqlite3/dump.py", "unittest/_log.py")
_WINDOW = 512
_OUTPUT = OutputConfig(return_context_logits=True)


@dataclass(frozen=True, slots=True)
class Way:
    """A dtype, what computes it, and what keys and values are stored in."""

    dtype: str
    kernels: str
    kv_cache_dtype: str = "auto"


EXACT = Way("float32", "torch")
WAYS = (
    Way("float32", "native"),
    Way("bfloat16", "torch"),
    Way("bfloat16", "native"),
    Way("int8", "torch"),
    Way("int8", "native"),
    Way("fp8", "torch"),
    *(
        Way(dtype, kernels, kv_cache_dtype)
        for kv_cache_dtype in ("int8", "fp8")
        for dtype, kernels in (
            ("float32", "torch"),
            ("float32", "native"),
            ("bfloat16", "torch"),
            ("bfloat16", "native"),
            ("int8", "native"),
        )
    ),
)


@dataclass(frozen=True, slots=True)
class Error:
    """Over all positions; `kl_` in nats, `loss` in nats per token."""

    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    loss: float
    exact_loss: float


def held_out_tokens() -> list[int]:
    """Each definition of the modules followed by the end of text, as the model was trained."""
    training = _load_training()
    tokenizer = Tokenizer.from_dir(str(_DEMO_MODEL))
    library = Path(sysconfig.get_paths()["stdlib"])
    documents = [text for name in _HELD_OUT for text in training.documents(library / name)]
    (end,) = tokenizer.encode(training.EOS)
    return [token for text in documents for token in (*tokenizer.encode(text), end)]


def compute_logits(way: Way, windows: Sequence[Sequence[int]]) -> list[Tensor]:
    """[tokens, vocab_size] float32 of each window."""
    engine = TorchEngine.load(
        EngineConfig(
            str(_DEMO_MODEL),
            way.dtype,
            device="cpu",
            max_num_sequences=1,
            kernels=way.kernels,
            max_tokens_in_paged_kv_cache=2 * _WINDOW,
            kv_cache_dtype=way.kv_cache_dtype,
        )
    )
    loop = Loop(engine, SchedulerConfig(enable_kv_cache_reuse=False))
    found = []
    for number, window in enumerate(windows):
        (response,) = loop.step(Request(number, tuple(window), 1, output=_OUTPUT))
        assert response.result is not None and response.result.context_logits is not None
        logits = response.result.context_logits
        found.append(torch.from_numpy(np.frombuffer(logits.data, np.float32).copy()).view(logits.shape))
    engine.close()
    return found


def compare(exact: Sequence[Tensor], found: Sequence[Tensor], windows: Sequence[Sequence[int]]) -> Error:
    """`found` with what it should be, window by window."""
    divergences, same, losses, exact_losses = [], [], [], []
    for should, logits, window in zip(exact, found, windows, strict=True):
        expected, log_probs = should.double().log_softmax(-1), logits.double().log_softmax(-1)
        divergences.append((expected.exp() * (expected - log_probs)).sum(-1))
        same.append(should.argmax(-1) == logits.argmax(-1))
        following = torch.tensor(window[1:])[:, None]
        losses.append(-log_probs[:-1].gather(1, following))
        exact_losses.append(-expected[:-1].gather(1, following))
    kl = torch.cat(divergences)
    return Error(
        kl.mean().item(),
        kl.quantile(0.99).item(),
        kl.max().item(),
        torch.cat(same).double().mean().item(),
        torch.cat(losses).mean().item(),
        torch.cat(exact_losses).mean().item(),
    )


def main() -> None:
    parser = new_parser("accuracy", __doc__)
    parser.parse_args()
    tokens = held_out_tokens()
    windows = [tokens[begin : begin + _WINDOW] for begin in range(0, len(tokens) - 1, _WINDOW)]
    exact = compute_logits(EXACT, windows)
    rows = []
    for way in WAYS:
        name = f"{way.dtype:8} {way.kernels:6} KV {way.kv_cache_dtype:4}"
        try:
            found = compute_logits(way, windows)
        except ConfigError as error:
            print(f"{name} left out: {error}")
            continue
        error = compare(exact, found, windows)
        rows.append(asdict(way) | {name: float(f"{value:.5g}") for name, value in asdict(error).items()})
        print(
            f"{name} KL mean {error.kl_mean:.2e} p99 {error.kl_p99:.2e} "
            f"max {error.kl_max:.2e}  top-1 {100 * error.top1_agreement:.2f} %  "
            f"loss {error.loss:.4f}, float32 {error.exact_loss:.4f}"
        )
    print(json.dumps({"bench": "accuracy", "model": _DEMO_MODEL.name, "tokens": len(tokens), "rows": rows}))


def _load_training() -> ModuleType:
    """The program that trained the model knows how its text was prepared."""
    loader = SourceFileLoader("train_demo_model", str(_TRAINING))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None, "there is a loader"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
