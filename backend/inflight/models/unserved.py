"""Types of models that no code here computes, neither this package nor transformers' over KV blocks, and why.

They are refused by config.json, before any weight is read. Other models that cannot be served are refused when
transformers' code is tried. Imports only the standard library; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping

from inflight.checkpoint_config import GEMMA4_HEADS, CheckpointFacts, ConfigFile
from inflight.errors import ConfigError

_INDEXER = "sparse attention by an indexer"
_STREAMS = f"hyper-connections, and {_INDEXER}"
_BLOCKS = "block-sparse attention by an indexer"
_MAMBA1 = "Mamba-1 layers"
_RELATIVE = "learned scores of relative positions"
_DRAFTS = (
    "the keys and values of the model for which it drafts tokens (take it as --draft-model beside that model)"
)
_PICTURES = "pictures among its tokens"
_SOUND = "several streams of sound tokens"

UNSERVED: Mapping[str, str] = {
    "axk2": _INDEXER,
    "blt": "patches of bytes in place of tokens",
    "bailing_hybrid": "its own variants of latent attention and Kimi Delta Attention",
    "deepseek_v32": _INDEXER,
    "deepseek_v4": _STREAMS,
    "dots3_note": _INDEXER,
    "dots3_note_text": _INDEXER,
    "emu3": _PICTURES,
    "falcon_mamba": _MAMBA1,
    "fuyu": _PICTURES,
    **dict.fromkeys(GEMMA4_HEADS, _DRAFTS),
    "glm5_next": _STREAMS,
    "glm_moe_dsa": _INDEXER,
    "hy_v4": _STREAMS,
    "hy_v4_vl": _STREAMS,
    "inkling2": _RELATIVE,
    "inkling2_loop": _RELATIVE,
    "inkling2_loop_text": _RELATIVE,
    "inkling2_text": _RELATIVE,
    "inkling_mm_model": _RELATIVE,
    "inkling_text": _RELATIVE,
    "jamba": _MAMBA1,
    "longcat_flash": "two attentions in a layer, and experts that return their input",
    "mamba": _MAMBA1,
    "mimo_v2_flash": "attention with sinks, and with keys and values of different widths",
    "minimax_m3_vl": _BLOCKS,
    "minimax_m3_vl_text": _BLOCKS,
    "mistral_large4": _INDEXER,
    "musicgen": _SOUND,
    "musicgen_melody": _SOUND,
    "qwen4_exp": _STREAMS,
    "qwen4_exp_text": _STREAMS,
    "zamba": _MAMBA1,
}
"""Components that models need and nothing here has, by config.json's `model_type`."""


def refuse_unserved(config: ConfigFile) -> None:
    """Raise ConfigError if no code here computes models of this type."""
    needed = UNSERVED.get(config.text_or_none("model_type") or "")
    if needed is not None:
        raise ConfigError(
            f"{config.path.parent} is {CheckpointFacts(config).name} (model_type "
            f"{config.values['model_type']!r}), which is not served: it needs {needed}; docs/models.md lists the "
            "families"
        )
