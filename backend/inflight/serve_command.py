"""The program of `inflight serve` and `scripts/serve`: starts a server, with or without a tritonserver.

`inflight.server.cli` parses the options. Before anything is started, `inflight.doctor.preflight` checks what
can be known in less than a second. Nothing is imported at the top, because an interrupt (Ctrl-C) is
to end the program without a traceback from the beginning.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as typing has it, whose import takes time
if TYPE_CHECKING:
    from inflight.server.launch import ServerOptions


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal ends this process; return the exit status."""
    from inflight.server.option_parser import make_parser

    given = sys.argv[1:] if arguments is None else arguments
    for option in ("-h", "--help", "--version"):
        if option in given:
            make_parser().parse_args([option])  # needs no installation, unlike the imports below
    from inflight.doctor import preflight
    from inflight.server import cli

    return cli.main(given, _serve, preflight.unservable)


def _serve(options: ServerOptions) -> int:
    from inflight.doctor import preflight
    from inflight.log_lines import open_log
    from inflight.server import cli
    from inflight.server.errors import OptionError

    if found := list(preflight.problems(options)):
        raise OptionError("; ".join(found))
    for warning in preflight.warnings(options):
        print(f"serve: {warning}", file=open_log(options.log_format, "warning"))
    if options.triton:
        return cli.serve(options)
    from inflight import standalone

    return standalone.serve(options)


if __name__ == "__main__":
    try:
        from inflight.interrupts import run

        status = run(main)
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
