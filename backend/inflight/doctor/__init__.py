"""Checks of a machine and its installation before a server is started: `scripts/doctor`.

Each check asks the functions that a start asks too, and imports what it needs while it runs, so that it can say
what is missing on a machine where nothing is installed yet. Nothing else imports this package. One thread.
"""
