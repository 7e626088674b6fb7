"""Compare the time of each sampling feature with the times of argmax and of softmax followed by multinomial.

All rows use the measured feature. Logits are distributed like a language model's: probabilities fall with
the rank, and some dozens of tokens together have a probability of 90 %. With `--flat` logits are normally
distributed, and a top-p of 0.9 keeps most tokens.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from benchmarks.measuring.options import new_parser
from inflight.arguments import positive
from inflight.core.request.request import ExternalDraft, FloatTensor, OutputOptions, Request
from inflight.core.request.sampling_config import CONTROLS, DRAWING, SamplingConfig
from inflight.core.schedule.batch import BeamGroup, ContextChunk, ScheduledBatch, SlotStart
from inflight.sampling import Sampler

_USUAL = SamplingConfig(temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.1)
_BEAMS = 4
_DRAFTS = 4


@dataclass(frozen=True, slots=True)
class Feature:
    """Sampling feature that all rows of a measurement use."""

    name: str
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    output: OutputOptions = field(default_factory=OutputOptions)
    num_bad_words: int = 0
    has_bias: bool = False
    has_drafts: bool = False
    has_draft_logits: bool = False


FEATURES = (
    Feature("greedy"),
    Feature("temperature", SamplingConfig(temperature=0.8, top_p=1.0)),
    *(
        Feature(f"{name} {CONTROLS[name].example}", SamplingConfig(**{name: CONTROLS[name].example}))
        for name in DRAWING
    ),
    Feature("top_k 50, top_p 0.9", SamplingConfig(top_k=50, top_p=0.9)),
    Feature("repetition_penalty", SamplingConfig(repetition_penalty=1.1)),
    Feature("presence_penalty", SamplingConfig(presence_penalty=0.5)),
    Feature("frequency_penalty", SamplingConfig(frequency_penalty=0.5)),
    Feature("embedding_bias", has_bias=True),
    Feature("min_length", SamplingConfig(min_length=1 << 20)),
    Feature("20 bad words", num_bad_words=20),
    Feature("no_repeat_ngram_size 3", SamplingConfig(no_repeat_ngram_size=3)),
    Feature("log probs", output=OutputOptions(return_log_probs=True)),
    Feature("top-5 log probs", output=OutputOptions(return_log_probs=True, num_top_log_probs=5)),
    Feature(f"beams of {_BEAMS}", SamplingConfig(beam_width=_BEAMS)),
    Feature(f"drafts of {_DRAFTS}", has_drafts=True),
    Feature(
        f"drafts of {_DRAFTS} with logits", SamplingConfig(top_k=50), has_drafts=True, has_draft_logits=True
    ),
    Feature("temperature, top_k, top_p, repetition", _USUAL),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the measurement."""

    rows: int
    vocab_size: int
    history: int


