"""Small random vision-language models of each family, with the files of their tokenizers and processors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers

from inflight.pictures.encoder import PictureEncoder
from tests.models.zoo_configs import CASES as TEXT_CASES
from tests.models.zoo_configs import COMMON
from tests.models.zoo_multimodal import MULTIMODAL, OTHER_PARTS

_IDEFICS = [
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]
_QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_LFM = [
    "<image>",
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2)),
]
_GEMMA = ["<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>"]
_GEMMA3 = ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]
_OF_GEMMAS = [f"{each}_token" for each in ("image", "boi", "eoi", "audio", "boa", "eoa")]
_SPECIAL = ["<pad>", "<s>", "</s>"]
_OTHERS = [
    *_QWEN,
    *_IDEFICS,
    *_LFM[1:],
    *_GEMMA,
    *_GEMMA3,
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<img>",
    "</img>",
]
_TOKENS = [*_SPECIAL, *_OTHERS, "<IMG_CONTEXT>", "<video>"]

_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_QWEN_TOWER: dict[str, Any] = {"depth": 4, "spatial_merge_size": 2}
_QWEN_PIXELS = {"patch_size": 4, "min_pixels": 8 * 8, "max_pixels": 32 * 32}
_TWO_TILES = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
_GEMMA4 = ("gemma4-vision", "gemma4-large", "gemma4-moe-vision")
_GEMMA4_TOWER = {
    "num_hidden_layers": 2,
    "pooling_kernel_size": 2,
    "patch_size": 4,
    "position_embedding_size": 64,
}
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2.5-vl": {**_QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3-vl": {**_QWEN_TOWER, "deepstack_visual_indexes": [0, 1, 2]},
    "qwen3-vl-moe": {**_QWEN_TOWER, "deepstack_visual_indexes": [0, 1, 2]},
    "qwen3.5-vision": _QWEN_TOWER,
    "qwen3.5-moe-vision": _QWEN_TOWER,
    "llava": {"image_size": 16, "num_hidden_layers": 2},
    "pixtral": {"model_type": "pixtral", "head_dim": 8, "image_size": 32, "num_hidden_layers": 2},
    "llava-next": {"image_size": 16, "num_hidden_layers": 2},
    "llava-onevision": _SIGLIP,
    "idefics3": _SIGLIP,
    "smolvlm": _SIGLIP,
    "internvl": {"image_size": [16, 16], "num_hidden_layers": 2},
    "gemma3-vision": {**_SIGLIP, "image_size": 32},
    **dict.fromkeys(_GEMMA4, _GEMMA4_TOWER),
    "gemma4-unified": {"pooling_kernel_size": 2, "mm_embed_dim": 64, "mm_posemb_size": 80},
}
_TOPS: dict[str, dict[str, Any]] = {
    "gemma3-vision": {"mm_tokens_per_image": 16},
    "mistral3": {"spatial_merge_size": 2},
    "pixtral": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    "llava-next": {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]},
    "llava-onevision": {"image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]]},
    "internvl": {"image_seq_length": 4},
}
PLACEHOLDERS = {
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "qwen": "<|image_pad|>",
    "mistral3": "[IMG]",
    "pixtral": "[IMG]",
    "internvl": "<IMG_CONTEXT>",
}
"""Placeholders of families whose placeholder is not <image>, by the beginning of the case's name."""

