"""The APIs that Triton's HTTP and gRPC ports offer to clients, as arguments for tritonserver.

Whoever may load a model may run code, as a load can bring files, `model.py` among them. Whoever may register
shared memory may read and write any file in /dev/shm, the Python backend's too. Whoever may change the settings of
the log and of traces can write files and silence errors. A model's configuration names folders and sockets of this
machine. So these take a key. A model that has itself loaded again, as an orchestrator does, asks tritonserver in
process, and needs none.
"""

import re
import secrets
from dataclasses import dataclass

from inflight.server.errors import OptionError

CONTROL_KEY_VARIABLE = "INFLIGHT_CONTROL_KEY"
"""The environment variable that has the key of an operator."""

CONTROL_KEY_HEADER = "inflight-control-key"
"""The HTTP header that brings it; over gRPC `triton-grpc-protocol-` stands before the name."""

# tritonserver takes a key by its arguments alone, which others on the machine can read. Without an operator's key
# the header has a colon in its name. Neither HTTP nor gRPC can send such a header, so knowing the key is no help.
_UNSENDABLE_HEADER = "nobody:has-this-key"


@dataclass(frozen=True)
class ClientApis:
    """The operations that clients may use beside inference, health, metadata and statistics.

    Attributes:
        shared_memory: Pass tensors in shared memory that they register.
        logging: Read and change the settings of the log.
        trace: Read and change the settings of traces.
        model_config: Read the models' configurations, as perf_analyzer does before its first request.
        key: Opens all of these, and loading and unloading models, to requests that bring it; None: nobody has one.
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
        """The arguments for tritonserver that restrict what is not offered."""
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
