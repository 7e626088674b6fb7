"""Whether the files and folders that `--set` and `--lora` name can be used, found before a server is started.

Imports no torch and no numpy. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from inflight.adapters.peft_config import PeftConfig
from inflight.arguments import why_not_writable
from inflight.doctor.weight_files import lfs_pointer, unreadable_weights
from inflight.errors import InvalidArgument
from inflight.server.repository import (
    DEBUG_TENSORS_DIR,
    ENGINE_ENDPOINT,
    LORA_DIR,
    LORA_PREFETCH_DIR,
    MODEL_PATH,
    POST_PROCESSORS,
    RECEIPT_KEY_FILE,
    RECORD_PATH,
    TOKENIZER,
)

_FOLDERS = (MODEL_PATH, TOKENIZER, LORA_DIR, LORA_PREFETCH_DIR)
_WRITTEN = (RECORD_PATH, ENGINE_ENDPOINT, DEBUG_TENSORS_DIR)
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def unusable_paths(settings: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with the files and folders that parameters name.

    Args:
        settings: The keys and values of `--set`; relative paths begin in this process's folder.
    """
    for key, value in settings.items():
        path = Path(value)
        if key in _FOLDERS and not path.is_dir():
            kind = "a file, expected a folder" if path.exists() else "there is no such folder"
            yield f"--set {key}={value}: {kind}"
        is_source = key == POST_PROCESSORS and value.endswith(".py")
        if (key == RECEIPT_KEY_FILE or is_source) and not path.is_file():
            kind = "a folder, expected a file" if path.exists() else "there is no such file"
            yield f"--set {key}={value}: {kind}"
        folder = path.absolute().parent
        if key == ENGINE_ENDPOINT and (reason := _unusable_socket(str(path.absolute()))):
            yield f"--set {key}={value}: {reason}"
        if key in (RECORD_PATH, ENGINE_ENDPOINT) and not folder.is_dir():
            yield f"--set {key}={value}: its folder {folder} does not exist"
        elif key in _WRITTEN and (reason := why_not_writable(path if key == DEBUG_TENSORS_DIR else folder)):
            yield f"--set {key}={value}: {reason}"


def _unusable_socket(path: str) -> str | None:
    # Imported here, as msgspec would stay in the launcher's memory.
    from inflight.endpoint.path import LONGEST_SOCKET_PATH, socket_path_fits

    if socket_path_fits(path):
        return None
    return f"longer than the {LONGEST_SOCKET_PATH} bytes of a socket's path"


def unusable_adapter(name: str, folder: Path) -> str | None:
    """Return what is wrong with the folder of `--lora NAME=FOLDER`, judged without reading the weights."""
    if not folder.is_dir():
        return None  # laying out the models reports it
    where = f"--lora {name}={folder}"
    weights = [folder / each for each in _ADAPTER_WEIGHTS if (folder / each).is_file()]
    if not (folder / "adapter_config.json").is_file() or not weights:
        return (
            f"{where}: no LoRA adapter in that folder, expected adapter_config.json and "
            f"{' or '.join(_ADAPTER_WEIGHTS)}, as PEFT's save_pretrained writes them"
        )
    if pointer := lfs_pointer(folder, _ADAPTER_WEIGHTS):
        return pointer
    try:
        PeftConfig.load(folder)
    except InvalidArgument as error:
        return f"{where}: {error}"
    damage = unreadable_weights(weights[0]) if weights[0].suffix == ".safetensors" else None
    return None if damage is None else f"{where}: {damage}"
