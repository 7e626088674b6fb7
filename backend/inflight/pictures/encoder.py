"""Encodes the pictures of prompts with a checkpoint's vision tower, by transformers' own code. One thread."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from inflight.checkpoint_config import read_config_file
from inflight.config import SpecialTokens
from inflight.core.request.prompt_table import PromptTable
from inflight.errors import ConfigError, InflightError, InvalidArgument, Name, StepFailed, without_places
from inflight.file_names import native
from inflight.pictures.decode import bad_picture, read_pictures
from inflight.pictures.encoded_prompt import EncodedPrompt, PictureStats
from inflight.pictures.families import why_not
from inflight.pictures.picture_cache import EncodedPicture, PictureCache
from inflight.pictures.processor import load_processor
from inflight.pictures.tower import VisionTower, to_matrix
from inflight.text.text_encoder import TextEncoder
from inflight.text.tokenizer import Tokenizer

CACHE_BYTES = 1 << 30
"""Default of the maximum size of cached rows."""
_AUTO_CONFIG: Any = transformers.AutoConfig
_TEXT_OUTPUTS = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "text_replacement_offsets",
)
_GRID = "image_grid_thw"


class PictureEncoder:
    """Encodes pictures with the vision tower and the processor of a checkpoint.

    Args:
        folder: The checkpoint.
        dtype: Type of the tower's weights and the rows: float32, float16 or bfloat16; None: as the checkpoint
            says.
        device: torch's name of the device that computes.
        cache_bytes: Memory for embeddings of pictures, which are kept for further prompts with the same pictures.

    Attributes:
        placeholder: The text that stands for a picture in a prompt.

    Raises:
        ConfigError: Pictures of this model cannot be encoded, or a file is missing or broken.
    """

    def __init__(
        self, folder: str, dtype: str | None = None, device: str = "cpu", cache_bytes: int = CACHE_BYTES
    ) -> None:
        folder = native(folder)
        try:
            if (refusal := why_not(read_config_file(folder).values)) is not None:
                raise ConfigError(refusal)
            config = _AUTO_CONFIG.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            self._tokenizer = Tokenizer.from_dir(folder)
            self._processor = load_processor(folder, config)
            self._settings = self._digest_settings(folder, dtype)
            self._tower = VisionTower(folder, config, dtype, device)
        except InflightError:
            raise
        except Exception as error:  # transformers raises many classes
            raise ConfigError(f"pictures of {folder} cannot be encoded: {error}") from error
        self.placeholder: str = self._processor.image_token
        # As the chat templates of the Qwen models, which alone have mRoPE, write a picture.
        has_mrope = self._tower.has_mrope
        self._alone = f"<|vision_start|>{self.placeholder}<|vision_end|>" if has_mrope else self.placeholder
        # Gemma 3's placeholder is another token than those that stand for rows.
        self._image_token_id: int = config.image_token_id
        self._image_token: str = self._processor.tokenizer.convert_ids_to_tokens(config.image_token_id)
        self._cache = PictureCache(cache_bytes)
        self._num_encoded = self._num_hits = 0
        self._seconds = 0.0
        self._started_ns = time.time_ns()

    def encode(
        self,
        text: str,
        pictures: Sequence[bytes | memoryview],
        vocab_size: int,
        special_tokens: SpecialTokens | None = None,
    ) -> EncodedPrompt:
        """Return a prompt as token ids, in which virtual ids stand for the rows of its encoded pictures.

        Args:
            text: The prompt, with a placeholder for each picture.
            pictures: The pictures' files, in the order of the placeholders.
            vocab_size: The engine's vocabulary size: the ids of virtual tokens begin here.
            special_tokens: None: the text is a rendered chat, special tokens included. Otherwise it is a
                client's own text: this says whether special tokens are added, and the pictures precede a text
                without placeholders.

        Raises:
            InvalidArgument: The numbers of placeholders and pictures differ, a picture is invalid, one or all
                together have too many pixels, the text has a token that stands for a row, or the model cannot tell
                two pictures apart because nothing is between them.
        """
        if special_tokens is not None and self.placeholder not in text:
            text = self._alone * len(pictures) + text
        num_places = text.count(self.placeholder)
        if num_places != len(pictures) or not pictures:
            raise InvalidArgument(
                f"the prompt has {num_places} places for pictures ({self.placeholder}), but {len(pictures)} ",
                Name("pictures"),
            )
        if self._image_token != self.placeholder and self._image_token in text:
            raise InvalidArgument(f"the prompt has {self._image_token}, which stands for a row of a picture")
        if self._tower.has_mrope and self.placeholder * 2 in text:
            raise InvalidArgument("the prompt has two pictures without a token between them")
        with torch.inference_mode():
            added = special_tokens or SpecialTokens.LEFT_OUT
            return self._prompt(text, self._encoded(pictures), vocab_size, added)

    def stats(self) -> PictureStats:
        """Return counts since the start."""
        milliseconds = round(self._seconds * 1000, 3)
        return PictureStats(
            self._num_encoded, self._num_hits, milliseconds, self._cache.num_bytes, self._started_ns
        )

    def _prompt(
        self, text: str, pictures: Sequence[EncodedPicture], vocab_size: int, special_tokens: SpecialTokens
    ) -> EncodedPrompt:
        replacements = iter([each.replacement for each in pictures])
        whole_text = re.sub(re.escape(self.placeholder), lambda _: next(replacements), text)
        (encoded,) = TextEncoder(lambda: self._tokenizer, special_tokens).prompts([whole_text])
        ids = list(encoded)
        sizes = tuple(len(each.rows) for each in pictures)
        if ids.count(self._image_token_id) != sum(sizes):
            raise StepFailed(
                f"the tower made {sum(sizes)} rows for {ids.count(self._image_token_id)} tokens of pictures"
            )
        rotary = None
        if self._tower.has_mrope:
            rotary = self._tower.rotary(ids, self._image_token_id, [each.grid for each in pictures])
        row_ids = [row_id for each in pictures for row_id in each.extra_ids()]
        extra_ids, row = [0] * len(ids), 0
        for at, token_id in enumerate(ids):
            if token_id == self._image_token_id:
                ids[at], extra_ids[at] = vocab_size + row, row_ids[row]
                row += 1
        rows = to_matrix(torch.cat([each.rows for each in pictures]))
        table = PromptTable.of(rows, is_identified=True)
        return EncodedPrompt(tuple(ids), tuple(extra_ids), table, rotary, sizes)

    def _encoded(self, pictures: Sequence[bytes | memoryview]) -> list[EncodedPicture]:
        """Return the pictures, from the cache if they are there. A picture that occurs twice is encoded once."""
        digests = [blake2b(picture, digest_size=16, key=self._settings).digest() for picture in pictures]
        known = {digest: found for digest in digests if (found := self._cache.get(digest)) is not None}
        indices = {digest: digests.index(digest) for digest in digests if digest not in known}
        if indices:
            start = time.perf_counter()
            images = read_pictures({at: pictures[at] for at in indices.values()})
            new = [
                EncodedPicture(digest, *made) for digest, made in zip(indices, self._encode_images(images))
            ]
            self._cache.add(new)
            known.update((picture.digest, picture) for picture in new)
            self._seconds += time.perf_counter() - start
        self._num_encoded += len(indices)
        self._num_hits += len(pictures) - len(indices)
        return [known[digest] for digest in digests]

    def _encode_images(
        self, images: dict[int, Image.Image]
    ) -> list[tuple[torch.Tensor, str, tuple[int, ...]]]:
        """Return rows, replacement and grid of each image; the keys are their indices in the prompt."""
        inputs = self._process(images)
        (replaced,) = inputs["text_replacement_offsets"]
        replacements = [each["replacement"] for each in replaced]
        grids = inputs[_GRID].tolist() if _GRID in inputs else [()] * len(images)
        pixels = {key: inputs[key] for key in inputs if key not in _TEXT_OUTPUTS}
        sizes = [text.count(self._image_token) for text in replacements]
        if sizes == [1]:  # transformers' Mistral 3 cannot encode a single row
            rows = self._tower.rows({key: torch.cat([value, value]) for key, value in pixels.items()})[:1]
        else:
            rows = self._tower.rows(pixels)
        if len(rows) != sum(sizes):
            raise StepFailed(f"the tower made {len(rows)} rows for {sum(sizes)} tokens of pictures")
        return [
            (part.clone(), text, tuple(grid))  # a part of a larger tensor would keep all of it in memory
            for part, text, grid in zip(torch.split(rows, sizes), replacements, grids)
        ]

    def _process(self, images: dict[int, Image.Image]) -> Any:
        try:
            return self._processor(
                text=[self.placeholder * len(images)],
                images=list(images.values()),
                return_text_replacement_offsets=True,
                return_tensors="pt",
            )
        except ValueError as error:
            for at, image in images.items():
                if len(images) == 1:
                    reason = f"cannot be processed: {without_places(str(error))}"
                    raise bad_picture(at, reason) from error
                self._process({at: image})
            raise

    def _digest_settings(self, folder: str, dtype: str | None) -> bytes:
        """Return a digest of everything but its content that determines a picture's rows."""
        parts = (
            Path(folder, "config.json").read_text(encoding="utf-8"),
            json.dumps(self._processor.image_processor.to_dict(), sort_keys=True, default=str),
            str(dtype),
            transformers.__version__,
        )
        return blake2b("\0".join(parts).encode(), digest_size=16).digest()
