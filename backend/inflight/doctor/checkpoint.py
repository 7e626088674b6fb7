"""Checks of a checkpoint (`--model`): its kind, whether it can be loaded, and how large its KV cache can be.

The checkpoint is read by the functions that load it, and laid out in a model repository as by
`scripts/serve`, but no weights are read. One thread.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.checkpoint_config import CheckpointFacts
from inflight.doctor.finding import CONVERT, INSTALL, Finding, green, red, yellow
from inflight.engine_folder import is_engine_folder
from inflight.extras import how_to_install
from inflight.gguf.header import LEVEL_TYPES
from inflight.pictures.families import INSTALL_PICTURES, has_vision_tower, missing_packages

if TYPE_CHECKING:
    import torch

    from inflight.config import EngineConfig, Parameters
    from inflight.models import ModelDescription
    from inflight.models.levels import MatrixKind

_GIB = 2**30
_MAX_LABELS = 5
"""Largest number of labels that a finding lists."""


def check_checkpoint(
    model: str, revision: str | None, dtype: str | None, settings: Mapping[str, str]
) -> Iterator[Finding]:
    """Report everything about one checkpoint.

    Args:
        model: Folder or name, as for `scripts/serve --model`; missing files are not downloaded.
        revision: As for `scripts/serve --revision`.
        dtype: As for `scripts/serve --dtype`.
        settings: As for `scripts/serve --set`.
    """
    from inflight.doctor.named_paths import unusable_paths
    from inflight.doctor.preflight import lacking_in_decoder, missing_gpu, no_text_decoder
    from inflight.errors import ConfigError
    from inflight.hub import find_checkpoint
    from inflight.server.checkpoint import check_spelling
    from inflight.server.errors import OptionError

    try:
        folder = check_spelling(model, find_checkpoint(model, revision, may_fetch=False))
    except OptionError as error:
        yield red("checkpoint", str(error), "rename the folder")
        return
    except ConfigError as error:
        yield red("checkpoint", str(error), _mend_search(model, str(error)))
        return
    try:
        parameters = _parameters(folder, dtype, settings)
        parameters.engine.validate()
        parameters.scheduler.validate(parameters.engine.max_num_sequences, parameters.engine.tokens_per_block)
    except (OptionError, ConfigError) as error:
        mend = "scripts/serve --help; docs/settings.md lists the parameters"
        yield red("checkpoint", str(error), mend)
        return
    faults = [*unusable_paths(settings), missing_gpu(parameters), lacking_in_decoder(parameters)]
    if wrong := [fault for fault in faults if fault is not None]:
        yield from (red("settings", fault, "docs/settings.md describes the parameters") for fault in wrong)
        return
    if is_engine_folder(folder):
        yield from _check_plans(folder, parameters.engine)
    elif (fault := no_text_decoder(folder)) is not None:
        yield red("checkpoint", fault, "docs/models.md lists the families")
        return
    else:
        yield from _check_model(folder, parameters.engine)
    yield from _check_text(parameters.tokenizer_dir or str(folder), folder)


def _parameters(folder: Path, dtype: str | None, settings: Mapping[str, str]) -> Parameters:
    """Return the engine parameters from the config.pbtxt that a start would write."""
    from inflight.server.repository import Wanted, assemble, default_repository, read_engine_parameters

    with tempfile.TemporaryDirectory(prefix="inflight-doctor-") as target:
        models = Path(target, "models")
        assemble(default_repository(), models, Wanted(folder, dtype, dict(settings)))
        return read_engine_parameters(models, "tensorrt_llm")


def _check_model(folder: Path, config: EngineConfig) -> Iterator[Finding]:
    from inflight.engine.capacity import find_device
    from inflight.engine.load_decoder import computed_dtype, weight_bytes
    from inflight.engine.sequence_length import longest_sequence
    from inflight.errors import ConfigError
    from inflight.models import read_model_description
    from inflight.models.draft_folder import with_wanted_head
    from inflight.models.loader import num_parameters
    from inflight.models.registry import UnknownFamily
    from inflight.models.sharding import Part

    try:
        if config.implementation == "transformers":
            yield from _check_transformers(folder, config)
            return
        description = with_wanted_head(
            read_model_description(folder), config.draft_head_dir, config.has_draft_head
        )
        dtype, device = computed_dtype(config, description), find_device(config.device)
        path, linear_dtype, kept = _check_path(config, description, dtype, device)
        num_bytes = weight_bytes(config, description, device, Part.whole(description.decoder))
        longest = longest_sequence(config, description.decoder)
    except ConfigError as error:
        if isinstance(error, UnknownFamily) and config.implementation is None:
            yield from _check_transformers(folder, config)
        else:
            yield red("checkpoint", f"it is refused: {error}", _mend(str(error)))
        return
    decoder, facts = description.decoder, CheckpointFacts.read(folder)
    computed = str(linear_dtype).removeprefix("torch.")
    stored = f", stored as {decoder.dtype}" if decoder.dtype not in (None, computed) else ""
    total, active = num_parameters(description)
    chosen = f", {_count(active)} of them active for a token" if active < total else ""
    yield green(
        "checkpoint",
        f"{facts.name}, {decoder.num_layers} layers, {_count(total)} parameters{chosen}, "
        f"{_size(num_bytes)} of weights in {computed}{stored}, {_quantization(facts, kept)}, "
        f"sequences of up to {longest} tokens",
    )
    yield from _check_task(folder)
    if (multimodal := description.multimodal) is not None:
        yield _check_pictures(folder, facts.name, multimodal.inputs)
    yield path
    yield from _check_room(config, description, (dtype, linear_dtype), device, num_bytes, longest)


def _check_task(folder: Path) -> Iterator[Finding]:
    """Report what the checkpoint is served for in place of text; nothing if it generates text."""
    from inflight.classification import read_classification_head
    from inflight.errors import ConfigError
    from inflight.pooling import Task, find_task

    try:
        task = find_task(folder, "auto")
        if task is Task.CLASSIFY:
            labels = read_classification_head(folder).labels
            classes = "1 class" if len(labels) == 1 else f"{len(labels)} classes"
            routes = "/v1/classify, /v1/rerank and /v1/score" if len(labels) == 1 else "/v1/classify"
            yield green("task", f"classifies texts, {classes} ({_listed(labels)}): {routes}")
        elif task is Task.EMBED:
            yield green("task", "embeds texts: /v1/embeddings")
    except ConfigError as error:
        yield red("task", str(error), "download the checkpoint again, or take another one")


def _listed(labels: Sequence[str]) -> str:
    shown = ", ".join(labels[:_MAX_LABELS])
    return shown if len(labels) <= _MAX_LABELS else f"{shown}, …"


def _check_pictures(folder: Path, name: str, inputs: str) -> Finding:
    """Report whether prompts with pictures can be served."""
    if not has_vision_tower(folder):
        says = f"the text part of {name} alone is served: requests with {inputs} are refused"
        return yellow("inputs", says, "send texts only")
    if missing := missing_packages():
        says = f"requests with pictures are refused, because {' and '.join(missing)} are not installed"
        return yellow("inputs", says, INSTALL_PICTURES)
    return green("inputs", "texts and pictures, which a process of their own encodes")


def _check_plans(folder: Path, config: EngineConfig) -> Iterator[Finding]:
    """Report whether TensorRT plans would run here, by the checks that are made before plans are loaded."""
    from inflight.engine.capacity import find_device
    from inflight.engine.tensorrt.checks import (
        check_model,
        check_processor,
        check_settings,
        find_runtime,
        longest_of_plans,
    )
    from inflight.engine.tensorrt.sidecar import Sidecar, sidecar_name
    from inflight.errors import ConfigError
    from inflight.models import read_model_description
    from inflight.ranks.topology import Mapping

    try:
        sidecar, decoder = Sidecar.read(folder / sidecar_name(0)), read_model_description(folder).decoder
        built = sidecar.settings
        check_settings(config, sidecar, Mapping(tp_size=built.tensor_parallel_size), folder)
        longest = longest_of_plans(config, sidecar, decoder)
        check_model(config, sidecar, decoder, folder)
        device = find_device(config.device)
        check_processor(sidecar, folder, device)
        find_runtime(sidecar, folder)
    except ConfigError as error:
        yield red("plans", f"they are refused: {error}", "docs/tensorrt.md says what plans need")
        return
    name = CheckpointFacts.read(folder).name
    says = (
        f"{name}, {decoder.num_layers} layers of {built.weight_dtype}, {built.max_batch_size} slots of "
        f"{longest} tokens, {built.tensor_parallel_size} rank(s), for GPUs of compute capability "
        f"{sidecar.processors}"
    )
    if device.type == "cuda":
        yield yellow("plans", f"{says}; no hardware had run any when this was written", "docs/tensorrt.md")
    else:
        mend = "take a machine with an NVIDIA GPU, or serve the checkpoint itself"
        yield red("plans", f"{says}; this machine has no GPU", mend)


def _check_transformers(folder: Path, config: EngineConfig) -> Iterator[Finding]:
    """Report whether transformers' own code may run the checkpoint, and whether its weights fit."""
    from inflight.checkpoint_config import read_config_file
    from inflight.engine.capacity import find_device
    from inflight.errors import ConfigError

    mend = "take a checkpoint of a supported family (docs/models.md lists them)"
    if importlib.util.find_spec("transformers") is None:
        name = CheckpointFacts.read(folder).name
        says = f"transformers, whose own code would run {name}, is not installed"
        yield red("checkpoint", says, f"{how_to_install('transformers')}, or {mend}")
        return
    from inflight.engine.layers.transformers_model import check_room, find_class

    try:
        file = read_config_file(folder)
        name = find_class(file).__name__
    except ConfigError as error:
        yield red("checkpoint", f"it is refused: {error}", mend)
        return
    says = (
        f"transformers' own code ({name}), slower than layers of this server; a load finds out whether it can"
    )
    yield yellow("its layers", says, mend)
    try:
        check_room(config, file, find_device(config.device))
    except ConfigError as error:
        yield red("room", str(error), "take a machine with more memory, or a smaller --dtype")


