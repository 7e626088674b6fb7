"""Work that waits where processors are short: beside a model that computes on them.

Responses that are sent late are joined, so that there are fewer; forward passes that are late delay everybody.
Linux has a niceness for every thread. Knows nothing of what the threads do.
"""

from __future__ import annotations

import os
import threading

NICENESS = 10


def give_way() -> None:
    """Let the calling thread have a processor after the others, from here on; what is nicer already stays so."""
    thread = threading.get_native_id()
    niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
    os.setpriority(os.PRIO_PROCESS, thread, niceness)
