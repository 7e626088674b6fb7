"""Write requirements-hashed.txt: the packages of a server with their wheels' digests, for `--require-hashes`.

Asks pip which files it would install for this package's dependencies, with the versions of constraints.txt, on the
machine and the Python that run this. Installs nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "requirements-hashed.txt"
SERVER = f"{ROOT}[mpi,kserve]"


def main() -> int:
    argparse.ArgumentParser(
        prog="scripts/hash_packages.py", description=__doc__, allow_abbrev=False
    ).parse_args()
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        "-",
    ]
    command += ["--no-build-isolation", "-c", str(ROOT / "constraints.txt"), SERVER]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return done.returncode
    lines = [
        f"# Made by scripts/hash_packages.py for {platform.system()}, {platform.machine()}, "
        f"Python {platform.python_version().rpartition('.')[0]}."
    ]
    for each in sorted(json.loads(done.stdout)["install"], key=lambda each: each["metadata"]["name"].lower()):
        lines += described(each)
    TARGET.write_text("\n".join(lines) + "\n")
    return 0


def described(package: dict[str, Any]) -> list[str]:
    """Return a package's lines; none for this package itself, which has no digest."""
    archive, metadata = package["download_info"].get("archive_info"), package["metadata"]
    if archive is None:
        return []
    return [
        f"{metadata['name'].lower()}=={metadata['version']} \\",
        f"    --hash=sha256:{archive['hashes']['sha256']}",
    ]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this script without a traceback
    sys.exit(main())
