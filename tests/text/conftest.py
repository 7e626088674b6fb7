from __future__ import annotations

from hypothesis import settings

# Examples take milliseconds; on a busy machine one may still take longer than the default deadline.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
