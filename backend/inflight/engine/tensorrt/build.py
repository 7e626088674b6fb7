"""Builds an engine folder from a checkpoint: for each rank two plans and their description.

Needs no GPU with TensorRT for RTX. One process builds the ranks one after another.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  bare PathLike

from inflight.checkpoint_config import DTYPES
from inflight.config import FP8, INT8
from inflight.engine.tensorrt.build_options import INT4, WEIGHT_DTYPES, BuildOptions
from inflight.engine.tensorrt.graph import Extent, Graph
from inflight.engine.tensorrt.module import find_module, make_logger, module_name, module_version
from inflight.engine.tensorrt.network import check_additional_outputs, define_head, define_layers, lacking
from inflight.engine.tensorrt.sidecar import (
    FORMAT,
    File,
    GpuTargets,
    ModelFacts,
    Plan,
    Profile,
    Settings,
    Sidecar,
    checkpoint_digest,
    file_digest,
    sidecar_name,
)
from inflight.engine.tensorrt.targets import find_processors, set_target
from inflight.engine.tensorrt.weights import load_matrices
from inflight.engine.windows import layer_windows
from inflight.engine_folder import is_engine_folder
from inflight.errors import ConfigError
from inflight.models import ModelDescription, read_model_description
from inflight.models.levels import MatrixKind
from inflight.models.loader import quantized_kinds, stored_dtype
from inflight.models.sharding import Part, Shard

_USUAL_CHUNKS, _MAX_LOGITS = 8, 256
_BESIDE_WEIGHTS = "*.json", "*.jinja", "*.txt", "tokenizer.model"
_INDEX = "model.safetensors.index.json"
_WRITTEN = "rank*.json", "rank*.plan", "rank*.weights.safetensors"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Definition:
    """A network, and TensorRT's configuration for building the network's plan."""

    graph: Graph
    config: Any
    profiles: tuple[Profile, ...]


Serialize = Callable[[Definition], Any]
"""A function that builds a network's plan; returns bytes or a buffer."""


def serialize(definition: Definition) -> Any:
    """Return the network's plan. Raises ConfigError, with TensorRT's reason, if TensorRT does not build it."""
    graph = definition.graph
    graph.logger.errors.clear()
    plan = graph.builder.build_serialized_network(graph.network, definition.config)
    if plan is None:
        raise ConfigError(f"TensorRT does not build this network: {_reason(graph)}")
    return plan


def build_engine(
    checkpoint: Path,
    folder: Path,
    options: BuildOptions,
    serialize: Serialize = serialize,
    monitor: Any | None = None,
) -> list[Sidecar]:
    """Write the engine of a checkpoint to `folder`, which is created if missing; return one sidecar per rank.

    Args:
        checkpoint: A Hugging Face folder.
        folder: The folder to write; the results of an earlier build are removed first.
        options: The options of the build.
        serialize: Builds a plan.
        monitor: TensorRT's IProgressMonitor; None: progress is not reported.

    Raises:
        ConfigError: TensorRT is missing, cannot express the model or does not build it, an option contradicts the
            model or another option, or the folder is the checkpoint's.
        OSError: The folder cannot be written.
    """
    module = find_module(options.module)
    if is_engine_folder(checkpoint):
        raise ConfigError(
            f"{checkpoint} is a folder of plans, expected the checkpoint that they were built from"
        )
    model = read_model_description(checkpoint)
    settings = resolve_settings(options, model, module_name(module))
    processors = find_processors(module, settings)
    digest = checkpoint_digest(model.folder)
    if folder.resolve() == model.folder.resolve():
        raise ConfigError(f"output is {folder}, the folder of the checkpoint: expected another folder")
    folder.mkdir(parents=True, exist_ok=True)
    _remove_engine(folder)
    builder = _Builder(module, model, settings, processors, digest, folder, serialize, monitor)
    try:
        sidecars = [builder.build(rank) for rank in range(settings.tensor_parallel_size)]
        copied = _copy_beside(model.folder, folder)
    except BaseException:  # an interrupted build must not leave large files behind
        _remove_engine(folder)
        raise
    sidecars = [replace(sidecar, copied=copied) for sidecar in sidecars]
    for sidecar in reversed(sidecars):  # rank 0's last: without rank 0's sidecar, the folder is not an engine
        sidecar.write(folder)
    return sidecars


