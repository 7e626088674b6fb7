"""The program of `inflight serve` and `scripts/serve`. `inflight.server.cli` parses its options."""

import sys

from inflight.server import cli

if __name__ == "__main__":
    sys.exit(cli.main())
