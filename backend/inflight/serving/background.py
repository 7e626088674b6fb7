"""Lower priority for background threads, for a model that computes on all processors.

A late forward pass delays all requests. Late responses cost less: waiting responses of a stream are merged.
Linux has a niceness for each thread.
"""

from __future__ import annotations

import os
import threading

NICENESS = 10


def lower_priority() -> None:
    """Lower the calling thread's priority to niceness 10, unless its niceness is higher already."""
    thread = threading.get_native_id()
    niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
    os.setpriority(os.PRIO_PROCESS, thread, niceness)
