"""The process beside the server that serves OpenAI's protocol: `python -m inflight.openai`.

It listens before the engine exists, and connects to the engine when the engine listens; so it is started while
the models load, and keeps running when an engine is unloaded.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from inflight.openai.options import API_KEYS_VARIABLE, OpenAiOptions, to_arguments
from inflight.server.kept_process import KeptProcess


class OpenAiProcess(KeptProcess):
    """The process of an OpenAI endpoint.

    Args:
        options: Options of the endpoint; its port must be free.
        find_sockets: Function that returns the paths of the engines' sockets; None while they are not known.
        folder: The server's folder.
        exit_timeout_s: How many seconds requests in flight may continue at the end.
        echo: Stream for the process's output.
    """

    def __init__(
        self,
        options: OpenAiOptions,
        find_sockets: Callable[[], Sequence[Path] | None],
        folder: Path,
        exit_timeout_s: int,
        echo: TextIO | None,
    ) -> None:
        super().__init__("the OpenAI endpoint", folder, echo)
        self._options = options
        self._find_sockets = find_sockets
        self._exit_timeout_s = exit_timeout_s

    @property
    def url(self) -> str:
        """The URL at which clients reach the endpoint, without the path /v1."""
        scheme = "http" if self._options.tls_certificate is None else "https"
        return f"{scheme}://{self._options.host}:{self._options.port}"

    def _arguments(self) -> tuple[str, ...] | None:
        engines = self._find_sockets()
        if engines is None:
            return None
        sockets = (part for engine in engines for part in ("--engine-endpoint", str(engine)))
        place = (*sockets, "--exit-timeout", str(self._exit_timeout_s))
        key_file = ("--api-key-file", "/dev/stdin") if self._options.api_keys else ()
        return ("-m", "inflight.openai", *place, *to_arguments(self._options), *key_file)

    def _secret(self) -> str:
        # Passed by a pipe, because other users can read a command line or an environment.
        return "\n".join(self._options.api_keys)

    def _environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name != API_KEYS_VARIABLE}
