"""Lower priority for threads, for when the model computes on all processors.

Late responses are joined, so fewer are sent; a late forward pass delays all requests. Linux has a niceness
for each thread. Knows nothing of what the threads do.
"""

from __future__ import annotations

import os
import threading

NICENESS = 10


def give_way() -> None:
    """Lower the calling thread's priority to niceness 10, unless its niceness is higher already."""
    thread = threading.get_native_id()
    niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
    os.setpriority(os.PRIO_PROCESS, thread, niceness)
