"""Checks whether the Hugging Face hub can be reached, with the client that downloads checkpoints. One thread."""

from __future__ import annotations

import queue
import threading
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

from inflight.doctor.finding import Finding, green, yellow
from inflight.hub import without_credentials

_TIMEOUT_S, _PATIENCE_S = 3.0, 5.0  # of the request alone, and with looking up the host's name
_PROXY_REFUSES, _SERVER_FAILS = 407, 500


def check_hub() -> Iterator[Finding]:
    """Report whether the hub answers, and through which proxy it is asked."""
    from huggingface_hub import constants

    name, endpoint = "hub", without_credentials(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        yield green(name, "not asked, as HF_HUB_OFFLINE is set: models are folders, or in the hub's cache")
        return
    proxy = _proxy(endpoint)
    through = f" through the proxy {proxy}" if proxy else ""
    answer = _ask(constants.ENDPOINT)
    if isinstance(answer, int) and answer < _SERVER_FAILS and answer != _PROXY_REFUSES:
        yield green(name, f"{endpoint} answers{through}")
        return
    reason = f"status {answer}" if isinstance(answer, int) else without_credentials(answer)
    says = f"{endpoint} cannot be reached{through} ({reason}): no model can be fetched by its name"
    settings = "HTTPS_PROXY and NO_PROXY" if proxy else "the network, or set HTTPS_PROXY if it has a proxy"
    yield yellow(name, says, f"check {settings}; without a network, set HF_HUB_OFFLINE=1 and serve a folder")


def _ask(endpoint: str) -> int | str:
    """Return the status of the hub's answer, or why there is none.

    The request runs on a thread of its own, because looking up a name may take longer than any timeout.
    """
    answers: queue.SimpleQueue[int | str] = queue.SimpleQueue()

    def ask() -> None:
        from huggingface_hub.utils import get_session

        try:
            answers.put(get_session().head(endpoint, timeout=_TIMEOUT_S).status_code)
        except Exception as error:  # of the HTTP library, which depends on the version of huggingface_hub
            answers.put(next(iter(str(error).splitlines()), "") or type(error).__name__)

    threading.Thread(target=ask, name="ask-the-hub", daemon=True).start()
    try:
        return answers.get(timeout=_PATIENCE_S)
    except queue.Empty:
        return f"no answer within {_PATIENCE_S:.0f} s"


def _proxy(url: str) -> str | None:
    """Return the host and port of the proxy for a URL, without user and password; None if it needs no proxy."""
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    found = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    return f"{found.hostname}:{found.port}" if found.port else found.hostname
