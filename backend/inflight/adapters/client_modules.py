"""Generates the client's table of the linear layers that adapters may change.

Run by `scripts/write_configs`; a test checks that the file equals the output of this module.
"""

from __future__ import annotations

import sys
from pathlib import Path

from inflight.adapters.lora_modules import Module
from inflight.adapters.peft_folder import all_modules_by_name
from inflight.models.families import FAMILIES


def client_modules() -> str:
    """Return the source of the client's table."""
    ids = {name: int(module) for each in FAMILIES for name, module in all_modules_by_name(each.names).items()}
    lines = [
        '"""TensorRT-LLM\'s ids of linear layers.',
        "",
        "Written by scripts/write_configs from inflight/models/families/ and inflight/adapters/: change those.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        f"MLP_GATE_UP = {int(Module.MLP_GATE_UP)}",
        '"""The id of layers that fuse gate and up: the rows of their B have up first."""',
        "MODULE_IDS = {",
        *(f'    "{name}": {module},' for name, module in ids.items()),
        "}",
        '"""By the layers\' names in checkpoints."""',
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(client_modules(), encoding="utf-8")
