"""The version of the package `inflight`, equal to `bindings.executor.__version__`."""

from inflight.executor import __version__

__all__ = ["__version__"]
