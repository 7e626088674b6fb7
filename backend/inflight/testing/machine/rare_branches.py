"""Makes rare branches frequent: constants of the package that a seed sets to small or large values.

The package's code is not changed: a limit of 64 responses in a message becomes 1, so a few tokens already need
several messages.
"""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Generator

_CONSTANTS: dict[str, dict[str, tuple[float, ...]]] = {
    "endpoint.server": {"_RESPONSES_PER_WRITE": (1, 2), "_LARGE_BYTES": (1, 60)},
    "endpoint.local": {"SEQUENCES_PER_ITERATION": (1, 2), "_TOKENS_OF_A_SEQUENCE": (1, 8)},
    "batch_manager.send_window": {"_LONGEST_NS": (1, 2 * 10**9), "_FIRST_COST_NS": (1, 10**9)},
    "core.kv.block_pool": {"_MAX_COMPARED": (1, 2)},
    "core.schedule.admission": {"_MAX_PASSED_OVER": (1, 2)},
    "core.schedule.batch_builder": {"_FEW_SEQUENCES": (1, 1000)},
    "core.schedule.waiting_queue": {"_MAX_ABSENT": (1,), "_MAX_COMPARED": (1, 2), "_MAX_FOLLOWED": (1,)},
    "core.request.suffix_decoding": {"MAX_PLACES": (1,), "MAX_READ": (1, 5)},
    "block_store.store": {"_MAX_QUEUED_BYTES": (1, 100), "_MIN_BLOCKS": (1,), "_MIN_CONTEXT_TOKENS": (1,)},
    "adapters.cache": {"_MAX_PROBLEMS": (0, 1)},
}
"""The constants by module, each with its rare values."""
_ENABLED, _CHANGED = 0.5, 0.25  # probabilities: of runs with rare values, and of each constant in these


@contextlib.contextmanager
def chosen_by(seed: int) -> Generator[list[str]]:
    """Set the constants that a seed chooses in this context; yields their names with the values."""
    rng = random.Random(f"rare branches {seed}")
    is_enabled = rng.random() < _ENABLED
    changed: list[str] = []
    with contextlib.ExitStack() as stack:
        for name, constants in _CONSTANTS.items():
            module = importlib.import_module(f"inflight.{name}")
            for constant, values in constants.items():
                value = rng.choice(values)
                if rng.random() < _CHANGED and is_enabled:
                    stack.callback(setattr, module, constant, getattr(module, constant))
                    setattr(module, constant, value)
                    changed.append(f"{name}.{constant} = {value}")
        yield changed
