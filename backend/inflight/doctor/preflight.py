"""Reasons that a server with given options cannot start, found in less than a second, before it is started.

Reads small files only and does not import torch, because the launcher, which calls this, runs as long as the
server. What takes longer to find out is reported by `inflight doctor`, or when the engine loads.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from inflight import environment
from inflight.arguments import why_not_writable
from inflight.checkpoint_config import CheckpointFacts, ConfigFile, read_config_file, read_json
from inflight.config import INT8, MMAP, EngineConfig, Parameters
from inflight.doctor.disks import (
    MIN_TEMPORARY_BYTES,
    full_for_compiled_layers,
    full_for_packed_weights,
    full_for_saved_blocks,
)
from inflight.doctor.family import refused_by_family, runs_by_transformers
from inflight.doctor.finding import CONVERT, Level
from inflight.doctor.in_use import blocks_in_use, in_use
from inflight.doctor.machine import check_shared_memory, has_gpu
from inflight.doctor.named_paths import unusable_adapter, unusable_paths
from inflight.doctor.weight_bytes import WeightBytes, of_gguf, of_own_layers, of_transformers
from inflight.doctor.weight_files import lfs_pointer, unreadable_weights
from inflight.engine.memory import available_cpu_memory
from inflight.engine.sequence_length import longest_sequence
from inflight.engine_folder import is_engine_folder
from inflight.errors import ConfigError
from inflight.gguf.folder import gguf_files, is_gguf
from inflight.interrupts import deferred
from inflight.models.decoder_config import DecoderConfig
from inflight.models.draft_folder import with_head_folder, with_wanted_head
from inflight.models.registry import ModelDescription, bare_decoder, check_draft_head, describe
from inflight.models.sharding import Part
from inflight.pooling import Task, classifies, find_task
from inflight.ranks import topology
from inflight.server.launch import ServerOptions, lay_out
from inflight.server.other_servers import flags_that_set
from inflight.server.repository import read_engine_parameters

_ENGINE = "tensorrt_llm"
_CHECKED = ("*.safetensors", "tokenizer.json", "config.json")
_NO_TEXT = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_GIB = 2**30
_MAX_GROWTH = 2  # from a matrix in its file to the least memory that it takes: 16 bits to float32
_MAX_GROWTH_OF_GGUF = 8  # 4 bits to float32
HOST_VARIABLES = ("SLURM_", "PBS_", "LSB_", "PE_HOSTFILE", "OMPI_MCA_", "PRTE_MCA_")
"""Beginnings of the names of variables by which mpirun may start ranks on other hosts."""


def problems(options: ServerOptions, root: Path = Path("/")) -> Iterator[str]:
    """Yield each reason that keeps a server with these options from starting, with what to do about it.

    Raises OptionError if `--set` names a setting that no model of the repository has.

    Args:
        options: The server's options.
        root: Root of the file system in which a GPU is looked for.
    """
    wanted = options.wanted
    if reason := _temporary_folder() or _shared_memory(options):
        yield reason
        return
    yield from filter(None, (unusable_adapter(name, folder) for name, folder in wanted.adapters))
    if options.write_repository is None:  # otherwise they may be those of another machine
        yield from unusable_paths(wanted.settings)
    for folder in dict.fromkeys(folder for folder in (wanted.model, wanted.engine_dir) if folder is not None):
        if is_engine_folder(folder) and not has_gpu(root):
            yield (
                f"{folder} has a TensorRT engine, and this machine has no NVIDIA GPU: serve the checkpoint that "
                "it was built of, or take another machine"
            )
        if found := list(_checkpoint(folder, options.openai.convert)):
            yield from found
            return
    try:
        parameters = _parameters(options)
    except ConfigError as error:
        yield _of_settings(str(error), wanted.settings)
        return
    engine = None if parameters is None else parameters.engine
    if parameters is not None and (reason := _saved_blocks(options, parameters)):
        yield reason
    reason = (
        in_use(options)
        or _family(options, engine)
        or (None if options.mpirun_arguments else missing_gpu(parameters, root))  # other hosts may have it
        or lacking_in_decoder(parameters)
        or _too_few_tokens(engine)
        or _memory(options, parameters, root)
        or _weights(options, engine)
        or _small_files(options)
        or _classes_or_scores(options, engine)
        or _draft_folder(engine)
        or _ranks(parameters)
    )
    if reason is not None:
        yield reason


def _of_settings(message: str, settings: Mapping[str, str]) -> str:
    """Return an error about config.pbtxt with the options by which its faulty parameters were set."""
    _, *faults = message.splitlines()
    if not faults or not all(fault.strip().split(":")[0] in settings for fault in faults):
        return message
    named: list[str] = []
    for key, _, fault in (line.strip().partition(":") for line in faults):
        others = " or ".join(flags_that_set(key))
        named.append(f"--set {key}{f' (or {others})' if others else ''}:{fault}")
    return "\n".join(named)


def unservable(folder: Path, implementation: str | None) -> str | None:
    """Return why no server can serve the checkpoint with this config.json; None if one may.

    Args:
        folder: A folder with a config.json; other files need not be there yet.
        implementation: The parameter `engine`.
    """
    reason = next(_checkpoint(folder, None), None)
    return reason or refused_by_family(read_config_file(folder), implementation)


def warnings(options: ServerOptions, root: Path = Path("/")) -> Iterator[str]:
    """Yield a warning for each feature that a server with these options will lack, and for unused variables.

    Args:
        options: The server's options.
        root: Root of the file system in which a GPU is looked for.
    """
    yield from environment.unused(os.environ)
    model = options.wanted.model
    is_tokenizer_elsewhere = "tokenizer_dir" in options.wanted.settings
    if model is not None and not is_tokenizer_elsewhere and not (model / "tokenizer.json").exists():
        yield (
            f"{model} has no tokenizer.json: only requests with token ids are served; "
            "--set tokenizer_dir=FOLDER names another folder"
        )
    if options.write_repository is None:  # otherwise the disks are those of another machine
        with contextlib.suppress(ConfigError):  # `problems` yields it
            yield from _full_disks(_parameters(options), root)


def _full_disks(parameters: Parameters | None, root: Path) -> Iterator[str]:
    """Yield a warning for each file that a disk has no room for, although a server runs without this file."""
    if parameters is None:
        return
    engine, found = parameters.engine, list[str | None]()
    if parameters.kv_cache_dir is not None:
        found.append(full_for_saved_blocks(Path(parameters.kv_cache_dir), parameters.kv_cache_disk_bytes))
    model = _own_decoder(parameters)
    if model is not None and _may_be_compiled(engine, model.decoder.dtype) and not has_gpu(root):
        of_file = _weight_bytes(read_config_file(model.folder), engine) if engine.weights == MMAP else None
        if of_file is not None:
            found.append(full_for_packed_weights(model.folder, of_file.least))
        keeps = engine.dtype is None and model.quantization is not None
        dtype = "bfloat16" if engine.dtype == INT8 else engine.dtype or model.decoder.dtype or "bfloat16"
        found.append(full_for_compiled_layers(dtype, engine.dtype == INT8 or keeps))
    yield from filter(None, found)


def _temporary_folder() -> str | None:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free >= MIN_TEMPORARY_BYTES:
        return None
    needed = MIN_TEMPORARY_BYTES >> 20
    return f"{folder} has {free >> 20} MiB free, and a server needs {needed}: set TMPDIR to another folder"


def _shared_memory(options: ServerOptions) -> str | None:
    """Return why the processes of Triton's models would get no shared memory."""
    if not options.triton or options.write_repository is not None:
        return None
    for finding in check_shared_memory():
        if finding.level is Level.RED:
            return f"{finding.name}: {finding.says}: {finding.mend}"
    return None


