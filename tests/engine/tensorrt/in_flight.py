"""Runs the networks of an engine in flight, with the interpreter: hand-made batches of chunks and generation."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from inflight.engine.tensorrt.build import BuildOptions, build_engine
from inflight.engine.tensorrt.sidecar import Sidecar
from tests.engine.tensorrt.interpreter import NetworkCopy, dump, evaluate, load
from tests.models.zoo import ZooModel

SLOTS, MAX_SEQ_LEN, MAX_NUM_TOKENS = 5, 64, 48
SIZES = {"max_batch_size": SLOTS, "max_seq_len": MAX_SEQ_LEN, "max_num_tokens": MAX_NUM_TOKENS}


@dataclass(frozen=True)
class Rows:
    """Tokens of a sequence in a batch: a chunk or, if it is one token, maybe a generation row."""

    slot: int
    token_ids: tuple[int, ...]
    start: int
    is_chunk: bool


@dataclass(frozen=True)
class Interpreted:
    """A rank's networks and their description."""

    sidecar: Sidecar
    layers: NetworkCopy
    head: NetworkCopy
    weights: dict[str, Tensor]


def build(model: Path, folder: Path, **options: Any) -> list[Interpreted]:
    """Define a model's networks for the interpreter, for each rank."""
    found: list[Interpreted] = []
    for sidecar in build_engine(model, folder, BuildOptions(**(SIZES | options)), serialize=dump):
        layers, head = (
            load((folder / plan.file.name).read_bytes()) for plan in (sidecar.layers, sidecar.head)
        )
        weights: dict[str, Tensor] = {}
        if sidecar.weights is not None:
            weights = load_file(folder / sidecar.weights.name)
        found.append(Interpreted(sidecar, layers, head, weights))
    return found


