"""What a front end must know of the engine behind it before it can check and build a request."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.core.request.request import ModelLimits


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """Sent once to every front end; constant while the engine lives.

    Attributes:
        limits: What requests may ask for.
        model_path: The checkpoint folder.
        tokenizer_dir: Folder with tokenizer.json, "" if there is none: then only ids are served.
        eos_token_ids: End ids of the checkpoint's generation_config.json (else config.json): where requests
            that come as text end, unless they say otherwise.
        default_end_ids: End ids of requests that come as ids and have no end_id; the specification's default
            is none.
        exclude_input_from_output: Server-wide default of the `exclude_input_in_output` tensor.
        dtype: Of the weights: float32, bfloat16, float16 or int8.
        state_enabled: Whether `state` requests are answered.
    """

    limits: ModelLimits
    model_path: str = ""
    tokenizer_dir: str = ""
    eos_token_ids: tuple[int, ...] = ()
    default_end_ids: tuple[int, ...] = ()
    exclude_input_from_output: bool = False
    dtype: str = "float32"
    state_enabled: bool = False
