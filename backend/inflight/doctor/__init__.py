"""Checks of a machine and its installation before a server is started: `scripts/doctor`.

Each check calls the functions that a start calls. It imports packages when it runs, so that it can report
missing packages on a machine where nothing is installed yet. No other package imports this one. One thread.
"""
