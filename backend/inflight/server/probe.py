"""What a running server says about itself over HTTP: ready or not."""

import http.client

_TIMEOUT_S = 5.0


def is_ready(address: str, http_port: int, metrics_port: int, models: tuple[str, ...]) -> bool:
    """Whether the server, each of its models and the metrics answer."""
    paths = ["/v2/health/ready", *(f"/v2/models/{model}/ready" for model in models)]
    asked = [*((http_port, path) for path in paths), (metrics_port, "/metrics")]
    return all(_answers(address, port, path) for port, path in asked)


def _answers(address: str, port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(address, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
