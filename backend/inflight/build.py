"""Composition root: parameters → engine, scheduler, GptManager, client and endpoint, wired together.

The only code that knows every part. Imports the parts lazily, inside functions, so that a front end that never
builds an engine never imports torch, and one rank alone no MPI. Called once, on the thread that loads the model.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.config import INT8
from inflight.errors import ConfigError
from inflight.file_names import native

if TYPE_CHECKING:
    import torch

    from inflight.batch_manager import GptManager
    from inflight.batch_manager.instruments import Instruments
    from inflight.config import EngineConfig, Parameters
    from inflight.core.ports import (
        Engine,
        GetInferenceRequestsCallback,
        ReturnMetricsCallback,
        WaitUntilSent,
    )
    from inflight.core.request.request import EngineDescription, Request
    from inflight.core.schedule.batch import EngineLimits
    from inflight.decoding import LogitsPostProcessors
    from inflight.endpoint.local import LocalEngineClient
    from inflight.endpoint.server import EndpointServer
    from inflight.endpoint.supervision import Supervision
    from inflight.engine.debug_tensors import DebugTensors, DebugTensorsPerIteration
    from inflight.engine.torch.collectives import Collectives
    from inflight.errors import InflightError
    from inflight.guided.compiler import ChildCompiler
    from inflight.guided.grammars import Grammars
    from inflight.guided.vocabulary import GuideVocabulary
    from inflight.ranks.mpi import MpiStage
    from inflight.ranks.rank_context import Agreement, RankContext

__all__ = [
    "UNLOAD_TIMEOUT_S",
    "LoadModel",
    "FollowingRank",
    "LoadedModel",
    "RunningEngine",
    "build_engine",
    "check_parameters",
    "guide_vocabulary",
    "follow",
    "load_model",
    "start_engine",
    "start_following",
]

UNLOAD_TIMEOUT_S = 10.0
"""How long requests of other models' clients may go on; Triton lets those of this one finish before it unloads."""
_LOOP_END_S = 2.0  # for a loop that has nothing left to do
_DEMO_MODEL = "demo_model"
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
        debug_tensors: The engine's, if it writes any down; of several ranks this one's.
        grammars: What follows guides, at rank 0 and at the rank that chooses tokens; None without a tokenizer.
    """

    engine: Engine
    model_path: str
    dtype: str
    eos_token_ids: tuple[int, ...]
    release: Callable[[], None] = lambda: None
    debug_tensors: DebugTensors | None = None
    grammars: Grammars | None = None


MakeGrammars = Callable[[int], "Grammars | None"]
"""Takes the size of a vocabulary; makes what follows guides in it."""

LoadModel = Callable[["Parameters", str, "RankContext | None"], LoadedModel]
"""Loads all of a model, or one rank's part of it: takes the parameters, the Triton model's version folder and the
rank's context, as `load_model` does."""


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A loaded model that takes requests.

    Attributes:
        client: For front ends in this process.
    """

    client: LocalEngineClient
    _manager: GptManager
    _release: Callable[[], None]
    _guides: ChildCompiler | None = None
    _debug_tensors: DebugTensors | None = None
    _endpoint: EndpointServer | None = None
    _closing: threading.Lock = field(default_factory=threading.Lock)

    def latest_debug_tensors(self) -> list[DebugTensorsPerIteration]:
        """The debug tensors of the last iterations since the last call, oldest first. Any thread.

        At most debug_tensors_max_iterations of them, none without that parameter; of several ranks this one's.
        """
        return [] if self._debug_tensors is None else self._debug_tensors.latest()

    def close(self, timeout_s: float = UNLOAD_TIMEOUT_S) -> bool:
        """Take no more requests, finish or end those in flight, end every thread, free the device. Idempotent.

        Any thread but the loop's. Takes `timeout_s` seconds at most, and up to seven more where the device hangs.
        The other ranks, if there are any, end too.

        Args:
            timeout_s: How long requests in flight may go on before they are ended with UNAVAILABLE.

        Returns:
            Whether the generation loop has ended. If not, it hangs in the device; every request is answered all
            the same, but the thread and the device's memory stay until the process ends.
        """
        with self._closing:
            try:
                self.client.drain(timeout_s, "the model is being unloaded")
                has_ended = self._manager.shutdown(_LOOP_END_S)
                if has_ended:
                    self._release()
                return has_ended
            finally:
                self.client.close()
                if self._endpoint is not None:
                    self._endpoint.close()  # it sends on what has been answered
                if self._guides is not None:
                    self._guides.close()

    def fail(self, error: InflightError) -> None:
        """Answer everything with `error`, in other processes too, although the loop may hang; any thread but its.

        The process is of no further use then.
        """
        self.client.fail_all(error)
        if self._endpoint is not None:
            self._endpoint.close()


def check_parameters(parameters: Parameters) -> None:
    """Raise ConfigError where these parameters do not go together, whatever the checkpoint is.

    For whoever has to give something up before an engine can be built.
    """
    parameters.scheduler.validate(parameters.engine.max_num_sequences, parameters.engine.tokens_per_block)


# ---------------------------------------------------------------------- models


def load_model(
    parameters: Parameters,
    version_dir: str,
    rank_context: RankContext | None,
    processors: LogitsPostProcessors | None = None,
    vocabulary: GuideVocabulary | None = None,
) -> LoadedModel:
    """Load the checkpoint, or the part of it that is this rank's.

    Args:
        parameters: What config.pbtxt says.
        version_dir: The Triton model's version folder; the demo model lies in it.
        rank_context: Of this rank among several; None for all of the model.
        processors: Logits post-processors that requests may name; None for those of the parameter
            `logits_post_processor_module`.
        vocabulary: What guides are followed in; None: that of the tokenizer.

    Raises:
        ConfigError: It cannot be loaded; of several ranks, all raise.
    """
    path = parameters.engine.gpt_model_path or str(Path(version_dir) / _DEMO_MODEL)
    config = replace(parameters.engine, gpt_model_path=path)
    _begin_compiling(config, path)

    def find_processors() -> LogitsPostProcessors:
        return _find_processors(processors, parameters.logits_post_processor_module)

    make_grammars = functools.cache(functools.partial(_make_grammars, parameters, path, vocabulary))
    if rank_context is None:
        return _load_whole(config, path, parameters.gpu_device_ids, find_processors(), make_grammars)
    return _load_part(config, path, parameters.gpu_device_ids, rank_context, find_processors, make_grammars)


def _find_processors(given: LogitsPostProcessors | None, module: str | None) -> LogitsPostProcessors:
    from inflight.decoding.logits_post_processors import NO_POST_PROCESSORS, load_post_processors

    if module is None:
        return given or NO_POST_PROCESSORS
    if given is not None:
        raise ConfigError(
            f"logits_post_processor_module is {module!r}, but logits post-processors came as values too: expected "
            "one of the two"
        )
    found = load_post_processors(module)
    _log.info("logits post-processors of %s: %s", module, ", ".join(found.names))
    return found


def _make_grammars(
    parameters: Parameters, path: str, vocabulary: GuideVocabulary | None, vocab_size: int
) -> Grammars | None:
    """What follows guides in a vocabulary of that size; None without a tokenizer."""
    from inflight.guided.backend import make_backend
    from inflight.guided.grammars import Grammars
    from inflight.guided.vocabulary import GuideVocabulary

    if vocabulary is None:
        from inflight.text.tokenizer import Tokenizer

        try:
            tokenizer = Tokenizer.from_dir(parameters.tokenizer_dir or path)
        except ConfigError as error:  # ids alone can be served without one
            _log.info("no guided decoding: %s", error)
            return None
        vocabulary = GuideVocabulary(tuple(tokenizer.token_bytes()), tokenizer.special_ids)
    vocabulary = GuideVocabulary.of_size(vocab_size, vocabulary.tokens, vocabulary.special_ids)
    return Grammars(make_backend(parameters.guided_decoding_backend, vocabulary), vocabulary)


def _begin_compiling(config: EngineConfig, path: str) -> None:
    """Compile while torch is imported, which takes seconds too. What is wrong, the load itself will say."""
    if config.kernels == "torch" or Path("/dev/nvidiactl").exists():
        return
    from inflight.engine.torch.native.library import begin_loading

    dtype = config.dtype
    if dtype is None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            checkpoint = json.loads((Path(native(path)) / "config.json").read_bytes())
            dtype = checkpoint.get("torch_dtype", checkpoint.get("dtype"))
    if isinstance(dtype, str):
        begin_loading("bfloat16" if dtype == INT8 else dtype, dtype == INT8)


def guide_vocabulary(
    encoded_vocab: Sequence[str], tokenizer_str: str | None = None, stop_token_ids: Collection[int] = ()
) -> GuideVocabulary:
    """The vocabulary of TensorRT-LLM's `GuidedDecodingConfig`, for `load_model`.

    Args:
        encoded_vocab: Tokens by id, as the tokenizer writes them.
        tokenizer_str: The content of a tokenizer.json, which says what bytes tokens stand for; without it they
            stand for their own UTF-8.
        stop_token_ids: Tokens that are no text.

    Raises:
        ConfigError: `tokenizer_str` is no tokenizer.
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


