"""A runtime copy of the model repository, with the parameters that were asked for filled in.

Owns what `--model`, `--dtype` and `--set` mean in terms of config.pbtxt parameters. Code is copied and large
files are linked, so the original is never written to and no weights are copied. Does not know Triton's
processes, nor what a parameter does.
"""

import difflib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from inflight.server.config_text import is_filled, read_parameters, set_max_batch_size, set_parameters
from inflight.server.errors import OptionError

MODEL_PATH, TOKENIZER, DTYPE = "gpt_model_path", "tokenizer_dir", "dtype"
RECORD_PATH = "record_path"
MAX_BATCH_SIZE = "max_batch_size"
_CONFIG = "config.pbtxt"
_DEMO_MODEL = Path("tensorrt_llm", "1", "demo_model")


@dataclass(frozen=True)
class Wanted:
    """What to fill in. `settings` are parameter names and values, and win over the other two."""

    model: Path | None = None
    dtype: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RuntimeRepository:
    """A folder that tritonserver can load: its models' names, and the checkpoint it serves if it has one."""

    path: Path
    models: tuple[str, ...]
    checkpoint: str | None


def default_repository() -> Path:
    """The `model_repository` folder beside this package in a checkout."""
    return Path(__file__).resolve().parents[3] / "model_repository"


def assemble(source: Path, target: Path, wanted: Wanted) -> RuntimeRepository:
    """Lay out `source` under `target`; raises OptionError for a setting that no model has."""
    source = source.resolve()
    configs = _read_configs(source)
    present = _merged(configs.values())
    settings = dict(wanted.settings)
    batch_size = _batch_size(settings.pop(MAX_BATCH_SIZE, None))
    values = fill(present, replace(wanted, settings=settings), source / _DEMO_MODEL)
    for model, text in configs.items():
        known = read_parameters(text)
        folder = target / model
        folder.mkdir(parents=True)
        _lay_out(source / model, folder)
        mine = {key: value for key, value in values.items() if key in known}
        text = set_parameters(text, mine)
        if batch_size is not None:
            text = set_max_batch_size(text, batch_size)
        (folder / _CONFIG).write_text(text, encoding="utf-8")
    checkpoint = (present | values).get(MODEL_PATH)
    return RuntimeRepository(target, tuple(configs), checkpoint if is_filled(checkpoint) else None)


def fill(present: Mapping[str, str], wanted: Wanted, demo_model: Path) -> dict[str, str]:
    """The parameters to write over those that are `present`.

    Where nothing says which checkpoint to serve it is the demo model; where nothing else says which tokenizer
    to use it is the checkpoint's.
    """
    values: dict[str, str] = {}
    if wanted.dtype is not None:
        values[DTYPE] = wanted.dtype
    if wanted.model is not None:
        values[MODEL_PATH] = str(wanted.model.resolve())
    values |= wanted.settings
    if values.get(RECORD_PATH):  # the server runs in a folder that goes with it
        values[RECORD_PATH] = str(Path(values[RECORD_PATH]).absolute())
    _check_known(values, present)
    if MODEL_PATH not in present:
        return values
    if not is_filled((present | values)[MODEL_PATH]) and demo_model.is_dir():
        values[MODEL_PATH] = str(demo_model)
    checkpoint = (present | values)[MODEL_PATH]
    keeps_tokenizer = MODEL_PATH not in values and is_filled(present.get(TOKENIZER))
    if is_filled(checkpoint) and TOKENIZER in present and TOKENIZER not in values and not keeps_tokenizer:
        values[TOKENIZER] = checkpoint
    return values


def _batch_size(value: str | None) -> int | None:
    """How many requests run at a time: a field of Triton's own, and of every model, not a parameter."""
    if value is not None and not (value.isdecimal() and int(value) > 0):
        raise OptionError(f"--set {MAX_BATCH_SIZE}={value}: expected a whole number from 1")
    return None if value is None else int(value)


def _check_known(values: Mapping[str, str], present: Mapping[str, str]) -> None:
    for key in values:
        if key not in present:
            near = difflib.get_close_matches(key, present, n=3, cutoff=0.5)
            hint = (
                f"did you mean {' or '.join(near)}?"
                if near
                else f"there are {', '.join(sorted(present)) or 'none'}"
            )
            raise OptionError(f"no model has a parameter {key!r} (--set {key}=...); {hint}")


def _merged(configs: Iterable[str]) -> dict[str, str]:
    """All models' parameters; of several values of one name, a filled one."""
    merged: dict[str, str] = {}
    for text in configs:
        for key, value in read_parameters(text).items():
            if not is_filled(merged.get(key)):
                merged[key] = value
    return merged


def _read_configs(source: Path) -> dict[str, str]:
    found = {
        path.parent.name: path.read_text(encoding="utf-8") for path in sorted(source.glob(f"*/{_CONFIG}"))
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
