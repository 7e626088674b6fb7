"""The files in which a checkpoint keeps its chat templates.

Templates are in chat_template.jinja and additional_chat_templates/, or in tokenizer_config.json, or in
chat_template.json of multimodal models; the precedence is that of transformers. Also reads the special
tokens that templates use. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from inflight.checkpoint_config import read_json
from inflight.errors import ConfigError
from inflight.file_names import native
from inflight.text.tokenizer_files import read_tokenizer

DEFAULT = "default"
"""Name of the template for chats for which there is no more specific template."""

TOOL_USE = "tool_use"
"""Name of the template for chats with tools, if the checkpoint has one."""

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TemplateFiles:
    """The chat templates and special tokens in a checkpoint's files.

    Attributes:
        sources: Templates by name; empty if there are none.
        special_tokens: Texts of special tokens by name, such as `bos_token`.
        origin: File or folder of the templates, for messages.
    """

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]
    origin: str


def read_template_files(folder: str, file: Path | None) -> TemplateFiles:
    """Read the templates of a checkpoint folder.

    Args:
        folder: The folder with tokenizer.json.
        file: A file with a template to use instead of the checkpoint's; None: use the checkpoint's.

    Raises:
        ConfigError: A file is missing or broken; the message names the file.
    """
    path = Path(native(folder))
    named = read_tokenizer(path).named_tokens
    special = {name: named[name] for name in _ROLES if name in named}
    if file is not None:
        return TemplateFiles({DEFAULT: _read_text(file)}, special, str(file))
    sources = _from_jinja_files(path)
    for name in ("tokenizer_config.json", "chat_template.json"):
        sources = sources or _from_settings(path / name)
    return TemplateFiles(sources, special, folder)


def _from_jinja_files(folder: Path) -> dict[str, str]:
    """Return the templates in .jinja files by name; empty if there are none."""
    sources: dict[str, str] = {}
    if (folder / "chat_template.jinja").is_file():
        sources[DEFAULT] = _read_text(folder / "chat_template.jinja")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[file.name.removesuffix(".jinja")] = _read_text(file)
    return sources


def _from_settings(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    settings = read_json(path)
    found: Any = cast(dict[str, Any], settings).get("chat_template") if isinstance(settings, dict) else None
    if found is None:
        return {}
    if isinstance(found, str):
        return {DEFAULT: found}
    sources: dict[str, str] = {}
    listed = cast(list[Any], found if isinstance(found, list) else [found])
    for each in listed:
        match each:
            case {"name": str(name), "template": str(template)}:
                sources[name] = template
            case _:
                raise ConfigError(
                    f"chat_template of {path} must be a text, or a list of objects with name and template, got "
                    f"{repr(each)[:80]}"
                )
    return sources


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error}") from error
