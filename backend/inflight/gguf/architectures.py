"""The supported architectures of GGUF files, and what llama.cpp's converter changes in their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inflight.errors import ConfigError
from inflight.gguf.header import GgufHeader


@dataclass(frozen=True, slots=True)
class Architecture:
    """How llama.cpp's converter writes a family of models.

    Attributes:
        model_type: The family's `model_type` in config.json.
        class_name: The family's class in `architectures` of config.json.
        is_permuted: Whether the file stores the two rows of each rotary pair of a query or key head next to
            each other. Hugging Face checkpoints store all first rows, then all second rows.
        norm_offset: Number that llama.cpp's converter added to norm weights, and that must be subtracted.
        has_tiled_values: Whether the value heads of recurrent layers are stored so that those of one key head are
            not adjacent. Hugging Face checkpoints store them next to each other.
    """

    model_type: str
    class_name: str
    is_permuted: bool = False
    norm_offset: float = 0.0
    has_tiled_values: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", is_permuted=True),
    "llama4": Architecture("llama4_text", "Llama4ForCausalLM"),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen2vl": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3vlmoe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM"),
    "phi3": Architecture("phi3", "Phi3ForCausalLM"),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", norm_offset=1.0),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3next": Architecture("qwen3_next", "Qwen3NextForCausalLM", norm_offset=1.0),
    "qwen35": Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", norm_offset=1.0, has_tiled_values=True),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", norm_offset=1.0, has_tiled_values=True
    ),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM"),
    "gemma3n": Architecture("gemma3n_text", "Gemma3nForCausalLM"),
    "gemma4": Architecture("gemma4_text", "Gemma4ForCausalLM"),
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM"),
    "lfm2moe": Architecture("lfm2_moe", "Lfm2MoeForCausalLM"),
    "granite": Architecture("granite", "GraniteForCausalLM", is_permuted=True),
    "granitehybrid": Architecture("granitemoehybrid", "GraniteMoeHybridForCausalLM", is_permuted=True),
    "nemotron_h": Architecture("nemotron_h", "NemotronHForCausalLM", is_permuted=True),
    "nemotron_h_moe": Architecture("nemotron_h", "NemotronHForCausalLM", is_permuted=True),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", is_permuted=True),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM"),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM"),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM"),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", is_permuted=True),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM"),
    "glm4": Architecture("glm4", "Glm4ForCausalLM"),
    "glm4moe": Architecture("glm4_moe", "Glm4MoeForCausalLM"),
    "deepseek2": Architecture("deepseek_v3", "DeepseekV3ForCausalLM"),
    "kimi-linear": Architecture("kimi_linear", "KimiLinearForCausalLM"),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM"),
    "arcee": Architecture("arcee", "ArceeForCausalLM", is_permuted=True),
    "apertus": Architecture("apertus", "ApertusForCausalLM"),
    "falcon-h1": Architecture("falcon_h1", "FalconH1ForCausalLM"),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM"),
    "ernie4_5-moe": Architecture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    "minimax-m2": Architecture("minimax_m2", "MiniMaxM2ForCausalLM"),
    "starcoder2": Architecture("starcoder2", "Starcoder2ForCausalLM"),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM"),
}


def find_architecture(header: GgufHeader) -> Architecture:
    """Return the architecture of a file; raise ConfigError if it is not supported."""
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise ConfigError(
            f"{header.path}: key 'general.architecture' is {header.architecture!r}, expected one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    return found
