"""A client for the server: sends a text or token ids, and returns a whole answer or a stream of deltas.

    >>> client = Client("localhost:8001")
    >>> client.generate("def main():", max_tokens=20).text
    >>> for delta in client.stream([10, 11, 12], max_tokens=20):
    ...     print(delta.token_ids)
    >>> client.generate("def main():", beam_width=3, stop_words=["\\n\\n"], return_log_probs=True).sequences

Needs only tritonclient and numpy. These are imported when a name of this package is first used, because the
command line needs neither of them to show its help or to chat.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inflight_client.aio import AsyncClient
    from inflight_client.client import Client
    from inflight_client.errors import ServerError
    from inflight_client.guide import Guide
    from inflight_client.lora import convert_lora, load_lora
    from inflight_client.results import Adapter, Completion, Delta, PerfMetrics, Sequence, TopLogProb

__all__ = [
    "Adapter",
    "AsyncClient",
    "Client",
    "Completion",
    "Delta",
    "Guide",
    "PerfMetrics",
    "Sequence",
    "ServerError",
    "TopLogProb",
    "convert_lora",
    "load_lora",
]

_MODULES = {
    "aio": ("AsyncClient",),
    "client": ("Client",),
    "errors": ("ServerError",),
    "guide": ("Guide",),
    "lora": ("convert_lora", "load_lora"),
    "results": ("Adapter", "Completion", "Delta", "PerfMetrics", "Sequence", "TopLogProb"),
}
"""The names of this package, by the module that defines them."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
