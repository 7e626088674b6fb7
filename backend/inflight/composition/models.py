"""A checkpoint, or the fake in its place, as an engine: all of it, or one rank's part.

Imports torch and MPI only where they are needed. On the thread that loads the model.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.composition.settings import parse_fake
from inflight.errors import ConfigError
from inflight.file_names import native

if TYPE_CHECKING:
    import torch

    from inflight.config import Parameters
    from inflight.core.ports import Engine
    from inflight.engine.torch import TorchEngine, TorchEngineConfig
    from inflight.engine.torch.collectives import Collectives
    from inflight.ranks.mpi import MpiStage
    from inflight.ranks.rank_context import RankContext

DEMO_MODEL = "demo_model"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine, and what its checkpoint says to front ends.

    Attributes:
        engine: Closed by whoever runs it.
        model_path: The checkpoint; "" for none.
        dtype: Of the weights.
        eos_token_ids: Ids that end a sequence, by the checkpoint.
        release: Ends what the engine shares with other ranks, on all of them at the same time, once it is closed.
    """

    engine: Engine
    model_path: str
    dtype: str
    eos_token_ids: tuple[int, ...]
    release: Callable[[], None] = lambda: None


def load(parameters: Parameters, version_dir: str, rank_context: RankContext | None) -> LoadedModel:
    """What `rank_context` is to have of the model, or all of it. Raises ConfigError: of several ranks, all do."""
    if not parameters.fake_engine:
        _begin_compiling(parameters, version_dir)
    if rank_context is None:
        model = load_fake(parameters) if parameters.fake_engine else _load_whole(parameters, version_dir)
        _check_end_ids(parameters, model)
        return model
    # Of fake engines, each rank's makes up the same tokens.
    model = (
        load_fake(parameters) if parameters.fake_engine else _load_part(parameters, version_dir, rank_context)
    )
    _check_end_ids(parameters, model)
    rank_context.has_loaded()
    return model


def _check_end_ids(parameters: Parameters, model: LoadedModel) -> None:
    """Raise ConfigError for a default end id that the vocabulary does not have: on all ranks, or on none."""
    vocab_size = model.engine.limits.vocab_size
    for end_id in parameters.default_end_ids:
        if end_id >= vocab_size:
            raise ConfigError(
                f"default_end_ids has {end_id}, expected token ids in [0, {vocab_size - 1}], the vocabulary"
            )


def _begin_compiling(parameters: Parameters, version_dir: str) -> None:
    """Compile while torch is imported, which takes seconds too. What is wrong, the load itself will say."""
    if parameters.kernels == "torch" or Path("/dev/nvidiactl").exists():
        return
    from inflight.engine.torch.native.library import begin_loading

    dtype = parameters.dtype
    if dtype is None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            config = json.loads(
                (Path(native(_model_path(parameters, version_dir))) / "config.json").read_bytes()
            )
            dtype = config.get("torch_dtype", config.get("dtype"))
    if isinstance(dtype, str):
        begin_loading("bfloat16" if dtype == "int8" else dtype, dtype == "int8")


