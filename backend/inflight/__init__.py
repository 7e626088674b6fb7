"""In-flight batching for large language models behind Triton Inference Server."""

import os

# By default torch's threads look for more work for milliseconds before they sleep, and keep the engine's own off
# the processors meanwhile. libgomp reads this when it is loaded, that is, when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
