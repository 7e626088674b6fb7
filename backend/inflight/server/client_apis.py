"""The APIs that Triton's HTTP and gRPC ports offer to clients, as arguments for tritonserver.

A client that may load a model can run any code, because a load request can contain files, including
`model.py`. A client that may register shared memory can read and write all files in /dev/shm, including
those of the Python backend. A client that may change the settings of the log and of traces can write files
and suppress errors. A model's configuration names folders and sockets of this machine. Therefore these APIs
require a key. A model that reloads itself, such as the model of an orchestrator, uses tritonserver's API in
process, and needs no key.
"""

import re
import secrets
from dataclasses import dataclass

from inflight.server.errors import OptionError

CONTROL_KEY_VARIABLE = "INFLIGHT_CONTROL_KEY"
"""Environment variable with the operator's key."""

CONTROL_KEY_HEADER = "inflight-control-key"
"""HTTP header with the key. Over gRPC, its name is prefixed with `triton-grpc-protocol-`."""

# tritonserver takes a key only as an argument, which other users of the machine can read. If the operator
# sets no key, the name of the header begins with this, which contains a colon and a space: neither HTTP nor
# gRPC can send such a header, so that nobody can use the key. Triton's refusals show the name.
_UNSENDABLE_HEADER = "none: the server was started without "


@dataclass(frozen=True)
class ClientApis:
    """The operations that clients may use besides inference, health, metadata and statistics.

    Attributes:
        shared_memory: Whether clients may register shared memory and pass tensors in it.
        logging: Whether clients may read and change the settings of the log.
        trace: Whether clients may read and change the settings of traces.
        model_config: Whether clients may read the models' configurations, as perf_analyzer does before its
            first request.
        key: Key with which a request may do all of this, and load and unload models; None: no key is
            accepted.
    """

    shared_memory: bool = False
    logging: bool = False
    trace: bool = False
    model_config: bool = False
    key: str | None = None

    def __post_init__(self) -> None:
        if self.key is not None and not re.fullmatch("[!-~]+", self.key):
            raise OptionError(f"{CONTROL_KEY_VARIABLE}: expected a word of visible ASCII characters")

    def arguments(self) -> list[str]:
        """Return tritonserver's arguments that require the key for all APIs that clients may not use."""
        is_open = {
            "shared-memory": self.shared_memory,
            "logging": self.logging,
            "trace": self.trace,
            "model-config": self.model_config,
        }
        shut = ["model-repository", *(api for api, is_offered in is_open.items() if not is_offered)]
        header = CONTROL_KEY_HEADER
        if self.key is None:
            header = _UNSENDABLE_HEADER + ", ".join(
                ["--model-control", *(f"--allow-{api}" for api in shut[1:])]
            )
        restriction = f"{','.join(shut)}:{header}={self.key or secrets.token_hex(32)}"
        return [f"--http-restricted-api={restriction}", f"--grpc-restricted-protocol={restriction}"]