_GEMMA4_PIXELS = (
    {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2},
    {"image_seq_length": 70},
)
_QWEN_FILES = ("Qwen2VLImageProcessor", _QWEN_PIXELS, {})
_PROCESSORS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl": _QWEN_FILES,
    "qwen2.5-vl": _QWEN_FILES,
    "qwen3-vl": _QWEN_FILES,
    "qwen3-vl-moe": _QWEN_FILES,
    "qwen3.5-vision": _QWEN_FILES,
    "qwen3.5-moe-vision": _QWEN_FILES,
    "llava": (
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}},
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava-next": (
        "LlavaNextImageProcessor",
        {
            "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
            "image_grid_pinpoints": _TOPS["llava-next"]["image_grid_pinpoints"],
        },
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "mistral3": (
        "PixtralImageProcessor",
        {"size": {"longest_edge": 32}, "patch_size": 4},
        {"patch_size": 4, "spatial_merge_size": 2},
    ),
    "pixtral": (
        "PixtralImageProcessor",
        {"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}},
        {"processor_class": "PixtralProcessor", "patch_size": 4},
    ),
    "idefics3": ("Idefics3ImageProcessor", _TWO_TILES, {"image_seq_len": 4}),
    "smolvlm": ("SmolVLMImageProcessor", _TWO_TILES, {"image_seq_len": 4}),
    "internvl": (
        "GotOcr2ImageProcessor",
        {"size": {"height": 16, "width": 16}, "crop_to_patches": True},
        {"image_seq_length": 4},
    ),
    "gemma3-vision": (
        "Gemma3ImageProcessor",
        {"size": {"height": 32, "width": 32}, "image_seq_length": 16},
        {"image_seq_length": 16},
    ),
    **dict.fromkeys(_GEMMA4, ("Gemma4ImageProcessor", *_GEMMA4_PIXELS)),
    "gemma4-unified": ("Gemma4UnifiedImageProcessor", *_GEMMA4_PIXELS),
    "llava-onevision": (
        "LlavaOnevisionImageProcessor",
        {
            "size": {"height": 16, "width": 16},
            "image_grid_pinpoints": _TOPS["llava-onevision"]["image_grid_pinpoints"],
        },
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
}
_TIED = ("qwen3-vl", "gemma4-vision", "smolvlm")  # as small published models
_IN_ONE_FILE = (
    "qwen3.5-vision",
    "qwen3.5-moe-vision",
    "smolvlm",
    *_GEMMA4,
    "gemma4-unified",
)  # as transformers 5 saves processors
CASES = tuple(_PROCESSORS)
"""Names of the families."""


@dataclass(frozen=True)
class SmallModel:
    """A saved model of a case, with transformers' whole model and our encoder of it."""

    name: str
    folder: Path
    whole: Any
    encoder: PictureEncoder

    @property
    def place(self) -> str:
        """The text that stands for a picture."""
        return placeholder(self.name)


def placeholder(case: str) -> str:
    """Return the text that stands for a picture."""
    return next((text for name, text in PLACEHOLDERS.items() if case.startswith(name)), "<image>")


def picture(width: int, height: int, seed: int = 0, form: str = "PNG") -> bytes:
    """Return the file of a random picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def expected_tokens(
    whole: Any, processor: Any, text: str, files: Sequence[bytes], num_tokens: int
) -> list[int]:
    """Return the greedy tokens of transformers' whole model, by its own processor."""
    return _generated(whole, processor, text, files, num_tokens)[0]


def expected_beams(
    whole: Any, processor: Any, text: str, files: Sequence[bytes], num_tokens: int, width: int
) -> list[list[int]]:
    """Return the tokens of the beams of transformers' whole model, best first."""
    beams = {"num_beams": width, "num_return_sequences": width, "length_penalty": 0.0}
    return _generated(whole, processor, text, files, num_tokens, **beams)


def _generated(*prompt: Any, **options: Any) -> list[list[int]]:
    made, length = generate(*prompt, **options)
    return made.sequences[:, length:].tolist()


@torch.inference_mode()
def generate(
    whole: Any, processor: Any, text: str, files: Sequence[bytes], num_tokens: int, **options: Any
) -> tuple[Any, int]:
    """Return what transformers' `generate` returns, and the prompt's length in its sequences."""
    images = [Image.open(BytesIO(file)) for file in files]
    inputs = processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt")
    options |= {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "eos_token_id": None}
    if whole.config.model_type == "gemma4_unified":
        # With other caches transformers 5.24 lets pictures' tokens see each other in layers without a window too,
        # unlike its own create_masks_for_generate and its Gemma 4.
        options["cache_implementation"] = "static"
    made = whole.generate(**inputs, **options, do_sample=False, return_dict_in_generate=True)
    return made, inputs["input_ids"].shape[1]


def save_model(folder: Path, case: str) -> Any:
    """Save a model in `folder`; return it."""
    _save_tokenizer(folder, case)
    image_processor, pixels, processor = _PROCESSORS[case]
    pixels = {"image_processor_type": image_processor, **pixels}
    if case in _IN_ONE_FILE:
        processor = {"image_processor": pixels, "video_processor": {}, **processor}
    else:
        _write(folder / "preprocessor_config.json", pixels)
    if processor:
        _write(folder / "processor_config.json", processor)
    torch.manual_seed(0)
    config = _config(case)
    class_name = f"{type(config).__name__.removesuffix('Config')}ForConditionalGeneration"
    model = getattr(transformers, class_name)(config).eval()
    if case == "gemma3-vision":  # parameters that are 0 at first would hide mistakes
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    if case.startswith("gemma4"):  # transformers embeds a generated token of a picture as padding: none is
        torch.nn.init.zeros_(model.lm_head.weight[config.image_token_id])
    if case == "gemma4-unified":
        torch.nn.init.normal_(model.model.embed_vision.pos_embedding)
    model.save_pretrained(folder)
    return model


def _config(case: str) -> Any:
    ids = {token: at for at, token in enumerate(_TOKENS)}
    common = {**COMMON, "vocab_size": _backend().get_vocab_size()}
    image_token = "<image_soft_token>" if case == "gemma3-vision" else placeholder(case)
    tokens = {"image_token_id": ids[image_token], "tie_word_embeddings": case in _TIED}
    pixtral = ("Llava", "mistral", TEXT_CASES["mistral-no-window"][1])
    family, text_type, changes = pixtral if case == "pixtral" else MULTIMODAL[case]
    parts = {**OTHER_PARTS[family], **_TOPS.get(case, {}), **tokens}
    parts["vision_config"] = {**parts["vision_config"], **_TOWERS.get(case, {})}
    if case.startswith("qwen"):
        parts |= {"video_token_id": ids["<|video_pad|>"], "vision_start_token_id": ids["<|vision_start|>"]}
    if case in _GEMMA4:
        changes = {**changes, "vocab_size_per_layer_input": common["vocab_size"]}
    return getattr(transformers, f"{family}Config")(
        text_config={"model_type": text_type, **common, **changes}, **parts
    )


@cache
def _backend() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    result = tokenizers.Tokenizer(
        models.BPE({token: at for at, token in enumerate([*_TOKENS, *alphabet])}, [])
    )
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in _TOKENS])
    return result


def _save_tokenizer(folder: Path, case: str) -> None:
    own = {}
    if case == "internvl":
        own = {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        }
    if case.startswith("gemma"):
        own = dict(zip(_OF_GEMMAS, _GEMMA3 if case == "gemma3-vision" else _GEMMA))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_backend(),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=own,
    )
    tokenizer.save_pretrained(folder)


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values))
