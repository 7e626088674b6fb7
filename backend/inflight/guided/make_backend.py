"""Creates the backend for a grammar library by the library's name, which imports the library only then."""

from __future__ import annotations

from importlib.util import find_spec

from inflight.errors import ConfigError
from inflight.extras import how_to_install
from inflight.guided.backend import GuideBackend
from inflight.guided.reasoning_budget import ReasoningBackend
from inflight.guided.vocabulary import GuideVocabulary

BACKENDS = ("llguidance", "xgrammar")


def make_backend(name: str, vocabulary: GuideVocabulary) -> GuideBackend:
    """Make the grammar library `name`, one of BACKENDS.

    Raises:
        ConfigError: The library is not installed.
    """
    check_installed(name)
    try:
        if name == "xgrammar":
            from inflight.guided.xgrammar_backend import XGrammarBackend

            return ReasoningBackend(XGrammarBackend(vocabulary), vocabulary)
        from inflight.guided.llguidance_backend import LLGuidanceBackend

        return ReasoningBackend(LLGuidanceBackend(vocabulary), vocabulary)
    except ImportError as error:
        raise _not_installed(name, str(error)) from None


def check_installed(name: str) -> None:
    """Raise ConfigError if the grammar library `name`, which is not imported, is not installed."""
    if find_spec(name) is None:
        raise _not_installed(name, f"No module named {name!r}")


def _not_installed(name: str, why: str) -> ConfigError:
    remedy = f": {how_to_install('guided-xgrammar')}" if name == "xgrammar" else ""
    return ConfigError(f"guided_decoding_backend is {name}, which is not installed{remedy} ({why})")
