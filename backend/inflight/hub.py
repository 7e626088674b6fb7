"""Find a checkpoint: a folder or GGUF file on this machine, or a name on the Hugging Face hub to download.

Downloads use huggingface_hub: its cache (`HF_HOME`) is shared with other programs, `HF_TOKEN` gives access
to private models, `HF_ENDPOINT` selects another hub, and `HF_HUB_OFFLINE=1` forbids access. Only files that
the server needs are downloaded, no weights in other formats and no code. Imports only the standard library
until it downloads a checkpoint or reads a GGUF file; any thread.

`python -m inflight.hub NAME` downloads a checkpoint before a server starts, and prints its folder.
"""

from __future__ import annotations

import argparse
import logging
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from inflight.arguments import Parser
from inflight.checkpoint_config import instead_of_gguf
from inflight.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_IN_ADDRESS = re.compile(rf"^(?:https?://[^/]+/)?({_HUB_ID.pattern.replace('(/', '(?:/')})(?:/|/tree/.*)?$")
"""The name of a model in the address of its page, or before a slash."""
_WANTED = ["*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]
_UNWANTED = ["[!1]*/*.json", "*/*.safetensors", "*/*.txt", "consolidated*"]
"""Weights in other formats and their files; sentence-transformers' 1_Pooling/config.json is wanted."""
EXPECTED_MODEL = "a folder, a GGUF file or a name on the Hugging Face hub"
_CREDENTIALS = re.compile(r"//[^/\s]*@")
_log = logging.getLogger(__name__)

Judge = Callable[[Path], str | None]
"""A function that returns why a checkpoint cannot be used, judged by its config.json; None if it may be."""


def find_checkpoint(
    model: str, revision: str | None = None, may_fetch: bool = True, judge: Judge | None = None
) -> Path:
    """Return the folder of a checkpoint, after downloading it if necessary. On a terminal, a download shows a bar.

    Args:
        model: A folder, a GGUF file, or a name on the hub such as Qwen/Qwen3-0.6B. A GGUF file gets a folder
            of its own in the user's cache (`inflight.gguf`).
        revision: Branch, tag or commit of a name on the hub; None: the branch main.
        may_fetch: Whether files that are not in the hub's cache on this machine may be downloaded.
        judge: Called with a folder that has the config.json of a checkpoint on the hub, before further files are
            downloaded; None: every checkpoint is downloaded.

    Raises:
        ConfigError: The checkpoint is not available. The message has the reason.
    """
    if not model.strip():
        raise ConfigError(f"got {model!r}, expected {EXPECTED_MODEL}")
    folder = Path(model).expanduser()
    is_gguf = folder.suffix.lower() == ".gguf" and not folder.is_dir() and "://" not in model
    if folder.exists() or is_gguf or not _HUB_ID.fullmatch(model):
        if folder.exists() and not folder.is_dir() and not is_gguf:
            raise ConfigError(
                f"{model}: not a folder but a file, expected a checkpoint's folder{instead_of_gguf(folder)}"
            )
        if not folder.exists() and not is_gguf:
            raise ConfigError(f"{without_credentials(model)}: not a folder{_or_name(model)}")
        if revision is not None:
            raise ConfigError(
                f"revision {revision!r} is for names of the Hugging Face hub, but {model} is a "
                f"{'file' if is_gguf else 'folder'}"
            )
        if is_gguf:
            from inflight.gguf.folder import checkpoint_of

            return checkpoint_of(folder)
    else:
        folder = _fetch(model, revision, may_fetch, judge)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{model}: no config.json in that folder, so not a Hugging Face checkpoint{_instead_of(folder)}"
        )
    return folder


def _or_name(model: str) -> str:
    """Return the end of the error for a text that is neither a folder nor a name on the hub."""
    if model.startswith(("/", ".", "~")):
        return " (there is no such path)"
    [name] = _IN_ADDRESS.findall(model) or ["Qwen/Qwen3-0.6B"]
    return f", and no name on the Hugging Face hub such as {name}"


