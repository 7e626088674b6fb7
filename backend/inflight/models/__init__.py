"""Hugging Face checkpoint folders → one declarative DecoderConfig and its weights.

Reads and checks config.json, generation_config.json and *.safetensors. Independent of batches and attention:
`inflight.engine` runs the loaded model. `registry` reads config.json without importing torch, also for the checks
before a server is started; the modules about weights are for the loading thread only.
"""

from inflight.models.decoder_config import DecoderConfig
from inflight.models.families import FAMILIES
from inflight.models.registry import ModelDescription, read_model_description

__all__ = [
    "FAMILIES",
    "DecoderConfig",
    "ModelDescription",
    "read_model_description",
]
