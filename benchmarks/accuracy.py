"""Compare logits in bfloat16, int8 and fp8, and logits of quantized checkpoints, with float32 logits.

Runs in this process, without a server. The text is modules of Python's standard library that were held out
in the training of the demo model, prepared as for the training, in windows of 512 tokens. For each dtype of
the weights and of the KV cache, the logits at every position are compared with the logits of torch's
operators in float32: KL divergence from float32 in nats, whether the likeliest token is the same, and the
loss on the next token.

Then the demo model is written in several quantized formats, rounded to the nearest level, and two
comparisons are made for each format. First, the dequantized weights in float32 are compared with the demo
model, which shows the error of the format. Second, the quantized checkpoint, unchanged and in bfloat16, is
compared with its dequantized weights in float32, which shows the error of this engine's computation.
"""

from __future__ import annotations

import importlib.util
import json
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from benchmarks.long_context import Loop
from benchmarks.measuring.options import new_parser
from inflight.config import EngineConfig, SchedulingConfig
from inflight.core.request.request import OutputOptions, Request
from inflight.engine.load import load_engine
from inflight.errors import ConfigError
from inflight.testing.quantize import FORMATS, quantize_checkpoint
from inflight.text.tokenizer import Tokenizer

_ROOT = Path(__file__).resolve().parents[1]
_DEMO_MODEL = _ROOT / "model_repository/tensorrt_llm/1/demo_model"
_TRAINING = _ROOT / "scripts/train_demo_model"
_HELD_OUT = ("email/quoprimime.py", "ntpath.py", "sqlite3/dump.py", "unittest/_log.py")
_WINDOW = 512
_OUTPUT = OutputOptions(return_context_logits=True)


@dataclass(frozen=True, slots=True)
class Way:
    """Dtype of the weights, kernels, and dtype of the KV cache."""

    dtype: str | None  # None: the checkpoint's; quantized weights stay quantized
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


WAYS_OF_QUANTIZED = (Way(None, "native"), Way(None, "torch"), Way("bfloat16", "native"))


@dataclass(frozen=True, slots=True)
class Error:
    """Difference over all positions. Fields with the prefix `kl_` are in nats, `loss` in nats per token."""

    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    loss: float
    exact_loss: float


def held_out_tokens() -> list[int]:
    """Return the held-out modules' tokens: each definition is followed by the end of text, as in training."""
    training = _load_training()
    tokenizer = Tokenizer.from_dir(str(_DEMO_MODEL))
    library = Path(sysconfig.get_paths()["stdlib"])
    documents = [text for name in _HELD_OUT for text in training.documents(library / name)]
    (end,) = tokenizer.encode(training.EOS)
    return [token for text in documents for token in (*tokenizer.encode(text), end)]


def compute_logits(
    way: Way, windows: Sequence[Sequence[int]], folder: Path | None = None, device: str = "cpu"
) -> list[Tensor]:
    """Return float32 logits [tokens, vocab_size] per window, of the demo model or of the model in `folder`."""
    engine = load_engine(
        EngineConfig(
            str(folder or _DEMO_MODEL),
            way.dtype,
            device=device,
            max_num_sequences=1,
            kernels=way.kernels,
            max_tokens_in_paged_kv_cache=2 * _WINDOW,
            kv_cache_dtype=way.kv_cache_dtype,
        )
    )
    loop = Loop(engine, SchedulingConfig(enable_kv_cache_reuse=False))
    found = []
    for number, window in enumerate(windows):
        (response,) = loop.step(Request(number, tuple(window), 1, output=_OUTPUT))
        assert response.result is not None and response.result.context_logits is not None
        logits = response.result.context_logits
        found.append(torch.from_numpy(np.frombuffer(logits.data, np.float32).copy()).view(logits.shape))
    engine.close()
    return found


def compare(exact: Sequence[Tensor], found: Sequence[Tensor], windows: Sequence[Sequence[int]]) -> Error:
    """Compare the logits of each window with the exact logits."""
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = new_parser("accuracy", __doc__)
    parser.add_argument(
        "--formats",
        nargs="*",
        choices=FORMATS,
        default=list(FORMATS),
        help="formats of checkpoints; default: all",
    )
    parser.add_argument(
        "--device", default="cpu", help="device of all computations; compiled layers need a CPU"
    )
    given = parser.parse_args(arguments)
    device: str = given.device
    tokens = held_out_tokens()
    windows = [tokens[begin : begin + _WINDOW] for begin in range(0, len(tokens) - 1, _WINDOW)]
    exact = compute_logits(EXACT, windows, device=device)
    rows = list(_compare_ways(WAYS, exact, windows, device=device))
    with tempfile.TemporaryDirectory() as folder:
        for format in given.formats:
            rows += _compare_format(format, exact, windows, Path(folder, format), device)
    print(
        json.dumps(
            {
                "bench": "accuracy",
                "model": _DEMO_MODEL.name,
                "device": device,
                "tokens": len(tokens),
                "rows": rows,
            }
        )
    )


def _compare_format(
    format: str, exact: Sequence[Tensor], windows: Sequence[Sequence[int]], folder: Path, device: str
) -> Iterator[dict[str, object]]:
    quantize_checkpoint(_DEMO_MODEL, folder, format)
    stands_for = compute_logits(EXACT, windows, folder, device)
    print(f"{format}, float32 of what its weights stand for, with the demo model:")
    yield _row({"format": format, "of": "weights"}, compare(exact, stands_for, windows))
    print(f"{format}, with what its weights stand for:")
    for row in _compare_ways(WAYS_OF_QUANTIZED, stands_for, windows, folder, device):
        yield {"format": format} | row


def _compare_ways(
    ways: Sequence[Way],
    exact: Sequence[Tensor],
    windows: Sequence[Sequence[int]],
    folder: Path | None = None,
    device: str = "cpu",
) -> Iterator[dict[str, object]]:
    for way in (way for way in ways if device == "cpu" or way.kernels == "torch"):
        try:
            found = compute_logits(way, windows, folder, device)
        except ConfigError as error:
            print(f"{way.dtype or 'as it is':8} {way.kernels:6} left out: {error}")
            continue
        yield _row(asdict(way), compare(exact, found, windows))


def _row(what: dict[str, object], error: Error) -> dict[str, object]:
    """Print and return a row of figures."""
    names = " ".join(f"{value or 'as it is':8}" for value in what.values())
    print(
        f"{names} KL mean {error.kl_mean:.2e} p99 {error.kl_p99:.2e} max {error.kl_max:.2e}  "
        f"top-1 {100 * error.top1_agreement:.2f} %  loss {error.loss:.4f}, float32 {error.exact_loss:.4f}"
    )
    return what | {name: float(f"{value:.5g}") for name, value in asdict(error).items()}


def _load_training() -> ModuleType:
    """Load the program that trained the model, which prepares the text."""
    loader = SourceFileLoader("train_demo_model", str(_TRAINING))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None, "a spec of a file has a loader"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
