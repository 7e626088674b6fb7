"""The model that is served, as every route needs it: its names, its tokenizer, and bodies' texts as ids.

Owns which model a name means, and for how long what the engine said of itself holds. Does not know routes.
Everything that may block runs on the session's threads; the texts of a request are tokenized there too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from inflight.core.ports import EngineClient
from inflight.core.request.adapter_command import AdapterAction, AdapterCommand, AdapterState
from inflight.core.request.engine_description import EngineDescription
from inflight.errors import Unavailable, Unsupported, without_places
from inflight.hub import checkpoint_name
from inflight.openai.errors import ApiError, unsupported
from inflight.openai.options import OpenAiOptions
from inflight.serving.chat.template import ChatTemplate, load_chat_template
from inflight.serving.completion_text import TokenizerFinder
from inflight.text.text_encoder import TextEncoder
from inflight.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_ADAPTERS_TIMEOUT_S = 10.0
_ADAPTERS_FRESH_S = 1.0
"""For how long an adapter that was there counts as being there still; the engine refuses one that is not."""
_SLOW_S = 1.0
"""A failure to reach the engine that took longer is remembered for so long, or each request would wait as much."""


def package_version() -> str:
    """The version of this package; unknown where it is not installed."""
    try:
        return version("inflight")
    except PackageNotFoundError:
        return "unknown"


class ServingModel:
    """The served model's names, tokenizer and template, beside the engine client itself; any thread."""

    def __init__(self, client: EngineClient, options: OpenAiOptions) -> None:
        self._client = client
        self.options = options
        self._lock = threading.Lock()
        self._loaded: _Checkpoint | None = None
        self._reaching = threading.Lock()
        self._failure: Unavailable | None = None
        self._failed_s = 0.0
        self._listing = threading.Lock()
        self._adapters: dict[str, bool] = {}  # by name: whether it can be used, as far as is known
        self._listed_s = 0.0
        self.encoder = TextEncoder(self.tokenizer)

    def describe(self) -> EngineDescription:
        """The engine's description; raises Unavailable while there is none. May block."""
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

    def load(self) -> None:
        """Read the files of the checkpoint that the engine has now, and log what is wrong with its chat template.

        So that this is known before the first chat, and that need not wait for it. Raises Unavailable while there
        is no engine.
        """
        self._checkpoint()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises Unsupported without one. Loads it the first time."""
        return self._checkpoint().tokenizer()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model, the usual name first. May block the first time.

        Without names of its own it is the checkpoint's that was served last, also while the engine is away.
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
        """The LoRA adapters with names, those among them that cannot be loaded. May block."""
        try:
            states = self._client.adapters(AdapterCommand(AdapterAction.LIST), _ADAPTERS_TIMEOUT_S)
        except Unsupported:
            return ()
        return tuple(state for state in states if state.name)

    def adapter_of(self, model: str | None) -> str:
        """The adapter that a body's `model` means, "" for the bare model; an error 404 for a name of neither.

        The first that is asked for a body, and where it waits for the engine and its files: may block.
        """
        self.load()
        if model is None or model in self.names:
            return ""
        with self._listing:
            is_fresh = time.monotonic() - self._listed_s < _ADAPTERS_FRESH_S
            if not (is_fresh and model in self._adapters):  # a new one can be named at once
                self._adapters = {state.name: not state.problem for state in self.adapters()}
                self._listed_s = time.monotonic()
            adapters = self._adapters
        if model in adapters:  # one that could not be loaded is tried again, and says why it cannot
            return model
        known = ", ".join((*self.names, *(name for name, is_usable in adapters.items() if is_usable)))
        raise ApiError(
            f"the model {model[:200]!r} does not exist; this server has {known}",
            404,
            "model",
            "model_not_found",
        )

    def encode(
        self, texts: Sequence[str], add_special_tokens: bool = True, field: str = "prompt"
    ) -> list[list[int]]:
        """Ids of each text; raises InvalidArgument, which names `field`, for one that is too long in any case."""
        limits = self.describe().limits
        for text in texts:
            self.encoder.check_prompt_length(len(text.encode()), field, limits)
        return self.tokenizer().encode_batch(texts, add_special_tokens)

    def chat_template(self) -> ChatTemplate:
        """The chat template; raises ApiError without one that can be used."""
        template = self._checkpoint().template()
        if template is None:
            raise unsupported(
                "messages",
                "this model has no chat template: start the server with --chat-template FILE, or send a prompt to "
                "/v1/completions",
            )
        return template

    @property
    def fingerprint(self) -> str:
        """A name of what makes the answers: the package, the checkpoint, and the limits that it is served with.

        The same as long as these are the same, OpenAI's `system_fingerprint`.
        """
        description = self._checkpoint().description
        limits = replace(description.limits, num_blocks=0)  # which follow the memory that is free at a start
        told = repr((package_version(), description.model_path, description.dtype, limits))
        return f"fp_{blake2b(told.encode(errors='surrogatepass'), digest_size=5).hexdigest()}"

    @property
    def token_bytes(self) -> list[bytes]:
        """By id, the bytes that each token adds to a text."""
        return self._checkpoint().token_bytes()

    def _checkpoint(self) -> _Checkpoint:
        """The checkpoint of the present engine, as loaded here."""
        description = self.describe()
        with self._lock:
            if self._loaded is None or self._loaded.description is not description:
                self._loaded = _Checkpoint(description, self.options)
            loaded = self._loaded
        loaded.load()
        return loaded


class _Checkpoint:
    """The files of one checkpoint; any thread.

    Every connection to an engine has a description of its own, so that another one is the mark of an engine that
    may have been loaded again, from the same folder too.

    Attributes:
        description: The engine's.
    """

    def __init__(self, description: EngineDescription, options: OpenAiOptions) -> None:
        self.description = description
        self._template_file = options.chat_template
        self._finds_calls = options.tool_call_parser == "auto"
        self._lock = threading.Lock()
        self._finder = TokenizerFinder(None)
        self._is_loaded = False
        self._template: ChatTemplate | None = None
        self._problem: str | None = None
        self._token_bytes: list[bytes] | None = None

    def load(self) -> None:
        """Read the tokenizer and the chat template, once; those who need them are told what is wrong with them."""
        with self._lock:
            folder = self.description.tokenizer_dir
            if self._is_loaded:
                return
            self._is_loaded = True
            if self._finder.find(folder) is None:
                return
            try:
                self._template = load_chat_template(folder, self._template_file)
            except Exception as error:  # whatever a broken file raises: completions are served all the same
                self._problem = without_places(str(error))
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
        self.tokenizer()  # a model without one has no chats either, and says why
        if self._problem is not None:
            raise ApiError(
                f"chats cannot be answered: {self._problem}. Start the server with --chat-template FILE, or send "
                "a prompt to /v1/completions",
                500,
                None,
                "chat_template_error",
            )
        return self._template

    def token_bytes(self) -> list[bytes]:
        tokenizer = self.tokenizer()
        with self._lock:
            if self._token_bytes is None:
                self._token_bytes = tokenizer.token_bytes()
            return self._token_bytes
