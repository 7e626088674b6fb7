"""Fuzz one target with atheris: `python -m tests.fuzz TARGET [libFuzzer's options]`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["inflight", "inflight_client", "gguf"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        sys.exit(f"tests.fuzz: got target {name!r}, expected one of {', '.join(TARGETS)}")
    with tempfile.TemporaryDirectory(prefix="inflight-fuzz-seeds-") as folder:
        for file in ("corpus.json", "findings.json"):
            known = json.loads(Path(__file__).with_name(file).read_text("utf-8"))
            for number, data in enumerate(known.get(name, ())):
                Path(folder, f"{file}-{number}").write_bytes(bytes.fromhex(data))
        # libFuzzer writes new inputs to the first folder, and only reads the others.
        atheris.Setup([sys.argv[0], *sys.argv[2:], folder], TARGETS[name])
        atheris.Fuzz()


main()
