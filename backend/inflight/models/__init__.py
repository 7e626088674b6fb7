"""Hugging Face checkpoint folders → one declarative DecoderConfig and its weights.

Reads and checks config.json, generation_config.json and *.safetensors. Independent of batches and attention:
`inflight.engine` runs the loaded model. Used by the loading thread only.
"""

from inflight.models.decoder_config import DecoderConfig
from inflight.models.decoder_weights import DecoderWeights, Layer, LayerWeights, Linear, Norm, PlainWeights
from inflight.models.families import FAMILIES
from inflight.models.registry import ModelDescription, read_model_description

__all__ = [
    "FAMILIES",
    "DecoderConfig",
    "DecoderWeights",
    "Layer",
    "LayerWeights",
    "Linear",
    "ModelDescription",
    "Norm",
    "PlainWeights",
    "read_model_description",
]
