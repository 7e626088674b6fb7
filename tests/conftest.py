"""For all tests: children can be interrupted, even if the shell runs the tests in the background.

There SIGINT is ignored, which every process hands on to those that it starts.
"""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
