"""Give back the memory of an idle engine's model, and load the model again. Any thread except the loop thread."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inflight.errors import ConfigError, Unavailable
from inflight.serving.memory import return_free_memory

if TYPE_CHECKING:
    from inflight.block_store import BlockMemory
    from inflight.config import Parameters
    from inflight.core.ports import Engine
    from inflight.core.schedule.batch import EngineLimits
    from inflight.load_model import LayerCode, LoadedModel
    from inflight.receipts.model_files import ModelFiles


@dataclass(slots=True)
class ReloadedModel:
    """Implements `inflight.core.ports.ModelMemory`: the checkpoint's files are the copy of the weights.

    Attributes:
        limits: The engine's limits, which also apply to the model that is loaded again.
        code: The code that computes the layers, which has to stay the same, too.
        files: The model's files, as they were when the model was loaded.
        close_engine: Closes the loop's engine between two iterations. The argument says whether to remember what
            its KV cache contains.
        replace_engine: Gives the loop another engine.
        use_blocks: Gives the block store the KV cache of the model, or None while there is none.
        load_again: Loads the model.
        keep_cache: As in `LoadedModel`, for the model that is loaded now.
    """

    limits: EngineLimits
    code: LayerCode
    files: ModelFiles
    close_engine: Callable[[bool], None]
    replace_engine: Callable[[Engine], None]
    use_blocks: Callable[[BlockMemory | None], None]
    load_again: Callable[[], LoadedModel]
    keep_cache: Callable[[], Callable[[], LoadedModel]] | None
    _load_with_cache: Callable[[], LoadedModel] | None = None

    @property
    def can_keep_cache(self) -> bool:
        """Whether `release` can keep the KV cache."""
        return self.keep_cache is not None

    def release(self, keeps_cache: bool = False) -> None:
        """Close the engine, and return its memory to the device and the system. No request may be active.

        Args:
            keeps_cache: Whether to keep the KV cache for `load`, only if `can_keep_cache`. A later call without it
                returns the memory of a cache that was kept.
        """
        load_with_cache = self.keep_cache() if keeps_cache and self.keep_cache is not None else None
        self.close_engine(keeps_cache)
        self.use_blocks(None)
        self._load_with_cache = load_with_cache
        _return_memory()

    def load(self) -> None:
        """Load the model, and give the loop its engine. If that fails, return the memory again.

        Raises:
            ConfigError: The model cannot be loaded: its files have changed, or there is too little memory.
        """
        changed = self.files.changed()
        if changed:
            raise ConfigError(
                f"{changed} was changed while the engine slept: start the server again to serve the new files"
            )
        try:
            self._load()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they refer to the model
            _return_memory()
            raise

    def _load(self) -> None:
        model = (self._load_with_cache or self.load_again)()
        engine = model.engine
        if model.code != self.code:
            engine.close()
            raise ConfigError(f"the layers would be computed by {model.code}, and were by {self.code}")
        if not _fits(self.limits, engine.limits):
            engine.close()
            raise ConfigError(
                f"there is too little memory for what the engine had: {self.limits.num_blocks} KV blocks and "
                f"{self.limits.num_adapter_pages} pages of adapters, and now {engine.limits.num_blocks} and "
                f"{engine.limits.num_adapter_pages}"
            )
        try:
            self.replace_engine(engine)
        except Unavailable:  # the loop has ended meanwhile
            engine.close()
            raise
        self.use_blocks(model.block_memory)
        self.keep_cache, self._load_with_cache = model.keep_cache, None


def _return_memory() -> None:
    """Return the memory of objects that nobody uses to the device and the system."""
    _collect_all()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return_free_memory()


def _collect_all() -> None:
    """Collect garbage also among the objects that are exempt from collections, then exempt the remaining
    ones.

    The import of torch leaves garbage that refers to stack frames, and so to the model that was loaded in them.
    `load_model.import_for_good` exempts this garbage together with torch's objects, and
    `processes.exempt_from_collection` everything that exists once the model is loaded.
    """
    are_exempted = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if are_exempted:
        gc.freeze()


def with_same_memory(parameters: Parameters, limits: EngineLimits) -> Parameters:
    """Return the parameters with which a model gets as many KV blocks and pages of adapters as `limits` has, if
    there is memory."""
    engine = replace(
        parameters.engine,
        max_tokens_in_paged_kv_cache=limits.num_blocks * limits.tokens_per_block,
        kv_cache_free_gpu_mem_fraction=1.0,
        kv_cache_free_cpu_mem_fraction=1.0,
        kv_cache_host_memory_bytes=0,
        lora_cache_gpu_memory_fraction=1.0 if limits.num_adapter_pages else 0.0,
        max_adapter_pages=limits.num_adapter_pages,
    )
    return replace(parameters, engine=engine)


def _fits(old: EngineLimits, new: EngineLimits) -> bool:
    """Return whether a scheduler made for the limits `old` can use an engine with the limits `new`."""
    has_room = new.num_blocks >= old.num_blocks and new.num_adapter_pages >= old.num_adapter_pages
    counts = {"num_blocks": old.num_blocks, "num_adapter_pages": old.num_adapter_pages}
    return has_room and replace(new, **counts) == old
