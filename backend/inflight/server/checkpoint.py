"""`--model`: a checkpoint folder on this machine, or the name of one to fetch from the Hugging Face hub."""

import importlib
import re
from pathlib import Path

from inflight.server.errors import OptionError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WANTED_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]


def find_checkpoint(model: str) -> Path:
    """The folder that holds `model`; raises OptionError where there is none to be had."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise OptionError(
                f"--model {model}: no config.json in that folder, so not a Hugging Face checkpoint"
            )
        return _spelled(model, folder.resolve())
    if folder.exists() or not _HUB_ID.fullmatch(model):
        raise OptionError(f"--model {model}: not a folder")
    return _download(model)


def _spelled(model: str, folder: Path) -> Path:
    """The folder, if config.pbtxt, which is UTF-8, can say where it is."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise OptionError(
            f"--model {model}: the folder's name is not UTF-8, as config.pbtxt has to be"
        ) from None
    return folder


def _download(model: str) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise OptionError(
            f"--model {model}: no such folder, and fetching it from the Hugging Face hub needs the package "
            "huggingface_hub (pip install huggingface_hub)"
        ) from None
    try:
        return Path(hub.snapshot_download(model, allow_patterns=_WANTED_FILES))
    except Exception as error:  # the hub's client raises its own, the HTTP library's and the system's
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OptionError(
            f"--model {model}: no such folder, and not to be had from the Hugging Face hub: {reason}"
        ) from None
