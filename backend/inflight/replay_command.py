"""The program of `inflight replay` and `scripts/replay`: reruns a trace's schedule without the model.

Imports only the standard library until the command line is parsed, so that `--help` needs no installation.
"""

from __future__ import annotations

import sys
from pathlib import Path

from inflight.arguments import Parser, program_name, whole
from inflight.errors import InflightError


def main(arguments: list[str] | None = None) -> int:
    """Run `scripts/replay`; return its exit code."""
    parser = Parser(
        prog=program_name("scripts/replay"),
        description="Run a recorded schedule again, without the model. "
        "Exit code 0: identical, 1: it differs, 2: the trace cannot be read.",
    )
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="the file that a server with the setting record_path wrote"
    )
    parser.add_argument("--until", type=whole, metavar="ITERATION", help="the last iteration to replay")
    parser.add_argument(
        "--state",
        action="store_true",
        help="print the scheduler's state at the end, as JSON; other output goes to stderr",
    )
    parser.add_argument("--verbose", action="store_true", help="print one line for every iteration")
    given = parser.parse_args(arguments)
    from inflight.batch_manager.recording import Trace
    from inflight.batch_manager.replay import UNREADABLE, run

    report = sys.stderr if given.state else sys.stdout
    try:
        with given.trace.open("rb") as file:
            return run(Trace(file), sys.stdout, report, given.until, given.state, given.verbose)
    except (OSError, InflightError) as error:
        sys.stderr.write(f"{given.trace}: {getattr(error, 'strerror', None) or error}\n")
        return UNREADABLE


if __name__ == "__main__":
    sys.exit(main())