def _checkpoint(folder: Path, convert: str | None) -> Iterator[str]:
    """Yield what keeps a checkpoint from being served; `convert` is None if only its config.json is there."""
    if pointer := lfs_pointer(folder, _CHECKED):
        yield pointer
        return
    if not (folder / "config.json").is_file():
        return  # loading the model reports it
    try:
        config = read_config_file(folder)
        reason = _no_decoder(config)
        if reason is None and convert is not None:
            reason = _cannot_generate(config, find_task(folder, convert))
        if reason is not None:
            yield _take_a_decoder(folder, reason)
    except ConfigError as error:
        yield str(error)


def no_text_decoder(folder: Path) -> str | None:
    """Return why the checkpoint is not a text decoder; None if its config.json does not show that."""
    try:
        reason = _no_decoder(read_config_file(folder))
        return None if reason is None else _take_a_decoder(folder, reason)
    except ConfigError:
        return None  # loading the model reports it


def _take_a_decoder(folder: Path, reason: str) -> str:
    name = CheckpointFacts.read(folder).name
    return f"{folder} is {name}, {reason}: take a decoder of text (docs/models.md lists the families)"


def _no_decoder(config: ConfigFile) -> str | None:
    """Return why the model is not a text decoder; None if config.json does not show that."""
    if config.values.get("is_encoder_decoder") is True:
        return "an encoder with a decoder"
    names = config.texts("architectures")
    if any(map(bare_decoder, names)):
        return None
    if names and all(_computes_no_text(name) for name in names):
        return "which computes embeddings or classes instead of a next token"
    return None