def resolve_settings(options: BuildOptions, model: ModelDescription, module: str) -> Settings:
    """Return the settings of a build, with values for unset options. Raises ConfigError as `build_engine` does."""
    config, size = model.decoder, options.tensor_parallel_size
    if missing := lacking(config):
        raise ConfigError(
            f"{model.folder}: TensorRT's layers do not express {', '.join(missing)}; the engine torch runs it"
        )
    if size < 1:
        raise ConfigError(f"tp is {size}, expected at least 1")
    Shard(size).check(config)
    check_additional_outputs(options.additional_outputs, config.num_layers)
    own_dtype = str(stored_dtype(model)).removeprefix("torch.")
    dtype = options.dtype or (INT4 if MatrixKind.INT4 in quantized_kinds(model) else own_dtype)
    if dtype not in DTYPES + WEIGHT_DTYPES:
        raise ConfigError(f"dtype is {dtype}, expected one of {', '.join(DTYPES + WEIGHT_DTYPES)}")
    _check_choice("attention", options.attention, ("split", "packed"))
    _check_choice("weights", options.weights, ("constants", "inputs"))
    longest = config.max_positions
    _check_range("max_batch_size", options.max_batch_size, 1)
    # TensorRT has no attention for chunks of at most one token.
    _check_range("max_num_tokens", options.max_num_tokens, 2)
    _check_range("max_lora_rank", options.max_lora_rank, 0)
    max_seq_len = min(longest, 4096) if options.max_seq_len is None else options.max_seq_len
    _check_range("max_seq_len", max_seq_len, 2, longest)
    chunks = min(_USUAL_CHUNKS, options.max_batch_size)
    if options.max_context_chunks is not None:
        chunks = options.max_context_chunks
    _check_range("max_context_chunks", chunks, 1, options.max_batch_size)
    if options.max_num_tokens < options.max_batch_size:
        raise ConfigError(
            f"max_num_tokens is {options.max_num_tokens}, expected at least max_batch_size, "
            f"{options.max_batch_size}"
        )
    return Settings(
        dtype={INT8: "bfloat16", FP8: "bfloat16", INT4: own_dtype}.get(dtype, dtype),
        weight_dtype=dtype,
        max_batch_size=options.max_batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=options.max_num_tokens,
        max_context_chunks=chunks,
        max_lora_rank=options.max_lora_rank,
        additional_outputs=options.additional_outputs,
        tensor_parallel_size=size,
        attention=options.attention,
        weights=options.weights,
        target=options.target or ("portable" if module == "tensorrt_rtx" else "current"),
    )


class _Builder:
    """Builds the ranks one after another."""

    def __init__(
        self,
        module: Any,
        model: ModelDescription,
        settings: Settings,
        processors: GpuTargets,
        digest: str,
        folder: Path,
        serialize: Serialize,
        monitor: Any | None,
    ) -> None:
        self._module, self._model, self._settings = module, model, settings
        self._processors, self._digest, self._folder = processors, digest, folder
        self._serialize, self._monitor = serialize, monitor
        self._logger = make_logger(module)

    def build(self, rank: int) -> Sidecar:
        """Write a rank's plans; return their description."""
        settings, config = self._settings, self._model.decoder
        part = Part(Shard(settings.tensor_parallel_size, rank), (0, config.num_layers))
        dtype = getattr(torch, settings.dtype)
        weights = load_matrices(self._model, dtype, settings.weight_dtype, part)
        arguments = config, part, settings, weights
        layers = Graph(self._module, self._logger, settings.weights == "inputs")
        define_layers(layers, *arguments)
        head = Graph(self._module, self._logger, settings.weights == "inputs")
        define_head(head, *arguments)
        held = part.held_config(config)
        windows = layer_windows(config.sliding_windows, (), 0, settings.max_seq_len)
        return Sidecar(
            format=FORMAT,
            module=module_name(self._module),
            module_version=module_version(self._module),
            rank=rank,
            checkpoint_digest=self._digest,
            settings=settings,
            model=ModelFacts(
                hidden_size=held.hidden_size,
                num_layers=held.num_layers,
                num_heads=held.num_heads,
                num_kv_heads=held.num_kv_heads,
                head_dim=held.head_dim,
                vocab_size=held.vocab_size,
                sliding_windows=tuple(window and window.recent for window in windows),
            ),
            processors=self._processors,
            layers=self._write_plan(layers, f"rank{rank}.plan", _layer_extents(settings)),
            head=self._write_plan(head, f"rank{rank}.head.plan", (_head_extents(settings),)),
            weights=self._write_weights(f"rank{rank}.weights.safetensors", layers, head),
        )

    def _write_plan(
        self, graph: Graph, name: str, extents: tuple[tuple[str, tuple[Extent, ...]], ...]
    ) -> Plan:
        config = graph.builder.create_builder_config()
        set_target(self._module, config, self._processors)
        if (flag := getattr(self._module.BuilderFlag, "REQUIRE_USER_ALLOCATION", None)) is not None:
            config.set_flag(flag)  # otherwise a stream that is being captured may not run the plan
        if self._monitor is not None:
            config.progress_monitor = self._monitor
        profiles = tuple(graph.profile(*each) for each in extents)
        for profile in profiles:
            trt_profile = graph.builder.create_optimization_profile()
            for each in profile.ranges:
                trt_profile.set_shape(each.name, each.min, each.opt, each.max)
            config.add_optimization_profile(trt_profile)
        path = self._folder / name
        plan = self._serialize(Definition(graph, config, profiles))
        with path.open("wb") as file:
            file.write(plan)
        made = tuple(graph.inputs), tuple(graph.outputs)
        return Plan(File(name, file_digest(path)), *made, profiles, tuple(graph.aliases))

    def _write_weights(self, name: str, *graphs: Graph) -> File | None:
        tensors = {each: constant.memory for graph in graphs for each, constant in graph.weights.items()}
        if not tensors:
            return None
        seen: set[int] = set()
        # A tied embedding is two inputs with the same memory, which safetensors refuses.
        for each, tensor in tensors.items():
            if tensor.data_ptr() in seen:
                tensors[each] = tensor.clone()
            seen.add(tensor.data_ptr())
        path = self._folder / name
        save_file(tensors, path)
        return File(name, file_digest(path))


