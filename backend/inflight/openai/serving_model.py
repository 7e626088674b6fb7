"""The served model: its names, adapters, tokenizer and chat template, for all routes.

Resolves model names, and caches what the engine reports for a limited time. Calls that may block, and the
tokenization of texts, run on the session's threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

from inflight.checkpoint_config import checkpoint_name
from inflight.classification import ClassificationHead, read_classification_head
from inflight.core.ports import EngineClient
from inflight.core.request.adapter_command import AdapterAction, AdapterCommand, AdapterState
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.sleep import SleepAction
from inflight.errors import ConfigError, Unavailable, Unsupported, without_places
from inflight.file_names import native
from inflight.near_words import did_you_mean, listed
from inflight.openai.errors import ApiError, unsupported
from inflight.openai.options import OpenAiOptions
from inflight.pooling import Pooling, Task, find_task, read_pooling
from inflight.serving.chat.template import ChatTemplate, load_chat_template
from inflight.serving.chat.template_files import DEFAULT, read_template_files
from inflight.serving.completion_text import TokenizerFinder
from inflight.text.text_encoder import TextEncoder
from inflight.text.tokenizer import Tokenizer
from inflight.version import package_version

_log = logging.getLogger(__name__)

_ADAPTERS_TIMEOUT_S = 10.0
_COMMAND_TIMEOUT_S = 60.0
_SLEEP_TIMEOUT_S = 10.0
_ADAPTERS_FRESH_S = 1.0
"""Seconds for which a listed adapter is assumed to exist. If it no longer does, the engine refuses the request."""
_ROUTES = {
    Task.GENERATE: "generates text: send requests to /v1/completions or /v1/chat/completions; started with "
    "--convert embed or classify, it would compute embeddings or scores",
    Task.EMBED: "computes embeddings: send texts to /v1/embeddings",
    Task.CLASSIFY: "classifies texts: send them to /v1/classify",
    Task.RERANK: "scores pairs of texts: send them to /v1/rerank or /v1/score",
}
_SLOW_S = 1.0
"""A failed attempt to reach the engine that takes this many seconds is not repeated for as many seconds."""


class ServingModel:
    """Names, adapters, tokenizer and chat template of the model that an engine client serves. Any thread.

    Args:
        client: Client of the engine.
        options: Options of the endpoint.
        has_encoder: Whether there is a process that encodes the model's pictures.
    """

    def __init__(self, client: EngineClient, options: OpenAiOptions, has_encoder: bool = False) -> None:
        self._client = client
        self._has_encoder = has_encoder
        self.options = options
        self._lock = threading.Lock()
        self._loaded: _CheckpointFiles | None = None
        self._reaching = threading.Lock()
        self._failure: Unavailable | None = None
        self._failed_s = 0.0
        self._listing = threading.Lock()
        self._adapters: dict[str, bool] = {}  # by name: whether it was usable when last listed
        self._listed_s = 0.0
        self.encoder = TextEncoder(self.tokenizer)

    def describe(self) -> EngineDescription:
        """Return the engine's description; raise Unavailable if the engine cannot be reached. May block."""
        with self._reaching:
            begun_s = time.monotonic()
            if self._failure is not None and begun_s - self._failed_s < _SLOW_S:
                raise Unavailable(str(self._failure))
            self._failure = None
            try:
                return self._client.describe()
            except Unavailable as error:
                self._failed_s = time.monotonic()
                if self._failed_s - begun_s > _SLOW_S:
                    self._failure = error
                raise

    def check_awake(self) -> None:
        """Raise Unavailable if the engine cannot be reached or sleeps. May block."""
        is_asleep = self.describe().sleep_enabled and self._client.sleep(SleepAction.ASK, _SLEEP_TIMEOUT_S)
        if is_asleep:
            raise Unavailable("the engine sleeps")

    def load(self) -> None:
        """Read the files of the engine's present checkpoint, and log defects of its chat template.

        Called early, so that defects are logged before the first chat, and the first chat does not wait for
        the files. Raises Unavailable if the engine cannot be reached.
        """
        self._checkpoint()

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, loaded by the first call; raise Unsupported if there is none."""
        return self._checkpoint().tokenizer()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the model, the usual name first. The first call may block.

        Without `served_model_names`, the name is the folder of the last served checkpoint, even while the
        engine is unavailable.
        """
        if self.options.served_model_names:
            return self.options.served_model_names
        try:
            loaded = self._checkpoint()
        except Unavailable:
            if self._loaded is None:
                raise
            loaded = self._loaded
        return (checkpoint_name(Path(loaded.description.model_path)) or "model",)

    def adapters(self) -> tuple[AdapterState, ...]:
        """Return the LoRA adapters that have names, including those that cannot be loaded. May block."""
        try:
            states = self._client.adapters(AdapterCommand(AdapterAction.LIST), _ADAPTERS_TIMEOUT_S)
        except Unsupported:
            return ()
        return tuple(state for state in states if state.name)

    def command_adapters(self, command: AdapterCommand) -> None:
        """Execute a command about adapters. May block; raises the command's own error."""
        states = self._client.adapters(command, _COMMAND_TIMEOUT_S)
        with self._listing:
            self._note_adapters(state for state in states if state.name)

    def _note_adapters(self, states: Iterable[AdapterState]) -> None:
        self._adapters = {state.name: not state.problem for state in states}
        self._listed_s = time.monotonic()

    def adapter_of(self, model: str | None) -> str:
        """Return the adapter that a body's `model` names; "" for the model itself.

        Raises ApiError (404) for an unknown name. Must be the first call for each body: it waits for the
        engine and the checkpoint's files, so it may block.
        """
        self.load()
        if model is None or model in self.names:
            return ""
        with self._listing:
            is_fresh = time.monotonic() - self._listed_s < _ADAPTERS_FRESH_S
            if not (is_fresh and model in self._adapters):  # a new adapter can be used at once
                self._note_adapters(self.adapters())
            adapters = self._adapters
        if model in adapters:  # an adapter that failed is loaded again, and the engine reports the reason
            return model
        known = (*self.names, *(name for name, is_usable in adapters.items() if is_usable))
        raise unknown_model(model, known)

    def has_adapter(self, name: str) -> bool:
        """Return whether a body's `model` may name this adapter; not of an engine that is away. May block."""
        try:
            return bool(self.adapter_of(name))
        except (ApiError, Unavailable):
            return False

    def known_names(self) -> tuple[str, ...]:
        """Return the names of the model; an engine that was never reached has none. May block."""
        try:
            return self.names
        except Unavailable:
            return ()

    def check_task(self, wanted: Collection[Task]) -> None:
        """Raise ApiError unless the model is served for one of the tasks `wanted`."""
        task = self.task()
        if task not in wanted:
            raise ApiError(f"this server {_ROUTES[task]}", 400, "model", "unsupported_model")

    def task(self) -> Task:
        """Return the task for which the model is served."""
        return self._checkpoint().task

    def pooling(self) -> Pooling:
        """Return how the model's embeddings are made."""
        return self._checkpoint().pooling

    def classification_head(self) -> ClassificationHead:
        """Return the head of a model for sequence classification."""
        return self._checkpoint().head

    def encode(
        self, texts: Sequence[str], add_special_tokens: bool = True, field: str = "prompt"
    ) -> list[list[int]]:
        """Return the token ids of each text.

        Raises InvalidArgument, which names `field`, if a text is too long.
        """
        for text in texts:
            self.check_length(text, field)
        return self.tokenizer().encode_batch(texts, add_special_tokens)

    def check_length(self, text: str, field: str) -> None:
        """Raise InvalidArgument, which names `field`, if a text is too long to be a prompt."""
        self.encoder.check_prompt_length(len(text.encode()), field, self.describe().limits)

    def takes_pictures(self) -> bool:
        """Return whether chats may have pictures. May block; raises as `chat_template` does."""
        return self.chat_template().takes_pictures and self._has_encoder

    def chat_template(self) -> ChatTemplate:
        """Return the chat template; raise ApiError if there is no usable one."""
        template = self._checkpoint().template()
        if template is None:
            raise unsupported(
                "messages",
                "this model has no chat template: start the server with --chat-template FILE, or send a prompt to "
                "/v1/completions",
            )
        return template

    def tokenizer_info(self) -> dict[str, str | None]:
        """Return the texts of special tokens and the chat template, by transformers' names for them.

        Reads files. Raises Unsupported if there is no tokenizer, ApiError if the template cannot be read.
        """
        tokenizer, description = self.tokenizer(), self.describe()
        try:
            files = read_template_files(description.tokenizer_dir, self.options.chat_template)
        except ConfigError as error:
            raise _template_error(str(error)) from None
        info: dict[str, str | None] = {**files.special_tokens, "chat_template": files.sources.get(DEFAULT)}
        for end_id in description.eos_token_ids[:1]:
            info.setdefault("eos_token", tokenizer.decode([end_id], skip_special_tokens=False))
        return info

    def reasoning_parser(self) -> str:
        """Return the name of the parser of the model's reasoning, "" for none; raises as `chat_template` does."""
        return chosen_parser(self.options.reasoning_parser, self.chat_template().reasoning_style)

    @property
    def fingerprint(self) -> str:
        """Return OpenAI's `system_fingerprint`: a hash of package version, checkpoint, dtype and limits."""
        description = self._checkpoint().description
        # `num_blocks` is left out, because it depends on the memory that was free at the start.
        limits = replace(description.limits, num_blocks=0)
        told = repr((package_version(), description.model_path, description.dtype, limits))
        return f"fp_{blake2b(told.encode(errors='surrogatepass'), digest_size=5).hexdigest()}"

    @property
    def token_bytes(self) -> list[bytes]:
        """Return the bytes that each token adds to a text, indexed by token id."""
        return self._checkpoint().token_bytes()

    def _checkpoint(self) -> _CheckpointFiles:
        """Return the checkpoint of the present engine, with its files loaded."""
        description = self.describe()
        with self._lock:
            if self._loaded is None or self._loaded.description is not description:
                self._loaded = _CheckpointFiles(description, self.options)
            loaded = self._loaded
        loaded.load()
        return loaded


