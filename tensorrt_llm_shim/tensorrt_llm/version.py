"""The version of the package behind the name, which `bindings.executor.__version__` is too."""

from inflight.executor import __version__

__all__ = ["__version__"]
