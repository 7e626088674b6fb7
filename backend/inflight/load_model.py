"""Load a checkpoint, or one rank's part of it: an engine, its logits post-processors, and grammars for guides.

`build` adds scheduler, loop and front ends. Packages are imported lazily, inside functions, so that a
process that loads no model never imports torch, and a single rank never imports MPI. Called once, on the
thread that loads the model.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import platform
import sys
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.checkpoint_config import CheckpointFacts
from inflight.config import FP8, INT8
from inflight.engine_folder import is_engine_folder
from inflight.errors import ConfigError, Unsupported
from inflight.file_names import native
from inflight.gguf.header import LEVEL_TYPES
from inflight.interrupts import deferred
from inflight.processes import without_collection
from inflight.ranks.topology import Mapping

if TYPE_CHECKING:
    import torch

    from inflight.block_store import BlockMemory
    from inflight.checkpoint_config import ConfigFile
    from inflight.config import EngineConfig, Parameters
    from inflight.core.ports import Engine
    from inflight.engine.collectives import Collectives
    from inflight.engine.debug_tensors import DebugTensors
    from inflight.engine.load_options import KeptCache
    from inflight.engine.runner import ModelRunner
    from inflight.guided.grammars import Grammars
    from inflight.guided.vocabulary import GuideVocabulary
    from inflight.ranks.mpi import MpiStage
    from inflight.ranks.rank_context import Agreement, RankContext
    from inflight.sampling import LogitsPostProcessors

__all__ = ["LayerCode", "LoadModel", "LoadedModel", "MakeGrammars", "guide_vocabulary", "load_model"]

_DEMO_MODEL = "demo_model"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerCode:
    """The code that computes a model's layers.

    Attributes:
        kernels: The implementation: native, torch, transformers or tensorrt; "": unknown.
        device: Architecture of the processor, or name of the GPU.
        instruction_set: Target of compiled layers, or instruction set of torch's operators; "" on a GPU.
    """

    kernels: str = ""
    device: str = ""
    instruction_set: str = ""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded engine, and the facts of its checkpoint that front ends need.

    Attributes:
        engine: The engine, which the caller must close.
        model_path: Folder of the checkpoint; "": none.
        dtype: Dtype of the weights.
        eos_token_ids: The checkpoint's end ids.
        release: Function that releases the resources that the engine shares with other ranks. It must be
            called on all ranks at the same time, after the engine is closed.
        debug_tensors: The engine's debug tensors if it records any; with several ranks, this rank's.
        grammars: The grammars of guides, on rank 0 and on the rank that samples; None without a tokenizer.
        code: The code that computes the layers.
        block_memory: The blocks of the KV cache as bytes; None if they cannot be read and written.
        keep_cache: Function that takes the KV cache from the engine before this is closed, and returns a function
            that loads the same model with this cache; None: the engine's cache cannot be kept.
    """

    engine: Engine
    model_path: str
    dtype: str
    eos_token_ids: tuple[int, ...]
    release: Callable[[], None] = lambda: None
    debug_tensors: DebugTensors | None = None
    grammars: Grammars | None = None
    code: LayerCode = field(default_factory=LayerCode)
    block_memory: BlockMemory | None = None
    keep_cache: Callable[[], Callable[[], LoadedModel]] | None = None


MakeGrammars = Callable[[int], "Grammars | None"]
"""Function that makes the grammars for a vocabulary of the given size; it returns None without a tokenizer."""

LoadModel = Callable[["Parameters", str, "RankContext | None"], LoadedModel]
"""Function that loads a model, or one rank's part of it, like `load_model`. Its arguments are the
parameters, the Triton model's version folder and the rank's context."""