def unknown_model(name: str, known: Sequence[str]) -> ApiError:
    """Return the error for a body's `model` that is not one of the `known` names."""
    hint = did_you_mean(name, known)
    message = f"the model {name[:200]!r} does not exist; this server has {listed(known)}{hint}"
    return ApiError(message, 404, "model", "model_not_found")


def chosen_parser(option: str, of_template: str) -> str:
    """Return the parser that an option names; "" for none.

    Args:
        option: `auto`, `none`, or a parser.
        of_template: The parser that `auto` means.
    """
    if option == "auto":
        return of_template
    return "" if option == "none" else option


def _template_error(problem: str) -> ApiError:
    return ApiError(
        f"chats cannot be answered: {without_places(problem)}. Start the server with --chat-template FILE, or "
        "send a prompt to /v1/completions",
        500,
        None,
        "chat_template_error",
    )


class _CheckpointFiles:
    """The files of one checkpoint; any thread.

    Every connection to an engine has its own description object. If the object differs, the engine may have
    been loaded again, possibly with changed files in the same folder.

    Attributes:
        description: Description of the engine.
    """

    def __init__(self, description: EngineDescription, options: OpenAiOptions) -> None:
        self.description = description
        self._folder = Path(native(description.model_path))
        self._convert = options.convert
        self._template_file = options.chat_template
        self._finds_calls = options.tool_call_parser == "auto"
        self._lock = threading.Lock()
        self._finder = TokenizerFinder(None)
        self._is_loaded = False
        self._template: ChatTemplate | None = None
        self._problem: str | None = None
        self._token_bytes: list[bytes] | None = None

    @cached_property
    def task(self) -> Task:
        return find_task(self._folder, self._convert)

    @cached_property
    def head(self) -> ClassificationHead:
        return read_classification_head(self._folder)

    @cached_property
    def pooling(self) -> Pooling:
        return read_pooling(self._folder) or Pooling()

    def load(self) -> None:
        """Read the tokenizer and the chat template once.

        `tokenizer` and `template` raise errors that occur here.
        """
        with self._lock:
            folder = self.description.tokenizer_dir
            if self._is_loaded:
                return
            self._is_loaded = True
            if self._finder.find(folder) is None:
                return
            try:
                self._template = load_chat_template(folder, self._template_file)
            except Exception as error:  # whatever the error, completions work without a template
                self._problem = str(error)
                _log.error("chats will be refused: %s", error)
            template = self._template
            if template is not None and template.takes_tools and not template.style and self._finds_calls:
                _log.warning(
                    "%s: chats with tools are answered for tool_choice required, a named function, and none; for "
                    "others choose a --tool-call-parser",
                    template.unknown_calls(),
                )

    def tokenizer(self) -> Tokenizer:
        with self._lock:
            return self._finder.require(self.description.tokenizer_dir)

    def template(self) -> ChatTemplate | None:
        self.tokenizer()  # raises the reason if there is no tokenizer
        if self._problem is not None:
            raise _template_error(self._problem)
        return self._template

    def token_bytes(self) -> list[bytes]:
        tokenizer = self.tokenizer()
        with self._lock:
            if self._token_bytes is None:
                self._token_bytes = tokenizer.token_bytes()
            return self._token_bytes
