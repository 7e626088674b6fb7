"""The families of models: the meaning of each family's config.json, and the names of its tensors.

A new family is an entry in one of the tables, with a function that reads its config.json and the names of its
tensors. These functions return general components of decoders; no other code depends on families.
"""

from __future__ import annotations

from inflight.models.families.cohere import COHERE_FAMILIES
from inflight.models.families.deepseek import DEEPSEEK_FAMILIES
from inflight.models.families.ernie import ERNIE_FAMILIES
from inflight.models.families.falcon import FALCON_FAMILIES
from inflight.models.families.family import (
    Family,
    NoMap,
    WeightNames,
    bases_in_multimodal,
    heads_in_multimodal,
    names_in_multimodal,
)
from inflight.models.families.gemma import GEMMA_FAMILIES
from inflight.models.families.glm import GLM_FAMILIES
from inflight.models.families.gpt import GPT_FAMILIES
from inflight.models.families.gpt_oss import GPT_OSS
from inflight.models.families.granite import GRANITE_FAMILIES
from inflight.models.families.hunyuan import HUNYUAN_FAMILIES
from inflight.models.families.kimi import KIMI_LINEAR
from inflight.models.families.llama import FUSED_LLAMA_NAMES, LLAMA_FAMILIES
from inflight.models.families.llama4 import LLAMA4
from inflight.models.families.mamba import MAMBA_FAMILIES
from inflight.models.families.mixtures import MIXTURE_FAMILIES
from inflight.models.families.recurrent import RECURRENT_FAMILIES

FAMILIES: tuple[Family, ...] = (
    *LLAMA_FAMILIES,
    LLAMA4,
    *GRANITE_FAMILIES,
    *MIXTURE_FAMILIES,
    *DEEPSEEK_FAMILIES,
    *GLM_FAMILIES,
    *ERNIE_FAMILIES,
    *HUNYUAN_FAMILIES,
    GPT_OSS,
    *GEMMA_FAMILIES,
    *COHERE_FAMILIES,
    *RECURRENT_FAMILIES,
    *MAMBA_FAMILIES,
    KIMI_LINEAR,
    *GPT_FAMILIES,
    *FALCON_FAMILIES,
)

__all__ = [
    "FAMILIES",
    "FUSED_LLAMA_NAMES",
    "Family",
    "NoMap",
    "WeightNames",
    "bases_in_multimodal",
    "heads_in_multimodal",
    "names_in_multimodal",
]
