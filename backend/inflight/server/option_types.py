"""Types of command-line options, as functions for argparse. Standard library only, see `trtllm_launcher`."""

import argparse


def setting(text: str) -> tuple[str, str]:
    """A key and a value, written KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, value


def port(text: str) -> int:
    """A TCP port, 0 for any free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port number from 0 to 65535, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def seconds(text: str) -> int:
    """A whole number of seconds."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of seconds, got {text!r}")
    return int(text)


def whole(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, got {text!r}")
    return int(text)
