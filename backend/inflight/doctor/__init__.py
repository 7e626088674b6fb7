"""Checks of a machine and its installation before a server is started: `scripts/doctor`.

Each check calls the functions that a start calls. It imports packages when it runs, so that it can report
missing packages on a machine where nothing is installed yet. No other package imports this one. One thread.
"""

import sys

# The modules of this package cannot even be imported by an older Python.
if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(
        "Python {}.{} runs this, which is too old: install Python 3.10, 3.11 or 3.12 "
        "(apt-get install python3.11 python3.11-venv), and start it again".format(*sys.version_info[:2])
    )
