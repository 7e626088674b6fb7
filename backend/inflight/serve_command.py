"""The program of `inflight serve` and `scripts/serve`: starts a server, with or without a tritonserver.

`inflight.server.cli` parses the options. Before anything is started, `inflight.doctor.preflight` checks what
can be known in less than a second.
"""

import sys

from inflight.doctor import preflight
from inflight.server import cli
from inflight.server.errors import OptionError
from inflight.server.launch import ServerOptions


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal ends this process; return the exit status."""
    return cli.main(arguments, _serve)


def _serve(options: ServerOptions) -> int:
    if found := list(preflight.problems(options)):
        raise OptionError("; ".join(found))
    for warning in preflight.warnings(options):
        sys.stderr.write(f"serve: {warning}\n")
    if options.triton:
        return cli.serve(options)
    from inflight import standalone

    return standalone.serve(options)


if __name__ == "__main__":
    sys.exit(main())
