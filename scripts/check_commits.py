"""Check that subjects of commits have the form `area: verb the thing`, with at most 72 characters.

Looks at the commits that no branch of the remote `origin` has yet or, without such a remote, at the last commit.
Merges are exempt, and so is a folder that is not a git checkout. Standard library only.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_CHARACTERS = 72

_AREA = r"[a-z0-9_.-]+(?:/[a-z0-9_.-]+)*"
_SUBJECT = re.compile(rf"{_AREA}(?:, ?{_AREA})*: \S+ \S.*")


def is_accepted(subject: str) -> bool:
    """Return whether a commit's subject has the form."""
    return len(subject) <= MAX_CHARACTERS and _SUBJECT.fullmatch(subject) is not None


def new_subjects(folder: Path) -> list[str]:
    """Return the subjects of the commits that are checked; empty if git does not know them."""
    pushed = _git(folder, "for-each-ref", "--count=1", "refs/remotes/origin")
    selection = ("HEAD", "--not", "--remotes=origin") if pushed else ("-1", "HEAD")
    return _git(folder, "log", "--no-merges", "--format=%s", *selection)


def _git(folder: Path, *arguments: str) -> list[str]:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, encoding="utf-8", errors="replace"
        )
    except FileNotFoundError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def main(folder: Path) -> int:
    """Check the new commits of the checkout in `folder`; return 1 if any subject is refused."""
    refused = [subject for subject in new_subjects(folder) if not is_accepted(subject)]
    for subject in refused:
        print(f"{len(subject)} characters: {subject}", file=sys.stderr)
    if refused:
        print(
            f"{len(refused)} subjects are not of the form `area: verb the thing` with at most"
            f" {MAX_CHARACTERS} characters (docs/contributing.md)",
            file=sys.stderr,
        )
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(ROOT))