def _cannot_generate(config: ConfigFile, task: Task) -> str | None:
    """Return why a decoder without its output projection cannot do its task; None for any other decoder."""
    if task.pools or not any(map(bare_decoder, config.texts("architectures"))):
        return None
    others = "auto or embed" if any(map(classifies, config.texts("architectures"))) else "embed"
    return f"a decoder without its output projection, which --convert {others} serves"


def _computes_no_text(architecture: str) -> bool:
    is_bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    return is_bare or architecture.endswith(_NO_TEXT)


def _parameters(options: ServerOptions) -> Parameters | None:
    """Return the engine's parameters, None without an engine; raise ConfigError if they are not valid."""
    with deferred(), tempfile.TemporaryDirectory(prefix="inflight-preflight-") as target:
        repository = lay_out(options, Path(target, "models"))
        if _ENGINE not in repository.models:
            return None
        if options.write_repository is None:  # otherwise the folders may be those of another machine
            for name in (_ENGINE, *sorted(repository.drafts)):
                _check_configured(name, read_engine_parameters(repository.path, name).engine)
        parameters = read_engine_parameters(repository.path, _ENGINE)
        engine = parameters.engine
        engine.validate()
        parameters.scheduler.validate(engine.max_num_sequences, engine.tokens_per_block)
        # A size without a folder is named by its flag in `_saved_blocks`.
        if parameters.kv_cache_dir is not None or options.wanted.kv_cache_disk_bytes is None:
            parameters.validate_saved_blocks()
        return parameters


def _check_configured(name: str, engine: EngineConfig) -> None:
    """Raise ConfigError if the checkpoint that an engine's config.pbtxt names is not there."""
    folder = engine.gpt_model_path
    if folder is None or is_gguf(Path(folder)) or is_engine_folder(Path(folder)):
        return
    try:
        read_config_file(folder)
    except ConfigError as error:
        raise ConfigError(f"gpt_model_path of the model {name}: {error}") from None


def _saved_blocks(options: ServerOptions, parameters: Parameters) -> str | None:
    """Return why KV blocks cannot be saved in the folder, or why its size has no effect."""
    folder = parameters.kv_cache_dir
    if folder is None:
        given = options.wanted.kv_cache_disk_bytes is not None
        return "--kv-cache-disk limits the files in --kv-cache-dir, which is missing" if given else None
    if options.write_repository is not None:
        return None  # the folder may be one of another machine
    reason = why_not_writable(Path(folder)) or blocks_in_use(Path(folder), parameters)
    return f"--kv-cache-dir {folder}: {reason}" if reason else None


