"""Receipts: a request, its answer, and the model and settings that made it, so that it can be re-run."""
