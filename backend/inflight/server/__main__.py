"""`python -m inflight.server`."""

import sys

from inflight.server.cli import main

sys.exit(main())