def _copy_beside(checkpoint: Path, folder: Path) -> tuple[str, ...]:
    """Copy the checkpoint's files other than weights, so that the folder can be served and moved by itself.

    Returns the names of the copied files.
    """
    found = [path for pattern in _BESIDE_WEIGHTS for path in checkpoint.glob(pattern) if path.is_file()]
    names = [path.name for path in found if path.name != _INDEX]
    for name in names:
        shutil.copyfile(checkpoint / name, folder / name)
    return tuple(sorted(names))


def _remove_engine(folder: Path) -> None:
    """Remove the files of an earlier build; otherwise its tokenizer or chat template might be served."""
    first = folder / sidecar_name(0)
    if first.exists():
        with contextlib.suppress(ConfigError):  # of another format: its other files are unknown
            for name in Sidecar.read(first).copied:
                (folder / Path(name).name).unlink(missing_ok=True)
    for pattern in _WRITTEN:
        for path in folder.glob(pattern):
            path.unlink()


def _layer_extents(settings: Settings) -> tuple[tuple[str, tuple[Extent, ...]], ...]:
    """Return the profiles of the layers: for batches of generation alone, and for any batch."""
    slots, rows = settings.max_batch_size, settings.max_num_tokens
    longest = min(rows, settings.max_seq_len)
    ranks = Extent("ranks", 0, min(16, settings.max_lora_rank), settings.max_lora_rank)
    generation = (
        Extent("T", 1, slots, slots),
        Extent("Nc", 0, 0, 0),
        Extent("Sc", 1, 1, 1),
        Extent("Nv", 0, 0, 0),
        ranks,
    )
    context = (
        Extent("T", 1, rows, rows),
        Extent("Nc", 0, 1, settings.max_context_chunks),
        Extent("Sc", 1, longest, longest),
        Extent("Nv", 0, 0, rows),
        ranks,
    )
    return ("generation", generation), ("context", context)


def _head_extents(settings: Settings) -> tuple[str, tuple[Extent, ...]]:
    """Return the profile of the head, for a limited number of rows, as logits are large; more rows take more
    calls."""
    slots = settings.max_batch_size
    return "rows", (Extent("R", 1, slots, max(slots, min(_MAX_LOGITS, settings.max_num_tokens))),)


def _reason(graph: Graph) -> str:
    """Return TensorRT's last error on one line."""
    errors = graph.logger.errors
    text = " ".join(errors[-1].split()) if errors else "it gives no reason"
    if "packed (NHD) inputs" in text:
        return "it has no kernel for packed attention here, expected split"
    caches = [spec for spec in graph.inputs if spec.name == graph.aliases[0].input] if graph.aliases else []
    if "Attention operation was not supported by a dedicated kernel" in text and caches:
        *_, max_seq_len, head_dim = caches[0].shape
        return (
            f"it has no attention kernel for heads of {head_dim} dimensions in {caches[0].dtype} and max_seq_len "
            f"{max_seq_len}; heads of a multiple of 8 have one, in half precision from 16 on, and up to about "
            "24000 tokens"
        )
    return text


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value}, expected {' or '.join(choices)}")


def _check_range(name: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        upper = "" if most is None else f", at most {most}"
        raise ConfigError(f"{name} is {value}, expected at least {least}{upper}")
