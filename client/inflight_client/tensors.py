"""Requests as tensors, and responses back from them.

Owns the names: the server's text models and id models call the same things differently. Knows nothing of
connections. Plain functions, any thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import InferInput, InferRequestedOutput, InferResult
from tritonclient.utils import np_to_triton_dtype

from inflight_client.results import Delta

TEXT_MODEL = "ensemble"
IDS_MODEL = "tensorrt_llm"
# Models that take a text too, under the names of the id models.
_ENGINE_MODELS = (IDS_MODEL, "tensorrt_llm_infer")

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class _Option:
    """A keyword of `generate` and `stream`, its tensor's name in either kind of model, and its type."""

    text_name: str
    ids_name: str
    dtype: type[np.generic]


_OPTIONS = {
    "max_tokens": _Option("max_tokens", "request_output_len", np.int32),
    "temperature": _Option("temperature", "temperature", np.float32),
    "top_k": _Option("top_k", "runtime_top_k", np.int32),
    "top_p": _Option("top_p", "runtime_top_p", np.float32),
    "seed": _Option("seed", "random_seed", np.uint64),
    "end_id": _Option("end_id", "end_id", np.int32),
}


@dataclass(frozen=True, eq=False)
class Call:
    """One request, ready to be sent; equal to itself only."""

    model: str
    request_id: str
    inputs: list[InferInput]
    outputs: list[InferRequestedOutput]


def generate_call(
    prompt: Prompt,
    streaming: bool,
    options: dict[str, float | None],
    model: str | None = None,
    request_id: str | None = None,
) -> Call:
    """The request for a completion of `prompt`.

    Raises:
        TypeError: An option is unknown.
        ValueError: A value does not fit its tensor.
    """
    as_text = isinstance(prompt, str)
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise TypeError(f"the prompt must be a text or a sequence of token ids, got {prompt!r}")
    text_names = as_text and model not in _ENGINE_MODELS
    inputs = [
        _tensor("text_input", [prompt.encode()], np.object_)
        if isinstance(prompt, str)
        else _tensor("input_ids", prompt, np.int32),
        _tensor("stream" if text_names else "streaming", [streaming], np.bool_),
        _tensor("exclude_input_in_output", [True], np.bool_),
    ]
    for name, value in options.items():
        option = _OPTIONS.get(name)
        if option is None:
            raise TypeError(f"unknown option {name!r}; there are {', '.join(_OPTIONS)}")
        if value is not None:
            inputs.append(_tensor(option.text_name if text_names else option.ids_name, [value], option.dtype))
    wanted = ("text_output",) if as_text else ("output_ids", "sequence_length")
    return Call(
        model=model or (TEXT_MODEL if as_text else IDS_MODEL),
        request_id=request_id or str(uuid.uuid4()),
        inputs=inputs,
        outputs=[InferRequestedOutput(name) for name in (*wanted, "finish_reason")],
    )


def stop_call(model: str, request_id: str) -> Call:
    """The request that ends another one, by its id."""
    return Call(
        model, request_id, [_tensor("stop", [True], np.bool_)], [InferRequestedOutput("finish_reason")]
    )


def delta_of(result: InferResult) -> Delta | None:
    """What a response adds; None if it carries nothing but the final flag."""
    text, ids, length, reason = (
        result.as_numpy(name) for name in ("text_output", "output_ids", "sequence_length", "finish_reason")
    )
    if reason is None:
        return None
    return Delta(
        text="" if text is None else text.reshape(-1)[0].decode(),
        token_ids=() if ids is None or length is None else _row(ids, int(length.reshape(-1)[0])),
        finish_reason=reason.reshape(-1)[0].decode(),
    )


def is_final(result: InferResult) -> bool:
    """Whether the server will say nothing more about the request."""
    return result.get_response().parameters["triton_final_response"].bool_param


def _row(ids: np.ndarray, length: int) -> tuple[int, ...]:
    return tuple(ids.reshape(-1)[:length].tolist())


def _tensor(name: str, values: Sequence[Any], dtype: type[np.generic]) -> InferInput:
    """A [1, n] input."""
    if issubclass(dtype, np.integer):
        limits = np.iinfo(dtype)
        for value in values:
            if not isinstance(value, (int, np.integer)):
                raise ValueError(
                    f"{name} must be {'integers' if len(values) > 1 else 'an integer'}, got {value!r}"
                )
            if not limits.min <= value <= limits.max:
                raise ValueError(f"{name} must be in [{limits.min}, {limits.max}], got {value}")
    array = np.array([values], dtype=dtype)
    tensor = InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor
