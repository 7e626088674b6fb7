"""The description of a rank's plans, a JSON file: their inputs and outputs, and what they were built from.

Without a GPU a plan cannot be queried, so the description is written when the networks are defined. Pure.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from inflight.errors import ConfigError

FORMAT = 1
"""The number of the file's format; files with another number are refused."""

_READ_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class PlanTensor:
    """An input or output of a plan.

    Attributes:
        name: The tensor's name, unique within a plan.
        dtype: float32, float16, bfloat16, int32, bool, int8, float8_e4m3fn or int4 (two per byte).
        shape: The tensor's shape, with -1 for dimensions that differ from batch to batch.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """The range of shapes that an optimization profile allows for an input."""

    name: str
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """An optimization profile: the ranges of all inputs except those of fixed shape."""

    name: str
    ranges: tuple[ShapeRange, ...]


@dataclass(frozen=True, slots=True)
class Alias:
    """An output that must be bound to the memory of an input, which it changes in place."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class File:
    """A file in the sidecar's folder.

    Attributes:
        name: The file's name, in the sidecar's folder.
        digest: The file's `file_digest`.
    """

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan and its interface."""

    file: File
    inputs: tuple[PlanTensor, ...]
    outputs: tuple[PlanTensor, ...]
    profiles: tuple[Profile, ...]
    aliases: tuple[Alias, ...] = ()

    def tensor(self, name: str) -> PlanTensor:
        """Return an input or output by its name. Raises KeyError if there is none."""
        for spec in self.inputs + self.outputs:
            if spec.name == name:
                return spec
        raise KeyError(name)

    def most_rows(self, name: str) -> int:
        """Return the largest first dimension that a profile allows for an input.

        Raises ValueError if no profile has this input.
        """
        return max(each.max[0] for profile in self.profiles for each in profile.ranges if each.name == name)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a build.

    Attributes:
        dtype: Data type of activations and KV cache: float32, float16 or bfloat16.
        weight_dtype: Data type of the matrices: `dtype`, int8, fp8 or int4.
        max_batch_size: Number of slots, each with memory for one sequence.
        max_seq_len: Maximum number of tokens of a sequence in a slot.
        max_num_tokens: Maximum number of rows of a batch.
        max_context_chunks: Maximum number of context chunks of a batch.
        max_lora_rank: Maximum sum of ranks of all LoRA adapters of a batch; 0: there are no adapters.
        additional_outputs: Names of hidden states between layers that are outputs.
        tensor_parallel_size: Number of ranks.
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
    """The facts about the model, as this rank computes it, that running the plans needs.

    Attributes:
        num_kv_heads: Number of this rank's key heads.
        sliding_windows: For each layer, the number of keys that a token sees, its own included; None: all
            keys up to its own. A window as long as max_seq_len is None.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    sliding_windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class GpuTargets:
    """The GPUs that a plan is for, by compute capability times ten.

    Attributes:
        exactly: Capabilities, such as 89 for 8.9.
        and_later: Whether later GPUs than the last of `exactly` run the plan too.
    """

    exactly: tuple[int, ...]
    and_later: bool

    def include(self, capability: int) -> bool:
        """Whether the plan is for a GPU of this capability."""
        return capability in self.exactly or (self.and_later and capability > max(self.exactly))

    def __str__(self) -> str:
        names = ", ".join(f"{each / 10:.1f}" for each in self.exactly)
        return f"{names} and later" if self.and_later else names


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The description of one rank's plans.

    Attributes:
        format: `FORMAT`.
        module: tensorrt or tensorrt_rtx.
        module_version: The version of the module that built the plans; the same version must run them.
        rank: The tensor-parallel rank.
        checkpoint_digest: The result of `checkpoint_digest` for the checkpoint.
        settings: The settings of the build.
        model: Facts about the model.
        processors: The GPUs that the plans run on.
        layers: The plan from token ids to the last layer's output.
        head: The plan from that output to logits.
        weights: The file with the tensors for inputs named `weight.NAME`; None: weights are in the plans.
        copied: Names of the checkpoint's files that were copied beside the plans.
    """

    format: int
    module: str
    module_version: str
    rank: int
    checkpoint_digest: str
    settings: Settings
    model: ModelFacts
    processors: GpuTargets
    layers: Plan
    head: Plan
    weights: File | None = None
    copied: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Write the sidecar to `folder`, under its `sidecar_name`."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        (folder / sidecar_name(self.rank)).write_bytes(text)

    @classmethod
    def read(cls, path: Path) -> Sidecar:
        """Read a sidecar. Raises ConfigError if it is missing, of another format or invalid."""
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
    """Return the file name of a rank's sidecar; with `*` for the rank, a pattern of all ranks' names."""
    return f"rank{rank}.json"


def file_digest(path: Path) -> str:
    """Return a file's BLAKE2b digest, 32 hexadecimal digits. Raises OSError if it cannot be read."""
    found = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while data := file.read(_READ_AT_ONCE):
            found.update(data)
    return found.hexdigest()


def checkpoint_digest(folder: Path) -> str:
    """Return a BLAKE2b digest that identifies a checkpoint without reading its weights, 32 hexadecimal digits.

    It covers config.json, and the name, size and header of each *.safetensors file; the header has the names,
    types, shapes and offsets of its tensors. Weights changed in place are not detected.

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
