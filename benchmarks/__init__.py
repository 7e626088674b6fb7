"""Programs that measure and print figures. The server imports nothing from here."""

import inflight  # noqa: F401  # limits the spinning of OpenMP's threads, before torch is imported