def load_model(
    parameters: Parameters,
    version_dir: str,
    rank_context: RankContext | None,
    processors: LogitsPostProcessors | None = None,
    vocabulary: GuideVocabulary | None = None,
) -> LoadedModel:
    """Load the checkpoint, or this rank's part of it.

    Args:
        parameters: The parameters from config.pbtxt.
        version_dir: The Triton model's version folder, which contains the demo model.
        rank_context: This rank's context if there are several ranks; None for the whole model.
        processors: Logits post-processors that requests may name; None: use the parameter
            `logits_post_processor_module`.
        vocabulary: The vocabulary of guides; None: the tokenizer's.

    Raises:
        ConfigError: The checkpoint cannot be loaded; with several ranks, all of them raise it.
    """
    path = parameters.engine.gpt_model_path or str(Path(version_dir) / _DEMO_MODEL)
    config = _settle_engine(parameters, path)
    path = str(config.gpt_model_path)
    _begin_compiling(config, path)
    _import_engine()

    def find_processors() -> LogitsPostProcessors:
        return _find_processors(processors, parameters.logits_post_processor_module)

    make_grammars = functools.cache(functools.partial(_make_grammars, parameters, path, vocabulary))
    if rank_context is None:
        Mapping(moe_ep_size=parameters.moe_expert_parallel_size)  # raises if several ranks are needed
        return _load_whole(config, path, parameters.gpu_device_ids, find_processors(), make_grammars)
    return _load_part(
        config,
        path,
        parameters.gpu_device_ids,
        rank_context,
        find_processors,
        lambda vocab_size: _set_up(make_grammars(vocab_size)),
    )


def _settle_engine(parameters: Parameters, path: str) -> EngineConfig:
    """Return the engine's configuration with `implementation` and `engine_dir` resolved."""
    config, scheduler = parameters.engine, parameters.scheduler
    shares_blocks = scheduler.enable_kv_cache_reuse or scheduler.max_beam_width != 1
    config = replace(config, gpt_model_path=path, shares_blocks=shares_blocks)
    is_plans = is_engine_folder(path)
    if config.implementation == "tensorrt" or (
        config.implementation is None and (config.engine_dir or is_plans)
    ):
        if config.engine_dir is not None and parameters.engine.gpt_model_path is None:
            config = replace(config, gpt_model_path=config.engine_dir)
        return replace(config, implementation="tensorrt")
    if config.engine_dir is not None or is_plans:
        raise ConfigError(
            f"engine is {config.implementation}, but {config.engine_dir or path} is a folder of plans, expected "
            "tensorrt or nothing"
        )
    return config


def import_for_good() -> None:
    """Import torch and the engine, and exempt their objects from garbage collection.

    Called at most once, before the engine is built, in a process that has no other engine: otherwise full
    collections visit a million objects while the engine is built. Objects that exist now are exempt too, and
    whatever they refer to later is never freed.
    """
    _import_engine()
    gc.freeze()


def _import_engine() -> None:
    """Import torch and the engine."""
    if "torch" not in sys.modules:
        with deferred(), without_collection():
            importlib.import_module("inflight.engine.load")


def _find_processors(given: LogitsPostProcessors | None, module: str | None) -> LogitsPostProcessors:
    from inflight.sampling.logits_post_processors import NO_POST_PROCESSORS, load_post_processors

    if module is None:
        return given or NO_POST_PROCESSORS
    if given is not None:
        raise ConfigError(
            f"logits_post_processor_module is {module!r}, but logits post-processors were also passed: expected "
            "one of the two"
        )
    found = load_post_processors(module)
    _log.info("logits post-processors of %s: %s", module, ", ".join(found.names))
    return found


def _make_grammars(
    parameters: Parameters, path: str, vocabulary: GuideVocabulary | None, vocab_size: int
) -> Grammars | None:
    """Return the grammars for a vocabulary of `vocab_size`, not set up yet; None without a tokenizer.json.

    Raises ConfigError if the grammar library is not installed.
    """
    from inflight.guided.grammars import GrammarLibrary, Grammars
    from inflight.guided.make_backend import check_installed, make_backend
    from inflight.guided.vocabulary import GuideVocabulary

    name, folder = parameters.guided_decoding_backend, parameters.tokenizer_dir or path
    if vocabulary is None and not (tokenizer_file := Path(native(folder)) / "tokenizer.json").is_file():
        _log.info("no guided decoding: %s does not exist", tokenizer_file)
        return None  # token ids can still be served
    check_installed(name)

    def set_up() -> GrammarLibrary:
        found = vocabulary or _read_vocabulary(folder)
        of_model = GuideVocabulary.of_size(vocab_size, found.tokens, found.special_ids)
        return GrammarLibrary(make_backend(name, of_model), of_model)

    return Grammars(set_up)


