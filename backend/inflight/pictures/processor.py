"""transformers' processor of a checkpoint, for pictures alone, without torchvision where that is possible."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import transformers
from transformers.models.auto import processing_auto

_TRANSFORMERS: Any = transformers
_PROCESSORS: Any = processing_auto
_LOCAL = {"trust_remote_code": False, "local_files_only": True}
_PIXTRAL = "transformers.models.pixtral"


def load_processor(folder: str, config: Any) -> Any:
    """Return the processor of a checkpoint with transformers' `config`, without its part for videos.

    Pictures are processed by PIL, not by torchvision, if transformers can do both: the results then do not
    depend on what is installed. transformers' parts for videos need torchvision.

    Raises:
        Exception: A file is missing or broken; transformers raises exceptions of many classes.
    """
    base: Any = _find_class(_class_name(config))

    class PictureProcessor(base):
        @classmethod
        def _get_arguments_from_pretrained(cls, *_args: Any, **_kwargs: Any) -> list[Any]:
            parts: dict[str, Any] = {
                "tokenizer": _TRANSFORMERS.AutoTokenizer.from_pretrained(folder, **_LOCAL),
                "image_processor": _load_image_processor(folder, config.model_type),
                "video_processor": None,
                "feature_extractor": None,
            }
            return [parts[name] for name in cls.get_attributes()]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            if argument is not None:
                base.check_argument_for_proper_class(self, argument_name, argument)

    PictureProcessor.__name__ = base.__name__
    return PictureProcessor.from_pretrained(folder, **_LOCAL)


def _load_image_processor(folder: str, model_type: str) -> Any:
    if model_type != "gemma4_unified":
        return _TRANSFORMERS.AutoImageProcessor.from_pretrained(folder, backend="pil", **_LOCAL)
    # transformers has no processor of this model with PIL. It merges patches of 16 x 16 pixels to larger ones,
    # which are those that Gemma 4's processor makes if they have this size from the beginning.
    gemma4: Any = importlib.import_module("transformers.models.gemma4.image_processing_pil_gemma4")
    processor = gemma4.Gemma4ImageProcessorPil.from_pretrained(folder, **_LOCAL)
    processor.patch_size *= processor.pooling_kernel_size
    processor.pooling_kernel_size = 1
    return processor


def _class_name(config: Any) -> str:
    if config.model_type == "llava" and config.vision_config.model_type == "pixtral":
        return "PixtralProcessor"
    return _PROCESSORS.PROCESSOR_MAPPING_NAMES[config.model_type]


def _find_class(name: str) -> Any:
    if name == "SmolVLMProcessor":
        # Its constructor wants a function of num2words, which is called for videos only.
        module: Any = importlib.import_module("transformers.models.smolvlm.processing_smolvlm")
        module.num2words = module.num2words or str
    if name == "PixtralProcessor" and importlib.util.find_spec("torchvision") is None:
        # Its module imports a function from a module that needs torchvision; PIL's module has the same function.
        pil = importlib.import_module(f"{_PIXTRAL}.image_processing_pil_pixtral")
        sys.modules.setdefault(f"{_PIXTRAL}.image_processing_pixtral", pil)
        return importlib.import_module(f"{_PIXTRAL}.processing_pixtral").PixtralProcessor
    return _PROCESSORS.processor_class_from_name(name)