def load_fake(parameters: Parameters) -> LoadedModel:
    """An engine without a model, for tests and for measuring everything around a forward pass."""
    from inflight.core.schedule.batch import EngineLimits
    from inflight.testing.fake_engine import FakeEngine

    vocab_size, step_us = parse_fake(parameters.fake_engine or "")
    max_sequence_length = parameters.max_sequence_length or 4096
    size = parameters.tokens_per_block
    num_tokens = parameters.max_tokens_in_paged_kv_cache or parameters.max_num_sequences * max_sequence_length
    limits = EngineLimits(
        vocab_size,
        max_sequence_length,
        parameters.max_num_sequences,
        max(1, num_tokens // size),
        size,
        parameters.pipeline_parallel_size,
    )
    _log.warning("fake_engine is set: tokens are made up, no model is loaded")
    return LoadedModel(FakeEngine(limits, step_us * 1e-6, attend_to_all=False), "", "none", ())


def _load_whole(parameters: Parameters, version_dir: str) -> LoadedModel:
    from inflight.engine.torch import TorchEngine

    device = None
    if parameters.gpu_device_ids:
        import torch

        from inflight.ranks.topology import Placement, this_host

        device = Placement.of(0, [this_host()]).device(torch.cuda.device_count(), parameters.gpu_device_ids)
    engine = TorchEngine.load(_engine_config(parameters, version_dir, device))
    return _loaded(parameters, version_dir, engine, engine)


def _load_part(parameters: Parameters, version_dir: str, rank_context: RankContext) -> LoadedModel:
    import torch

    from inflight.engine.torch import TorchEngine
    from inflight.engine.torch.collectives import make_stage_link
    from inflight.ranks.mpi import MpiOutcomes, MpiStage, MpiStageLink
    from inflight.ranks.rank_engine import RankEngine
    from inflight.ranks.topology import Placement

    mapping, agreement = rank_context.mapping, rank_context.agreement
    with agreement.step():
        placement = Placement.of(mapping.rank, rank_context.hosts, parameters.engine_threads)
        device = placement.device(torch.cuda.device_count(), parameters.gpu_device_ids)
    with agreement.step():
        stage_ranks = MpiStage(mapping)
        collectives, release = _connect(rank_context, stage_ranks, torch.device(device))
    with agreement.step():
        config = _engine_config(
            parameters, version_dir, device, placement.num_threads, placement.ranks_on_host
        )
        stage = TorchEngine.load(config, mapping, collectives, agreement.least)
    dtype: torch.dtype = getattr(torch, stage.dtype)
    hidden = torch.empty(stage.decoder_config.hidden_size, dtype=dtype, device=device)
    link = make_stage_link(mapping, MpiStageLink(mapping), hidden)
    outcomes = MpiOutcomes(mapping.sampler)
    engine = RankEngine(stage, mapping, link, outcomes, stage_ranks, rank_context.report_failure)
    return _loaded(parameters, version_dir, stage, engine, release)


def _connect(
    rank_context: RankContext, stage_ranks: MpiStage, device: torch.device
) -> tuple[Collectives, Callable[[], None]]:
    """The collectives of this rank's stage, and what ends them. Every rank calls this at the same time."""
    from inflight.engine.torch.collectives import MpiCollectives, TorchCollectives

    if device.type == "cpu":
        return MpiCollectives(stage_ranks), lambda: None
    addresses = rank_context.leader_addresses
    collectives = TorchCollectives(rank_context.world, rank_context.mapping, addresses, device)
    return collectives, collectives.leave


def _loaded(
    parameters: Parameters,
    version_dir: str,
    stage: TorchEngine,
    engine: Engine,
    release: Callable[[], None] = lambda: None,
) -> LoadedModel:
    # A checkpoint may name an end id that its vocabulary does not have: no request can ever produce it.
    end_ids = tuple(token_id for token_id in stage.eos_token_ids if token_id < stage.limits.vocab_size)
    dtype = parameters.dtype or stage.dtype
    return LoadedModel(engine, _model_path(parameters, version_dir), dtype, end_ids, release)


def _model_path(parameters: Parameters, version_dir: str) -> str:
    return parameters.gpt_model_path or str(Path(version_dir) / DEMO_MODEL)


def _engine_config(
    parameters: Parameters,
    version_dir: str,
    device: str | None,
    num_threads: int | None = None,
    ranks_on_host: int = 1,
) -> TorchEngineConfig:
    from inflight.engine.torch import TorchEngineConfig

    return TorchEngineConfig(
        model_path=_model_path(parameters, version_dir),
        dtype=parameters.dtype,
        kernels=parameters.kernels,
        cuda_graphs=parameters.cuda_graph_mode,
        device=device,
        max_num_sequences=parameters.max_num_sequences,
        max_num_tokens=parameters.max_num_tokens,
        max_sequence_length=parameters.max_sequence_length,
        tokens_per_block=parameters.tokens_per_block,
        max_tokens_in_paged_kv_cache=parameters.max_tokens_in_paged_kv_cache,
        kv_cache_free_gpu_mem_fraction=parameters.kv_cache_free_gpu_mem_fraction,
        kv_cache_free_cpu_mem_fraction=parameters.kv_cache_free_cpu_mem_fraction,
        num_threads=num_threads or parameters.engine_threads,
        attention_windows=parameters.max_attention_window_size,
        sink_token_length=parameters.sink_token_length,
        normalize_log_probs=parameters.normalize_log_probs,
        ranks_on_host=ranks_on_host,
    )
