"""Types of command-line options, as functions for argparse. Standard library only, see `trtllm_launcher`."""

import argparse
from pathlib import Path


def setting(text: str) -> tuple[str, str]:
    """Parse a key and a value, written KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, value


def named_folder(text: str) -> tuple[str, Path]:
    """Parse a name and a folder, written NAME=FOLDER."""
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"expected NAME=FOLDER, got {text!r}")
    return name, Path(folder)


def port(text: str) -> int:
    """Parse a TCP port; 0 means any free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port number from 0 to 65535, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """Parse a whole number that is at least 1."""
    return _whole_number(text, 1, "a whole number from 1")


def seconds(text: str) -> int:
    """Parse a whole number of seconds."""
    return _whole_number(text, 0, "a whole number of seconds")


def whole(text: str) -> int:
    """Parse a whole number that is at least 0."""
    return _whole_number(text, 0, "a whole number from 0")


def _whole_number(text: str, least: int, expected: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return int(text)
