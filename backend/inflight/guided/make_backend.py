"""Creates the backend for a grammar library by the library's name, which imports the library only then."""

from __future__ import annotations

from inflight.errors import ConfigError
from inflight.guided.backend import GuideBackend
from inflight.guided.vocabulary import GuideVocabulary

BACKENDS = ("llguidance", "xgrammar")


def make_backend(name: str, vocabulary: GuideVocabulary) -> GuideBackend:
    """Make the grammar library `name`, one of BACKENDS.

    Raises:
        ConfigError: The library is not installed.
    """
    try:
        if name == "xgrammar":
            from inflight.guided.xgrammar_backend import XGrammarBackend

            return XGrammarBackend(vocabulary)
        from inflight.guided.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(vocabulary)
    except ImportError as error:
        remedy = ": pip install -e '.[guided-xgrammar]' in the checkout" if name == "xgrammar" else ""
        raise ConfigError(
            f"guided_decoding_backend is {name}, which is not installed{remedy} ({error})"
        ) from None
