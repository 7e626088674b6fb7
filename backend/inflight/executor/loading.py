"""Load a model with objects of this process: logits post-processors, and a vocabulary for guides.

Ranks that an orchestrator starts are other processes and cannot use such objects.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from inflight.core.request.handle import RequestHandle
from inflight.errors import ConfigError
from inflight.executor.config import ExecutorConfig, GuidedDecodingConfig, LogitsPostProcessorConfig
from inflight.executor.convert import OWN_POST_PROCESSOR_NAME
from inflight.executor.enums import CommunicationMode
from inflight.executor.errors import InvalidValue, NotSupported
from inflight.load_model import LoadModel, guide_vocabulary, load_model
from inflight.ranks.launch import num_ranks_around

if TYPE_CHECKING:
    from inflight.guided.vocabulary import GuideVocabulary


class OwnPostProcessors:
    """A logits post-processor that calls the callable `Request.logits_post_processor` of each request. Any thread.

    An engine gets its post-processors when it starts; this object is one of them. It stores the callables of
    requests by request id.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[int, tuple[Callable[..., Any], bool]] = {}

    def submit(self, process: Callable[..., Any], submit: Callable[[], RequestHandle]) -> RequestHandle:
        """Submit a request and store its callable, before the engine can call it; return the request's handle."""
        has_client_id = has_client_id_argument(process)
        with self._lock:
            handle = submit()
            self._by_id[handle.request_id] = process, has_client_id
        return handle

    def forget(self, request_id: int) -> None:
        """Remove the callable of a request that has ended."""
        with self._lock:
            self._by_id.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._by_id)

    def __call__(self, request_id: int, logits: Any, token_ids: Any, stream: int, client_id: Any) -> Any:
        """Call the request's callable. Runs on the loop's thread, as every logits post-processor."""
        with self._lock:
            process, has_client_id = self._by_id[request_id]
        return process(request_id, logits, token_ids, stream, *([client_id] if has_client_id else []))


def has_client_id_argument(process: Callable[..., Any]) -> bool:
    """Return whether a callable takes five arguments instead of four; raise InvalidValue for any other number."""
    from inflight.sampling.logits_post_processors import takes_client_id

    try:
        return takes_client_id("Request.logits_post_processor", process)
    except ConfigError as error:
        raise InvalidValue(str(error)) from error


def loader(config: ExecutorConfig, own: OwnPostProcessors, module: str | None = None) -> LoadModel:
    """Return the function that loads the model in this process.

    Args:
        config: Configuration with the callables and the vocabulary.
        own: Post-processor that calls the callables of requests. It is used if one process has the whole
            model.
        module: Parameter `logits_post_processor_module`. The module's callables are used if the
            configuration has none.

    Raises:
        ConfigError: An object is not a logits post-processor, or `tokenizer_str` not a tokenizer.
        InvalidValue: A vocabulary is incomplete.
        NotSupported: Callables or a vocabulary would have to be sent to other processes.
    """
    processors, guides = config.logits_post_processor_config, config.guided_decoding_config
    if _starts_ranks(config):
        _refuse_values(processors, guides)
        return load_model
    vocabulary = None if guides is None else _vocabulary(guides)
    if module is not None and not _has_callables(processors):
        return functools.partial(load_model, vocabulary=vocabulary)
    from inflight.sampling import LogitsPostProcessors

    found = processors or LogitsPostProcessorConfig()
    by_name = {name: each for name, each in (found.processor_map or {}).items() if each is not None}
    if OWN_POST_PROCESSOR_NAME in by_name:
        raise InvalidValue(
            f"a logits post-processor is named {OWN_POST_PROCESSOR_NAME!r}, which is reserved for callables of "
            "requests"
        )
    if num_ranks_around() == 1:
        by_name[OWN_POST_PROCESSOR_NAME] = own
    made = LogitsPostProcessors(by_name, found.processor_batched, found.replicate)
    return functools.partial(load_model, processors=made, vocabulary=vocabulary)


def _starts_ranks(config: ExecutorConfig) -> bool:
    parallel = config.parallel_config
    return parallel is not None and parallel.communication_mode is CommunicationMode.ORCHESTRATOR


def _has_callables(processors: LogitsPostProcessorConfig | None) -> bool:
    return processors is not None and bool(processors.processor_map or processors.processor_batched)


def _refuse_values(processors: LogitsPostProcessorConfig | None, guides: GuidedDecodingConfig | None) -> None:
    if _has_callables(processors):
        raise NotSupported(
            "LogitsPostProcessorConfig: callables cannot go to the ranks of an orchestrator; the parameter "
            "logits_post_processor_module names a module that they import"
        )
    if guides is not None and (guides.encoded_vocab or guides.tokenizer_str or guides.stop_token_ids):
        raise NotSupported(
            "GuidedDecodingConfig: a vocabulary cannot go to the ranks of an orchestrator; they read the "
            "checkpoint's tokenizer, or that of the parameter tokenizer_dir"
        )


def _vocabulary(guides: GuidedDecodingConfig) -> GuideVocabulary | None:
    """Return the vocabulary of the configuration; None for the checkpoint's."""
    if guides.encoded_vocab or guides.tokenizer_str is not None:
        return guide_vocabulary(guides.encoded_vocab or (), guides.tokenizer_str, guides.stop_token_ids or ())
    if guides.stop_token_ids:
        raise InvalidValue(
            "GuidedDecodingConfig.stop_token_ids needs encoded_vocab or tokenizer_str: the checkpoint's tokenizer "
            "names its own"
        )
    return None
