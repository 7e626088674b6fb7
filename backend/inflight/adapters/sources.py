"""The sources of adapters: requests, `--lora NAME=FOLDER`, `lora_dir` and `lora_prefetch_dir`.

A folder is PEFT's, or has the two files of TensorRT-LLM's converter. Folders are read only on demand, so that
thousands of configured adapters take no time or memory. Called on the adapter cache's thread.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from inflight.adapters.lora_files import CONFIG_FILE, WEIGHTS_FILE, read_lora_files
from inflight.adapters.lora_rows import CheckedAdapter, check_adapter
from inflight.adapters.peft_config import CONFIG_FILE as PEFT_CONFIG_FILE
from inflight.adapters.peft_folder import read_peft_folder
from inflight.core.request.adapter import LoraRequest, LoraWeights
from inflight.errors import BadAdapter, ConfigError, InflightError, InvalidArgument, Name, NotFound
from inflight.file_names import native
from inflight.models.registry import ModelDescription
from inflight.near_words import did_you_mean, listed

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterFolders:
    """The adapter folders that a server's operator has configured.

    Attributes:
        names: Folders by the adapter's name in requests, from `--lora NAME=FOLDER`; clients' commands add others.
        lora_dir: A folder whose subfolder NAME is the adapter NAME of requests; `lora_path` is a folder below it.
        prefetch_dir: A folder whose subfolder N is the adapter of task id N.
    """

    names: dict[str, Path] = field(default_factory=dict[str, Path])
    lora_dir: Path | None = None
    prefetch_dir: Path | None = None

    def check(self) -> None:
        """Raise ConfigError if a folder does not exist; the folders' contents are checked on demand."""
        for setting, folder in (
            *((f"--lora {name}", folder) for name, folder in self.names.items()),
            ("lora_dir", self.lora_dir),
            ("lora_prefetch_dir", self.prefetch_dir),
        ):
            if folder is not None and not folder.is_dir():
                raise ConfigError(f"{setting} is {str(folder)!r}, expected a folder")

    def find(self, lora: LoraRequest) -> Path:
        """Return the folder of the adapter that a request names; raise NotFound or InvalidArgument."""
        if lora.name:
            return self._by_name(lora.name)
        if lora.path:
            return self._by_path(lora.path)
        folder = None if self.prefetch_dir is None else self.prefetch_dir / str(lora.task_id)
        if folder is None or not folder.is_dir():
            raise NotFound(
                f"LoRA task {lora.task_id} not found in cache. Please send LoRA weights with request: the tensors "
                "lora_weights and lora_config"
            )
        return folder

    def named(self) -> dict[str, Path]:
        """Return the folders of all named adapters, by name."""
        in_dir = sorted(self.lora_dir.iterdir()) if self.lora_dir is not None else ()
        return {folder.name: folder for folder in in_dir if _is_folder(folder)} | dict(self.names)

    def prefetched_ids(self) -> list[int]:
        """Return the prefetch folder's task ids, in order; log a warning for folders with other names."""
        ids: list[int] = []
        for folder in sorted(self.prefetch_dir.iterdir()) if self.prefetch_dir is not None else ():
            if folder.is_dir():
                # A folder whose number has leading zeros would not be found by its id.
                if folder.name.isascii() and folder.name.isdigit() and str(int(folder.name)) == folder.name:
                    ids.append(int(folder.name))
                else:
                    _log.warning(
                        "lora_prefetch_dir: the folder %s is skipped, expected a task id", folder.name
                    )
        return sorted(ids)

    def _by_name(self, name: str) -> Path:
        if name in self.names:
            return self.names[name]
        is_file_name = name not in (".", "..") and "/" not in name
        if self.lora_dir is not None and is_file_name:
            folder = _below(self.lora_dir, name)
            if folder is not None and _is_folder(folder):
                return folder
        where = "" if self.lora_dir is None else ", and lora_dir has no such folder"
        # The names in lora_dir are not listed: unlike configured names, /v1/models does not show them to clients.
        known = f"; there are {listed(self.names)}{did_you_mean(name, self.names)}" if self.names else ""
        raise NotFound(Name("lora_name"), f" is {name!r}: no adapter has this name{where}{known}")

    def _by_path(self, path: str) -> Path:
        if self.lora_dir is None:
            raise InvalidArgument(
                Name("lora_path"), f" is {path!r}, and the server has no lora_dir to look in"
            )
        root = self.lora_dir.resolve()
        folder = _below(root, path)
        try:
            folder = None if folder is None else folder.resolve()
        except (OSError, RuntimeError):  # circular links
            folder = None
        if folder is None or root not in folder.parents:
            raise InvalidArgument(
                Name("lora_path"), f" is {path!r}, expected a folder below the server's lora_dir"
            )
        if not _is_folder(folder):
            raise NotFound(Name("lora_path"), f" is {path!r}: lora_dir has no such folder")
        return folder


def _below(folder: Path, name: str) -> Path | None:
    """Return the path of `name`, which a client has sent, in `folder`; None if no file can have the name."""
    try:
        return None if "\0" in name else folder / native(name)
    except UnicodeError:
        return None


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name that is too long, or a folder without permission
        return False


class AdapterLoader:
    """Reads adapters and checks them against the model.

    Args:
        model: The adapters' model; its weights are read for DoRA.
        max_rank: Largest rank.
        folders: Folders of adapters that requests name.
    """

    def __init__(self, model: ModelDescription, max_rank: int, folders: AdapterFolders) -> None:
        self._model = model
        self._max_rank = max_rank
        self._folders = folders

    def __call__(self, lora: LoraRequest) -> CheckedAdapter:
        """Return the adapter whose weights a request contains, or that it names; raise a RequestError if
        invalid."""
        if lora.weights is not None:
            return self._checked(lora.weights)
        folder = self._folders.find(lora)
        try:
            return self._checked(self._read(folder))
        except InflightError as error:
            raise BadAdapter(f"LoRA adapter {lora.label}: ", *error.args) from error

    def _checked(self, weights: LoraWeights) -> CheckedAdapter:
        return check_adapter(weights, self._model.decoder, self._max_rank)

    def _read(self, folder: Path) -> LoraWeights:
        if (folder / WEIGHTS_FILE).exists() or (folder / CONFIG_FILE).exists():
            return read_lora_files(folder)
        if (folder / PEFT_CONFIG_FILE).exists():
            return read_peft_folder(folder, self._model)
        raise InvalidArgument(
            f"the folder {folder.name} has neither {PEFT_CONFIG_FILE} nor {WEIGHTS_FILE} and {CONFIG_FILE}"
        )
