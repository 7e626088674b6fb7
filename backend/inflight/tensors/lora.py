"""Read the tensors that select one prompt's adapter, and the command in the tensor `lora_command`.

Checks which of these tensors can be combined. The adapter cache checks whether the adapter exists, and
whether its weights fit the model. Any thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from inflight.adapters.lora_tensors import lora_weights
from inflight.core.request.adapter import LoraRequest, LoraWeights
from inflight.core.request.adapter_command import AdapterAction, AdapterCommand
from inflight.errors import InvalidArgument, Name, Unsupported
from inflight.tensors.reader import TensorReader

_PEFT = "hf"
_LARGEST_TASK_ID = (1 << 64) - 1
_COMMANDS = {
    AdapterAction.LIST: frozenset[str](),
    AdapterAction.LOAD: frozenset({"name", "path", "replace"}),
    AdapterAction.UNLOAD: frozenset({"name", "task_id"}),
}
"""The keys that may accompany each command."""


def read_lora(reader: TensorReader) -> LoraRequest | None:
    """Return the adapter that a prompt asks for; None for the base model.

    Raises:
        InvalidArgument: The tensors cannot be combined; the message names them.
        Unsupported: The adapter's folder has a format other than PEFT's.
    """
    source = reader.text("lora_ckpt_source")
    if source and source != _PEFT:
        raise Unsupported(
            Name("lora_ckpt_source"), f" is {source!r}, expected {_PEFT!r}: adapters are PEFT folders here"
        )
    task_id, weights = reader.integer("lora_task_id"), _read_weights(reader)
    name, path = reader.text("lora_name") or "", reader.text("lora_path") or ""
    if weights is not None and path:
        raise InvalidArgument(
            Name("lora_path"), f" is {path!r} and ", Name("lora_weights"), " came too: send one of them"
        )
    if weights is not None and task_id is None:
        raise InvalidArgument(
            Name("lora_task_id"),
            " must be set for LoRA inference: ",
            Name("lora_weights"),
            " and ",
            Name("lora_config"),
            " are stored under it",
        )
    if path:  # name and id are only labels, as in TensorRT-LLM's LoRARequest
        return LoraRequest(path=path)
    if name and task_id is not None:
        raise InvalidArgument(
            Name("lora_name"),
            f" is {name!r} and ",
            Name(reader.shown_name("lora_task_id")),
            f" is {task_id}: they name different adapters, send one of them",
        )
    if name or task_id is not None:
        return LoraRequest(task_id, name, weights=weights)
    return None


def _read_weights(reader: TensorReader) -> LoraWeights | None:
    weights, config = reader.array("lora_weights"), reader.array("lora_config")
    if weights is None and config is None:
        return None
    if weights is None or config is None:
        present, absent = ("lora_config", "lora_weights")[:: 1 if weights is None else -1]
        raise InvalidArgument(
            "Request for LoRA inference must have both ",
            Name("lora_weights"),
            " and lora_keys: ",
            Name(present),
            " came without ",
            Name(absent),
        )
    return lora_weights(weights, config)


def read_adapter_command(rows: Sequence[TensorReader]) -> AdapterCommand:
    """Return the command in a request with `lora_command`; raise InvalidArgument if it is not valid."""
    first, *others = rows
    if others:
        raise InvalidArgument(Name("lora_command"), f" takes one command, got a batch of {1 + len(others)}")
    text = first.text("lora_command") or ""
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(text, f"is not JSON ({error})") from None
    if not isinstance(given, dict):
        raise _bad(text, "is not a JSON object")
    asked = cast(dict[str, Any], given)
    try:
        action = AdapterAction(asked.pop("command", None))
    except ValueError:
        raise _bad(text, "has no known command") from None
    if unknown := asked.keys() - _COMMANDS[action]:
        raise _bad(text, f"has {min(unknown)!r:.80}, which {action.value} does not take")
    replaces = asked.pop("replace", False)
    if not isinstance(replaces, bool):
        raise _bad(text, f"has replace {replaces!r:.80}, expected true or false")
    return _checked(AdapterCommand(action, **_fields(asked, text), replaces=replaces), text)


def _fields(given: dict[str, Any], text: str) -> dict[str, Any]:
    for key, value in given.items():
        if key == "task_id":
            if type(value) is not int or not 0 <= value <= _LARGEST_TASK_ID:
                raise _bad(text, f"has {key} {value!r:.80}, expected an integer in [0, {_LARGEST_TASK_ID}]")
        elif not isinstance(value, str) or not value:
            raise _bad(text, f"has {key} {value!r:.80}, expected a text")
    return given


def _checked(command: AdapterCommand, text: str) -> AdapterCommand:
    if command.action is AdapterAction.LOAD and not command.name:
        raise _bad(text, "has no name to load")
    if command.action is AdapterAction.UNLOAD and bool(command.name) == (command.task_id is not None):
        raise _bad(text, "must have either a name or a task_id")
    return command


def _bad(text: str, problem: str) -> InvalidArgument:
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    return InvalidArgument(
        Name("lora_command"),
        f' {problem}, expected {{"command": "list"}}, {{"command": "load", "name": …, "path": …}} or '
        f'{{"command": "unload", "name" or "task_id": …}}, got {shown}',
    )
