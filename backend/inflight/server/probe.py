"""What a running server says about itself over HTTP: ready or not, and how much it still has to do."""

import http.client
import re

# The engine's own count of requests, under TensorRT-LLM's name for it.
_IN_FLIGHT = re.compile(
    r'^nv_trt_llm_request_metrics\{[^}]*request_type="(?:active|waiting)"[^}]*\} (\S+)$', re.MULTILINE
)
_TIMEOUT_S = 5.0


def is_ready(address: str, http_port: int, metrics_port: int, models: tuple[str, ...]) -> bool:
    """Whether the server, each of its models and the metrics answer."""
    paths = ["/v2/health/ready", *(f"/v2/models/{model}/ready" for model in models)]
    if not all(_get(address, http_port, path) is not None for path in paths):
        return False
    return _get(address, metrics_port, "/metrics") is not None


def requests_in_flight(address: str, metrics_port: int) -> int | None:
    """How many requests wait or run in the engine; None where no model publishes it, or nobody answers."""
    counts = _IN_FLIGHT.findall(_get(address, metrics_port, "/metrics") or "")
    return int(sum(float(count) for count in counts)) if counts else None


def _get(address: str, port: int, path: str) -> str | None:
    """The body of an answer with status 200."""
    connection = http.client.HTTPConnection(address, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read().decode("utf-8", "replace") if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
