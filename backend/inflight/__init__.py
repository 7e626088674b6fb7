"""In-flight batching for large language models behind Triton Inference Server."""

import os

# By default torch's threads spin for milliseconds before they sleep, which takes processors from the
# engine's other threads. libgomp reads this variable when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
