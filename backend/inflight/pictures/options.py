"""The options for pictures of requests. Standard library only."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

MAX_PICTURES = 8
"""Default of the largest number of pictures in a prompt."""

_HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:]*:[0-9a-f:.]*")


def add_arguments(add: Callable[..., argparse.Action]) -> None:
    """Add the flags to a parser. They are named as in vLLM."""
    add(
        "--allowed-media-domains",
        metavar="HOST",
        type=_hosts,
        nargs="+",
        action="extend",
        default=[],
        help="hosts, separated by spaces or commas, from which the server may read pictures by http: and "
        "https: URLs; *.example.com stands for all hosts below example.com (default: none)",
    )
    add(
        "--allowed-local-media-path",
        metavar="DIR",
        type=_folder,
        help="folder from which the server may read pictures by file: URLs (default: none)",
    )
    add(
        "--limit-mm-per-prompt",
        metavar="LIMITS",
        type=_picture_limit,
        default=MAX_PICTURES,
        help="maximum number of pictures in a prompt, given as '{\"image\": 4}' or image=4 (default: "
        "image=8)",
    )


def allowed_domains(given: argparse.Namespace) -> tuple[str, ...]:
    """Return the hosts of the parsed flags, each once."""
    return tuple(dict.fromkeys(host for hosts in given.allowed_media_domains for host in hosts))


def to_arguments(domains: Sequence[str], folder: Path | None, max_pictures: int) -> list[str]:
    """Return the flags as words of a command line."""
    return [
        *("--limit-mm-per-prompt", f"image={max_pictures}"),
        *(("--allowed-media-domains", *domains) if domains else ()),
        *(("--allowed-local-media-path", str(folder.absolute())) if folder is not None else ()),
    ]


def _hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(host.strip().lower() for host in text.split(","))
    for host in hosts:
        if _HOST.fullmatch(host) is None:
            raise argparse.ArgumentTypeError(
                f"{host!r} is not a host name, expected one such as images.example.com"
            )
    return hosts


def _folder(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: expected a folder")
    return path


def _picture_limit(text: str) -> int:
    """Return the limit of pictures from limits by kind. Of other kinds only the limit 0 is taken."""
    expected = argparse.ArgumentTypeError(
        f"expected limits as '{{\"image\": 4}}' or image=4, and 0 for other kinds, got {text!r}"
    )
    try:
        if text.lstrip().startswith("{"):
            limits = json.loads(text)
        else:
            limits = {kind: int(number) for kind, number in (each.split("=") for each in text.split(","))}
    except ValueError:
        raise expected from None
    most = limits.pop("image", MAX_PICTURES)
    if type(most) is not int or not 0 <= most < 1 << 31 or any(limits.values()):
        raise expected
    return most
