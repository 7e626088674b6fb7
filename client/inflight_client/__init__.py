"""A client for the server: text or token ids in, one answer or a stream of deltas out.

    >>> client = Client("localhost:8001")
    >>> client.generate("def main():", max_tokens=20).text
    >>> for delta in client.stream([10, 11, 12], max_tokens=20):
    ...     print(delta.token_ids)

Needs tritonclient and numpy, and nothing of the server's code.
"""

from inflight_client.aio import AsyncClient
from inflight_client.client import Client
from inflight_client.errors import ServerError
from inflight_client.results import Completion, Delta

__all__ = ["AsyncClient", "Client", "Completion", "Delta", "ServerError"]
