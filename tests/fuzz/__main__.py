"""Fuzz one target with atheris: `python -m tests.fuzz TARGET [libFuzzer's options]`."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["inflight", "gguf"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        sys.exit(f"tests.fuzz: got target {name!r}, expected one of {', '.join(TARGETS)}")
    atheris.Setup([sys.argv[0], *sys.argv[2:]], TARGETS[name])
    atheris.Fuzz()


main()
