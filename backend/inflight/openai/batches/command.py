"""The program of `inflight batch` and `scripts/batch`: sends a file of requests to a running server.

Imports only the standard library until the command line is parsed, so that `--help` needs no installation.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from inflight.arguments import Parser, output_file, program_name
from inflight.errors import InflightError
from inflight.openai.batches import CONCURRENCY, RETRIES
from inflight.openai.options import API_KEYS_VARIABLE

_DEFAULT_URL = "http://localhost:9000"
_WRONG_USAGE = 2


def main(arguments: list[str] | None = None) -> int:
    """Answer a batch; return the exit status: 0 if every request succeeded, 2 if nothing could be sent, else 1."""
    given = _parser().parse_args(arguments)
    if given.file.is_dir():
        sys.stderr.write(f"batch: {given.file}: expected a file with requests, got a folder\n")
        return _WRONG_USAGE
    output: Path = given.output or given.file.with_suffix(".output.jsonl")
    from inflight.openai.batches.offline import answer_batch

    try:
        return answer_batch(
            given.file,
            output,
            given.url,
            given.api_key_file or _key_of_environment(),
            given.concurrency,
            given.retries,
        )
    except (OSError, InflightError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        sys.stderr.write(f"batch: {reason}\n")
        return _WRONG_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=program_name("scripts/batch"),
        description="Send a file of requests in OpenAI's batch format to a running server at the lowest priority, "
        "and write the answers to a file. After an interruption the same command goes on where it ended. Exit "
        "code 0: every request succeeded, 1: some failed or have no answer, 2: nothing was sent.",
    )
    add = parser.add_argument
    add(
        "file",
        type=Path,
        metavar="FILE",
        help="file of the requests; each line is a JSON object with custom_id, method, url and body",
    )
    add(
        "--url",
        type=_url,
        default=_DEFAULT_URL,
        metavar="URL",
        help="address of the server's /v1 (default: %(default)s)",
    )
    add(
        "-o",
        "--output",
        type=output_file,
        metavar="OUT",
        help="file to which the answers are appended (default: FILE, with its ending replaced by "
        ".output.jsonl)",
    )
    add(
        "--concurrency",
        type=_positive,
        default=CONCURRENCY,
        metavar="N",
        help="number of requests in flight (default: %(default)s)",
    )
    add(
        "--retries",
        type=_number,
        default=RETRIES,
        metavar="N",
        help="maximum number of times that a request is sent again because its answer had status 502, 503 or "
        "504 or because no answer came; after status 429 (the queue is full), a request is sent again without "
        "limit; before a request is sent again, there is a pause of up to 30 s (default: %(default)s)",
    )
    add(
        "--api-key-file",
        type=_key_of_file,
        metavar="FILE",
        help=f"file with the server's API key (default: the environment variable {API_KEYS_VARIABLE})",
    )
    return parser


def _url(text: str) -> str:
    """Return the server's URL without a path."""
    address = text.rstrip("/").removesuffix("/v1")
    url = address if "://" in address else f"http://{address}"
    if not re.fullmatch(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?", url):
        raise argparse.ArgumentTypeError(f"expected a URL such as {_DEFAULT_URL}, got {text!r}")
    return url


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 4:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 9999, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    number = _number(text)
    if not number:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return number


def _key_of_file(text: str) -> str:
    """Return the first key of a file that has one on each line, as the server's --api-key-file."""
    try:
        keys = Path(text).expanduser().read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {getattr(error, 'strerror', None) or error}") from None
    if not keys:
        raise argparse.ArgumentTypeError(f"{text}: there is no key in it")
    return keys[0]


def _key_of_environment() -> str:
    """Return the first key of the environment variable; "": none."""
    return re.split(r"[\s,]+", os.environ.get(API_KEYS_VARIABLE, "").strip())[0]


if __name__ == "__main__":
    sys.exit(main())