@dataclass
class Runner:
    """Runs a rank's networks. Initially the caches hold numbers that must not be read."""

    engine: Interpreted
    communicator: MeetingRank | None = None
    seed: int = 0
    caches: dict[str, Tensor] = field(default_factory=dict)
    additional: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        for alias in self.engine.sidecar.layers.aliases:
            dtype, shape = self.engine.layers.inputs[alias.input]
            self.caches[alias.input] = (100 * torch.randn(shape, generator=generator)).to(dtype)

    def logits(self, batch: Sequence[Rows], **more: Tensor) -> Tensor:
        """Compute the logits of all rows [rows, vocab_size], in the order of the batch."""
        logits = self.head(self.hidden(batch, **more))["logits"]
        settings, model = self.engine.sidecar.settings, self.engine.sidecar.model
        if self.communicator is None or settings.tensor_parallel_size == 1:
            return logits
        widest = -(-model.vocab_size // settings.tensor_parallel_size)
        parts = self.communicator.all_gather(F.pad(logits, (0, widest - logits.shape[1])).T)
        return parts.T[:, : model.vocab_size]

    def hidden(self, batch: Sequence[Rows], **more: Tensor) -> Tensor:
        """Return the last layer's output; `more` replaces inputs."""
        inputs = self.inputs(batch) | more
        network = self.engine.layers
        outputs = evaluate(network, {name: inputs[name] for name in network.inputs}, self.communicator)
        for alias in self.engine.sidecar.layers.aliases:
            assert outputs[alias.output].data_ptr() == self.caches[alias.input].data_ptr()
        self.additional = {name: value for name, value in outputs.items() if name.startswith("hidden_states")}
        return outputs["hidden"]

    def head(self, hidden: Tensor) -> dict[str, Tensor]:
        """Return normalized states and logits of rows."""
        weights = {
            name: tensor for name, tensor in self.engine.weights.items() if name in self.engine.head.inputs
        }
        return evaluate(self.engine.head, {"hidden": hidden, **weights}, self.communicator)

    def inputs(self, batch: Sequence[Rows]) -> dict[str, Tensor]:
        """Return all inputs of the layers for a batch, with rows in its order."""
        settings, model = self.engine.sidecar.settings, self.engine.sidecar.model
        dtype, slots = getattr(torch, settings.dtype), settings.max_batch_size
        ids = [token for rows in batch for token in rows.token_ids]
        positions = [rows.start + index for rows in batch for index in range(len(rows.token_ids))]
        of_slot = [rows.slot for rows in batch for _ in rows.token_ids]
        order = sorted(range(len(ids)), key=lambda row: (of_slot[row], positions[row]))
        counts = [of_slot.count(slot) for slot in range(slots)]
        begins = [sum(counts[:slot]) for slot in range(slots + 1)]
        chunks = sorted((rows for rows in batch if rows.is_chunk), key=lambda rows: rows.slot)
        longest = max((len(rows.token_ids) for rows in chunks), default=1)
        starts, gather = [0] * slots, [0] * len(ids)
        generation, lengths, chunk_rows = [0] * slots, [1] * slots, []
        for rows in batch:
            starts[rows.slot] = rows.start
            if not rows.is_chunk:
                generation[rows.slot], lengths[rows.slot] = begins[rows.slot], rows.start + 1
                gather[begins[rows.slot]] = rows.slot
        for index, rows in enumerate(chunks):
            first, count = begins[rows.slot], len(rows.token_ids)
            chunk_rows.append([first + min(row, count - 1) for row in range(longest)])
            gather[first : first + count] = range(slots + index * longest, slots + index * longest + count)
        int32 = {
            "input_ids": ids,
            "position_ids": positions,
            "slot_order": order,
            "packed_order": sorted(range(len(ids)), key=order.__getitem__),
            "embedding_gather": list(range(len(ids))),
            "update_lengths": begins,
            "write_indices": starts,
            "ctx_slots": [rows.slot for rows in chunks],
            "ctx_q_gather": chunk_rows,
            "o_gather": gather,
            "gen_q_gather": generation,
            "gen_kv_lengths": lengths,
            "kv_lengths": [start + count for start, count in zip(starts, counts)],
        }
        found = {name: torch.tensor(value, dtype=torch.int32) for name, value in int32.items()}
        found["ctx_q_gather"] = found["ctx_q_gather"].reshape(len(chunks), longest)
        found["virtual_embeddings"] = torch.zeros((0, model.hidden_size), dtype=dtype)
        found["lora_mask"] = torch.zeros((len(ids), 0), dtype=dtype)
        for name, (_, shape) in self.engine.layers.inputs.items():
            if name.startswith(("lora_a", "lora_b")):
                found[name] = torch.zeros([max(size, 0) for size in shape], dtype=dtype)
        return found | self.caches | self.engine.weights


@dataclass
class Text:
    """A sequence of given tokens, and the computed logits.

    Attributes:
        slot: Its slot.
        token_ids: All tokens.
        num_context: Number of tokens in its context; the others are fed in generation.
        logits: [vocab_size] for each computed token.
    """

    slot: int
    token_ids: tuple[int, ...]
    num_context: int
    logits: list[Tensor] = field(default_factory=list)

    @property
    def num_done(self) -> int:
        """Number of computed tokens."""
        return len(self.logits)


def schedule(sequences: Sequence[Text], chunk: int) -> list[list[Rows]]:
    """Return batches in which some sequences' contexts are computed in chunks, and others generate.

    A sequence starts a step after the preceding one; generation is fed with its own further tokens. Sequences
    with the same slot follow each other. Rows of a batch are not in the order of slots.
    """
    done = [0] * len(sequences)
    batches: list[list[Rows]] = []
    while any(count < len(each.token_ids) for count, each in zip(done, sequences)):
        batch: list[Rows] = []
        taken: set[int] = set()
        for index, each in enumerate(sequences[: len(batches) + 1]):
            first = done[index]
            if first == len(each.token_ids) or each.slot in taken:
                continue
            taken.add(each.slot)
            is_context = first < each.num_context
            count = min(chunk + index, each.num_context - first) if is_context else 1
            batch.append(Rows(each.slot, each.token_ids[first : first + count], first, is_context))
            done[index] += count
        batches.append(batch[::-1])
    return batches


def run(runner: Runner, texts: Sequence[Text], chunk: int = 5) -> None:
    """Compute all of the texts' logits."""
    for batch in schedule(texts, chunk):
        take(batch, runner.logits(batch), texts)


def take(batch: Sequence[Rows], logits: Tensor, texts: Sequence[Text]) -> None:
    """Assign the logits of a batch's rows to their texts."""
    for rows, part in zip(batch, logits.split([len(rows.token_ids) for rows in batch]), strict=True):
        of_slot = (each for each in texts if each.slot == rows.slot)
        text = next(each for each in of_slot if each.num_done < len(each.token_ids))
        assert text.num_done == rows.start
        text.logits += part.unbind()


def texts_of(model: ZooModel, seed: int = 0) -> list[Text]:
    """Return some texts, two of which reuse the slots of earlier ones."""
    lengths = [(3, 13, 4), (0, 7, 5), (4, 1, 4), (1, 38, 4), (3, 11, 4), (0, 30, 3)]
    return [
        Text(slot, model.prompt(context + generated, seed=seed + index), context)
        for index, (slot, context, generated) in enumerate(lengths)
    ]


def largest_error(model: ZooModel, texts: Sequence[Text]) -> float:
    """Return the largest error of any logit, against transformers."""
    return max((torch.stack(each.logits) - model.logits(each.token_ids)).abs().max().item() for each in texts)


def relative_error(model: ZooModel, texts: Sequence[Text]) -> float:
    """Return the root mean square error of the logits over their standard deviation."""
    found = torch.cat([torch.stack(each.logits) for each in texts])
    exact = torch.cat([model.logits(each.token_ids) for each in texts])
    return ((found - exact).square().mean().sqrt() / exact.std()).item()


class Meeting:
    """Exchange of tensors between ranks in lockstep, each on its own thread."""

    def __init__(self, size: int) -> None:
        self._barrier, self._tensors = threading.Barrier(size), [torch.empty(0)] * size

    def rank(self, index: int) -> MeetingRank:
        """Return the communicator of one rank."""
        return MeetingRank(self, index)

    def exchange(self, index: int, tensor: Tensor) -> list[Tensor]:
        """Return all ranks' tensors."""
        self._tensors[index] = tensor
        self._barrier.wait(60)
        found = list(self._tensors)
        self._barrier.wait(60)  # no rank may write the next tensor before all have read this one
        return found


@dataclass
class MeetingRank:
    """Implements `Communicator`.

    Attributes:
        num_calls: Number of exchanges with the others.
    """

    meeting: Meeting
    index: int
    num_calls: int = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x."""
        self.num_calls += 1
        return torch.stack(self.meeting.exchange(self.index, x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' x, concatenated along the first axis."""
        return torch.cat(self.meeting.exchange(self.index, x))
