"""The console command `inflight`, or `python -m inflight`.

Nothing of the package is imported at the top, because an interrupt (Ctrl-C) is to end the program without a
traceback from the beginning.
"""

import sys

_INTERRUPTED = 130


def main() -> int:
    """Run the command line; return the exit status."""
    try:
        from inflight import cli, interrupts

        return interrupts.run(cli.main)
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