def make_logits(shape: Shape, flat: bool) -> Tensor:
    """Return float32 logits [rows, vocab_size]."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(shape.rows, shape.vocab_size, generator=generator)
    if flat:
        return noise
    ranked = -2.0 * torch.arange(1.0, shape.vocab_size + 1).log() + 0.3 * noise
    order = torch.rand(shape.rows, shape.vocab_size, generator=generator).argsort(dim=-1)
    return torch.empty_like(ranked).scatter_(-1, order, ranked)


def measure(feature: Feature, shape: Shape, logits: Tensor, repeats: int) -> float:
    """Return the median milliseconds of `Sampler.decode`."""
    sampler = Sampler(shape.rows, shape.history + _DRAFTS + 1, shape.vocab_size, logits.device)
    batch, positions = _batch(feature, shape)
    sampler.apply(batch)
    work = torch.empty_like(logits)
    return _median(
        lambda: sampler.decode(batch, work, positions), repeats, prepare=lambda: work.copy_(logits)
    )


def _median(run: Callable[[], object], repeats: int, prepare: Callable[[], object] = lambda: None) -> float:
    times = []
    for _ in range(repeats + 1):
        prepare()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])  # the first one warms up


def _batch(feature: Feature, shape: Shape) -> tuple[ScheduledBatch, np.ndarray]:
    """Make a batch of sequences with `history` tokens each. A sequence with drafts has several rows."""
    numbers = np.random.default_rng(0)
    per_draft = _DRAFTS + 1
    num_drafted = shape.rows // per_draft if feature.has_drafts else 0
    num_plain = shape.rows - num_drafted * per_draft
    starts, chunks, groups = [], [], []
    for slot in range(num_drafted + num_plain):
        prompt = tuple(numbers.integers(0, shape.vocab_size, shape.history).tolist())
        request = _request(feature, shape, prompt, numbers)
        starts.append(SlotStart(slot, request, slot, prompt if request.looks_back else ()))
        if slot < num_drafted:
            assert request.draft is not None, "the first slots have drafts"
            token_ids = (prompt[-1], *request.draft.token_ids)
            chunks.append(ContextChunk(slot, shape.history - 1, token_ids, True, _DRAFTS))
    plain = tuple(range(num_drafted, num_drafted + num_plain))
    if feature.sampling.uses_beams:
        for first in range(0, num_plain, _BEAMS):
            groups.append(BeamGroup(plain[first : first + _BEAMS], (-1.0, -2.0, -3.0, -4.0), 2 * _BEAMS))
    offsets = [*range(per_draft)] * num_drafted + [0] * num_plain
    batch = ScheduledBatch(
        0, starts=tuple(starts), context=tuple(chunks), generation_slots=plain, beam_groups=tuple(groups)
    )
    return batch, shape.history + np.array(offsets, dtype=np.int64)


def _request(
    feature: Feature, shape: Shape, prompt: tuple[int, ...], numbers: np.random.Generator
) -> Request:
    def floats(*lengths: int) -> FloatTensor:
        return FloatTensor(lengths, numbers.normal(size=lengths).astype(np.float32).tobytes())

    draft = None
    if feature.has_drafts:
        tokens = tuple(numbers.integers(0, shape.vocab_size, _DRAFTS).tolist())
        draft = ExternalDraft(tokens, floats(_DRAFTS, shape.vocab_size) if feature.has_draft_logits else None)
    words = numbers.integers(0, shape.vocab_size, (feature.num_bad_words, 3)).tolist()
    return Request(
        request_id=1,
        input_token_ids=prompt,
        max_new_tokens=_DRAFTS + 1,
        end_ids=(0,),
        sampling=feature.sampling,
        output=feature.output,
        bad_words=tuple(tuple(word[: 1 + index % 3]) for index, word in enumerate(words)),
        embedding_bias=floats(shape.vocab_size) if feature.has_bias else None,
        draft=draft,
    )


def run(shape: Shape, features: Sequence[Feature], flat: bool, repeats: int) -> list[dict[str, object]]:
    """Print and return the figures of one shape."""
    logits = make_logits(shape, flat)
    argmax = _median(lambda: logits.argmax(dim=-1), repeats)
    multinomial = _median(lambda: torch.multinomial(logits.softmax(dim=-1), 1), repeats)
    print(f"{shape.rows} rows x {shape.vocab_size} tokens, {shape.history} tokens of history")
    print(f"argmax {argmax:.2f} ms, softmax and multinomial {multinomial:.2f} ms")
    print(f"{'feature':<40}{'ms':>8}{'/ argmax':>10}{'/ softmax+multinomial':>23}")
    rows = []
    for feature in features:
        took = measure(feature, shape, logits, repeats)
        print(f"{feature.name:<40}{took:8.2f}{took / argmax:10.2f}{took / multinomial:23.3f}")
        rows.append({"feature": feature.name, "ms": round(took, 3)})
    return rows


def main() -> None:
    parser = new_parser("sampling", __doc__)
    parser.add_argument("--rows", type=positive, default=64)
    parser.add_argument("--vocab", type=positive, default=128_000)
    parser.add_argument(
        "--history", type=positive, default=512, help="tokens that penalties look back at (per row)"
    )
    parser.add_argument("--flat", action="store_true", help="normally distributed logits")
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument("--threads", type=positive, help="default: torch's choice")
    parser.add_argument("--feature", nargs="+", help="only features whose name contains one of these")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    wanted = [f for f in FEATURES if not arguments.feature or any(n in f.name for n in arguments.feature)]
    shape = Shape(arguments.rows, arguments.vocab, arguments.history)
    figures: dict[str, object] = {"rows": shape.rows, "vocab": shape.vocab_size}
    print(f"{torch.get_num_threads()} threads")
    figures["features"] = run(shape, wanted, arguments.flat, arguments.repeats)
    if not arguments.feature:
        small = Shape(32, 49_152, shape.history)  # a model of 135 million parameters
        figures["135m"] = run(small, FEATURES[-1:], arguments.flat, arguments.repeats)
    print(json.dumps({"bench": "sampling", **figures}))


if __name__ == "__main__":
    main()
