"""Stand-ins for the modules of NVIDIA Dynamo, which the tests' environment cannot have."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Record(SimpleNamespace):
    """A dataclass of Dynamo's: its arguments are its attributes."""


class FakeContext:
    """The context of a request."""

    def id(self) -> str:
        return "the-id"


EXCEPTIONS = ("InvalidArgument", "EngineShutdown", "Cancelled", "Unknown")


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the names that `inflight.dynamo.engine` imports from Dynamo importable."""
    exceptions = {name: type(name, (Exception,), {}) for name in EXCEPTIONS}
    modules: dict[str, dict[str, Any]] = {
        "dynamo.common.backend": {
            "EngineConfig": Record,
            "LLMEngine": type("LLMEngine", (), {}),
            "LlmRegistration": Record,
            "WorkerConfig": Record,
        },
        "dynamo.common.backend.health_check": {"build_health_check_payload": None},
        "dynamo.common.backend.publisher": {"ComponentSnapshot": Record, "ZmqSource": Record},
        "dynamo.common.backend.run": {"run": None},
        "dynamo.common.configuration.groups.runtime_args": {
            "DynamoRuntimeArgGroup": None,
            "DynamoRuntimeConfig": None,
        },
        "dynamo.common.utils.runtime": {"parse_endpoint": None},
        "dynamo.common.utils.token_ids": {"normalize_request_token_ids": lambda request: request},
        "dynamo.llm": {"exceptions": SimpleNamespace(**exceptions)},
    }
    for path, names in modules.items():
        module = ModuleType(path)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, path, module)
    for path in modules:
        parts = path.split(".")
        for end in range(1, len(parts)):
            parent = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
