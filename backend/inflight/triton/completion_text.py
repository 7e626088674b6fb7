"""Text of prompts and completions: finds the model's tokenizer, and turns a sequence's tokens into text.

Owns when a tokenizer is loaded and what text_output starts with. Does not know tensors. The tokenizer is found
on the thread that calls execute; a CompletionText belongs to the sender thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from inflight.core.response import Result
from inflight.core.stop import FinishReason
from inflight.errors import Unsupported
from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.tokenizer import Tokenizer

# What comes before a completion decides how it starts, by a space or not; the last few ids are enough.
_PREFIX_TOKENS = 32

# Such a request has no output: no more ids, and neither a prompt nor a completion as text.
_CUT_SHORT = frozenset({FinishReason.CANCELLED, FinishReason.TIMED_OUT})

_log = logging.getLogger(__name__)


class TokenizerFinder:
    """Loads a model's tokenizer once, as soon as it is known where it is."""

    def __init__(self, directory: str | None, load: Callable[[str], Tokenizer] = Tokenizer.from_dir) -> None:
        """Args:
        directory: Parameter tokenizer_dir; None takes the folder that the engine names.
        load: From a folder to a tokenizer; raises for a folder that has none.
        """
        self._directory = directory
        self._load = load
        self._found: Tokenizer | None = None
        self._problem: str | None = None

    def find(self, engine_directory: str = "") -> Tokenizer | None:
        """The tokenizer of parameter tokenizer_dir, else of `engine_directory`; None if there is none."""
        if self._found is None and self._problem is None:
            self._look(self._directory or engine_directory)
        return self._found

    def require(self, engine_directory: str = "") -> Tokenizer:
        """The same; raises Unsupported with the reason why there is none."""
        tokenizer = self.find(engine_directory)
        if tokenizer is None:
            raise Unsupported(f"this model serves no text: {self._problem}")
        return tokenizer

    def _look(self, directory: str) -> None:
        if not directory:
            self._problem = "its checkpoint has no tokenizer.json, and parameter tokenizer_dir is not set"
            return
        try:
            self._found = self._load(directory)
        except Exception as error:  # whatever a broken file raises: ids are served all the same
            self._problem = str(error)
            _log.warning("text will be refused: %s", error)


class CompletionText:
    """text_output of one request, as its responses come.

    A completion's text continues its prompt's: where the two need a space between them, the completion brings it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: tuple[int, ...], prompt_text: str | None, lead: bool
    ) -> None:
        """Args:
        tokenizer: Of the model.
        prompt_ids: The prompt.
        prompt_text: The prompt as it came; None if it came as ids.
        lead: Whether the text starts with the prompt.
        """
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._prompt_text = prompt_text
        self._lead = lead
        # Made with the first response: on the sender thread, and not for a request that never has one.
        self._detokenizer: IncrementalDetokenizer | None = None

    def add(self, result: Result, is_final: bool) -> str:
        """The text that `result` adds; bytes of an unfinished character wait for the next one."""
        lead = ""
        if self._detokenizer is None:
            prefix_ids = self._prompt_ids[-_PREFIX_TOKENS:]
            self._detokenizer = IncrementalDetokenizer(self._tokenizer, prefix_ids=prefix_ids)
            lead = self._prompt() if self._lead and result.finish_reason not in _CUT_SHORT else ""
        first_new = len(result.output_token_ids) - result.num_output_tokens
        text = lead + self._detokenizer.add(result.output_token_ids[first_new:])
        return text + self._detokenizer.flush() if is_final else text

    def _prompt(self) -> str:
        return self._tokenizer.decode(self._prompt_ids) if self._prompt_text is None else self._prompt_text