def _family(options: ServerOptions, engine: EngineConfig | None) -> str | None:
    folder = options.wanted.model
    if engine is None or folder is None or is_engine_folder(folder) or not (folder / "config.json").is_file():
        return None
    return refused_by_family(read_config_file(folder), engine.implementation)


def missing_gpu(parameters: Parameters | None, root: Path = Path("/")) -> str | None:
    """Return why this machine does not have the GPUs that gpu_device_ids names; None if it may have them."""
    if parameters is None or not parameters.gpu_device_ids or has_gpu(root):
        return None
    return f"gpu_device_ids has {parameters.gpu_device_ids[0]}, but this machine has no NVIDIA GPU"


def _own_decoder(parameters: Parameters | None) -> ModelDescription | None:
    """Return the description of the model, if it is one that this engine implements itself."""
    if parameters is None or parameters.engine.gpt_model_path is None:
        return None
    folder = Path(parameters.engine.gpt_model_path)
    if parameters.engine.implementation in ("transformers", "tensorrt"):
        return None
    if not (folder / "config.json").is_file():
        return None
    try:
        return describe(read_config_file(folder))
    except ConfigError:  # a model for transformers' own code, or loading it reports the error
        return None


def lacking_in_decoder(parameters: Parameters | None) -> str | None:
    """Return what the parameters require and the decoder lacks according to config.json; None if nothing."""
    model = _own_decoder(parameters)
    if parameters is None or model is None:
        return None
    engine = parameters.engine
    try:
        if engine.has_draft_head and engine.draft_head_dir is None:
            check_draft_head(model)
        if engine.max_sequence_length is not None:
            longest_sequence(engine, model.decoder)
        parameters.validate_end_ids(model.decoder.vocab_size)
    except ConfigError as error:
        return str(error)
    return None


def _too_few_tokens(engine: EngineConfig | None) -> str | None:
    """Return why a KV cache of max_tokens_in_paged_kv_cache tokens is too small; None if that can be enough."""
    if engine is None or engine.max_tokens_in_paged_kv_cache is None or engine.kv_cache_host_memory_bytes:
        return None
    given, size, sequences = (
        engine.max_tokens_in_paged_kv_cache,
        engine.tokens_per_block,
        engine.max_num_sequences,
    )
    if given // size >= sequences or engine.implementation == "tensorrt":
        return None
    return (
        f"max_tokens_in_paged_kv_cache is {given}, expected at least {sequences * size}: one block of {size} "
        f"tokens (tokens_per_block) for each of {sequences} sequences (max_batch_size)"
    )


def _memory(options: ServerOptions, parameters: Parameters | None, root: Path) -> str | None:
    """Return by how much the weights, in the least memory of their dtype, exceed the memory of this machine.

    With several ranks, the weights of all ranks count.
    """
    folder = options.wanted.model
    if folder is None or parameters is None or not (folder / "config.json").is_file():
        return None
    if options.write_repository is not None or has_gpu(root) or _may_use_other_hosts(parameters):
        return None
    engine, config, free = parameters.engine, read_config_file(folder), available_cpu_memory()
    by_transformers = runs_by_transformers(config, engine.implementation)
    if (engine.weights == MMAP and not by_transformers) or _stored_bytes(folder) * _growth(folder) <= free:
        return None
    weights = _weight_bytes(config, engine)
    if weights is None or weights.least <= free:
        return None
    dtype = weights.smaller_dtype(free)
    if by_transformers and dtype == "int8":
        dtype = None
    can_map = not by_transformers and _may_be_compiled(engine, weights.dtype)
    ways = [f"--dtype {dtype}"] * (dtype is not None) + ["--weights mmap"] * can_map
    instead = f"{', '.join(ways)} or " if ways else ""
    kept = f" in {weights.dtype}" if weights.dtype is not None else ""
    return (
        f"{folder} has at least {weights.least / _GIB:.1f} GiB of weights{kept}, and {free / _GIB:.1f} GiB "
        f"of memory are available: take {instead}a machine with more memory"
    )


