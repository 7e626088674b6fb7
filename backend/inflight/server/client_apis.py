"""The APIs that Triton's HTTP and gRPC ports offer to clients, as arguments for tritonserver.

A client that may load a model may run code, because a load request can contain files, including `model.py`. A
client that may register shared memory may read and write any file in /dev/shm, including the Python
backend's. A client that may change the settings of the log and of traces can write files and suppress errors.
A model's configuration names folders and sockets of this machine. So these APIs require a key. A model that
reloads itself, such as the model of an orchestrator, asks tritonserver in process, and needs no key.
"""

import re
import secrets
from dataclasses import dataclass

from inflight.server.errors import OptionError

CONTROL_KEY_VARIABLE = "INFLIGHT_CONTROL_KEY"
"""Environment variable with the operator's key."""

CONTROL_KEY_HEADER = "inflight-control-key"
"""HTTP header that carries the key; over gRPC, its name is prefixed with `triton-grpc-protocol-`."""

# tritonserver takes a key only as an argument, which other users of the machine can read. So without an
# operator's key, the header's name contains a colon: neither HTTP nor gRPC can send such a header, and the
# key is of no use.
_UNSENDABLE_HEADER = "nobody:has-this-key"


@dataclass(frozen=True)
class ClientApis:
    """The operations that clients may use besides inference, health, metadata and statistics.

    Attributes:
        shared_memory: Register shared memory, and pass tensors in it.
        logging: Read and change the settings of the log.
        trace: Read and change the settings of traces.
        model_config: Read the models' configurations, as perf_analyzer does before its first request.
        key: Key that allows a request all of these, and loading and unloading models; None: no key is
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
        """Return the arguments for tritonserver that restrict the APIs that are not offered."""
        is_open = {
            "shared-memory": self.shared_memory,
            "logging": self.logging,
            "trace": self.trace,
            "model-config": self.model_config,
        }
        shut = ["model-repository", *(api for api, is_offered in is_open.items() if not is_offered)]
        header = _UNSENDABLE_HEADER if self.key is None else CONTROL_KEY_HEADER
        restriction = f"{','.join(shut)}:{header}={self.key or secrets.token_hex(32)}"
        return [f"--http-restricted-api={restriction}", f"--grpc-restricted-protocol={restriction}"]
