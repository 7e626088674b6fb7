"""The engine's part of receipts: versions, digests of the checkpoint, code, settings and adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from inflight.config import EngineConfig, Parameters
from inflight.parameter_spec import declared_rows
from inflight.receipts.document import EngineForm, EnginePart, Model
from inflight.receipts.model_files import BackgroundDigests, ModelFiles

PARAMETERS = (
    "dtype",
    "engine",
    "kernels",
    "kv_cache_dtype",
    "max_attention_window_size",
    "sink_token_length",
    "tokens_per_block",
    "lora_cache_max_adapter_size",
    "guided_decoding_backend",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "moe_expert_parallel_size",
)
"""The parameters that tokens can depend on, and those without which a request could not be re-run."""
_PACKAGES = ("inflight", "torch")


class EngineReceipts:
    """Makes the engine's part of each receipt; implements `inflight.core.ports.Receipts`. Any thread.

    Args:
        name: Name of the model.
        folders: Folders of the model, as for ModelFiles.
        engine: The part of each receipt about the code and the settings.
        key_file: File with the key of signatures; "": receipts are not signed.
        on_ready: Called once, on another thread, when `is_ready` has become true.
    """

    def __init__(
        self,
        name: str,
        folders: Mapping[str, Path],
        engine: EngineForm,
        key_file: str,
        on_ready: Callable[[], None],
    ) -> None:
        self._name = name
        self._engine = engine
        self._key_file = key_file
        self._software = versions()
        self._digests = BackgroundDigests(ModelFiles(folders), on_ready)

    @property
    def is_ready(self) -> bool:
        return self._digests.have_ended

    def prepare(self) -> None:
        self._digests.start()

    def part(self, adapter_digest: bytes) -> str:
        made = EnginePart(
            software=self._software,
            model=Model(name=self._name, files=self._digests.result()),
            engine=self._engine,
            adapter=f"blake2b:{adapter_digest.hex()}" if adapter_digest else "",
            key_file=self._key_file,
        )
        return msgspec.json.encode(made).decode()

    def close(self) -> None:
        """End the thread that computes digests. Idempotent."""
        self._digests.close()


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute tokens."""
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            found[package] = "unknown"
    return found


def given_parameters(parameters: Parameters) -> dict[str, str]:
    """Return those of PARAMETERS that differ from their defaults, as texts for config.pbtxt."""
    found: dict[str, str] = {}
    for owner in (parameters, parameters.engine):
        for name, spec in declared_rows(type(owner)).items():
            value = getattr(owner, name)
            if spec.key in PARAMETERS and value != spec.default:
                found[spec.key] = _as_text(value)
    return found


def model_folders(parameters: Parameters, model_path: str) -> dict[str, Path]:
    """Return the folders of a model by the prefix of their files' names, as for ModelFiles."""
    config: EngineConfig = parameters.engine
    further = {"engine_dir/": config.engine_dir, "tokenizer_dir/": parameters.tokenizer_dir}
    folders = {"": Path(model_path)} if model_path else {}
    return folders | {
        prefix: Path(folder) for prefix, folder in further.items() if folder and folder != model_path
    }


def _as_text(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)  # pyright: ignore
