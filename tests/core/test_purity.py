"""The core imports the standard library and itself, nothing else."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import importlib, pkgutil, sys
import inflight.core
for module in pkgutil.iter_modules(inflight.core.__path__):
    importlib.import_module(f"inflight.core.{module.name}")
roots = {name.partition(".")[0] for name in sys.modules}
print(sorted(roots - set(sys.stdlib_module_names) - {"inflight", "__main__"} - set(BEFORE)))
ours = {name for name in sys.modules if name.startswith("inflight.") and not name.startswith("inflight.core")}
print(sorted(ours))
"""


def test_a_fresh_interpreter_finds_no_third_party_module():
    before = "import sys\nBEFORE = {name.partition('.')[0] for name in sys.modules}\n"
    printed = subprocess.run(
        [sys.executable, "-c", before + _SCRIPT], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    names = (
        "additional_outputs",
        "config",
        "errors",
        "file_names",
        "idle_parameters",
        "near_words",
        "parameter_spec",
    )
    assert printed == ["[]", str([f"inflight.{name}" for name in names])]
