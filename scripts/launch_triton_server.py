#!/usr/bin/env python3
"""Start the server with the flags of tensorrtllm_backend's launcher, and return while its models load."""

import signal
import sys
from pathlib import Path

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this script without a traceback

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS.parent / "backend"))

from inflight.server.trtllm_launcher import main  # noqa: E402 - the package need not be installed

sys.exit(main(SCRIPTS / "serve"))