def _instead_of(folder: Path) -> str:
    """Return what to name in place of a folder without a config.json; "" if its files do not show it."""
    if (folder / "adapter_config.json").is_file():
        return " but a LoRA adapter: name its base model by --model, and the adapter by --lora NAME=FOLDER"
    inner = next(iter(sorted([*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")])), None)
    return instead_of_gguf(folder) if inner is None else f"; {inner.parent} has one"


def _fetch(name: str, revision: str | None, may_fetch: bool, judge: Judge | None) -> Path:
    """Return the folder of a checkpoint on the hub. config.json is downloaded first, and judged."""
    try:
        from huggingface_hub import constants
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise ConfigError(
            f"{name}: no such folder, and fetching it from the Hugging Face hub needs the package "
            "huggingface_hub (pip install huggingface_hub)"
        ) from None
    endpoint = without_credentials(constants.ENDPOINT)
    _log.info("%s: no such folder, so it is looked up on %s", name, endpoint)
    if not sys.stderr.isatty():
        disable_progress_bars()
    sizes = _sizes(name, revision) if may_fetch else None
    if sizes is not None:
        folder = _download(name, revision, ["config.json"])
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{name}: no config.json on {constants.ENDPOINT}, so not a Hugging Face checkpoint"
                f"{instead_of_gguf(folder)}"
            )
        if judge is not None and (reason := judge(folder)) is not None:
            raise ConfigError(reason.replace(str(folder), name))
        _check_room(name, revision, sizes)
    return _download(name, revision, _WANTED, may_fetch)


def _download(name: str, revision: str | None, wanted: list[str], may_fetch: bool = True) -> Path:
    """Return the folder of a checkpoint on the hub with the wanted files. Raises ConfigError with the reason."""
    from huggingface_hub import constants, snapshot_download  # pyright: ignore[reportUnknownVariableType]

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=wanted,
                ignore_patterns=_UNWANTED,
                local_files_only=not may_fetch,
            )
        )
    except Exception as error:  # errors of the client, the HTTP library or the system
        reason = without_credentials(_reason(name, revision or constants.DEFAULT_REVISION, error))
        raise ConfigError(f"{name}: no such folder, and {reason}") from error


def _sizes(name: str, revision: str | None) -> dict[str, int] | None:
    """Return the sizes of a checkpoint's files on the hub; None if it cannot be asked: the download says why."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import filter_repo_objects

    revision = revision or constants.DEFAULT_REVISION
    try:
        files = HfApi().model_info(name, revision=revision, files_metadata=True).siblings or []
    except Exception:  # as above; the sizes are only shown
        return None
    sizes = {file.rfilename: file.size or 0 for file in files}
    wanted = filter_repo_objects(sizes, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    return {path: sizes[path] for path in wanted}


def _check_room(name: str, revision: str | None, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if the files that are not in the hub's cache yet do not fit on its disk."""
    from huggingface_hub import constants, try_to_load_from_cache

    cache = Path(constants.HF_HUB_CACHE)
    existing = next(each for each in (cache, *cache.parents) if each.exists())
    cached = {path: try_to_load_from_cache(name, path, revision=revision) for path in sizes}
    needed = sum(size for path, size in sizes.items() if not isinstance(cached[path], str))
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ConfigError(
            f"{name}: its files take {_size(needed)}, and the hub's cache {cache} has {_size(free)} free: set "
            "HF_HOME to a folder with room"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _reason(name: str, revision: str, error: Exception) -> str:
    """Return the reason why the checkpoint cannot be downloaded, and a remedy."""
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return (
            f"on {endpoint} it is gated: accept its conditions at {endpoint}/{name}, and set HF_TOKEN to a token "
            "of yours"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{endpoint} has no model of this name, or it is private: then set HF_TOKEN to a token of "
            "an account that may read it"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"on {endpoint} it has no revision {revision!r}"
    if isinstance(error, errors.LocalEntryNotFoundError):  # raised for every error that prevented the request
        cache = constants.HF_HUB_CACHE
        if error.__cause__ is None or isinstance(error.__cause__, errors.OfflineModeIsEnabled):
            return f"the hub's cache {cache} has not all files of revision {revision!r} of that name"
        return (
            f"it cannot be fetched from {endpoint} ({_first_line(error.__cause__)}), and the hub's cache {cache} "
            f"has not all files of revision {revision!r}"
        )
    return f"it is not available from {endpoint}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def without_credentials(text: str) -> str:
    """Return a text for the log, whose URLs have no user and no password."""
    return _CREDENTIALS.sub("//", text)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line of `python -m inflight.hub`."""
    parser = Parser(
        prog="python -m inflight.hub", description="Download a checkpoint from the Hugging Face hub."
    )
    parser.add_argument("model", metavar="DIR_OR_HF_ID", help="as --model of scripts/serve")
    parser.add_argument("--revision", help="branch, tag or commit (default: main)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> str | None:
    """Download the checkpoint that the command line names and write its folder; return None, or an error."""
    given = parse(arguments)
    try:
        sys.stdout.write(f"{find_checkpoint(given.model, given.revision)}\n")
    except ConfigError as error:
        return f"hub: {error}"
    return None


if __name__ == "__main__":
    sys.exit(main())
