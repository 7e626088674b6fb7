"""Generate source files from the declarations of sampling controls.

Some code cannot import the declarations: the client is installed alone, and the playground runs in a
browser. OpenAI's body and the Executor's SamplingConfig need their fields as source text for type checkers
and editors. `scripts/write_configs` runs this module; a test checks that the files equal its output.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

from inflight.core.request.control import Control, ExecutorField
from inflight.core.request.sampling_config import CONTROLS, NEUTRAL

_HEAD = "Written by scripts/write_configs from inflight/core/request/sampling_config.py: change that."
_NUMPY_TYPES = {"FP32": "float32", "INT32": "int32", "UINT64": "uint64"}


def files(root: Path) -> dict[Path, str]:
    """Return the content of each generated file by its path, for the checkout at `root`."""
    backend = root / "backend" / "inflight"
    return {
        backend / "openai" / "control_fields.py": body_fields(),
        backend / "openai" / "playground" / "page" / "sampling.js": playground_settings(),
        backend / "executor" / "control_fields.py": executor_fields(),
        root / "client" / "inflight_client" / "controls.py": client_options(),
    }


def body_fields() -> str:
    """Return the source of a pydantic class with the numeric fields of OpenAI's body."""
    lines = [
        *_docstring("Fields of bodies that are sampling controls."),
        "",
        "from __future__ import annotations",
        "",
        "from pydantic import BaseModel, Field",
        "",
        "",
        "class BodyControls(BaseModel):",
        '    """The numbers among the sampling controls."""',
        "",
    ]
    for control in CONTROLS.values():
        if control.body is not None and control.body.is_number:
            bounds = "".join(f", {word}={bound}" for word, bound in control.body.bounds.items())
            default = repr(float(control.body.default) if control.dtype == "FP32" else control.body.default)
            lines.append(f"    {control.body.name}: {_python_type(control)} = Field({default}{bounds})")
    return _text(lines)


def executor_fields() -> str:
    """Return the source of a base class with the supported fields of the Executor's SamplingConfig."""
    fields = [(name, control, control.executor) for name, control in CONTROLS.items() if control.executor]
    lines = [
        *_docstring("Fields of SamplingConfig that are sampling controls."),
        "",
        "from __future__ import annotations",
        "",
        "from dataclasses import KW_ONLY, dataclass",
        "",
        "from inflight.executor.typed import Typed, of_control",
        "",
        "",
        "@dataclass",
        "class SamplingControls(Typed):",
        '    """The sampling controls that requests may have.',
        "",
        "    Attributes:",
        *(line for _, control, field in fields for line in _described(control, field)),
        '    """',
        "",
    ]
    for name, control, field in fields:
        kind = _python_type(control)
        if name == "beam_width":  # the only positional field, and the only one with a default
            lines += [f'    {field.name}: {kind} = of_control("{name}", {NEUTRAL[name]})', "    _: KW_ONLY"]
        else:
            lines.append(f'    {field.name}: {kind} | None = of_control("{name}", None)')
    return _text(lines)


def client_options() -> str:
    """Return the source of the client's options: the tensors' names, type, dimensions and help; further names."""
    lines = [
        *_docstring("Options that are sampling controls."),
        "",
        "from __future__ import annotations",
        "",
        "CONTROLS: dict[str, tuple[str, str, str, int, str]] = {",
    ]
    for name, control in CONTROLS.items():
        if control.client:
            text_names = control.text_names or (control.tensor,)
            text_name = control.client if control.client in text_names else text_names[0]
            values = [text_name, control.tensor, _NUMPY_TYPES[control.dtype], int(NEUTRAL[name] == ())]
            values.append(control.meaning if control.on_command_line else "")
            lines += [
                f'    "{control.client}": (',
                *(f"        {_quoted(each)}," for each in values),
                "    ),",
            ]
    doc = "For each option: its tensor in text models and in id models, type, dimensions and help."
    ending = [control.client for control in CONTROLS.values() if control.ends_answer]
    aliases = {other: control.client for control in CONTROLS.values() for other in control.client_aliases}
    lines += [
        "}",
        f'"""{doc}"""',
        "",
        f"ENDING_CONTROLS = {json.dumps(ending)}",
        '"""Options that end the answer."""',
        "",
        f"ALIASES = {json.dumps(aliases)}",
        '"""Further names of options."""',
    ]
    return _text(lines)


def playground_settings() -> str:
    """Return the source of the playground's grouped settings and of the fields that OpenAI's client lacks."""
    groups: dict[str, list[dict[str, str]]] = {}
    extra: list[str] = []
    for control in CONTROLS.values():
        if control.body is not None and not control.body.of_openai:
            extra.append(control.body.name)
        if control.body is not None and control.setting is not None:
            name, shown = control.body.name, control.setting
            setting = {
                "field": name,
                "label": name.replace("_", " ").capitalize(),
                "usual": shown.usual or f"{control.body.default:g}",
                "hint": shown.hint,
            }
            groups.setdefault(shown.group, []).append(setting)
    titled = [{"title": title, "settings": settings} for title, settings in groups.items()]
    return _text(
        [
            f"// Settings that are sampling controls. {_HEAD}",
            "",
            f"const SAMPLING_GROUPS = {json.dumps(titled, indent=2, ensure_ascii=False)};",
            "",
            "/** Fields that the client of OpenAI has no argument for. */",
            f"const EXTRA_FIELDS = {json.dumps(sorted(set(extra)))};",
        ]
    )


def _docstring(text: str) -> list[str]:
    return [f'"""{text}', "", _HEAD, '"""']


def _described(control: Control, field: ExecutorField) -> list[str]:
    text = f"{field.name}: {control.meaning}. In this API: {field.note}."
    return textwrap.wrap(text, 108, initial_indent=" " * 8, subsequent_indent=" " * 12)


def _python_type(control: Control) -> str:
    return "float" if control.dtype == "FP32" else "int"


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def main(root: Path) -> None:
    """Write the files below `root` that are generated from the declarations of sampling controls."""
    for path, text in files(root).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