def _growth(folder: Path) -> int:
    return _MAX_GROWTH_OF_GGUF if is_gguf(folder) else _MAX_GROWTH


def _may_be_compiled(engine: EngineConfig, dtype: str | None) -> bool:
    """Whether compiled layers may run the model, which has weights of this dtype if none is configured."""
    return engine.kernels != "torch" and (engine.dtype or dtype) not in ("float16", "fp8")


def _may_use_other_hosts(parameters: Parameters) -> bool:
    """Whether mpirun may start ranks on other machines: by its arguments, or in a job of a batch system."""
    if parameters.tensor_parallel_size * parameters.pipeline_parallel_size == 1:
        return False
    return bool(parameters.mpirun_arguments) or any(name.startswith(HOST_VARIABLES) for name in os.environ)


def _weight_bytes(config: ConfigFile, engine: EngineConfig) -> WeightBytes | None:
    """Return the sizes of the weights that the engine would load; None if they are unknown."""
    folder = config.path.parent
    if is_gguf(folder):
        try:
            return of_gguf(describe(config), gguf_files(folder), engine.dtype)
        except ConfigError:
            return None  # loading the model reports it
    files = sorted(folder / name for name in _weight_files(folder))
    if runs_by_transformers(config, engine.implementation):
        dtype = engine.dtype or config.text_or_none("dtype") or config.text_or_none("torch_dtype")
        return of_transformers(files, dtype)
    try:
        return of_own_layers(describe(config), files, engine.dtype)
    except ConfigError:
        return None  # another check, or loading the model, reports it


def _small_files(options: ServerOptions) -> str | None:
    """Return which file beside config.json is damaged, for example by an interrupted download."""
    model = options.wanted.model
    tokenizer = options.wanted.settings.get("tokenizer_dir") or model
    for folder, name, instead in (
        (model, "generation_config.json", ""),
        (tokenizer, "tokenizer.json", ", or remove it to serve requests with token ids only"),
        (tokenizer, "tokenizer_config.json", ""),
    ):
        try:
            if folder is not None:
                read_json(Path(folder, name))
        except FileNotFoundError:
            continue
        except ConfigError as error:
            return f"{error}{instead}"
    return None


def _classes_or_scores(options: ServerOptions, engine: EngineConfig | None) -> str | None:
    """Return why a checkpoint for sequence classification cannot classify, or why a decoder makes no scores."""
    model = options.wanted.model or (None if engine is None else engine.gpt_model_path)
    if model is None or not ((folder := Path(model)) / "config.json").is_file():
        return None
    task = None
    try:
        task = find_task(folder, options.openai.convert)
        # Imported here, as numpy and the library for tokenizers would stay in the launcher's memory.
        if task is Task.CLASSIFY:
            from inflight.classification import read_classification_head

            read_classification_head(folder)
        elif task is Task.RERANK:
            from inflight.text.score_tokens import find_score_tokens
            from inflight.text.tokenizer import Tokenizer

            find_score_tokens(Tokenizer.from_dir(options.wanted.settings.get("tokenizer_dir") or folder))
    except ConfigError as error:
        return f"--convert {options.openai.convert}: {error}" if task is Task.RERANK else str(error)
    return None


def _draft_folder(engine: EngineConfig | None) -> str | None:
    """Return why the draft head of --draft-model does not fit the model."""
    if engine is None or engine.draft_head_dir is None or engine.gpt_model_path is None:
        return None
    try:
        engine.validate()
        model = describe(read_config_file(engine.gpt_model_path))
    except ConfigError as error:
        return str(error)
    try:
        with_head_folder(model, engine.draft_head_dir)
    except ConfigError as error:
        return f"--draft-model: {error}"
    return None


