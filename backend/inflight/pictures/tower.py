"""A checkpoint's vision tower and projector, by transformers' model class, without the language model."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from inflight.core.request.adapter import Matrix, RawBuffer
from inflight.core.request.prompt_table import RotaryTable
from inflight.errors import ConfigError

_AUTO_MODEL: Any = transformers.AutoModelForImageTextToText
_TEXT_PARTS = ("language_model", "text_model", "lm_head")


class VisionTower:
    """The parts of a multimodal model that make rows from pictures, and its rotary embedding.

    Args:
        folder: The checkpoint.
        config: transformers' configuration of the checkpoint, which is changed.
        dtype: float32, float16 or bfloat16; None: as the checkpoint says.
        device: torch's name of the device that computes.

    Raises:
        ConfigError: The checkpoint lacks weights of these parts.
    """

    def __init__(self, folder: str, config: Any, dtype: str | None, device: str) -> None:
        _remove_language_model(config)
        with _quiet():
            model, report = _AUTO_MODEL.from_pretrained(
                folder,
                config=config,
                dtype=dtype or "auto",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
            )
        if missing := [name for name in sorted(report["missing_keys"]) if not _is_text(name)]:
            raise ConfigError(f"{folder} lacks {len(missing)} weights of the vision tower: {missing[0]}, …")
        self._model: Any = model.eval().to(device)
        self._inner: Any = self._model.model
        self._device = device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the rows."""
        return self._model.dtype

    @property
    def embedding_scale(self) -> float:
        """The factor by which the engine multiplies embeddings, and so the rows in their place."""
        return float(getattr(self._inner.get_input_embeddings(), "embed_scale", 1.0))

    @property
    def has_mrope(self) -> bool:
        """Whether the model has multimodal rotary embedding."""
        return hasattr(self._inner, "get_rope_index")

    def rows(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return the rows of all pictures, one after another, on the CPU.

        A row of a model with DeepStack has what is added after the first layers beside the embedding.

        Args:
            inputs: The processor's outputs for pictures, such as `pixel_values`.
        """
        features = self._model.get_image_features(
            **{name: self._moved(value) for name, value in inputs.items()}, return_dict=True
        )
        levels = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
        rows = torch.cat([_joined(level) for level in levels], dim=-1)
        return (rows / self.embedding_scale).to(self.dtype).cpu()

    def rotary(
        self, token_ids: Sequence[int], image_token_id: int, grids: Sequence[tuple[int, ...]]
    ) -> RotaryTable:
        """Return the rotary positions of a prompt.

        Args:
            token_ids: The prompt.
            image_token_id: The token in place of each row of a picture.
            grids: Numbers of patches of each picture: time, height, width.
        """
        ids = torch.tensor([token_ids])
        positions, delta = self._inner.get_rope_index(
            input_ids=ids,
            mm_token_type_ids=(ids == image_token_id).int(),
            image_grid_thw=torch.tensor(grids),
        )
        cos, sin = self._inner.language_model.rotary_emb.cpu()(torch.zeros(1), positions)
        num_angles = cos.shape[-1] // 2  # the second half repeats the first
        pairs = torch.stack([cos[0, :, :num_angles], sin[0, :, :num_angles]], dim=-1).flatten(1)
        return RotaryTable.of(to_matrix(pairs), int(delta), is_identified=True)

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self._device, self.dtype if value.is_floating_point() else None)


def to_matrix(tensor: torch.Tensor) -> Matrix:
    """Return a matrix with a copy of a two-dimensional tensor."""
    rows, columns = tensor.shape
    array: Any = tensor.contiguous().view(torch.uint8)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Matrix((rows, columns), dtype, RawBuffer(array.numpy().tobytes()))


def _joined(parts: Any) -> torch.Tensor:
    if isinstance(parts, torch.Tensor):
        return parts.flatten(0, -2)
    return torch.cat([part.flatten(0, -2) for part in parts])


def _remove_language_model(config: Any) -> None:
    """Change a configuration to that of a model without decoder layers and with a vocabulary of one token.

    The checkpoint's text part may be quantized; the tower's weights in such checkpoints are not.
    """
    text = config.get_text_config()
    for each in (config, text):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
        each.tie_word_embeddings = False  # transformers compares the tied weights, which are not loaded
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    for name in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if hasattr(text, name):
            setattr(text, name, 0)
    text.vocab_size = 1
    text.pad_token_id = None


def _is_text(name: str) -> bool:
    return any(part in _TEXT_PARTS for part in name.split("."))


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Silence transformers' progress bar, and its report that the language model's weights are not used."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