def _read_vocabulary(folder: str) -> GuideVocabulary:
    """Read the vocabulary of a tokenizer. Raises Unsupported if the tokenizer cannot be read."""
    from inflight.core.request.guide import NO_GUIDES
    from inflight.guided.vocabulary import GuideVocabulary
    from inflight.text.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.from_dir(folder)
    except ConfigError as error:  # token ids can still be served
        _log.info("no guided decoding: %s", error)
        raise Unsupported(*NO_GUIDES.args) from None
    return GuideVocabulary(tuple(tokenizer.token_bytes()), tokenizer.special_ids)


def _set_up(grammars: Grammars | None) -> Grammars | None:
    """Set up grammars at once, because the ranks, which wait for each other, must not wait for it later."""
    with contextlib.suppress(Unsupported):  # requests with guides will be refused
        if grammars is not None:
            grammars.library()
    return grammars


def _begin_compiling(config: EngineConfig, path: str) -> None:
    """Start compiling layers in the background while torch is imported, which takes seconds, too.

    Errors are reported when the model is loaded.
    """
    if (
        config.kernels == "torch"
        or config.drafts
        or config.implementation in ("transformers", "tensorrt")
        or Path("/dev/nvidiactl").exists()
    ):
        return
    from inflight.engine.cpu.library import begin_loading

    dtype = config.dtype
    if dtype is None:
        with contextlib.suppress(ConfigError):
            facts = CheckpointFacts.read(path)
            dtype, quantization = facts.dtype, facts.quantization
            if dtype != "float32" and quantization is not None and _keeps_integers(quantization):
                dtype = INT8  # the compiled code for int8 also handles groups of 4 and 8 bits
    if dtype is not None and dtype != FP8:
        is_rounded = config.kv_cache_dtype != "auto"
        begin_loading("bfloat16" if dtype == INT8 else dtype, dtype == INT8, is_rounded)


def _keeps_integers(quantization: ConfigFile) -> bool:
    """Return whether a checkpoint needs the compiled code for int8 and 4 bits, as far as config.json shows."""
    by_method = {
        "awq": True,
        "gptq": quantization.value("bits") == 4 or quantization.value("sym") is True,
        "gguf": not LEVEL_TYPES.isdisjoint(quantization.value("types") or ()),
        "modelopt": quantization.value("quant_algo") == "NVFP4",
    }
    formats = ("pack-quantized", "int-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized")
    is_integer = quantization.value("format") in formats
    return by_method.get(str(quantization.value("quant_method")), is_integer)


def _load_whole(
    config: EngineConfig,
    path: str,
    gpu_device_ids: tuple[int, ...],
    processors: LogitsPostProcessors,
    make_grammars: MakeGrammars,
    kept: KeptCache | None = None,
) -> LoadedModel:
    from inflight.engine.kv_cache import KvCache
    from inflight.engine.load import load_engine
    from inflight.engine.load_options import KeptCache

    if gpu_device_ids:
        import torch

        from inflight.ranks.topology import Placement, this_host

        device = Placement.of(0, [this_host()]).device(torch.cuda.device_count(), gpu_device_ids)
        config = replace(config, device=device)
    engine = load_engine(config, processors, make_grammars, kept)
    runner = engine.runner

    def keep_cache() -> Callable[[], LoadedModel]:
        assert isinstance(runner.cache, KvCache), "checked below"
        taken = KeptCache(runner.cache, runner.limits.num_adapter_pages)
        return lambda: _load_whole(config, path, (), processors, make_grammars, taken)

    return LoadedModel(
        engine,
        path,
        config.dtype or engine.dtype,
        engine.eos_token_ids,
        debug_tensors=runner.debug_tensors,
        grammars=make_grammars(engine.limits.vocab_size),
        code=_code_of(runner),
        block_memory=runner.cache.as_bytes(),
        keep_cache=keep_cache if isinstance(runner.cache, KvCache) else None,
    )