def _ranks(parameters: Parameters | None) -> str | None:
    """Return why the model, with its draft head, cannot be divided among the ranks, or why parts of its KV blocks
    cannot be saved."""
    model = _own_decoder(parameters)
    if parameters is None or model is None:
        return None
    engine = parameters.engine
    try:
        model = with_wanted_head(model, engine.draft_head_dir, engine.has_draft_head)
        sizes = parameters.tensor_parallel_size, parameters.pipeline_parallel_size
        ranks = range(sizes[0] * sizes[1])
        mappings = [topology.Mapping(*sizes, rank, parameters.moe_expert_parallel_size) for rank in ranks]
        decoders = [
            Part.from_mapping(mapping, model.decoder).held_config(model.decoder) for mapping in mappings
        ]
    except ConfigError as error:
        return str(error)
    return None if parameters.kv_cache_dir is None else _too_small_for_blocks(parameters, decoders)


def _too_small_for_blocks(parameters: Parameters, decoders: Sequence[DecoderConfig]) -> str | None:
    """Return why the files may not even have the size of one KV block; None if that is not certain.

    Args:
        parameters: The engine's parameters.
        decoders: The part of each rank.
    """
    engine = parameters.engine
    value_bytes = 1 if engine.kv_cache_dtype in ("int8", "fp8") else 4 if engine.dtype == "float32" else 2
    values = max(sum(held.at(layer).cached_size for layer in held.cached_layers) for held in decoders)
    least = values * value_bytes * engine.tokens_per_block * len(decoders)
    if parameters.kv_cache_disk_bytes >= least:
        return None
    of_ranks = "" if len(decoders) == 1 else f" on each of {len(decoders)} ranks"
    return (
        f"--kv-cache-disk is {parameters.kv_cache_disk_bytes} bytes, and the file of one KV block{of_ranks} has "
        f"at least {least} bytes: give room for many blocks, such as 10G"
    )


def _weights(options: ServerOptions, engine: EngineConfig | None) -> str | None:
    """Return which file of the weights is missing or incomplete."""
    folder = options.wanted.model
    if engine is None or folder is None or options.wanted.engine_dir is not None:
        return None
    if is_engine_folder(folder) or is_gguf(folder) or not (folder / "config.json").is_file():
        return None
    if damage := _damaged_index(folder):
        return damage
    for name in sorted(_weight_files(folder)):
        path = folder / name
        if not path.is_file():
            others = sorted(file.name for file in folder.iterdir() if file.suffix in _OTHER_WEIGHTS)
            if not others or ".safetensors" in {Path(other).suffix for other in others}:
                return f"{folder} has no {name}: download the checkpoint again"
            return (
                f"{folder} has no {name}, only {', '.join(others[:3])}, and weights are read from safetensors "
                f"files: {CONVERT}"
            )
        if damage := unreadable_weights(path):
            return damage
    return None


def _damaged_index(folder: Path) -> str | None:
    """Return why the names of the weights' files cannot be read; None if they can be, or if there is one file."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not index.is_file():
        return None
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
        if isinstance(found, dict) and isinstance(cast("dict[str, object]", found).get("weight_map"), dict):
            return None
        reason = "it has no object weight_map"
    except (OSError, ValueError) as error:
        reason = str(error)
    return f"{index} cannot be read: {reason}: download the checkpoint again"


def _weight_files(folder: Path) -> set[str]:
    """Return the names of the weights' files: model.safetensors if it exists, else those of the index."""
    if not (folder / "model.safetensors").exists():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
            return set(index["weight_map"].values())
    return {"model.safetensors"}


def _stored_bytes(folder: Path) -> int:
    """Return the size of the weights' files."""
    if is_gguf(folder):
        return sum(file.stat().st_size for file in gguf_files(folder) if file.is_file())
    return sum((folder / name).stat().st_size for name in _weight_files(folder) if (folder / name).is_file())
