"""Errors between the command line and a ready server.

ServeError            starting or running the server failed            exit 1
├── Starved           a start failed that may succeed when repeated    exit 1
└── OptionError       the options ask for something impossible         exit 2
"""


class ServeError(Exception):
    """The server could not be started, or ended by itself. The message has the reason."""

    exit_code = 1


class Starved(ServeError):
    """The server ended before it was ready because one of its processes did not get enough processor time."""


class OptionError(ServeError):
    """An option, a setting or a folder cannot be used. The message names it."""

    exit_code = 2