def _load_whole(
    config: EngineConfig,
    path: str,
    gpu_device_ids: tuple[int, ...],
    processors: LogitsPostProcessors,
    make_grammars: MakeGrammars,
) -> LoadedModel:
    from inflight.engine.torch import TorchEngine

    if gpu_device_ids:
        import torch

        from inflight.ranks.topology import Placement, this_host

        device = Placement.of(0, [this_host()]).device(torch.cuda.device_count(), gpu_device_ids)
        config = replace(config, device=device)
    engine = TorchEngine.load(config, processors, make_grammars)
    return LoadedModel(
        engine,
        path,
        config.dtype or engine.dtype,
        engine.eos_token_ids,
        debug_tensors=engine.runner.debug_tensors,
        grammars=make_grammars(engine.limits.vocab_size),
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

    from inflight.engine.torch import TorchEngine, load_stage
    from inflight.engine.torch.collectives import make_stage_link
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
    hidden = torch.empty(stage.decoder_config.hidden_size, dtype=dtype, device=device)
    link = make_stage_link(mapping, MpiStageLink(mapping), hidden)
    engine = RankEngine(
        stage, mapping, link, MpiOutcomes(mapping.sampler), stage_ranks, rank_context.report_failure
    )
    runner = stage.runner if isinstance(stage, TorchEngine) else stage
    return LoadedModel(
        engine,
        path,
        config.dtype or stage.dtype,
        stage.eos_token_ids,
        release,
        runner.debug_tensors,
        grammars,
    )


def _check_same_names(names: tuple[str, ...], agreement: Agreement) -> None:
    """Raise ConfigError where another rank has other logits post-processors: it would refuse other requests."""
    digest = zlib.crc32("\0".join(names).encode())
    if agreement.least(digest) != digest:
        raise ConfigError(
            f"logits_post_processor_module: this rank has {list(names)}, and another rank has other names"
        )


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


def _load_checked(
    load: LoadModel, parameters: Parameters, version_dir: str, rank_context: RankContext | None
) -> LoadedModel:
    """The model, whose vocabulary has the default end ids: on all ranks, or ConfigError on all."""
    model = load(parameters, version_dir, rank_context)
    vocab_size = model.engine.limits.vocab_size
    for end_id in parameters.default_end_ids:
        if end_id >= vocab_size:
            raise ConfigError(
                f"default_end_ids has {end_id}, expected token ids in [0, {vocab_size - 1}], the vocabulary"
            )
    if rank_context is not None:
        rank_context.has_loaded()
    return model


# ---------------------------------------------------------------------- the rank that faces clients


def build_engine(
    parameters: Parameters,
    version_dir: str,
    endpoint_path: str,
    return_metrics: ReturnMetricsCallback | None = None,
    rank_context: RankContext | None = None,
    supervision: Supervision | None = None,
    load: LoadModel = load_model,
) -> RunningEngine:
    """Load the model and start serving it, to other processes too; with several ranks, on rank 0.

    Args:
        parameters: What config.pbtxt says.
        version_dir: The Triton model's version folder; the demo model lies in it.
        endpoint_path: Unix socket for front ends in other processes.
        return_metrics: As `start_engine` has it; so are `rank_context` and `load`.
        supervision: For an engine whose life another process decides about.

    Raises:
        ConfigError: what is wrong, by parameter or file.
    """
    from inflight.endpoint.server import EndpointServer

    engine = start_engine(parameters, version_dir, return_metrics, rank_context, load)
    retire = supervision.retire if supervision else lambda timeout_s: running.close(timeout_s)
    try:
        endpoint = EndpointServer(engine.client, endpoint_path, engine.client.drain, retire, supervision)
    except Exception:
        engine.close(0.0)
        raise
    running = replace(engine, _endpoint=endpoint)
    return running


def start_engine(
    parameters: Parameters,
    version_dir: str,
    return_metrics: ReturnMetricsCallback | None = None,
    rank_context: RankContext | None = None,
    load: LoadModel = load_model,
) -> RunningEngine:
    """Load the model and start the loop, for this process alone; with several ranks, on rank 0.

    Args:
        parameters: What config.pbtxt says.
        version_dir: The Triton model's version folder; the demo model lies in it.
        return_metrics: Takes statistics and metrics, at most once in `stats_check_period_ms`.
        rank_context: Rank 0's among several ranks; the others call `follow` meanwhile. Left when the engine is
            closed in order; where this raises, the caller leaves it.
        load: What makes the engine; of several ranks each gives its own. `functools.partial(load_model, …)` gives
            it logits post-processors or a vocabulary as values.

    Raises:
        ConfigError: what is wrong, by parameter or file.
    """
    from inflight.batch_manager import GptManager
    from inflight.core.scheduler import Scheduler
    from inflight.endpoint.local import LocalEngineClient

    model = _load_checked(load, parameters, version_dir, rank_context)
    limits = model.engine.limits
    scheduler = Scheduler(parameters.scheduler, limits)
    instruments = _make_instruments(parameters, limits, return_metrics)
    client = LocalEngineClient(
        _describe(parameters, model),
        lambda: manager.notify(),
        (lambda timeout_s: manager.state(timeout_s)) if parameters.enable_state_requests else None,
        instruments.reports,
    )
    guides = _make_guide_compiler(parameters, model, lambda: manager.notify())
    manager = GptManager(
        model.engine,
        scheduler,
        _counting_iterations(client.get_inference_requests, rank_context),
        client.send_response,
        client.poll_stop_signals,
        stats_period_ns=parameters.stats_check_period_ms * 1_000_000,
        on_death=_tell_of_death(client, rank_context),
        instruments=instruments,
        ranks=None if rank_context is None else rank_context.ranks,
        wait_until_sent=_wait_until_sent(client, limits.takes_all_processors, rank_context),
        guides=guides,
    )
    return RunningEngine(client, manager, _release_once(model, rank_context), guides, model.debug_tensors)


def _make_guide_compiler(
    parameters: Parameters, model: LoadedModel, notify: Callable[[], None]
) -> ChildCompiler | None:
    """What has guides compiled beside the loop; None without a tokenizer."""
    if model.grammars is None:
        return None
    from inflight.guided.compiler import ChildCompiler, GuideBounds

    bounds = GuideBounds(
        parameters.guided_decoding_max_guide_bytes, parameters.guided_decoding_compile_timeout_ms / 1000
    )
    return ChildCompiler(model.grammars, parameters.guided_decoding_backend, bounds, notify)


def _describe(parameters: Parameters, model: LoadedModel) -> EngineDescription:
    """What front ends are told."""
    from inflight.core.request.request import EngineDescription

    limits = model.engine.limits
    beside_weights = Path(native(model.model_path)) / "tokenizer.json"
    found = model.model_path if model.model_path and beside_weights.is_file() else ""
    return EngineDescription(
        limits=limits.model_limits(parameters.scheduler),
        model_path=model.model_path,
        tokenizer_dir=parameters.tokenizer_dir or found,
        # A checkpoint may name an end id that its vocabulary does not have: no request can ever produce it.
        eos_token_ids=tuple(token_id for token_id in model.eos_token_ids if token_id < limits.vocab_size),
        default_end_ids=parameters.default_end_ids,
        exclude_input_from_output=bool(parameters.exclude_input_in_output),
        dtype=model.dtype,
        state_enabled=parameters.enable_state_requests,
    )


def _make_instruments(
    parameters: Parameters, limits: EngineLimits, return_metrics: ReturnMetricsCallback | None
) -> Instruments:
    from inflight.batch_manager.instruments import Instruments, StatisticsRings, Watchdog
    from inflight.batch_manager.kv_event_buffer import KvEventBuffer
    from inflight.batch_manager.recording import JsonRecorder
    from inflight.serving.memory import measure_memory

    timeout_ms, path = parameters.watchdog_timeout_ms, parameters.record_path
    num_events = parameters.scheduler.kv_event_buffer_size
    return Instruments(
        recorder=JsonRecorder(path, parameters.scheduler, limits) if path else None,
        watchdog=Watchdog(timeout_ms / 1000) if timeout_ms else None,
        rings=StatisticsRings(parameters.iter_stats_max_iterations, parameters.request_stats_max_iterations),
        kv_events=KvEventBuffer(num_events) if num_events else None,
        return_metrics=return_metrics,
        measure_memory=measure_memory,
    )


def _counting_iterations(
    get_inference_requests: GetInferenceRequestsCallback, rank_context: RankContext | None
) -> GetInferenceRequestsCallback:
    """The callback that begins an iteration, which the heartbeat wants to know of."""
    if rank_context is None:
        return get_inference_requests

    def get(max_num: int) -> Sequence[Request]:
        rank_context.ranks.advance()
        return get_inference_requests(max_num)

    return get


def _wait_until_sent(
    client: LocalEngineClient, takes_all_processors: bool, rank_context: RankContext | None
) -> WaitUntilSent | None:
    """What lets responses be sent between iterations, where the model would take the processors from the senders.

    None with several ranks: the others wait for this one in a broadcast, on processors that senders would need.
    """
    return client.wait_until_sent if takes_all_processors and rank_context is None else None


def _tell_of_death(
    client: LocalEngineClient, rank_context: RankContext | None
) -> Callable[[InflightError], None]:
    """What is to be done when the loop has died: nobody may wait for it, neither clients nor ranks."""

    def tell(error: InflightError) -> None:
        client.fail_all(error)
        if rank_context is not None:
            rank_context.report_dead_loop()

    return tell


def _release_once(model: LoadedModel, rank_context: RankContext | None) -> Callable[[], None]:
    """What ends this rank's ties to the others; later calls do nothing."""
    steps = [] if rank_context is None else [model.release, rank_context.leave]

    def release() -> None:
        while steps:
            steps.pop(0)()

    return release


# ---------------------------------------------------------------------- the other ranks


@dataclass(frozen=True, slots=True)
class FollowingRank:
    """A rank other than 0, whose loop does what rank 0's does."""

    _manager: GptManager
    _release: Callable[[], None]
    _deaths: Sequence[InflightError]

    def wait(self) -> bool:
        """Wait for rank 0's end; returns whether that was in order. All ranks have left then."""
        self._manager.join()
        if self._deaths:
            return False
        self._manager.shutdown()
        self._release()
        return True


def start_following(
    parameters: Parameters, version_dir: str, rank_context: RankContext, load: LoadModel = load_model
) -> FollowingRank:
    """Load a part of the model on a rank other than 0, and start its loop; rank 0 calls `start_engine` meanwhile.

    Raises ConfigError, on all ranks, if the model cannot be loaded.
    """
    from inflight.batch_manager import GptManager
    from inflight.batch_manager.instruments import Instruments, Watchdog
    from inflight.core.scheduler import Scheduler

    model = _load_checked(load, parameters, version_dir, rank_context)
    deaths: list[InflightError] = []
    timeout_ms = parameters.watchdog_timeout_ms
    manager = GptManager(
        model.engine,
        Scheduler(parameters.scheduler, model.engine.limits),
        lambda max_num: (),
        lambda response: None,
        on_death=deaths.append,
        instruments=Instruments(watchdog=Watchdog(timeout_ms / 1000) if timeout_ms else None),
        ranks=rank_context.ranks,
    )
    return FollowingRank(manager, _release_once(model, rank_context), deaths)


def follow(
    parameters: Parameters, version_dir: str, rank_context: RankContext, load: LoadModel = load_model
) -> bool:
    """Run a rank other than 0, from its load to rank 0's end.

    Returns whether that was in order; all ranks have left then.

    Raises ConfigError, on all ranks, if the model cannot be loaded.
    """
    return start_following(parameters, version_dir, rank_context, load).wait()
