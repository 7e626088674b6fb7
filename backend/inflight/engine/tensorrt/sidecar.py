"""The description beside a rank's plans: their inputs and outputs, and what they were built from. JSON.

It cannot be read from a plan without a GPU, so it is written when the networks are defined. Pure.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from inflight.errors import ConfigError

FORMAT = 1
"""Of these files; another one is refused."""

_READ_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class PlanTensor:
    """An input or output.

    Attributes:
        name: Unique within a plan.
        dtype: float32, float16, bfloat16, int32, bool, int8, float8_e4m3fn or int4 (two to a byte).
        shape: -1 where it differs from batch to batch.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """The range of shapes that an optimization profile allows an input."""

    name: str
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """An optimization profile, by its place in `Plan.profiles`; inputs of fixed shape are left out."""

    name: str
    ranges: tuple[ShapeRange, ...]


@dataclass(frozen=True, slots=True)
class Alias:
    """An output that has to be bound to the memory of an input, which it changes in place."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class File:
    """A file beside the sidecar.

    Attributes:
        name: In the same folder.
        digest: `file_digest` of it.
    """

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan, and how it is run."""

    file: File
    inputs: tuple[PlanTensor, ...]
    outputs: tuple[PlanTensor, ...]
    profiles: tuple[Profile, ...]
    aliases: tuple[Alias, ...] = ()

    def tensor(self, name: str) -> PlanTensor:
        """An input or output by its name. KeyError if there is none."""
        for spec in self.inputs + self.outputs:
            if spec.name == name:
                return spec
        raise KeyError(name)

    def most_rows(self, name: str) -> int:
        """The largest first dimension that a profile allows an input. ValueError if there is none."""
        return max(each.max[0] for profile in self.profiles for each in profile.ranges if each.name == name)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that `scripts/build` was called with.

    Attributes:
        dtype: Of activations and KV cache: float32, float16 or bfloat16.
        weight_dtype: Of the matrices: as `dtype`, or int8, fp8 or int4.
        max_batch_size: Slots, each of which has memory for one sequence.
        max_seq_len: Tokens of a sequence that a slot has room for.
        max_num_tokens: Rows of a batch.
        max_context_chunks: Context chunks of a batch.
        max_lora_rank: Ranks of all LoRA adapters of a batch together; 0: there are no adapters.
        additional_outputs: Names of hidden states between layers that are outputs.
        tensor_parallel_size: Ranks.
        attention: split or packed.
        weights: constants or inputs.
        target: portable, current, or a compute capability such as sm89.
    """

    dtype: str
    weight_dtype: str
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    max_context_chunks: int
    max_lora_rank: int
    additional_outputs: tuple[str, ...]
    tensor_parallel_size: int
    attention: str
    weights: str
    target: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about the model that a run needs, as this rank computes it.

    Attributes:
        num_kv_heads: Key heads of this rank.
        sliding_windows: Of each layer, how many keys a token sees, itself included; None: all before it. A window
            as long as max_seq_len is None.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    sliding_windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Processors:
    """GPUs that a plan is for, by compute capability times ten.

    Attributes:
        exactly: Such as 89 for 8.9.
        and_later: Whether later ones than the last of them run it too.
    """

    exactly: tuple[int, ...]
    and_later: bool

    def include(self, capability: int) -> bool:
        """Whether the plan is for such a GPU."""
        return capability in self.exactly or (self.and_later and capability > max(self.exactly))

    def __str__(self) -> str:
        names = ", ".join(f"{each / 10:.1f}" for each in self.exactly)
        return f"{names} and later" if self.and_later else names


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The sidecar of one rank.

    Attributes:
        format: `FORMAT`.
        module: tensorrt or tensorrt_rtx.
        module_version: What has built the plans, and has to run them.
        rank: Tensor-parallel rank.
        checkpoint_digest: `checkpoint_digest` of the checkpoint.
        settings: Of the build.
        model: The model.
        processors: Where the plans run.
        layers: From token ids to the last layer's output.
        head: From that to logits.
        weights: Tensors `weight.NAME` for inputs of these names; None: weights are in the plans.
        copied: Names of the checkpoint's files that lie beside the plans.
    """

    format: int
    module: str
    module_version: str
    rank: int
    checkpoint_digest: str
    settings: Settings
    model: ModelFacts
    processors: Processors
    layers: Plan
    head: Plan
    weights: File | None = None
    copied: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """As `sidecar_name` in `folder`."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        (folder / sidecar_name(self.rank)).write_bytes(text)

    @classmethod
    def read(cls, path: Path) -> Sidecar:
        """From a file. ConfigError if it is missing, of another format or not understood."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror or error}, expected what scripts/build writes"
            ) from error
        try:
            found = msgspec.json.decode(data, type=_Version).format
            if found != FORMAT:
                raise ConfigError(f"{path}: format is {found}, expected {FORMAT}: build the engine again")
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}: {error}, expected what scripts/build writes") from error


@dataclass(frozen=True, slots=True)
class _Version:
    format: int


def sidecar_name(rank: int | str) -> str:
    """The file of a rank; `*`: of any."""
    return f"rank{rank}.json"


def file_digest(path: Path) -> str:
    """BLAKE2b of a file, 32 hexadecimal digits. OSError if it cannot be read."""
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while data := file.read(_READ_AT_ONCE):
            found.update(data)
    return found.hexdigest()


def checkpoint_digest(folder: Path) -> str:
    """BLAKE2b of what tells checkpoints apart without reading their weights, 32 hexadecimal digits.

    That is config.json, and of each *.safetensors its name, its size and its header, which has the names, types,
    shapes and places of its tensors. Weights that were changed in place, and nothing else, are not noticed.

    Raises:
        ConfigError: A file cannot be read.
    """
    found = hashlib.blake2b(digest_size=16)
    try:
        found.update((folder / "config.json").read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            found.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                found.update(file.read(min(length, _READ_AT_ONCE * 25)))
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror or error}, expected a checkpoint") from error
    return found.hexdigest()
