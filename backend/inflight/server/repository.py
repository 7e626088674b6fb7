"""A runtime copy of the model repository, with the requested parameters filled in.

Converts `--model`, `--dtype`, `--set` and other options to parameters of config.pbtxt. Code is copied and
large files are linked, so that the original is never written to and no weights are copied. The models check
the values of parameters when they are loaded.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from inflight.additional_outputs import parse_outputs, tensor_names
from inflight.config import Parameters, Role
from inflight.core.request.sampling_config import CONTROLS
from inflight.engine_folder import is_engine_folder, num_slots
from inflight.errors import ConfigError
from inflight.near_words import equally_near
from inflight.parameter_names import in_other_words
from inflight.parameter_reader import is_filled
from inflight.parameter_reader import read_parameters as read_configuration
from inflight.parameter_spec import input_types
from inflight.pictures.families import can_encode
from inflight.pooling import POOLED_OUTPUT, find_task
from inflight.server import ranks
from inflight.server.checkpoint import check_rank_sizes
from inflight.server.config_text import (
    add_outputs,
    fill_fields,
    read_decoupled,
    read_parameters,
    set_decoupled,
    set_input_type,
    set_max_batch_size,
    set_parameters,
)
from inflight.server.errors import OptionError

MODEL_PATH, TOKENIZER, DTYPE, ENGINE = "gpt_model_path", "tokenizer_dir", "dtype", "engine"
WEIGHTS = "weights"
ENGINE_DIR = "tensorrt_engine_dir"
ENGINE_NAME = "tensorrt_llm_model_name"
ENGINE_ENDPOINT = "engine_endpoint"
DRAFT_NAME = "tensorrt_llm_draft_model_name"
RECORD_PATH, RECEIPT_KEY_FILE = "record_path", "receipt_key_file"
POST_PROCESSORS = "logits_post_processor_module"
DEBUG_TENSORS_DIR = "debug_tensors_dir"
SPECULATIVE_DECODING_MODE = "speculative_decoding_mode"
SPECULATIVE_MODEL_DIR = "speculative_model_dir"
KV_CACHE_DIR, KV_CACHE_DISK_BYTES = "kv_cache_dir", "kv_cache_disk_bytes"
KV_EVENTS_CONFIG, OTLP_TRACES_ENDPOINT = "kv_events_config", "otlp_traces_endpoint"
LORA_ADAPTERS, LORA_DIR, LORA_PREFETCH_DIR = "lora_adapters", "lora_dir", "lora_prefetch_dir"
ADD_SPECIAL_TOKENS, MODEL_TYPE = "add_special_tokens", "gpt_model_type"
ADDITIONAL_OUTPUTS = "additional_model_outputs"
MAX_BATCH_SIZE, DECOUPLED_MODE = "max_batch_size", "decoupled_mode"
_PATHS = (
    *(MODEL_PATH, TOKENIZER, RECORD_PATH, RECEIPT_KEY_FILE, KV_CACHE_DIR, LORA_DIR, LORA_PREFETCH_DIR),
    POST_PROCESSORS,
)
_CONFIG = "config.pbtxt"
_DEMO_MODEL = "demo_model"
_ENCODERS = "multimodal_encoders"


@dataclass(frozen=True)
class Wanted:
    """The values to fill into config.pbtxt.

    Attributes:
        model: Checkpoint folder.
        dtype: Data type of the weights.
        settings: Values by parameter name; they take precedence over the other fields.
        adapters: Names and folders of LoRA adapters.
        engine: Layers to use: "torch", "transformers" or "tensorrt".
        engine_dir: Folder of TensorRT plans.
        weights: Place where compiled layers store their weights: "memory" or "mmap".
        speculate: How the server drafts tokens, as `speculative_decoding_mode`.
        draft_model: Folder of an EAGLE-3 head or of Gemma 4's draft head.
        kv_cache_dir: Folder in which KV blocks are saved.
        kv_cache_disk_bytes: Maximum size of the files in this folder.
        kv_events_config: How KV cache events are published, a JSON object.
        otlp_traces_endpoint: URL to which spans of requests are sent.
        convert: Whether the model embeds or classifies texts, one of `inflight.pooling.CONVERSIONS`.
    """

    model: Path | None = None
    dtype: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    adapters: tuple[tuple[str, Path], ...] = ()
    engine: str | None = None
    engine_dir: Path | None = None
    weights: str | None = None
    speculate: str | None = None
    draft_model: Path | None = None
    kv_cache_dir: Path | None = None
    kv_cache_disk_bytes: int | None = None
    kv_events_config: str | None = None
    otlp_traces_endpoint: str | None = None
    convert: str = "auto"


@dataclass(frozen=True)
class RuntimeRepository:
    """A model repository that tritonserver can load.

    Attributes:
        models: Names of the repository's models.
        checkpoint: Checkpoints that the engines serve, separated by commas; None without engines.
        launches: How the ranks of each engine are started.
        endpoints: Path of each engine's socket, by model; "" if the engine chooses it.
        drafts: Engines that guess tokens for another one.
    """

    path: Path
    models: tuple[str, ...]
    checkpoint: str | None
    launches: tuple[ranks.Launch, ...] = ()
    endpoints: Mapping[str, str] = field(default_factory=dict[str, str])
    drafts: frozenset[str] = frozenset()


def default_repository() -> Path:
    """Return the model repository that comes with this package; in a checkout, the one at its top."""
    return (Path(__file__).resolve().parents[1] / "bundled" / "model_repository").resolve()


def read_engine_parameters(repository: Path, model: str) -> Parameters:
    """Read the parameters of an engine from its config.pbtxt. Raises ConfigError with every problem."""
    text = (repository / model / _CONFIG).read_text(encoding="utf-8")
    size = re.search(r"^max_batch_size\s*:\s*(\d+)", text, re.MULTILINE)
    configuration = {
        "name": model,
        "max_batch_size": int(size[1]) if size else 0,
        "parameters": {key: {"string_value": value} for key, value in read_parameters(text).items()},
    }
    return read_configuration(configuration, Role.ENGINE)


def assemble(
    source: Path,
    target: Path,
    wanted: Wanted,
    ranks_wanted: Mapping[str, str] | None = None,
    vision: bool = True,
) -> RuntimeRepository:
    """Lay out the repository `source` under `target`; raises OptionError for a setting that no model has.

    Args:
        source: The original repository.
        target: Folder of the runtime copy.
        wanted: Values to fill in.
        ranks_wanted: Parameters for --tp, --pp, --ep, --mode and --mpirun-arguments.
        vision: Whether pictures are encoded, if the checkpoint has a vision tower. Otherwise, the model that
            encodes them is left out.
    """
    source = source.resolve()
    configs = _read_configs(source)
    present = {model: read_parameters(text) for model, text in configs.items()}
    _check_ranks_known(ranks_wanted or {}, present, source)
    settings = {**wanted.settings, **(ranks_wanted or {})}
    batch_size = _batch_size(settings.pop(MAX_BATCH_SIZE, None)) or _slots_of_plans(wanted)
    decoupled = _decoupled(settings.pop(DECOUPLED_MODE, None))
    filled = fill(present, replace(wanted, settings=settings), source)
    engines = [model for model, known in filled.items() if _is_engine(known)]
    launches = _launches(filled)
    if not (vision and can_encode(Path(_checkpoints(filled) or ""))):
        configs.pop(_ENCODERS, None)
    for launch in launches:
        if launch.mode != "in_process" and ranks.LAUNCH_MODE in filled[launch.model]:
            filled[launch.model][ranks.LAUNCH_MODE] = launch.mode
    for model, text in configs.items():
        folder = target / model
        folder.mkdir(parents=True)
        _lay_out(source / model, folder)
        changed = {key: value for key, value in filled[model].items() if value != present[model][key]}
        text = set_parameters(text, changed)
        text = add_outputs(text, _additional_outputs(filled[model].get(ADDITIONAL_OUTPUTS, "")))
        engine = _engine_of(model, filled[model], engines)
        of_engine = input_types(filled[engine]) if engine else {}  # front ends need not set them
        for name, data_type in {**of_engine, **input_types(filled[model])}.items():
            text = set_input_type(text, name, data_type)
        if (mode := _mode_of(model, filled[model], decoupled, engines, configs)) is not None:
            text = set_decoupled(text, mode)
        if batch_size is not None:
            text = set_max_batch_size(text, batch_size)
        (folder / _CONFIG).write_text(text, encoding="utf-8")
    endpoints = {model: filled[model].get(ENGINE_ENDPOINT, "") for model in engines}
    return RuntimeRepository(
        target,
        tuple(configs),
        _checkpoints(filled),
        launches,
        {model: path if is_filled(path) else "" for model, path in endpoints.items()},
        frozenset(known[DRAFT_NAME] for known in filled.values() if is_filled(known.get(DRAFT_NAME, ""))),
    )


def fill(present: Mapping[str, Mapping[str, str]], wanted: Wanted, source: Path) -> dict[str, dict[str, str]]:
    """Return every model's parameters by model: the `present` parameters, overwritten by the wanted values.

    An engine without a checkpoint serves the demo model. A model without a tokenizer uses the tokenizer of
    its engine's checkpoint. If an engine embeds texts, the output of which embeddings are made is added.
    """
    settings = _settings(wanted)
    _check_known(settings, {key: value for known in present.values() for key, value in known.items()})
    filled = {
        model: dict(known) | {key: value for key, value in settings.items() if key in known}
        for model, known in present.items()
    }
    engines = [model for model, known in filled.items() if _is_engine(known)]
    own = {model for model in engines if MODEL_PATH not in settings and is_filled(filled[model][MODEL_PATH])}
    for model in engines:
        if not is_filled(filled[model][MODEL_PATH]) and (demo := _demo_model(source, model)):
            filled[model][MODEL_PATH] = demo
    for model, known in filled.items():
        engine = _engine_of(model, known, engines)
        if engine is None or TOKENIZER not in known or TOKENIZER in settings:
            continue
        checkpoint = filled[engine][MODEL_PATH]
        if is_filled(checkpoint) and not (engine in own and is_filled(known[TOKENIZER])):
            known[TOKENIZER] = checkpoint
    if any(_pools(filled[model][MODEL_PATH], wanted.convert) for model in engines):
        for known in filled.values():
            if ADDITIONAL_OUTPUTS in known:
                known[ADDITIONAL_OUTPUTS] = _with_pooled(known[ADDITIONAL_OUTPUTS])
    return filled


def _settings(wanted: Wanted) -> dict[str, str]:
    values: dict[str, str] = {}
    if wanted.dtype is not None:
        values[DTYPE] = wanted.dtype
    if wanted.weights is not None:
        values[WEIGHTS] = wanted.weights
    if wanted.speculate is not None:
        values[SPECULATIVE_DECODING_MODE] = wanted.speculate
    if wanted.draft_model is not None:
        values[SPECULATIVE_MODEL_DIR] = str(wanted.draft_model.resolve())
    if wanted.kv_cache_dir is not None:
        values[KV_CACHE_DIR] = str(wanted.kv_cache_dir)
    if wanted.kv_cache_disk_bytes is not None:
        values[KV_CACHE_DISK_BYTES] = str(wanted.kv_cache_disk_bytes)
    if wanted.kv_events_config is not None:
        values[KV_EVENTS_CONFIG] = wanted.kv_events_config
    if wanted.otlp_traces_endpoint is not None:
        values[OTLP_TRACES_ENDPOINT] = wanted.otlp_traces_endpoint
    if wanted.engine is not None:
        values[ENGINE] = wanted.engine
    if wanted.engine_dir is not None:
        values[ENGINE] = "tensorrt"
    if wanted.engine_dir is not None and wanted.model is not None:
        values[ENGINE_DIR] = str(wanted.engine_dir.resolve())
    if (model := wanted.model or wanted.engine_dir) is not None:
        values[MODEL_PATH] = str(model.resolve())
    values |= wanted.settings
    if wanted.adapters:
        values[LORA_ADAPTERS] = _named_folders(wanted)
    for key in _PATHS:  # the server runs in another folder
        is_module = key == POST_PROCESSORS and not values.get(key, "").endswith(".py")
        if values.get(key) and not is_module:
            values[key] = str(Path(values[key]).absolute())
    return values


def _pools(checkpoint: str, convert: str) -> bool:
    try:
        return is_filled(checkpoint) and find_task(Path(checkpoint), convert).pools
    except ConfigError as error:
        raise OptionError(str(error)) from None


def _with_pooled(outputs: str) -> str:
    """Return the parameter additional_model_outputs with the output for embeddings and classes."""
    if not is_filled(outputs):
        return POOLED_OUTPUT
    names = {part.strip().partition(":")[0] for part in outputs.split(",")}
    return outputs if POOLED_OUTPUT in names else f"{outputs}, {POOLED_OUTPUT}"


def _named_folders(wanted: Wanted) -> str:
    """Return the parameter lora_adapters for all --lora options; raises OptionError for an invalid one."""
    if LORA_ADAPTERS in wanted.settings:
        raise OptionError(f"--lora and --set {LORA_ADAPTERS} set the same parameter: use only one of them")
    names = [name for name, _ in wanted.adapters]
    for name, folder in wanted.adapters:
        if names.count(name) > 1:
            raise OptionError(f"--lora {name}={folder}: there are several adapters of this name")
        if not folder.is_dir():
            raise OptionError(f"--lora {name}={folder}: there is no such folder")
        if "," in f"{name}{folder.absolute()}":
            raise OptionError(
                f"--lora {name}={folder}: a comma stands between adapters, not in a name or folder"
            )
    return ",".join(f"{name}={folder.absolute()}" for name, folder in wanted.adapters)


def _demo_model(source: Path, engine: str) -> str | None:
    for folder in (source / engine / "1" / _DEMO_MODEL, source / "tensorrt_llm" / "1" / _DEMO_MODEL):
        if folder.is_dir():
            return str(folder)
    return None


def _engine_of(model: str, parameters: Mapping[str, str], engines: list[str]) -> str | None:
    """Return the engine that `model` uses: itself, else the engine in its parameters, else the first engine."""
    named = parameters.get(ENGINE_NAME, "")
    return next((name for name in (model, named, *engines) if name in engines), None)


def _launches(filled: Mapping[str, Mapping[str, str]]) -> tuple[ranks.Launch, ...]:
    launches: list[ranks.Launch] = []
    for model, known in filled.items():
        if not _is_engine(known):
            continue
        launches.append(launch := ranks.launch_of(model, known))
        if is_filled(known[MODEL_PATH]):
            check_rank_sizes(Path(known[MODEL_PATH]), launch.tp, launch.pp, launch.ep)
    return tuple(launches)


def _is_engine(known: Mapping[str, str]) -> bool:
    """Return whether the model holds an engine.

    A checkpoint's path is not sufficient: preprocessing may have one, too.
    """
    return MODEL_PATH in known and (ADD_SPECIAL_TOKENS not in known or MODEL_TYPE in known)


def _checkpoints(filled: Mapping[str, Mapping[str, str]]) -> str | None:
    engines = [known for known in filled.values() if _is_engine(known)]
    found = [known[MODEL_PATH] for known in engines if is_filled(known[MODEL_PATH])]
    return ",".join(dict.fromkeys(found)) or None


def _check_ranks_known(
    wanted: Mapping[str, str], present: Mapping[str, Mapping[str, str]], source: Path
) -> None:
    """Raise OptionError, which names the option, for a parameter about ranks that no model has."""
    for key in wanted:
        if not any(key in known for known in present.values()):
            raise OptionError(
                f"{ranks.OPTIONS[key]}: no model of {source} has the parameter {key} in its {_CONFIG}, "
                "so none of them can have several ranks"
            )


def _batch_size(value: str | None) -> int | None:
    """Parse max_batch_size, which is not a parameter but a field of every config.pbtxt."""
    if value is not None and not (value.isdecimal() and int(value) > 0):
        raise OptionError(f"--set {MAX_BATCH_SIZE}={value}: expected a whole number of at least 1")
    return None if value is None else int(value)


def _slots_of_plans(wanted: Wanted) -> int | None:
    """Return how many sequences the wanted TensorRT plans can run at a time; None without plans."""
    for folder in (wanted.engine_dir, wanted.model):
        if folder is not None and is_engine_folder(folder):
            return num_slots(folder)
    return None


def _decoupled(value: str | None) -> bool | None:
    """Parse decoupled_mode, which is not a parameter but a field of config.pbtxt."""
    if value is None:
        return None
    if value.lower() not in ("true", "false"):
        raise OptionError(f"--set {DECOUPLED_MODE}={value}: expected true or false")
    return value.lower() == "true"


def _additional_outputs(value: str) -> dict[str, int]:
    """Return the outputs that additional_model_outputs adds, with their numbers of dimensions."""
    if not is_filled(value):
        return {}
    try:
        return dict(tensor_names(parse_outputs(value)))
    except ValueError:
        return {}  # the model reports the error


def _mode_of(
    model: str,
    parameters: Mapping[str, str],
    wanted: bool | None,
    engines: list[str],
    configs: Mapping[str, str],
) -> bool | None:
    """Return a model's new value of `decoupled`: the wanted value, else the value of its engine.

    Returns None if it must not be changed.
    """
    engine = _engine_of(model, parameters, engines)
    return read_decoupled(configs[engine]) if wanted is None and engine else wanted


def _check_known(values: Mapping[str, str], present: Mapping[str, str]) -> None:
    for key in values:
        if key not in present:
            fields = (MAX_BATCH_SIZE, DECOUPLED_MODE)
            near = equally_near(key, [*present, *fields])
            hint = f"did you mean {' or '.join(near)}?" if near else _elsewhere(key)
            raise OptionError(
                f"no model has a parameter {key!r} (--set {key}=...); {in_other_words(key) or hint}"
            )


def _elsewhere(key: str) -> str:
    """Return where a word that is not a parameter may belong."""
    if key in CONTROLS or key in ("max_tokens", "stop_words", "seed"):
        return f"it is a field of requests: set {key} in each request"
    return "docs/settings.md lists the parameters"


def _read_configs(source: Path) -> dict[str, str]:
    found = {
        path.parent.name: fill_fields(path.read_text(encoding="utf-8"))
        for path in sorted(source.glob(f"*/{_CONFIG}"))
    }
    if not found:
        raise OptionError(f"--model-repository {source}: no folder with a {_CONFIG} in it")
    return found


def _lay_out(source: Path, target: Path) -> None:
    for entry in source.iterdir():
        if entry.is_dir() and entry.name.isdigit():
            _lay_out_version(entry, target / entry.name)
        elif entry.name != _CONFIG:
            (target / entry.name).symlink_to(entry)


def _lay_out_version(source: Path, target: Path) -> None:
    target.mkdir()
    for entry in source.iterdir():
        if entry.suffix == ".py":
            shutil.copyfile(entry, target / entry.name)
        elif entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)
