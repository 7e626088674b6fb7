"""The program of `inflight serve` and `scripts/serve`: starts a server, with or without a tritonserver.

`inflight.server.cli` parses the options.
"""

import sys

from inflight.server import cli
from inflight.server.launch import ServerOptions


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal ends this process; return the exit status."""
    return cli.main(arguments, _serve)


def _serve(options: ServerOptions) -> int:
    if options.triton:
        return cli.serve(options)
    from inflight import standalone

    return standalone.serve(options)


if __name__ == "__main__":
    sys.exit(main())
