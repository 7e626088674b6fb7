"""A text with pictures to `ensemble` or `tensorrt_llm_bls` on a gRPC stream, as its multimodal/client.py sends it.

For the models whose pictures the server processes; for others that program sends pixel values (`image_input`).
"""

from __future__ import annotations

import queue
from collections.abc import Sequence

import numpy as np
import tritonclient.grpc as grpc
from PIL import Image

from inflight.server.launch import TritonServer

from .wire import connect, flag, integer, real, requested, tensors, texts


def inputs_of(
    model_type: str,
    text: str,
    images: Sequence[Image.Image],
    output_len: int,
    end_id: int,
    prompt_table_extra_id: int | None,
) -> dict[str, np.ndarray]:
    """Return the tensors of a request; a model_type other than pixtral takes one picture."""
    arrays = {
        "text_input": texts(text),
        "max_tokens": integer(output_len),
        "beam_width": integer(1),
        "temperature": real(1.0),
        "end_id": integer(end_id),
        "pad_id": integer(1),
        "top_k": integer(1),
        "top_p": real(0.0),
        "stream": flag(True),
    }
    if model_type == "pixtral":
        arrays["image_bytes_input"], arrays["image_sizes_input"] = _padded(images)
    elif model_type == "qwen2_vl":
        (image,) = images
        arrays["image_bytes_input"] = np.array([[image.resize((504, 504))]])
    else:
        (image,) = images
        arrays["image_bytes_input"] = np.array([[image]])
    arrays["repetition_penalty"] = real(1.0)
    if prompt_table_extra_id is not None:
        arrays["prompt_table_extra_id"] = np.array([[prompt_table_extra_id]], np.uint64)
    return arrays


def _padded(images: Sequence[Image.Image]) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels [1, images, height, width, 3] of equal size, filled up with 0, and sizes [1, images, 2]."""
    arrays = [np.array(image) for image in images]
    sizes = np.array([array.shape[:2] for array in arrays], np.int64)
    height, width = sizes.max(axis=0)
    pixels = [
        np.pad(array, ((0, height - len(array)), (0, width - array.shape[1]), (0, 0))) for array in arrays
    ]
    return np.array([pixels]), sizes[None]


def run(
    server: TritonServer,
    model_type: str,
    text: str,
    images: Sequence[Image.Image],
    output_len: int,
    end_id: int = -1,
    use_bls: bool = False,
    prompt_table_extra_id: int | None = None,
) -> str:
    """Send one request and return the text of all its responses; raises an error response."""
    arrays = inputs_of(model_type, text, images, output_len, end_id, prompt_table_extra_id)
    received: queue.Queue = queue.Queue()
    with connect(server, "grpc") as client:
        client.start_stream(callback=lambda result, error: received.put(error or result))
        model = "tensorrt_llm_bls" if use_bls else "ensemble"
        client.async_stream_infer(model, tensors(grpc, arrays), outputs=requested(grpc, ["text_output"]))
        client.stop_stream(cancel_requests=False)
    parts = []
    while not received.empty():
        result = received.get()
        if isinstance(result, Exception):
            raise result
        parts.append(result.as_numpy("text_output")[0].decode())
    return "".join(parts)