def _count(number: int) -> str:
    """Format a number of parameters in billions or millions, with two decimals."""
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def _quantization(facts: CheckpointFacts, kept: frozenset[MatrixKind]) -> str:
    """Describe the quantization of the stored weights, and whether it is kept when they are loaded."""
    if facts.quantization is None:
        return "not quantized"
    method = facts.quantization.text_or_none("quant_method")
    unpacked = ""
    if method == "gguf":
        types = facts.quantization.texts("types")
        method = f"a GGUF file of {', '.join(types)}"
        if others := sorted(set(types) - LEVEL_TYPES):
            unpacked = f"; {', '.join(others)} unpacked"
    if kept:
        return f"{method} kept as it is ({' and '.join(sorted(kind.value for kind in kept))}{unpacked})"
    return f"{method} unpacked when it is loaded"


def _mend_search(model: str, reason: str) -> str:
    """Return what to do about a model that is not found, or a GGUF file that cannot be translated."""
    if not (model.lower().endswith(".gguf") and Path(model).expanduser().is_file()):
        return (
            "name its folder, or fetch it: scripts/serve --model does so with a name of the Hugging Face hub"
        )
    if "needs the package gguf" in reason:
        return INSTALL
    if "cannot be written" in reason or "no folder to write" in reason:
        return "set XDG_CACHE_HOME to a folder of yours with room"
    if "split.count" in reason:
        return "name the parts as llama.cpp does: MODEL-00001-of-00003.gguf"
    if "it is part" in reason:
        return "download the missing part"
    if "cannot be read" in reason or "not a complete GGUF file" in reason:
        return "download the file again: it is damaged or incomplete"
    return (
        "take another GGUF file (docs/models.md lists what is read), or the model's Hugging Face checkpoint"
    )


def _mend(reason: str) -> str:
    if "quantiz" in reason:
        return "use the unquantized checkpoint, with --dtype int8 if memory is short"
    if "safetensors files only" in reason:
        return CONVERT
    if "cannot be mapped" in reason:
        return 'write it in smaller files: save_pretrained(B, max_shard_size="5GB") of transformers'
    if "cannot be read" in reason or "does not exist" in reason or "missing" in reason:
        return "download the checkpoint again: files are missing or damaged"
    return "take a checkpoint of a supported family (docs/models.md lists them), or fix what the message says"


def _check_path(
    config: EngineConfig, description: ModelDescription, dtype: torch.dtype, device: torch.device
) -> tuple[Finding, torch.dtype, frozenset[MatrixKind]]:
    """Return a finding about the layers' implementation, their matrices' dtype, and kinds kept quantized."""
    import torch

    from inflight.config import INT8, QUANTIZED
    from inflight.engine.cpu.library import CannotBuild, describe_target, foresee
    from inflight.engine.kv_quantization import find_kv_quantization
    from inflight.engine.load_decoder import check_native, keeps_levels, kept_by_compiled_layers
    from inflight.models.loader import quantized_kinds

    kept = torch.int8 if config.dtype in QUANTIZED else dtype
    kinds: frozenset[MatrixKind] = kept_by_compiled_layers(config, description, device)
    computed = torch.bfloat16 if kinds else dtype
    try:
        check_native(config, description.decoder, computed, device)
        is_rounded = find_kv_quantization(config.kv_cache_dtype) is not None
        is_int8 = config.dtype == INT8 or bool(kinds)
        name = str(computed).removeprefix("torch.")
        target, where = describe_target(name, is_int8), foresee(name, is_int8, is_rounded)
    except CannotBuild as reason:
        is_kept = keeps_levels(config, description, device)
        kinds = frozenset(quantized_kinds(description)) if is_kept else frozenset()
        if config.kernels == "native":
            says = f"kernels is native, but there is no compiled code: {reason}"
            return red("its layers", says, "leave out --set kernels=native"), kept, kinds
        if device.type != "cpu":
            return green("its layers", f"torch's operators on {device}"), kept, kinds
        says = f"torch's operators, which are slower than compiled layers: {reason}"
        return yellow("its layers", says, _mend_path(str(reason))), kept, kinds
    return green("its layers", f"compiled layers ({target}), {where}"), kept, kinds


