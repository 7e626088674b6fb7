"""`python -m inflight.pictures CHECKPOINT --socket PATH`: a process that encodes the pictures of prompts.

Prints LISTENING when clients can connect; ends on SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence

import torch

from inflight.arguments import Parser, positive, whole
from inflight.errors import ConfigError
from inflight.log_lines import FORMATS, LineFormatter, open_log
from inflight.pictures import options
from inflight.pictures.encoder import CACHE_BYTES, PictureEncoder
from inflight.pictures.families import TOWER_DTYPES
from inflight.pictures.server import PicturesServer
from inflight.pictures.sources import SourceRules

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal ends the process. Returns the exit status: 0 on a signal, 2 if it cannot serve."""
    given = _parser().parse_args(arguments)
    handler = logging.StreamHandler(open_log(given.log_format))
    handler.setFormatter(LineFormatter("pictures"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if given.threads:
        torch.set_num_threads(given.threads)
    begun_s = time.monotonic()
    try:
        encoder = PictureEncoder(given.checkpoint, given.dtype, given.device, given.cache_bytes)
        _log.info("the vision tower is loaded: %.1f s", time.monotonic() - begun_s)
        asyncio.run(_serve(encoder, given))
    except ConfigError as error:
        print(f"pictures: {error}", file=open_log(given.log_format, "error"))
        return 2
    return 0


async def _serve(encoder: PictureEncoder, given: argparse.Namespace) -> None:
    rules = SourceRules(options.allowed_domains(given), given.allowed_local_media_path)
    server = PicturesServer(encoder, rules=rules, max_pictures=given.limit_mm_per_prompt)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await server.serve(given.socket, stop, lambda: print(f"LISTENING {given.socket}", flush=True))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m inflight.pictures",
        description="Encode the pictures of prompts with a checkpoint's vision tower.",
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="folder of the checkpoint")
    add("--socket", required=True, metavar="PATH", help="Unix socket to listen at, for this user only")
    add(
        "--dtype",
        choices=TOWER_DTYPES,
        help="type of the weights and the rows (default: as the checkpoint says)",
    )
    add("--device", default="cpu", help="torch's name of the device that computes (default: %(default)s)")
    add("--threads", type=positive, metavar="N", help="torch's threads (default: one for each core)")
    add(
        "--cache-bytes",
        type=whole,
        default=CACHE_BYTES,
        metavar="N",
        help="memory for embeddings of pictures, which are kept for further prompts with the same pictures "
        "(default: %(default)s)",
    )
    add(
        "--log-format",
        choices=FORMATS,
        default="text",
        help="json: every line of the log is a JSON object (default: %(default)s)",
    )
    options.add_arguments(add)
    return parser


if __name__ == "__main__":
    sys.exit(main())