def _load_part(
    config: EngineConfig,
    path: str,
    gpu_device_ids: tuple[int, ...],
    rank_context: RankContext,
    find_processors: Callable[[], LogitsPostProcessors],
    make_grammars: MakeGrammars,
) -> LoadedModel:
    import torch

    from inflight.engine.collectives import make_stage_link
    from inflight.engine.engine import ModelEngine
    from inflight.engine.load import load_stage
    from inflight.ranks.mpi import MpiOutcomes, MpiStage, MpiStageLink
    from inflight.ranks.rank_engine import RankEngine
    from inflight.ranks.topology import Placement

    mapping, agreement = rank_context.mapping, rank_context.agreement
    with agreement.step():
        placement = Placement.of(mapping.rank, rank_context.hosts, config.engine_threads)
        device = placement.device(torch.cuda.device_count(), gpu_device_ids)
    with agreement.step():
        processors = find_processors()
        _check_same_names(processors.names, agreement)
    with agreement.step():
        stage_ranks = MpiStage(mapping)
        collectives, release = _connect(rank_context, stage_ranks, torch.device(device))
    with agreement.step():
        config = replace(
            config,
            device=device,
            engine_threads=placement.num_threads or config.engine_threads,
            ranks_on_host=placement.ranks_on_host,
        )
        stage = load_stage(config, mapping, collectives, agreement.least, processors, make_grammars)
        grammars = make_grammars(stage.limits.vocab_size) if mapping.rank == 0 else None
    dtype: torch.dtype = getattr(torch, stage.dtype)
    hidden = torch.empty(stage.decoder_config.stage_width, dtype=dtype, device=device)
    mpi_link = MpiStageLink(mapping)
    engine = RankEngine(
        stage,
        mapping,
        make_stage_link(mapping, mpi_link, hidden),
        mpi_link,
        MpiOutcomes(mapping.sampler),
        stage_ranks,
        rank_context.report_failure,
    )
    runner = stage.runner if isinstance(stage, ModelEngine) else stage
    return LoadedModel(
        engine,
        path,
        config.dtype or stage.dtype,
        stage.eos_token_ids,
        release,
        runner.debug_tensors,
        grammars,
        _code_of(runner),
        runner.cache.as_bytes(),
    )


def _code_of(runner: ModelRunner) -> LayerCode:
    import torch

    from inflight.engine.cpu.decoder import NativeDecoder

    if runner.cache.device.type != "cpu":
        return LayerCode(runner.kernels, torch.cuda.get_device_name(runner.cache.device))
    decoder = runner.decoder
    if isinstance(decoder, NativeDecoder):
        return LayerCode(runner.kernels, platform.machine(), decoder.instruction_set)
    return LayerCode(runner.kernels, platform.machine(), torch.backends.cpu.get_cpu_capability().lower())


def _check_same_names(names: tuple[str, ...], agreement: Agreement) -> None:
    """Raise ConfigError if another rank has other logits post-processors and would accept other requests."""
    digest = zlib.crc32("\0".join(names).encode())
    if agreement.least(digest) != digest:
        raise ConfigError(
            f"logits_post_processor_module: this rank has {list(names)}, and another rank has other names"
        )


def _connect(
    rank_context: RankContext, stage_ranks: MpiStage, device: torch.device
) -> tuple[Collectives, Callable[[], None]]:
    """Return the collectives of this rank's stage and a function that closes them. Must be called on all ranks."""
    from inflight.engine.collectives import MpiCollectives, TorchCollectives

    if device.type == "cpu":
        return MpiCollectives(stage_ranks), lambda: None
    addresses = rank_context.leader_addresses
    collectives = TorchCollectives(rank_context.world, rank_context.mapping, addresses, device)
    return collectives, collectives.leave


def guide_vocabulary(
    encoded_vocab: Sequence[str], tokenizer_str: str | None = None, stop_token_ids: Collection[int] = ()
) -> GuideVocabulary:
    """Return the vocabulary of TensorRT-LLM's `GuidedDecodingConfig`, for `load_model`.

    Args:
        encoded_vocab: Token strings by id, as the tokenizer spells them.
        tokenizer_str: Content of a tokenizer.json, which determines the bytes of each token; without it,
            these are the UTF-8 bytes of the token string.
        stop_token_ids: Ids of tokens that are not text.

    Raises:
        ConfigError: `tokenizer_str` is not a tokenizer.
    """
    from inflight.guided.vocabulary import GuideVocabulary

    if tokenizer_str is None:
        return GuideVocabulary(tuple(token.encode() for token in encoded_vocab), frozenset(stop_token_ids))
    import tokenizers

    from inflight.text.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer_str))
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"tokenizer_str is not a tokenizer: {error}") from error
    return GuideVocabulary(tuple(tokenizer.token_bytes()), tokenizer.special_ids.union(stop_token_ids))