def _mend_path(reason: str) -> str:
    if reason == "kernels is torch":
        return "leave out --set kernels=torch"
    if "compiler" in reason:
        return "apt-get install g++"
    if "processor lacks" in reason or "computes in" in reason:
        return "--dtype float32 or bfloat16, whichever is green under CPU layers"
    return "nothing to set: the compiled layers are not for models like this one"


def _check_room(
    config: EngineConfig,
    description: ModelDescription,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    num_bytes: int,
    longest: int,
) -> Iterator[Finding]:
    """Report the size of the KV cache that a load would make in the memory that the weights leave.

    `dtypes` are the dtype of activations and KV cache, and the dtype of the layers' matrices.
    """
    from inflight.config import MMAP
    from inflight.engine.capacity import total_state_bytes
    from inflight.engine.kv_cache import block_bytes
    from inflight.engine.kv_quantization import find_kv_quantization
    from inflight.engine.load_decoder import runs_compiled
    from inflight.engine.memory import check_room, free_memory
    from inflight.errors import ConfigError

    kv_quantization = find_kv_quantization(config.kv_cache_dtype)
    free, on_gpu = free_memory(device), device.type == "cuda"
    where = "of GPU memory" if on_gpu else "of memory"
    size = block_bytes(description.decoder, config.tokens_per_block, dtypes[0], kv_quantization)
    are_mapped = config.weights == MMAP and runs_compiled(config, description, device)
    of_states = total_state_bytes(config, description.decoder, dtypes[0])
    try:
        chosen = check_room(config, num_bytes, longest, size, free, on_gpu, are_mapped, of_states)
    except ConfigError as error:
        mend = "--set max_batch_size=N with fewer sequences, --tp N over several GPUs or hosts"
        yield red("room", str(error), ", ".join([*_smaller(dtypes[1]), mend]))
        return
    tokens = chosen.num_blocks * config.tokens_per_block
    kind = f" in {kv_quantization.name}" if kv_quantization is not None else ""
    states = f"{_size(of_states)} for recurrent states, " if of_states else ""
    says = (
        f"{_size(free)} {where}: {_size(num_bytes)} for weights{' mapped from a file' if are_mapped else ''}, "
        f"{states}{_size(chosen.num_blocks * size)} for a KV cache of {tokens} tokens{kind} "
        f"({chosen.decided_by} decides)"
    )
    if tokens < longest:
        smaller = ", --set kv_cache_dtype=int8" if kv_quantization is None else ""
        mend = f"--set max_sequence_length={tokens}{smaller}, or more memory"
        yield yellow("room", f"{says}, less than one sequence of {longest} tokens", mend)
    else:
        yield green("room", f"{says}, {tokens // longest} sequences of full length at a time")


def _smaller(dtype: torch.dtype) -> list[str]:
    """Return advice to use a --dtype that takes less memory than `dtype`; [] if there is none."""
    smaller = ["bfloat16"] * (dtype.itemsize > 2) + ["int8"] * (dtype.itemsize > 1)
    return [f"--dtype {' or '.join(smaller)}"] if smaller else []


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def _check_text(tokenizer_dir: str, folder: Path) -> Iterator[Finding]:
    from inflight.errors import ConfigError
    from inflight.serving.chat.template import load_chat_template
    from inflight.text.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.from_dir(tokenizer_dir)
    except ConfigError as error:
        mend = (
            "--set tokenizer_dir=FOLDER with a tokenizer.json, or save one with transformers' save_pretrained"
        )
        yield yellow("tokenizer", f"{error}; only requests with token ids are served", mend)
        return
    yield green("tokenizer", f"{tokenizer.vocab_size} tokens")
    try:
        template = load_chat_template(tokenizer_dir)
    except ConfigError as error:
        yield yellow("chat template", f"{error}; chats are refused", "scripts/serve --chat-template FILE")
        return
    if template is None:
        yield yellow(
            "chat template",
            "none: chats are refused, completions are not",
            "scripts/serve --chat-template FILE",
        )
        return
    if template.takes_tools and not template.style:
        yield yellow("chat template", template.unknown_calls(), "scripts/serve --tool-call-parser NAME")
        return
    yield green("chat template", f"tool calls as {template.style}" if template.style else "no tool calls")
