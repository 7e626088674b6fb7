"""Whether a server that has been told to end still works on requests.

The embedded tritonserver keeps a model loaded, and so itself alive, while any client holds a gRPC stream open,
with or without requests on it; so somebody else has to see that the last request is done. An engine is asked
(`farewell`); models of a repository without one are known to be left without work by using no processor.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

# What stubs use that only wait, with room for the resolution of the kernel's accounts.
_RESTING_SHARE = 0.01
_RESOLUTION_S = 0.02
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class IdleWatch:
    """Asked again and again, says for how long nothing has been going on."""

    def __init__(
        self, processor_time: Callable[[], float], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._processor_time = processor_time
        self._now = now
        self._restart(now())

    def seconds(self) -> float:
        """Seconds since the last sign of work, or since the watch began."""
        now = self._now()
        if self._is_busy(now):
            self._restart(now)
        return now - self._since

    def _is_busy(self, now: float) -> bool:
        used = self._processor_time() - self._used_before
        return used > _RESOLUTION_S + _RESTING_SHARE * (now - self._since)

    def _restart(self, now: float) -> None:
        self._since = now
        self._used_before = self._processor_time()


def stubs_processor_time(group: int) -> float:
    """Seconds of processor time used by a process group but for its leader."""
    return sum(
        _time_in_group(entry, group) for entry in Path("/proc").glob("[0-9]*") if entry.name != str(group)
    )


def _time_in_group(entry: Path, group: int) -> float:
    try:
        # Behind the name, which may hold anything: state, parent, group, and at 11 and 12 user and system time.
        fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if int(fields[2]) == group else 0.0
