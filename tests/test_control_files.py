"""Generated files agree with the declarations of controls, and most sources need not name a control."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from inflight.control_files import files
from inflight.core.request.sampling_config import CONTROLS, SamplingConfig

ROOT = Path(__file__).parents[1]
DECLARATION, RULE, ORACLE, COMPILED_RULE = "sampling_config.py", "top_k_top_p.py", "reference.py", "draw.h"


def test_the_files_equal_the_generated_ones() -> None:
    for path, text in files(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run scripts/write_configs"


def test_the_example_of_a_control_is_valid_and_uses_it() -> None:
    for name, control in CONTROLS.items():
        if not name.startswith("logit_bias"):
            config = SamplingConfig(
                **{name: control.example}, **({"beam_width": 4} if "beam_s" in name else {})
            )
            config.validate(1000)
            assert config.uses(name), name


def test_only_declaration_rule_and_oracle_name_a_control() -> None:
    """Generated files, tests and documentation pages are not counted."""
    written = {str(path.relative_to(ROOT)) for path in files(ROOT)}
    listed = subprocess.run(
        ["git", "grep", "--untracked", "-lw", "min_p", "--", "*.py", "*.js", "*.h", "*.cpp"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    naming = [path for path in listed.stdout.split() if not path.startswith("tests/") and path not in written]
    assert sorted(re.sub(r".*/", "", path) for path in naming) == sorted(
        [DECLARATION, ORACLE, RULE, COMPILED_RULE]
    )
